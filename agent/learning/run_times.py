"""How long work takes, learned from the runs that ended: by kind, and by earlier runs of the same.

``agent.learning.publish`` writes it into the file that ``agent serve`` reads, so that a restarted
agent still knows its cluster's run times; ``agent.learning.twin`` gives the simulator's jobs the
same estimates. How much a work's own runs count against its kind's, and how wide the intervals
are, is what would have been right so far: every run is predicted from those that had ended before
it came.
"""

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from agent.arrays import Floats
from agent.cluster.view import View, empty_view, gpu_group
from agent.journal import PodEvent
from agent.learning.speeds import Kind
from agent.scheduling.outlook import expected_log_run_time

Key = TypeVar("Key", Kind, str)
WEIGHTS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""What a kind's estimate may count for, in runs of a work."""
LEAST_RUNS = 20
"""Predictions from a work's own runs from which on they are judged."""
COVERAGE = 0.8
"""Share of runs that the interval is to hold."""
_LATEST, _STEP = 200, 0.02


@dataclass(frozen=True)
class Run:
    """One run that ended well. Times are cluster seconds."""

    created: float
    ended: float
    kind: Kind
    work: str
    """Empty where nothing tells which runs are of the same work."""
    log_seconds: float
    """Log run time on the kind's fastest GPU model, log s."""


@dataclass(frozen=True)
class RunTimes:
    """What the runs told. Log times are log s on the kind's fastest model."""

    kinds: Mapping[Kind, tuple[int, float]] = field(default_factory=dict)
    """Count and mean log run time by kind."""
    works: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    """The same by work, the latest last."""
    weight: float = math.inf
    """Runs of a work that its kind's estimate counts for; infinite while own runs tell no more."""
    by_kind: float = math.nan
    """Root mean square error of predictions by kind, log s; NaN while there are too few."""
    by_work: float = math.nan
    """The same, of the same runs, by what ``weight`` makes of their works' own runs."""
    half_width: float = math.nan
    """Log s to either side of a prediction that is to hold a share :data:`COVERAGE` of runs."""
    coverage: float = math.nan
    """Share of runs that the interval, set before each of them, did hold."""

    def own(self, work: str, leave_out: float = math.nan) -> tuple[float, float]:
        """(mean log run time of the work's runs, what it counts against the kind's estimate).

        ``leave_out`` is the log run time of a run that is not to count. (NaN, 1) where there are
        no runs, or own runs tell no more than the kind.
        """
        n, mean = self.works.get(work, (0, 0.0))
        total = n * mean
        if not math.isnan(leave_out):
            n, total = n - 1, total - leave_out
        if n < 1 or math.isinf(self.weight):
            return math.nan, 1.0
        return total / n, n / (n + self.weight)


def job_of(event: PodEvent) -> str:
    """What all pods of a job have in common; a pod of an earlier release is a job of its own."""
    return event.job or event.uid


def kind_of(event: PodEvent) -> Kind:
    """The kind of a pod: shared pods count as one GPU, work without GPUs as none."""
    return event.job_type, max(event.gpus, 1 if event.gpu_share > 0 else 0)


def runs_of(
    created: Sequence[PodEvent],
    finished: Mapping[str, PodEvent],
    slower: Callable[[Kind, str], float],
) -> list[Run | None]:
    """The run of each pod in ``created``; None where it has not finished, or its start is unknown.

    Args:
        finished: events by :func:`job_of`.
        slower: log slow-down of a kind on a GPU model against the kind's fastest.
    """
    runs: list[Run | None] = []
    for event in created:
        end, kind = finished.get(job_of(event)), kind_of(event)
        if end is None or end.run_seconds <= 0.0:
            runs.append(None)
            continue
        log_seconds = math.log(end.run_seconds) - slower(kind, end.gpu_model)
        runs.append(Run(event.time, end.time, kind, event.work, log_seconds))
    return runs


