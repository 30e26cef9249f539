"""GPUs by every way in which nodes advertise them, and names without end."""

import json
import random
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import numpy as np
import pytest

from agent.cluster import objects
from agent.cluster.devices import Devices, device_class, resource_slice
from agent.cluster.growth import MAX_MODELS, OTHER
from agent.cluster.kubernetes import Client
from agent.cluster.records import Node, Pod
from agent.cluster.state import ClusterState
from agent.cluster.view import PENDING, RUNNING
from agent.journal import PodEvent, Progress
from agent.scheduling.decision import decide_queue, make_policy
from tests.unit.api_server import node_json


def read_node(allocatable: dict[str, str], **labels: str) -> Node:
    metadata = {"name": "n", "labels": {f"nvidia.com/{k}": v for k, v in labels.items()}}
    data = node_json("n", metadata=metadata, status={"allocatable": {"cpu": "8"} | allocatable})
    return objects.node(json.dumps(data).encode())


A100 = {"gpu.product": "NVIDIA-A100-SXM4-40GB", "gpu.memory": "40960", "gpu.count": "2"}


@pytest.mark.parametrize(
    ("allocatable", "extra", "expected"),
    [
        ({"nvidia.com/gpu": "2"}, {}, (2, 40.0, "")),
        (
            {"nvidia.com/gpu": "8"},
            {"gpu.replicas": "4", "gpu.sharing-strategy": "time-slicing"},
            (8, 10.0, "time-slicing"),
        ),
        ({"nvidia.com/gpu.shared": "8"}, {"gpu.sharing-strategy": "mps"}, (2, 40.0, "mps")),
        ({"nvidia.com/gpu": "2"}, {"mig.strategy": "single"}, (2, 40.0, "")),
        (
            {"nvidia.com/gpu": "14"},
            {"gpu.product": "NVIDIA-A100-SXM4-40GB-MIG-1g.5gb", "gpu.memory": "4864"},
            (14, 4.75, "mig"),
        ),
        ({"nvidia.com/gpu": "0", "nvidia.com/mig-1g.5gb": "7"}, {}, (0, 0.0, "mig")),
        ({}, {}, (0, 0.0, "")),
    ],
)
def test_the_labels_of_gpu_feature_discovery_tell_how_gpus_are_cut_up(
    allocatable: dict[str, str], extra: dict[str, str], expected: tuple[int, float, str]
) -> None:
    node = read_node(allocatable, **(A100 | extra))
    assert (node.gpus, node.gpu_memory, node.sharing) == expected


def slice_json(name: str, node: str, gpus: int, generation: int = 1, **changes: Any) -> bytes:
    device = {
        "attributes": {"type": {"string": "gpu"}, "productName": {"string": "NVIDIA A100"}},
        "capacity": {"memory": {"value": "40Gi"}},
    }
    spec = {
        "driver": "gpu.nvidia.com",
        "nodeName": node,
        "pool": {"name": node, "generation": generation, "resourceSliceCount": 1},
        "devices": [{"name": f"gpu-{i}"} | device for i in range(gpus)],
    }
    return json.dumps({"metadata": {"name": name}, "spec": spec | changes}).encode()


def class_json(name: str, resource: str = "") -> bytes:
    spec = {"extendedResourceName": resource} if resource else {}
    return json.dumps({"metadata": {"name": name}, "spec": spec}).encode()


def test_slices_of_other_devices_and_of_no_one_node_are_of_no_gpus() -> None:
    assert resource_slice(slice_json("s", "n", 2)).gpus == 2
    assert resource_slice(slice_json("s", "n", 2, driver="dra.net")).gpus == 0
    assert resource_slice(slice_json("s", "n", 2, nodeName=None)).gpus == 0
    mig = [{"name": "m", "attributes": {"type": {"string": "mig"}}}]
    assert resource_slice(slice_json("s", "n", 0, devices=mig)).gpus == 0
    for broken in (b"{", b'{"spec":{}}', slice_json("s", "n", 1, driver=4)):
        with pytest.raises(objects.ObjectError):
            resource_slice(broken)
    with pytest.raises(objects.ObjectError):
        device_class(b"[]")


@pytest.fixture
async def cluster() -> AsyncIterator[tuple[ClusterState, Devices]]:
    """A state and its devices, which are told of slices by hand."""
    state = ClusterState(clock=lambda: 1e9, emit=lambda _: None, spec=lambda _: None)
    async with aiohttp.ClientSession() as session:
        client = Client(session, "http://127.0.0.1:1")
        yield (
            state,
            Devices(
                client,
                state.nodes,
                state.apply_node,
                monotonic=lambda: 0.0,
                rng=random.Random(0),
            ),
        )


