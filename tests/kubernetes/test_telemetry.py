"""Telemetry from a real Prometheus behind TLS and a password, and from a real API server."""

import asyncio
import datetime as dt
import json
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from agent.cluster.kubernetes import Client
from agent.cluster.records import Node, Pod
from agent.cluster.state import ClusterState
from agent.cluster.telemetry import Telemetry
from agent.cluster.view import USAGE_CPU, USAGE_DISK, USAGE_MEMORY, USAGE_NETWORK
from agent.journal import PodEvent, Progress
from agent.telemetry_settings import TelemetrySettings
from examples.lab import certificates
from examples.lab.build import binaries
from examples.lab.control_plane import ANSWER_SECONDS, ControlPlane, answer, pod_manifest, until
from examples.lab.prometheus import command
from examples.processes import Process, free_ports
from tests.kubernetes.agents import Agent, ending, grant, reaching

USER, PASSWORD = "agent", "test"
BCRYPT = "$2b$12$hNf2lSsxfm0.i4a.1kVpSOVyBCfIB51VRjgBUyv6kdnyTlgWj81Ay"
"""Of that password, as Prometheus wants it."""
LINK = 3.0e9
LIMIT = 120.0
"""Longest wait, seconds; it only bounds a failing test."""
USE = {"alpha": (0.6, 0.25, 0.5, 0.125), "beta": (0.1, 0.75, 0.0, 0.5)}
"""True shares of CPU, memory, disk and network by node."""
GPUS = {"alpha": ((100.0, 0.0), (1024.0, 8192.0)), "beta": ((30.0, 50.0), (2048.0, 512.0))}
"""Percent in use and MiB free of each GPU."""


def node_lines(name: str, began: float) -> Iterator[str]:
    """Counters say when they were read: a late scrape would pass for another rate."""
    cpu, memory, disk, network = USE[name]
    seconds, stamp = time.time() - began, round(time.time() * 1e3)
    for core in range(2):
        yield f'node_cpu_seconds_total{{cpu="{core}",mode="idle"}} {seconds * (1.0 - cpu)} {stamp}'
        yield f'node_cpu_seconds_total{{cpu="{core}",mode="user"}} {seconds * cpu} {stamp}'
    yield f"node_memory_MemTotal_bytes {2**36}"
    yield f"node_memory_MemAvailable_bytes {2**36 * (1.0 - memory)}"
    yield f'node_disk_io_time_seconds_total{{device="sda"}} {seconds * disk / 2.0} {stamp}'
    yield f'node_disk_io_time_seconds_total{{device="sdb"}} {seconds * disk} {stamp}'
    for way in ("receive", "transmit"):
        moved = seconds * network * LINK / 2.0
        yield f'node_network_{way}_bytes_total{{device="eth0"}} {moved} {stamp}'
        yield f'node_network_{way}_bytes_total{{device="lo"}} {seconds * 1e9} {stamp}'
        yield f'node_network_{way}_bytes_total{{device="veth1"}} {moved} {stamp}'
    yield f'node_network_speed_bytes{{device="eth0"}} {LINK}'
    yield 'node_network_speed_bytes{device="veth1"} 1.25e9'


def gpu_lines(name: str) -> Iterator[str]:
    label = {"alpha": 'Hostname="alpha"', "beta": 'hostname="beta.example.com"'}[name]
    for gpu, (percent, free) in enumerate(zip(*GPUS[name], strict=True)):
        yield f'DCGM_FI_DEV_GPU_UTIL{{gpu="{gpu}",{label}}} {percent}'
        yield f'DCGM_FI_DEV_FB_FREE{{gpu="{gpu}",{label}}} {free}'


def pod_lines() -> Iterator[str]:
    yield 'steps_per_second{namespace="default",pod="run"} 2.5'
    yield 'steps_per_second{namespace="default",pod="stranger"} 9'
    yield f'memory_bytes{{namespace="default",pod="run"}} {3 * 2**30}'


