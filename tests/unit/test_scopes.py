"""Where gated pods may go: selectors, affinity, taints, tolerations, as kube-scheduler has it."""

import json
from pathlib import Path
from typing import Any

import pytest

from agent.cluster import objects
from agent.cluster.constraints import Scope, Taint
from agent.cluster.records import GATE, Node, Pod
from agent.cluster.state import ClusterState
from tests.unit.api_server import node_json, pod_json
from tests.unit.members import Member, gated
from tests.unit.members import node as gpu_node

GPU_TAINT = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}


@pytest.fixture
def member(tmp_path: Path) -> Member:
    return Member(tmp_path, rule="djct")  # never waits


def read_pod(spec: dict[str, Any], gates: tuple[str, ...] = (GATE,)) -> Pod:
    data = pod_json("p", gates=gates)
    data["spec"] |= spec
    return objects.pod(json.dumps(data).encode())


def read_node(labels: dict[str, str], taints: list[dict[str, str]] | None = None) -> Node:
    data = node_json("n1", metadata={"name": "n1", "labels": labels}, spec={"taints": taints})
    return objects.node(json.dumps(data).encode())


def affinity(*terms: dict[str, Any]) -> dict[str, Any]:
    required = {"nodeSelectorTerms": list(terms)}
    return {
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
    }


def line(key: str, operator: str, *values: str) -> dict[str, Any]:
    return {"key": key, "operator": operator, **({"values": list(values)} if values else {})}


def expressions(*lines: dict[str, Any]) -> dict[str, Any]:
    return affinity({"matchExpressions": list(lines)})


TOLERATES = {"tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}]}


@pytest.mark.parametrize(
    ("spec", "labels", "taints", "admitted"),
    [
        ({}, {}, None, True),
        ({"nodeSelector": {"zone": "a"}}, {"zone": "a"}, None, True),
        ({"nodeSelector": {"zone": "a", "disk": "ssd"}}, {"zone": "a"}, None, False),
        (expressions(line("zone", "In", "a", "b")), {"zone": "b"}, None, True),
        (expressions(line("zone", "In", "a", "b")), {}, None, False),
        (expressions(line("zone", "NotIn", "a")), {}, None, True),
        (expressions(line("zone", "NotIn", "a")), {"zone": "a"}, None, False),
        (expressions(line("zone", "Exists")), {"zone": ""}, None, True),
        (expressions(line("zone", "DoesNotExist")), {"zone": ""}, None, False),
        (expressions(line("gen", "Gt", "3")), {"gen": "4"}, None, True),
        (expressions(line("gen", "Lt", "3")), {"gen": "3"}, None, False),
        (expressions(line("gen", "Gt", "3")), {"gen": "new"}, None, False),
        (expressions(line("gen", "Resembles", "3")), {"gen": "3"}, None, False),
        (
            expressions(line("zone", "In", "a"), line("disk", "In", "ssd")),
            {"zone": "a"}, None, False,
        ),
        (
            affinity(
                {"matchExpressions": [line("zone", "In", "z")]},
                {"matchFields": [line("metadata.name", "In", "n1")]},
            ),
            {}, None, True,
        ),
        (affinity({}), {}, None, False),
        (affinity(), {}, None, False),
        ({}, {}, [GPU_TAINT], False),
        (TOLERATES, {}, [GPU_TAINT], True),
        ({"tolerations": [{"operator": "Exists"}]}, {}, [GPU_TAINT], True),
        ({"tolerations": [{"key": "nvidia.com/gpu", "value": "present"}]}, {}, [GPU_TAINT], True),
        ({"tolerations": [{"key": "nvidia.com/gpu", "value": "no"}]}, {}, [GPU_TAINT], False),
        (
            {"tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists",
                              "effect": "NoExecute"}]},
            {}, [GPU_TAINT], False,
        ),
        (TOLERATES, {}, [GPU_TAINT, {"key": "broken", "effect": "NoExecute"}], False),
        ({}, {}, [{"key": "slow", "effect": "PreferNoSchedule"}], True),
    ],
)  # fmt: skip
def test_a_pod_may_go_where_kube_scheduler_would_let_it(
    spec: dict[str, Any], labels: dict[str, str], taints: Any, admitted: bool
) -> None:
    scope, node = read_pod(spec).scope, read_node(labels, taints)
    assert scope is not None
    assert scope.admits(node.name, node.labels, node.taints) is admitted


def test_only_gated_pods_carry_a_scope_and_those_of_one_template_share_it() -> None:
    spec = {"nodeSelector": {"zone": "a"}}
    assert read_pod(spec, gates=()).scope is None
    assert read_pod(spec).scope is read_pod(dict(spec)).scope


