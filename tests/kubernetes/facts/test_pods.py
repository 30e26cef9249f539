"""What pods and nodes show of a real kube-scheduler's work, and where GPUs come from."""

from typing import Any

import pytest
from kubernetes import client

from tests.kubernetes.facts.bench import Bench, Scheduler, extender, until
from tests.kubernetes.facts.recording import RecordingExtender, no_opinion

NAME = "pods"
DEVICES = ("n-010", "n-011")
LAST = "n-299"
"""A node that no other test looks at."""


@pytest.fixture(scope="module")
def scheduler(bench: Bench, server: RecordingExtender) -> Scheduler:
    server.replies["prioritize"] = no_opinion
    return bench.scheduler(NAME, [extender(server)])


pytestmark = pytest.mark.usefixtures("scheduler")


def test_the_scheduler_writes_node_and_condition_with_times_of_whole_seconds(bench: Bench) -> None:
    bench.pod("timed", NAME)
    bench.node_of("timed")
    raw: Any = bench.core.read_namespaced_pod("timed", "default", _preload_content=False).json()
    (condition,) = raw["status"]["conditions"]
    assert (condition["type"], condition["status"]) == ("PodScheduled", "True")
    assert len(condition["lastTransitionTime"]) == len("2026-01-01T00:00:00Z")
    assert raw["status"]["phase"] == "Pending", "running is the kubelet's word"


def test_a_second_scheduler_can_overfill_a_node(bench: Bench) -> None:
    """Two schedulers see each other's bindings late: nothing at the API server refuses the second
    one, and a kubelet would fail the pod as OutOfcpu."""
    for name in ("full-1", "full-2"):
        bench.pod(name, "nobody", group="rest", cpu="20")
        target = client.V1ObjectReference(kind="Node", name=LAST)
        binding = client.V1Binding(metadata=client.V1ObjectMeta(name=name), target=target)
        bench.core.create_namespaced_binding("default", binding, _preload_content=False)
        assert bench.node_of(name) == LAST


def test_a_gpu_may_come_from_a_resource_slice_with_nothing_allocatable(
    bench: Bench, server: RecordingExtender
) -> None:
    resource: Any = client.ResourceV1Api(bench.plane.api())
    resource.create_device_class(
        {
            "metadata": {"name": "gpu.test"},
            "spec": {
                "selectors": [{"cel": {"expression": "device.driver == 'gpu.test'"}}],
                "extendedResourceName": "nvidia.com/gpu",
            },
        }
    )
    for node in DEVICES:
        resource.create_resource_slice(
            {
                "metadata": {"name": f"{node}-gpu"},
                "spec": {
                    "driver": "gpu.test",
                    "nodeName": node,
                    "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
                    "devices": [{"name": "gpu-0"}, {"name": "gpu-1"}],
                },
            }
        )
    container = {
        "name": "main",
        "image": "none",
        "resources": {"requests": {"nvidia.com/gpu": "1"}, "limits": {"nvidia.com/gpu": "1"}},
    }

    def create(name: str, **where: Any) -> str:
        spec = {"schedulerName": NAME, "containers": [container], **where}
        bench.core.create_namespaced_pod("default", {"metadata": {"name": name}, "spec": spec})
        return bench.node_of(name)

    for node in DEVICES:  # kube-scheduler sees slices and pods apart: now it knows of both slices
        create(f"dra-{node}", nodeSelector={"kubernetes.io/hostname": node})
    node = create("dra")
    assert node in DEVICES
    assert "nvidia.com/gpu" not in bench.core.read_node(node).status.allocatable
    (call,) = server.calls("dra", "prioritize")
    assert sorted(call.nodes) == [*DEVICES]

    def claim() -> Any:
        return bench.read("dra").status.extended_resource_claim_status

    made = until(claim, "the pod names the claim that was made for it")
    claimed = resource.read_namespaced_resource_claim(made.resource_claim_name, "default")
    (result,) = claimed.status.allocation.devices.results
    assert (result.driver, result.pool) == ("gpu.test", node)
