"""A replayed cluster with the agent's picture of it, for tests of what the watch survives."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import aiohttp
import numpy as np

from agent.cluster import objects
from agent.cluster.clock import SteadyClock
from agent.cluster.gpus import sheet
from agent.cluster.kubernetes import NODES, PODS, Client
from agent.cluster.records import Node, Pod
from agent.cluster.reflector import Reflector
from agent.cluster.state import ClusterState
from agent.cluster.view import CPU, MEMORY, PENDING, RUNNING
from agent.journal import PodEvent, Progress
from examples.lab.fleet import SUCCEEDED, Fleet, PodState, node_name, pod_uid, populate
from examples.lab.stream import StreamServer
from tests.unit.api_server import until


class Picture:
    """A cluster state that two reflectors keep true to an API server."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, *,
        read_timeout: float = 10.0, monotonic: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.told: Counter[tuple[str, str]] = Counter()
        clock = SteadyClock(time.time, time.monotonic)
        self.state = ClusterState(clock=clock.now, ahead=clock.ahead, emit=self._emit, spec=sheet)
        client = Client(session, url, read_timeout=read_timeout, hear=clock.hear)
        self.nodes: Reflector[Node] = Reflector(
            client, NODES, objects.node, listing=self.state.list_nodes,
            change=self.state.apply_node, monotonic=monotonic, rng=random.Random(0),
        )  # fmt: skip
        self.pods: Reflector[Pod] = Reflector(
            client, PODS, objects.pod, listing=self.state.list_pods,
            change=self.state.apply_pod, monotonic=monotonic, rng=random.Random(1),
        )  # fmt: skip

    def _emit(self, record: PodEvent | Progress) -> None:
        if isinstance(record, PodEvent):
            self.told[record.uid, record.kind] += 1

    def check(self) -> None:
        """Whatever came so far: arrays, records and what was told agree with each other."""
        state, view = self.state, self.state.view
        requested = np.zeros_like(view.requested)
        queues = {
            which: [int(s) for s in view.queue[which, : view.counts[which]]] for which in (0, 1)
        }
        for uid, pod in state.pods.items():
            slot, row = state.slots[uid], state.rows.get(pod.node, -1)
            if row >= 0:
                requested[row, CPU] += pod.cpu
                requested[row, MEMORY] += pod.memory
            assert view.node[slot] == row
            assert (slot in queues[RUNNING]) == (row >= 0)
            assert (slot in queues[PENDING]) == (not pod.node)
        assert np.allclose(view.requested[:, :2], requested[:, :2])
        arrivals = view.arrival[queues[PENDING]]
        assert (np.diff(arrivals) >= 0).all()
        twice = {told: times for told, times in self.told.items() if times > 1}
        assert not twice

    @asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """Follow for as long as the context lasts."""
        tasks = [asyncio.create_task(part.run()) for part in (self.nodes, self.pods)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class Follower(Picture):
    """The picture of a replay server's fleet."""

    def __init__(
        self, server: StreamServer, session: aiohttp.ClientSession, read_timeout: float,
        monotonic: Callable[[], float],
    ) -> None:  # fmt: skip
        super().__init__(session, server.url, read_timeout=read_timeout, monotonic=monotonic)
        self.server = server

    def difference(self) -> str:
        """What the picture has otherwise than the fleet; empty where it is true."""
        state, fleet = self.state, self.server.fleet
        nodes = {node_name(n): node.ready for n, node in fleet.nodes.items()}
        seen = {name: node.ready for name, node in state.nodes.items()}
        if nodes != seen:
            return f"nodes {set(nodes.items()) ^ set(seen.items())}"
        alive = {pod_uid(n): p.node for n, p in fleet.pods.items() if p.phase != SUCCEEDED}
        known = {uid: pod.node for uid, pod in state.pods.items()}
        if alive != known:
            return f"pods {set(alive.items()) ^ set(known.items())}"
        return ""

    async def agree(self) -> None:
        """Wait until the picture is true, and check it."""
        await until(lambda: not self.difference())
        self.check()


@asynccontextmanager
async def following(
    nodes: int = 20,
    pods: int = 300,
    *,
    page: int = 50,
    read_timeout: float = 100.0,
    monotonic: Callable[[], float] = time.monotonic,
    bookmark_seconds: float = 60.0,
    ahead: float = 0.0,
) -> AsyncIterator[Follower]:
    """A fleet, its server, and a follower that has synced; the server's clock is ``ahead`` s."""
    fleet = Fleet()
    populate(fleet, nodes, pods, now=time.time() + ahead)
    server = StreamServer(
        fleet, page=page, bookmark_seconds=bookmark_seconds, clock=lambda: time.time() + ahead
    )
    async with server.serving(), aiohttp.ClientSession() as session:
        follower = Follower(server, session, read_timeout, monotonic)
        async with follower.following():
            await follower.agree()
            both = follower.nodes.counts, follower.pods.counts
            await until(lambda: all(counts["watches"] for counts in both))
            yield follower


def change_much(follower: Follower) -> None:
    """Some of everything: pods come, start, end and go, nodes go unready, come and go."""
    server, pods = follower.server, follower.server.fleet.pods
    last = max(pods)
    running = [n for n, p in pods.items() if p.phase == "Running"]
    server.delete_pod(running[0])
    server.change_pod(running[1], phase=SUCCEEDED, finished=time.time())
    server.change_pod(running[2], phase=SUCCEEDED, finished=time.time())
    server.delete_pod(running[2])
    server.add_pod(last + 1, PodState(created=time.time()))
    server.add_pod(last + 2, PodState(created=time.time()))
    server.start_pod(last + 2, node_name(2))
    server.change_node(3, ready=not server.fleet.nodes[3].ready)
    server.delete_node(max(server.fleet.nodes))
    server.change_node(max(server.fleet.nodes) + 1)
