"""The node emulator on a real API server: its jobs end as the physics say, whatever happens."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import kubernetes
import numpy as np
import pytest
from aiohttp import web

from agent.cluster import objects
from agent.cluster.access import Access
from agent.cluster.gpus import sheet
from agent.cluster.state import ClusterState
from agent.cluster.telemetry import BY_NODE, Telemetry
from agent.cluster.view import USAGE_CPU, USAGE_DISK, USAGE_MEMORY, USAGE_NETWORK
from agent.settings import KubernetesSettings
from agent.simulator.engine import advance, place
from agent.simulator.hardware import load_speeds
from agent.simulator.simulation import (
    ACTIVE,
    FAILED,
    NEVER,
    OOM_KILLS,
    SUCCEEDED,
    new_simulation,
)
from agent.telemetry_settings import TelemetrySettings
from examples.lab import prometheus
from examples.lab.comparison import compare
from examples.lab.control_plane import ControlPlane, answer, pod_manifest
from examples.lab.emulated_cluster import EmulatedCluster, node_address
from examples.lab.emulator import application
from examples.lab.emulator_settings import load_settings
from examples.lab.exporter import Exporter
from examples.lab.parity import trial
from examples.processes import free_ports

NOBODY = "nobody"
"""A scheduler that there is not: the test binds these pods itself."""
LIMIT = 240.0
"""Longest wait, seconds; it only bounds a failing test."""


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A cluster without nodes, with a kube-scheduler of default settings."""
    with ControlPlane(tmp_path_factory.mktemp("emulated")) as cluster:
        cluster.start_scheduler({})
        yield cluster


class Emulated:
    """A running emulator and the API as an administrator sees it."""

    def __init__(self, plane: ControlPlane, cluster: EmulatedCluster) -> None:
        self.plane, self.cluster = plane, cluster
        self.namespace = cluster.settings.namespace
        self._core: Any = kubernetes.client.CoreV1Api(plane.api())

    def pods(self) -> dict[str, Any]:
        found = self._core.list_namespaced_pod(self.namespace, _preload_content=False).read()
        return {item["metadata"]["name"]: item for item in json.loads(found)["items"]}

    def nodes(self) -> list[Any]:
        return list(json.loads(self._core.list_node(_preload_content=False).read())["items"])

    def create(self, pod: dict[str, Any]) -> None:
        self._core.create_namespaced_pod(self.namespace, pod)

    def delete(self, name: str) -> None:
        self._core.delete_namespaced_pod(name, self.namespace)

    def bind(self, name: str, node: str) -> None:
        """What a scheduler does at last."""
        body = {
            "metadata": {"name": name},
            "target": {"kind": "Node", "apiVersion": "v1", "name": node},
        }
        self._core.create_namespaced_pod_binding(name, self.namespace, body, _preload_content=False)

    async def until(self, met: Any, what: str) -> None:
        try:
            async with asyncio.timeout(LIMIT):
                while not met():
                    await asyncio.sleep(0.02)
        except TimeoutError:
            pytest.fail(f"waited in vain until {what}")

    async def shows(self, name: str, phase: str) -> dict[str, Any]:
        """A pod, once it has this phase."""
        async with asyncio.timeout(LIMIT):
            while True:
                pod = (await asyncio.to_thread(self.pods)).get(name)
                if pod is not None and pod["status"].get("phase") == phase:
                    return dict(pod)
                await asyncio.sleep(0.05)


@asynccontextmanager
async def emulated(plane: ControlPlane, namespace: str, **changes: Any) -> AsyncIterator[Emulated]:
    """Run an emulator in this process; its nodes and pods are gone afterwards."""
    base = {"kubeconfig": str(plane.kubeconfig), "namespace": namespace, "keep_seconds": 3600.0}
    settings = load_settings(None, **{**base, **changes})
    access = Access(KubernetesSettings(kubeconfig=plane.kubeconfig, in_cluster="never"))
    async with access.session() as session:
        cluster = EmulatedCluster(settings, session, access.url)
        await cluster.prepare()
        running = asyncio.create_task(cluster.run())
        try:
            yield Emulated(plane, cluster)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            cluster.jobs.close()
            await cluster.writes.close()
            access.close()
            await asyncio.to_thread(clear, plane, namespace)


