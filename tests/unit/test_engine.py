"""The embedded cluster's engine: speeds, sharing, memory, accounting, and determinism by seed."""

import math

import numpy as np
import pytest

from agent.cluster.fragments import COUNT, CPU, EACH
from agent.cluster.view import PENDING, imbalance
from agent.learning.reward import RewardWeights
from agent.learning.rollouts import rollout
from agent.scheduling.decision import make_policy
from agent.simulator.engine import MAX_ATTEMPTS, OOM_AFTER_S, advance, completion_times, place
from agent.simulator.hardware import SpeedTable
from agent.simulator.nodes import NodeMix
from agent.simulator.runs import result, simulate
from agent.simulator.simulation import (
    ABSENT,
    ACTIVE,
    DONE,
    FAILED,
    OOM_KILLS,
    SUCCEEDED,
    WAITING,
    Simulation,
    copy_simulation,
    new_simulation,
)
from agent.simulator.workloads import Workload
from common.policy import initial_arrays

SPEEDS = SpeedTable(
    gpu_types=("k80", "p100", "v100"),
    job_types=("a", "b"),
    kind_type=np.array([0, 1]),
    kind_gpus=np.array([1, 1]),
    speed=np.array([[1.0, 2.0, 4.0], [5.0, 5.0, 5.0]]),
    beside=np.tile(np.array([[0.5, 0.8], [1.0, 1.0]]), (3, 1, 1)),
    fits=np.ones((3, 2, 2), np.bool_),
)
FOREVER = math.inf


def cluster(*gpu_types: int, memory: float = 64.0) -> NodeMix:
    """One-GPU nodes of the given types with 8 cores, 16 GiB GPUs; −1 is a node with no GPU."""
    n = len(gpu_types)
    capacity = np.tile([8.0, memory, 1.0], (n, 1))
    capacity[np.array(gpu_types) < 0, 2] = 0.0
    return NodeMix(
        capacity=capacity,
        gpu_type=np.array(gpu_types, np.int64),
        gpu_memory=np.full(n, 16.0),
        names=tuple(f"n{i}" for i in range(n)),
    )


def work(*jobs: dict[str, float]) -> Workload:
    """Jobs of kind 0 with 100 steps that arrive at 0, but for what each dictionary says."""

    def column(name: str, default: float) -> np.ndarray:
        return np.array([job.get(name, default) for job in jobs], np.float64)

    memory, gpu_memory = column("memory", 8.0), column("gpu_memory", 4.0)
    share = column("share", 0.0)
    return Workload(
        arrival=column("arrival", 0.0),
        kind=column("kind", 0).astype(np.int64),
        steps=column("steps", 100.0),
        cpu=column("cpu", 1.0),
        memory=memory,
        gpus=np.where((share > 0) | (column("kind", 0) < 0), 0, 1),
        share=share,
        gpu_memory=gpu_memory,
        memory_peak=np.where(np.isnan(column("peak", math.nan)), memory, column("peak", 0.0)),
        gpu_memory_peak=np.where(
            np.isnan(column("gpu_peak", math.nan)), gpu_memory, column("gpu_peak", 0.0)
        ),
        deadline=np.full(len(jobs), np.inf),
        allowed=np.full(len(jobs), -1, np.int64),
    )


def run_out(sim: Simulation) -> None:
    """Let everything that was placed end, placing nothing further."""
    while advance(sim, FOREVER):
        pass


@pytest.mark.parametrize(("gpu_type", "seconds"), [(0, 100.0), (1, 50.0), (2, 25.0)])
def test_a_job_takes_its_steps_over_the_true_speed(gpu_type: int, seconds: float) -> None:
    sim = new_simulation(work({"arrival": 7.0}), cluster(gpu_type), SPEEDS)
    assert sim.state[0] == ABSENT
    assert advance(sim, FOREVER)
    assert sim.state[0] == WAITING
    place(sim, 0, 0)
    run_out(sim)
    assert sim.finished[0] == pytest.approx(7.0 + seconds)
    assert sim.state[0] == SUCCEEDED
    assert sim.cluster.requested.sum() == 0.0


def test_two_on_one_gpu_slow_each_other_for_as_long_as_both_run() -> None:
    shared = {"share": 0.5}
    sim = new_simulation(work(shared, shared | {"steps": 20.0}), cluster(0), SPEEDS)
    advance(sim, FOREVER)
    place(sim, 0, 0)
    place(sim, 1, 0)
    run_out(sim)
    # Both at 0.5 steps/s: the short one ends at 40 s, the long one has 80 steps left at 1 step/s.
    assert sim.finished.tolist() == [pytest.approx(120.0), pytest.approx(40.0)]


