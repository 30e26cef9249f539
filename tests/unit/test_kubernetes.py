"""The agent's end of the Kubernetes API: objects, quantities, list/watch, and lifting the gate."""

import asyncio
import json
import math
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from agent.backoff import Backoff
from agent.cluster import objects
from agent.cluster.kubernetes import PODS, ApiError, Client
from agent.cluster.listing import Listing
from agent.cluster.records import GATE, Pod
from agent.cluster.reflector import Reflector
from agent.cluster.state import ClusterState
from tests.unit.api_server import ApiServer, event, pod_json, until


def read_pod(**changes: Any) -> Pod:
    data = pod_json("p")
    for part, values in changes.items():
        data[part] = data[part] | values
    return objects.pod(json.dumps(data).encode())


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("500m", 0.5), ("1", 1.0), ("2e3", 2000.0), ("2E3", 2000.0), ("1E", 1e18),
        ("16Gi", 2.0**34),
        ("1.5Ki", 1536.0), (".5", 0.5), ("5.", 5.0), ("-1k", -1000.0), ("250u", 2.5e-4),
        ("7n", 7e-9), ("3Ei", 3 * 2.0**60), (4, 4.0), (0.25, 0.25),
    ],
)  # fmt: skip
def test_a_quantity_has_the_value_that_kubernetes_gives_it(text: Any, value: float) -> None:
    assert objects.quantity(text) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("text", ["", "1 Gi", "Gi", "1KI", "1e", "0x10", "nan", "1ki"])
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a quantity"):
        objects.quantity(text)


def test_a_pods_request_is_what_kube_scheduler_reserves() -> None:
    def container(cpu: str, **more: Any) -> dict[str, Any]:
        return {"resources": {"requests": {"cpu": cpu, "memory": "1Gi"}}, **more}

    pod = read_pod(
        spec={
            "containers": [container("1"), container("500m")],
            "initContainers": [container("1", restartPolicy="Always"), container("3")],
            "overhead": {"cpu": "250m"},
        }
    )
    assert (pod.cpu, pod.memory) == (4.25, 3.0)


def test_an_extended_resource_may_be_given_as_a_limit_alone() -> None:
    pod = read_pod(spec={"containers": [{"resources": {"limits": {"nvidia.com/gpu": "2"}}}]})
    assert (pod.gpus, pod.gang) == (2, 2)


def test_labels_annotations_gates_and_times_are_read() -> None:
    pod = read_pod(
        metadata={
            "labels": {"fedsched.io/job-type": "lm"},
            "annotations": {
                "fedsched.io/gpu-memory-gib": "9.5",
                "fedsched.io/gpu-models": "v100, p100",
                "fedsched.io/deadline": "1970-01-01T00:10:00Z",
                "fedsched.io/steps-per-second": "2.5",
            },
            "creationTimestamp": "1970-01-01T00:00:01.250000Z",
        },
        spec={"schedulingGates": [{"name": "other"}, {"name": GATE}]},
    )
    assert (pod.job_type, pod.gpu_memory, pod.gpu_models) == ("lm", 9.5, ("v100", "p100"))
    assert (pod.deadline, pod.steps_per_second, pod.created) == (600.0, 2.5, 1.25)
    assert (pod.gated, pod.gates) == (True, ("other", GATE))


def test_a_share_of_a_gpu_comes_from_its_annotation_and_a_wrong_one_loses_no_pod() -> None:
    alone = {"containers": []}
    good = read_pod(metadata={"annotations": {"fedsched.io/gpu-share": "0.25"}}, spec=alone)
    assert (good.gpu_share, good.gang, good.problem) == (0.25, 1, "")
    for text in ("1.5", "-0.1", "half", "nan"):
        bad = read_pod(metadata={"annotations": {"fedsched.io/gpu-share": text}}, spec=alone)
        assert bad.gpu_share == 0.0
        assert "fedsched.io/gpu-share" in bad.problem
    late = read_pod(metadata={"annotations": {"fedsched.io/deadline": "tomorrow"}})
    assert math.isinf(late.deadline)
    assert "RFC 3339" in late.problem


