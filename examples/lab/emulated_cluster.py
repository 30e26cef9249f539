"""Emulated nodes and jobs on a real cluster: the simulator's physics between API server and watch.

emulator.py runs it. Jobs arrive by the trace, their pods are scheduled by whatever schedules in the
cluster; once the watch shows a pod bound, the engine lets it run at its true speed beside its true
neighbours, and its end is written back. The clock goes on while the API server is away.
"""

import asyncio
import contextlib
import json
import logging
import random
import time
from collections import Counter
from collections.abc import Callable
from http import HTTPStatus

import aiohttp
import numpy as np

from agent.cluster.kubernetes import PODS, ApiError, Client
from agent.cluster.listing import Listing
from agent.cluster.reflector import Reflector
from agent.cluster.view import CPU, GPUS, MEMORY, fits
from agent.simulator import report
from agent.simulator.engine import advance, measure, next_event, place, withdraw
from agent.simulator.hardware import load_speeds
from agent.simulator.job_objects import JobObjects, ProgressReports
from agent.simulator.pace import Clock
from agent.simulator.simulation import (
    ACTIVE,
    FAILED,
    SUCCEEDED,
    WAITING,
    copy_simulation,
    new_simulation,
)
from agent.simulator.store import Json
from examples.lab.emulated_jobs import EmulatedJobs
from examples.lab.emulator_settings import EmulatorSettings
from examples.lab.kubelet import Books, Sighting, read, usable
from examples.lab.writes import Writes

log = logging.getLogger(__name__)
NODES = "/api/v1/nodes"
_LONGEST_NAP = 0.25
_SHORTEST_NAP = 0.001
_PROGRESS_WALL_SECONDS = 1.0
"""Wall seconds between two reports of one pod at one rate, at least: each is a write."""
_ACCOUNT_SECONDS = 10.0
"""How long a new namespace may take to get its service account, without which no pod is let in."""
_READY_SECONDS = 90.0
PODS_PER_NODE = 110


