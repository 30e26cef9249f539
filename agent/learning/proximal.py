"""FedProx's proximal term, which holds a member's weights near the shared ones; PPO and DQN add it.

T. Li et al., Federated Optimization in Heterogeneous Networks, https://arxiv.org/abs/1812.06127.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from common.weights import Arrays, check_same_form


def proximal_term(parameters: Iterable[Tensor], anchor: list[Tensor], mu: float) -> Tensor:
    """``mu / 2 · ‖w − w_global‖²``: half the squared Euclidean distance over all tensors, times mu.

    Args:
        parameters: the weights being trained.
        anchor: the shared weights, in the same order and shapes. A list, since an iterator would
            be used up by the first minibatch and hold nothing back in the others.
        mu: strength, at least 0.
    """
    squares = [
        (w - w_global).square().sum() for w, w_global in zip(parameters, anchor, strict=True)
    ]
    return 0.5 * mu * torch.stack(squares).sum()


class Proximal:
    """The shared policy as an anchor of one module's training; without one the term is 0."""

    def __init__(self, module: nn.Module) -> None:
        self.mu = 0.0
        self._names = [name for name, _ in module.named_parameters()]
        self._parameters = list(module.parameters())
        self._anchor: list[Tensor] = []

    def set(self, arrays: Arrays, mu: float) -> None:
        """Anchor at a copy of ``arrays``; ``mu`` 0 measures the distance but exerts no pull.

        Raises:
            ValueError: ``mu`` is negative or not finite, or the arrays are not this module's.
        """
        if not (math.isfinite(mu) and mu >= 0.0):
            raise ValueError(f"the proximal mu is {mu}; it must be finite and at least 0")
        own = {n: p.detach().numpy() for n, p in zip(self._names, self._parameters, strict=True)}
        check_same_form(own, arrays)
        self._anchor = [torch.tensor(arrays[name], dtype=torch.float32) for name in self._names]
        self.mu = mu

    def clear(self) -> None:
        """Forget the anchor."""
        self.mu = 0.0
        self._anchor = []

    def term(self) -> Tensor:
        """The term of the loss, scalar, differentiable in the module's weights."""
        if not self._anchor or self.mu == 0.0:
            return torch.zeros(())
        return proximal_term(self._parameters, self._anchor, self.mu)

    def distance(self) -> float:
        """Euclidean distance from the anchor; 0 without one."""
        if not self._anchor:
            return 0.0
        with torch.no_grad():
            return math.sqrt(2.0 * float(proximal_term(self._parameters, self._anchor, 1.0)))

    def arrays(self) -> Arrays:
        """A copy of the anchor by name; empty without one."""
        return {
            n: w.numpy().copy()
            for n, w in zip(self._names, self._anchor, strict=bool(self._anchor))
        }