def test_a_pod_that_asks_for_absurdly_many_gpus_waits_and_harms_no_other() -> None:
    absurd = read_pod(
        metadata={"uid": "absurd"},
        spec={"containers": [{"resources": {"limits": {"nvidia.com/gpu": f"{2**63 - 1}"}}}]},
    )
    state = ClusterState(clock=lambda: 1e9, emit=lambda _: None, spec=lambda _: None)
    state.replace_pods([absurd, read_pod(metadata={"uid": "other"})])
    assert sorted(state.pods) == ["absurd", "other"]
    with pytest.raises(objects.ObjectError, match="beyond any number"):
        read_pod(spec={"containers": [{"resources": {"limits": {"nvidia.com/gpu": "1e400"}}}]})


def test_a_time_without_an_offset_is_not_read_in_the_zone_of_the_machine() -> None:
    pod = read_pod(metadata={"annotations": {"fedsched.io/deadline": "2026-01-01T00:00:00"}})
    assert math.isinf(pod.deadline)
    assert "RFC 3339" in pod.problem
    assert objects.timestamp("1970-01-01T01:00:10+01:00") == 10.0


def test_an_oom_kill_needs_both_the_reason_and_the_exit_code() -> None:
    def ended(reason: str, code: int) -> Pod:
        dead = {"terminated": {"reason": reason, "exitCode": code, "finishedAt": None}}
        return read_pod(status={"phase": "Failed", "containerStatuses": [{"state": dead}]})

    assert ended("OOMKilled", 137).reason == "OOMKilled"
    assert ended("OOMKilled", 1).reason == ""
    assert ended("Error", 137).reason == ""


def test_a_node_is_read_and_a_cordoned_or_unready_one_takes_no_pods() -> None:
    def read(**changes: Any) -> Any:
        data = {
            "metadata": {
                "name": "n",
                "labels": {"nvidia.com/gpu.product": "T4", "nvidia.com/gpu.memory": "15360"},
            },
            "status": {
                "allocatable": {"cpu": "3920m", "memory": "16Gi", "nvidia.com/gpu": "2"},
                "conditions": [{"type": "Ready", "status": "True"}],
            },
        }
        return objects.node(json.dumps(data | changes).encode())

    node = read()
    assert (node.cpu, node.memory, node.gpus) == (3.92, 16.0, 2)
    assert (node.gpu_model, node.gpu_memory, node.ready) == ("T4", 15.0, True)
    assert not read(spec={"unschedulable": True}).ready
    assert not read(status={"conditions": [{"type": "Ready", "status": "Unknown"}]}).ready


@pytest.mark.parametrize("memory", ["nan", "inf", "-1", "much"])
def test_a_node_whose_gpu_memory_is_no_number_is_refused(memory: str) -> None:
    data = {
        "metadata": {"name": "n", "labels": {"nvidia.com/gpu.memory": memory}},
        "status": {"allocatable": {"nvidia.com/gpu": "2"}},
    }
    with pytest.raises(objects.ObjectError):
        objects.node(json.dumps(data).encode())


def test_backoff_doubles_to_its_limit_with_half_of_each_wait_random() -> None:
    backoff = Backoff(random.Random(1), first=1.0, longest=8.0)
    waits = [backoff.next() for _ in range(6)]
    for wait, whole in zip(waits, (1, 2, 4, 8, 8, 8), strict=True):
        assert whole / 2 <= wait <= whole
    assert len(set(waits)) == 6
    backoff.reset()
    assert backoff.next() <= 1.0


class Watcher:
    """A reflector on a small server, with what it heard."""

    def __init__(self, client: Client) -> None:
        self.pods: dict[str, Pod] = {}
        self.waits: list[float] = []
        self.reflector = Reflector(
            client, PODS, objects.pod, listing=self.list, change=self.change,
            monotonic=lambda: 0.0, rng=random.Random(0), sleep=self.sleep,
        )  # fmt: skip
        self.counts = self.reflector.counts

    def list(self) -> Listing[Pod]:
        return Listing(
            self.pods, lambda pod: pod.name, lambda pod: self.change(pod, False), self.pods.pop
        )

    def change(self, pod: Pod, deleted: bool) -> None:
        self.pods[pod.name] = pod
        if deleted:
            del self.pods[pod.name]

    async def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        await asyncio.sleep(0)


