"""Decisions as padded arrays: what PPO and DQN learn from, and who fills it.

``agent.learning.experience`` makes batches from live decisions, ``agent.learning.rollouts`` from
the embedded simulator; both in the order in which the decisions were made.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Batch:
    """``B`` consecutive decisions with at most ``C`` candidates of ``F`` features each."""

    features: F32
    """[B, C, F]; padding rows are zero."""
    mask: npt.NDArray[np.bool_]
    """[B, C] true for candidates, false for padding; a row with one candidate is forced."""
    rule_scores: F32
    """[B, C] the rule's score: 0 for its own choice, below 0 for the others."""
    action: npt.NDArray[np.int64]
    """[B] the candidate that was taken (observed, not merely preferred)."""
    log_prob: F32
    """[B] log probability of that action under the policy that took it."""
    reward: F32
    """[B] reward from this decision to the next, own delayed outcome included; dimensionless."""
    elapsed: F32
    """[B] time to the next decision, in mean run times of a job; infinite at a true end."""
    ends: npt.NDArray[np.bool_]
    """[B] whether no decision of the same trajectory follows this row in the batch."""

    def __len__(self) -> int:
        return len(self.action)


def concatenate(batches: list[Batch]) -> Batch:
    """Join batches, padding all to the widest. Raises ValueError for an empty list."""
    if not batches:
        raise ValueError("no batches to join")
    width = max(batch.mask.shape[1] for batch in batches)

    def pad(array: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
        widths = [(0, 0), (0, width - array.shape[1])] + [(0, 0)] * (array.ndim - 2)
        return np.pad(array, widths)

    padded = {"features", "mask", "rule_scores"}
    return Batch(
        **{
            field: np.concatenate(
                [
                    pad(getattr(batch, field)) if field in padded else getattr(batch, field)
                    for batch in batches
                ]
            )
            for field in Batch.__dataclass_fields__
        }
    )
