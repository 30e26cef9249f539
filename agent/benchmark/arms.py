"""Arms that are a rule and where its speeds are from, and what is measured of them.

Called by the suites ``mixed-nodes`` and ``scale``.
"""

from pathlib import Path

import msgspec

from agent.benchmark.knowledge import SpeedSource, by_tenant, fill, predicted, read
from agent.benchmark.suite import Figures
from agent.scheduling.decision import Policy, make_policy
from agent.scheduling.rules import RULES
from agent.simulator.hardware import SpeedTable
from agent.simulator.nodes import NodeMix
from agent.simulator.runs import Result
from agent.simulator.simulation import Simulation, new_simulation
from agent.simulator.workloads import Workload, fastest_s


class Arm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rule and where its speeds are from; or the lower bound."""

    rule: str = ""
    speeds: SpeedSource | None = None
    """None: as the suite says."""
    bound: bool = False

    def __post_init__(self) -> None:
        if self.bound == bool(self.rule):
            raise ValueError("an arm has a rule or is a bound: give one of 'rule' and 'bound'")
        if self.rule and self.rule not in RULES:
            raise ValueError(f"no rule {self.rule!r}; there are {', '.join(RULES)}")

    @property
    def told(self) -> bool:
        """Whether it is told what no agent can know."""
        return self.bound or self.speeds == "known" or RULES[self.rule].known

    def make(self) -> Policy:
        """The policy."""
        return make_policy(self.rule)


def informed(
    arm: Arm,
    workload: Workload,
    nodes: NodeMix,
    speeds: SpeedTable,
    *,
    known: Path,
    trace: str,
    source: SpeedSource,
    seed: int,
) -> Simulation:
    """A cluster before its first job, whose view has what an agent of ``trace``'s cluster knows.

    ``known`` is the file of ``agent.benchmark.knowledge``; ``source`` counts where the arm names
    none itself.
    """
    source = arm.speeds or source
    sim = new_simulation(
        workload, nodes, speeds, seed=seed, known_speeds=source == "known",
        known_run_times=RULES[arm.rule].known,
    )  # fmt: skip
    fill(sim, predicted(known, trace, source), read(known)[trace].history)
    return sim


def figures(found: Result, workload: Workload, speeds: SpeedTable) -> Figures:
    """What is measured of a run: seconds, a ratio for the worst tenant, and counts."""
    return {
        "mean_completion": found.mean,
        "p99": found.p99,
        "worst_tenant": by_tenant(workload, found.completion, fastest_s(workload, speeds)),
        "makespan": found.makespan,
        "unfinished": float(found.unfinished),
        "oom_kills": float(found.oom_kills),
    }