def clear(plane: ControlPlane, namespace: str) -> None:
    plane.kubectl("delete", "jobs,pods", "--all", "-n", namespace, "--force", "--grace-period=0")
    plane.kubectl("delete", "nodes", "--all")


def ended(pod: dict[str, Any]) -> tuple[str, str, int]:
    state = pod["status"]["containerStatuses"][0]["state"]["terminated"]
    return pod["status"]["phase"], state["reason"], state["exitCode"]


async def test_jobs_end_well_or_out_of_memory_and_the_job_tries_again(plane: ControlPlane) -> None:
    async with emulated(
        plane,
        "ends",
        clock_scale=3600.0,
        nodes={"counts": {"k80": 2}},
        workload={"jobs": 8, "load": 3.0, "longest": 1200.0, "exceed": 0.9, "first": 20},
    ) as lab:
        cluster, sim = lab.cluster, lab.cluster.sim
        await lab.until(lambda: cluster.over, "all jobs have ended")
        assert await cluster.writes.flush(LIMIT)
        pods = await asyncio.to_thread(lab.pods)
        ends = {name: ended(pod) for name, pod in pods.items()}
        killed = [name for name, end in ends.items() if end == ("Failed", "OOMKilled", 137)]
        assert len(killed) == sim.counters[OOM_KILLS] > 0
        assert all(
            end == ("Succeeded", "Completed", 0) for n, end in ends.items() if n not in killed
        )
        assert len(pods) == cluster.counts["bound"] == sim.attempts.sum()
        # Three attempts of what never fits, each a pod of the same job.
        hopeless = np.flatnonzero(sim.gpu_memory_peak > 12.0).tolist()
        assert hopeless
        assert [int(sim.state[slot]) for slot in hopeless] == [FAILED] * len(hopeless)
        for slot in hopeless:
            job = cluster.objects.jobs[slot]
            assert {job, f"{job}-1", f"{job}-2"} <= set(killed)
            owners = {
                pods[name]["metadata"]["ownerReferences"][0]["uid"]
                for name in (job, f"{job}-1", f"{job}-2")
            }
            assert len(owners) == 1
        # What succeeded ran as long as its work takes at its true speed there, alone on its GPUs.
        for slot in np.flatnonzero(sim.state == SUCCEEDED).tolist():
            ran = sim.finished[slot] - sim.cluster.start[slot]
            assert ran == pytest.approx(sim.steps[slot] / sim.speed[sim.cluster.kind[slot], 0])
        assert cluster.writes.counts["refused"] == 0


async def test_pods_that_a_node_has_no_room_for_or_that_are_deleted_are_made_anew(
    plane: ControlPlane,
) -> None:
    async with emulated(
        plane,
        "rooms",
        clock_scale=1.0,
        scheduler_name=NOBODY,
        retry_seconds=0.1,
        nodes={"counts": {"v100": 1, "k80": 1}},
        workload={"jobs": 2, "load": 0.5},
    ) as lab:
        cluster = lab.cluster
        await lab.shows("job-00000", "Pending")
        # Somebody else's pod fills the node first.
        filler = pod_manifest("filler", namespace=lab.namespace, cpu="63500m", scheduler=NOBODY)
        await asyncio.to_thread(lab.create, filler)
        await asyncio.to_thread(lab.bind, "filler", "v100-0")
        await lab.shows("filler", "Running")  # kwok's, not the emulator's
        await asyncio.to_thread(lab.bind, "job-00000", "v100-0")
        refused = await lab.shows("job-00000", "Failed")
        assert refused["status"]["reason"] == "OutOfcpu"
        assert "containerStatuses" not in refused["status"]
        assert cluster.sim.cluster.counts.tolist() == [1, 0]
        # Its job's next pod goes where there is room, and runs.
        await lab.shows("job-00000-1", "Pending")
        await asyncio.to_thread(lab.bind, "job-00000-1", "k80-0")
        running = await lab.shows("job-00000-1", "Running")
        assert running["metadata"]["ownerReferences"][0]["controller"] is True
        assert cluster.sim.state[0] == ACTIVE
        await lab.until(lambda: cluster.writes.waiting == 0, "the progress is written")
        annotations = (await asyncio.to_thread(lab.pods))["job-00000-1"]["metadata"]["annotations"]
        true = cluster.sim.speed[cluster.sim.cluster.kind[0], 0]
        assert float(annotations["fedsched.io/steps-per-second"]) == pytest.approx(true, rel=0.2)
        # Deleted while it runs: its kubelet lets it go at once, and it begins anew.
        await asyncio.to_thread(lab.delete, "job-00000-1")
        await lab.shows("job-00000-2", "Pending")
        assert "job-00000-1" not in await asyncio.to_thread(lab.pods)
        assert cluster.sim.cluster.counts.tolist() == [1, 0]
        assert cluster.counts == {"bound": 1, "refused": 1, "deleted": 1}
        assert cluster.books.residents() == {
            (await asyncio.to_thread(lab.pods))["filler"]["metadata"]["uid"]
        }


