"""Candidates, the guard margin, exploration and the scores that kube-scheduler gets."""

import math

import numpy as np
import pytest

from agent.cluster.view import View, bind
from agent.scheduling import description
from agent.scheduling.candidates import LOWEST_SCORE, MAX_QUEUE_CANDIDATES, WAIT_SCORE
from agent.scheduling.decision import (
    Choice,
    decide_node,
    decide_queue,
    extender_scores,
    make_policy,
    seed_kernels,
)
from common.features import COLUMN, FEATURE_COUNT, FEATURE_NAMES
from common.policy import initial_arrays
from common.weights import Arrays
from tests.unit.small_cluster import add_pod, small_view


def test_the_kernels_columns_are_those_of_the_layout() -> None:
    named = {
        "WAIT": "wait", "TFLOPS": "node_tflops", "CPU_LEFT": "node_cpu_left",
        "GPU_MEMORY_LEFT": "node_gpu_memory_left", "EXACT_FIT": "node_exact_fit",
        "SLOWDOWN": "effect_slowdown", "AGAINST_BEST": "effect_against_best",
        "WHOLE_NODE_IN": "effect_whole_node_in", "QUEUE_AHEAD": "queue_ahead",
        "RUNNING_PODS": "cluster_running", "POD_ORDER": "pod_order",
    }  # fmt: skip
    for constant, name in named.items():
        assert getattr(description, constant) == COLUMN[name]
    assert len(set(FEATURE_NAMES)) == FEATURE_COUNT == description.RUNNING_PODS + 1


def two_types(*, busy: bool = True) -> View:
    """A fast and a slow idle node; pod 0 (kind a) and pod 1 (kind b) wait.

    ``busy`` lets pod 7 run on a third node, the only one of the fast type that is taken.
    """
    view = small_view([(0, 1), (1, 1), (0, 1)])
    if busy:
        add_pod(view, 7, run_time=1000.0)
        bind(view, 7, 2)
    else:
        view.ready[2] = False
    add_pod(view, 0, run_time=100.0)
    add_pod(view, 1, kind=1, run_time=200.0)
    return view


def everyone(view: View) -> np.ndarray:
    """Eligibility of all pods."""
    return np.ones(len(view.kind), np.bool_)


def preferring(feature: str, weight: float = 8.0) -> Arrays:
    """A network whose correction grows with one feature: it passes it through one hidden unit."""
    arrays = initial_arrays()
    for array in arrays.values():
        array[:] = 0.0
    arrays["encoder.0.weight"][0, COLUMN[feature]] = 1.0
    arrays["encoder.1.weight"][0, 0] = 1.0
    arrays["correction.weight"][0, 0] = weight
    return arrays


def test_the_queue_offers_each_kind_on_each_type_and_waiting() -> None:
    choice = decide_queue(two_types(), make_policy("hrrn-eft"), everyone(two_types()))
    assert choice is not None
    rows = list(zip(choice.pods.tolist(), choice.nodes.tolist(), strict=True))
    assert rows == [(0, 0), (0, 1), (1, 0), (1, 1), (-1, -1)]
    assert choice.action == choice.rule_row == 0
    assert choice.rule_scores[0] == 0.0
    assert choice.rule_scores[1] == pytest.approx(-math.log(4.0), abs=0.01)
    assert choice.rule_scores[4] == WAIT_SCORE
    assert choice.features[4, COLUMN["wait"]] == 1.0
    assert choice.features[1, COLUMN["effect_slowdown"]] == pytest.approx(math.log(4.0))
    assert choice.features[1, COLUMN["effect_against_best"]] == pytest.approx(
        math.log(4.0), abs=0.01
    )
    assert choice.features[0, COLUMN["effect_against_best"]] == pytest.approx(
        -math.log(4.0), abs=0.01
    )


def test_waiting_is_not_offered_while_nothing_runs() -> None:
    view = two_types(busy=False)
    policy = make_policy("hrrn-eft", preferring("wait"), margin=0.0)
    choice = decide_queue(view, policy, everyone(view))
    assert choice is not None
    assert -1 not in choice.pods
    assert choice.pods[choice.action] == 0


def test_only_eligible_pods_are_offered() -> None:
    view = two_types()
    eligible = everyone(view)
    eligible[0] = False
    choice = decide_queue(view, make_policy("hrrn-eft"), eligible)
    assert choice is not None
    assert set(choice.pods.tolist()) == {1, -1}


def test_nothing_to_choose_from_is_no_choice() -> None:
    view = small_view([(0, 1)])
    policy = make_policy("hrrn-eft")
    assert decide_queue(view, policy, everyone(view)) is None
    add_pod(view, 0, kind=2, gpus=2.0)
    assert decide_queue(view, policy, everyone(view)) is None


def test_where_the_rule_waits_waiting_is_its_choice() -> None:
    view = small_view([(0, 1), (1, 1)])
    add_pod(view, 0, run_time=50.0)
    bind(view, 0, 0)
    add_pod(view, 1, run_time=100.0)
    choice = decide_queue(view, make_policy("hrrn-eft"), everyone(view))
    assert choice is not None
    assert choice.pods[choice.action] == -1
    assert choice.rule_scores[choice.action] == 0.0
    assert len(choice.pods) == 2