def test_a_gated_pod_is_sent_only_where_it_may_go(member: Member) -> None:
    tainted = (Taint("dedicated", "x", "NoSchedule"),)
    member.state.replace_nodes(
        [gpu_node("fast", "v100", taints=tainted), gpu_node("slow", "k80", labels={"zone": "a"})]
    )
    member.state.apply_pod(gated("plain", scope=Scope()))
    member.state.apply_pod(gated("picky", scope=Scope(selector=(("zone", "b"),))))
    assert [p.uid for p in member.queue.step()] == ["plain"]
    assert member.state.assumed("plain") == "slow"
    member.state.apply_node(gpu_node("late", "k80", labels={"zone": "b"}))
    assert [p.uid for p in member.queue.step()] == ["picky"]
    assert member.state.assumed("picky") == "late"


def test_a_candidate_of_a_decision_is_never_a_node_that_the_pod_may_not_go_to(
    member: Member,
) -> None:
    member.state.replace_nodes([gpu_node("a", "v100"), gpu_node("b", "k80", labels={"zone": "b"})])
    member.state.apply_pod(gated("x", scope=Scope(selector=(("zone", "b"),))))
    member.state.apply_pod(gated("y", scope=Scope()))
    member.queue.step()
    offered = {
        (uid, name)
        for decision in member.decisions()
        for uid, name in zip(decision.pods, decision.nodes, strict=True)
    }
    assert ("x", "b") in offered
    assert ("x", "a") not in offered
    assert ("y", "a") in offered


def test_a_pod_does_not_wait_for_a_model_that_is_only_where_it_may_not_go(member: Member) -> None:
    """Both GPUs of the fast node will soon be free, and it is for others."""
    taint = (Taint("dedicated", "x", "NoSchedule"),)
    state = member.state
    state.replace_nodes(
        [gpu_node("fast", "v100", gpus=1, taints=taint), gpu_node("slow", "k80", gpus=1)]
    )
    state.apply_pod(gated("x", scope=Scope()))
    assert state.view.allowed[state.slots["x"]] == 1 << state.names.models["k80"]
    state.apply_node(gpu_node("fast", "v100", gpus=1))
    both = (1 << state.names.models["k80"]) | (1 << state.names.models["v100"])
    assert state.view.allowed[state.slots["x"]] == both
    state.apply_node(state.nodes["slow"], deleted=True)
    assert state.view.allowed[state.slots["x"]] == 1 << state.names.models["v100"]


def test_scopes_follow_nodes_and_pods_and_their_rows_are_used_again() -> None:
    state = ClusterState(
        clock=lambda: 1e9, emit=lambda _: None, spec=lambda _: None, nodes=1, pods=1
    )
    state.apply_node(gpu_node("n0", labels={"zone": "a"}))
    for number in range(20):
        scope = Scope(selector=(("zone", str(number % 10)),))
        state.apply_pod(gated(f"u{number}", scope=scope))
    rows = {int(state.view.scope[state.slots[f"u{number}"]]) for number in range(20)}
    assert len(rows) == 10
    assert 0 not in rows
    state.replace_nodes([gpu_node(f"n{i}", labels={"zone": str(i)}) for i in range(10)])
    for number in range(20):
        row = state.view.scope[state.slots[f"u{number}"]]
        inside = {name for name, n in state.rows.items() if state.view.scopes[row, n]}
        assert inside == {f"n{number % 10}"}
    state.apply_node(gpu_node("n3", labels={"zone": "4"}))
    row = state.view.scope[state.slots["u4"]]
    assert {n for n, at in state.rows.items() if state.view.scopes[row, at]} == {"n3", "n4"}
    state.replace_pods([])
    size = len(state.view.scopes)
    for number in range(10):
        state.apply_pod(gated(f"w{number}", scope=Scope(selector=(("k", str(number)),))))
    assert len(state.view.scopes) == size
    assert not any(state.view.scopes[state.view.scope[slot]].any() for slot in state.slots.values())


def test_a_node_under_pressure_takes_no_pods_and_says_which() -> None:
    conditions = [
        {"type": "Ready", "status": "True"},
        {"type": "DiskPressure", "status": "True"},
        {"type": "PIDPressure", "status": "False"},
    ]
    data = node_json("n", status={"allocatable": {"cpu": "1"}, "conditions": conditions})
    node = objects.node(json.dumps(data).encode())
    assert (node.ready, node.pressure) == (False, ("DiskPressure",))
