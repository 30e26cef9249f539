"""The suite ``batch-queue``: orders of a batch machine's queue, and when they are decided.

Called by ``agent.benchmark.suites``. Numbers of the learned order are fitted on the train windows
of the log, chosen by its validation windows and judged on its sealed ones.
"""

from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from pathlib import Path

import msgspec
import numpy as np

from agent.benchmark.cross_entropy import Cost, cross_entropy
from agent.benchmark.suite import (
    BySize,
    Cell,
    Comparison,
    Count,
    Figures,
    Means,
    Result,
    Say,
    Size,
    Suite,
)
from agent.benchmark.suites import data_file
from agent.data_files import read_data
from agent.simulator import splits
from agent.simulator.batch_queue import (
    DECISION_HELP,
    DECISIONS,
    ORDER_HELP,
    ORDERS,
    SHORTEST,
    Batch,
    bounded_slowdown,
    discipline,
    makespan_bound,
    run_queue,
)
from agent.simulator.traces import Jobs, TraceError, trace_file
from common.weights import write_atomic

SPLITS = Path(splits.__file__).with_name("splits_batch.yaml")
LEARNED = "learned.json"
BOUND = "lower bound"
"""Arm that is no order: what none can stay below."""
LARGEST = 99.0
"""Percentile of the slow-downs that reports show beside the mean."""

Numbers = tuple[float, float, float, float]


class Arm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An order, and when it is decided."""

    order: str
    decide: str
    learned: bool = False

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise ValueError(f"no order {self.order!r}; there are {', '.join(ORDERS)}")
        if self.decide not in DECISIONS:
            raise ValueError(f"no way {self.decide!r} to decide; there are {', '.join(DECISIONS)}")
        if self.learned != (self.order == "weighted"):
            raise ValueError("'learned: true' goes with order 'weighted' and with no other")


class Learning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the learned order is fitted."""

    start: Numbers
    spread: Numbers
    iterations: int
    samples: int
    elite: int
    windows: int
    makespan_weight: float
    seed: int


