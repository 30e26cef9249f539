"""What the node emulator is made of: its clock, books, writes and metrics."""

import asyncio
import json
import math
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest
from aiohttp import web

from agent.cluster import speeds_file
from agent.cluster.kubernetes import ApiError
from agent.cluster.records import Pod
from agent.cluster.view import RUNNING, USAGE_CPU, USAGE_DISK, USAGE_MEMORY, USAGE_NETWORK
from agent.settings import SettingsError
from agent.simulator.engine import advance, place, withdraw
from agent.simulator.hardware import load_speeds
from agent.simulator.job_objects import JobObjects, true_speeds
from agent.simulator.manifest import GPU_PRODUCTS
from agent.simulator.pace import Clock
from agent.simulator.simulation import ACTIVE, OOM_KILLS, WAITING, Simulation, new_simulation
from examples.lab import prometheus
from examples.lab.emulated_cluster import EmulatedCluster
from examples.lab.emulated_jobs import EmulatedJobs
from examples.lab.emulator_settings import EmulatorSettings, load_settings
from examples.lab.exporter import Exporter
from examples.lab.kubelet import Books, read
from examples.lab.writes import Writes
from tests.unit.test_engine import SPEEDS, cluster, work

NODES = {"counts": {"k80": 1, "v100": 1}, "cpu_only": 1}


def settings(**changes: Any) -> EmulatorSettings:
    base = {
        "kubeconfig": "kubeconfig",
        "clock_scale": 1.0,
        "nodes": NODES,
        "workload": {"jobs": 6, "shared": 0.5},
    }
    return load_settings(None, **{**base, **changes})


