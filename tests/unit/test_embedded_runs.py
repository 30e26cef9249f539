"""The embedded cluster at work: gates and patches, whole runs, and the process."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from agent.cluster import objects
from agent.settings import SettingsError
from agent.simulator.cluster import run_cluster
from agent.simulator.cluster_settings import ClusterSettings, load_settings
from agent.simulator.embedded import EmbeddedCluster
from agent.simulator.patches import patch_pod
from agent.simulator.simulation import ACTIVE
from agent.simulator.store import ApiError
from tests.unit.api_server import until
from tests.unit.embedded import (
    JSON_PATCH,
    MERGE_PATCH,
    PODS,
    as_json,
    cluster_at,
    settings,
)

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
    body = patch if isinstance(patch, bytes) else as_json(patch)
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
    pod = patch_pod(gated_pod(), f"{kind}; charset=utf-8", as_json(patch))
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
            settings(wait_for_start=False, extender={"url": url, "timeout_seconds": 60.0})
        )
    finally:
        await runner.cleanup()
    counts = result["scheduler"]
    assert result["extender"]["calls"] == {"prioritize": len(asked)}
    assert len(asked) == counts["bound"] - counts.get("single_candidate", 0)
    assert not any(result["extender"]["failures"].values())
    placed = {row["name"]: row["node"] for row in result["job_rows"]}
    for body in asked:
        pod = objects.pod(as_json(body["Pod"]))  # a whole v1.Pod, still pending
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
    await until(lambda: bool((cluster.sim.state == ACTIVE).any()))
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
        assert process.wait(60) == 0
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
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=Path.cwd())
    assert done.returncode == 2
    assert "error: " in done.stderr
    assert "no such trace file" in done.stderr
    assert not (tmp_path / "result.json").exists()
