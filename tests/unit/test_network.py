"""The trainable network is the production kernel's, and its policy keeps to the candidates."""

import numpy as np
import pytest
import torch

from agent.learning.network import (
    Network,
    load_arrays,
    policy_entropy,
    policy_log_probs,
    to_arrays,
)
from agent.scheduling.scorer import corrections, scorer
from common.features import FEATURE_COUNT
from common.policy import BOUND, initial_arrays
from common.weights import Arrays
from tests.unit.tiny_problems import probabilities


def random_arrays(seed: int, deviation: float = 0.5) -> Arrays:
    rng = np.random.default_rng(seed)
    return {
        name: (array + deviation * rng.normal(size=array.shape) / 7.0).astype(np.float32)
        for name, array in initial_arrays(seed).items()
    }


def network_of(arrays: Arrays) -> Network:
    network = Network()
    load_arrays(network, arrays)
    return network


@pytest.mark.parametrize("seed", range(3))
def test_network_and_kernel_compute_the_same_corrections(seed: int) -> None:
    arrays = random_arrays(seed)
    features = np.random.default_rng(seed).normal(0.0, 1.5, (40, FEATURE_COUNT)).astype(np.float32)
    features[::3, 5:20] = 0.0

    by_kernel = np.zeros(40)
    corrections(scorer(arrays), features, 40, by_kernel)
    with torch.no_grad():
        mask = torch.ones(1, 40, dtype=torch.bool)
        by_network, _ = network_of(arrays)(torch.from_numpy(features)[None], mask)

    assert by_kernel.std() > 0.1
    np.testing.assert_allclose(by_network[0].numpy(), by_kernel, atol=1e-5)


@pytest.mark.parametrize("rows", [64, 65, 500])
def test_candidates_that_look_alike_get_what_each_would_get_alone(rows: int) -> None:
    rng = np.random.default_rng(rows)
    net = scorer(random_arrays(7))
    different = rng.normal(0.0, 1.5, (rows // 3, FEATURE_COUNT)).astype(np.float32)
    different[1] = different[0]
    different[1, -1] += 1.0  # alike but for one figure
    features = different[rng.permutation(np.arange(rows) % len(different))]
    together, alone = np.zeros(rows), np.zeros(rows)
    corrections(net, features, rows, together)
    for row in range(rows):
        corrections(net, features[row : row + 1].copy(), 1, alone[row : row + 1])
    assert together.tolist() == alone.tolist()
    assert len(set(alone)) == len(different)


def test_kernel_and_network_agree_on_action_probabilities() -> None:
    arrays = random_arrays(5)
    rng = np.random.default_rng(5)
    features = rng.normal(size=(4, FEATURE_COUNT)).astype(np.float32)
    rule = np.array([0.0, -0.2, -0.7, -1.0])
    with torch.no_grad():
        mask = torch.ones(1, 4, dtype=torch.bool)
        correction, _ = network_of(arrays)(torch.from_numpy(features)[None], mask)
        scores = torch.from_numpy(rule.astype(np.float32)) + correction
        by_network = policy_log_probs(scores, mask, 0.25).exp()
    np.testing.assert_allclose(by_network[0], probabilities(arrays, features, rule), atol=1e-5)


def test_weights_carry_the_names_and_values_of_the_shared_description() -> None:
    start = initial_arrays(3)
    arrays = to_arrays(Network(seed=3))
    assert list(arrays) == list(start)
    for name, array in arrays.items():
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, start[name])


def test_arrays_are_copies_in_both_directions() -> None:
    arrays = initial_arrays()
    network = network_of(arrays)
    arrays["correction.bias"][0] = 9.0
    to_arrays(network)["correction.bias"][0] = 9.0
    assert network.correction.bias.item() == 0.0


@pytest.mark.parametrize("fault", ["nan", "shape", "missing"])
def test_bad_arrays_are_refused_and_the_network_stays(fault: str) -> None:
    network = Network(seed=1)
    arrays = initial_arrays(2)
    if fault == "nan":
        arrays["correction.bias"][0] = np.nan
    elif fault == "shape":
        arrays["correction.bias"] = np.zeros(2, np.float32)
    else:
        del arrays["correction.bias"]
    with pytest.raises(ValueError, match=r"correction\.bias"):
        load_arrays(network, arrays)
    for name, array in to_arrays(network).items():
        np.testing.assert_array_equal(array, initial_arrays(1)[name])


def test_a_fresh_network_is_the_rule_and_values_every_state_at_zero() -> None:
    features = torch.randn(2, 3, FEATURE_COUNT, generator=torch.Generator().manual_seed(0))
    correction, value = Network()(features, torch.ones(2, 3, dtype=torch.bool))
    assert torch.equal(correction, torch.zeros(2, 3))
    assert torch.equal(value, torch.zeros(2))


def test_corrections_stay_within_the_bound_whatever_the_weights() -> None:
    network = network_of(random_arrays(0, deviation=50.0))
    features = torch.randn(1, 50, FEATURE_COUNT, generator=torch.Generator().manual_seed(0))
    correction, _ = network(features, torch.ones(1, 50, dtype=torch.bool))
    assert correction.abs().max().item() == pytest.approx(BOUND)


def test_padding_changes_neither_value_nor_corrections() -> None:
    network = network_of(random_arrays(4))
    features = torch.randn(1, 2, FEATURE_COUNT, generator=torch.Generator().manual_seed(1))
    padded = torch.cat([features, torch.full((1, 3, FEATURE_COUNT), 7.0)], 1)
    mask = torch.tensor([[True, True, False, False, False]])
    with torch.no_grad():
        bare_correction, bare_value = network(features, mask[:, :2])
        correction, value = network(padded, mask)
    torch.testing.assert_close(value, bare_value)
    torch.testing.assert_close(correction[:, :2], bare_correction)
    assert torch.equal(correction[:, 2:], torch.zeros(1, 3))


def test_value_is_read_from_the_mean_of_the_candidates() -> None:
    network = network_of(random_arrays(4))
    features = torch.randn(1, 2, FEATURE_COUNT, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        _, once = network(features, torch.ones(1, 2, dtype=torch.bool))
        _, twice = network(features.repeat(1, 2, 1), torch.ones(1, 4, dtype=torch.bool))
    torch.testing.assert_close(once, twice)


def test_masked_candidates_have_probability_exactly_zero() -> None:
    # Scores 0 and −0.25·ln 3 at temperature 0.25: odds 3 to 1. The padding's 9 counts for nothing.
    scores = torch.tensor([[0.0, 9.0, -0.25 * float(np.log(3.0))]], requires_grad=True)
    mask = torch.tensor([[True, False, True]])
    log_probs = policy_log_probs(scores, mask, 0.25)
    assert log_probs.exp()[0, 1].item() == 0.0
    torch.testing.assert_close(log_probs.exp().detach(), torch.tensor([[0.75, 0.0, 0.25]]))

    entropy = policy_entropy(log_probs)
    # −0.75 ln 0.75 − 0.25 ln 0.25 = 0.5623
    assert entropy.item() == pytest.approx(0.5623, abs=1e-4)
    (gradient,) = torch.autograd.grad(entropy.sum() + log_probs[0, 0], scores)
    assert torch.isfinite(gradient).all()
    assert gradient[0, 1] == 0.0
