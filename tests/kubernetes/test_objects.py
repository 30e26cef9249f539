"""Where pods may go and which GPUs there are, held against a real API server and kube-scheduler."""

import asyncio
import contextlib
import json
import random
import time
from typing import Any

import kubernetes
import pytest

from agent.cluster import objects
from agent.cluster.devices import Devices
from agent.cluster.kubernetes import Client
from agent.cluster.records import Pod
from agent.cluster.state import ClusterState
from examples.lab.control_plane import ControlPlane, node_manifest, pod_manifest, until
from examples.processes import ExampleError
from tests.kubernetes.agents import reaching

Json = dict[str, Any]
LIMIT = 120.0
"""Longest wait, seconds; it only bounds a failing test."""
ONLY = {"key": "scopes", "value": "only", "effect": "NoSchedule"}
"""Keeps other tests' pods away from these nodes; all pods here tolerate it."""
GPU = {"key": "dedicated", "value": "gpu", "effect": "NoSchedule"}
BROKEN = {"key": "broken", "effect": "NoExecute"}
SOFT = {"key": "slow", "effect": "PreferNoSchedule"}
NODES = {
    "scope-a": node_manifest("scope-a", labels={"zone": "a", "gen": "4"}, taints=[ONLY, SOFT]),
    "scope-b": node_manifest("scope-b", labels={"zone": "b", "gen": "2"}, taints=[ONLY, GPU]),
    "scope-c": node_manifest("scope-c", labels={"zone": "c"}, taints=[ONLY, BROKEN]),
}


def required(*terms: Json) -> Json:
    return {
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}
            }
        }
    }


def line(key: str, operator: str, *values: str) -> Json:
    return {"key": key, "operator": operator, "values": list(values)}


def lines(*found: Json) -> Json:
    return {"matchExpressions": list(found)}


CASES: dict[str, Json] = {
    "plain": {},
    "selector": {"nodeSelector": {"zone": "a"}},
    "in": required(lines(line("zone", "In", "a", "c"))),
    "not-in": required(lines(line("gen", "NotIn", "4"))),
    "exists": required(lines(line("gen", "Exists"))),
    "absent": required(lines(line("gen", "DoesNotExist"))),
    "gt": required(lines(line("gen", "Gt", "3"))),
    "lt": required(lines(line("gen", "Lt", "3"))),
    "both-lines": required(lines(line("gen", "Exists"), line("zone", "NotIn", "a"))),
    "either-term": required(lines(line("zone", "In", "z")), lines(line("gen", "In", "2"))),
    "empty-term": required({}),
    "by-name": required({"matchFields": [line("metadata.name", "In", "scope-a")]}),
    "not-by-name": required({"matchFields": [line("metadata.name", "NotIn", "scope-a")]}),
    "tolerates-gpu": {"tolerations": [{"key": "dedicated", "value": "gpu"}]},
    "tolerates-other-value": {"tolerations": [{"key": "dedicated", "value": "cpu"}]},
    "tolerates-other-effect": {
        "tolerations": [{"key": "dedicated", "operator": "Exists", "effect": "NoExecute"}]
    },
    "tolerates-all": {"tolerations": [{"operator": "Exists"}]},
    "tolerates-broken": {
        "tolerations": [
            {"key": "broken", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 600}
        ]
    },
}


def case(name: str, node: str, namespace: str) -> Json:
    """A gated pod of a case that is held to one node."""
    pod = pod_manifest(f"{name}-{node}", namespace=namespace, cpu="10m", memory="1Mi", gated=True)
    spec = pod["spec"] | CASES[name]
    spec["nodeSelector"] = {**spec.get("nodeSelector", {}), "kubernetes.io/hostname": node}
    ours = {"key": "scopes", "operator": "Exists"}
    spec["tolerations"] = [*spec.get("tolerations", ()), ours]
    return pod | {"spec": spec}


def listed(lab: ControlPlane, path: str) -> list[bytes]:
    found = json.loads(lab.kubectl("get", "--raw", path))
    return [json.dumps(item).encode() for item in found["items"]]


def test_a_gated_pods_scope_is_what_kube_scheduler_makes_of_it(
    lab: ControlPlane, namespace: str
) -> None:
    core: Any = kubernetes.client.CoreV1Api(lab.api())
    lab.create_nodes(NODES.values())
    try:
        pods = [case(name, node, namespace) for name in CASES for node in NODES]
        many = {"apiVersion": "v1", "kind": "List", "items": pods}
        lab.kubectl("create", "-f", "-", stdin=json.dumps(many))
        path = f"/api/v1/namespaces/{namespace}/pods"
        scopes = {pod.name: pod.scope for pod in map(objects.pod, listed(lab, path))}
        nodes = [objects.node(item) for item in listed(lab, "/api/v1/nodes")]
        expected = {}
        for name, scope in scopes.items():
            assert scope is not None
            expected[name] = [n.name for n in nodes if scope.admits(n.name, n.labels, n.taints)]
        ungate = [{"op": "remove", "path": "/spec/schedulingGates"}]
        for name in scopes:
            core.patch_namespaced_pod(name, namespace, ungate)

        def decided() -> dict[str, list[str]] | None:
            """Where each pod went, once kube-scheduler has looked at all of them."""
            pods = [(item, objects.pod(item)) for item in listed(lab, path)]
            if not all(pod.node or b'"reason": "Unschedulable"' in item for item, pod in pods):
                return None
            return {pod.name: [pod.node] if pod.node else [] for _, pod in pods}

        # It sees pods and nodes apart, and may have looked at a pod before its node was Ready.
        with contextlib.suppress(ExampleError):
            until(lambda: decided() == expected, "kube-scheduler has decided the same")
        found = decided()
        assert found == expected
        assert {len(places) for places in expected.values()} == {0, 1}
    finally:
        for name in NODES:
            core.delete_node(name)