class Time:
    """A clock that goes when told."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


# The engine's part ----------------------------------------------------------------------------


def two_on_one_gpu() -> Simulation:
    sim = new_simulation(work({"share": 0.5}, {"share": 0.5}), cluster(2), SPEEDS)
    advance(sim, 0.0)
    place(sim, 0, 0)
    place(sim, 1, 0)
    return sim


def test_pod_that_is_withdrawn_waits_again_and_its_neighbour_speeds_up() -> None:
    sim = two_on_one_gpu()
    assert sim.rate[1] == 2.0  # 4 steps/s alone, half of it beside the other
    advance(sim, 10.0)
    withdraw(sim, 0)
    assert (sim.state[0], sim.state[1]) == (WAITING, ACTIVE)
    assert sim.rate[1] == 4.0
    assert sim.end[1] == pytest.approx(10.0 + (100.0 - 20.0) / 4.0)
    assert sim.counters[OOM_KILLS] == 0
    assert sim.cluster.counts[RUNNING] == 1
    place(sim, 0, 0)
    assert sim.left[0] == 100.0  # from its first step


def test_true_speeds_are_those_that_the_simulator_decides_by(tmp_path: Path) -> None:
    speeds = load_speeds()
    path = tmp_path / "speeds.json"
    speeds_file.write(path, true_speeds(speeds))
    told = speeds_file.read(path)
    view = new_simulation(work({}, {}), cluster(2), speeds).cluster
    assert told.gpu_models == [GPU_PRODUCTS[name] for name in speeds.gpu_types]
    for row, kind in enumerate(told.kinds):
        assert kind.slowdown == pytest.approx(view.slowdown[row])
        assert kind.gpus == speeds.kind_gpus[row]
        assert kind.job_type == told.job_types[speeds.kind_type[row]]
    known = len(told.job_types)
    assert np.array(told.interference) == pytest.approx(view.interference[:known, :known])


def test_clock_counts_cluster_seconds_from_its_start_and_stamps_wall_time() -> None:
    steady, wall = Time(50.0), Time(1_000_000.0)
    clock = Clock(600.0, steady, epoch=wall)
    steady.now += 5.0
    assert clock.passed() == 0.0
    clock.start()
    steady.now += 2.0
    wall.now -= 3600.0  # somebody sets the wall clock back
    assert clock.passed() == 1200.0
    clock.start()
    assert clock.passed() == 1200.0
    assert clock.stamp(1200.0) == "1970-01-12T13:46:42.000000Z"


def test_a_real_cluster_has_a_finite_pace() -> None:
    with pytest.raises(SettingsError, match="finite clock_scale"):
        settings(clock_scale=math.inf)
    with pytest.raises(SettingsError, match="kubeconfig"):
        load_settings(None)


# The kubelet's books --------------------------------------------------------------------------


def pod(uid: str, node: str = "a", **asks: Any) -> Pod:
    return Pod(**{"uid": uid, "name": uid, "node": node, "cpu": 1.0, "memory": 1.0, **asks})


def books() -> Books:
    return Books([("a", 4.0, 8.0, 2, 3), ("b", 4.0, 8.0, 0, 3)])


@pytest.mark.parametrize(
    ("asks", "reason"),
    [
        ({"cpu": 3.5}, "OutOfcpu"),
        ({"memory": 7.5}, "OutOfmemory"),
        ({"gpus": 2}, "OutOfnvidia.com/gpu"),
        ({"cpu": 3.0, "memory": 7.0, "gpus": 1}, ""),
        ({"node": "elsewhere"}, "NodeAffinity"),
    ],
)
def test_kubelet_refuses_what_others_left_no_room_for(asks: dict[str, Any], reason: str) -> None:
    kept = books()
    kept.follow(pod("other", gpus=1), gone=False)
    assert kept.refusal(pod("new", **asks)) == reason


def test_pods_that_ended_or_left_give_their_room_back() -> None:
    kept = books()
    for uid in ("x", "y", "z"):
        kept.enter(pod(uid, cpu=0.1))
    assert kept.refusal(pod("new")) == "OutOfpods"
    assert kept.refusal(pod("z")) == ""  # it does not stand in its own way
    kept.follow(pod("x", phase="Succeeded"), gone=False)
    assert kept.refusal(pod("new")) == ""
    kept.enter(pod("x"))
    kept.follow(pod("y"), gone=True)
    kept.forget("z")
    assert kept.residents() == {"x"}
    assert kept.refusal(pod("new", node="b", cpu=4.0)) == ""


def test_sighting_tells_a_deletion_that_waits_for_its_kubelet() -> None:
    item: dict[str, Any] = {"metadata": {"name": "p", "uid": "u"}, "spec": {"nodeName": "a"}}
    seen = read(msgspec.json.encode(item))
    assert (seen.pod.node, seen.deleting) == ("a", False)
    item["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert read(msgspec.json.encode(item)).deleting


# Writes ---------------------------------------------------------------------------------------


class Server:
    """Answers with the statuses that a test lists for a path, then with 200."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []
        self.bodies: list[tuple[str, Any]] = []
        self.reply: Any = None
        self.answers: dict[str, list[int]] = {}

    async def handle(self, request: web.Request) -> web.Response:
        self.seen.append((request.method, request.path))
        body = await request.read()
        self.bodies.append((request.path, json.loads(body) if body else None))
        left = self.answers.get(request.path, [])
        status = left.pop(0) if left else 200
        return web.json_response(self.reply or {"path": request.path}, status=status)


@asynccontextmanager
async def writes() -> AsyncIterator[tuple[Writes, Server]]:
    server = Server()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"

    async def no_pause(_: float) -> None:
        await asyncio.sleep(0)

    async with aiohttp.ClientSession() as session:
        made = Writes(session, url, rng=random.Random(0), sleep=no_pause)
        try:
            yield made, server
        finally:
            await made.close()
            await runner.cleanup()


async def test_writes_of_one_object_keep_their_order_through_an_outage() -> None:
    async with writes() as (made, server):
        server.answers = {"/a/1": [500, 503, 429, 403], "/b/1": [500]}
        for name in ("a", "b"):
            for number in (1, 2, 3):
                made.write(name, "PATCH", f"/{name}/{number}", {})
        assert made.waiting == 2
        assert await made.flush(20.0)
        for name, tries in (("a", 5), ("b", 2)):
            paths = [path for _, path in server.seen if path.startswith(f"/{name}")]
            assert paths == [f"/{name}/1"] * tries + [f"/{name}/2", f"/{name}/3"]
        assert made.counts == {"done": 6, "tried_again": 5}
        assert made.waiting == 0


