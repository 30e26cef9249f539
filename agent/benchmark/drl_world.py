"""What ``agent.benchmark.drl_mls`` is told and runs on: data, batches, and what agents know."""

from functools import lru_cache
from pathlib import Path
from typing import Literal

import msgspec

from agent.benchmark.arms import Arm, informed
from agent.benchmark.drl_learners import Learner, Lesson
from agent.benchmark.knowledge import Learning, measured
from agent.benchmark.suite import BySize, Count
from agent.scheduling.decision import Policy as Greedy
from agent.scheduling.decision import make_policy
from agent.scheduling.rules import FIFO, HRRN, RULES, SJF
from agent.simulator import splits
from agent.simulator.nodes import node_mix
from agent.simulator.simulation import Simulation
from agent.simulator.traces import read_openb_pods, trace_file
from agent.simulator.workloads import Options, Workload, fastest_s, synthetic

Arrivals = Literal["uniform", "poisson", "alibaba"]
ORDERS = {"fifo": FIFO, "sjf": SJF, "hrrn": HRRN}
OPENB = "openb/openb_pod_list_gpuspec10.csv"
KNOWLEDGE = "knowledge.json"
_TRAINING_SEED = 1 << 20  # batches that are judged have seeds far below


class Policy(Arm, frozen=True, forbid_unknown_fields=True):
    """An arm whose rule may be given another order of the pods."""

    order: Literal["", "fifo", "sjf", "hrrn"] = ""

    def make(self) -> Greedy:
        """The policy."""
        rule = RULES[self.rule]
        if self.order:
            rule = rule._replace(order=ORDERS[self.order])
        return make_policy(rule)


TOLD_NOTHING = Policy(rule="hrrn-eft")
"""What learners, who choose by themselves, know: any rule's but an oracle's."""


class Training(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How every learner is trained."""

    seeds: int
    rounds: BySize[Count]
    batches: int
    jobs: int

    def __post_init__(self) -> None:
        if min(self.seeds, self.batches) < 1 or self.jobs < 2:
            raise ValueError("training needs seeds and batches of at least 1, and jobs of 2")


class Data(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of ``drl-mls.yaml``."""

    nodes: dict[str, int]
    arrivals: tuple[Arrivals, ...]
    loads: tuple[float, ...]
    jobs: int
    shared: float
    batches: BySize[Count]
    part: splits.Part
    learning: Learning
    training: Training
    ours: str
    baselines: tuple[str, ...]
    policies: dict[str, Policy]
    learners: dict[str, Learner]
    whole: str
    ablations: dict[str, Learner]

    def __post_init__(self) -> None:
        if not self.loads or min(self.loads) <= 0:
            raise ValueError(f"loads are numbers above 0, such as 0.8, got {self.loads}")
        node_mix(self.nodes)
        Options(shared=self.shared)
        if self.jobs < 2 or not self.arrivals:
            raise ValueError("a batch needs at least 2 jobs, and arrivals at least one process")
        if self.whole not in self.ablations:
            raise ValueError(f"'whole' names {self.whole!r}, which is none of the ablations")
        for arm in (self.ours, *self.baselines):
            if arm not in self.policies and arm not in self.learners:
                raise ValueError(f"{arm!r} is neither one of the policies nor of the learners")

    @property
    def trained(self) -> dict[str, Learner]:
        """All learners by arm."""
        return self.learners | self.ablations


class World:
    """The nodes, batches of jobs for them, and simulations with what agents know of them."""

    def __init__(self, data: Data, folder: Path) -> None:
        self._data, self._known = data, folder / KNOWLEDGE
        self.speeds = measured()
        self.nodes = node_mix(data.nodes)
        self._openb = read_openb_pods(trace_file(OPENB))
        self.batch = lru_cache(maxsize=4)(self._batch)

    def _batch(
        self,
        trace: str,
        part: splits.Part,
        arrivals: str,
        load: float,
        seed: int,
        count: int,
    ) -> Workload:
        """``count`` jobs drawn from a part of a trace."""
        return synthetic(
            splits.part_jobs(trace, part, evaluation=part == "sealed"),
            self.speeds,
            self.nodes,
            arrivals=arrivals,
            count=count,
            load=load,
            seed=seed,
            options=Options(shared=self._data.shared),
            like=self._openb,
        )

    def simulation(self, arm: Policy, workload: Workload, trace: str, seed: int) -> Simulation:
        """A fresh one in which an agent knows what its own cluster taught it."""
        return informed(
            arm, workload, self.nodes, self.speeds, known=self._known, trace=trace,
            source="alone", seed=seed,
        )  # fmt: skip

    def lesson(self, number: int) -> Lesson:
        """Train jobs; traces, arrivals and loads in turn."""
        data, traces = self._data, splits.available()
        turn, trace = divmod(number, len(traces))
        turn, arrivals = divmod(turn, len(data.arrivals))
        load = data.loads[turn % len(data.loads)]
        seed = _TRAINING_SEED + number
        workload = self._batch(
            traces[trace], "train", data.arrivals[arrivals], load, seed, data.training.jobs
        )
        sim = self.simulation(TOLD_NOTHING, workload, traces[trace], seed)
        return Lesson(sim, float(fastest_s(workload, self.speeds).mean()))
