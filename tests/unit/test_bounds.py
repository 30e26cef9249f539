"""Lower bounds against cases worked out by hand, and against what policies reach."""

import numpy as np
import pytest

from agent.benchmark.bounds import (
    completion_bound,
    makespan_bound,
    mean_busy,
    shortest_remaining,
)
from agent.scheduling.decision import make_policy
from agent.scheduling.rules import RULES
from agent.simulator.hardware import load_speeds
from agent.simulator.nodes import node_mix
from agent.simulator.runs import simulate
from agent.simulator.simulation import new_simulation
from agent.simulator.splits import windows
from agent.simulator.workloads import fastest_s


def test_shortest_remaining_preempts_for_shorter_jobs() -> None:
    # Job 0 needs 10 from 0; job 1 needs 2 from 1: it goes first, 0 ends at 12: 12 + 2.
    assert shortest_remaining(np.array([0.0, 1.0]), np.array([10.0, 2.0])) == pytest.approx(14.0)
    # The machine stands still between 3 and 5.
    assert shortest_remaining(np.array([0.0, 5.0]), np.array([3.0, 1.0])) == pytest.approx(4.0)


def test_the_mean_busy_time_is_the_mean_moment_of_work() -> None:
    # Job 0 works 0–1 and 3–12, mean 0.05 + 6.75; job 1 works 1–3, mean 2 after arrival at 1.
    found = mean_busy(np.array([0.0, 1.0]), np.array([10.0, 2.0]))
    assert found == pytest.approx((0.5 * 1 + 7.5 * 9) / 10 + (2.0 - 1.0))
    # Whole needs count: 9.5 are left of job 0 when job 1 with 9.8 comes; still it goes on.
    found = mean_busy(np.array([0.0, 0.5]), np.array([10.0, 9.8]))
    assert found == pytest.approx((0.25 * 0.5 + 15.05 * 9.5) / 10 + (5.4 - 0.5))


def test_no_policy_beats_the_bounds_and_the_best_come_near_them() -> None:
    speeds, nodes = load_speeds(), node_mix({"v100": 1, "p100": 1, "k80": 1})
    for trace in ("ed69ec", "7f04ca"):
        part = windows(trace, "train", speeds, nodes, length=60)[0]
        workload = part.workload(speeds, nodes, load=0.9, seed=0)
        mean = completion_bound(workload, speeds, nodes)
        makespan = makespan_bound(workload, speeds, nodes)
        assert mean >= fastest_s(workload, speeds).mean()
        best = np.inf
        for rule in ("least-allocated", "hrrn-eft", "sjf-oracle", "hrrn-eft-oracle"):
            sim = new_simulation(workload, nodes, speeds, seed=0, known_run_times=RULES[rule].known)
            found = simulate(sim, make_policy(rule), seed=0)
            assert found.unfinished == 0
            assert found.mean >= mean
            assert found.makespan >= makespan
            best = min(best, found.mean)
        assert best < 1.6 * mean


def test_work_without_gpus_has_no_such_bound() -> None:
    speeds, nodes = load_speeds(), node_mix({"v100": 1})
    workload = windows("ed69ec", "train", speeds, nodes)[0].workload(
        speeds, nodes, load=0.8, seed=0
    )
    workload.kind[0] = -1
    for bound in (completion_bound, makespan_bound):
        with pytest.raises(ValueError, match="holds none"):
            bound(workload, speeds, nodes)