class Data(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of ``batch-queue.yaml``."""

    trace: str
    processors: int
    window: int
    part: splits.Part
    estimates: dict[str, float]
    draws: BySize[Count]
    """Of estimates, for each window."""
    arms: dict[str, Arm]
    baselines: tuple[str, ...]
    rule: str
    ours: str
    committed: dict[str, str]
    learning: Learning

    def __post_init__(self) -> None:
        if not self.baselines:
            raise ValueError("'baselines' names at least one arm to compare with")
        if self.window < 2 or self.processors < 1:
            raise ValueError("a window has at least 2 jobs, and the machine a processor")
        for name, factor in self.estimates.items():
            if factor < 1.0:
                raise ValueError(f"estimates {name!r} are at least once the run time, got {factor}")
        named = (*self.baselines, self.rule, self.ours, *self.committed, *self.committed.values())
        for arm in named:
            if arm not in self.arms:
                raise ValueError(f"no arm {arm!r}; there are {', '.join(self.arms)}")


def cut(jobs: Jobs, start: int, length: int, too_long: float, seed: int) -> Batch:
    """``length`` jobs from ``start`` on, times from the first submission, with users' estimates:
    run times times a factor drawn evenly from 1 to ``too_long`` for each job."""
    span = slice(start, start + length)
    submit, run = jobs.arrival_s[span], np.ascontiguousarray(jobs.duration_s[span])
    factor = np.random.default_rng(seed).uniform(1.0, too_long, len(run))
    return Batch(submit - submit[0], run * factor, run, np.ascontiguousarray(jobs.gpus[span]))


def measure(batch: Batch, machine: int, arm: Arm, numbers: Numbers | None) -> Figures:
    """What becomes of a batch under an arm; ``numbers`` are the learned ones."""
    learned = numbers if arm.learned and numbers is not None else ()
    start, _ = run_queue(batch, machine, discipline(arm.order, arm.decide, learned))
    slowdown = bounded_slowdown(batch, start)
    return {
        "mean_slowdown": float(slowdown.mean()),
        "p99_slowdown": float(np.percentile(slowdown, LARGEST)),
        "longest_wait": float((start - batch.submit).max()),
        "makespan": float((start + batch.run).max()),
    }


def _cost(batches: Sequence[Batch], machine: int, arm: Arm, makespan_weight: float) -> Cost:
    """Mean of log mean bounded slow-down, and of log makespan as much as it counts."""

    def cost(point: np.ndarray) -> float:
        numbers = (float(point[0]), float(point[1]), float(point[2]), float(point[3]))
        found = [measure(batch, machine, arm, numbers) for batch in batches]
        slow = np.log([figures["mean_slowdown"] for figures in found])
        long = np.log([figures["makespan"] for figures in found])
        return float(np.mean(slow + makespan_weight * long))

    return cost


def learn(data: Data, train: Jobs, validation: Jobs) -> tuple[Numbers, float, float]:
    """Fit the learned order.

    Returns:
        Its numbers, and the cost by the validation windows of where they started and of them.

    Raises:
        ValueError: a part has fewer jobs than a window.
    """
    if min(len(train), len(validation)) < data.window:
        raise ValueError(
            f"train and validation of {data.trace} have {len(train)} and {len(validation)} jobs, "
            f"and a window has {data.window}: put the whole trace where FEDSCHED_TRACES points"
        )
    plan, arm, rng = data.learning, data.arms[data.ours], np.random.default_rng(data.learning.seed)

    def batches(jobs: Jobs, starts: Sequence[int]) -> list[Batch]:
        return [
            cut(jobs, int(start), data.window, factor, int(start))
            for start in starts
            for factor in data.estimates.values()
        ]

    def costs() -> Iterator[Cost]:
        while True:
            starts = rng.integers(0, len(train) - data.window + 1, plan.windows)
            yield _cost(batches(train, starts.tolist()), data.processors, arm, plan.makespan_weight)

    fitted = cross_entropy(
        costs(), plan.start, plan.spread, iterations=plan.iterations, samples=plan.samples,
        elite=plan.elite, seed=plan.seed,
    )  # fmt: skip
    ends = np.linspace(0, len(validation) - data.window, 3)
    judge = _cost(
        batches(validation, [int(end) for end in ends]), data.processors, arm, plan.makespan_weight
    )
    before, after = judge(np.array(plan.start)), judge(fitted)
    w, v, base, more = (float(x) for x in fitted)
    return ((w, v, base, more) if after <= before else plan.start), before, after


@cache
def _numbers(path: Path) -> Numbers:
    return msgspec.json.decode(path.read_bytes(), type=Numbers)


@lru_cache(maxsize=4)
def _batch(
    trace: str, part: splits.Part, start: int, length: int, too_long: float, seed: int
) -> Batch:
    jobs = splits.part_jobs(trace, part, evaluation=True, path=SPLITS)
    return cut(jobs, start, length, too_long, seed)


class BatchQueue(Suite):
    """Orders of a queue."""

    name = "batch-queue"
    title = (
        "Orders of a batch machine's queue: mean bounded slow-down of the jobs of lublin_256, "
        "a log made by Lublin and Feitelson's model, on 256 processors."
    )
    units = {"longest_wait": ("h", 3600.0), "makespan": ("h", 3600.0)}  # noqa: RUF012 - the protocol's, never changed

    def __init__(self, path: Path | None = None) -> None:
        self.data = read_data(path or data_file(self.name), Data)
        data = self.data
        ours = (data.ours, data.rule)
        first = data.baselines[0]
        self.comparisons = [
            Comparison("mean_slowdown", first, title=f"Mean bounded slow-down to {first}"),
            *(
                Comparison("mean_slowdown", baseline, ours, pooled=False)
                for baseline in data.baselines[1:]
            ),
            *(
                Comparison("mean_slowdown", arm, (other,), title="What deciding anew is worth")
                for arm, other in data.committed.items()
            ),
            *(
                Comparison(metric, first, ours)
                for metric in ("p99_slowdown", "longest_wait", "makespan")
            ),
        ]
        self.notes = [
            f"A window is {data.window} jobs in a row, submitted to an empty machine; all of them "
            "run. Slow-down is time from submission to end over run time, of at least "
            f"{SHORTEST:g} s.",
            *(f"{name.replace('-', ' ')}: {DECISION_HELP[name]}." for name in DECISIONS),
            *(f"{name}: {ORDER_HELP[name]}." for name in ORDERS),
            "The learned order leaves part of the machine free, the more the longer the job, so "
            "that short jobs that come find room; how much is fitted with its weights on train "
            "windows.",
            f"{BOUND}: no order ends sooner; of slow-down the bound is 1 and says nothing.",
        ]

    def _jobs(self) -> int:
        """Jobs of the part that is judged by; 0 where there is no such trace."""
        try:
            return len(
                splits.part_jobs(self.data.trace, self.data.part, evaluation=True, path=SPLITS)
            )
        except TraceError:
            return 0

    def cells(self, size: Size) -> list[Cell]:
        """Window by window; windows share no job, draws of one window's estimates are a cluster."""
        data, found = self.data, []
        for start in range(0, self._jobs() - data.window + 1, data.window):
            for setting, too_long in data.estimates.items():
                for draw in range(data.draws.of(size) if too_long > 1.0 else 1):
                    span = f"{data.part} {start}–{start + data.window}"
                    found += [
                        Cell(
                            self.name, setting, arm, f"{span} #{draw}", f"{data.trace} {span}",
                            1000 * draw + start // data.window,
                        )
                        for arm in (*data.arms, BOUND)
                    ]  # fmt: skip
        return found

    def inputs(self, size: Size) -> list[Path]:
        """The log and its split."""
        del size
        known = splits.splits(SPLITS)[self.data.trace]
        try:
            return [SPLITS, trace_file(known.file)]
        except TraceError:
            return [SPLITS]

    def prepare(self, size: Size, folder: Path, say: Say) -> None:
        """Fit the learned order."""
        del size
        if (folder / LEARNED).exists():
            return
        train, validation = (
            splits.part_jobs(self.data.trace, part, path=SPLITS) for part in ("train", "validation")
        )
        say("fitting the learned order on train windows")
        numbers, before, after = learn(self.data, train, validation)
        say(
            f"log cost on validation windows {before:.3f} before, {after:.3f} after; kept: weights "
            f"of processors {numbers[0]:.3f} and wait {numbers[1]:.3f}, reserve {numbers[2]:.3f} "
            f"at an hour and {numbers[3]:.3f} more for ten times that"
        )
        write_atomic(folder / LEARNED, msgspec.json.encode(numbers))

    def run(self, cell: Cell, folder: Path) -> Figures:
        """One order on one window."""
        data = self.data
        start = int(cell.window.split(" ")[1].partition("–")[0])
        too_long = data.estimates[cell.setting]
        batch = _batch(data.trace, data.part, start, data.window, too_long, cell.seed)
        if cell.arm == BOUND:
            return {"makespan": makespan_bound(batch, data.processors)}
        arm = data.arms[cell.arm]
        numbers = _numbers(folder / LEARNED) if arm.learned else None
        return measure(batch, data.processors, arm, numbers)

    def findings(self, means: Means, results: Sequence[Result]) -> list[str]:
        """What deciding anew is worth, and where ours stand."""
        told = []
        for result in results:
            comparison = result.comparison
            if comparison.baseline in self.data.committed:
                told += [
                    f"Deciding anew ({row.arm} to {comparison.baseline}) changes the mean "
                    f"bounded slow-down by {100 * (row.mean - 1):+.0f} % ({row.verdict})."
                    for row in result.rows
                ]
        for setting, arms in means.items():
            ranked = sorted(
                (arm for arm in arms if arm != BOUND), key=lambda arm: arms[arm]["mean_slowdown"]
            )
            places = ", ".join(
                f"{arm} is {ranked.index(arm) + 1} of {len(ranked)}"
                for arm in (self.data.ours, self.data.rule)
            )
            best = ranked[0]
            told.append(
                f"{setting}: least mean bounded slow-down {best} with "
                f"{arms[best]['mean_slowdown']:.1f}; {places}."
            )
        for metric in ("longest_wait", "makespan"):
            told += [
                f"{row.arm} pays for it: {metric.replace('_', ' ')} "
                f"{100 * (row.mean - 1):+.0f} % to {result.comparison.baseline}."
                for result in results
                if result.comparison.metric == metric
                for row in result.rows
                if row.verdict == "worse"
            ]
        return told
