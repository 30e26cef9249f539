"""FedProx's term is half of mu times the squared distance, for every minibatch."""

import numpy as np
import pytest
import torch

from agent.learning.network import Network
from agent.learning.proximal import Proximal, proximal_term
from common.policy import initial_arrays


def test_term_is_half_mu_times_the_squared_distance() -> None:
    # Differences (1, −2) and (3): 0.1 / 2 · (1 + 4 + 9) = 0.7. Not squared it would be 0.187.
    weights = [torch.tensor([2.0, 0.0], requires_grad=True), torch.tensor([[3.0]])]
    anchor = [torch.tensor([1.0, 2.0]), torch.tensor([[0.0]])]
    term = proximal_term(weights, anchor, mu=0.1)
    assert term.item() == pytest.approx(0.7)
    # Its gradient is mu · (w − w_global).
    (gradient,) = torch.autograd.grad(term, weights[0])
    torch.testing.assert_close(gradient, torch.tensor([0.1, -0.2]))


def test_the_anchor_holds_in_every_minibatch() -> None:
    network = Network()
    proximal = Proximal(network)
    shared = initial_arrays()
    shared["correction.bias"] += 2.0
    proximal.set(shared, mu=0.5)
    # 0.5 / 2 · 2² = 1, again and again.
    assert [proximal.term().item() for _ in range(3)] == pytest.approx([1.0] * 3)
    assert proximal.distance() == pytest.approx(2.0)


def test_the_anchor_is_a_copy_and_does_not_move_with_the_network() -> None:
    network = Network()
    proximal = Proximal(network)
    shared = initial_arrays()
    proximal.set(shared, mu=1.0)
    shared["correction.bias"] += 5.0
    with torch.no_grad():
        network.correction.bias += 1.0
    assert proximal.distance() == pytest.approx(1.0)
    np.testing.assert_array_equal(proximal.arrays()["correction.bias"], [0.0])


def test_without_an_anchor_or_with_mu_zero_nothing_pulls() -> None:
    network = Network()
    proximal = Proximal(network)
    assert proximal.term().item() == 0.0
    assert proximal.distance() == 0.0
    assert proximal.arrays() == {}
    shared = initial_arrays()
    shared["correction.bias"] += 3.0
    proximal.set(shared, mu=0.0)
    assert proximal.term().item() == 0.0
    assert proximal.distance() == pytest.approx(3.0)


@pytest.mark.parametrize("mu", [-0.1, float("nan"), float("inf")])
def test_a_mu_that_would_push_away_is_refused(mu: float) -> None:
    with pytest.raises(ValueError, match="mu"):
        Proximal(Network()).set(initial_arrays(), mu)


def test_an_anchor_of_another_architecture_is_refused() -> None:
    shared = initial_arrays()
    shared["correction.bias"] = np.zeros(2, np.float32)
    with pytest.raises(ValueError, match=r"correction\.bias"):
        Proximal(Network()).set(shared, 0.1)
