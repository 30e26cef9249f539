"""The parts of one serving process, wired together: watches, state, policy, queue and extender.

Made and run by ``agent.scheduling.serve``, which gives it a session, a journal and a stop signal.
"""

import asyncio
import logging
import random
import time
import uuid
from collections.abc import Callable
from functools import partial

import aiohttp

from agent.backoff import Backoff
from agent.cluster import nodes_file, objects, speeds_file
from agent.cluster.access import Access
from agent.cluster.clock import SteadyClock
from agent.cluster.devices import Devices
from agent.cluster.election import Election
from agent.cluster.events import EventRecorder
from agent.cluster.gpus import sheet
from agent.cluster.kubernetes import FAILURES, NODES, PODS, Client
from agent.cluster.records import Node
from agent.cluster.reflector import Reflector
from agent.cluster.rights import missing, needed
from agent.cluster.state import ClusterState
from agent.cluster.telemetry import Telemetry
from agent.cluster.view import PENDING, RUNNING
from agent.cluster.writes import Lease, create_event, lift_gate
from agent.journal import Journal
from agent.scheduling import lift_gates
from agent.scheduling.alarms import Alarms
from agent.scheduling.extender import Extender
from agent.scheduling.guard import LivePolicy
from agent.scheduling.metrics import Metrics
from agent.scheduling.observed import Observed
from agent.scheduling.queue import QueueController
from agent.scheduling.recorder import Recorder
from agent.settings import Settings
from common.weights import write_atomic

log = logging.getLogger(__name__)
POLL_SECONDS = 1.0
SHUTDOWN_SECONDS = 10.0
"""How long gates may take to be lifted on the way out."""
FAREWELL_SECONDS = 3.0
"""How long each last write may take after that: Events, and letting go of the lease."""


