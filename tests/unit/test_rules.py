"""Each rule's order, node and deferral against what one works out by hand."""

import math

import numpy as np
import pytest

from agent.cluster.view import View, bind
from agent.scheduling.candidates import new_candidates, survey_queue
from agent.scheduling.decision import seed_kernels
from agent.scheduling.outlook import (
    PRIOR_LOG_RUN_TIME,
    expected_log_run_time,
    new_effects,
    observe,
    predict_effects,
    remaining_time,
)
from agent.scheduling.rules import RULE_HELP, RULES, Rule, wait_cost
from tests.unit.small_cluster import add_pod, small_view


def chosen(view: View, rule: str | Rule) -> tuple[int, int]:
    """The (pod, node) that the rule takes first; (−1, −1) for waiting."""
    eligible = np.ones(len(view.kind), np.bool_)
    named = RULES[rule] if isinstance(rule, str) else rule
    pod, node, _, _ = survey_queue(view, observe(view), named, eligible, new_candidates(64), False)
    return pod, node


def test_every_rule_is_explained() -> None:
    assert RULES.keys() == RULE_HELP.keys()


def half_full() -> View:
    """Three nodes of the fast type: 4 of 8 GPUs taken, empty, 7 of 8 taken; one pod waits."""
    view = small_view([(0, 8), (0, 8), (0, 8)], pods=16)
    for pod in range(11):
        add_pod(view, pod, cpu=8.0, memory=32.0)
        bind(view, pod, 0 if pod < 4 else 2)
    add_pod(view, 11, cpu=8.0, memory=32.0)
    return view


@pytest.mark.parametrize(
    ("rule", "node"),
    [("least-allocated", 1), ("most-allocated", 2), ("fastest", 2), ("hrrn-eft", 2)],
)
def test_which_of_equal_nodes(rule: str, node: int) -> None:
    seed_kernels(0)
    assert chosen(half_full(), rule) == (11, node)


def test_balanced_allocation_evens_out_cpu_and_memory() -> None:
    view = small_view([(-1, 0), (-1, 0)])
    add_pod(view, 0, kind=3, gpus=0.0, cpu=4.0, memory=2.0)
    bind(view, 0, 0)
    add_pod(view, 1, kind=3, gpus=0.0, cpu=0.5, memory=16.0)
    # Node 0 would be left with 3.5/8 = 0.44 of its CPU and 14/32 = 0.44 of its memory; node 1 with
    # 0.94 and 0.5.
    assert chosen(view, "balanced-allocation") == (1, 0)
    assert chosen(view, "least-allocated") == (1, 1)


def test_random_takes_every_node_sometimes() -> None:
    seed_kernels(1)
    view = half_full()
    assert {chosen(view, "random")[1] for _ in range(50)} == {0, 1, 2}


def test_fastest_takes_the_fast_type_and_falls_back_to_the_slow_one() -> None:
    view = small_view([(1, 1), (0, 1)])
    add_pod(view, 0)
    add_pod(view, 1)
    assert chosen(view, "fastest") == (0, 1)
    bind(view, 0, 1)
    assert chosen(view, "fastest") == (1, 0)


def test_patient_waits_where_only_a_node_more_than_four_times_slower_is_left() -> None:
    view = small_view([(1, 1)])
    view.slowdown[0, 1] = math.log(4.5)
    add_pod(view, 0)
    assert chosen(view, "fastest") == (0, 0)
    assert chosen(view, "patient") == (-1, -1)
    view.slowdown[0, 1] = math.log(3.5)
    assert chosen(view, "patient") == (0, 0)


def fast_node_busy(*, left: float) -> View:
    """The fast node is taken for ``left`` more seconds; a pod of 100 s (400 s slow) waits."""
    view = small_view([(0, 1), (1, 1)])
    add_pod(view, 0, run_time=left)
    bind(view, 0, 0)
    add_pod(view, 1, run_time=100.0)
    return view


