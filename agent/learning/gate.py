"""The gate: only a policy that is no worse than the rule on this cluster's own simulator goes live.

``agent.learning.learner`` calls :func:`compare` on the cluster's twin. Both arms run the same jobs
on the same nodes with the same random numbers, window by window, so that their difference is the
policy's doing; the unit of analysis is the window.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from agent.learning.twin import Twin
from agent.scheduling.decision import Policy
from agent.simulator.runs import Result, simulate
from agent.statistics import Ratio, paired_ratio

_LOOKS = ((0.25, 0.002), (0.5, 0.008), (1.0, 0.04))
"""Share of the windows and of false verdicts of each look; early ones are spent little, after
O'Brien and Fleming (Biometrics 35(3), 1979), so that the last one loses next to nothing."""


@dataclass(frozen=True)
class GateSettings:
    """How a candidate is compared with the rule."""

    windows: int = 32
    """Windows at most, each a different draw of the cluster's jobs; at least 2."""
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


def looks(windows: int) -> list[tuple[int, float]]:
    """(windows run by then, confidence of the intervals) of each look, the last at ``windows``.

    The chances of a false verdict that the looks are given add up to 5 %.
    """
    at = {max(2, math.ceil(share * windows)): alpha for share, alpha in _LOOKS}
    return [(count, 1.0 - alpha) for count, alpha in at.items()]


def compare(
    twin: Twin,
    rule: Policy,
    candidates: Sequence[Policy],
    *,
    seed: int,
    settings: GateSettings | None = None,
) -> list[Verdict]:
    """Judge each candidate against the rule on the windows that ``seed`` draws from the twin.

    A sequential test: what is clearly better or worse after a quarter or half of the windows is
    not run on. To end early, a candidate that passes must do so by the wider interval of an early
    look; one that is worse beyond it fails.
    """
    settings = settings or GateSettings()
    means: list[list[float]] = [[] for _ in range(1 + len(candidates))]
    tails: list[list[float]] = [[] for _ in range(1 + len(candidates))]
    verdicts: dict[int, Verdict] = {}
    for count, level in looks(settings.windows):
        for arm, policy in enumerate((rule, *candidates)):
            if arm in verdicts:
                continue
            for window in range(len(means[arm]), count):
                result = run_window(twin, policy, seed=seed, window=window, jobs=settings.jobs)
                means[arm].append(result.mean)
                tails[arm].append(result.p99)
            if arm == 0:
                continue
            mean = paired_ratio(means[arm], means[0], level=level)
            p99 = paired_ratio(tails[arm], tails[0], level=level)
            verdict = judge(mean, p99, settings)
            if verdict.passed or mean.low > 1.0 or count == settings.windows:
                verdicts[arm] = verdict
        if len(verdicts) == len(candidates):
            break
    return [verdicts[arm] for arm in range(1, 1 + len(candidates))]


def run_window(twin: Twin, policy: Policy, *, seed: int, window: int, jobs: int) -> Result:
    """One arm of one window: the same jobs, truth and ties for every policy."""
    simulation = twin.simulation(seed=seed, window=window, jobs=jobs)
    return simulate(simulation, policy, seed=(seed * 100_003 + window) % (1 << 31))
