"""The embedded cluster itself: engine, scheduler and API objects at one pace; cluster.py runs it.

The engine lives its jobs, a scheduler that behaves like kube-scheduler binds their pods, and every
change becomes a versioned object that api.py lets an agent list and watch.
"""

import asyncio
import contextlib
import json
import math
import time
from collections.abc import Callable
from contextlib import AsyncExitStack

import numpy as np

from agent.cluster.view import USAGE_CPU, USAGE_MEMORY, fits
from agent.simulator import manifest, report
from agent.simulator.api import KubernetesApi
from agent.simulator.cluster_settings import ClusterSettings
from agent.simulator.engine import TELEMETRY_S, advance, measure, next_event, place
from agent.simulator.extender_client import Extender
from agent.simulator.hardware import load_speeds
from agent.simulator.job_objects import JobObjects, ProgressReports
from agent.simulator.kube_scheduler import KubeScheduler, feasible_nodes, plugin_scores
from agent.simulator.pace import Clock
from agent.simulator.simulation import (
    ACTIVE,
    SUCCEEDED,
    WAITING,
    copy_simulation,
    new_simulation,
)
from agent.simulator.store import Collection, Json, Store

_LONGEST_NAP = 0.25
_SHORTEST_NAP = 0.001


class EmbeddedCluster:
    """One cluster with its API objects and its scheduler; :meth:`run` lives its jobs.

    The API server's time is the wall clock's: a pod created one wall second after the start says
    so, however many cluster seconds that was. wall: Unix seconds. monotonic: wall seconds.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        *,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Errors: TraceError and ValueError for jobs or nodes that cannot be had."""
        self.settings = settings
        self.clock = Clock(settings.clock_scale, wall)
        self.paced = self.clock.paced
        speeds = load_speeds()
        self._mix = settings.nodes.build()
        workload = settings.workload.build(speeds, self._mix)
        self.sim = new_simulation(workload, self._mix, speeds, seed=settings.seed)
        self._objects = JobObjects(
            workload,
            self._mix,
            speeds,
            self.clock.stamp,
            scheduler=settings.scheduler_name,
            gated=settings.gated,
            seed=settings.seed,
        )
        self.jobs = self._objects.jobs
        progress_seed, ties_seed = np.random.SeedSequence(settings.seed).spawn(2)
        self._progress = ProgressReports(
            self.sim,
            seconds=settings.progress_seconds,
            noise=settings.progress_noise,
            rng=np.random.default_rng(progress_seed),
        )
        self.store = Store()
        self.nodes = Collection(self.store, "Node", history=settings.history)
        self.pods = Collection(self.store, "Pod", history=settings.history)
        self._keys = [""] * len(workload)
        self._slots: dict[str, int] = {}
        self._gated: set[int] = set()
        self._state = self.sim.state.copy()
        self._bound = np.full(len(workload), -1, np.int64)
        self._work, self._moved = asyncio.Event(), asyncio.Event()
        self.extender = Extender(settings.extender, monotonic) if settings.extender else None
        self.scheduler = KubeScheduler(
            self.sim.cluster,
            self._mix.names,
            clock=lambda: float(self.sim.cluster.clock[0]),
            pod_json=lambda slot: self.pods.body(self._keys[slot]),
            bind=self._bind,
            refused=self._refused,
            rng=np.random.default_rng(ties_seed),
            extender=self.extender,
        )
        self.api = KubernetesApi(
            self.store,
            {"nodes": self.nodes, "pods": self.pods},
            metrics=self._node_metrics,
            progress=self.progress,
            start=self.start,
            patched=self._patched,
            monotonic=monotonic,
            bookmark_seconds=settings.bookmark_seconds,
        )
        self._create_nodes()
        self._warm_up()

    # Time -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Let the clock go, where it waited for that."""
        self.clock.start()

    def now(self) -> float:
        """Cluster seconds since the start; where the clock has no pace, the engine's own."""
        reached = float(self.sim.cluster.clock[0])
        if self.over:
            return reached
        return max(min(self.clock.passed(), self.settings.until), reached)

    def _stamp(self) -> str:
        """The API server's time at the engine's now."""
        return self.clock.stamp(float(self.sim.cluster.clock[0]))

    @property
    def over(self) -> bool:
        """Whether all jobs have ended or the time is up."""
        return report.over(self.sim, self.settings.until)

    async def run(self) -> None:
        """Return when the cluster is :attr:`over`; cancel it to stop earlier."""
        async with AsyncExitStack() as stack:
            if self.extender is not None:
                await stack.enter_async_context(self.extender)
            if not self.settings.wait_for_start:
                self.start()
            await self.clock.started.wait()
            if not self.paced:
                await self._run_unpaced()
                return
            scheduling = asyncio.create_task(self._schedule())
            pacing = asyncio.create_task(self._pace())
            try:
                done, _ = await asyncio.wait(
                    (pacing, scheduling), return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    task.result()  # an error of ours ends the run and is not swallowed
            finally:
                for task in (pacing, scheduling):
                    task.cancel()
                await asyncio.gather(pacing, scheduling, return_exceptions=True)

    async def _run_unpaced(self) -> None:
        """The clock jumps to the next event once the scheduler has nothing left to try."""
        while not self.over:
            while await self.scheduler.schedule_one():
                pass
            until = min(self.scheduler.queue.next_timer(), self.settings.until)
            if not advance(self.sim, until) and math.isinf(until):
                return  # nothing runs, nothing arrives, and nothing that waits fits anywhere
            self._publish()
            await asyncio.sleep(0)

    async def _pace(self) -> None:
        """Keep the engine up with the wall clock."""
        while True:
            self._catch_up()
            if self.over:
                return
            upcoming = min(next_event(self.sim), self.scheduler.queue.next_timer())
            nap = (min(upcoming, self.settings.until) - self.now()) / self.settings.clock_scale
            self._moved.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(max(nap, _SHORTEST_NAP), _LONGEST_NAP)):
                    await self._moved.wait()

    async def _schedule(self) -> None:
        """The scheduler's loop: one pod after the other, then wait for something to do."""
        while True:
            self._work.clear()
            while await self.scheduler.schedule_one():
                await asyncio.sleep(0)  # without an extender nothing else would let others run
            await self._work.wait()

    def _catch_up(self) -> None:
        target = self.now()
        while advance(self.sim, target):
            self._publish()
        self._publish()
        if self.scheduler.queue.next_timer() <= target:
            self._work.set()

    # From the engine to objects -------------------------------------------------------------

    def _publish(self) -> None:
        """Make an object change of everything that the engine changed since the last time."""
        sim = self.sim
        changed = np.flatnonzero(sim.state != self._state)
        room = False
        for slot in changed.tolist():
            before, after = self._state[slot], sim.state[slot]
            if before == ACTIVE:
                self._end(slot, "Completed" if after == SUCCEEDED else "OOMKilled")
                room = True
            if after == WAITING:
                self._create_pod(slot)
            elif after == ACTIVE:
                self._begin(slot)
        if len(changed):
            self._state = sim.state.copy()
        for slot, rate in self._progress.due(sim):
            pod = self.pods.objects[self._keys[slot]]
            manifest.progress(pod, rate)
            self.pods.put(self._keys[slot], pod)
        if room:
            self.scheduler.queue.event()
            self._work.set()

    def _warm_up(self) -> None:
        """Compile every kernel on a copy: a compiler at work would hold up a paced clock."""
        sim = copy_simulation(self.sim)
        advance(sim, next_event(sim))
        found = feasible_nodes(sim.cluster, 0, 0, 1)
        plugin_scores(sim.cluster, 0, found[:-1])
        if len(found) > 1 and fits(sim.cluster, 0, int(found[0])):
            place(sim, 0, int(found[0]))
        measure(sim)
        report.summary(sim)

    def _create_nodes(self) -> None:
        for row, name in enumerate(self._mix.names):
            self.nodes.put(name, self._objects.node(row))

    def _create_pod(self, slot: int) -> None:
        """The job's controller makes a pod: the first, or one in the place of a killed one."""
        view, attempt = self.sim.cluster, int(self.sim.attempts[slot])
        created = float(view.clock[0] if attempt else view.arrival[slot])
        pod = self._objects.pod(slot, attempt, created)
        self._keys[slot] = f"{manifest.NAMESPACE}/{pod['metadata']['name']}"
        self._slots[self._keys[slot]] = slot
        self.pods.put(self._keys[slot], pod)
        if self.settings.gated:
            self._gated.add(slot)
        else:
            self.scheduler.queue.add(slot)
            self._work.set()

    def _begin(self, slot: int) -> None:
        key, when = self._keys[slot], self._stamp()
        pod = self.pods.objects[key]
        manifest.bound(pod, self._mix.names[self.sim.cluster.node[slot]], when)
        self.pods.put(key, pod)
        manifest.running(pod, when)
        self.pods.put(key, pod)

    def _end(self, slot: int, reason: str) -> None:
        key = self._keys[slot]
        pod = self.pods.objects[key]
        exit_code = 0 if reason == "Completed" else 137
        manifest.ended(pod, reason=reason, exit_code=exit_code, when=self._stamp())
        self.pods.put(key, pod)

    # What the scheduler and the API ask for -------------------------------------------------

    def _bind(self, slot: int, row: int) -> bool:
        if self.paced:
            self._catch_up()
        if self.sim.state[slot] != WAITING or not fits(self.sim.cluster, slot, row):
            return False
        place(self.sim, slot, row)
        self._bound[slot] = row
        self._publish()
        self._moved.set()
        return True

    def _refused(self, slot: int, why: str) -> None:
        key = self._keys[slot]
        pod = self.pods.objects[key]
        if all(condition.get("message") != why for condition in pod["status"]["conditions"]):
            manifest.unschedulable(pod, why, self._stamp())
            self.pods.put(key, pod)

    def _patched(self, key: str, before: Json, after: Json) -> None:
        freed = "schedulingGates" in before["spec"] and "schedulingGates" not in after["spec"]
        if freed:
            manifest.ungated(after)
        self.pods.put(key, after)
        slot = self._slots[key]
        if freed and slot in self._gated and self._keys[slot] == key:
            self._catch_up()
            self._gated.discard(slot)
            self.scheduler.queue.add(slot)
            self._work.set()

    def _refresh(self) -> None:
        """What is shown is of this moment, not of the pacer's last look."""
        if self.paced and self.clock.started.is_set():
            self._catch_up()

    def _node_metrics(self) -> list[Json]:
        self._refresh()
        view = self.sim.cluster
        if view.clock[0] - self.sim.measured[0] >= TELEMETRY_S:
            measure(self.sim)
        when = self._stamp()
        use = view.usage[:, (USAGE_CPU, USAGE_MEMORY)] * view.capacity[:, :2]
        return [
            manifest.node_metrics(name, cpu=float(cpu), memory=float(memory), when=when)
            for name, (cpu, memory) in zip(self._mix.names, use, strict=True)
            if math.isfinite(cpu) and math.isfinite(memory)
        ]

    def progress(self) -> Json:
        """How far the jobs are, for a display."""
        self._refresh()
        return {
            "name": self.settings.name,
            "started": self.clock.started.is_set(),
            "over": self.over,
            "gated": len(self._gated),
            **report.summary(self.sim),
            "completion_seconds": report.completions(self.sim),
            "scheduler": dict(self.scheduler.counts),
            "extender": report.extender_counts(self.extender),
        }

    def result(self, *, interrupted: bool) -> Json:
        """What became of every job."""
        return {
            **self.progress(),
            "interrupted": interrupted,
            "settings": json.loads(self.settings.model_dump_json()),  # infinite becomes null
            "job_rows": report.job_rows(self.sim, self.jobs, self._mix.names, self._bound),
        }