@asynccontextmanager
async def watching(server: ApiServer) -> AsyncIterator[Watcher]:
    async with server.serving(), aiohttp.ClientSession() as session:
        watcher = Watcher(Client(session, server.url))
        task = asyncio.create_task(watcher.reflector.run())
        try:
            yield watcher
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_pages_of_a_list_and_the_events_of_a_watch_make_the_true_picture() -> None:
    server = ApiServer()
    server.objects["pods"] = [pod_json(name) for name in "abcde"]
    server.watches = [
        [
            event("ADDED", pod_json("f"), 11),
            event("MODIFIED", pod_json("a", node="n1"), 12),
            event("DELETED", pod_json("b"), 13),
            {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "20"}}},
        ]
    ]
    async with watching(server) as watcher:
        await until(lambda: len(server.queries) == 5)
        assert sorted(watcher.pods) == ["a", "c", "d", "e", "f"]
        assert watcher.pods["a"].node == "n1"
        assert [q.get("continue") for q in server.queries[:3]] == [None, "2", "4"]
        assert all(query["limit"] == "500" for query in server.queries[:3])
        first, second = server.queries[3:5]
        assert first["resourceVersion"] == "10"
        assert first["allowWatchBookmarks"] == "true"
        assert first["timeoutSeconds"] == "300"
        assert second["resourceVersion"] == "20"  # the bookmark's: nothing is heard twice
        assert watcher.counts["lists"] == 1


@pytest.mark.parametrize(
    "gone",
    [
        pytest.param(410, id="as an HTTP status"),
        pytest.param([{"type": "ERROR", "object": {"code": 410}}], id="as an ERROR event"),
    ],
)
async def test_a_version_that_is_gone_leads_to_a_new_list(gone: Any) -> None:
    server = ApiServer()
    server.objects["pods"] = [pod_json("a")]
    server.watches = [gone]
    async with watching(server) as watcher:
        await until(lambda: watcher.counts["lists"] == 2 and len(server.queries) == 4)
        assert watcher.counts["gone"] == 1
        assert "resourceVersion" not in server.queries[2]


async def test_what_cannot_be_read_is_counted_and_passed_over() -> None:
    server = ApiServer()
    server.objects["pods"] = [pod_json("a"), {"metadata": {"name": 7}}, pod_json("b")]
    server.watches = [
        [
            b'{"type": "ADDED", "obj',
            b'{"type": "ADDED", "object": {"metadata": {"resourceVersion": "11"}}}',
            b"\xff\xfe",
            event("ADDED", pod_json("c"), 12),
        ]
    ]
    async with watching(server) as watcher:
        await until(lambda: "c" in watcher.pods)
        assert sorted(watcher.pods) == ["a", "b", "c"]
        assert watcher.counts["malformed"] == 4


async def test_a_version_that_no_watch_can_be_had_of_is_given_up() -> None:
    server = ApiServer()
    server.watches = [500] * 8
    async with watching(server) as watcher:
        await until(lambda: watcher.counts["lists"] == 2 and watcher.counts["watches"] == 1)
        assert watcher.counts["failures"] == 8
        assert len(watcher.waits) == 8


async def test_failures_and_empty_watches_are_tried_again_with_longer_waits() -> None:
    server = ApiServer()
    server.list_status = [500, 503]
    server.watches = [[], [], 500, [], [event("ADDED", pod_json("a"), 11)]]
    async with watching(server) as watcher:
        await until(lambda: "a" in watcher.pods)
        whole = [0.1, 0.2, 0.4, 0.8, 1.6, 3.2]
        assert len(watcher.waits) == len(whole)
        for wait, longest in zip(watcher.waits, whole, strict=True):
            assert longest / 2 <= wait <= longest
        assert watcher.counts["failures"] == 3


async def test_lines_are_put_together_from_pieces_however_the_network_cuts_them() -> None:
    server = ApiServer()
    big = pod_json("big", annotations={"x": "y" * 300_000})
    server.watches = [[event("ADDED", big, 11), event("ADDED", pod_json("a"), 12)]]
    async with watching(server) as watcher:
        await until(lambda: sorted(watcher.pods) == ["a", "big"])


async def test_node_use_is_read_and_a_broken_entry_passed_over() -> None:
    server = ApiServer()
    server.metrics = [
        {"metadata": {"name": "n1"}, "usage": {"cpu": "1500000000n", "memory": "2Gi"}},
        {"metadata": {"name": "n2"}, "usage": {"cpu": "much"}},
    ]
    async with server.serving(), aiohttp.ClientSession() as session:
        client = Client(session, server.url)
        assert await client.node_usage() == {"n1": (1.5, 2.0)}
        server.metrics = None
        with pytest.raises(ApiError, match="404"):
            await client.node_usage()