async def test_slices_make_the_gpus_of_a_node_known_whichever_comes_first(
    cluster: tuple[ClusterState, Devices],
) -> None:
    state, devices = cluster
    bare = Node(name="n", cpu=8.0, memory=64.0)
    devices.change_slice(resource_slice(slice_json("s1", "n", 2)), False)
    state.apply_node(devices.completed(bare))
    devices.change_slice(resource_slice(slice_json("s2", "n", 2)), False)
    node = state.nodes["n"]
    assert (node.devices, node.sharing, node.gpu_model) == (4, "dra", "NVIDIA A100")
    assert (node.gpu_memory, node.gpus) == (40.0, 0)  # and a pod's nvidia.com/gpu finds none
    devices.change_slice(resource_slice(slice_json("s3", "n", 3, generation=2)), False)
    assert state.nodes["n"].devices == 3  # the pool was published anew
    for name in ("s1", "s2", "s3"):
        devices.change_slice(resource_slice(slice_json(name, "n", 1)), True)
    assert state.nodes["n"] == bare


async def test_a_class_that_stands_for_the_resource_makes_slices_count_as_room(
    cluster: tuple[ClusterState, Devices],
) -> None:
    state, devices = cluster
    state.apply_node(Node(name="n", cpu=8.0, memory=64.0))
    devices.change_slice(resource_slice(slice_json("s", "n", 2)), False)
    devices.change_class(device_class(class_json("other")), False)
    assert state.nodes["n"].gpus == 0
    devices.change_class(device_class(class_json("gpu", "nvidia.com/gpu")), False)
    assert (state.nodes["n"].gpus, int(state.view.capacity[0, 2])) == (2, 2)
    devices.change_class(device_class(class_json("gpu", "nvidia.com/gpu")), True)
    assert state.nodes["n"].gpus == 0


async def test_a_node_that_has_a_device_plugin_stays_as_its_object_says(
    cluster: tuple[ClusterState, Devices],
) -> None:
    _, devices = cluster
    devices.change_slice(resource_slice(slice_json("s", "n", 2)), False)
    node = Node(name="n", cpu=8.0, memory=64.0, gpus=4, gpu_model="T4", gpu_memory=16.0)
    assert devices.completed(node) is node


def test_more_models_than_there_is_room_for_share_the_last_one() -> None:
    state = ClusterState(clock=lambda: 1e9, emit=lambda _: None, spec=lambda _: None)
    state.apply_pod(Pod(uid="early", name="p", gpus=1, gpu_models=("m69",), scope=None))
    assert int(state.view.allowed[state.slots["early"]]) == 0
    for number in range(70):
        state.apply_node(
            Node(name=f"n{number}", cpu=8.0, memory=8.0, gpus=1, gpu_model=f"m{number}")
        )
    assert len(state.view.gpu_spec) == MAX_MODELS
    assert state.names.crowded["gpu_models"] == 70 - MAX_MODELS
    for number, model in enumerate(("m5", "m29", "m69")):
        pod = Pod(uid=f"u{number}", name="p", gpus=1, gpu_models=(model,), scope=None)
        state.apply_pod(pod)
    masks = [int(state.view.allowed[state.slots[f"u{number}"]]) for number in range(3)]
    assert masks == [1 << 5, 1 << 29, 1 << 29]
    assert int(state.view.allowed[state.slots["early"]]) == 1 << 29
    eligible = np.zeros(len(state.view.kind), np.bool_)
    eligible[list(state.slots.values())] = True
    choice = decide_queue(state.view, make_policy("djct"), eligible)
    assert choice is not None
    node = state.node_name(int(choice.nodes[choice.action]))
    uid = state.pod_name(int(choice.pods[choice.action]))
    suits = {"u0": ["n5"], "u1": [f"n{n}" for n in range(29, 70)]}
    assert node in suits.get(uid, suits["u1"])


def test_job_types_beyond_the_limit_count_as_one_and_nothing_else_of_them_is_lost() -> None:
    events: list[PodEvent | Progress] = []
    state = ClusterState(
        clock=lambda: 1e9, emit=events.append, spec=lambda _: None, max_job_types=4
    )
    for number in range(500):
        state.apply_pod(
            Pod(uid=f"u{number}", name="p", cpu=1.0, job_type=f"t{number}", gpus=number)
        )
    assert list(state.names.job_types) == ["t0", "t1", "t2", "t3", OTHER]
    assert state.view.interference.shape == (5, 5)
    assert len(state.view.slowdown) < 30  # gangs that no node holds are put together as well
    assert state.names.crowded["job_types"] == 496
    assert {event.job_type for event in events} == {"t0", "t1", "t2", "t3", OTHER}
    version = state.version
    state.apply_pod(Pod(uid="u7", name="p", cpu=1.0, job_type="t7", gpus=7))  # the same word again
    assert (state.version, state.names.crowded["job_types"]) == (version, 496)
    assert state.view.counts[[PENDING, RUNNING]].tolist() == [500, 0]
    state.apply_pod(Pod(uid="new", name="p", cpu=1.0, job_type="t2"))
    assert state.pods["new"].job_type == "t2"
