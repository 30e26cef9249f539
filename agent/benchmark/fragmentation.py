"""The suite ``fragmentation``: rules that fill a cluster of shared GPUs, by what is left unusable.

Called by ``agent.benchmark.suites``. Nodes, pods, order and measure are those of Weng et al.,
Beware of Fragmentation (USENIX ATC 2023), so that figures can be held against theirs.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from agent.arrays import Floats, Ints
from agent.benchmark.suite import (
    BySize,
    Cell,
    Comparison,
    Curve,
    Figures,
    Means,
    Result,
    Say,
    Size,
    Suite,
)
from agent.benchmark.suites import data_file
from agent.cluster.fragments import COUNT, EACH, GPU, Mix
from agent.data_files import read_data
from agent.simulator.filling import (
    ALLOCATED,
    FRAGMENTED,
    PERCENTS,
    REFUSED,
    RULE_HELP,
    RULES,
    fill,
)
from agent.simulator.fragmentation import (
    Fleet,
    Requests,
    arrivals,
    gpu_models,
    open_fleet,
    requests_of,
    typical_mix,
)
from agent.simulator.traces import TraceError, read_openb_nodes, read_openb_pods, trace_file

BOUND = "upper bound"
"""Arm that is no rule: what no placement can exceed."""


class Shares(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Percent of all GPUs."""

    allocated: float
    fragmented: float


