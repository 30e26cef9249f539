"""Rewards of consecutive decisions, from what happened between them; for experience and rollouts.

The reward between a decision and the next one of the same session is dimensionless: seconds are
divided by the cluster's mean run time ``T``, so that one set of weights (and one value scale) fits
a cluster of ten-second functions and one of ten-day trainings::

    r = −α ∫ pending dt / T  −δ ∫ jobs dt / T  −β ∫ Σ (U_i − Ū)² dt / T  −γ · kills

A *kill* is an end that the placement is to blame for: see :data:`CHARGED`. The other ends (a higher
priority, a drain, a lost node, an error of the job, a deletion) cost what they cost in time.
Summed over time, ``∫ jobs dt`` is the sum of all completion times (Little's law), which is what a
scheduler should lower; the other terms shade it.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from agent.arrays import Floats

CHARGED = ("oom", "evicted", "misplaced")
"""Ends of a pod for want of something on the node that was chosen (``agent.cluster.outcomes``)."""


@dataclass(frozen=True)
class RewardWeights:
    """Weights of the reward's terms; each is the price of one unit, in mean run times of one job.

    Raises:
        ValueError: a weight is negative or not finite.
    """

    alpha: float = 0.1
    """Price of a pod waiting for one mean run time; on top of ``delta``, which counts it too."""
    beta: float = 0.01
    """Price of Σ (U_i − Ū)² = 1 over one mean run time, U_i the GPU use of node i (0 to 1) or its
    CPU use where it has no GPU. Small: spreading works against completion time."""
    gamma: float = 1.0
    """Price of one kill: 1 is as bad as one more job in the system for one mean run time."""
    delta: float = 1.0
    """Price of a job being in the system (pending or running) for one mean run time."""

    def __post_init__(self) -> None:
        for name in ("alpha", "beta", "gamma", "delta"):
            value = getattr(self, name)
            if not 0.0 <= value < float("inf"):
                raise ValueError(
                    f"reward weight {name} is {value}; set a finite number of at least 0"
                )


DEFAULT_WEIGHTS = RewardWeights()


@dataclass(frozen=True)
class Interval:
    """What happened from each of ``B`` decisions to the next one of its session."""

    pending_seconds: Floats
    """[B] ∫ pending pods dt, cluster seconds."""
    job_seconds: Floats
    """[B] ∫ jobs in the system dt, cluster seconds."""
    imbalance_seconds: Floats
    """[B] ∫ Σ (U_i − Ū)² dt, cluster seconds."""
    kills: Floats
    """[B] kills charged to the decision: that of the pod that it placed."""


@dataclass(frozen=True)
class Rewards:
    """The reward of each decision and its terms, all [B], dimensionless and at most 0."""

    total: npt.NDArray[np.float32]
    pending: Floats
    jobs: Floats
    imbalance: Floats
    kills: Floats


def rewards(
    interval: Interval, mean_run_seconds: float, weights: RewardWeights = DEFAULT_WEIGHTS
) -> Rewards:
    """The rewards of ``B`` decisions.

    Args:
        interval: the integrals and counts, [B] each.
        mean_run_seconds: the cluster's mean run time of a job, cluster seconds.
        weights: the terms' prices.

    Raises:
        ValueError: the mean run time is not above 0, or an integral is negative or not finite
            (which no clock that goes forward produces).
    """
    if not 0.0 < mean_run_seconds < float("inf"):
        raise ValueError(f"the mean run time is {mean_run_seconds} s; it must be above 0")
    for name in Interval.__dataclass_fields__:
        values = getattr(interval, name)
        if not (np.isfinite(values).all() and (values >= 0.0).all()):
            raise ValueError(f"{name} holds a negative or non-finite value; is the clock running?")
    pending = -weights.alpha * interval.pending_seconds / mean_run_seconds
    jobs = -weights.delta * interval.job_seconds / mean_run_seconds
    imbalance = -weights.beta * interval.imbalance_seconds / mean_run_seconds
    kills = -weights.gamma * interval.kills
    total = (pending + jobs + imbalance + kills).astype(np.float32)
    return Rewards(total, pending, jobs, imbalance, kills)


@dataclass(frozen=True)
class RunTimeMean:
    """Running mean of finished jobs' run times, starting from a prior; persisted as (n, total)."""

    count: float = 0.0
    total_seconds: float = 0.0
    prior_seconds: float = 3600.0
    """What one expects before any job has finished, cluster seconds."""
    prior_count: float = 10.0
    """How many finished jobs the prior is worth."""

    @property
    def seconds(self) -> float:
        """The mean, cluster seconds; always above 0."""
        prior = self.prior_count * self.prior_seconds
        return max((prior + self.total_seconds) / (self.prior_count + self.count), 1e-3)


def pending_seconds(pending: Floats, placed: Floats, elapsed: Floats) -> Floats:
    """∫ pending dt of each interval from the count at its beginning, [B] each.

    Arrivals and placements both make a new decision, so the count is taken as constant between:
    ``pending`` counts the decided pod, ``placed`` is 1 where the decision took it off the queue.
    """
    return np.maximum(pending - placed, 0.0) * elapsed