def test_the_rules_choice_is_offered_however_long_the_queue_is() -> None:
    kinds = 400
    view = small_view([(0, 1), (1, 1)], pods=kinds)
    view = view._replace(
        slowdown=np.zeros((kinds, 2)),
        kind_type=np.zeros(kinds, np.int64),
        kind_gpus=np.ones(kinds, np.int64),
        history_kind=np.zeros((kinds, 2)),
    )
    for pod in range(kinds):  # only the last in the rule's order fits
        cpu = 1.0 if pod == kinds - 1 else 2.0
        add_pod(view, pod, kind=pod, cpu=cpu, run_time=100.0 + pod)
    view.capacity[:, 0] = 1.0
    choice = decide_queue(view, make_policy("hrrn-eft"), everyone(view))
    assert choice is not None
    assert choice.pods[choice.action] == kinds - 1
    view.capacity[:, 0] = 8.0
    choice = decide_queue(view, make_policy("hrrn-eft"), everyone(view))
    assert choice is not None
    assert choice.pods[choice.action] == 0
    assert len(choice.pods) <= MAX_QUEUE_CANDIDATES
    assert (choice.rule_scores == 0.0).sum() == 1


def test_a_fresh_network_equals_the_rule() -> None:
    view = two_types()
    for rule in ("hrrn-eft", "least-allocated", "fastest"):
        seed_kernels(0)
        with_net = decide_queue(view, make_policy(rule, initial_arrays()), everyone(view))
        seed_kernels(0)
        alone = decide_queue(view, make_policy(rule), everyone(view))
        assert with_net is not None
        assert alone is not None
        assert with_net.action == alone.action == alone.rule_row


@pytest.mark.parametrize(
    ("margin", "row"), [(0.4, 4), (0.6, 0)], ids=["a gain above it", "a gain below it"]
)
def test_the_guard_margin_is_what_a_departure_from_the_rule_must_gain(
    margin: float, row: int
) -> None:
    view = two_types()
    # Waiting is scored −0.5 and corrected by +1: a gain of 0.5 over the rule's 0.
    policy = make_policy("hrrn-eft", preferring("wait"), margin=margin)
    choice = decide_queue(view, policy, everyone(view))
    assert choice is not None
    assert choice.scores[4] == pytest.approx(0.5, abs=1e-3)
    assert choice.action == row


def test_exploration_follows_the_softmax_of_the_scores() -> None:
    view = two_types()
    policy = make_policy("hrrn-eft", initial_arrays(), margin=0.0, temperature=0.5)
    seed_kernels(3)
    drawn = []
    for _ in range(4000):
        choice = decide_queue(view, policy, everyone(view))
        assert choice is not None
        drawn.append(choice.action)
        expected = choice.scores / 0.5
        log_prob = expected - np.log(np.exp(expected).sum())
        assert choice.log_prob == pytest.approx(log_prob[choice.action])
    frequency = np.bincount(drawn, minlength=5) / len(drawn)
    np.testing.assert_allclose(frequency, np.exp(log_prob), atol=0.03)


def test_exploration_keeps_the_guard_margin() -> None:
    view = two_types()
    # Waiting gains 0.5 on the rule's choice; a margin of 1 keeps it exp(−0.5 / 0.02) away.
    policy = make_policy("hrrn-eft", preferring("wait"), margin=1.0, temperature=0.02)
    taken = [decide_queue(view, policy, everyone(view)) for _ in range(200)]
    assert {choice.action for choice in taken if choice is not None} == {0}


def test_a_gang_that_no_node_holds_does_not_end_all_waiting() -> None:
    view = small_view([(0, 1), (1, 1)])
    add_pod(view, 0, run_time=50.0)
    bind(view, 0, 0)
    add_pod(view, 2, kind=2, gpus=2.0, run_time=1e6, arrival=-1.0)  # first in order, fits nowhere
    add_pod(view, 1, run_time=100.0)
    choice = decide_queue(view, make_policy("fifo-eft"), everyone(view))
    assert choice is not None
    assert choice.pods[choice.action] == -1  # 50 s + 100 s is sooner than 400 s on the slow node


def test_node_candidates_keep_the_order_that_they_were_asked_in() -> None:
    view = two_types()
    choice = decide_node(view, make_policy("hrrn-eft"), 0, np.array([1, 0]))
    assert choice.nodes.tolist() == [1, 0]
    assert choice.action == 1
    assert choice.rule_scores[1] == 0.0
    with pytest.raises(ValueError, match="no candidate"):
        decide_node(view, make_policy("hrrn-eft"), 0, np.array([], np.int64))


def test_a_node_that_is_full_by_our_figures_gets_no_point() -> None:
    view = two_types()
    bind(view, 1, 1)
    choice = decide_node(view, make_policy("hrrn-eft"), 0, np.array([0, 1]))
    assert choice.rule_scores[1] == LOWEST_SCORE
    assert extender_scores(choice).tolist() == [10, 0]


def test_scores_are_integers_from_0_to_10_with_the_action_alone_on_top() -> None:
    choice = Choice(
        features=np.zeros((4, FEATURE_COUNT), np.float32),
        pods=np.zeros(4, np.int64),
        nodes=np.arange(4),
        rule_scores=np.array([0.0, -0.01, -1.0, LOWEST_SCORE]),
        scores=np.array([0.0, -0.01, -1.0, LOWEST_SCORE]),
        rule_row=0,
        action=0,
        log_prob=0.0,
    )
    points = extender_scores(choice).tolist()
    assert points == [10, 8, 4, 0]
    assert all(type(point) is int for point in points)
