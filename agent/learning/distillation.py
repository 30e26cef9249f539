"""Rollout distillation: the scorer learns what its candidates would have led to.

``agent.learning.practice`` tries candidates on the cluster's own simulator and keeps the labels in
a :class:`Teacher`; ``agent.learning.algorithm`` takes optimiser steps towards them. A label tells
far more than a reward: all candidates of a decision meet the same future, so that their difference
is the choice's doing and not the day's.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from agent.learning.network import Network
from agent.simulator.labels import Labels

GAIN_LIMIT = 1.0
"""Gains, in mean run times of a job, count up to this; larger ones are chance more than choice."""
_BETA = 0.2  # where the Huber loss turns from square to linear


@dataclass(frozen=True)
class Pairs:
    """``M`` candidates, each beside the choice that the rule made instead."""

    features: npt.NDArray[np.float32]
    """[M, F] of the candidate."""
    rule_features: npt.NDArray[np.float32]
    """[M, F] of the rule's choice."""
    rule_scores: npt.NDArray[np.float32]
    """[M] of the candidate; the rule's own choice has 0."""
    gain: npt.NDArray[np.float32]
    """[M] completion time, over all jobs, saved by the candidate; in mean run times of a job."""

    def __len__(self) -> int:
        return len(self.gain)


class Teacher:
    """The newest ``capacity`` pairs, a ring; labels of older speeds and job mixes go first."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a teacher of {capacity} labels teaches nothing; set at least 1")
        self.capacity = capacity
        self._pairs: Pairs | None = None

    def __len__(self) -> int:
        return 0 if self._pairs is None else len(self._pairs)

    def add(self, labels: Labels, mean_run_seconds: float) -> int:
        """Keep the labels of all candidates but the rule's choices; returns how many."""
        first = np.searchsorted(labels.decision, labels.decision)
        other = np.flatnonzero(first != np.arange(len(first)))
        new = Pairs(
            features=labels.features[other],
            rule_features=labels.features[first[other]],
            rule_scores=labels.rule_scores[other],
            gain=labels.gain[other] / np.float32(mean_run_seconds),
        )
        old = self._pairs
        fields = Pairs.__dataclass_fields__
        self._pairs = Pairs(
            **{
                name: (
                    getattr(new, name)
                    if old is None
                    else np.concatenate([getattr(old, name), getattr(new, name)])
                )[-self.capacity :]
                for name in fields
            }
        )
        return len(other)

    def sample(self, rng: np.random.Generator, count: int) -> Pairs:
        """``count`` pairs drawn with replacement. Raises ValueError while there are none."""
        if self._pairs is None or not len(self._pairs):
            raise ValueError("no labels yet")
        rows = rng.integers(len(self._pairs), size=count)
        return Pairs(**{n: getattr(self._pairs, n)[rows] for n in Pairs.__dataclass_fields__})


def distillation_loss(network: Network, pairs: Pairs) -> Tensor:
    """Mean Huber loss between the score that a candidate gains on the rule's choice and its label.

    A candidate that is worse than the limit need only be scored as worse than that, so that the
    network spends itself on where to depart from the rule.
    """
    rows = torch.from_numpy(np.concatenate([pairs.features, pairs.rule_features]))
    corrections, _ = network(rows.unsqueeze(1), torch.ones(len(rows), 1, dtype=torch.bool))
    own, rule = corrections[:, 0].split(len(pairs))
    scored = torch.from_numpy(pairs.rule_scores) + own - rule
    label = torch.from_numpy(pairs.gain).clamp(-GAIN_LIMIT, GAIN_LIMIT)
    settled = (label <= -GAIN_LIMIT) & (scored.detach() <= -GAIN_LIMIT)
    losses = functional.smooth_l1_loss(scored, label, beta=_BETA, reduction="none")
    return torch.where(settled, torch.zeros_like(losses), losses).mean()
