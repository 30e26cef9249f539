"""``agent serve``: one process that watches a cluster, answers kube-scheduler and lifts gates.

Called by ``agent.cli``. It trains nothing and imports no torch; what the learner finds out comes
through files in the state directory, which are looked at once a second.
"""

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import random
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import aiohttp
import numpy as np
from aiohttp import web

from agent.cluster import nodes_file, objects, speeds_file
from agent.cluster.gpus import gpu_spec
from agent.cluster.growth import Spec
from agent.cluster.kubernetes import FAILURES, NODES, PODS, Client, GoneError, Reflector
from agent.cluster.records import Node, Pod
from agent.cluster.state import ClusterState
from agent.cluster.view import PENDING, RUNNING
from agent.journal import Journal
from agent.scheduling.decision import decide_node, decide_queue, make_policy, seed_kernels
from agent.scheduling.extender import KEEP_ALIVE_SECONDS, Extender
from agent.scheduling.guard import LivePolicy
from agent.scheduling.metrics import Metrics
from agent.scheduling.queue import QueueController
from agent.scheduling.recorder import Recorder
from agent.settings import Settings
from common.policy import initial_arrays
from common.weights import write_atomic

log = logging.getLogger(__name__)
POLL_SECONDS = 1.0
LOST_READINGS = 4
"""After this many failed readings in a row, node use counts as unknown."""
SHUTDOWN_SECONDS = 10.0
"""How long gates may take to be lifted on the way out."""


class StateLockedError(RuntimeError):
    """Another ``agent serve`` uses the state directory."""


def sheet(model: str) -> Spec | None:
    """The data sheet of a GPU model as the cluster state wants it."""
    spec = gpu_spec(model)
    return None if spec is None else (spec.tflops, spec.bandwidth, spec.memory)


def warm_up(rule: str) -> None:
    """Compile or load the kernels on a small cluster, so that no pod waits for it."""
    state = ClusterState(clock=lambda: 1e9, emit=lambda _: None, spec=sheet)
    state.replace_nodes(
        Node(name=model, cpu=8.0, memory=32.0, gpus=2, gpu_model=model, gpu_memory=16.0)
        for model in ("v100", "k80")
    )
    for number in range(3):
        pod = Pod(uid=f"u{number}", name=f"p{number}", cpu=1.0, memory=1.0, gpus=1, job_type="a")
        state.apply_pod(pod)
    state.assume("u0", "v100")
    state.apply_pod(Pod(uid="u1", name="p1", cpu=1.0, memory=1.0, gpus=1, node="k80"))
    state.apply_pod(state.pods["u1"], deleted=True)
    eligible = np.ones(len(state.view.kind), np.bool_)
    for policy in (make_policy(rule), make_policy(rule, initial_arrays())):
        decide_queue(state.view, policy, eligible)
        decide_node(state.view, policy, state.slots["u2"], np.array([0, 1], np.int64))


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


@contextlib.contextmanager
def state_lock(folder: Path, name: str) -> Iterator[None]:
    """Hold the state directory for one process of a kind. Raises StateLockedError."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StateLockedError(
                f"another 'agent {name}' uses {folder}; stop it, or give this one a state "
                "directory of its own (setting 'state')"
            ) from None
        yield


async def serve(settings: Settings, ready_file: Path | None = None) -> None:
    """Run until SIGTERM or SIGINT. ``ready_file`` gets pid and port once the port answers.

    Raises StateLockedError, and OSError where the port or the directory cannot be had.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    warm_up(settings.serve.rule)
    seed_kernels(settings.serve.seed)
    with state_lock(settings.state, "serve"):
        journal = Journal(settings.journal_dir)
        try:
            async with aiohttp.ClientSession() as session:
                member = Member(settings, session, journal)
                member.read_files()
                runner = web.AppRunner(
                    member.extender.app(),
                    access_log=None,
                    keepalive_timeout=KEEP_ALIVE_SECONDS,
                    shutdown_timeout=1.0,
                )
                await runner.setup()
                try:
                    site = web.TCPSite(runner, settings.serve.host, settings.serve.port)
                    await site.start()
                    port = int(runner.addresses[0][1])
                    log.info("extender at http://%s:%d", settings.serve.host, port)
                    if ready_file is not None:
                        ready = {"pid": os.getpid(), "port": port}
                        write_atomic(ready_file, json.dumps(ready).encode())
                    await member.run(stop)
                finally:
                    await runner.cleanup()
        finally:
            journal.close()
