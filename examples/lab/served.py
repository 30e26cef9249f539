"""One ``agent serve`` as a child process, and who asks it; used by ``examples.lab.scale``."""

import asyncio
import http.client
import json
import random
import time
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np
import psutil
import yaml

from examples.lab.figures import Figures
from examples.lab.fleet import PENDING, Fleet, node_name
from examples.processes import ExampleError, Process, fedsched

MIB = float(1 << 20)
START_SECONDS = 300.0
"""The first start on a machine compiles the kernels."""
SYNC_SECONDS = 600.0


@dataclass(frozen=True)
class Timing:
    """Prioritize as kube-scheduler would see it."""

    p50_ms: float
    p99_ms: float
    worst_ms: float
    answers: int
    without_opinion: int


def probe(port: int, bodies: list[bytes], seconds: float, pause: float) -> Timing:
    """Ask prioritize for so many seconds over one connection, with a pause between two calls."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30.0)
    took: list[float] = []
    empty, until = 0, time.monotonic() + seconds
    while time.monotonic() < until:
        began = time.perf_counter()
        connection.request("POST", "/prioritize", bodies[len(took) % len(bodies)])
        answer = connection.getresponse().read()
        took.append(1e3 * (time.perf_counter() - began))
        empty += len(answer) < 3
        time.sleep(pause)
    connection.close()
    p50, p99 = np.percentile(took, (50, 99))
    return Timing(float(p50), float(p99), max(took), len(took), empty)


class Agent:
    """``agent serve`` on a replay server, as a child process."""

    def __init__(self, folder: Path, url: str, **serve: object) -> None:
        config = folder / "member.yaml"
        self._ready = folder / "ready.json"
        settings = {
            "state": str(folder / "state"),
            "kubernetes": {"api_url": url},
            "serve": {"port": 0, **serve},
        }
        config.write_text(yaml.safe_dump(settings))
        command = fedsched(
            "agent", "serve", "--config", str(config), "--ready-file", str(self._ready)
        )
        self.process = Process("agent serve", command, folder / "serve.log")
        self.port = 0

    async def start(self) -> None:
        """Start it and wait for its port. Raises ExampleError where it does not come."""
        self.process.start()
        until = time.monotonic() + START_SECONDS
        while not self._ready.exists():
            if not self.process.alive or time.monotonic() > until:
                raise ExampleError(f"agent serve did not start:\n{self.process.last_words()}")
            await asyncio.sleep(0.01)
        self.port = int(json.loads(self._ready.read_text())["port"])
        assert self.process.popen is not None
        self._about = psutil.Process(self.process.popen.pid)

    def memory(self) -> float:
        """Resident memory, MiB."""
        return float(self._about.memory_info().rss) / MIB

    def cpu(self) -> float:
        """Seconds of CPU so far."""
        times = self._about.cpu_times()
        return float(times.user + times.system)

    async def metrics(self) -> Figures:
        """What it says of itself in ``/metrics``."""
        return Figures((await self._get("/metrics"))[1])

    async def _get(self, path: str) -> tuple[int, str]:
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.get(f"http://127.0.0.1:{self.port}{path}") as answer,
            ):
                return answer.status, await answer.text()
        except aiohttp.ClientError as error:
            raise ExampleError(
                f"agent serve does not answer ({error}). The end of its log:\n"
                f"{self.process.last_words()}"
            ) from error

    async def watched(self, what: str, **resource: str) -> float:
        """One of the watches' counters, of ``resource="pods"`` or of nodes and pods together."""
        return (await self.metrics()).total("fedsched_watch", what=what, **resource)

    async def pods(self) -> float:
        """How many it knows that are not done."""
        figures = await self.metrics()
        return figures.total("fedsched_running_pods") + figures.total("fedsched_pending_pods")

    async def synced(self) -> None:
        """Wait until it is ready. Raises ExampleError where that takes too long."""
        until = time.monotonic() + SYNC_SECONDS
        while (await self._get("/readyz"))[0] != 200:
            if time.monotonic() > until:
                raise ExampleError(f"agent serve did not sync:\n{self.process.last_words()}")
            await asyncio.sleep(0.25)  # asking is work too, for both processes

    async def heard(self, what: str, count: float) -> None:
        """Wait until a counter of the pods' watch is there."""
        while await self.watched(what, resource="pods") < count:
            await asyncio.sleep(0.02)


def bodies(fleet: Fleet, candidates: int, rng: random.Random) -> list[bytes]:
    """ExtenderArgs of pods that wait, each with as many nodes by name."""
    made = []
    waiting = [(number, pod) for number, pod in fleet.pods.items() if pod.phase == PENDING]
    for number, pod in waiting[:50]:
        numbers = rng.sample(range(len(fleet.nodes)), min(candidates, len(fleet.nodes)))
        names = json.dumps([node_name(n) for n in numbers]).encode()
        pod_json = fleet.pod(number, pod)
        made.append(b'{"Pod":%s,"Nodes":null,"NodeNames":%s}' % (pod_json, names))
    return made