def test_interference_depends_on_who_is_beside_whom() -> None:
    sim = new_simulation(
        work({"share": 0.5}, {"share": 0.5, "kind": 1, "steps": 1000.0}), cluster(0), SPEEDS
    )
    advance(sim, FOREVER)
    place(sim, 0, 0)
    place(sim, 1, 0)
    assert sim.rate.tolist() == [pytest.approx(0.8), pytest.approx(5.0)]


def test_work_without_gpu_runs_alike_everywhere() -> None:
    sim = new_simulation(work({"kind": -1, "gpu_memory": 0.0}), cluster(-1), SPEEDS)
    advance(sim, FOREVER)
    place(sim, 0, 0)
    run_out(sim)
    assert sim.finished[0] == pytest.approx(100.0)


def test_a_node_out_of_memory_kills_the_pod_furthest_above_its_request() -> None:
    sim = new_simulation(
        work({"memory": 8.0, "peak": 12.0, "share": 0.5}, {"memory": 8.0, "share": 0.5}),
        cluster(0, memory=19.0),
        SPEEDS,
    )
    advance(sim, FOREVER)
    place(sim, 0, 0)
    place(sim, 1, 0)
    assert advance(sim, FOREVER)
    assert sim.cluster.clock[0] == OOM_AFTER_S
    assert sim.counters[OOM_KILLS] == 1
    assert sim.state.tolist() == [WAITING, ACTIVE]
    assert sim.cluster.queue[PENDING, 0] == 0
    place(sim, 0, 0)
    assert sim.left[0] == 100.0  # all progress is lost
    run_out(sim)
    assert sim.state[1] == SUCCEEDED


def test_memory_that_is_free_again_in_time_kills_nobody() -> None:
    sim = new_simulation(
        work({"peak": 12.0, "share": 0.5}, {"share": 0.5, "steps": 20.0}),
        cluster(0, memory=19.0),
        SPEEDS,
    )
    advance(sim, FOREVER)
    place(sim, 0, 0)
    place(sim, 1, 0)
    run_out(sim)
    assert sim.counters[OOM_KILLS] == 0
    assert sim.state.tolist() == [SUCCEEDED, SUCCEEDED]


def test_a_gpu_out_of_memory_fails_the_newcomer() -> None:
    sim = new_simulation(
        work({"share": 0.5, "gpu_peak": 10.0}, {"share": 0.5, "gpu_peak": 10.0, "arrival": 5.0}),
        cluster(0),
        SPEEDS,
    )
    advance(sim, FOREVER)
    place(sim, 0, 0)
    advance(sim, FOREVER)
    place(sim, 1, 0)
    run_out(sim)
    assert sim.state.tolist() == [SUCCEEDED, WAITING]


def test_the_third_kill_is_final_and_the_job_counts_as_unfinished() -> None:
    sim = new_simulation(
        work({"steps": 1e4, "share": 0.5}, {"steps": 1e4, "share": 0.5, "peak": 60.0}),
        cluster(0),
        SPEEDS,
    )
    advance(sim, FOREVER)
    place(sim, 0, 0)
    for _ in range(MAX_ATTEMPTS):
        place(sim, 1, 0)
        while sim.state[1] == ACTIVE:
            assert advance(sim, FOREVER)
    assert sim.state[1] == FAILED
    assert sim.counters[DONE] == 1
    run_out(sim)
    found = result(sim)
    assert found.unfinished == 1
    # Elapsed, and the 2,500 s that it still takes on its fastest type.
    assert found.completion[1] == pytest.approx(sim.cluster.clock[0] + 2500.0)


def test_unfinished_jobs_count_elapsed_plus_what_is_left() -> None:
    sim = new_simulation(work({}, {}, {"arrival": 500.0}), cluster(0), SPEEDS)
    advance(sim, FOREVER)
    place(sim, 0, 0)
    assert not advance(sim, 60.0)
    assert completion_times(sim).tolist() == [
        pytest.approx(100.0),  # runs, 40 s left
        pytest.approx(60.0 + 25.0),  # waits, 25 s on its fastest type
        pytest.approx(25.0),  # has not arrived
    ]
    assert result(sim).unfinished == 3


def test_the_clock_stops_at_until_and_nothing_happens_before_its_time() -> None:
    sim = new_simulation(work({"arrival": 10.0}), cluster(0), SPEEDS)
    assert not advance(sim, 9.0)
    assert sim.cluster.clock[0] == 9.0
    assert advance(sim, 11.0)
    assert sim.cluster.clock[0] == 10.0


def test_a_copy_goes_its_own_way() -> None:
    sim = new_simulation(work({}, {}), cluster(0, 2), SPEEDS)
    advance(sim, FOREVER)
    copy = copy_simulation(sim)
    place(copy, 0, 1)
    run_out(copy)
    assert sim.cluster.counts.tolist() == [2, 0]
    assert sim.counters[DONE] == 0
    assert copy.finished[0] == pytest.approx(25.0)


