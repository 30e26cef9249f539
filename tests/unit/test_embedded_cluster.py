"""The embedded cluster is a small Kubernetes cluster to whoever talks HTTP to it."""

import asyncio
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from agent.cluster import objects
from agent.settings import SettingsError
from agent.simulator import manifest
from agent.simulator.cluster import run_cluster, serve
from agent.simulator.cluster_settings import ClusterSettings, load_settings
from agent.simulator.embedded import EmbeddedCluster
from agent.simulator.hardware import load_speeds
from agent.simulator.patches import patch_pod
from agent.simulator.simulation import ACTIVE, FAILED
from agent.simulator.store import ApiError, Collection, Store

PODS, NODES = "/api/v1/pods", "/api/v1/nodes"
JSON_PATCH = "application/json-patch+json"
MERGE_PATCH = "application/merge-patch+json"


def settings(**changes: Any) -> ClusterSettings:
    """A few jobs on three nodes, run as fast as possible once started."""
    base: dict[str, Any] = {
        "clock_scale": math.inf,
        "wait_for_start": True,
        "nodes": {"counts": {"k80": 1, "p100": 1, "v100": 1}},
        "workload": {"jobs": 12, "load": 0.9, "shared": 0.5},
    }
    return load_settings(None, **{**base, **changes})


class Running:
    """A served cluster and a client of it."""

    def __init__(self, cluster: EmbeddedCluster, http: aiohttp.ClientSession, url: str) -> None:
        self.cluster, self.http, self.url = cluster, http, url

    async def get(self, path: str, **query: Any) -> tuple[int, Any]:
        async with self.http.get(self.url + path, params=query) as answer:
            return answer.status, await answer.json()

    async def patch(
        self, pod: str, patch: Any, kind: str = JSON_PATCH, path: str = "/api/v1/namespaces/default"
    ) -> tuple[int, Any]:
        body = patch if isinstance(patch, bytes) else json.dumps(patch).encode()
        async with self.http.patch(
            f"{self.url}{path}/pods/{pod}", data=body, headers={"Content-Type": kind}
        ) as answer:
            return answer.status, await answer.json()

    async def watch(self, path: str, **query: Any) -> AsyncIterator[dict[str, Any]]:
        async with self.http.get(
            self.url + path, params={"watch": "1", "timeoutSeconds": "30", **query}
        ) as answer:
            assert answer.status == 200, await answer.text()
            async for line in answer.content:
                yield json.loads(line)


@asynccontextmanager
async def cluster_at(config: ClusterSettings) -> AsyncIterator[Running]:
    """Serve and run a cluster; its jobs begin with :meth:`EmbeddedCluster.start`."""
    cluster = EmbeddedCluster(config)
    async with serve(cluster) as port, aiohttp.ClientSession() as http:
        task = asyncio.create_task(cluster.run())
        try:
            yield Running(cluster, http, f"http://127.0.0.1:{port}")
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def until_over(running: Running) -> None:
    running.cluster.start()
    async with asyncio.timeout(30):
        while not running.cluster.over:
            await asyncio.sleep(0)


