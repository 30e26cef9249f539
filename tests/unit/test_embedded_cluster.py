"""The embedded cluster is a small Kubernetes cluster to whoever talks HTTP to it."""

import asyncio
import json
import re
from typing import Any

import numpy as np
import pytest

from agent.cluster import objects
from agent.simulator import manifest
from agent.simulator.cluster import serve
from agent.simulator.embedded import EmbeddedCluster
from agent.simulator.hardware import load_speeds
from agent.simulator.simulation import FAILED
from agent.simulator.store import Collection, Store
from tests.unit.embedded import (
    NODES,
    PODS,
    as_json,
    by_name,
    cluster_at,
    settings,
    until_over,
)

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


async def test_a_list_of_the_unplaced_leaves_out_pods_that_are_on_a_node() -> None:
    async with cluster_at(settings()) as running:
        await until_over(running)
        pods = running.cluster.pods
        key, pod = next((key, pod) for key, pod in pods.objects.items() if pod["spec"]["nodeName"])
        del pod["spec"]["nodeName"]
        pods.put(key, pod)
        _, found = await running.get(PODS, fieldSelector="spec.nodeName=")
        assert [item["metadata"]["uid"] for item in found["items"]] == [pod["metadata"]["uid"]]


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
        (PODS, {"fieldSelector": "spec.nodeName=", "watch": "1"}, 400),
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
        use = {n: u for n, *u in map(objects.node_usage, map(as_json, metrics["items"]))}
        assert sorted(use) == ["k80-0", "p100-0", "v100-0"]
        idle = min(cpu for cpu, _ in use.values())
        assert 0.0 < idle <= use[busy][0] <= 64.0


async def test_an_oom_kill_fails_the_pod_and_its_job_makes_another() -> None:
    config = settings(workload={"jobs": 4, "load": 0.5})
    cluster = EmbeddedCluster(config)
    cluster.sim.memory_peak[0] = 1e6  # no node has that much: killed at every try
    async with serve(cluster):
        cluster.start()
        await cluster.run()
    pods = [cluster.pods.objects[f"default/job-00000{end}"] for end in ("", "-1", "-2")]
    assert "default/job-00000-3" not in cluster.pods.objects
    assert len({pod["metadata"]["uid"] for pod in pods}) == 3
    assert len({pod["metadata"]["ownerReferences"][0]["uid"] for pod in pods}) == 1
    for pod in pods:
        record = objects.pod(as_json(pod))
        assert (record.phase, record.reason) == ("Failed", "OOMKilled")
        ended = pod["status"]["containerStatuses"][0]["state"]["terminated"]
        assert (ended["reason"], ended["exitCode"]) == ("OOMKilled", 137)
    result = cluster.result(interrupted=False)
    assert (result["oom_kills"], result["failed"], result["finished"]) == (3, 1, 3)
    assert cluster.sim.state[0] == FAILED
    assert result["job_rows"][0]["starts"] == 3
