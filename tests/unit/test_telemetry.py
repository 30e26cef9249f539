"""Telemetry without Prometheus: the Metrics API, names of nodes, and errors that cost a reading."""

import asyncio
import random
from typing import Any

import aiohttp
import numpy as np
import pytest

from agent.cluster.devices import Devices
from agent.cluster.kubernetes import Client
from agent.cluster.records import Node
from agent.cluster.state import ClusterState
from agent.cluster.telemetry import Telemetry, node_names, node_of
from agent.cluster.view import USAGE_CPU, USAGE_MEMORY
from agent.telemetry_settings import TelemetrySettings
from tests.unit.api_server import ApiServer, until

NODES = [
    Node(name="gpu-1", cpu=8.0, memory=64.0, addresses=("10.0.0.1", "gpu-1.example.com")),
    Node(name="ip-10-0-0-2.ec2.internal", cpu=4.0, memory=32.0, addresses=("10.0.0.2",)),
    Node(name="six", cpu=4.0, memory=32.0, addresses=("fd00::6",)),
]


@pytest.mark.parametrize(
    ("labels", "name"),
    [
        ({"node": "gpu-1"}, "gpu-1"),
        ({"instance": "gpu-1:9100"}, "gpu-1"),
        ({"instance": "10.0.0.1:9100"}, "gpu-1"),
        ({"instance": "10.0.0.1"}, "gpu-1"),
        ({"instance": "[fd00::6]:9100"}, "six"),
        ({"instance": "fd00::6"}, "six"),
        ({"Hostname": "gpu-1.example.com", "instance": "10.9.9.9:9400"}, "gpu-1"),
        ({"hostname": "gpu-1.other.org", "instance": "10.9.9.9:9400"}, "gpu-1"),
        ({"Hostname": "ip-10-0-0-2"}, "ip-10-0-0-2.ec2.internal"),
        ({"node": "elsewhere", "instance": "10.0.0.2:9100"}, "ip-10-0-0-2.ec2.internal"),
        ({"node": "gpu-1", "instance": "10.0.0.2:9100"}, "gpu-1"),
        ({"instance": "10.9.9.9:9400"}, ""),
        ({"job": "gpu-1"}, ""),
        ({}, ""),
    ],
)
def test_a_series_is_of_the_node_that_its_labels_name(labels: dict[str, str], name: str) -> None:
    assert node_of(labels, TelemetrySettings().node_labels, node_names(NODES)) == name


class Reader:
    """Telemetry with a clock to turn."""

    def __init__(self, node_usage: Any) -> None:
        self.now = 0.0
        self.state = ClusterState(clock=lambda: 1e9, emit=lambda _: None, spec=lambda _: None)
        self.state.replace_nodes(NODES)
        self.telemetry = Telemetry(
            TelemetrySettings(seconds=0.01, stale_seconds=60.0),
            self.state,
            node_usage=node_usage,
            monotonic=lambda: self.now,
        )

    def use(self, column: int) -> list[float]:
        return [float(self.state.view.usage[self.state.rows[n.name], column]) for n in NODES]


async def test_the_metrics_api_tells_cpu_and_memory_as_shares_of_the_node() -> None:
    api = ApiServer()
    api.metrics = [
        {"metadata": {"name": "gpu-1"}, "usage": {"cpu": "2", "memory": "16Gi"}},
        {"metadata": {"name": "gone"}, "usage": {"cpu": "2", "memory": "16Gi"}},
    ]
    async with api.serving(), aiohttp.ClientSession() as session:
        reader = Reader(Client(session, api.url).node_usage)
        await reader.telemetry.read()
        assert reader.telemetry.states["metrics_api"] == "ok"
        assert reader.use(USAGE_CPU)[0] == 0.25
        assert reader.use(USAGE_MEMORY)[0] == 0.25
        assert np.isnan(reader.use(USAGE_CPU)[1:]).all()
        api.metrics = None
        reader.now = 59.0
        await reader.telemetry.read()
        assert reader.telemetry.states["metrics_api"] == "metrics_api_absent"
        assert reader.use(USAGE_CPU)[0] == 0.25
        reader.now = 61.0
        await reader.telemetry.read()
        assert np.isnan(reader.use(USAGE_CPU)).all()


async def test_an_error_of_the_agents_own_costs_a_reading_and_not_the_process(
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls = 0

    async def usage() -> dict[str, tuple[float, float]]:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("a mistake")
        return {"gpu-1": (4.0, 32.0)}

    reader = Reader(usage)
    running = asyncio.create_task(reader.telemetry.run())
    await until(lambda: calls > 3)
    assert not running.done()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert reader.telemetry.counts["metrics_api", "internal_error"] == 1
    assert reader.telemetry.states["metrics_api"] == "ok"
    assert "a mistake" in caplog.text


async def test_a_cluster_without_resource_slices_is_one_without_such_devices() -> None:
    async with ApiServer().serving() as api, aiohttp.ClientSession() as session:
        state = ClusterState(clock=lambda: 1e9, emit=lambda _: None, spec=lambda _: None)
        devices = Devices(
            Client(session, api.url),
            state.nodes,
            state.apply_node,
            monotonic=lambda: 0.0,
            rng=random.Random(0),
            retry_seconds=0.01,
        )
        watching = asyncio.create_task(devices.run())
        await until(lambda: devices.state == "absent")
        assert devices.completed(NODES[0]) == NODES[0]
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
