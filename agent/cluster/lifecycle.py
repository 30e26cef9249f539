"""Tells what happened to each pod, once: created, bound, started and how it ended.

Called by ``agent.cluster.state`` with every word of the API server about a pod. A word that comes
again (a new list, a watch taken up again) is told no second time.
"""

from collections.abc import Callable

from agent.cluster.records import Pod
from agent.journal import PodEvent, Progress

Emit = Callable[[PodEvent | Progress], None]


def end_of(pod: Pod) -> str:
    """How a pod ended that is done; ``deleted`` for one that is not."""
    if not pod.done:
        return "deleted"
    if pod.phase == "Succeeded":
        return "finished"
    return {"OOMKilled": "oom", "Evicted": "evicted"}.get(pod.reason, "failed")


class Lifecycle:
    """What was told of each pod. All times are cluster seconds since the epoch."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._told: dict[str, set[str]] = {}
        self._over: set[str] = set()
        self._bound: dict[str, float] = {}
        self._rate: dict[str, float] = {}

    def known(self) -> set[str]:
        """UIDs of which something was told and that were not dropped since."""
        return set(self._told)

    def over(self, uid: str) -> bool:
        """Whether the pod's end was told."""
        return uid in self._over

    def drop(self, uid: str) -> None:
        """The API server has no such pod any more: nothing more will come."""
        self._told.pop(uid, None)
        self._over.discard(uid)
        self._bound.pop(uid, None)
        self._rate.pop(uid, None)

    def bound_at(self, uid: str) -> float | None:
        """When the pod was told to be bound."""
        return self._bound.get(uid)

    def created(self, pod: Pod, time: float) -> None:
        """It is there."""
        self._tell(pod, "created", time)

    def lives(self, pod: Pod, model: str, now: float, started: float | None) -> None:
        """It is as ``pod`` says; ``started`` is when it started, None for just now."""
        time = now if started is None else min(started, now)
        if pod.node:
            self._bound.setdefault(pod.uid, time)
            self._tell(pod, "bound", self._bound[pod.uid], model)
            if pod.started or pod.phase == "Running" or pod.done:
                self._tell(pod, "started", time, model)
        if pod.reason == "OOMKilled" and not pod.done:
            self._tell(pod, "oom", now, model, self._ran(pod, now))

    def ends(self, pod: Pod, model: str, time: float) -> float:
        """It is done, or was deleted. Returns the cluster seconds that it ran."""
        run = self._ran(pod, time)
        self._tell(pod, end_of(pod), time, model, run)
        self._over.add(pod.uid)
        return run

    def progress(self, pod: Pod, model: str, now: float, neighbours: list[str]) -> None:
        """Its progress, told where it is another reading than the last."""
        if pod.steps_per_second and self._rate.get(pod.uid) != pod.steps_per_second:
            self._rate[pod.uid] = pod.steps_per_second
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

    def _ran(self, pod: Pod, until: float) -> float:
        return max(until - self._bound.get(pod.uid, until), 0.0)

    def _tell(self, pod: Pod, kind: str, time: float, model: str = "", run: float = 0.0) -> None:
        told = self._told.setdefault(pod.uid, set())
        if kind in told:
            return
        told.add(kind)
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
            )
        )
