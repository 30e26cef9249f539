"""The suite ``federation``: what members gain from each other, and what a lying one costs.

Called by ``agent.benchmark.suites``. Policies and speed tables are judged apart: policies where
speeds are known to all, speed tables under the rule. All learning is done by ``prepare``; a cell
plays one policy or one speed table on one sealed window of one member.
"""

from collections.abc import Iterator, Sequence
from functools import cache, cached_property, lru_cache
from importlib.util import find_spec
from pathlib import Path

import msgspec
import numpy as np

from agent.benchmark.federation_data import Cluster, Data, clusters
from agent.benchmark.federation_findings import (
    ALONE,
    AVERAGE,
    KNOWN,
    MEMBERS,
    NEWCOMER,
    OWN,
    RULE,
    SET_ASIDE,
    comparisons,
    findings,
    notes,
)
from agent.benchmark.federation_speeds import predict
from agent.benchmark.federation_training import (
    HALVES,
    OWN_AND_LIAR,
    OWN_AND_PEERS,
    UNSEEN,
    Federated,
    course_file,
    federations,
    learn_all,
    lied,
    peers_arm,
    policy_file,
    read_knowledge,
    read_peers,
    read_policy,
    together,
)
from agent.benchmark.knowledge import by_tenant, fill
from agent.benchmark.suite import Cell, Figures, Means, Result, Say, Size, Suite
from agent.benchmark.suites import data_file
from agent.data_files import read_data
from agent.learning.speeds import Speeds as Predicted
from agent.scheduling.decision import make_policy
from agent.simulator import splits
from agent.simulator.hardware import SPEED_FILES, SpeedTable, load_speeds
from agent.simulator.runs import simulate
from agent.simulator.simulation import new_simulation
from agent.simulator.traces import trace_file
from agent.simulator.workloads import Workload, fastest_s

_ONLY = "only "
_measured = cache(load_speeds)


