"""How a real kube-scheduler adds an extender's scores to its own."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.kubernetes.facts.bench import PAIR, SINGLE, Bench, Scheduler, extender
from tests.kubernetes.facts.recording import (
    Answer,
    RecordingExtender,
    as_json,
    no_opinion,
    scores,
)

pytestmark = pytest.mark.usefixtures("scheduler")

NAME = "scores"
WEIGHT = 13


@pytest.fixture(scope="module")
def scheduler(bench: Bench, server: RecordingExtender) -> Scheduler:
    return bench.scheduler(NAME, [extender(server, weight=WEIGHT)])


@pytest.fixture(autouse=True)
def _quiet(server: RecordingExtender) -> Iterator[None]:
    yield
    server.replies["prioritize"] = no_opinion


def prefers(node: str) -> dict[str, Any]:
    """An affinity that gives ``node`` all of NodeAffinity's points, and others none."""
    expression = {"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}
    term = {"weight": 100, "preference": {"matchExpressions": [expression]}}
    return {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [term]}}


@pytest.mark.parametrize(("first", "second"), [(10, 0), (7, 3), (-4, 2), (25, 11)])
def test_a_score_counts_weight_times_ten_and_is_not_clamped(
    bench: Bench, server: RecordingExtender, scheduler: Scheduler, first: int, second: int
) -> None:
    server.replies["prioritize"] = scores(n_000=first, n_001=second)
    name = f"factor-{first}-{second}".replace("--", "-minus-")
    bench.pod(name, NAME)
    assert bench.node_of(name) == PAIR[0 if first > second else 1]
    assert scheduler.added(name) == {
        PAIR[0]: first * WEIGHT * 10,
        PAIR[1]: second * WEIGHT * 10,
    }


@pytest.mark.parametrize(
    ("name", "score"),
    [("float", "7.0"), ("string", '"7"'), ("exponent", "1e1"), ("huge", "9223372036854775808")],
)
def test_one_score_that_is_no_integer_drops_the_whole_answer(
    bench: Bench, server: RecordingExtender, scheduler: Scheduler, name: str, score: str
) -> None:
    body = f'[{{"Host":"n-000","Score":9}},{{"Host":"n-001","Score":{score}}}]'
    server.replies["prioritize"] = lambda _: Answer(body.encode())
    bench.pod(name, NAME)
    assert bench.node_of(name) in PAIR
    assert scheduler.added(name) == dict.fromkeys(PAIR, 0)
    assert scheduler.lines("No score given by this extender", f'pod="default/{name}"', "unmarshal")


@pytest.mark.parametrize(("name", "answer"), [("null", None), ("empty", [])])
def test_no_scores_are_accepted_and_leave_the_plugins_to_decide(
    bench: Bench, server: RecordingExtender, scheduler: Scheduler, name: str, answer: Any
) -> None:
    server.replies["prioritize"] = lambda _: as_json(answer)
    bench.pod(name, NAME, affinity=prefers(PAIR[1]))
    assert bench.node_of(name) == PAIR[1]
    assert scheduler.added(name) == dict.fromkeys(PAIR, 0)
    assert not scheduler.lines("No score given by this extender", f'pod="default/{name}"')


def test_nodes_left_out_get_nothing_strangers_are_passed_over_and_repeats_add_up(
    bench: Bench, server: RecordingExtender, scheduler: Scheduler
) -> None:
    answer = [{"Host": "n-001", "Score": 2}, {"Host": "nowhere", "Score": 9}]
    server.replies["prioritize"] = lambda _: as_json([*answer, answer[0]])
    bench.pod("partial", NAME)
    assert bench.node_of("partial") == PAIR[1]
    assert scheduler.added("partial") == {PAIR[0]: 0, PAIR[1]: 2 * 2 * WEIGHT * 10}


def test_the_default_plugins_weigh_twelve_and_two_more_for_resource_claims(
    scheduler: Scheduler,
) -> None:
    (profile,) = scheduler.config()["profiles"]
    enabled = profile["plugins"]["multiPoint"]["enabled"]
    weights = {plugin["name"]: plugin["weight"] for plugin in enabled if plugin["weight"]}
    assert weights == {
        "TaintToleration": 3,
        "NodeAffinity": 2,
        "PodTopologySpread": 2,
        "InterPodAffinity": 2,
        "NodeResourcesFit": 1,
        "NodeResourcesBalancedAllocation": 1,
        "ImageLocality": 1,
        "DynamicResources": 2,
    }
    assert sum(weights.values()) - weights["DynamicResources"] == 12


def test_weight_13_outweighs_the_plugins_by_ten_points_and_not_by_one(
    bench: Bench, server: RecordingExtender, scheduler: Scheduler
) -> None:
    server.replies["prioritize"] = scores(n_000=10, n_001=0)
    bench.pod("far", NAME, affinity=prefers(PAIR[1]))
    assert bench.node_of("far") == PAIR[0]
    server.replies["prioritize"] = scores(n_000=10, n_001=9)
    bench.pod("near", NAME, affinity=prefers(PAIR[1]))
    assert bench.node_of("near") == PAIR[1]
    against = scheduler.plugins("near")
    assert against[PAIR[1]]["NodeAffinity"] - against[PAIR[0]]["NodeAffinity"] == 200
    added = scheduler.added("near")
    assert added[PAIR[0]] - added[PAIR[1]] == WEIGHT * 10


def test_prioritize_is_no_decision(bench: Bench, server: RecordingExtender) -> None:
    server.replies["prioritize"] = scores(n_000=10, n_001=9)
    bench.pod("elsewhere", NAME, affinity=prefers(PAIR[1]))
    assert bench.node_of("elsewhere") == PAIR[1]
    assert [call.nodes for call in server.calls("elsewhere")] in ([[*PAIR]], [[*reversed(PAIR)]])


def test_prioritize_is_skipped_where_one_node_is_left(
    bench: Bench, server: RecordingExtender, scheduler: Scheduler
) -> None:
    bench.pod("single", NAME, group="single")
    assert bench.node_of("single") == SINGLE
    assert server.calls("single") == []
    assert scheduler.totals("single") == {}
