"""When a real kube-scheduler calls an extender, and what it sends."""

import json
from collections.abc import Iterator

import pytest

from tests.kubernetes.facts.bench import NODES, PAIR, Bench, Scheduler, extender, until
from tests.kubernetes.facts.recording import (
    Answer,
    Call,
    RecordingExtender,
    Reply,
    as_json,
    keep_all,
    no_opinion,
    scores,
)

pytestmark = pytest.mark.usefixtures("scheduler", "wholes")

NAME = "calls"
ALL = "calls-all"
SIGNABLE = {
    "pluginConfig": [
        {"name": "PodTopologySpread", "args": {"defaultConstraints": [], "defaultingType": "List"}}
    ]
}
"""A profile whose pods may be batched: with the default constraints of spreading none may."""
SAMPLED = NODES * (50 - NODES // 125) // 100
"""144 of 300."""


@pytest.fixture(scope="module")
def scheduler(bench: Bench, server: RecordingExtender) -> Scheduler:
    """One whose second profile scores every node."""
    profile = {"schedulerName": ALL, "percentageOfNodesToScore": 100}
    filters = extender(server, filterVerb="filter")
    return bench.scheduler(NAME, [filters], profiles=[profile])


@pytest.fixture(scope="module")
def wholes(bench: Bench, server: RecordingExtender) -> Scheduler:
    """One that sends whole node objects."""
    entry = extender(server, filterVerb="filter", nodeCacheCapable=False)
    return bench.scheduler("wholes", [entry])


@pytest.fixture(autouse=True)
def _quiet(server: RecordingExtender) -> Iterator[None]:
    yield
    server.replies = {"filter": keep_all, "prioritize": no_opinion}


def ask(bench: Bench, server: RecordingExtender, name: str, scheduler: str, group: str) -> Call:
    """Let a pod be placed; the prioritize call about it."""
    bench.pod(name, scheduler, group=group)
    bench.node_of(name)
    (call,) = server.calls(name, "prioritize")
    return call


def test_a_request_is_json_under_gos_names_with_names_alone(
    bench: Bench, server: RecordingExtender
) -> None:
    call = ask(bench, server, "names", NAME, "pair")
    assert set(call.args) == {"Pod", "Nodes", "NodeNames"}
    assert call.args["Nodes"] is None
    assert sorted(call.args["NodeNames"]) == [*PAIR]
    pod = call.args["Pod"]
    assert pod["metadata"]["uid"] == bench.read("names").metadata.uid
    assert "managedFields" not in pod["metadata"]
    assert pod["spec"]["containers"][0]["resources"]["requests"] == {"cpu": "10m", "memory": "10Mi"}
    assert call.headers["Content-Type"] == "application/json"
    assert call.headers["Content-Length"] == str(len(call.body))


def test_whole_objects_come_as_a_node_list_many_times_as_large(
    bench: Bench, server: RecordingExtender
) -> None:
    named = ask(bench, server, "sized", NAME, "rest")
    whole = ask(bench, server, "sized-whole", "wholes", "rest")
    assert whole.args["NodeNames"] is None
    items = whole.args["Nodes"]["items"]
    assert {"metadata", "spec", "status"} <= set(items[0])
    assert "managedFields" in items[0]["metadata"]  # taken off pods, but not off nodes
    pod = len(json.dumps(named.args["Pod"], separators=(",", ":")))
    a_name = (len(named.body) - pod) / len(named.nodes)
    a_node = (len(whole.body) - pod) / len(whole.nodes)
    assert a_name < len('"n-000",') + 1
    assert a_node > 40 * a_name


def test_of_many_feasible_nodes_a_sample_is_sent_unless_all_are_asked_for(
    bench: Bench, server: RecordingExtender
) -> None:
    assert len(ask(bench, server, "sampled", NAME, "").nodes) == SAMPLED == 144
    assert len(ask(bench, server, "all", ALL, "").nodes) == NODES


def test_two_profiles_share_extenders(bench: Bench, server: RecordingExtender) -> None:
    server.replies["prioritize"] = scores(n_000=1, n_001=5)
    for name, profile in (("of-one", NAME), ("of-other", ALL)):
        call = ask(bench, server, name, profile, "pair")
        assert call.args["Pod"]["spec"]["schedulerName"] == profile
        assert bench.node_of(name) == PAIR[1]


def test_filter_comes_first_and_prioritize_gets_what_it_kept(
    bench: Bench, server: RecordingExtender
) -> None:
    def drop_some(call: Call) -> Answer:
        kept = sorted(call.nodes)[:5]
        return as_json({"NodeNames": kept, "FailedNodes": {"n-200": "too hot"}})

    server.replies["filter"] = drop_some
    call = ask(bench, server, "ordered", ALL, "rest")
    first, second = server.calls("ordered")
    assert (first.verb, second.verb) == ("filter", "prioritize")
    assert len(first.nodes) == NODES - 3
    assert sorted(call.nodes) == sorted(first.nodes)[:5]


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("nothing", {}),
        ("null", {"NodeNames": None}),
        ("none", {"NodeNames": [], "FailedNodes": dict.fromkeys(PAIR, "too hot")}),
    ],
)
def test_a_filter_answer_without_names_leaves_no_node(
    bench: Bench,
    server: RecordingExtender,
    name: str,
    answer: dict[str, object],
) -> None:
    server.replies["filter"] = lambda _: as_json(answer)
    bench.pod(f"filter-{name}", NAME)
    condition = bench.condition(f"filter-{name}", "Unschedulable")
    assert ("2 too hot" in condition.message) == ("FailedNodes" in answer)
    assert server.calls(f"filter-{name}", "prioritize") == []
    bench.core.delete_namespaced_pod(f"filter-{name}", "default")


