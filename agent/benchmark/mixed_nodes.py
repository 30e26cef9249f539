"""The suite ``mixed-nodes``: policies on nine nodes of three GPU types, with nothing told to them.

Called by ``agent.benchmark.suites``. Agents know of speeds and run times what the train windows of
their cluster have taught them; they are judged on its sealed windows.
"""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import msgspec

from agent.benchmark.arms import Arm, figures, informed
from agent.benchmark.bounds import completion_bound, makespan_bound
from agent.benchmark.knowledge import (
    Learning,
    SpeedSource,
    learn_all,
    measured,
    split_files,
)
from agent.benchmark.suite import (
    BySize,
    Cell,
    Comparison,
    Figures,
    Means,
    Result,
    Row,
    Say,
    Several,
    Size,
    Suite,
)
from agent.benchmark.suites import data_file
from agent.data_files import read_data
from agent.simulator import splits
from agent.simulator.nodes import node_mix
from agent.simulator.runs import simulate
from agent.simulator.workloads import Workload

KNOWLEDGE = "knowledge.json"


class Asked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A comparison as the data file has it."""

    mode: str
    metric: str
    baseline: str
    arms: tuple[str, ...] = ()
    loads: tuple[float, ...] = ()
    each: bool = False
    band: float = 0.0
    title: str = ""


class Data(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of ``mixed-nodes.yaml``."""

    nodes: dict[str, int]
    loads: tuple[float, ...]
    windows: BySize[Several]
    part: splits.Part
    learning: Learning
    speeds: SpeedSource
    modes: dict[str, dict[str, Arm]]
    comparisons: tuple[Asked, ...]

    def __post_init__(self) -> None:
        if not self.loads or min(self.loads) <= 0:
            raise ValueError(f"loads are numbers above 0, such as 0.8, got {self.loads}")
        node_mix(self.nodes)
        for asked in self.comparisons:
            if asked.mode not in self.modes:
                raise ValueError(f"a comparison names mode {asked.mode!r}, and there is none")
            arms = self.modes[asked.mode]
            for arm in (asked.baseline, *asked.arms):
                if arm not in arms:
                    raise ValueError(
                        f"a comparison names arm {arm!r}, and mode {asked.mode!r} has "
                        f"{', '.join(arms)}"
                    )


@lru_cache(maxsize=4)
def _workload(
    counts: tuple[tuple[str, int], ...], window: str, part: splits.Part, load: float, seed: int
) -> Workload:
    trace, span, _ = window.split(" ")
    start, stop = map(int, span.split("–"))
    jobs = splits.part_jobs(trace, part, evaluation=True)
    cut = splits.Window(trace, part, start, stop, jobs)
    return cut.workload(measured(), node_mix(dict(counts)), load=load, seed=seed)