async def test_what_is_gone_or_refused_holds_nothing_up() -> None:
    async with writes() as (made, server):
        server.answers = {"/gone": [404], "/there": [409], "/bad": [422]}
        for path in ("/gone", "/there", "/bad", "/good"):
            made.write("a", "PUT", path, {})
        assert await made.flush(20.0)
        assert made.counts == {"gone": 2, "refused": 1, "done": 1}
        assert await made.request("GET", "/good") == {"path": "/good"}


async def test_bad_credentials_end_the_emulator_and_are_not_tried_for_ever() -> None:
    async with writes() as (made, server):
        server.answers = {"/node": [401]}
        with pytest.raises(ApiError, match="401"):
            await made.request("POST", "/node", {})


async def test_any_scheduler_is_told_which_gpus_will_do() -> None:
    async with writes() as (made, server):
        config, speeds = settings(workload={"jobs": 30}), load_speeds()
        mix = config.nodes.build()
        workload = replace(
            config.workload.build(speeds, mix), gpu_memory=np.linspace(1.0, 16.0, 30)
        )
        objects = JobObjects(
            replace(workload, allowed=np.where(np.arange(30) == 3, 0b110, -1)),
            mix, speeds, lambda _: "", scheduler="s", gated=True, seed=0,
        )  # fmt: skip
        server.reply = {"metadata": {"uid": "job-uid"}}
        jobs = EmulatedJobs(objects, made, lambda: "", namespace="here", keep_seconds=1.0)
        for slot in range(30):
            jobs.create(slot, 0.0)
        assert await made.flush(20.0)
        pods = {
            body["metadata"]["name"]: body for path, body in server.bodies if path.endswith("/pods")
        }
        assert len(pods) == 30
        for slot, gib in enumerate(workload.gpu_memory):
            pod = pods[objects.jobs[slot]]
            affinity = pod["spec"]["affinity"]["nodeAffinity"]
            (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"][
                "nodeSelectorTerms"
            ]
            wanted = {e["key"]: (e["operator"], e["values"]) for e in term["matchExpressions"]}
            operator, (below,) = wanted.pop("nvidia.com/gpu.memory")
            assert operator == "Gt"
            for memory in (12 * 1024, 16 * 1024):  # labels of k80 and v100
                assert (memory > int(below)) == (memory / 1024.0 >= gib)
            products = {
                "nvidia.com/gpu.product": ("In", [GPU_PRODUCTS["p100"], GPU_PRODUCTS["v100"]])
            }
            assert wanted == (products if slot == 3 else {})
            assert pod["metadata"]["ownerReferences"][0]["uid"] == "job-uid"


# Metrics --------------------------------------------------------------------------------------


@asynccontextmanager
async def emulated(**changes: Any) -> AsyncIterator[tuple[EmulatedCluster, Time]]:
    """An emulated cluster that nobody runs, with its first job on the v100."""
    steady = Time(100.0)
    async with aiohttp.ClientSession() as session:
        made = EmulatedCluster(
            settings(**changes), session, "http://127.0.0.1:1", wall=Time(1e9), monotonic=steady
        )
        advance(made.sim, 0.0)
        place(made.sim, 0, 1)
        yield made, steady


def values(lines: Any) -> dict[str, float]:
    found = {}
    for line in lines:
        if not line.startswith("#"):
            end = line.rindex("}") + 1 if "}" in line else line.index(" ")
            found[line[:end]] = float(line[end:].split()[0])
    return found


