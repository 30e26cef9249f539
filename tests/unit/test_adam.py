"""Our Adam takes PyTorch's steps, goes on from a checkpoint, and imports no compiler."""

import subprocess
import sys

import pytest
import torch

from agent.learning.adam import Adam


def parameters() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((4, 3), (3,))]


def take(optimiser: Adam | torch.optim.Adam, weights: list[torch.Tensor], steps: int) -> None:
    for step in range(steps):
        optimiser.zero_grad()
        loss = sum(((weight - step) ** 2).sum() * 0.1 for weight in weights)
        torch.autograd.backward(torch.as_tensor(loss))
        optimiser.step()


def test_every_step_is_that_of_pytorch() -> None:
    ours, theirs = parameters(), parameters()
    take(Adam(ours, rate=1e-2), ours, 50)
    take(torch.optim.Adam(theirs, lr=1e-2, eps=1e-5), theirs, 50)
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-6, atol=1e-7)


def test_it_goes_on_from_its_state_as_if_it_had_never_stopped() -> None:
    stopped = parameters()
    first = Adam(stopped, rate=1e-2)
    take(first, stopped, 3)
    again = Adam(stopped, rate=1e-2)
    again.restore(first.state())
    take(again, stopped, 3)
    whole = parameters()
    optimiser = Adam(whole, rate=1e-2)
    take(optimiser, whole, 3)
    take(optimiser, whole, 3)
    for mine, reference in zip(stopped, whole, strict=True):
        assert torch.equal(mine, reference)


def test_a_state_of_other_tensors_is_refused() -> None:
    fresh = Adam(parameters(), rate=1e-2)
    trained = parameters()
    optimiser = Adam(trained, rate=1e-2)
    take(optimiser, trained, 1)
    state = optimiser.state()
    with pytest.raises(ValueError, match="moments are"):
        fresh.restore({name: value for name, value in state.items() if name != "step"})
    with pytest.raises(ValueError, match="exp_avg 0 is"):
        fresh.restore(state | {"0.exp_avg": torch.zeros(2)})


def test_a_learner_does_not_import_the_compiler() -> None:
    code = (
        "import sys, agent.learning.ppo as p; p.Ppo(p.PpoSettings(), seed=0);"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