@pytest.mark.parametrize(
    ("left", "expected"),
    [(290.0, (-1, -1)), (310.0, (1, 1))],
    ids=["290 s + 100 s is sooner than 400 s: waits", "310 s + 100 s is later: runs slow"],
)
def test_earliest_finish_waits_exactly_while_that_ends_sooner(
    left: float, expected: tuple[int, int]
) -> None:
    view = fast_node_busy(left=left)
    assert chosen(view, "fifo-eft") == expected
    assert chosen(view, "djct") == (1, 1)  # never waits


def test_waiting_counts_the_work_queued_ahead() -> None:
    view = fast_node_busy(left=200.0)
    context = observe(view)
    room = np.array([0, 1])
    alone = wait_cost(view, context, RULES["fifo-eft"], 1, 0.0, room)
    assert math.exp(alone) == pytest.approx(300.0)
    behind = wait_cost(view, context, RULES["fifo-eft"], 1, 60.0 * context.speed, room)
    assert math.exp(behind) == pytest.approx(360.0)


def test_shortest_first_and_its_oracle() -> None:
    view = small_view([(0, 1)])
    add_pod(view, 0, run_time=500.0, arrival=0.0)
    add_pod(view, 1, run_time=50.0, arrival=1.0)
    assert chosen(view, "fastest")[0] == 0
    assert chosen(view, "sjf")[0] == 1


def test_highest_response_ratio_lets_a_long_job_that_waited_go_first() -> None:
    view = small_view([(0, 1)])
    add_pod(view, 0, run_time=400.0, arrival=0.0)
    add_pod(view, 1, run_time=100.0, arrival=4000.0)
    view.clock[0] = 4000.0
    # Keys: log 400 - log(4400/400) = 3.59 against log 100 - log 1 = 4.61.
    assert chosen(view, "hrrn-eft")[0] == 0
    view.clock[0] = 0.0
    view.arrival[:2] = 0.0
    assert chosen(view, "hrrn-eft")[0] == 1


def test_a_pod_that_does_not_fit_does_not_block_those_behind_it() -> None:
    view = small_view([(0, 1)])
    add_pod(view, 0, kind=2, gpus=2.0, run_time=10.0)
    add_pod(view, 1, run_time=100.0)
    assert chosen(view, "least-allocated") == (1, 0)
    assert chosen(view, "hrrn-eft") == (1, 0)


def test_sharing_costs_own_slow_down_and_the_neighbours_delay() -> None:
    view = small_view([(0, 1), (0, 1)])
    view.interference[0, 0] = math.log(2.0)
    add_pod(view, 0, gpus=0.0, share=0.5, run_time=100.0)
    bind(view, 0, 0)
    add_pod(view, 1, gpus=0.0, share=0.5, run_time=1000.0)
    effects = new_effects(2)
    predict_effects(view, observe(view), 1, effects)
    assert np.exp(effects.log_time) == pytest.approx([2000.0, 1000.0])
    # The neighbour has 100 s left, all of it beside the newcomer, at half speed.
    assert effects.delay == pytest.approx([50.0, 0.0])
    assert chosen(view, "djct") == (1, 1)
    assert chosen(view, "most-allocated") == (1, 0)


def test_expected_run_time_shrinks_from_the_kind_to_type_gang_and_prior() -> None:
    view = small_view([(0, 8)])
    assert expected_log_run_time(view, 0) == pytest.approx(PRIOR_LOG_RUN_TIME)
    view.history_kind[0] = view.history_type[0] = view.history_gpus[0] = [8.0, 32.0]
    # Mean (32 + 2*8)/10 = 4.8; by gang and by type (32 + 48)/18 = 4.444; kind (32 + 4*4.089)/12.
    assert expected_log_run_time(view, 0) == pytest.approx((32 + 4 * (2 * 80 / 18 - 4.8)) / 12)


def test_a_job_that_outlived_its_mean_is_expected_to_go_on() -> None:
    assert remaining_time(100.0, 20.0) == 80.0
    assert remaining_time(100.0, 200.0) == pytest.approx(120.0)


