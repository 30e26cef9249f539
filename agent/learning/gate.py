"""The gate: only a policy that is no worse than the rule on this cluster's own simulator goes live.

``agent.learning.learner`` calls :func:`compare` on the cluster's twin. Both arms run the same jobs
on the same nodes with the same random numbers, window by window, so that their difference is the
policy's doing; the unit of analysis is the window.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from agent.learning.twin import Twin
from agent.scheduling.decision import Policy
from agent.simulator.runs import Result, simulate
from agent.statistics import Ratio, paired_ratio


@dataclass(frozen=True)
class GateSettings:
    """How a candidate is compared with the rule."""

    windows: int = 32
    """Windows, each a different draw of the cluster's jobs; at least 2."""
    jobs: int = 120
    """Jobs in each window; at least 2."""
    tolerance: float = 0.0
    """How much worse than the rule the upper end of the 95 % interval may be, as a share."""
    tail_tolerance: float = 0.05
    """How much worse than the rule the 99th percentile of completion times may be, as a share."""

    def __post_init__(self) -> None:
        if self.windows < 2 or self.jobs < 2:
            raise ValueError(
                f"a gate of {self.windows} windows of {self.jobs} jobs has no spread to judge by; "
                "set at least 2 of each"
            )
        for name in ("tolerance", "tail_tolerance"):
            if not 0.0 <= (value := getattr(self, name)) < float("inf"):
                raise ValueError(f"gate {name} is {value}; set a share of at least 0")


@dataclass(frozen=True)
class Verdict:
    """Completion times of a candidate relative to the rule's, and whether it may go live."""

    passed: bool
    mean: Ratio
    """Of mean completion times; below 1 the candidate is better."""
    p99: Ratio
    """Of 99th percentiles."""

    @property
    def gain(self) -> float:
        """Share of completion time that the candidate saves; below 0 it costs."""
        return 1.0 - self.mean.mean


def judge(mean: Ratio, p99: Ratio, settings: GateSettings) -> Verdict:
    """A candidate passes when it is no worse than the rule in the mean and, at the upper end of
    the 95 % interval, by no more than the tolerance: equal policies pass, and so do those that are
    clearly better. A wide interval that may hide a loss does not, for the twin is only a likeness
    and a candidate is looked at many times. Nor does one that buys the mean with the slowest jobs:
    that tail is judged by its mean alone, for its interval is too wide to say more.
    """
    # Runs that end alike differ by rounding at most.
    passed = mean.mean <= 1.0 + 1e-12 and mean.high <= 1.0 + 1e-12 + settings.tolerance
    passed = passed and p99.mean <= 1.0 + settings.tail_tolerance
    return Verdict(passed, mean, p99)


def compare(
    twin: Twin,
    rule: Policy,
    candidates: Sequence[Policy],
    *,
    seed: int,
    settings: GateSettings | None = None,
) -> list[Verdict]:
    """Judge each candidate against the rule on the windows that ``seed`` draws from the twin."""
    settings = settings or GateSettings()
    policies = [rule, *candidates]
    means = np.empty((len(policies), settings.windows))
    tails = np.empty_like(means)
    for window in range(settings.windows):
        for arm, policy in enumerate(policies):
            result = run_window(twin, policy, seed=seed, window=window, jobs=settings.jobs)
            means[arm, window], tails[arm, window] = result.mean, result.p99

    def against_rule(figures: npt.NDArray[np.float64], arm: int) -> Ratio:
        return paired_ratio(figures[arm], figures[0])

    return [
        judge(against_rule(means, arm), against_rule(tails, arm), settings)
        for arm in range(1, len(policies))
    ]


def run_window(twin: Twin, policy: Policy, *, seed: int, window: int, jobs: int) -> Result:
    """One arm of one window: the same jobs, truth and ties for every policy."""
    simulation = twin.simulation(seed=seed, window=window, jobs=jobs)
    return simulate(simulation, policy, seed=(seed * 100_003 + window) % (1 << 31))
