"""A member's decision path without a cluster, for tests of extender, guard and queue."""

import json
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from agent.cluster.gpus import sheet
from agent.cluster.records import GATE, Node, Pod
from agent.cluster.state import ClusterState
from agent.journal import Decision, Journal, PodEvent, read
from agent.scheduling.extender import Extender
from agent.scheduling.guard import LivePolicy
from agent.scheduling.metrics import Metrics
from agent.scheduling.queue import QueueController
from agent.scheduling.recorder import Recorder
from agent.settings import ServeSettings


def node(name: str, model: str = "v100", **changes: Any) -> Node:
    values = {"cpu": 32.0, "memory": 256.0, "gpus": 4, "gpu_memory": 16.0}
    return Node(name=name, gpu_model=model, **{**values, **changes})


def pod(uid: str, **changes: Any) -> Pod:
    values: dict[str, Any] = {"name": uid, "cpu": 1.0, "memory": 1.0, "gpus": 1, "job_type": "a"}
    return Pod(uid=uid, **{**values, **changes})


def gated(uid: str, **changes: Any) -> Pod:
    return pod(uid, gated=True, gates=(GATE,), **changes)


async def no_sleep(_: float) -> None:
    return None


class Member:
    """State, policy, extender and queue with clocks to turn; the cluster's clock is the wall's."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.now, self.spent, self.alive, self.leads = 1000.0, 0.0, True, True
        self.folder = folder
        self.settings = ServeSettings(**settings)
        self.metrics = Metrics()
        self.journal = Journal(folder / "journal")
        recorder = Recorder(self.journal, self.metrics, "session")
        self.state = ClusterState(
            clock=lambda: self.now, emit=recorder.event, spec=sheet, assume_seconds=30.0
        )
        self.policy = LivePolicy(folder / "current.safetensors", self.settings, self.metrics)
        self.lifted: list[str] = []
        self.lift: Callable[[Pod], Awaitable[None]] = self._lift
        self.queue = QueueController(
            self.state, self.policy, recorder, lambda pod: self.lift(pod), self.settings,
            self.metrics, fresh=lambda: self.alive, leading=lambda: self.leads,
            monotonic=lambda: self.now, rng=random.Random(0), sleep=no_sleep,
        )  # fmt: skip
        self.extender = Extender(
            self.state, self.policy, recorder, self.settings, self.metrics,
            fresh=lambda: self.alive, queued=self.queue.decided, monotonic=self._monotonic,
        )  # fmt: skip
        self._time = 0.0

    async def _lift(self, pod: Pod) -> None:
        self.lifted.append(pod.uid)

    def _monotonic(self) -> float:
        self._time += self.spent
        return self._time

    def decisions(self) -> list[Decision]:
        return [r for r, _, _ in read(self.folder / "journal") if isinstance(r, Decision)]

    def events(self) -> list[PodEvent]:
        return [r for r, _, _ in read(self.folder / "journal") if isinstance(r, PodEvent)]

    def count(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"fedsched_{name}", labels) or 0.0

    def scores(self, uid: str, names: list[str], **changes: Any) -> dict[str, int]:
        """What kube-scheduler adds to each node, per point; empty for no opinion."""
        answer = self.extender.prioritize(args(uid, names, **changes), self._time)
        said = {entry.host: entry.score for entry in answer}
        return {name: said.get(name, 0) for name in names} if said else {}

    def best(self, uid: str, names: list[str], **changes: Any) -> str:
        """The one node that kube-scheduler adds most to; empty where there is none."""
        scores = self.scores(uid, names, **changes)
        first = [name for name in scores if scores[name] == max(scores.values())]
        return first[0] if len(first) == 1 else ""


def pod_object(uid: str, **changes: Any) -> dict[str, Any]:
    """The v1.Pod that :func:`pod` is the record of."""
    return {
        "metadata": {
            "name": uid,
            "uid": uid,
            "labels": {"fedsched.io/job-type": "a"},
            "annotations": changes.get("annotations", {}),
        },
        "spec": {
            "containers": [
                {"resources": {"requests": {"cpu": "1", "memory": "1Gi", "nvidia.com/gpu": "1"}}}
            ],
            **changes.get("spec", {}),
        },
    }


def args(uid: str, names: list[str], **changes: Any) -> bytes:
    """An ExtenderArgs with node names, as kube-scheduler sends it."""
    body = {"Pod": pod_object(uid, **changes), "Nodes": None, "NodeNames": names}
    return json.dumps(body).encode()