async def test_time_goes_on_while_the_api_server_is_away(plane: ControlPlane) -> None:
    async with emulated(
        plane,
        "away",
        clock_scale=1200.0,
        nodes={"counts": {"v100": 1}},
        workload={"jobs": 6, "load": 1.0, "longest": 1800.0},
    ) as lab:
        cluster = lab.cluster
        ended_away = False
        while not ended_away:  # on a busy machine the job may end before the server does
            await lab.until(lambda: ACTIVE in cluster.sim.state, "a job runs")
            await asyncio.to_thread(plane.kill, "kube-apiserver")
            cluster.catch_up()
            goal = max(float(cluster.sim.end.min()), float(cluster.sim.cluster.clock[0]) + 600.0)
            if goal < NEVER:
                await lab.until(lambda at=goal: cluster.sim.cluster.clock[0] > at, "a job ended")
                assert cluster.writes.waiting > 0
                ended_away = True
            plane.start("kube-apiserver")  # not in a thread: it would end with that
        await lab.until(lambda: cluster.over, "all jobs have ended")
        assert await cluster.writes.flush(LIMIT)
        pods = await asyncio.to_thread(lab.pods)
        assert {ended(pod) for pod in pods.values()} == {("Succeeded", "Completed", 0)}
        assert len(pods) == len(cluster.sim.state) == cluster.counts["bound"]
        assert cluster.writes.counts["refused"] == 0
        assert cluster.writes.counts["tried_again"] > 0


async def no_metrics_api() -> dict[str, tuple[float, float]]:
    raise AssertionError("Prometheus tells all")


