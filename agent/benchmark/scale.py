"""The suite ``scale``: the same policies on clusters of 9 to 1,200 nodes, and what they cost there.

Called by ``agent.benchmark.suites``. What agents know, and the weights of learned policies, come
from nine nodes; the clusters that they serve have the same three GPU types and the same load.
"""

import time
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path

import msgspec
import numpy as np

from agent.benchmark.arms import Arm, figures, informed
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
    Count,
    Curve,
    Figures,
    Means,
    Result,
    Say,
    Size,
    Suite,
)
from agent.benchmark.suites import data_file
from agent.data_files import read_data
from agent.scheduling.decision import Policy, decide_node, make_policy
from agent.simulator import splits
from agent.simulator.nodes import NodeMix, node_mix
from agent.simulator.runs import simulate
from agent.simulator.simulation import NEXT_ARRIVAL, Simulation, new_simulation
from agent.simulator.workloads import Workload, synthetic
from common.policy import initial_arrays

KNOWLEDGE = "knowledge.json"
BASELINE = "least-allocated"
TIMED = frozenset(
    {"decision_us", "decision_us_per_node", "prioritize_us", "prioritize_us_per_candidate"}
)


class Data(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of ``scale.yaml``."""

    sizes: tuple[int, ...]
    gpu_types: tuple[str, ...]
    load: float
    jobs_per_node: float
    windows: BySize[Count]
    part: splits.Part
    learning: Learning
    learned_on: dict[str, int]
    speeds: SpeedSource
    timed_calls: int
    arms: dict[str, Arm]

    def __post_init__(self) -> None:
        node_mix(self.learned_on)
        for size in self.sizes:
            if size < len(self.gpu_types):
                raise ValueError(f"{size} nodes are too few for {len(self.gpu_types)} GPU types")
        if BASELINE not in self.arms:
            raise ValueError(f"the arms lack {BASELINE}, which the others are compared with")
        if any(arm.bound for arm in self.arms.values()):
            raise ValueError("no bound is worked out here: clusters are too large for it")


class Scale(Suite):
    """Quality and cost of decisions as the cluster grows."""

    name = "scale"
    title = (
        "The same weights on 9 to 1,200 nodes of eight GPUs, a third each of V100, P100 and K80, "
        "at one load: what they save, and what a decision costs."
    )
    timed = TIMED

    def __init__(self, path: Path | None = None) -> None:
        self.data = read_data(path or data_file(self.name), Data)
        self.comparisons = [
            Comparison(metric, BASELINE, pooled=False, title=f"{name} to {BASELINE}")
            for metric, name in (("mean_completion", "mean completion time"), ("p99", "p99"))
        ]
        hours = dict.fromkeys(("mean_completion", "p99", "makespan"), ("h", 3600.0))
        self.units = hours | dict.fromkeys(TIMED, ("µs", 1.0))
        self.notes = [
            f"{self.data.jobs_per_node:g} jobs a node, drawn from the sealed jobs of a trace, "
            "arriving as a Poisson process.",
            "decision: what a run costs for each of its decisions, which choose pod and node, "
            "simulator included. prioritize: the extender's choice for one pod among all nodes, "
            "half way through, median; divided by the nodes it is the cost per candidate.",
        ]

    def _nodes(self, setting: str) -> NodeMix:
        return _mix(self.data.gpu_types, int(setting.split()[0].replace(",", "")))

    def cells(self, size: Size) -> list[Cell]:
        """Size by size, those that take longest last."""
        traces = [
            name
            for name in splits.available()
            if len(splits.part_jobs(name, self.data.part, evaluation=True))
        ]
        return [
            Cell(self.name, f"{count:,} nodes", arm, f"{trace} #{seed}", trace, seed)
            for count in self.data.sizes
            for trace in traces
            for seed in range(self.data.windows.of(size))
            for arm in self.data.arms
        ]

    def prepare(self, size: Size, folder: Path, say: Say) -> None:
        """Live through the train windows of every trace that is there, on nine nodes."""
        del size
        nodes = node_mix(self.data.learned_on)
        learn_all(folder / KNOWLEDGE, nodes, self.data.learning, say)

    def inputs(self, size: Size) -> list[Path]:
        """Traces and splits."""
        del size
        return split_files()

    def run(self, cell: Cell, folder: Path) -> Figures:
        """One arm on one cluster: a whole run, and half of one to time the extender's choice in."""
        data, arm, nodes = self.data, self.data.arms[cell.arm], self._nodes(cell.setting)
        count = int(data.jobs_per_node * len(nodes))
        workload = _workload(
            cell.trace, data.part, data.gpu_types, len(nodes), count, data.load, cell.seed
        )
        policy = arm.make()
        _warm_up()

        def fresh() -> Simulation:
            return informed(
                arm, workload, nodes, measured(), known=folder / KNOWLEDGE, trace=cell.trace,
                source=data.speeds, seed=cell.seed,
            )  # fmt: skip

        sim = fresh()
        begun = time.process_time()
        found = simulate(sim, policy, seed=cell.seed)
        spent = 1e6 * (time.process_time() - begun) / max(found.decisions, 1)
        half = fresh()
        simulate(half, policy, seed=cell.seed, jobs=count // 2)
        asked = _prioritize(half, policy, data.timed_calls)
        return figures(found, workload, measured()) | {
            "decision_us": spent,
            "decision_us_per_node": spent / len(nodes),
            "prioritize_us": asked,
            "prioritize_us_per_candidate": asked / len(nodes),
        }

    def findings(self, means: Means, results: Sequence[Result]) -> list[str]:
        """How the saving changes with size."""
        del means
        return [
            f"{row.arm}, {row.setting}: mean completion time {100 * (row.mean - 1):+.1f} % to "
            f"{BASELINE} ({row.verdict})."
            for row in results[0].rows
        ]

    def curves(self, means: Means) -> list[Curve]:
        """Cost per candidate, and per decision, over nodes."""
        made = []
        for metric, title in (
            ("prioritize_us_per_candidate", "The extender's choice, per candidate"),
            ("decision_us", "A decision of a run"),
        ):
            lines = {
                arm: [
                    (float(len(self._nodes(setting))), arms[arm][metric])
                    for setting, arms in means.items()
                    if arm in arms
                ]
                for arm in self.data.arms
            }
            made.append(Curve(title, "nodes", "µs", lines, log_x=True, log_y=True))
        return made


def _mix(gpu_types: Sequence[str], nodes: int) -> NodeMix:
    """So many nodes, as evenly of each GPU type as their number allows."""
    each, more = divmod(nodes, len(gpu_types))
    return node_mix({name: each + (i < more) for i, name in enumerate(gpu_types)})


@lru_cache(maxsize=2)
def _workload(
    trace: str, part: splits.Part, gpu_types: tuple[str, ...], nodes: int, count: int,
    load: float, seed: int,
) -> Workload:  # fmt: skip
    jobs, mix = splits.part_jobs(trace, part, evaluation=True), _mix(gpu_types, nodes)
    return synthetic(jobs, measured(), mix, arrivals="poisson", count=count, load=load, seed=seed)


@cache
def _warm_up() -> None:
    """Have the kernels loaded before anything is timed."""
    part, types = splits.available()[0], ("v100",)
    workload = _workload(part, "train", types, 1, 20, 0.8, 0)
    policy = make_policy("hrrn-eft", initial_arrays())
    sim = new_simulation(workload, _mix(types, 1), measured())
    simulate(sim, policy)
    _prioritize(sim, policy, 1)


def _prioritize(sim: Simulation, policy: Policy, calls: int) -> float:
    """Median µs that it takes to score every node for one of the next pods to arrive."""
    nodes, last = np.arange(len(sim.cluster.gpu_type)), len(sim.state) - 1
    took = []
    for call in range(calls + 2):  # the first two warm up
        pod = min(int(sim.counters[NEXT_ARRIVAL]) + call, last)
        begun = time.process_time_ns()
        decide_node(sim.cluster, policy, pod, nodes)
        took.append(time.process_time_ns() - begun)
    return float(np.median(took[2:])) / 1e3