@pytest.fixture
def device_node(lab: ControlPlane) -> Any:
    """A node whose two GPUs are advertised by a ResourceSlice alone."""
    core: Any = kubernetes.client.CoreV1Api(lab.api())
    taint = {"key": "devices", "value": "only", "effect": "NoSchedule"}
    lab.create_nodes([node_manifest("devices-0", taints=[taint])])
    yield "devices-0"
    lab.kubectl("delete", "resourceslices,deviceclasses", "--all")
    core.delete_node("devices-0")


def slices(node: str) -> Json:
    device = {
        "attributes": {"type": {"string": "gpu"}, "productName": {"string": "NVIDIA A100"}},
        "capacity": {"memory": {"value": "40Gi"}},
    }
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": f"{node}-gpus"},
        "spec": {
            "driver": "gpu.nvidia.com",
            "nodeName": node,
            "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
            "devices": [{"name": f"gpu-{number}"} | device for number in range(2)],
        },
    }


def gpu_class() -> Json:
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": {"name": "gpu.nvidia.com"},
        "spec": {
            "extendedResourceName": "nvidia.com/gpu",
            "selectors": [{"cel": {"expression": 'device.driver == "gpu.nvidia.com"'}}],
        },
    }


async def test_gpus_of_resource_slices_are_known_and_count_where_kube_scheduler_counts_them(
    lab: ControlPlane, namespace: str, device_node: str
) -> None:
    state = ClusterState(clock=time.time, emit=lambda _: None, spec=lambda _: None)

    async def until_node(**expected: Any) -> None:
        async with asyncio.timeout(LIMIT):
            while any(
                getattr(state.nodes[device_node], name) != value for name, value in expected.items()
            ):
                await asyncio.sleep(0.05)

    with reaching(lab.kubeconfig) as access:
        async with access.session() as session:
            devices = Devices(
                Client(session, access.url), state.nodes, state.apply_node,
                monotonic=time.monotonic, rng=random.Random(0),
            )  # fmt: skip
            state.replace_nodes(
                devices.completed(objects.node(item)) for item in listed(lab, "/api/v1/nodes")
            )
            watching = asyncio.create_task(devices.run())
            try:
                lab.kubectl("create", "-f", "-", stdin=json.dumps(slices(device_node)))
                await until_node(devices=2, gpus=0, sharing="dra", gpu_memory=40.0)
                assert devices.state == "ok"
                lab.kubectl("create", "-f", "-", stdin=json.dumps(gpu_class()))
                await until_node(devices=2, gpus=2)
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
    # As many pods that ask for the resource go there as the agent counts GPUs.
    for number in range(3):
        pod = pod_manifest(f"p{number}", namespace=namespace, cpu="10m", gpus=1)
        pod["spec"]["nodeSelector"] = {"kubernetes.io/hostname": device_node}
        pod["spec"]["tolerations"] = [{"key": "devices", "operator": "Exists"}]
        lab.kubectl("create", "-f", "-", stdin=json.dumps(pod))

    def pods() -> list[Pod]:
        return [objects.pod(item) for item in listed(lab, f"/api/v1/namespaces/{namespace}/pods")]

    until(lambda: sum(bool(pod.node) for pod in pods()) == 2, "two of the pods are bound")
    assert {pod.node for pod in pods()} == {device_node, ""}


async def test_an_agent_that_may_not_read_resource_slices_says_what_to_grant(
    lab: ControlPlane, caplog: pytest.LogCaptureFixture
) -> None:
    with reaching(lab.user_kubeconfig("slices-stranger")) as access:
        async with access.session() as session:
            devices = Devices(
                Client(session, access.url), {}, lambda _: None,
                monotonic=time.monotonic, rng=random.Random(0), retry_seconds=0.01,
            )  # fmt: skip
            watching = asyncio.create_task(devices.run())
            async with asyncio.timeout(LIMIT):
                while devices.state != "refused":
                    await asyncio.sleep(0.05)
            await asyncio.sleep(0.2)  # it goes on asking, and says so once
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
    told = [record for record in caplog.records if "ResourceSlices" in record.getMessage()]
    assert len(told) == 1
    assert "grant list and watch" in told[0].getMessage()


async def test_a_pod_with_claims_is_told_from_one_without(
    lab: ControlPlane, namespace: str
) -> None:
    pod = pod_manifest("claims", namespace=namespace, gated=True)
    pod["spec"]["resourceClaims"] = [{"name": "gpu", "resourceClaimName": "somebodys"}]
    lab.kubectl("create", "-f", "-", stdin=json.dumps(pod))
    [found] = listed(lab, f"/api/v1/namespaces/{namespace}/pods")
    assert objects.pod(found).claims == 1