class MixedNodes(Suite):
    """Orders, deferrals and places; and places only, which is all that an extender can choose."""

    name = "mixed-nodes"
    title = (
        "Policies on nine nodes of eight GPUs, three each of V100, P100 and K80, with speeds as "
        "Gavel measured them and jobs of Philly's virtual clusters."
    )

    def __init__(self, path: Path | None = None) -> None:
        self.data = read_data(path or data_file(self.name), Data)
        self._nodes = node_mix(self.data.nodes)
        self.comparisons = [self._comparison(asked) for asked in self.data.comparisons]
        self.units = dict.fromkeys(("mean_completion", "p99", "makespan"), ("h", 3600.0))
        self.notes = [
            "Settings are what a policy may decide. Order and place: which job goes next, where, "
            "and whether it rather waits. Place only: first come, first served, without waiting, "
            "which is all that an extender can choose.",
            "Agents know what train windows taught them: speeds from noisy readings, run times by "
            "kind of work. Speeds are their own cluster's and, unless an arm says otherwise, those "
            "that the other clusters share in a federation. Arms with speeds known, the oracles "
            "and the bound are told the truth.",
            "Worst tenant: completion time over fastest run time, both summed, of the gang size "
            "that fares worst; the traces name no tenants.",
        ]

    def _setting(self, mode: str, load: float) -> str:
        return f"{mode}, load {load:g}"

    def _comparison(self, asked: Asked) -> Comparison:
        loads = asked.loads or self.data.loads
        name = asked.metric.replace("_", " ")
        return Comparison(
            metric=asked.metric,
            baseline=asked.baseline,
            arms=asked.arms,
            settings=tuple(self._setting(asked.mode, load) for load in loads),
            pooled=not asked.each,
            band=asked.band,
            title=asked.title or f"{asked.mode}: {name} to {asked.baseline}",
        )

    def cells(self, size: Size) -> list[Cell]:
        """Window by window, so that arms find its jobs made."""
        found = []
        for trace in splits.available():
            parts = splits.windows(
                trace, self.data.part, measured(), self._nodes,
                count=self.data.windows.of(size), evaluation=True,
            )  # fmt: skip
            for seed, part in enumerate(parts):
                window = f"{trace} {part.start}–{part.stop} #{seed}"
                found += [
                    Cell(self.name, self._setting(mode, load), arm, window, trace, seed)
                    for load in self.data.loads
                    for mode, arms in self.data.modes.items()
                    for arm in arms
                ]
        return found

    def prepare(self, size: Size, folder: Path, say: Say) -> None:
        """Live through the train windows of every trace that is there."""
        del size
        learn_all(folder / KNOWLEDGE, self._nodes, self.data.learning, say)

    def inputs(self, size: Size) -> list[Path]:
        """Traces and splits."""
        del size
        return split_files()

    def run(self, cell: Cell, folder: Path) -> Figures:
        """One arm on one window."""
        mode, _, load = cell.setting.rpartition(", load ")
        arm = self.data.modes[mode][cell.arm]
        speeds, nodes = measured(), self._nodes
        counts = tuple(self.data.nodes.items())
        workload = _workload(counts, cell.window, self.data.part, float(load), cell.seed)
        if arm.bound:
            return {
                "mean_completion": completion_bound(workload, speeds, nodes),
                "makespan": makespan_bound(workload, speeds, nodes),
            }
        sim = informed(
            arm, workload, self._nodes, speeds, known=folder / KNOWLEDGE, trace=cell.trace,
            source=self.data.speeds, seed=cell.seed,
        )  # fmt: skip
        return figures(simulate(sim, arm.make(), seed=cell.seed), workload, speeds)

    def findings(self, means: Means, results: Sequence[Result]) -> list[str]:
        """Who is best and by how much, what is left to gain, and who loses."""
        del means
        found = []
        for asked, result in zip(self.data.comparisons, results, strict=True):
            rows, metric = list(result.rows), asked.metric.replace("_", " ")
            if asked.metric != "mean_completion" or not rows:
                continue
            if asked.each:
                found += [_by_load(arm, asked, rows) for arm in dict.fromkeys(r.arm for r in rows)]
                continue
            arms = self.data.modes[asked.mode]
            honest = [row for row in rows if not arms[row.arm].told]
            best = min(honest, key=lambda row: row.mean)
            text = (
                f"{asked.mode}: {best.arm} is best, with {metric} {_percent(best)} to "
                f"{asked.baseline} ({best.verdict})."
            )
            bounds = [row for row in rows if arms[row.arm].bound]
            if bounds:
                left = 100.0 * (1.0 - bounds[0].mean / best.mean)
                text += f" No policy could take more than {left:.1f} % off its time."
            worse = [row.arm for row in honest if row.verdict == "worse"]
            if worse:
                text += f" Beyond doubt worse than {asked.baseline}: {', '.join(worse)}."
            found.append(text)
        return found


def _percent(row: Row) -> str:
    return (
        f"{100 * (row.mean - 1):+.1f} % ({100 * (row.low - 1):+.1f} … {100 * (row.high - 1):+.1f})"
    )


def _by_load(arm: str, asked: Asked, rows: Sequence[Row]) -> str:
    """One arm against the baseline at each load."""
    loads = [
        f"{_percent(row)} at {row.setting.rpartition(' ')[2]}, {row.verdict}"
        for row in rows
        if row.arm == arm
    ]
    return f"{asked.mode}: {arm} to {asked.baseline} by load: {'; '.join(loads)}."
