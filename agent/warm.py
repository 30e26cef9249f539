"""Compiles every kernel once, so that no later process on this machine waits for it.

The install step runs ``python -m agent.warm``; everything else works without it, only slower at
its first start. What former versions compiled, some 90 MB each, goes once it is old.
"""

import contextlib
import math
import shutil
import time
from pathlib import Path

import numpy as np

from agent.arrays import kernel_cache
from agent.learning.ablated import Ablated, record_ablated, simulate_ablated
from agent.learning.reward import RewardWeights
from agent.learning.rollouts import rollout
from agent.scheduling.decision import decide_node, decide_queue, make_policy
from agent.scheduling.serve import warm_up
from agent.simulator.engine import advance
from agent.simulator.hardware import load_speeds
from agent.simulator.labels import label
from agent.simulator.nodes import node_mix
from agent.simulator.runs import simulate
from agent.simulator.simulation import copy_simulation, new_simulation
from agent.simulator.stepping import semantics
from agent.simulator.traces import read_gavel, trace_file
from agent.simulator.workloads import window
from common.features import FEATURE_COUNT
from common.policy import initial_arrays

OLD_DAYS = 30.0


def warm() -> None:
    """Run each entry point of the kernels on a small cluster."""
    speeds = load_speeds()
    nodes = node_mix({"v100": 1, "k80": 1})
    jobs = read_gavel(trace_file("gavel/msr_seed0_103959.csv"))
    workload = window(jobs, speeds, nodes, load=0.8, start=0, stop=10)
    greedy, exploring = (
        make_policy("hrrn-eft", initial_arrays(), temperature=t) for t in (0.0, 0.1)
    )
    sim = new_simulation(workload, nodes, speeds)
    simulate(copy_simulation(sim), greedy)
    label(copy_simulation(sim), greedy, seed=0, rows=20)
    rollout(copy_simulation(sim), exploring, seed=0, decisions=20, mean_run_seconds=3600.0)
    whole = Ablated(exploring, semantics(exploring.rule), np.ones(FEATURE_COUNT, np.float32), True)
    record_ablated(
        copy_simulation(sim), whole, seed=0, decisions=20, mean_run_seconds=3600.0,
        weights=RewardWeights(), delayed=True,
    )  # fmt: skip
    simulate_ablated(copy_simulation(sim), whole, seed=0)
    while not sim.cluster.counts[0]:
        advance(sim, math.inf)
    decide_queue(sim.cluster, greedy, np.ones(len(workload), np.bool_))
    decide_node(sim.cluster, greedy, int(sim.cluster.queue[0, 0]), np.arange(len(nodes)))
    warm_up("hrrn-eft")


def prune(current: Path) -> list[Path]:
    """Remove kernels of other versions that were last installed :data:`OLD_DAYS` ago; which.

    An installation that still uses them compiles them anew at its next start.
    """
    oldest, removed = time.time() - 86400.0 * OLD_DAYS, []
    with contextlib.suppress(OSError):  # what cannot be tidied is in nobody's way
        current.mkdir(parents=True, exist_ok=True)
        current.touch()
    for folder in current.parent.glob("kernels-*"):
        with contextlib.suppress(OSError):
            if not folder.is_symlink() and folder.stat().st_mtime < oldest:
                shutil.rmtree(folder)
                removed.append(folder)
    return removed


if __name__ == "__main__":
    warm()
    prune(kernel_cache())
