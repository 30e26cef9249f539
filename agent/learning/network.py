"""The learner's trainable copy of the shared scorer, and its softmax policy; PPO and DQN use both.

Layers, their names and the start weights come from :mod:`common.policy`, so that what is trained
here is what the kernel ``agent.scheduling.scorer.corrections`` computes in the extender, the
simulator and the gate.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from common.policy import BOUND, LAYERS, check_arrays, initial_arrays
from common.weights import Arrays


class Network(nn.Module):
    """Bounded corrections of the candidates and the value of the state, from one encoder."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()

        def stack(prefix: str) -> nn.ModuleList:
            return nn.ModuleList(
                nn.Linear(inputs, outputs)
                for name, inputs, outputs in LAYERS
                if name.startswith(f"{prefix}.")
            )

        self.encoder = stack("encoder")
        ((inputs, outputs),) = ((i, o) for name, i, o in LAYERS if name == "correction")
        self.correction = nn.Linear(inputs, outputs)
        self.value = stack("value")
        load_arrays(self, initial_arrays(seed))

    def forward(self, features: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Score every candidate and value the state that offers them.

        Args:
            features: [B, C, FEATURE_COUNT]; padding rows must be finite.
            mask: [B, C] bool, true for candidates.

        Returns:
            Corrections [B, C] within ±BOUND, 0 for padding; values [B].
        """
        codes = features
        for layer in self.encoder:
            codes = functional.relu(layer(codes))
        corrections = BOUND * torch.tanh(self.correction(codes).squeeze(-1))
        weight = mask.to(codes.dtype)
        # A mean, not a sum: a state's value must not depend on how many candidates were padded.
        pooled = (codes * weight.unsqueeze(-1)).sum(1) / weight.sum(1, keepdim=True).clamp(min=1.0)
        for layer in self.value[:-1]:
            pooled = functional.relu(layer(pooled))
        return corrections * weight, self.value[-1](pooled).squeeze(-1)


def to_arrays(network: Network) -> Arrays:
    """A copy of the weights by name, float32, as :mod:`common.weights` saves and sends them."""
    return {name: tensor.detach().numpy().copy() for name, tensor in network.state_dict().items()}


def load_arrays(network: Network, arrays: Arrays) -> None:
    """Replace the network's weights by a copy of ``arrays``.

    Raises:
        ValueError: they are not finite weights of this architecture; the network is unchanged.
    """
    check_arrays(arrays)
    network.load_state_dict({name: torch.tensor(array) for name, array in arrays.items()})


def policy_log_probs(scores: Tensor, mask: Tensor, temperature: float) -> Tensor:
    """Log of π(a|s) = softmax(score / temperature) over the candidates.

    Args:
        scores: [B, C] rule score + correction; padding may hold any finite number.
        mask: [B, C] bool with at least one candidate a row.
        temperature: above 0, in the unit of the scores.

    Returns:
        [B, C]; −inf for padding, so that its probability is exactly 0.
    """
    return torch.log_softmax((scores / temperature).masked_fill(~mask, -torch.inf), dim=-1)


def policy_entropy(log_probs: Tensor) -> Tensor:
    """Entropy in nats [B] of log probabilities [B, C] in which padding is −inf."""
    # p·log p is 0 at p = 0, but floating point makes it 0·(−inf): NaN, in the gradient as well.
    finite = log_probs.masked_fill(torch.isneginf(log_probs), 0.0)
    return -(log_probs.exp() * finite).sum(-1)


def mean_square(corrections: Tensor, mask: Tensor) -> Tensor:
    """Mean squared correction of each decision's candidates [B], what restrains the policy."""
    return corrections.square().sum(1) / mask.sum(1).clamp(min=1)