class EmulatedCluster:
    """The emulated part of one cluster; :meth:`run` lives its jobs.

    ``session`` carries an administrator's credentials for the API server at ``url``.
    """

    def __init__(
        self,
        settings: EmulatorSettings,
        session: aiohttp.ClientSession,
        url: str,
        *,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Errors: TraceError and ValueError for jobs or nodes that cannot be had."""
        self.settings = settings
        self.clock = Clock(settings.clock_scale, monotonic, epoch=wall)
        speeds = load_speeds()
        self.mix = settings.nodes.build()
        workload = settings.workload.build(speeds, self.mix)
        self.sim = new_simulation(workload, self.mix, speeds, seed=settings.seed)
        self.objects = JobObjects(
            workload,
            self.mix,
            speeds,
            self.clock.stamp,
            scheduler=settings.scheduler_name,
            gated=settings.gated,
            seed=settings.seed,
        )
        self._rows = {name: row for row, name in enumerate(self.mix.names)}
        rng = random.Random(settings.seed)
        self.writes = Writes(session, url, rng=rng)
        self.jobs = EmulatedJobs(
            self.objects,
            self.writes,
            self._stamp,
            namespace=settings.namespace,
            keep_seconds=settings.keep_seconds,
        )
        self.reflector = Reflector(
            Client(session, url),
            PODS,
            read,
            listing=self._list,
            change=self._change,
            monotonic=monotonic,
            rng=rng,
        )
        self.books = Books(
            (name, float(room[CPU]), float(room[MEMORY]), int(room[GPUS]), PODS_PER_NODE)
            for name, room in zip(self.mix.names, self.mix.capacity, strict=True)
        )
        self._progress = ProgressReports(
            self.sim,
            seconds=max(settings.progress_seconds, _PROGRESS_WALL_SECONDS * settings.clock_scale),
            noise=settings.progress_noise,
            rng=np.random.default_rng(settings.seed),
        )
        self.counts: Counter[str] = Counter()
        """bound, refused (by the kubelet), deleted (pods, by others)."""
        self._state = self.sim.state.copy()
        self._bound = np.full(len(workload), -1, np.int64)
        self._living: dict[str, tuple[int, str]] = {}  # by name: slot and UID, empty until seen
        self._ours: set[str] = set()  # names of all pods that were ever made here
        self._moved = asyncio.Event()
        self._last_event = 0.0
        self._released = np.full(len(workload), np.nan)
        self._overhead = np.full(len(workload), np.nan)
        self._warm_up()

    # Time -----------------------------------------------------------------------------------

    def _stamp(self) -> str:
        """The API server's time at the engine's now."""
        return self.clock.stamp(float(self.sim.cluster.clock[0]))

    @property
    def over(self) -> bool:
        """Whether all jobs have ended or the time is up."""
        return report.over(self.sim, self.settings.until)

    def catch_up(self) -> None:
        """Bring the engine to this moment."""
        if not self.clock.started.is_set() or self.over:
            return
        reached = float(self.sim.cluster.clock[0])
        target = max(min(self.clock.passed(), self.settings.until), reached)
        while advance(self.sim, target):
            self._last_event = float(self.sim.cluster.clock[0])
            self._publish()
        self._publish()

    async def prepare(self) -> None:
        """Create namespace and nodes, and wait until these are Ready.

        Raises ApiError for nodes that cannot be made, OSError for ones that do not get Ready.
        """
        namespace = self.settings.namespace
        body = {"metadata": {"name": namespace}}
        await self.writes.request("POST", "/api/v1/namespaces", body)
        account = f"/api/v1/namespaces/{namespace}/serviceaccounts/default"
        with contextlib.suppress(TimeoutError):  # a cluster without controllers needs none
            async with asyncio.timeout(_ACCOUNT_SECONDS):
                while await self.writes.request("GET", account) is None:
                    await asyncio.sleep(0.05)
        await asyncio.gather(*(self._create_node(row) for row in range(len(self.mix))))
        waiting = set(self.mix.names)
        try:
            async with asyncio.timeout(_READY_SECONDS):
                while waiting:
                    found = await self.writes.request("GET", f"{NODES}?resourceVersion=0") or {}
                    items = found.get("items", ())
                    waiting -= {node["metadata"]["name"] for node in items if usable(node)}
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise OSError(
                f"node {min(waiting)} is not Ready after {_READY_SECONDS:.0f} s; does kwok run for "
                "this cluster?"
            ) from None

    async def _create_node(self, row: int) -> None:
        node = self.objects.node(row)
        name = node["metadata"]["name"]
        # Whether it is Ready is for its kubelet to say, whose stand-in is kwok.
        addresses = [{"type": "Hostname", "address": name}]
        addresses.append({"type": "InternalIP", "address": node_address(row)})
        status = {k: node["status"][k] for k in ("capacity", "allocatable")}
        body = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": name, "labels": node["metadata"]["labels"]},
            "status": {**status, "addresses": addresses},
        }
        if await self.writes.request("POST", NODES, body) is None:
            raise ApiError(
                HTTPStatus.CONFLICT,
                f"node {name} is there already, or was refused; delete it, or start on a cluster "
                "of its own",
            )

    async def run(self) -> None:
        """Return when the cluster is :attr:`over` and all is written; cancel it to stop earlier."""
        watching = asyncio.create_task(self.reflector.run())
        pacing = asyncio.create_task(self._pace())
        try:
            done, _ = await asyncio.wait((watching, pacing), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # an error of ours ends the run and is not swallowed
        finally:
            for task in (watching, pacing):
                task.cancel()
            await asyncio.gather(watching, pacing, return_exceptions=True)

    async def _pace(self) -> None:
        """Keep the engine up with the wall clock."""
        await self.reflector.synced.wait()
        if not self.settings.wait_for_start:
            self.clock.start()
        await self.clock.started.wait()
        while True:
            self.catch_up()
            if self.over:
                return
            upcoming = min(next_event(self.sim), self.settings.until)
            nap = (upcoming - self.clock.passed()) / self.clock.scale
            self._moved.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(max(nap, _SHORTEST_NAP), _LONGEST_NAP)):
                    await self._moved.wait()

    def _warm_up(self) -> None:
        """Compile every kernel on a copy: a compiler at work would hold up the clock."""
        sim = copy_simulation(self.sim)
        advance(sim, next_event(sim))
        for row in range(len(self.mix)):
            if fits(sim.cluster, 0, row):
                place(sim, 0, row)
                withdraw(sim, 0)
                break
        measure(sim)
        report.summary(sim)

    # From the engine to the API server -------------------------------------------------------

    def _publish(self) -> None:
        """Write down everything that the engine changed since the last time."""
        sim = self.sim
        for slot in np.flatnonzero(sim.state != self._state).tolist():
            before, after = self._state[slot], sim.state[slot]
            self._state[slot] = after
            if before == ACTIVE:
                self._leave(slot)
                self.jobs.ended(slot, oom=after != SUCCEEDED, last=after in (SUCCEEDED, FAILED))
            if after == WAITING:
                self._create(slot)
            elif after == ACTIVE:
                self.jobs.runs(slot)
        for slot, rate in self._progress.due(sim):
            self.jobs.progress(slot, rate)

    def _create(self, slot: int) -> None:
        sim = self.sim
        first = not self.jobs.names[slot]
        created = sim.cluster.arrival[slot] if first else sim.cluster.clock[0]
        name = self.jobs.create(slot, float(created))
        self._ours.add(name)
        self._living[name] = (slot, "")
        self._released[slot] = np.nan

    def _leave(self, slot: int) -> None:
        """The job's last pod lives no more."""
        name = self.jobs.names[slot]
        self.books.forget(self._living.pop(name)[1])

    # From the API server to the engine -------------------------------------------------------

    def _list(self) -> Listing[Sighting]:
        """A list began: pods that were seen and do not come are gone."""
        seen = {uid for _, uid in self._living.values() if uid}
        return Listing(
            seen | self.books.residents(),
            lambda sighting: sighting.pod.uid,
            lambda sighting: self._change(sighting, False),
            self._missed,
        )

    def _missed(self, uid: str) -> None:
        self.books.forget(uid)
        for name, (_, living) in list(self._living.items()):
            if living == uid:
                self._deleted(name, waits=False)

    def _change(self, sighting: Sighting, gone: bool) -> None:
        pod = sighting.pod
        if pod.namespace != self.settings.namespace or pod.name not in self._ours:
            self.books.follow(pod, gone)
            return
        slot, uid = self._living.get(pod.name, (-1, ""))
        if slot < 0 or (uid and uid != pod.uid):
            return  # it has ended here, whatever the watch still shows
        self._living[pod.name] = (slot, pod.uid)
        self.catch_up()
        if pod.name not in self._living:
            return  # it ended in this very moment
        if gone or sighting.deleting or pod.done:
            self._deleted(pod.name, waits=sighting.deleting and not gone)
            return
        if not pod.gated and np.isnan(self._released[slot]):
            self._released[slot] = self._last_event
        if pod.node and self.sim.state[slot] == WAITING:
            self._bind(slot, sighting)

    def _bind(self, slot: int, sighting: Sighting) -> None:
        """The scheduler bound the pod: let it run, if its node has room for it."""
        sim, pod = self.sim, sighting.pod
        reason = self.books.refusal(pod)
        if not reason and not fits(sim.cluster, slot, self._rows[pod.node]):
            reason = "UnexpectedAdmissionError"  # no GPU with that much left of it
        if reason:
            log.info("%s refuses %s: %s", pod.node, pod.name, reason)
            self.counts["refused"] += 1
            del self._living[pod.name]
            self.jobs.refused(slot, reason)
            self._try_again(slot)
            return
        self.counts["bound"] += 1
        self.books.enter(pod)
        row = self._rows[pod.node]
        place(sim, slot, row)
        self._bound[slot] = row
        self._overhead[slot] = float(sim.cluster.start[slot] - self._released[slot])
        self._publish()
        self._moved.set()

    def _deleted(self, name: str, *, waits: bool) -> None:
        """Somebody took a living pod away; its job's controller makes another."""
        slot = self._living[name][0]
        self.counts["deleted"] += 1
        if self.sim.state[slot] == ACTIVE:
            withdraw(self.sim, slot)
            self._state[slot] = WAITING
        self._leave(slot)
        self.jobs.deleted(slot, waits=waits)
        self._try_again(slot)
        self._publish()
        self._moved.set()

    def _try_again(self, slot: int) -> None:
        """Make the job's next pod after a pause, as its controller would."""

        def create() -> None:
            self.catch_up()
            if not self.over:
                self._create(slot)

        asyncio.get_running_loop().call_later(self.settings.retry_seconds, create)

    # What is shown --------------------------------------------------------------------------

    def progress(self) -> Json:
        """How far the jobs are, for a display."""
        self.catch_up()
        pending = self.sim.state == WAITING
        return {
            "name": self.settings.name,
            "started": self.clock.started.is_set(),
            "over": self.over,
            "gated": int((pending & np.isnan(self._released)).sum()) if self.settings.gated else 0,
            **report.summary(self.sim),
            "completion_seconds": report.completions(self.sim),
            "scheduler": dict(self.counts),
            "writes": {"waiting": self.writes.waiting, **self.writes.counts},
            "watch": dict(self.reflector.counts),
        }

    def result(self, *, interrupted: bool) -> Json:
        """What became of every job.

        A row's ``overhead_seconds`` are those, by the cluster's clock, from the arrival or end
        after which the job's last pod was released to its being seen bound.
        """
        rows = report.job_rows(self.sim, self.objects.jobs, self.mix.names, self._bound)
        for row, overhead in zip(rows, self._overhead, strict=True):
            row["overhead_seconds"] = float(overhead) if np.isfinite(overhead) else None
        return {
            **self.progress(),
            "interrupted": interrupted,
            "settings": json.loads(self.settings.model_dump_json()),  # infinite becomes null
            "job_rows": rows,
        }


def node_address(row: int) -> str:
    """The address of a node by its row, as its InternalIP and in metrics' ``instance``."""
    return f"10.0.{row // 250}.{row % 250 + 1}"