async def test_counters_grow_by_the_true_use_times_wall_seconds() -> None:
    async with emulated(clock_scale=500.0) as (made, steady):
        exporter = Exporter(made, wall=Time(1e9), monotonic=steady)
        row = 1
        before = values(exporter.node(row))
        use = made.sim.cluster.usage[row].copy()
        for _ in range(4):
            steady.now += 2.5  # the cluster's own clock stands: what is used stays as it is
            exporter.sample()
        after = values(exporter.node(row))
        cores = int(made.sim.cluster.capacity[row, 0])

        def rate(series: str) -> float:
            return (after[series] - before[series]) / 10.0

        idle = [rate(f'node_cpu_seconds_total{{cpu="{n}",mode="idle"}}') for n in range(cores)]
        assert idle == pytest.approx([1.0 - use[USAGE_CPU]] * cores, abs=1e-6)
        modes = ("idle", "user", "system", "iowait")
        whole = sum(rate(f'node_cpu_seconds_total{{cpu="0",mode="{mode}"}}') for mode in modes)
        assert whole == pytest.approx(1.0, abs=1e-6)
        assert f"{1_000_000_010_000}" in next(line for line in exporter.node(row) if "idle" in line)
        disk = rate('node_disk_io_time_seconds_total{device="nvme0n1"}')
        assert disk == pytest.approx(use[USAGE_DISK], abs=1e-6)
        moved = sum(
            rate(f'node_network_{way}_bytes_total{{device="eth0"}}')
            for way in ("receive", "transmit")
        )
        speed = after['node_network_speed_bytes{device="eth0"}']
        assert moved / speed == pytest.approx(use[USAGE_NETWORK], rel=1e-3)
        free = after["node_memory_MemAvailable_bytes"] / after["node_memory_MemTotal_bytes"]
        assert 1.0 - free == pytest.approx(use[USAGE_MEMORY], abs=1e-6)
        assert use[USAGE_CPU] > 0.03 < use[USAGE_MEMORY]  # more than an idle node shows


async def test_gpu_metrics_show_whose_gpus_are_busy_and_their_memory() -> None:
    async with emulated(hostname_label="hostname") as (made, steady):
        exporter = Exporter(made, wall=Time(1e9), monotonic=steady)
        found = values(exporter.gpus(1))
        total = made.sim.cluster.gpu_memory[1] * 1024.0
        mask = int(made.sim.cluster.gpu_mask[0])
        assert mask
        for gpu in range(8):
            labels = next(name for name in found if f'UTIL{{gpu="{gpu}"' in name)
            labels = labels[labels.index("{") :]
            assert 'modelName="Tesla-V100-SXM2-16GB",hostname="v100-0"' in labels
            used = found[f"DCGM_FI_DEV_FB_USED{labels}"]
            assert used + found[f"DCGM_FI_DEV_FB_FREE{labels}"] == total
            busy = found[f"DCGM_FI_DEV_GPU_UTIL{labels}"]
            if mask >> gpu & 1:
                peak = made.sim.gpu_memory_peak[0] * 1024.0
                assert used == pytest.approx(min(peak, total), abs=1.0)
                assert 0.0 < busy <= 100.0
            else:
                assert (used, busy) == (0.0, 0.0)
        assert not any(values(exporter.gpus(0))[s] for s in values(exporter.gpus(0)) if "UTIL" in s)


def test_prometheus_finds_a_target_for_each_node_and_its_gpus() -> None:
    mix = settings().nodes.build()
    found = prometheus.scrape_config("127.0.0.1:9", mix, seconds=0.5)
    jobs = {job["job_name"]: job["static_configs"] for job in found["scrape_configs"]}
    assert [target["labels"]["node"] for target in jobs["node-exporter"]] == list(mix.names)
    assert [target["labels"]["instance"] for target in jobs["dcgm-exporter"]] == [
        "k80-0",
        "v100-0",
    ]
    plain = prometheus.scrape_config("127.0.0.1:9", mix, instances="address")
    target = plain["scrape_configs"][0]["static_configs"][2]
    assert target["labels"] == {
        "__metrics_path__": "/metrics/nodes/cpu-0",
        "instance": "10.0.0.3:9100",
    }
