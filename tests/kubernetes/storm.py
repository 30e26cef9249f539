"""A storm of crashes over a whole member: load on a real cluster while its parts are killed.

Called by the test of crashes. One thread does everything in turns, so that nothing in the test
itself depends on timing: it makes pods at a steady rate, plays the kubelet, kills what the seed
says, and starts again what is dead, as a kubelet or systemd would.
"""

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from kubernetes import client
from kubernetes.config import load_kube_config
from urllib3.exceptions import HTTPError

from examples.lab.control_plane import ControlPlane, pod_manifest
from examples.lab.kubelet import EMULATED
from examples.processes import Process
from tests.kubernetes.member import WAIT, Agent

RATE = 2.5
"""Pods a second."""
LIFETIME = (1.0, 5.0)
"""How long a pod runs, seconds."""
PAUSE = (1.0, 2.2)
"""Between two kills, seconds."""
AWAY = (0.1, 1.0)
"""From a death to the next start, seconds."""
LEAST = 2.5
"""Pods that are made for each kill, at least: a slow machine is killed slower, not with less."""
STEP = 0.1
KUBELET = 0.4
"""Between two looks of the stand-in kubelet, seconds."""
JOBS, DELETED = 5, 6
"""Every so manieth pod is made by the Job controller; every so manieth is deleted as it runs."""
_LABELS = {EMULATED: "true", "fedsched.io/job-type": "storm"}
_AWAY = (OSError, HTTPError, client.ApiException)


@dataclass
class Storm:
    """The load, the kubelet and the killer."""

    plane: ControlPlane
    agent: Agent
    seed: int
    kills: int
    log: list[str] = field(default_factory=list)
    """What was done when, for a failing test."""
    names: list[str] = field(default_factory=list)
    """Of all pods and Jobs that were made."""
    deleted: dict[str, str] = field(default_factory=dict)
    """Node by UID of the pods that were deleted while they ran."""

    def __post_init__(self) -> None:
        configuration = client.Configuration(retries=0)  # what fails is tried again in a later turn
        load_kube_config(str(self.plane.kubeconfig), client_configuration=configuration)
        api = client.ApiClient(configuration)
        self._core: Any = client.CoreV1Api(api)
        self._batch: Any = client.BatchV1Api(api)
        self._rng = random.Random(self.seed)
        self._began = time.monotonic()
        self._next_pod = self._next_look = 0.0
        self._back: dict[str, float] = {}
        self._ends: dict[str, float] = {}  # by UID: when the pod is done
        self.victims: dict[str, Process] = {
            "serve": self.agent.serve,
            "learn": self.agent.learn,
            "kube-apiserver": self.plane.processes["kube-apiserver"],
            "prometheus": self.plane.processes["prometheus"],
        }

    # ---- what happens ----

    def rage(self) -> None:
        """Kill in a random order, each victim as often as the others, under load."""
        order = [name for name, _ in zip(_cycle(self.victims), range(self.kills), strict=False)]
        self._rng.shuffle(order)
        for number, name in enumerate(order, 1):
            pause, pods = time.monotonic() + self._rng.uniform(*PAUSE), LEAST * number
            self.until(lambda due=pause: time.monotonic() >= due, "a pause is over")
            self.until(lambda least=pods: len(self.names) >= least, f"{pods:.0f} pods were made")
            self.until(lambda victim=name: self.victims[victim].alive, f"{name} is back")
            self.victims[name].kill()
            self._say(f"killed {name}")

    def until(self, met: Callable[[], Any], what: str, *, load: bool = True) -> Any:
        """Let everything go on until ``met()`` is true, and return it."""
        end = time.monotonic() + WAIT
        while time.monotonic() < end:
            self._start_again()
            if load and time.monotonic() >= self._next_pod:
                self._next_pod = time.monotonic() + 1 / RATE
                self._make(len(self.names))
            if time.monotonic() >= self._next_look:
                self._next_look = time.monotonic() + KUBELET
                self._play_kubelet()
            with contextlib.suppress(*_AWAY):
                if value := met():
                    return value
            time.sleep(STEP)
        raise AssertionError(f"waited in vain until {what}\n" + "\n".join(self.log))

    def pods(self) -> list[Any]:
        """All pods as the API server has them. Raises OSError, HTTPError or ApiException."""
        return list(self._core.list_namespaced_pod("default", _request_timeout=5).items)

    def over(self) -> bool:
        """Whether everything that was made is bound and done."""
        pods = self.pods()
        left = len(self.names) - len(self.deleted)
        return len(pods) == left and all(p.status.phase == "Succeeded" for p in pods)

    def _say(self, what: str) -> None:
        self.log.append(f"{time.monotonic() - self._began:7.2f} {what}")
        (self.plane.folder / "storm.log").write_text("\n".join(self.log))

    # ---- parts ----

    def _start_again(self) -> None:
        now = time.monotonic()
        for name, process in self.victims.items():
            if process.alive:
                self._back.pop(name, None)
            elif name not in self._back:
                self._back[name] = now + self._rng.uniform(*AWAY)
            elif now >= self._back[name]:
                del self._back[name]
                process.start()
                self._say(f"started {name}")

    def _make(self, number: int) -> None:
        """Create a pod, or a Job of one; where the answer is lost, its name tells the second try
        what became of the first."""
        name, gated = f"storm-{number}", number % 2 == 0
        pod = pod_manifest(name, cpu="4", memory="1Gi", gated=gated, labels=_LABELS)
        try:
            if number % JOBS:
                self._core.create_namespaced_pod("default", pod, _request_timeout=2)
            else:
                template = {"metadata": {"labels": _LABELS}, "spec": pod["spec"]}
                job = {"metadata": {"name": name}, "spec": {"template": template}}
                self._batch.create_namespaced_job("default", job, _request_timeout=2)
        except client.ApiException as error:
            if error.status != 409:
                return
        except _AWAY:
            return
        self.names.append(name)

    def _play_kubelet(self) -> None:
        """Run what is bound, and end it when its time has come."""
        with contextlib.suppress(*_AWAY):
            for pod in self.pods():
                uid, phase = pod.metadata.uid, pod.status.phase
                if phase == "Pending" and pod.spec.node_name:
                    self._ends.setdefault(uid, time.monotonic() + self._rng.uniform(*LIFETIME))
                    self._tell(pod, {"phase": "Running", "startTime": _now()})
                elif phase == "Running" and time.monotonic() >= self._ends[uid]:
                    if _dies(pod.metadata.name):
                        self.deleted[uid] = pod.spec.node_name  # also where no answer comes back
                        self._core.delete_namespaced_pod(
                            pod.metadata.name, "default", _request_timeout=2
                        )
                        continue
                    state = {"terminated": {"exitCode": 0, "finishedAt": _now()}}
                    ended = {"name": "main", "image": "none", "imageID": "", "state": state}
                    ended |= {"ready": False, "restartCount": 0}
                    self._tell(pod, {"phase": "Succeeded", "containerStatuses": [ended]})

    def _tell(self, pod: Any, status: dict[str, Any]) -> None:
        self._core.patch_namespaced_pod_status(
            pod.metadata.name, "default", {"status": status}, _request_timeout=2
        )


def _dies(name: str) -> bool:
    """Whether somebody deletes the pod; those of Jobs have other names, and would be replaced."""
    number = name.removeprefix("storm-")
    return number.isdecimal() and int(number) % DELETED == 1


def _cycle(names: dict[str, Process]) -> Iterator[str]:
    while True:
        yield from names


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
