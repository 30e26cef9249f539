"""Order and deferral: decides when fedsched's gate comes off a pending pod, and lifts it.

Run by ``agent.scheduling.member``. A pod with the scheduling gate ``fedsched.io/queue`` (KEP-3521)
is invisible to kube-scheduler until the gate is lifted. At each change of the cluster the policy
says which gated pod goes now and where, or to wait; the pod then counts as placed there, so that
the next decision of the same moment sees it. No pod is held without end: not by a policy (beyond
``max_extra_wait_seconds``), not by a state that is lost, and not by an agent that goes.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable

import numpy as np

from agent.arrays import Bools
from agent.backoff import Backoff
from agent.cluster.kubernetes import FAILURES, ApiError
from agent.cluster.records import GATE, Pod
from agent.cluster.state import ClusterState
from agent.scheduling.decision import decide_queue
from agent.scheduling.extra_wait import ExtraWait
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
STEP_SECONDS = 0.05
"""How long one look may decide: a burst of gated pods takes several, and kube-scheduler's questions
are answered in between."""
"""Changes come in bursts; this long they are gathered before the next look."""
RECONNECT_SECONDS = 35.0
"""An API server that answers again is given this long to make the state whole again (a watch comes
back within its longest pause of 30 s) before all gates are lifted."""
HOPELESS_SECONDS = 30.0
"""A pod that no node could hold is let go after this long, for kube-scheduler and a cluster
autoscaler to see; a node that is just being replaced is back by then."""
_MOVED = (409, 422)


class QueueController:
    """The gated pods of one cluster."""

    def __init__(
        self,
        state: ClusterState,
        policy: LivePolicy,
        recorder: Recorder,
        lift: Callable[[Pod], Awaitable[object]],
        settings: ServeSettings,
        metrics: Metrics,
        *,
        fresh: Callable[[], bool],
        leading: Callable[[], bool],
        monotonic: Callable[[], float],
        rng: random.Random,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """``lift`` takes the gate off a pod at the API server; ``fresh`` says whether the state can
        be trusted, ``leading`` whether this replica may write."""
        self._state, self._policy, self._recorder = state, policy, recorder
        self._lift, self._settings, self._metrics = lift, settings, metrics
        self._fresh, self._rng, self._sleep = fresh, rng, sleep
        self._writes = asyncio.Semaphore(WRITES)
        self._tasks: set[asyncio.Task[bool]] = set()
        self._releasing: set[str] = set()  # a write is under way
        self._lifted: set[str] = set()  # written, and the watch may not show it yet
        self._waited_at = -1
        self._leading, self._monotonic = leading, monotonic
        self._lost_at = monotonic() + settings.stale_seconds
        self._answered_at: float | None = None  # by the API server, while the state was lost
        self._looked_at = -float("inf")
        self._hopeless: dict[str, float] = {}
        self.extra_wait = ExtraWait(state)
        """How much longer than need be each gated pod has waited."""
        self.wake = asyncio.Event()
        """Set it when something changed."""
        self.decided: set[str] = set()
        """UIDs of living pods whose node was chosen (and recorded) here."""

    def gated(self) -> list[Pod]:
        """The pending pods behind our gate that no lifting is under way for, oldest first.

        Only those of our schedulers, where the settings name some.
        """
        state, ours = self._state, self._settings.scheduler_names
        pods = [
            state.pods[uid]
            for uid in state.gated
            if uid not in self._releasing and uid not in self._lifted
        ]
        if ours:
            pods = [pod for pod in pods if pod.scheduler in ours]
        return sorted(pods, key=lambda pod: (state.view.arrival[state.slots[pod.uid]], pod.name))

    def longest_extra_wait(self) -> float:
        """Of the gated pods, cluster seconds; 0 where none waits more than it has to."""
        return max((self.extra_wait.of(uid) for uid in self._state.gated), default=0.0)

    def step(self) -> list[Pod]:
        """Decide at the present state; the pods whose gate is to be lifted now, in order."""
        state = self._state
        state.tick()
        # In place, as the extender looks at this set; an intersection would go through all pods.
        self.decided.difference_update([uid for uid in self.decided if uid not in state.pods])
        self._lifted.difference_update([uid for uid in self._lifted if uid not in state.gated])
        gated = self.gated()
        if not self._fresh():
            return self._give_up(gated) if self._leading() else []
        self._lost_at, self._answered_at = self._monotonic(), None
        overdue = self._overdue(gated)
        if not self._leading():
            return []
        for pod, cause in overdue:
            self._release(pod, cause)
        go = [pod for pod, _ in overdue]
        gated = [pod for pod in gated if pod.uid not in self._releasing]
        if not gated:
            return go
        eligible = np.zeros(len(state.view.kind), np.bool_)
        # A pod behind others' gates too would hold a place that it cannot take.
        eligible[[state.slots[pod.uid] for pod in gated if pod.gates == (GATE,)]] = True
        ready = state.view.ready.copy()
        state.view.ready[busy(state.view, self._settings.cpu_limit)] = False
        until = self._monotonic() + STEP_SECONDS
        try:
            while (chosen := self._next(eligible)) is not None:
                go.append(chosen)
                if self._monotonic() > until:
                    self.wake.set()
                    break
        finally:
            state.view.ready[:] = ready
        return go

    def _overdue(self, gated: list[Pod]) -> list[tuple[Pod, str]]:
        """The pods that go whatever the policy says, and why; longest extra wait first."""
        now, waits = self._monotonic(), self.extra_wait
        if now - self._looked_at >= self._settings.queue_seconds:
            self._looked_at = now
            waits.look(gated)
            known = self._hopeless
            self._hopeless = {
                pod.uid: known.get(pod.uid, now) for pod in gated if waits.hopeless(pod.uid)
            }
        limit = self._settings.max_extra_wait_seconds
        late = [pod for pod in gated if waits.of(pod.uid) > limit]
        late.sort(key=lambda pod: -waits.of(pod.uid))
        lost = [
            pod
            for pod in gated
            if now - self._hopeless.get(pod.uid, now) >= HOPELESS_SECONDS and pod not in late
        ]
        # What a claim asks for is no number that could be held against a node.
        claiming = [pod for pod in gated if pod.claims and pod.gates == (GATE,)]
        found = {pod.uid: (pod, "claims") for pod in claiming}
        found |= {pod.uid: (pod, "hopeless") for pod in lost}
        return list(({pod.uid: (pod, "overdue") for pod in late} | found).values())

    def _give_up(self, gated: list[Pod]) -> list[Pod]:
        """The state is not to be trusted: where that lasts, nobody shall wait for us.

        One pod is tried until the API server answers; it may have been away altogether, and the
        watches need a moment to find that it is back.
        """
        now = self._monotonic()
        if now < self._lost_at or self._releasing:
            return []
        if self._answered_at is None:
            gated = gated[:1]
        elif now - self._answered_at < RECONNECT_SECONDS:
            return []
        for pod in gated:
            self._release(pod, "state_lost")
        return gated

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
        """Never returns; end it by cancelling its task, then call :meth:`close`."""
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
                        if not self._leading():
                            break
                        await self._lift(pod)
                    self._lifted.add(pod.uid)
                    if self._answered_at is None:
                        self._answered_at = self._monotonic()
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

    async def close(self) -> None:
        """End the writes that are under way; what they leave is for ``lift_gates``."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