def test_filtering_whole_objects_makes_later_scores_blind(
    bench: Bench, server: RecordingExtender, scheduler: Scheduler, wholes: Scheduler
) -> None:
    """kubernetes#141781: the nodes come back without the pods that run on them."""
    for number in range(2):
        name = f"load-{number}"
        bench.pod(name, NAME, group="", cpu="10", nodeName=PAIR[0])
    for name, profile in (("seeing", NAME), ("blind", "wholes")):
        ask(bench, server, name, profile, "pair")
    seeing, blind = scheduler.plugins("seeing"), wholes.plugins("blind")
    assert seeing[PAIR[0]]["NodeResourcesFit"] + 20 < seeing[PAIR[1]]["NodeResourcesFit"]
    assert blind[PAIR[0]]["NodeResourcesFit"] == blind[PAIR[1]]["NodeResourcesFit"]


def whole_body(_: Call) -> Answer:
    return as_json([])


def chunked(_: Call) -> Answer:
    return Answer(b"[]", chunked=True)


def failing(_: Call) -> Answer:
    return Answer(b"no", status=500)


@pytest.mark.parametrize(
    ("reply", "kept"), [(whole_body, True), (chunked, False), (failing, False)]
)
def test_a_connection_is_kept_for_answers_of_known_length_only(
    bench: Bench, server: RecordingExtender, reply: Reply, kept: bool
) -> None:
    server.replies["prioritize"] = reply
    name = getattr(reply, "__name__", "").replace("_", "-")
    pods = [f"{name}-{number}" for number in range(5)]
    for pod in pods:
        bench.pod(pod, NAME)
        bench.node_of(pod)
    connections = [server.calls(pod, "filter")[0].connection for pod in pods[1:]]
    assert (len(set(connections)) == 1) == kept


def test_gated_pods_are_not_asked_about_and_go_in_the_order_of_their_gates(
    bench: Bench, server: RecordingExtender
) -> None:
    names = ["gate-a", "gate-b", "gate-c"]
    for name in names:
        bench.pod(name, NAME, gated=True)
    for name in names:
        condition = bench.condition(name, "SchedulingGated")
        assert (condition.type, condition.status) == ("PodScheduled", "False")
    assert not [call for call in server.calls() if call.pod in names]
    for name in reversed(names):
        path = [{"op": "remove", "path": "/spec/schedulingGates/0"}]
        bench.core.patch_namespaced_pod(name, "default", path)
    for name in names:
        bench.node_of(name)
    asked = [call.pod for call in server.calls(verb="prioritize") if call.pod in names]
    assert asked == [*reversed(names)]


def test_opportunistic_batching_is_off_beside_an_extender(
    bench: Bench, server: RecordingExtender
) -> None:
    batching = bench.scheduler("batching", [], profile=SIGNABLE, verbosity=2)
    beside = bench.scheduler("beside", [extender(server)], profile=SIGNABLE, verbosity=2)

    def hints(of: Scheduler) -> float:
        """Pods placed on a hint of the pod before them, over a row of one-a-node pods."""
        before = of.metric("scheduler_batch_attempts_total", result="hint_used")
        pods = [f"{of.name}-row-{number}" for number in range(6)]
        for pod in pods:
            bench.pod(pod, of.name, group="rest", cpu="31", gated=True)
        for pod in pods:
            path = [{"op": "remove", "path": "/spec/schedulingGates/0"}]
            bench.core.patch_namespaced_pod(pod, "default", path)
        for pod in pods:
            bench.node_of(pod)
        after = of.metric("scheduler_batch_attempts_total", result="hint_used")
        for pod in pods:
            bench.core.delete_namespaced_pod(pod, "default", grace_period_seconds=0)
        return after - before

    assert until(lambda: hints(batching), "pods alike are placed on a hint without an extender")
    assert hints(beside) == 0
    assert len({call.pod for call in server.calls(verb="prioritize") if "-row-" in call.pod}) == 6
    assert beside.lines("Disabling signatures for profile because it has extenders configured")