class _History:
    """The history of a view, filled run by run, so that kinds are estimated as ``serve`` does."""

    def __init__(self, kinds: Sequence[Kind]) -> None:
        job_types = list(dict.fromkeys(job_type for job_type, _ in kinds))
        self.row = {kind: k for k, kind in enumerate(kinds)}
        self.view: View = empty_view(
            nodes=0,
            pods=0,
            gpu_spec=np.zeros((0, 3)),
            kind_type=np.array([job_types.index(job_type) for job_type, _ in kinds], np.int64),
            kind_gpus=np.array([gpus for _, gpus in kinds], np.int64),
        )

    def add(self, kind: Kind, log_seconds: float) -> None:
        view, k = self.view, self.row[kind]
        one = (1.0, log_seconds)
        view.history_kind[k] += one
        view.history_type[view.kind_type[k]] += one
        view.history_gpus[gpu_group(int(view.kind_gpus[k]))] += one

    def expected(self, kind: Kind) -> float:
        return float(expected_log_run_time(self.view, self.row[kind]))


def fit(runs: Sequence[Run]) -> RunTimes:
    """Learn from ``runs``, in any order."""
    if not runs:
        return RunTimes()
    ordered = sorted(runs, key=lambda run: run.created)
    by_kind, by_work = _replay(ordered)
    own = ~np.isnan(by_work[:, 0])
    weight, chosen = math.inf, by_kind
    if own.sum() >= LEAST_RUNS:
        best = int(np.argmin((by_work[own] ** 2).mean(axis=0)))
        gain = by_kind[own] ** 2 - by_work[own, best] ** 2
        if gain.mean() > 2.0 * gain.std(ddof=1) / math.sqrt(len(gain)):
            weight = WEIGHTS[best]
            chosen = np.where(own, by_work[:, best], by_kind)
    half_width, coverage = _interval(chosen)
    return RunTimes(
        kinds=_means([(run.kind, run.log_seconds) for run in ordered]),
        works=_means([(run.work, run.log_seconds) for run in ordered if run.work]),
        weight=weight,
        by_kind=_rms(by_kind[own]),
        by_work=_rms(chosen[own]),
        half_width=half_width,
        coverage=coverage,
    )


def _replay(ordered: Sequence[Run]) -> tuple[Floats, Floats]:
    """([N] errors by kind, [N, len(WEIGHTS)] errors by work, NaN for a work's first runs)."""
    history = _History(list(dict.fromkeys(run.kind for run in ordered)))
    works: dict[str, tuple[int, float]] = {}
    running: list[tuple[float, int]] = []
    weights = np.array(WEIGHTS)
    by_kind = np.empty(len(ordered))
    by_work = np.full((len(ordered), len(WEIGHTS)), np.nan)
    for i, run in enumerate(ordered):
        while running and running[0][0] <= run.created:
            over = ordered[heapq.heappop(running)[1]]
            history.add(over.kind, over.log_seconds)
            if over.work:
                n, total = works.get(over.work, (0, 0.0))
                works[over.work] = n + 1, total + over.log_seconds
        expected = history.expected(run.kind)
        by_kind[i] = run.log_seconds - expected
        if run.work in works:
            n, total = works[run.work]
            by_work[i] = run.log_seconds - (total + weights * expected) / (n + weights)
        heapq.heappush(running, (run.ended, i))
    return by_kind, by_work


def _means(values: Sequence[tuple[Key, float]]) -> dict[Key, tuple[int, float]]:
    sums: dict[Key, tuple[int, float]] = {}
    for key, x in values:
        n, total = sums.pop(key, (0, 0.0))  # to the end: the latest last
        sums[key] = n + 1, total + x
    return {key: (n, total / n) for key, (n, total) in sums.items()}


def _rms(errors: Floats) -> float:
    return float(np.sqrt((errors**2).mean())) if len(errors) >= LEAST_RUNS else math.nan


def _interval(errors: Floats) -> tuple[float, float]:
    """(half width for the next run, share of runs held): adaptive conformal inference.

    The quantile of the latest errors that is taken moves up with every miss and down with every
    hit, so that the share held tends to :data:`COVERAGE` however the work of a cluster changes
    (https://arxiv.org/abs/2106.00170).
    """
    sizes, level, held = np.abs(errors), COVERAGE, 0
    for i in range(LEAST_RUNS, len(sizes)):
        hit = bool(sizes[i] <= np.quantile(sizes[max(i - _LATEST, 0) : i], level))
        held += hit
        level = min(max(level + _STEP * (COVERAGE - hit), 0.0), 1.0)
    judged = len(sizes) - LEAST_RUNS
    if judged <= 0:
        return math.nan, math.nan
    return float(np.quantile(sizes[-_LATEST:], level)), held / judged