def by_name(items: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {item["metadata"]["name"]: item for item in items}


# Lists and watches --------------------------------------------------------------------------


async def test_a_list_and_the_events_after_it_make_up_the_state() -> None:
    async with cluster_at(settings()) as running:
        _, listed = await running.get(PODS)
        assert listed["kind"] == "PodList"
        assert listed["items"] == []
        state: dict[str, Any] = {}
        versions, changes = [int(listed["metadata"]["resourceVersion"])], []
        watch = running.watch(PODS, resourceVersion=listed["metadata"]["resourceVersion"])
        async with running.http.post(running.url + "/fedsched/start") as answer:
            assert (await answer.json())["started"]
        async for event in watch:
            item = event["object"]
            assert item.pop("kind") == "Pod"
            assert item.pop("apiVersion") == "v1"
            changes.append(event["type"])
            versions.append(int(item["metadata"]["resourceVersion"]))
            state[item["metadata"]["name"]] = item
            if sum(pod["status"]["phase"] == "Succeeded" for pod in state.values()) == 12:
                break
        _, final = await running.get(PODS)
        assert state == by_name(final["items"])
        assert versions == sorted(set(versions))
        assert changes.count("ADDED") == 12
        # A watch taken up in the middle sees exactly the rest.
        middle = len(versions) // 2
        rest = []
        async for event in running.watch(PODS, resourceVersion=versions[middle]):
            rest.append(int(event["object"]["metadata"]["resourceVersion"]))
            if len(rest) == len(versions) - 1 - middle:
                break
        assert rest == versions[middle + 1 :]


async def test_a_watch_from_no_version_begins_with_all_that_is_there() -> None:
    async with cluster_at(settings()) as running:
        names = []
        async for event in running.watch(NODES):
            assert event["type"] == "ADDED"
            names.append(event["object"]["metadata"]["name"])
            if len(names) == 3:
                break
        assert names == ["k80-0", "p100-0", "v100-0"]


async def test_pages_show_one_moment_however_long_they_take() -> None:
    store = Store()
    pods = Collection(store, "Pod")
    for name in ("a", "b", "c"):
        pods.put(name, {"metadata": {"name": name}, "n": 1})
    first = pods.page(limit=2)
    assert (len(first.bodies), first.remaining, first.version) == (2, 1, 4)
    pods.put("c", {"metadata": {"name": "c"}, "n": 2})
    pods.delete("a")
    second = pods.page(limit=2, token=first.token)
    assert second.version == 4
    assert [json.loads(body)["n"] for body in second.bodies] == [1]
    assert second.token == ""
    # What happened meanwhile is what a watch from the list's version tells.
    assert [(event.version, event.change) for event in pods.since(4)] == [
        (5, "MODIFIED"),
        (6, "DELETED"),
    ]


async def test_a_paginated_list_over_http_is_the_whole_list() -> None:
    async with cluster_at(settings()) as running:
        await until_over(running)
        _, whole = await running.get(PODS)
        items, token = [], ""
        while True:
            _, page = await running.get(PODS, limit=5, **({"continue": token} if token else {}))
            items += page["items"]
            token = page["metadata"].get("continue", "")
            if not token:
                break
            assert page["metadata"]["remainingItemCount"] == len(whole["items"]) - len(items)
        assert items == whole["items"]
        status, refusal = await running.get(PODS, limit=5, **{"continue": "99.5"})
        assert (status, refusal["reason"], refusal["kind"]) == (410, "Expired", "Status")


async def test_a_version_that_is_forgotten_or_of_another_life_is_gone() -> None:
    async with cluster_at(settings(history=16)) as running:
        await until_over(running)
        for version in (1, 10**6):
            query = {"watch": "1", "resourceVersion": version}
            status, refusal = await running.get(PODS, **query)
            assert (status, refusal["code"], refusal["reason"]) == (410, 410, "Expired")


async def test_a_watch_that_falls_out_of_the_history_ends_with_gone() -> None:
    async with cluster_at(settings(history=16)) as running:
        _, listed = await running.get(NODES)
        nodes, seen = running.cluster.nodes, []
        nodes.put("k80-0", nodes.objects["k80-0"])
        async for event in running.watch(
            NODES, resourceVersion=listed["metadata"]["resourceVersion"]
        ):
            seen.append(event)
            if len(seen) == 1:
                for _ in range(64):  # no await: the watcher cannot keep up
                    nodes.put("k80-0", nodes.objects["k80-0"])
        assert seen[-1]["type"] == "ERROR"
        assert seen[-1]["object"]["code"] == 410


async def test_bookmarks_carry_a_quiet_watch_along_with_other_changes() -> None:
    async with cluster_at(settings(bookmark_seconds=0.02)) as running:
        _, listed = await running.get(NODES)
        version = listed["metadata"]["resourceVersion"]
        await until_over(running)
        now = str(running.cluster.store.version)
        assert int(now) > int(version)
        query = {"resourceVersion": version, "timeoutSeconds": 1}
        async for event in running.watch(NODES, allowWatchBookmarks="true", **query):
            assert event["type"] == "BOOKMARK"
            assert event["object"]["kind"] == "Node"
            assert event["object"]["metadata"]["resourceVersion"] == now
            break
        lines = [event async for event in running.watch(NODES, **query)]
        assert lines == []  # not asked for; the server ended the watch by itself


@pytest.mark.parametrize(
    ("path", "query", "code"),
    [
        ("/api/v1/secrets", {}, 404),
        ("/api/v1/nodes/stranger", {}, 404),
        (PODS, {"limit": "-1"}, 400),
        (PODS, {"resourceVersion": "abc", "watch": "1"}, 400),
        (PODS, {"timeoutSeconds": "9" * 40, "watch": "1"}, 400),
        (PODS, {"fieldSelector": "spec.nodeName=a"}, 400),
    ],
)
async def test_what_is_not_served_is_refused_with_a_status(
    path: str, query: dict[str, str], code: int
) -> None:
    async with cluster_at(settings()) as running:
        status, refusal = await running.get(path, **query)
        assert (status, refusal["kind"], refusal["code"]) == (code, "Status", code)


async def test_nonsense_and_leaving_clients_stop_nothing() -> None:
    async with cluster_at(settings()) as running:
        host, port = running.url.removeprefix("http://").split(":")
        for line in (b"\x00\xff\r\n\r\n", b"GET /api/v1/pods?watch=1 HTTP/1.1\r\nHost: a\r\n\r\n"):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(line)
            await writer.drain()
            writer.transport.abort()
        status, _ = await running.patch("a", b"x" * (2 << 20))
        assert status in (404, 413)
        await until_over(running)
        async with running.http.get(running.url + "/healthz") as answer:
            assert await answer.text() == "ok"


# What the objects say -----------------------------------------------------------------------


async def test_the_agent_reads_nodes_and_pods_as_the_engine_has_them() -> None:
    async with cluster_at(settings(workload={"jobs": 60, "load": 0.9, "shared": 0.5})) as running:
        await until_over(running)
        cluster, view = running.cluster, running.cluster.sim.cluster
        for row, name in enumerate(("k80-0", "p100-0", "v100-0")):
            node = objects.node(cluster.nodes.body(name))
            assert [node.cpu, node.memory, node.gpus] == view.capacity[row].tolist()
            assert (node.gpu_memory, node.ready) == (view.gpu_memory[row], True)
            assert node.gpu_model == list(manifest.GPU_PRODUCTS.values())[row]
        speeds = load_speeds()
        assert (view.request[:, 3] > 0).any()
        for slot, job in enumerate(cluster.jobs):
            pod = objects.pod(cluster.pods.body(f"default/{job}"))
            expected = view.request[slot]
            held = [pod.cpu, pod.memory, pod.gpus, pod.gpu_share, pod.gpu_memory]
            assert held == pytest.approx(expected, rel=1e-5, abs=1e-9)
            name = speeds.job_types[view.kind_type[view.kind[slot]]]
            assert pod.job_type == manifest.label_value(name)
            stamp = (pod.created, pod.finished)
            times = (view.arrival[slot], cluster.sim.finished[slot])
            base = objects.pod(cluster.pods.body("default/job-00000")).created
            assert [moment - base for moment in stamp] == pytest.approx(times, abs=1e-3)


async def test_a_running_pod_reports_its_true_speed_with_a_little_noise() -> None:
    ratios = []
    for noise in (0.0, 0.03):
        config = settings(progress_noise=noise, workload={"jobs": 60, "load": 0.9})
        async with cluster_at(config) as running:
            await until_over(running)
            speeds, view = load_speeds(), running.cluster.sim.cluster
            for slot, row in enumerate(running.cluster.result(interrupted=False)["job_rows"]):
                pod = objects.pod(running.cluster.pods.body(f"default/{row['name']}"))
                gpu_type = speeds.gpu_types.index(row["node"].split("-")[0])
                ratios.append(pod.steps_per_second / speeds.speed[view.kind[slot], gpu_type])
    assert ratios[:60] == pytest.approx([1.0] * 60, rel=1e-5)
    assert np.std(ratios[60:]) == pytest.approx(0.03, rel=0.35)


def test_label_values_are_valid_and_tell_all_job_types_apart() -> None:
    names = [*load_speeds().job_types, "LM (batch size 5", "LM  batch size 5", "-", "x" * 70]
    labels = manifest.label_values([*names, "x" * 71])
    assert labels[-1] == "x" * 61 + "-2"
    assert len(set(labels)) == len(names) + 1
    valid = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
    assert all(valid.fullmatch(label) for label in labels)


async def test_node_metrics_are_quantities_of_what_runs() -> None:
    config = settings(clock_scale=1e4, until=1e7)
    async with cluster_at(config) as running:
        running.cluster.start()
        async for event in running.watch(PODS):
            if event["object"]["status"]["phase"] == "Running":
                busy = event["object"]["spec"]["nodeName"]
                break
        status, metrics = await running.get("/apis/metrics.k8s.io/v1beta1/nodes")
        assert (status, metrics["kind"]) == (200, "NodeMetricsList")
        use = {n: u for n, *u in map(objects.node_usage, map(_json, metrics["items"]))}
        assert sorted(use) == ["k80-0", "p100-0", "v100-0"]
        idle = min(cpu for cpu, _ in use.values())
        assert 0.0 < idle <= use[busy][0] <= 64.0


def _json(item: Any) -> bytes:
    return json.dumps(item).encode()


async def test_an_oom_kill_fails_the_pod_and_its_job_makes_another() -> None:
    config = settings(workload={"jobs": 4, "load": 0.5})
    cluster = EmbeddedCluster(config)
    cluster.sim.memory_peak[0] = 1e6  # no node has that much: killed at every try
    async with serve(cluster), asyncio.timeout(30):
        cluster.start()
        await cluster.run()
    pods = [cluster.pods.objects[f"default/job-00000{end}"] for end in ("", "-1", "-2")]
    assert "default/job-00000-3" not in cluster.pods.objects
    assert len({pod["metadata"]["uid"] for pod in pods}) == 3
    assert len({pod["metadata"]["ownerReferences"][0]["uid"] for pod in pods}) == 1
    for pod in pods:
        record = objects.pod(_json(pod))
        assert (record.phase, record.reason) == ("Failed", "OOMKilled")
        ended = pod["status"]["containerStatuses"][0]["state"]["terminated"]
        assert (ended["reason"], ended["exitCode"]) == ("OOMKilled", 137)
    result = cluster.result(interrupted=False)
    assert (result["oom_kills"], result["failed"], result["finished"]) == (3, 1, 3)
    assert cluster.sim.state[0] == FAILED
    assert result["job_rows"][0]["starts"] == 3


# Gates and patches --------------------------------------------------------------------------


async def test_a_gated_pod_is_scheduled_once_its_gate_is_patched_away() -> None:
    config = settings(clock_scale=1e5, gated=True, until=1e8)
    async with cluster_at(config) as running:
        running.cluster.start()
        names = []
        async for event in running.watch(PODS):
            item = event["object"]
            assert "nodeName" not in item["spec"]
            if event["type"] == "ADDED":
                assert item["status"]["conditions"][0]["reason"] == "SchedulingGated"
                names.append(item["metadata"]["name"])
            if len(names) == 3:
                break
        gate = "/spec/schedulingGates/0"
        lift = [
            {"op": "test", "path": f"{gate}/name", "value": "fedsched.io/queue"},
            {"op": "remove", "path": gate},
        ]
        status, pod = await running.patch(names[1], lift)
        assert (status, pod["kind"]) == (200, "Pod")
        assert "schedulingGates" not in pod["spec"]
        merge = {"spec": {"schedulingGates": None}, "metadata": {"annotations": {"a/b": "c"}}}
        status, pod = await running.patch(names[2], merge, MERGE_PATCH)
        assert (status, pod["metadata"]["annotations"]["a/b"]) == (200, "c")
        bound = set()
        async with asyncio.timeout(10):
            async for event in running.watch(PODS):
                if "nodeName" in event["object"]["spec"]:
                    bound.add(event["object"]["metadata"]["name"])
                if len(bound) == 2:
                    break
        assert bound == {names[1], names[2]}
        assert running.cluster.sim.attempts[0] == 0
        status, refusal = await running.patch(names[1], lift)
        assert (status, refusal["reason"]) == (422, "Invalid")  # the gate is gone already


def gated_pod() -> dict[str, Any]:
    return {
        "metadata": {
            "name": "p",
            "uid": "u1",
            "resourceVersion": "7",
            "labels": {"a": "b"},
            "annotations": {},
        },
        "spec": {"schedulingGates": [{"name": "g"}, {"name": "h"}], "containers": [{"name": "m"}]},
        "status": {"phase": "Pending"},
    }


@pytest.mark.parametrize(
    ("kind", "patch", "code"),
    [
        ("application/strategic-merge-patch+json", {}, 415),
        ("", {}, 415),
        (JSON_PATCH, b"{", 400),
        (JSON_PATCH, {}, 400),
        (JSON_PATCH, [{"op": "remove"}], 400),
        (JSON_PATCH, [{"op": "fly", "path": "/spec"}], 400),
        (JSON_PATCH, [{"op": "add", "path": "/spec/x"}], 400),
        (JSON_PATCH, [{"op": "remove", "path": "spec"}], 400),
        (JSON_PATCH, [{"op": "remove", "path": "/spec/schedulingGates/2"}], 422),
        (JSON_PATCH, [{"op": "remove", "path": "/spec/nothing"}], 422),
        (JSON_PATCH, [{"op": "remove", "path": "/spec/containers/0/name/x"}], 422),
        (JSON_PATCH, [{"op": "replace", "path": "", "value": 3}], 422),
        (JSON_PATCH, [{"op": "remove", "path": "/metadata"}], 422),
        (JSON_PATCH, [{"op": "add", "path": "/spec/nodeName", "value": "n"}], 422),
        (JSON_PATCH, [{"op": "add", "path": "/spec/schedulingGates/-", "value": {}}], 422),
        (MERGE_PATCH, {"spec": {"schedulingGates": [{"name": "z"}]}}, 422),
        (MERGE_PATCH, {"spec": None}, 422),
        (MERGE_PATCH, {"status": {"phase": "Running"}}, 422),
        (MERGE_PATCH, {"metadata": {"annotations": {"a": 3}}}, 422),
        (MERGE_PATCH, {"metadata": {"uid": "u2"}}, 409),
        (MERGE_PATCH, {"metadata": {"resourceVersion": "6"}}, 409),
        (MERGE_PATCH, [], 400),
    ],
)
def test_a_patch_that_kubernetes_refuses_is_refused(kind: str, patch: Any, code: int) -> None:
    pod = gated_pod()
    body = patch if isinstance(patch, bytes) else _json(patch)
    with pytest.raises(ApiError) as refusal:
        patch_pod(pod, kind, body)
    assert refusal.value.code == code
    assert pod == gated_pod()


@pytest.mark.parametrize(
    ("kind", "patch", "gates", "labels"),
    [
        (JSON_PATCH, [{"op": "remove", "path": "/spec/schedulingGates/0"}], ["h"], {"a": "b"}),
        (JSON_PATCH, [{"op": "remove", "path": "/spec/schedulingGates"}], None, {"a": "b"}),
        (
            JSON_PATCH,
            [{"op": "move", "from": "/metadata/labels/a", "path": "/metadata/labels/x~1y"}],
            ["g", "h"],
            {"x/y": "b"},
        ),
        (
            JSON_PATCH,
            [{"op": "replace", "path": "/spec/schedulingGates", "value": []}],
            None,
            {"a": "b"},
        ),
        (MERGE_PATCH, {"spec": {"schedulingGates": [{"name": "h"}]}}, ["h"], {"a": "b"}),
        (
            MERGE_PATCH,
            {"metadata": {"uid": "u1", "resourceVersion": "7", "labels": {"a": None}}},
            ["g", "h"],
            {},
        ),
        (JSON_PATCH, [{"op": "remove", "path": "/metadata/uid"}], ["g", "h"], {"a": "b"}),
    ],
)
def test_a_patch_changes_what_it_may(
    kind: str, patch: Any, gates: list[str] | None, labels: dict[str, str]
) -> None:
    pod = patch_pod(gated_pod(), f"{kind}; charset=utf-8", _json(patch))
    held = [gate["name"] for gate in pod["spec"].get("schedulingGates", [])]
    assert held == (gates or [])
    assert ("schedulingGates" in pod["spec"]) == (gates is not None)
    assert pod["metadata"]["labels"] == labels
    assert (pod["metadata"]["uid"], pod["metadata"]["resourceVersion"]) == ("u1", "7")


async def test_a_patch_of_a_pod_that_is_not_there_is_not_found() -> None:
    async with cluster_at(settings()) as running:
        status, refusal = await running.patch("stranger", [])
        assert (status, refusal["reason"]) == (404, "NotFound")


# Runs ---------------------------------------------------------------------------------------


async def test_a_run_is_the_same_for_the_same_seed_and_another_for_another() -> None:
    def config(seed: int) -> ClusterSettings:
        return settings(seed=seed, wait_for_start=False, workload={"jobs": 40, "load": 0.9})

    async def run(seed: int) -> tuple[dict[str, Any], dict[str, bytes]]:
        cluster = EmbeddedCluster(config(seed))
        await cluster.run()
        bodies = {key: cluster.pods.body(key) for key in cluster.pods.objects}
        return cluster.result(interrupted=False), bodies

    first, again, other = await run(1), await run(1), await run(2)
    assert first == again
    assert first[1] != other[1]
    assert first[0]["finished"] == 40


async def test_a_waiting_pod_starts_when_another_ends() -> None:
    result = await run_cluster(
        settings(wait_for_start=False, workload={"jobs": 40, "load": 3.0, "first": 100})
    )
    rows = result["job_rows"]
    ends = np.array([row["finish_seconds"] for row in rows])
    late = [r["start_seconds"] for r in rows if r["start_seconds"] > r["arrival_seconds"] + 10.0]
    assert len(late) >= 5
    for start in late:  # after the end of a pod by the longest backoff at most
        after = start - ends
        assert after[after >= 0.0].min() <= 10.0


async def test_the_cluster_asks_its_extender_and_counts_the_calls() -> None:
    asked: list[dict[str, Any]] = []

    async def reply(request: web.Request) -> web.Response:
        body = await request.json()
        asked.append(body)
        return web.json_response([{"Host": body["NodeNames"][0], "Score": 10}])

    app = web.Application()
    app.router.add_post("/prioritize", reply)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        result = await run_cluster(
            settings(wait_for_start=False, extender={"url": url, "timeout_seconds": 5.0})
        )
    finally:
        await runner.cleanup()
    counts = result["scheduler"]
    assert result["extender"]["calls"] == {"prioritize": len(asked)}
    assert len(asked) == counts["bound"] - counts.get("single_candidate", 0)
    assert not any(result["extender"]["failures"].values())
    placed = {row["name"]: row["node"] for row in result["job_rows"]}
    for body in asked:
        pod = objects.pod(_json(body["Pod"]))  # a whole v1.Pod, still pending
        assert (pod.node, pod.phase) == ("", "Pending")
        assert placed[pod.name] == body["NodeNames"][0]


async def test_the_result_counts_what_was_left_unfinished(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    whole = await run_cluster(settings(wait_for_start=False))
    assert whole["unfinished"] == 0
    middle = sorted(row["finish_seconds"] for row in whole["job_rows"])[6]
    await run_cluster(settings(wait_for_start=False, until=middle), result=out)
    cut = json.loads(out.read_text())
    assert cut["clock_seconds"] == pytest.approx(middle)
    assert cut["finished"] == 7
    assert cut["finished"] + cut["unfinished"] + cut["not_arrived"] == 12
    done = [r["completion_seconds"] for r in cut["job_rows"] if r["state"] == "succeeded"]
    assert cut["mean_completion_seconds"] == pytest.approx(np.mean(done))
    for row, full in zip(cut["job_rows"], whole["job_rows"], strict=True):
        if row["state"] == "running":
            assert row["node"] == full["node"]
            assert row["completion_seconds"] is None


async def test_a_paced_cluster_keeps_the_set_pace() -> None:
    class Wall:
        now = 1_000_000.0

    cluster = EmbeddedCluster(settings(clock_scale=600.0), wall=lambda: Wall.now)
    assert cluster.now() == 0.0
    Wall.now += 50.0
    assert cluster.now() == 0.0  # it waits for its start
    cluster.start()
    Wall.now += 2.0
    assert cluster.now() == 1200.0
    task = asyncio.create_task(cluster.run())
    async with asyncio.timeout(10):
        while not (cluster.sim.state == ACTIVE).any():
            await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert cluster.sim.cluster.clock[0] == 1200.0
    # Its API server's time is the wall clock's: the first job came at the start.
    pod = objects.pod(cluster.pods.body("default/job-00000"))
    assert pod.created == pytest.approx(1_000_050.0)
    assert pod.started == pytest.approx(1_000_052.0)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("clok_scale: 3", "clok_scale"),
        ("clock_scale: 0", "clock_scale: Input should be greater than 0"),
        ("gated: true\nclock_scale: .inf", "gated pods need a finite clock_scale"),
        ("extender: {url: 'ftp://x'}", "extender.url"),
        ("workload: {jobs: 1}", "workload.jobs"),
        ("- 3", "must hold settings"),
        ("a: [", "not a readable YAML file"),
    ],
)
def test_bad_settings_are_refused_by_name(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(content)
    with pytest.raises(SettingsError, match=re.escape(words)) as refusal:
        load_settings(path)
    assert str(path) in str(refusal.value)


def test_the_process_writes_its_result_when_it_is_told_to_stop(tmp_path: Path) -> None:
    config, ready, result = tmp_path / "c.yaml", tmp_path / "ready.json", tmp_path / "result.json"
    config.write_text("clock_scale: 100\nworkload: {jobs: 20}\n")
    command = [sys.executable, "-m", "agent.simulator.cluster", "--config", str(config)]
    command += ["--result", str(result), "--ready-file", str(ready)]
    read, write = os.pipe()  # its end of the pipe closes when it ends
    process = subprocess.Popen(command, stdout=write, stderr=write)
    os.close(write)
    try:
        while not ready.exists():
            assert process.poll() is None, os.read(read, 10_000)
            time.sleep(0.02)
        told = json.loads(ready.read_text())
        assert told["pid"] == process.pid
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(read)
    assert json.loads(result.read_text())["interrupted"] is True


def test_the_process_refuses_what_it_cannot_run(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("workload: {trace: gavel/nothing.csv}\n")
    command = [sys.executable, "-m", "agent.simulator.cluster", "--config", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=Path.cwd())
    assert done.returncode == 2
    assert "error: " in done.stderr
    assert "no such trace file" in done.stderr
    assert not (tmp_path / "result.json").exists()