def test_what_jobs_ask_for_counts_once_however_often_they_are_tried() -> None:
    sim = new_simulation(
        work({"cpu": 2.0}, {"steps": 1e4, "peak": 100.0}, {"share": 0.5, "arrival": 1.0}),
        cluster(0, 0),
        SPEEDS,
    )
    advance(sim, FOREVER)
    copy = copy_simulation(sim)
    place(sim, 1, 0)
    while sim.counters[OOM_KILLS] == 0:
        advance(sim, FOREVER)
    view = sim.cluster
    rows = [view.asked[row, [CPU, COUNT, EACH]].tolist() for row in range(3)]
    assert rows == [[2000, 1, 1000], [1000, 1, 1000], [1000, 1, 500]]
    assert view.asked_count.sum() == pytest.approx(3.0, abs=0.01)
    assert copy.cluster.asked_count.sum() == pytest.approx(2.0, abs=0.01)


def many(seed: int) -> Workload:
    """Forty jobs of both kinds, arriving at random."""
    rng = np.random.default_rng(seed)
    arrivals = np.sort(rng.uniform(0.0, 2000.0, 40))
    return work(
        *(
            {"arrival": t, "kind": int(k), "steps": float(s)}
            for t, k, s in zip(
                arrivals, rng.integers(0, 2, 40), rng.uniform(50, 500, 40), strict=True
            )
        )
    )


def test_the_same_seed_gives_the_same_run() -> None:
    policy = make_policy("random")
    first, second, other = (
        simulate(new_simulation(many(1), cluster(0, 1, 2), SPEEDS, seed=4), policy, seed=seed)
        for seed in (5, 5, 6)
    )
    np.testing.assert_array_equal(first.completion, second.completion)
    assert not np.array_equal(first.completion, other.completion)


def test_a_fresh_network_runs_exactly_as_its_rule() -> None:
    for rule in ("hrrn-eft", "fifo-eft", "fastest"):
        alone = simulate(new_simulation(many(2), cluster(0, 1, 2), SPEEDS), make_policy(rule))
        fresh = simulate(
            new_simulation(many(2), cluster(0, 1, 2), SPEEDS),
            make_policy(rule, initial_arrays()),
        )
        np.testing.assert_array_equal(alone.completion, fresh.completion)


def test_usage_is_measured_as_telemetry_would_show_it() -> None:
    sim = new_simulation(many(3), cluster(0, 2), SPEEDS)
    assert np.isnan(sim.cluster.usage).all()
    simulate(sim, make_policy("fastest"), until=600.0)
    assert ((sim.cluster.usage >= 0.0) & (sim.cluster.usage <= 1.0)).all()


def test_imbalance_is_the_squared_distance_from_the_mean_use() -> None:
    sim = new_simulation(work({}, {}), cluster(0, 1), SPEEDS)
    advance(sim, FOREVER)
    assert imbalance(sim.cluster) == 0.0
    place(sim, 0, 0)
    assert imbalance(sim.cluster) == pytest.approx(0.5)  # uses 1 and 0, mean 0.5


def test_a_rollouts_rewards_add_up_to_the_completion_times() -> None:
    """With the jobs' term alone, by Little's law, up to the sign."""
    sim = new_simulation(many(4), cluster(0, 1, 2), SPEEDS)
    batch = rollout(
        sim,
        make_policy("hrrn-eft", initial_arrays(), margin=0.0, temperature=0.3),
        seed=1,
        decisions=1000,
        mean_run_seconds=1.0,
        weights=RewardWeights(alpha=0.0, beta=0.0, gamma=0.0, delta=1.0),
    )
    assert batch is not None
    assert (sim.state == SUCCEEDED).all()
    # The very first job arrives and is decided on at one moment, so nothing is left out.
    assert -batch.reward.sum() == pytest.approx(completion_times(sim).sum(), rel=1e-4)
    assert batch.ends.tolist() == [False] * (len(batch) - 1) + [True]
    scores = batch.rule_scores / 0.3
    scores[~batch.mask] = -np.inf
    log_prob = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(
        batch.log_prob, log_prob[np.arange(len(batch)), batch.action], atol=1e-5
    )


def test_an_oom_kill_is_charged_to_the_decision_that_placed_the_pod() -> None:
    sim = new_simulation(
        work({"share": 0.5, "steps": 1e4}, {"share": 0.5, "peak": 60.0, "arrival": 5.0}),
        cluster(0),
        SPEEDS,
    )
    batch = rollout(
        sim,
        make_policy("most-allocated"),
        seed=0,
        decisions=4,
        mean_run_seconds=1.0,
        weights=RewardWeights(alpha=0.0, beta=0.0, gamma=1.0, delta=0.0),
    )
    assert batch is not None
    assert batch.reward[:2].tolist() == [0.0, -1.0]
