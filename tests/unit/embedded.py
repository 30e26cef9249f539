"""An embedded cluster behind real HTTP, for the tests of what it serves and how it runs."""

import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from agent.simulator.cluster import serve
from agent.simulator.cluster_settings import ClusterSettings, load_settings
from agent.simulator.embedded import EmbeddedCluster
from tests.unit.api_server import until

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
            self.url + path, params={"watch": "1", "timeoutSeconds": "150", **query}
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
    await until(lambda: running.cluster.over)


def by_name(items: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {item["metadata"]["name"]: item for item in items}


def as_json(item: Any) -> bytes:
    return json.dumps(item).encode()
