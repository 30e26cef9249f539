"""Order and deferral: decides when fedsched's gate comes off a pending pod, and lifts it.

Run by ``agent.scheduling.serve``. A pod with the scheduling gate ``fedsched.io/queue`` (KEP-3521)
is invisible to kube-scheduler until the gate is lifted. At each change of the cluster the policy
says which gated pod goes now and where, or to wait; the pod then counts as placed there, so that
the next decision of the same moment sees it.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable

import numpy as np

from agent.arrays import Bools
from agent.cluster.kubernetes import FAILURES, ApiError, Backoff
from agent.cluster.records import GATE, Pod
from agent.cluster.state import ClusterState
from agent.cluster.view import PENDING
from agent.scheduling.decision import decide_queue
from agent.scheduling.guard import LivePolicy, busy
from agent.scheduling.metrics import Metrics
from agent.scheduling.recorder import Recorder
from agent.settings import ServeSettings

log = logging.getLogger(__name__)
TRIES = 6
"""How often the lifting of one gate is tried before the pod is decided on anew."""
WRITES = 16
"""Patches under way at one time."""
GATHER_SECONDS = 0.005
"""Changes come in bursts; this long they are gathered before the next look."""
_MOVED = (409, 422)


class QueueController:
    """The gated pods of one cluster."""

    def __init__(
        self,
        state: ClusterState,
        policy: LivePolicy,
        recorder: Recorder,
        lift: Callable[[Pod], Awaitable[None]],
        settings: ServeSettings,
        metrics: Metrics,
        *,
        fresh: Callable[[], bool],
        rng: random.Random,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """``lift`` takes the gate off a pod at the API server; ``fresh`` says whether the state can
        be trusted."""
        self._state, self._policy, self._recorder = state, policy, recorder
        self._lift, self._settings, self._metrics = lift, settings, metrics
        self._fresh, self._rng, self._sleep = fresh, rng, sleep
        self._writes = asyncio.Semaphore(WRITES)
        self._tasks: set[asyncio.Task[bool]] = set()
        self._releasing: set[str] = set()  # a write is under way
        self._lifted: set[str] = set()  # written, and the watch may not show it yet
        self._waited_at = -1
        self.wake = asyncio.Event()
        """Set it when something changed."""
        self.decided: set[str] = set()
        """UIDs of living pods whose node was chosen (and recorded) here."""

    def gated(self) -> list[Pod]:
        """The pending pods behind our gate that no lifting is under way for, oldest first."""
        state, pods = self._state, []
        for slot in state.view.queue[PENDING, : state.view.counts[PENDING]]:
            pod = state.pods[state.pod_name(int(slot))]
            if pod.gated and pod.uid not in self._releasing | self._lifted:
                pods.append(pod)
        return pods

    def step(self) -> list[Pod]:
        """Decide at the present state; the pods whose gate is to be lifted now, in order."""
        state = self._state
        now = state.tick()
        self.decided.intersection_update(state.pods)  # in place: the extender looks at this set
        self._lifted = {uid for uid in self._lifted if uid in state.pods and state.pods[uid].gated}
        gated = self.gated()
        go = []
        for pod in list(gated):
            if now - state.view.arrival[state.slots[pod.uid]] > (
                self._settings.max_extra_wait_seconds
            ):
                gated.remove(pod)
                go.append(pod)
                self._release(pod, "overdue")
        if not gated or not self._fresh():
            return go
        eligible = np.zeros(len(state.view.kind), np.bool_)
        # A pod behind others' gates too would hold a place that it cannot take.
        eligible[[state.slots[pod.uid] for pod in gated if pod.gates == (GATE,)]] = True
        ready = state.view.ready.copy()
        state.view.ready[busy(state.view, self._settings.cpu_limit)] = False
        try:
            while (chosen := self._next(eligible)) is not None:
                go.append(chosen)
        finally:
            state.view.ready[:] = ready
        return go

    def _next(self, eligible: Bools) -> Pod | None:
        state = self._state
        if not eligible.any():
            return None
        choice = decide_queue(state.view, self._policy.current, eligible)
        if choice is None:
            return None
        slot, row = int(choice.pods[choice.action]), int(choice.nodes[choice.action])
        if slot < 0:
            # The same wait at the same state is one decision, however often it is looked at.
            if self._waited_at != state.version:
                self._waited_at = state.version
                self._metrics.deferred.inc()
                self._recorder.decision("queue", choice, state, self._policy)
            return None
        pod = state.pods[state.pod_name(slot)]
        self._recorder.decision("queue", choice, state, self._policy)
        self._release(pod, "decision")
        self.decided.add(pod.uid)
        state.assume(pod.uid, state.node_name(row))
        eligible[slot] = False
        return pod

    def _release(self, pod: Pod, cause: str) -> None:
        self._releasing.add(pod.uid)
        self._metrics.released.labels(cause).inc()

    async def run(self) -> None:
        """Never returns; end it by cancelling its task, then call :meth:`lift_all`."""
        while True:
            self.wake.clear()
            for pod in self.step():
                task = asyncio.create_task(self.write(pod))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            # Not wait_for: in Python 3.11 it can swallow a cancellation.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.queue_seconds):
                    await self.wake.wait()
                await self._sleep(GATHER_SECONDS)

    async def write(self, pod: Pod) -> bool:
        """Lift one gate, trying again with longer waits; False where it stayed.

        The pod is then decided on anew, as the watch shows it by then.
        """
        backoff = Backoff(self._rng, longest=5.0)
        try:
            for _ in range(TRIES):
                try:
                    async with self._writes:
                        await self._lift(pod)
                    self._lifted.add(pod.uid)
                    return True
                except FAILURES as error:
                    self._metrics.lift_failures.inc()
                    log.warning("gate of pod %s/%s: %s", pod.namespace, pod.name, error)
                    if isinstance(error, ApiError) and error.status in _MOVED:
                        break
                await self._sleep(backoff.next())
                pod = self._state.pods.get(pod.uid, pod)
            self.decided.discard(pod.uid)
            self._state.forget(pod.uid)
            return False
        finally:
            self._releasing.discard(pod.uid)
            self.wake.set()

    async def lift_all(self) -> int:
        """Lift every gate, on the way out: a cluster without fedsched must not wait for it.

        Returns how many stayed.
        """
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        gated = [pod for pod in self._state.pods.values() if pod.gated]
        gated = [pod for pod in gated if pod.uid not in self._lifted]
        for pod in gated:
            self._release(pod, "shutdown")
        done = await asyncio.gather(*(self.write(pod) for pod in gated))
        return done.count(False)
