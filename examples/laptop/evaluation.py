"""What the agents learned, judged on jobs that none of them has seen; called by ``demo``.

All arms meet the same jobs on the same nodes with the same random numbers, window by window. An
agent's arm takes the policy and the speeds that its learner left in its state directory.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from agent.cluster import speeds_file
from agent.cluster.gpus import gpu_spec
from agent.cluster.growth import Catalogue, fill_speeds
from agent.cluster.view import gpu_group
from agent.scheduling.decision import Policy, make_policy
from agent.settings import DEFAULT_RULE
from agent.simulator.hardware import SpeedTable
from agent.simulator.manifest import GPU_PRODUCTS, label_values
from agent.simulator.runs import Result, simulate
from agent.simulator.simulation import Simulation, new_simulation
from agent.simulator.workloads import Workload, fastest_s
from agent.statistics import Ratio, paired_ratio
from common.weights import load
from examples.laptop.members import Member

WINDOWS = 200
BASELINE, RULE, ALONE = "LeastAllocated", "best rule", "agent alone"
SHARED_RULE, FEDERATED = "rule, shared speeds", "federated"
ARMS = (BASELINE, RULE, ALONE, SHARED_RULE, FEDERATED)


@dataclass(frozen=True)
class Arm:
    """One policy over all windows of one member."""

    name: str
    mean: float
    """Mean completion time, s."""
    p99: float
    """Mean over windows of the 99th percentile of completion times, s."""
    makespan: float
    """Mean over windows, s."""
    oom_kills: int
    unfinished: int
    against_baseline: Ratio | None
    """Mean completion time over LeastAllocated's; None for itself."""
    against_rule: Ratio | None
    """Mean completion time over the best rule's; None for the baseline and that rule."""
    policy: str
    """Version of the learned policy; empty for a rule alone."""


def catalogue(speeds: SpeedTable) -> Catalogue:
    """The simulator's kinds and GPU types under the names that they bear in a live cluster."""
    names = Catalogue(
        lambda model: None if (s := gpu_spec(model)) is None else (s.tflops, s.bandwidth, s.memory)
    )
    for gpu_type in speeds.gpu_types:
        names.model(GPU_PRODUCTS[gpu_type], 0.0)
    labels = label_values(speeds.job_types)
    for job in labels:
        names.job_types.setdefault(job, len(names.job_types))
    for job_type, gpus in zip(speeds.kind_type, speeds.kind_gpus, strict=True):
        names.kind(labels[job_type], int(gpus))
    return names


def remember(sim: Simulation, played: Workload, speeds: SpeedTable) -> None:
    """Fill the history of run times with the jobs that the live cluster played."""
    view = sim.cluster
    kind = np.where(played.kind < 0, len(speeds), played.kind)
    for k, log_time in zip(kind, np.log(fastest_s(played, speeds)), strict=True):
        for table, row in (
            (view.history_kind, k),
            (view.history_type, view.kind_type[k]),
            (view.history_gpus, gpu_group(int(view.kind_gpus[k]))),
        ):
            table[row] += 1.0, log_time


def learned(state: Path) -> tuple[speeds_file.SpeedsFile | None, Policy, str]:
    """Speeds, greedy policy and its version as an agent left them; its rule where none passed."""
    path = state / "speeds.json"
    speeds = speeds_file.read(path) if path.exists() else None
    policy_path = state / "policy" / "current.safetensors"
    if not policy_path.exists():
        return speeds, make_policy(DEFAULT_RULE), ""
    arrays, metadata = load(policy_path)
    return speeds, make_policy(DEFAULT_RULE, arrays), metadata.get("version", "?")


def evaluate(
    member: Member,
    states: dict[str, Path],
    played: Workload,
    speeds: SpeedTable,
    tick: Callable[[], None],
    *,
    windows: int = WINDOWS,
) -> list[Arm]:
    """Run all arms of a member over so many held-out windows.

    Args:
        states: state directories of the arms :data:`ALONE` and :data:`FEDERATED`. The best rule
            knows the speeds that the agent learned alone: it is what that agent starts from. The
            rule with shared speeds tells what of the federation's gain is the speeds' alone.
        tick: called after each window.
    """
    names = catalogue(speeds)
    own_speeds, alone, alone_version = learned(states[ALONE])
    shared_speeds, federated, federated_version = learned(states[FEDERATED])
    arms = {
        BASELINE: (None, make_policy("least-allocated"), ""),
        RULE: (own_speeds, make_policy(DEFAULT_RULE), ""),
        ALONE: (own_speeds, alone, alone_version),
        SHARED_RULE: (shared_speeds, make_policy(DEFAULT_RULE), ""),
        FEDERATED: (shared_speeds, federated, federated_version),
    }
    jobs, mix = member.jobs(), member.mix()
    results: dict[str, list[Result]] = {name: [] for name in arms}
    for seed in range(windows):
        workload = member.held_out(jobs, 1000 + seed, speeds)
        for name, (known, policy, _) in arms.items():
            sim = new_simulation(workload, mix, speeds, seed=seed, known_speeds=False)
            fill_speeds(sim.cluster, known, names)
            sim.cluster.slowdown[len(speeds)] = 0.0  # work without GPUs runs alike everywhere
            remember(sim, played, speeds)
            results[name].append(simulate(sim, policy, seed=seed))
        tick()
    means = {name: [result.mean for result in found] for name, found in results.items()}
    return [
        Arm(
            name=name,
            mean=float(np.mean(means[name])),
            p99=float(np.mean([result.p99 for result in found])),
            makespan=float(np.mean([result.makespan for result in found])),
            oom_kills=sum(result.oom_kills for result in found),
            unfinished=sum(result.unfinished for result in found),
            against_baseline=None
            if name == BASELINE
            else paired_ratio(means[name], means[BASELINE]),
            against_rule=paired_ratio(means[name], means[RULE])
            if name not in (BASELINE, RULE)
            else None,
            policy=arms[name][2],
        )
        for name, found in results.items()
    ]
