"""One decision at a time: the same run as the whole, and what a failed bind costs."""

import numpy as np
import pytest

from agent.cluster.view import RUNNING, placement
from agent.scheduling.candidates import Candidates, new_candidates
from agent.scheduling.decision import make_policy, seed_kernels
from agent.scheduling.rules import RULES
from agent.simulator.hardware import SpeedTable, load_speeds
from agent.simulator.nodes import NodeMix, node_mix
from agent.simulator.runs import result, simulate
from agent.simulator.simulation import OOM_KILLS, Simulation, new_simulation
from agent.simulator.stepping import (
    Ledger,
    Semantics,
    new_ledger,
    next_choice,
    semantics,
    take_row,
)
from agent.simulator.tables import SHIPPED
from agent.simulator.traces import read_gavel
from agent.simulator.workloads import Options, Workload, synthetic

NODES = node_mix({"v100": 1, "p100": 1, "k80": 1})


@pytest.fixture(scope="module")
def speeds() -> SpeedTable:
    return load_speeds(SHIPPED / "gavel")


def workload(speeds: SpeedTable, *, exceed: float = 0.01, nodes: NodeMix = NODES) -> Workload:
    jobs = read_gavel(SHIPPED / "gavel" / "msr_seed0_ed69ec.csv")
    return synthetic(
        jobs, speeds, nodes, arrivals="poisson", count=60, load=1.2, seed=3,
        options=Options(shared=0.3, exceed=exceed),
    )  # fmt: skip


def begin(sim: Simulation, decisions: int = 5000) -> tuple[np.ndarray, Candidates, Ledger]:
    seed_kernels(0)
    pods = len(sim.state)
    return np.ones(pods, np.bool_), new_candidates(64), new_ledger(pods, decisions)


def follow_rule(sim: Simulation, what: Semantics) -> Ledger:
    eligible, out, ledger = begin(sim)
    decision = 0
    while True:
        count, row = next_choice(sim, what, eligible, out, ledger)
        if count == 0:
            return ledger
        take_row(sim, out, row, ledger, decision)
        decision += 1


@pytest.mark.parametrize(("rule", "place_only"), [("hrrn-eft", False), ("djct", True)])
def test_following_the_rule_is_the_rules_own_run(
    speeds: SpeedTable, rule: str, place_only: bool
) -> None:
    jobs = workload(speeds)
    stepped = new_simulation(jobs, NODES, speeds, seed=1)
    follow_rule(stepped, semantics(RULES[rule], place_only=place_only))
    whole = simulate(new_simulation(jobs, NODES, speeds, seed=1), make_policy(rule), seed=0)
    assert np.array_equal(result(stepped).completion, whole.completion)
    assert result(stepped).makespan == whole.makespan


def test_the_integral_of_jobs_is_the_sum_of_completion_times(speeds: SpeedTable) -> None:
    sim = new_simulation(workload(speeds), NODES, speeds, seed=1)
    ledger = follow_rule(sim, semantics(RULES["hrrn-eft"]))
    found = result(sim)
    assert found.unfinished == 0
    assert ledger.sums[1] == pytest.approx(found.completion.sum())
    assert 0 < ledger.sums[0] < ledger.sums[1]


def test_kills_are_charged_to_the_decisions_that_placed_the_pods(speeds: SpeedTable) -> None:
    sim = new_simulation(workload(speeds, exceed=0.5), NODES, speeds, seed=1)
    eligible, out, ledger = begin(sim)
    what, placed, decision = semantics(RULES["djct"], place_only=True), {}, 0
    while True:
        count, row = next_choice(sim, what, eligible, out, ledger)
        if count == 0:
            break
        placed[decision] = int(out.pods[row])
        take_row(sim, out, row, ledger, decision)
        decision += 1
    charged = np.flatnonzero(ledger.failures)
    assert len(charged)
    assert ledger.failures.sum() <= sim.counters[OOM_KILLS]  # forced placements charge nobody
    for by in charged:
        assert sim.attempts[placed[int(by)]] > 1 or np.isfinite(sim.finished[placed[int(by)]])
    assert ledger.failures.max() == 1.0


@pytest.mark.parametrize("place_only", [True, False])
def test_without_a_mask_nodes_without_room_are_offered_and_choosing_one_fails(
    speeds: SpeedTable, place_only: bool
) -> None:
    rule = RULES["djct" if place_only else "hrrn-eft"]
    sim = new_simulation(workload(speeds), NODES, speeds, seed=1)
    eligible, out, ledger = begin(sim)
    what = semantics(rule, place_only=place_only, unmasked=True)
    decision, failures = 0, 0
    while True:
        count, row = next_choice(sim, what, eligible, out, ledger)
        if count == 0:
            break
        pods, nodes = out.pods[:count], out.nodes[:count]
        full = [
            i for i in range(count)
            if pods[i] >= 0 and placement(sim.cluster, pods[i], nodes[i]) < 0
        ]  # fmt: skip
        if full and decision % 3 == 0:
            assert sim.cluster.counts[RUNNING] > 0
            before, clock = sim.cluster.counts.copy(), sim.cluster.clock[0]
            take_row(sim, out, full[0], ledger, decision)
            assert np.array_equal(before, sim.cluster.counts)
            assert sim.cluster.clock[0] == clock
            assert ledger.failures[decision] == 1.0
            assert ledger.moment[0] == 0
            failures += 1
        else:
            take_row(sim, out, row, ledger, decision)
        decision += 1
    assert failures > 0
    assert result(sim).unfinished == 0


def test_a_mask_offers_only_what_has_room(speeds: SpeedTable) -> None:
    sim = new_simulation(workload(speeds), NODES, speeds, seed=1)
    eligible, out, ledger = begin(sim)
    what = semantics(RULES["djct"], place_only=True)
    while (choice := next_choice(sim, what, eligible, out, ledger))[0] > 0:
        count, row = choice
        for pod, node in zip(out.pods[:count], out.nodes[:count], strict=True):
            assert placement(sim.cluster, pod, node) >= 0
        take_row(sim, out, row, ledger, -1)


def test_a_rule_that_waits_cannot_place_only() -> None:
    with pytest.raises(ValueError, match="djct"):
        semantics(RULES["hrrn-eft"], place_only=True)