async def test_prometheus_and_the_agent_behind_it_read_the_true_use_of_nodes(
    plane: ControlPlane, tmp_path: Path
) -> None:
    async with emulated(
        plane,
        "metrics",
        clock_scale=1.0,
        scheduler_name=NOBODY,
        nodes={"counts": {"v100": 1, "k80": 1}},
        workload={"jobs": 2, "load": 0.5},
    ) as lab:
        cluster = lab.cluster
        await lab.shows("job-00000", "Pending")
        await asyncio.to_thread(lab.bind, "job-00000", "v100-0")
        await lab.until(lambda: cluster.sim.state[0] == ACTIVE, "the job runs")
        exporter = Exporter(cluster)
        sampling = asyncio.create_task(exporter.run())
        runner = web.AppRunner(application(cluster, exporter), access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            address = f"127.0.0.1:{runner.addresses[0][1]}"
            (port,) = free_ports(1)
            config = prometheus.scrape_config(
                address, cluster.mix, seconds=0.5, instances="address"
            )
            command = prometheus.command(
                plane.binaries / "prometheus", tmp_path / "prometheus", config, port
            )
            plane.run("prometheus", command, ready=prometheus.ready_url(port))

            async def query(text: str) -> dict[str, float]:
                url = f"http://127.0.0.1:{port}/api/v1/query?query={quote(text)}"
                found = json.loads(await asyncio.to_thread(answer, url))["data"]["result"]
                return {one["metric"]["instance"]: float(one["value"][1]) for one in found}

            # Over a minute, so that a machine that halts for seconds has its two scrapes still.
            # Each rate by what a whole CPU's is: where a busy machine scrapes late, both lack the
            # same part of the window.
            whole = "sum by(instance)(rate(node_cpu_seconds_total{cpu='0'}[1m]))"
            asked = {
                USAGE_CPU: "1-avg by(instance)(rate(node_cpu_seconds_total{mode='idle'}[1m]))/"
                + whole,
                USAGE_MEMORY: "1-node_memory_MemAvailable_bytes/node_memory_MemTotal_bytes",
                USAGE_DISK: "sum by(instance)(rate(node_disk_io_time_seconds_total[1m]))/" + whole,
                USAGE_NETWORK: "2*sum by(instance)(rate(node_network_receive_bytes_total"
                "{device!~'lo|veth.*'}[1m]))/3e9/" + whole,
            }
            async with asyncio.timeout(LIMIT):
                while len(await query("rate(node_disk_io_time_seconds_total[1m])")) < 2:
                    await asyncio.sleep(0.2)
            use = {
                f"{node_address(row)}:9100": cluster.sim.cluster.usage[row].copy()
                for row in range(len(cluster.mix))
            }
            for column, text in asked.items():
                read = await query(text)
                assert set(read) == set(use)
                for node, share in read.items():
                    assert share == pytest.approx(use[node][column], rel=0.05, abs=0.003)
            # And the agent, by its own queries, finds its nodes behind the addresses.
            state = ClusterState(clock=time.time, emit=lambda _: None, spec=sheet)
            for item in await asyncio.to_thread(lab.nodes):
                state.apply_node(objects.node(json.dumps(item).encode()))
            asked_by_agent = TelemetrySettings(
                prometheus_url=f"http://127.0.0.1:{port}", window="1m", timeout_seconds=LIMIT
            )
            telemetry = Telemetry(
                asked_by_agent, state, node_usage=no_metrics_api, monotonic=time.monotonic
            )
            await telemetry.read()
            assert {telemetry.states[source] for source in BY_NODE} == {"ok"}
            names = set(cluster.mix.names)
            assert {frozenset(telemetry.values[source]) for source in BY_NODE} == {frozenset(names)}
            memory = [telemetry.values["memory"][name] for name in cluster.mix.names]
            assert memory == pytest.approx(
                [share[USAGE_MEMORY] for share in use.values()], abs=0.003
            )
            held = int(cluster.sim.cluster.gpu_mask[0]).bit_count()
            assert telemetry.values["gpu"] == {
                "v100-0": pytest.approx(0.9 * held / 8),
                "k80-0": 0.0,
            }
        finally:
            sampling.cancel()
            await asyncio.gather(sampling, return_exceptions=True)
            await runner.cleanup()


def test_lab_and_simulator_tell_the_same_story(plane: ControlPlane, tmp_path: Path) -> None:
    chosen = trial(
        jobs=40, load=2.0, hours=6.0, seconds=20.0, nodes={"k80": 1, "p100": 1, "v100": 1}
    )
    found = compare(chosen, plane, tmp_path)
    assert found.counts == {"bound": 40}
    # Another policy is far away. A machine that is busy with other things takes longer to schedule,
    # and the clock runs fast here, so the bound is wider than the command's.
    apart = found.baseline.mean / found.simulated.mean - 1.0
    assert apart > 0.5
    assert abs(found.difference) < apart / 3.0
    # What the lab lived through, job by job, is what the physics say of where and when they began.
    sim = new_simulation(
        chosen.workload.build(load_speeds(), chosen.nodes.build()),
        chosen.nodes.build(),
        load_speeds(),
    )
    rows = {name: row for row, name in enumerate(chosen.nodes.build().names)}
    order = sorted(range(len(found.rows)), key=lambda slot: found.rows[slot]["start_seconds"])
    for slot in order:
        begun = found.rows[slot]["start_seconds"]
        while advance(sim, begun):
            pass
        place(sim, slot, rows[found.rows[slot]["node"]])
    while advance(sim, float("inf")):
        pass
    assert sim.finished == pytest.approx(
        np.array([row["finish_seconds"] for row in found.rows]), rel=1e-9
    )
