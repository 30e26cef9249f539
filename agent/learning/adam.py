"""Adam on a handful of small tensors, for ``agent.learning.algorithm`` and the latency benchmark.

The first use of ``torch.optim`` imports torch's compiler: five seconds of a core and 100 MiB in
every learner, for one formula. Source: Kingma and Ba, "Adam: a method for stochastic optimization",
ICLR 2015, algorithm 1, with the corrections of the bias applied to the step.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

DECAY_MEAN, DECAY_SQUARE = 0.9, 0.999
"""How much of the running means of gradient and squared gradient is kept at each step."""


class Adam:
    """The optimiser of ``parameters``; ``rate`` is the step size, ``eps`` keeps it finite."""

    def __init__(self, parameters: Iterable[Tensor], *, rate: float, eps: float = 1e-5) -> None:
        self._parameters = list(parameters)
        self.rate, self._eps = rate, eps
        self._mean = [torch.zeros_like(weight) for weight in self._parameters]
        self._square = [torch.zeros_like(weight) for weight in self._parameters]
        self._steps = 0

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for weight in self._parameters:
            weight.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Move every parameter that has a gradient."""
        self._steps += 1
        step_size = self.rate / (1.0 - DECAY_MEAN**self._steps)
        correction = math.sqrt(1.0 - DECAY_SQUARE**self._steps)
        for weight, mean, square in zip(self._parameters, self._mean, self._square, strict=True):
            if weight.grad is not None:
                mean.lerp_(weight.grad, 1.0 - DECAY_MEAN)
                square.mul_(DECAY_SQUARE).addcmul_(weight.grad, weight.grad, value=1 - DECAY_SQUARE)
                weight.addcdiv_(
                    mean, (square.sqrt() / correction).add_(self._eps), value=-step_size
                )

    def state(self) -> dict[str, Tensor]:
        """Copies of the moments by name, and the count of steps; nothing before the first step."""
        if not self._steps:
            return {}
        moments = zip(self._mean, self._square, strict=True)
        found = {"step": torch.tensor(float(self._steps))}
        for index, (mean, square) in enumerate(moments):
            found[f"{index}.exp_avg"] = mean.clone()
            found[f"{index}.exp_avg_sq"] = square.clone()
        return found

    def restore(self, state: dict[str, Tensor]) -> None:
        """Go on from what :meth:`state` gave. Raises KeyError or ValueError where it is no such."""
        names = {f"{i}.{key}" for i in range(len(self._mean)) for key in ("exp_avg", "exp_avg_sq")}
        if state and state.keys() != names | {"step"}:
            raise ValueError(f"Adam's moments are {sorted(state)}")
        for index, (mean, square) in enumerate(zip(self._mean, self._square, strict=True)):
            for kept, key in ((mean, "exp_avg"), (square, "exp_avg_sq")):
                new = state.get(f"{index}.{key}", torch.zeros_like(kept))
                if new.shape != kept.shape:
                    raise ValueError(f"Adam's {key} {index} is {tuple(new.shape)}")
                kept.copy_(new)
        self._steps = int(state["step"]) if state else 0