def test_when_gpus_come_free_by_gang_size() -> None:
    view = small_view([(0, 2)])
    add_pod(view, 0, run_time=100.0)
    add_pod(view, 1, run_time=300.0)
    bind(view, 0, 0)
    bind(view, 1, 0)
    view.clock[0] = 10.0
    context = observe(view)
    assert context.free_in[0, :2] == pytest.approx([90.0, 290.0])
    assert context.free_in[0, 2] >= 1e18  # a gang of four never fits
    assert (context.idle[0], context.total[0]) == (0.0, 2.0)


def half_busy_fast_node() -> View:
    """One of two fast GPUs is taken, a slow one is free."""
    view = small_view([(0, 2), (1, 1)])
    add_pod(view, 0, run_time=1000.0)
    bind(view, 0, 0)
    return view


def test_what_good_gpus_are_worth_and_how_scarce_they_are() -> None:
    view = half_busy_fast_node()
    context = observe(view)
    # Kinds with GPUs run at 1/4, 1 and 1/4 of their fastest speed on the slow type: 1/2 on average.
    assert context.worth.tolist() == pytest.approx([0.5, 0.0], abs=1e-3)
    assert context.busy.tolist() == pytest.approx([0.5, 1.0 / 3.0])


@pytest.mark.parametrize(("price", "node"), [(0.0, 0), (11.9, 0), (12.1, 1)])
def test_a_pod_takes_scarce_fast_gpus_exactly_while_they_are_worth_their_price(
    price: float, node: int
) -> None:
    view = half_busy_fast_node()
    add_pod(view, 1, run_time=100.0)  # 400 s on the slow node; here 100 s + price · 1/4 · 100 s
    rule = RULES["djct"]._replace(price=price)
    assert chosen(view, rule) == (1, node)


def test_a_pod_that_gains_nothing_by_fast_gpus_leaves_them_to_others() -> None:
    view = half_busy_fast_node()
    view.request[0, 0] = 0.0
    add_pod(view, 1, kind=1, run_time=100.0)
    assert chosen(view, "priced-djct") == (1, 1)
    idle = small_view([(0, 2), (1, 1)])
    add_pod(idle, 0, run_time=100.0)
    assert chosen(idle, "priced-djct") == (0, 0), "nothing is scarce where all is idle"


def test_the_price_and_the_bias_count_where_a_pod_waits_for_fast_gpus_too() -> None:
    view = fast_node_busy(left=200.0)
    room, context = np.array([0, 1]), observe(view)
    rule = RULES["fifo-eft"]._replace(price=2.0, wait_bias=0.1)
    # All fast GPUs are taken, so a second there costs others 2 · 1/2 s.
    cost = wait_cost(view, context, rule, 1, 0.0, room)
    assert cost == pytest.approx(math.log(200.0 + 100.0 * 2.0) + 0.1, abs=1e-3)
    for gpus, power in ((2.0, 0.5), (2.0, 1.0)):
        view.request[1, 2] = gpus
        cost = wait_cost(view, context, rule._replace(gang=power), 1, 0.0, room)
        run = 100.0 * (1.0 + gpus**power)
        assert cost == pytest.approx(math.log(200.0 + run) + 0.1, abs=1e-3)


def test_a_pod_without_gpus_keeps_off_gpu_nodes_and_spreads() -> None:
    view = small_view([(0, 8), (0, 8), (-1, 0), (-1, 0)])
    add_pod(view, 0, cpu=4.0)
    bind(view, 0, 0)
    add_pod(view, 1, kind=3, gpus=0.0, cpu=3.0)
    bind(view, 1, 2)
    add_pod(view, 2, kind=3, gpus=0.0, cpu=6.0)
    assert chosen(view, "hrrn-eft") == (2, 3), "the emptiest node without GPUs"
    bind(view, 2, 3)
    add_pod(view, 3, kind=3, gpus=0.0, cpu=6.0)
    assert chosen(view, "hrrn-eft") == (3, 0), "of two GPU nodes the one with fewer idle GPUs"