class Member:
    """The parts of one serving process, wired together."""

    def __init__(
        self,
        settings: Settings,
        access: Access,
        session: aiohttp.ClientSession,
        journal: Journal,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """``session`` is one of ``access``. Raises KeyError where no rule has the settings' name,
        OSError where the state directory cannot be written."""
        serve = settings.serve
        self.settings, self.access, self.monotonic = settings, access, monotonic
        self._stopping = False
        self.metrics = Metrics()
        steady = SteadyClock(clock, monotonic)
        recorder = self._recorder = Recorder(journal, self.metrics, uuid.uuid4().hex)
        self._counted = False  # the pods that are there, for the journal
        self.state = ClusterState(
            clock=steady.now,
            ahead=steady.ahead,
            emit=recorder.event,
            spec=sheet,
            scale=settings.clock_scale,
            assume_seconds=serve.assume_seconds,
            max_job_types=serve.max_job_types,
            changed=lambda: self.queue.wake.set(),
        )
        self.policy = LivePolicy(settings.policy_file, serve, self.metrics)
        self._speeds_stamp: speeds_file.Stamp | None = None
        self._nodes_written: dict[str, Node] | None = None
        self.client = Client(
            session,
            access.url,
            watch_timeout=serve.watch_timeout_seconds,
            read_timeout=serve.read_timeout_seconds,
            hear=steady.hear,
        )
        self._rng = rng = random.Random(serve.seed)
        self.events = EventRecorder(
            settings.kubernetes, access, partial(create_event, access), clock=clock, rng=rng
        )
        self.election: Election | None = None
        if settings.election.mode != "none":
            self.election = Election(
                settings.election,
                Lease(
                    access,
                    settings.election.namespace or access.namespace,
                    settings.election.name,
                ),
                settings.state,
                settings.leader_file,
                monotonic=monotonic,
                clock=clock,
                rng=rng,
                changed=self._leader_changed,
            )
        self.queue = QueueController(
            self.state,
            self.policy,
            recorder,
            partial(lift_gate, access),
            serve,
            self.metrics,
            fresh=self.fresh,
            leading=self.leading,
            monotonic=monotonic,
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
            lambda data: self.devices.completed(objects.node(data)),
            listing=self.state.list_nodes,
            change=self.state.apply_node,
            monotonic=monotonic,
            rng=rng,
        )
        self.pods = Reflector(
            self.client,
            PODS,
            objects.pod,
            listing=self.state.list_pods,
            change=self.state.apply_pod,
            monotonic=monotonic,
            rng=rng,
        )
        self.alarms = Alarms(self.events, self.metrics, fresh=self.fresh, silent=self.silent)
        self.devices = Devices(
            self.client, self.state.nodes, self.state.apply_node, monotonic=monotonic, rng=rng
        )
        self.telemetry = Telemetry(
            settings.telemetry,
            self.state,
            node_usage=self.client.node_usage,
            monotonic=monotonic,
        )
        observed = Observed(self.metrics.registry, self.state, self.telemetry, self.devices)
        self.metrics.before_scrape += [self._set_gauges, observed.update]

    def silent(self) -> float:
        """For how long the more silent one of the watches has said nothing, seconds."""
        return self.monotonic() - min(self.nodes.last_contact, self.pods.last_contact)

    def fresh(self) -> bool:
        """Whether both watches are in and spoke lately enough for the state to be trusted."""
        return self.silent() <= self.settings.serve.stale_seconds and not self._stopping

    def leading(self) -> bool:
        """Whether this replica lifts gates and learns."""
        return self.election is None or self.election.leading

    def _leader_changed(self, leading: bool, holder: str) -> None:
        self.metrics.leader_changes.inc()
        self.queue.wake.set()
        who = holder or "nobody"
        if leading:
            self.events.tell("Leading", f"this replica lifts gates and learns ({who})", "Normal")
        else:
            self.events.tell("Following", f"{who} leads; this replica only answers", "Normal")

    async def rights(self) -> None:
        """Say once which rights are missing at the API server; nothing else depends on it."""
        backoff = Backoff(self._rng, first=1.0)
        while True:
            try:
                lacking = await missing(self.access, needed(self.settings, self.access))
            except FAILURES as error:
                log.warning("rights at the API server cannot be asked for: %s", error)
                await asyncio.sleep(backoff.next())
                continue
            self.metrics.missing_rights.set(float(len(lacking)))
            if lacking:
                self.events.tell(
                    "RightsMissing", f"{self.access.source} may not {', '.join(map(str, lacking))}"
                )
            await asyncio.Event().wait()

    async def _measure(self) -> None:
        """Read what nodes use once it is known which there are."""
        await self.nodes.synced.wait()
        await self.telemetry.run()

    async def files(self) -> None:
        """Look for new policies and speeds, write down the nodes, and lapse old assumptions."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            self.state.tick()
            if self.read_files():
                self.queue.wake.set()
            if self.pods.synced.is_set() and not self._counted:
                self._counted = True
                self._recorder.census(self.state)
            if self.nodes.synced.is_set():
                await self._write_nodes()
            await self._write_waits()

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

    async def _write_waits(self) -> None:
        content = self.queue.extra_wait.content()
        if content is not None:
            try:
                await asyncio.to_thread(write_atomic, self.settings.waits_file, content)
            except OSError as error:
                log.warning("how long pods wait cannot be written: %s", error)

    def _set_gauges(self) -> None:
        metrics, view = self.metrics, self.state.view
        metrics.pending.set(float(view.counts[PENDING]))
        metrics.running.set(float(view.counts[RUNNING]))
        metrics.gated.set(float(len(self.queue.gated())))
        metrics.nodes.set(float(len(self.state.rows)))
        metrics.synced.set(float(self.fresh()))
        metrics.leader.set(float(self.leading()))
        metrics.events_dropped.set(float(self.events.dropped))
        metrics.extra_wait.set(self.queue.longest_extra_wait())
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
        parts = [self.nodes.run(), self.pods.run(), self._measure(), self.files()]
        parts.append(self.devices.run())
        parts += [self.alarms.run(), self.events.run()]
        if not self.settings.kubernetes.api_url:  # a proxy answers for itself, not for us
            parts.append(self.rights())
        if self.settings.serve.queue:
            self.queue.extra_wait.read(self.settings.waits_file)
            parts.append(self.queue.run())
        # The lease is kept until the last gate is lifted.
        election = asyncio.create_task(_for_ever(self.election))
        tasks = [asyncio.create_task(part) for part in (*parts, _until(stop))]
        try:
            done, _ = await asyncio.wait([*tasks, election], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._stopping = True
            await _end(tasks)
            await self.queue.close()
            self.access.timeout = min(self.access.timeout, FAREWELL_SECONDS)
            if self.settings.serve.queue and (not self.election or await self.election.last_out()):
                await self._lift_all()
            await _end([election])
            await self._farewell()
        for task in done:
            task.result()

    async def _lift_all(self) -> None:
        try:
            async with asyncio.timeout(SHUTDOWN_SECONDS):
                lifted = await lift_gates.lift_all(
                    self.access,
                    self.settings.serve.scheduler_names,
                    insist=bool(self.queue.gated()),
                )
            log.info("%d gates lifted on the way out", lifted)
        except FAILURES as error:  # TimeoutError is one
            log.error(
                "not every gate may be lifted (%s); `fedsched agent lift-gates` lifts the rest",
                str(error) or f"not within {SHUTDOWN_SECONDS:g} s",
            )

    async def _farewell(self) -> None:
        """What is left to be said goes out, and another replica may lead."""
        last = [self.events.flush()] + ([self.election.release()] if self.election else [])
        for part in last:
            try:
                async with asyncio.timeout(FAREWELL_SECONDS):
                    await part
            except TimeoutError:
                log.warning("the API server did not answer on the way out")


async def _for_ever(election: Election | None) -> None:
    await (election.run() if election else asyncio.Event().wait())


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _until(stop: asyncio.Event) -> None:
    await stop.wait()