class Data(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of ``fragmentation.yaml``."""

    nodes: str
    pods: dict[str, str]
    traces: BySize[tuple[str, ...]]
    orders: tuple[int, int]
    percents: tuple[int, ...]
    arms: tuple[str, ...]
    ours: str
    contrast: tuple[str, ...]
    """Arms besides ours that the findings tell of."""
    baseline: str
    published: dict[str, Shares] = {}

    def __post_init__(self) -> None:
        for trace in (*self.traces.reduced, *self.traces.full):
            if trace not in self.pods:
                raise ValueError(f"traces name {trace!r}, and pods have {', '.join(self.pods)}")
        for rule in (*self.arms, *self.published):
            if rule not in RULES:
                raise ValueError(f"no rule {rule!r}; there are {', '.join(RULES)}")
        for name in (self.ours, *self.contrast, self.baseline):
            if name not in self.arms:
                raise ValueError(f"{name!r} is not among the arms {', '.join(self.arms)}")
        if self.orders[1] - self.orders[0] < 2:
            raise ValueError(f"an interval needs at least 2 orders [from, to), got {self.orders}")
        known = all(1 <= p <= PERCENTS for p in self.percents)
        if 100 not in self.percents or min(self.percents) == 100 or not known:
            raise ValueError(
                f"percents are whole numbers from 1 to {PERCENTS} with 100 and one below it among "
                f"them, got {self.percents}"
            )


@lru_cache(maxsize=8)
def cluster(nodes: str, pods: str) -> tuple[Fleet, Requests, Ints, Mix]:
    """The empty nodes; the requests, which of them each pod makes, and the typical mix."""
    found = read_openb_nodes(trace_file(nodes))
    jobs, models = read_openb_pods(trace_file(pods)), gpu_models(found)
    requests, kind = requests_of(jobs, models)
    return open_fleet(found), requests, kind, typical_mix(jobs, models)


def most_allocated(fleet: Fleet, requests: Requests, pods: Ints) -> float:
    """Percent of all GPUs that no placement of these pods can exceed.

    How much of the demand fits on so many GPUs, one by one: a cutting stock problem, solved as a
    linear program by column generation (Gilmore and Gomory, Operations Research 9(6), 1961). CPU,
    memory, models and nodes are left out.
    """
    from scipy.optimize import linprog  # takes a second to import, and only this needs it

    asked = requests.table[pods]
    asked = asked[asked[:, EACH] > 0]
    sizes = np.unique(asked[:, EACH])
    demand = np.array([asked[asked[:, EACH] == size, COUNT].sum() for size in sizes])
    gpus = int(fleet.gpus.sum())
    patterns = [np.where(sizes == size, GPU // size, 0) for size in sizes]
    while True:
        columns = np.array(patterns).T
        rows = np.vstack([columns, np.ones(len(patterns))])
        solution: Any = linprog(-(sizes @ columns), rows, np.append(demand, gpus))
        price = -solution.ineqlin.marginals
        pattern, worth = _best_pattern(sizes, sizes - price[:-1])
        if worth <= price[-1] + 1e-6:
            return 100.0 * float(-solution.fun) / (gpus * GPU)
        patterns.append(pattern)


def _best_pattern(sizes: Ints, worths: Floats) -> tuple[Ints, float]:
    """How many of each size to put on one GPU for the most worth, and that worth."""
    best, last = np.zeros(GPU + 1), np.full(GPU + 1, -1)
    for room in range(1, GPU + 1):
        best[room] = best[room - 1]
        for i, size in enumerate(sizes):
            if size <= room and best[room - size] + worths[i] > best[room] + 1e-9:
                best[room], last[room] = best[room - size] + worths[i], i
    pattern, room = np.zeros(len(sizes), np.int64), GPU
    while room > 0:
        if last[room] < 0:
            room -= 1
        else:
            pattern[last[room]] += 1
            room -= int(sizes[last[room]])
    return pattern, float(best[GPU])


class Fragmentation(Suite):
    """Placement rules on pods that come and stay."""

    name = "fragmentation"
    title = (
        "Rules that place pods on the GPU nodes of Alibaba's openb trace until they are full: "
        "percent of all GPUs that are allocated, and that are free but fragmented as FGD has it."
    )

    def __init__(self, path: Path | None = None) -> None:
        self.data = read_data(path or data_file(self.name), Data)
        others = tuple(arm for arm in self.data.arms if arm != self.data.baseline)
        self.comparisons = [
            Comparison(
                metric, self.data.baseline, others, pooled=False, difference=True,
                higher_is_better=better,
                title=f"Percentage points {what} at {percent} % to {self.data.baseline}",
            )
            for what, better, percents in (
                ("fragmented", False, (100, max(self.data.percents))),
                ("allocated", True, (100, max(p for p in self.data.percents if p < 100))),
            )
            for percent in percents
            for metric in [f"{what}_{percent}"]
        ]  # fmt: skip
        self.units = {
            f"{what}_{percent}": ("%", 1.0)
            for what in ("fragmented", "allocated")
            for percent in self.data.percents
        }
        self.notes = [
            f"{arm}: {RULE_HELP[arm]}." for arm in self.data.arms
        ] + [
            "Figures are taken when pods have asked for so many percent of all GPUs. A pod that "
            "fits nowhere is refused, whatever the rule; refused are pods.",
            f"{BOUND}: no placement of the pods that have come can allocate more, were it not for "
            "CPU, memory and the nodes that GPUs are on.",
            "Settings are the variants of the trace that FGD's authors made; a window is an order "
            "of arrival.",
        ]  # fmt: skip

    def _there(self, size: Size) -> list[str]:
        """Traces of a size whose files are there."""
        found = []
        for trace in self.data.traces.of(size):
            try:
                trace_file(self.data.nodes), trace_file(self.data.pods[trace])
            except TraceError:
                continue
            found.append(trace)
        return found

    def cells(self, size: Size) -> list[Cell]:
        """Trace by trace, so that a worker reads each once."""
        return [
            Cell(self.name, trace, arm, f"order {seed}", trace, seed)
            for trace in self._there(size)
            for seed in range(*self.data.orders)
            for arm in (*self.data.arms, BOUND)
        ]

    def inputs(self, size: Size) -> list[Path]:
        """Nodes and pods."""
        traces = self._there(size)
        nodes = [trace_file(self.data.nodes)] if traces else []
        return nodes + [trace_file(self.data.pods[trace]) for trace in traces]

    def prepare(self, size: Size, folder: Path, say: Say) -> None:
        """Nothing: the rules know the typical mix and have nothing to learn."""
        del size, folder, say

    def run(self, cell: Cell, folder: Path) -> Figures:
        """Fill the nodes by one rule, in one order."""
        del folder
        fleet, requests, kind, mix = cluster(self.data.nodes, self.data.pods[cell.setting])
        pods, rank = arrivals(requests, kind, fleet, max(self.data.percents) / 100.0, cell.seed)
        if cell.arm == BOUND:
            asked = np.cumsum((requests.table[:, COUNT] * requests.table[:, EACH])[pods])
            count = int(np.searchsorted(asked, float(fleet.gpus.sum() * GPU))) + 1
            return {"allocated_100": most_allocated(fleet, requests, pods[:count])}
        track = fill(cell.arm, fleet, requests, mix, pods, rank, cell.seed).track
        figures: Figures = {}
        for what, column in (("fragmented", FRAGMENTED), ("allocated", ALLOCATED)):
            figures |= {f"{what}_{p}": float(track[p, column]) for p in self.data.percents}
        return figures | {"refused_100": float(track[100, REFUSED])}

    def curves(self, means: Means) -> list[Curve]:
        """Fragmented share while pods arrive, a chart for each trace."""
        return [
            Curve(
                f"Fragmented GPUs, {trace}", "GPUs asked for, %", "fragmented, % of all GPUs",
                {
                    arm: [(float(p), figures[f"fragmented_{p}"]) for p in self.data.percents]
                    for arm, figures in arms.items()
                    if arm != BOUND
                },
            )
            for trace, arms in means.items()
        ]  # fmt: skip

    def findings(self, means: Means, results: Sequence[Result]) -> list[str]:
        """Ours against the baseline, and ours of the baselines against the published ones."""
        told = []
        for result in results:
            metric = result.comparison.metric
            what, _, percent = metric.partition("_")
            for row in result.rows:
                loses = row.arm == self.data.ours and row.verdict == "worse"
                named = row.arm in (self.data.ours, *self.data.contrast)
                if not (loses or (named and metric == "fragmented_100")):
                    continue
                one, base = (
                    means[row.setting][arm][metric] for arm in (row.arm, self.data.baseline)
                )
                told.append(
                    f"{row.setting}, {what} at {percent} %: {row.arm} {one:.2f} % of all GPUs, "
                    f"{self.data.baseline} {base:.2f} %; {row.mean:+.2f} points (95 % interval "
                    f"{row.low:+.2f} to {row.high:+.2f}), {row.verdict}."
                )
        if "default" in means:
            told += self._published(means["default"])
        return told

    def _published(self, figures: Mapping[str, Mapping[str, float]]) -> list[str]:
        parts = [
            f"{rule} {figures[rule]['fragmented_100'] - known.fragmented:+.2f} and "
            f"{figures[rule]['allocated_100'] - known.allocated:+.2f}"
            for rule, known in self.data.published.items()
            if rule in figures
        ]
        return [
            "Less what FGD's authors published for 'default' at 100 %, in points of fragmented and "
            f"allocated: {'; '.join(parts)}."
        ] if parts else []  # fmt: skip
