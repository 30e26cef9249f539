"""Tells what happened to each pod, once: created, bound, started and how it ended.

Called by ``agent.cluster.state`` with every word of the API server about a pod. A word that comes
again (a new list, a watch taken up again) is told no second time. A pod that its controller made in
place of one that did not finish goes on with that one's job: its name, its attempts, its waiting.
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import NamedTuple

from agent.cluster.outcomes import end_of
from agent.cluster.records import Pod
from agent.journal import PodEvent, Progress

Emit = Callable[[PodEvent | Progress], None]
OWNERS = 10_000
"""Controllers whose lost pods are remembered; beyond it the oldest is forgotten."""
LOST_PODS = 1_000
"""Pods remembered of one controller."""
_BIT = {kind: 1 << bit for bit, kind in enumerate(("created", "bound", "started", "oom", "over"))}
_VACANT, _MEASURED = 1 << 5, 1 << 6


class _Vacancy(NamedTuple):
    """A pod that ended, or is being deleted, without having finished."""

    time: float
    job: str
    attempt: int
    waited: float


class _Life:
    """What is kept of a pod; there may be 100,000 of them."""

    __slots__ = ("attempt", "bound", "created", "job", "rate", "told", "used", "waited")

    def __init__(self) -> None:
        self.told = 0
        self.created = self.waited = self.rate = self.used = 0.0
        self.bound: float | None = None
        self.job, self.attempt = "", 0


class Lifecycle:
    """What was told of each pod. All times are cluster seconds since the epoch."""

    def __init__(self, emit: Emit, *, replaced_within: float = 3600.0) -> None:
        """``replaced_within`` is how long, in cluster seconds, a controller may take to replace a
        pod; one that it makes later is a job of its own."""
        self._emit, self._within = emit, replaced_within
        self._pods: dict[str, _Life] = {}
        self._vacancies: OrderedDict[tuple[str, str], deque[_Vacancy]] = OrderedDict()

    def known(self) -> set[str]:
        """UIDs of which something was told and that were not dropped since."""
        return set(self._pods)

    def over(self, uid: str) -> bool:
        """Whether the pod's end was told."""
        life = self._pods.get(uid)
        return life is not None and bool(life.told & _BIT["over"])

    def drop(self, uid: str) -> None:
        """The API server has no such pod any more: nothing more will come."""
        self._pods.pop(uid, None)

    def bound_at(self, uid: str) -> float | None:
        """When the pod was told to be bound."""
        life = self._pods.get(uid)
        return None if life is None else life.bound

    def created(self, pod: Pod, time: float, deadline: float) -> float:
        """It is there. Returns since when it counts as waiting: what its job waited in earlier
        attempts is added."""
        life = self._pods.setdefault(pod.uid, _Life())
        if not life.told & _BIT["created"]:
            life.created, life.job = time, pod.uid
            before = self._predecessor(pod, time)
            if before is not None:
                life.job, life.attempt, life.waited = before.job, before.attempt + 1, before.waited
            elif pod.index:
                life.job = f"{pod.owner}/{pod.index}"
            self._tell(
                pod, "created", time, deadline=deadline, gpu_models=list(pod.gpu_models),
                work=pod.work,
            )  # fmt: skip
        return life.created - life.waited

    def lives(self, pod: Pod, model: str, now: float, started: float | None) -> None:
        """It is as ``pod`` says; ``started`` is when it started, None for just now."""
        time = now if started is None else min(started, now)
        life = self._pods[pod.uid]
        if pod.node:
            if life.bound is None:
                life.bound = time
            self._tell(pod, "bound", life.bound, model)
            if pod.started or pod.phase == "Running" or pod.done:
                self._tell(pod, "started", time, model)
        if pod.reason == "OOMKilled" and not pod.done:
            self._tell(pod, "oom", now, model, self._ran(life, now))
        if pod.deleting:
            self._vacate(pod, life, now)  # a controller does not wait for its end

    def ends(self, pod: Pod, model: str, time: float) -> float:
        """It is done, or was deleted. Returns the cluster seconds that it ran."""
        life, kind = self._pods[pod.uid], end_of(pod)
        run = self._ran(life, time)
        self._tell(pod, kind, time, model, run)
        life.told |= _BIT["over"]
        if kind != "finished":
            self._vacate(pod, life, time)
        return run

    def used(self, uid: str, memory: float) -> None:
        """The pod was measured to use ``memory`` GiB."""
        life = self._pods[uid]
        life.used = max(life.used, memory)

    def progress(
        self, pod: Pod, model: str, now: float, neighbours: list[str], measured: bool = False
    ) -> None:
        """Its progress, told where it is another reading than the last.

        Once it was ``measured``, what the pod says of itself is passed over.
        """
        life = self._pods[pod.uid]
        if measured:
            life.told |= _MEASURED
        elif life.told & _MEASURED:
            return
        if pod.steps_per_second and life.rate != pod.steps_per_second:
            life.rate = pod.steps_per_second
            self._emit(
                Progress(
                    uid=pod.uid,
                    time=now,
                    job_type=pod.job_type,
                    gpus=pod.gang,
                    gpu_model=model,
                    steps_per_second=pod.steps_per_second,
                    neighbours=neighbours,
                )
            )

    def _predecessor(self, pod: Pod, time: float) -> _Vacancy | None:
        """The pod that this one was made in place of, which is then no longer missing one."""
        key = pod.owner, pod.index
        lost = self._vacancies.get(key) if pod.owner else None
        while lost:
            first = lost.popleft()
            if not lost:
                del self._vacancies[key]
            if time - first.time <= self._within:
                return first
        return None

    def _vacate(self, pod: Pod, life: _Life, time: float) -> None:
        if not pod.owner or life.told & _VACANT:
            return
        life.told |= _VACANT
        waited = life.waited + max((time if life.bound is None else life.bound) - life.created, 0.0)
        lost = self._vacancies.setdefault((pod.owner, pod.index), deque(maxlen=LOST_PODS))
        lost.append(_Vacancy(time, life.job, life.attempt, waited))
        if len(self._vacancies) > OWNERS:
            self._vacancies.popitem(last=False)

    @staticmethod
    def _ran(life: _Life, until: float) -> float:
        return 0.0 if life.bound is None else max(until - life.bound, 0.0)

    def _tell(
        self,
        pod: Pod,
        kind: str,
        time: float,
        model: str = "",
        run: float = 0.0,
        deadline: float = float("inf"),
        gpu_models: list[str] | None = None,
        work: str = "",
    ) -> None:
        life, bit = self._pods[pod.uid], _BIT.get(kind, 0)
        if life.told & bit:
            return
        life.told |= bit
        bound = life.bound
        self._emit(
            PodEvent(
                uid=pod.uid,
                time=time,
                kind=kind,
                node=pod.node,
                job_type=pod.job_type,
                gpus=pod.gpus,
                gpu_model=model,
                gpu_share=pod.gpu_share,
                cpu=pod.cpu,
                memory=pod.memory,
                gpu_memory=pod.gpu_memory,
                run_seconds=run,
                reason=pod.reason,
                job=life.job,
                attempt=life.attempt,
                pending_seconds=0.0 if bound is None else max(bound - life.created, 0.0),
                deadline=deadline,
                gpu_models=gpu_models or [],
                memory_used=life.used,
                work=work,
            )
        )
