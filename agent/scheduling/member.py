"""The parts of one serving process, wired together: watches, state, policy, queue and extender.

Made and run by ``agent.scheduling.serve``, which gives it a session, a journal and a stop signal.
"""

import asyncio
import logging
import random
import time
import uuid
from collections.abc import Callable

import aiohttp

from agent.cluster import nodes_file, objects, speeds_file
from agent.cluster.gpus import sheet
from agent.cluster.kubernetes import FAILURES, NODES, PODS, Client, GoneError, Reflector
from agent.cluster.records import Node
from agent.cluster.state import ClusterState
from agent.cluster.view import PENDING, RUNNING
from agent.journal import Journal
from agent.scheduling.extender import Extender
from agent.scheduling.guard import LivePolicy
from agent.scheduling.metrics import Metrics
from agent.scheduling.queue import QueueController
from agent.scheduling.recorder import Recorder
from agent.settings import Settings

log = logging.getLogger(__name__)
POLL_SECONDS = 1.0
LOST_READINGS = 4
"""After this many failed readings in a row, node use counts as unknown."""
SHUTDOWN_SECONDS = 10.0
"""How long gates may take to be lifted on the way out."""


class Member:
    """The parts of one serving process, wired together."""

    def __init__(
        self,
        settings: Settings,
        session: aiohttp.ClientSession,
        journal: Journal,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises KeyError where no rule has the settings' name."""
        serve = settings.serve
        self.settings, self.monotonic = settings, monotonic
        self.metrics = Metrics()
        recorder = Recorder(journal, self.metrics, uuid.uuid4().hex)
        self.state = ClusterState(
            clock=clock,
            emit=recorder.event,
            spec=sheet,
            scale=settings.clock_scale,
            assume_seconds=serve.assume_seconds,
            changed=lambda: self.queue.wake.set(),
        )
        self.policy = LivePolicy(settings.policy_file, serve, self.metrics)
        self._speeds_stamp: speeds_file.Stamp | None = None
        self._nodes_written: dict[str, Node] | None = None
        self.client = Client(
            session,
            serve.api_url,
            watch_timeout=serve.watch_timeout_seconds,
            read_timeout=serve.read_timeout_seconds,
        )
        rng = random.Random(serve.seed)
        self.queue = QueueController(
            self.state,
            self.policy,
            recorder,
            self.client.lift_gate,
            serve,
            self.metrics,
            fresh=self.fresh,
            rng=rng,
        )
        self.extender = Extender(
            self.state,
            self.policy,
            recorder,
            serve,
            self.metrics,
            fresh=self.fresh,
            queued=self.queue.decided,
        )
        self.nodes = Reflector(
            self.client,
            NODES,
            objects.node,
            replace=self.state.replace_nodes,
            change=self.state.apply_node,
            monotonic=monotonic,
            rng=rng,
        )
        self.pods = Reflector(
            self.client,
            PODS,
            objects.pod,
            replace=self.state.replace_pods,
            change=self.state.apply_pod,
            monotonic=monotonic,
            rng=rng,
        )
        self.metrics.before_scrape.append(self._set_gauges)

    def fresh(self) -> bool:
        """Whether both watches are in and spoke lately enough for the state to be trusted."""
        heard = min(self.nodes.last_contact, self.pods.last_contact)
        return self.monotonic() - heard <= self.settings.serve.stale_seconds

    async def telemetry(self) -> None:
        """Read node use for ever; without the Metrics API it is unknown, which is counted."""
        failed = 0
        while True:
            try:
                self.state.set_usage(await self.client.node_usage())
                failed = 0
            except (GoneError, *FAILURES) as error:
                failed += 1
                self.metrics.telemetry_failures.inc()
                if failed == 1:
                    log.warning("node use cannot be read (%s); decisions go on without", error)
                if failed == LOST_READINGS:
                    self.state.set_usage({})
            await asyncio.sleep(self.settings.serve.telemetry_seconds)

    async def files(self) -> None:
        """Look for new policies and speeds, write down the nodes, and lapse old assumptions."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            self.state.tick()
            if self.read_files():
                self.queue.wake.set()
            if self.nodes.synced.is_set():
                await self._write_nodes()

    def read_files(self) -> bool:
        """Take over what the learner wrote; True where something changed."""
        changed = self.policy.poll()
        path = self.settings.speeds_file
        found = speeds_file.stamp(path)
        if found != self._speeds_stamp:
            self._speeds_stamp = found
            try:
                self.state.set_speeds(None if found is None else speeds_file.read(path))
                changed = True
            except speeds_file.SpeedsFileError as error:
                self.metrics.speeds_failures.inc()
                log.warning("%s; the speeds read before go on", error)
        return changed

    async def _write_nodes(self) -> None:
        nodes = dict(self.state.nodes)
        if nodes == self._nodes_written:
            return
        try:
            await asyncio.to_thread(
                nodes_file.write, self.settings.nodes_file, list(nodes.values())
            )
            self._nodes_written = nodes
        except OSError as error:
            log.warning("the list of nodes cannot be written: %s", error)

    def _set_gauges(self) -> None:
        metrics, view = self.metrics, self.state.view
        metrics.pending.set(float(view.counts[PENDING]))
        metrics.running.set(float(view.counts[RUNNING]))
        metrics.gated.set(float(len(self.queue.gated())))
        metrics.nodes.set(float(len(self.state.rows)))
        metrics.synced.set(float(self.fresh()))
        for name, reflector in (("nodes", self.nodes), ("pods", self.pods)):
            for what in (
                "lists",
                "watches",
                "events",
                "bookmarks",
                "malformed",
                "gone",
                "failures",
            ):
                metrics.watch.labels(name, what).set(float(reflector.counts[what]))

    async def run(self, stop: asyncio.Event) -> None:
        """Watch, decide and lift until ``stop``; then lift every gate that is left.

        Raises what a part of it died of, after that.
        """
        parts = [self.nodes.run(), self.pods.run(), self.telemetry(), self.files()]
        if self.settings.serve.queue:
            parts.append(self.queue.run())
        tasks = [asyncio.create_task(part) for part in (*parts, _until(stop))]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self.settings.serve.queue:
                await self._lift_all()
        for task in done:
            task.result()

    async def _lift_all(self) -> None:
        try:
            async with asyncio.timeout(SHUTDOWN_SECONDS):
                stayed = await self.queue.lift_all()
        except TimeoutError:
            log.error("not every gate was lifted within %g s", SHUTDOWN_SECONDS)
        else:
            if stayed:
                log.error("%d gates could not be lifted", stayed)


async def _until(stop: asyncio.Event) -> None:
    await stop.wait()