class Exporters(ThreadingHTTPServer):
    """Does not complain of scrapes that were given up."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        del request, client_address


class Monitored:
    """Exporters of two nodes and the Prometheus that scrapes them."""

    def __init__(self, folder: Path) -> None:
        began = time.time()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                kind, _, name = self.path.strip("/").partition("/")
                lines = {
                    "node": lambda: node_lines(name, began),
                    "gpu": lambda: gpu_lines(name),
                    "pods": pod_lines,
                }.get(kind, lambda: iter(["this is a web page"]))
                body = ("\n".join(lines()) + "\n").encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self.exporters = Exporters(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self.exporters.server_port}"
        threading.Thread(target=self.exporters.serve_forever, daemon=True).start()
        self.pki = folder / "pki"
        certificates.create(self.pki, dt.datetime.now(dt.UTC))
        self.password = folder / "password"
        self.password.write_text(PASSWORD + "\n")
        web = folder / "web.yml"
        pair = {"cert_file": f"{self.pki}/apiserver.crt", "key_file": f"{self.pki}/apiserver.key"}
        web.write_text(json.dumps({"tls_server_config": pair, "basic_auth_users": {USER: BCRYPT}}))
        port = free_ports(1)[0]
        self.url = f"https://127.0.0.1:{port}"
        words = command(binaries() / "prometheus", folder, self._config(), port)
        words.append(f"--web.config.file={web}")
        self.process = Process("prometheus", words, folder / "prometheus.log")
        self.process.start()
        until(self._listens, f"Prometheus listens; see {self.process.log}")

    def _listens(self) -> bool:
        with socket.create_connection(("127.0.0.1", int(self.url.rpartition(":")[2]))):
            return True

    def _config(self) -> dict[str, Any]:
        def target(path: str, **labels: str) -> dict[str, Any]:
            return {
                "targets": [self.address],
                "labels": {"__metrics_path__": path, **labels},
            }

        return {
            "global": {"scrape_interval": "250ms", "scrape_timeout": "250ms"},
            "scrape_configs": [
                {
                    "job_name": "exporters",
                    "honor_labels": True,
                    "static_configs": [
                        target("/node/alpha", instance="alpha", node="alpha"),
                        target("/node/beta", instance="10.0.0.2:9100"),
                        target("/gpu/alpha", instance="10.9.9.1:9400"),
                        target("/gpu/beta", instance="10.9.9.2:9400"),
                        target("/pods", instance="jobs"),
                    ],
                }
            ],
        }

    def settings(self, **changes: Any) -> TelemetrySettings:
        return TelemetrySettings(
            **{
                "prometheus_url": self.url,
                "ca_file": self.pki / "ca.crt",
                "username": USER,
                "password_file": self.password,
                "window": "5s",
                "seconds": 0.2,
                "stale_seconds": 1.5,
                "timeout_seconds": 30.0,
                **changes,
            }
        )

    def close(self) -> None:
        self.process.kill()
        self.exporters.shutdown()
        self.exporters.server_close()


@pytest.fixture(scope="module")
def monitored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Monitored]:
    made = Monitored(tmp_path_factory.mktemp("prometheus"))
    try:
        yield made
    finally:
        made.close()


class Member:
    """A cluster of the two nodes, and its telemetry."""

    def __init__(
        self, settings: TelemetrySettings, node_usage: Callable[[], Any] | None = None
    ) -> None:
        self.events: list[PodEvent | Progress] = []
        self.state = ClusterState(clock=time.time, emit=self.events.append, spec=lambda _: None)
        self.state.replace_nodes(
            Node(name=name, cpu=8.0, memory=64.0, gpus=2, gpu_memory=16.0, addresses=(address,))
            for name, address in (("alpha", "10.0.0.1"), ("beta", "10.0.0.2"))
        )
        self.telemetry = Telemetry(
            settings, self.state, node_usage=node_usage or self._none, monotonic=time.monotonic
        )

    async def _none(self) -> dict[str, tuple[float, float]]:
        return {}

    def use(self, column: int) -> dict[str, float]:
        return {
            name: float(self.state.view.usage[row, column]) for name, row in self.state.rows.items()
        }

    async def until_states(self, **states: str) -> None:
        """Read until the sources are in these states; it takes a few scrapes."""
        async with asyncio.timeout(LIMIT):
            while True:
                await self.telemetry.read()
                found = {source: self.telemetry.states[source] for source in states}
                if found == states:
                    return
                await asyncio.sleep(0.1)


ALL_OK = dict.fromkeys(("cpu", "memory", "disk", "network", "gpu", "gpu_memory"), "ok")


async def test_the_default_queries_measure_every_node_whatever_its_series_are_called(
    monitored: Monitored,
) -> None:
    member = Member(monitored.settings())
    columns = (USAGE_CPU, USAGE_MEMORY, USAGE_DISK, USAGE_NETWORK)
    true = [{name: shares[place] for name, shares in USE.items()} for place in range(4)]
    async with asyncio.timeout(LIMIT):
        while [member.use(column) for column in columns] != [
            pytest.approx(shares, abs=0.05) for shares in true
        ]:
            await member.telemetry.read()
            await asyncio.sleep(0.1)
    await member.until_states(**ALL_OK, metrics_api="off", steps="off", pod_memory="off")
    assert member.telemetry.values["gpu"] == pytest.approx({"alpha": 0.5, "beta": 0.4})
    free = {name: member.state.gpu_memory_free[row] for name, row in member.state.rows.items()}
    assert free == pytest.approx({"alpha": 8.0, "beta": 2.0})


async def test_progress_and_memory_of_pods_come_by_query(monitored: Monitored) -> None:
    member = Member(
        monitored.settings(
            steps="sum by (namespace, pod) (steps_per_second)",
            pod_memory="sum by (namespace, pod) (memory_bytes)",
        )
    )
    member.state.apply_pod(Pod(uid="u", name="run", job_type="lm", gpus=1, node="alpha"))
    member.state.apply_pod(Pod(uid="waits", name="stranger", gpus=1))
    await member.until_states(steps="ok", pod_memory="ok")
    progress = [event for event in member.events if isinstance(event, Progress)]
    assert [(p.uid, p.job_type, p.steps_per_second) for p in progress] == [("u", "lm", 2.5)]
    member.state.apply_pod(Pod(uid="u", name="run", gpus=1, node="alpha", phase="Succeeded"))
    [end] = [e for e in member.events if isinstance(e, PodEvent) and e.kind == "finished"]
    assert end.memory_used == 3.0


async def test_each_source_that_is_missing_has_a_name_for_why(monitored: Monitored) -> None:
    member = Member(
        monitored.settings(
            cpu="1 - avg by (node) (rate(node_cpu_seconds_total[",
            memory="sum(node_memory_MemTotal_bytes)",
            disk="no_such_exporter",
            gpu='DCGM_FI_DEV_GPU_UTIL{Hostname="alpha"} / 0',
            network="",
        )
    )
    states = {
        "cpu": "query_failed", "memory": "unknown_nodes", "disk": "no_series", "network": "off",
        "gpu": "no_series", "gpu_memory": "ok", "steps": "off", "pod_memory": "off",
        "metrics_api": "no_series",
    }  # fmt: skip
    await member.until_states(**states)
    assert member.telemetry.states == states
    assert member.telemetry.counts["cpu", "query_failed"] >= 1


@pytest.mark.parametrize(
    ("changes", "state", "words"),
    [
        ({"username": "nobody"}, "prometheus_refused", "password_file"),
        ({"username": "", "token_file": "token"}, "prometheus_refused", "HTTP 401"),
        ({"password_file": "nowhere"}, "prometheus_refused", "nowhere cannot be read"),
        ({"ca_file": None}, "prometheus_unreachable", "set telemetry.ca_file"),
        ({"prometheus_url": "http://127.0.0.1:1"}, "prometheus_unreachable", "does not answer"),
        ({"prometheus_url": "exporters"}, "not_prometheus", "the API's root"),
    ],
    ids=["wrong user", "token", "no password", "untrusted", "closed port", "a web page"],
)
async def test_what_is_wrong_with_the_way_to_prometheus_is_said_once_with_a_cure(
    monitored: Monitored,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    changes: dict[str, Any],
    state: str,
    words: str,
) -> None:
    (tmp_path / "token").write_text("secret-token")
    changes = {
        name: tmp_path / value if name.endswith("_file") and value else value
        for name, value in changes.items()
    }
    if changes.get("prometheus_url") == "exporters":
        changes["prometheus_url"] = f"http://{monitored.address}"
    member = Member(monitored.settings(**changes))
    await member.telemetry.read()
    await member.telemetry.read()
    assert {member.telemetry.states[source] for source in ALL_OK} == {state}
    assert member.telemetry.counts["cpu", state] == 2
    told = [record.getMessage() for record in caplog.records if "telemetry cpu" in record.message]
    assert len(told) == 1
    assert words in told[0]
    assert "secret-token" not in caplog.text


async def test_values_become_unknown_when_prometheus_dies_and_are_back_when_it_is(
    monitored: Monitored,
) -> None:
    member = Member(monitored.settings(timeout_seconds=1.0))
    await member.until_states(**ALL_OK)
    reading = asyncio.create_task(member.telemetry.run())

    async def wait(ok: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT):
            while not ok():
                await asyncio.sleep(0.05)

    try:
        monitored.process.kill()
        await wait(lambda: member.telemetry.states["cpu"] == "prometheus_unreachable")
        await wait(lambda: all(value != value for value in member.use(USAGE_CPU).values()))
        assert not reading.done()
        monitored.process.start()
        await wait(lambda: member.telemetry.states["cpu"] == "ok")
        assert monitored.process.popen is not None
        monitored.process.popen.send_signal(signal.SIGSTOP)  # it hangs
        try:
            await wait(lambda: member.telemetry.states["cpu"] == "prometheus_unreachable")
        finally:
            monitored.process.popen.send_signal(signal.SIGCONT)
        await wait(
            lambda: member.use(USAGE_CPU) == pytest.approx({"alpha": 0.6, "beta": 0.1}, abs=0.1)
        )
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def test_a_cluster_without_a_metrics_api_is_told_from_one_that_forbids_it(
    lab: ControlPlane,
) -> None:
    reads = {"apiGroups": ["metrics.k8s.io"], "resources": ["nodes"], "verbs": ["list"]}
    grant(lab, "metrics-reader", reads)
    for user, state in (("metrics-reader", "absent"), ("metrics-stranger", "refused")):
        with reaching(lab.user_kubeconfig(user)) as access:
            async with access.session() as session:
                member = Member(TelemetrySettings(), Client(session, access.url).node_usage)
                await member.telemetry.read()
                assert member.telemetry.states["metrics_api"] == f"metrics_api_{state}"
                assert member.telemetry.states["cpu"] == "off"


def prioritize(agent: Agent, pod: dict[str, Any], nodes: list[str]) -> list[dict[str, Any]]:
    body = json.dumps({"Pod": pod, "Nodes": None, "NodeNames": nodes}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{agent.port}/prioritize", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as found:
        scores: list[dict[str, Any]] = json.loads(found.read())
        return scores


def test_a_serving_agent_says_how_each_source_does_and_decides_whatever_that_is(
    lab: ControlPlane, monitored: Monitored, tmp_path: Path
) -> None:
    settings = monitored.settings().model_dump(mode="json", exclude_defaults=True)
    patient = {"budget_seconds": 30.0}
    agent = Agent(tmp_path, lab.kubeconfig, telemetry=settings | {"gpu": ""}, serve=patient)
    pod = pod_manifest("asked-about", cpu="1")
    pod["metadata"]["uid"] = "asked-about"

    def says(source: str, state: str) -> bool:
        name = f'telemetry{{source="{source}",state="{state}"}}'
        return f"fedsched_{name} 1.0" in answer(f"http://127.0.0.1:{agent.port}/metrics")

    with ending(agent):
        agent.start()
        until(lambda: says("cpu", "unknown_nodes"), "the lab's nodes are not those of the series")
        until(lambda: says("metrics_api", "metrics_api_absent"), "there is no Metrics API")
        until(lambda: agent.metric('dra{state="ok"}'), "the ResourceSlice API is there")
        until(lambda: agent.metric("synced") == 1.0, "nodes and pods are known")
        assert len(prioritize(agent, pod, ["cpu-0", "gpu-0"])) == 1  # the better one
        monitored.process.kill()
        try:
            until(lambda: says("cpu", "prometheus_unreachable"), "Prometheus is missed")
            pod["metadata"]["uid"] = "asked-about-again"
            assert len(prioritize(agent, pod, ["cpu-0", "gpu-0"])) == 1  # the better one
        finally:
            monitored.process.start()
        until(lambda: says("cpu", "unknown_nodes"), "Prometheus is back")
        assert agent.stop() == 0