class Federation(Suite):
    """Federations of members with unlike nodes and jobs."""

    name = "federation"
    title = (
        "Federations of clusters with unlike nodes and jobs: what policies and speed tables of "
        "others are worth, and what a member that lies costs."
    )
    units = {  # noqa: RUF012 - the protocol's, never changed
        "mean_completion": ("h", 3600.0), "p99": ("h", 3600.0), "makespan": ("h", 3600.0),
    }  # fmt: skip

    def __init__(self, path: Path | None = None) -> None:
        self.data = read_data(path or data_file(self.name), Data)
        self.comparisons = comparisons(self.data, self._names)
        left_out = [name for name in self.data.members if name not in self._names]
        self.notes = notes(self.data, left_out)

    @cached_property
    def _clusters(self) -> dict[str, Cluster]:
        found = clusters(self.data.members)
        return {cluster.name: cluster for cluster in found}

    @property
    def _names(self) -> tuple[str, ...]:
        return tuple(self._clusters)

    def _arms(self) -> Iterator[tuple[str, str, tuple[str, ...]]]:
        """Setting, arm and the members that are judged."""
        names = self._names
        for count in [n for n in self.data.sizes if n <= len(names)]:
            yield together(count), RULE, names[:count]
            yield together(count), ALONE, names[:count]
        for federated in federations(self.data, names):
            if federated.setting == UNSEEN:
                others = tuple(name for name in names if name not in federated.members)
                yield UNSEEN, RULE, others
                yield UNSEEN, AVERAGE, others
                for member in federated.members:
                    yield UNSEEN, _ONLY + member, others
            elif federated.setting.startswith("one liar"):
                yield federated.setting, federated.arm, federated.members[:-1]
            else:
                yield federated.setting, federated.arm, federated.members
        for strategy in self.data.robust:
            if len(names) >= self.data.liar_members:
                honest = names[: self.data.liar_members - 1]
                yield lied(self.data.liar_members, strategy), RULE, honest
        counts = sorted({n for n in self.data.speeds.peers if n < len(names)})
        newcomer = [KNOWN, *map(peers_arm, counts)]
        if counts and counts[-1] > 0:
            newcomer.append(peers_arm(counts[-1], liar=True))
        for arm in newcomer:
            yield NEWCOMER, arm, names
        for arm in (KNOWN, OWN, OWN_AND_PEERS, OWN_AND_LIAR):
            if len(names) > 1 or arm in (KNOWN, OWN):
                yield MEMBERS, arm, names

    def cells(self, size: Size) -> list[Cell]:
        """Member by member and window by window, so that arms find its jobs made."""
        arms = list(self._arms())
        seeds = self.data.training.seeds.of(size)
        found = []
        for name, cluster in self._clusters.items():
            parts = cluster.sealed(
                _measured(), jobs=self.data.jobs, count=self.data.windows.of(size)
            )
            for number, part in enumerate(parts):
                for setting, arm, members in arms:
                    if name not in members:
                        continue
                    speeds = setting.startswith("speeds")
                    for seed in range(1 if speeds else seeds):
                        window = f"{name} {part.start}–{part.stop} #{number}"
                        if seed:
                            window += f" training {seed}"
                        trace = cluster.member.trace
                        found.append(Cell(self.name, setting, arm, window, trace, seed))
        return found

    def prepare(self, size: Size, folder: Path, say: Say) -> None:
        """All learning; what was done before is kept."""
        learn_all(self.data, list(self._clusters.values()), size, folder, say)

    def inputs(self, size: Size) -> list[Path]:
        """Traces, splits, and the hub's sources, which no import leads to."""
        del size
        known = splits.splits()
        traces = {known[c.member.trace].file for c in self._clusters.values()}
        tables = {f"gavel/{name}" for name in SPEED_FILES}
        hub = find_spec("coordinator")
        sources = [] if hub is None or hub.origin is None else Path(hub.origin).parent.glob("*.py")
        return [splits.FILE, *map(trace_file, sorted(traces | tables)), *sorted(sources)]

    @lru_cache(maxsize=8)  # noqa: B019 - one suite lives as long as its process
    def _workload(self, member: str, start: int, stop: int, number: int, load: float) -> Workload:
        cluster = self._clusters[member]
        jobs = splits.part_jobs(cluster.member.trace, "sealed", evaluation=True)
        window = splits.Window(cluster.member.trace, "sealed", start, stop, jobs)
        return window.workload(
            _measured(), cluster.nodes, load=load, seed=number, options=cluster.options
        )

    @lru_cache(maxsize=64)  # noqa: B019 - as above
    def _site(self, member: str) -> SpeedTable:
        return self._clusters[member].site_speeds(self.data.speeds.spread)

    @lru_cache(maxsize=256)  # noqa: B019 - as above
    def _predicted(self, folder: Path, arm: str, member: str) -> Predicted:
        if arm == peers_arm(0):
            return predict(self._site(member), None, None)
        own = None if "own" not in arm else read_knowledge(folder, member)
        peers = None if arm == OWN else read_peers(folder, arm, member)
        return predict(self._site(member), own, peers)

    def run(self, cell: Cell, folder: Path) -> Figures:
        """One policy or speed table on one window."""
        member, span, number, *_ = cell.window.split(" ")
        start, stop = map(int, span.split("–"))
        about_speeds = cell.setting.startswith("speeds")
        load = self.data.speeds.load if about_speeds else self.data.load
        seed = int(number.removeprefix("#"))
        workload = self._workload(member, start, stop, seed, load)
        nodes = self._clusters[member].nodes
        history = read_knowledge(folder, member).history
        figures: Figures = {}
        if about_speeds:
            speeds, policy = self._site(member), make_policy(self.data.rule)
            known = cell.arm == KNOWN
            sim = new_simulation(workload, nodes, speeds, seed=seed, known_speeds=known)
            predicted = None if known else self._predicted(folder, cell.arm, member)
            fill(sim, predicted, [] if cell.setting == NEWCOMER else history)
            # Members tell no readings of jobs that share a GPU here: all know what that costs.
            jobs = len(speeds.job_types)
            sim.cluster.interference[:jobs, :jobs] = -np.log(speeds.beside).mean(axis=0)
        else:
            speeds = _measured()
            sim = new_simulation(workload, nodes, speeds, seed=seed)
            fill(sim, None, history)
            if cell.arm == RULE:
                policy = make_policy(self.data.rule)
            else:
                arrays = read_policy(self._policy_file(cell, folder, member))
                policy = make_policy(self.data.rule, arrays, margin=self.data.margin)
            if cell.setting.startswith("one liar") and cell.arm != RULE:
                figures[SET_ASIDE] = self._set_aside(cell, folder)
        found = simulate(sim, policy, seed=seed)
        return figures | {
            "mean_completion": found.mean,
            "p99": found.p99,
            "worst_tenant": by_tenant(workload, found.completion, fastest_s(workload, speeds)),
            "makespan": found.makespan,
            "unfinished": float(found.unfinished),
        }

    def _policy_file(self, cell: Cell, folder: Path, member: str) -> Path:
        if cell.arm == ALONE:
            return policy_file(folder, ALONE, ALONE, cell.seed, member)
        if cell.arm.startswith(_ONLY):
            only = cell.arm.removeprefix(_ONLY)
            return policy_file(folder, ALONE, ALONE, cell.seed, only)
        if cell.arm == AVERAGE:
            half = HALVES[0] if member in self._names[len(self._names) // 2 :] else HALVES[1]
            return policy_file(folder, UNSEEN, half, cell.seed, "shared")
        return policy_file(folder, cell.setting, cell.arm, cell.seed, member)

    def _set_aside(self, cell: Cell, folder: Path) -> float:
        """In which share of the rounds the last member's update was set aside."""
        names = self._names[: self.data.liar_members]
        federated = Federated(cell.setting, cell.arm, names, {})
        refused = msgspec.json.decode(
            course_file(folder, federated, cell.seed).read_bytes(), type=dict[str, int]
        )
        return refused[names[-1]] / self.data.training.rounds

    def findings(self, means: Means, results: Sequence[Result]) -> list[str]:
        """What the comparisons say."""
        return findings(self.data, means, results)
