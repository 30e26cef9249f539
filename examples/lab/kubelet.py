"""A kubelet's part in the emulated nodes' life: whom it lets in, and what it says of its pods.

emulated_cluster.py asks it. The books count the pods of every scheduler and owner, in the order in
which they were bound, as each kubelet does for its node.
"""

from collections.abc import Iterable

import msgspec

from agent.cluster import objects
from agent.cluster.records import RESOURCE_GPU, Pod
from agent.simulator import manifest
from agent.simulator.store import Json

EMULATED = "fedsched.io/emulated"
"""Label of the pods whose kubelet is the emulator; the lab's kwok leaves them alone."""
MANAGER = "fedsched.io/emulator"
"""Who makes the pods of an emulated Job (``spec.managedBy``): the Job controller does not."""
_EPSILON = 1e-6


class Sighting(msgspec.Struct, frozen=True):
    """A pod as the watch shows it."""

    pod: Pod
    deleting: bool
    """Whether somebody deleted it and the API server waits for its kubelet to end it."""


class _Meta(msgspec.Struct, frozen=True, rename="camel"):
    deletion_timestamp: str | None = None


class _Object(msgspec.Struct, frozen=True):
    metadata: _Meta


_decode = msgspec.json.Decoder(_Object).decode


def read(data: bytes | msgspec.Raw) -> Sighting:
    """A v1.Pod. Raises ObjectError."""
    pod = objects.pod(data)
    return Sighting(pod, _decode(data).metadata.deletion_timestamp is not None)


def usable(node: Json) -> bool:
    """Whether a v1.Node is Ready and without the taint of one that is not yet."""
    conditions = node["status"].get("conditions", ())
    ready = any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
    return ready and not node["spec"].get("taints")


class Books:
    """What the pods that live on each node ask for."""

    def __init__(self, nodes: Iterable[tuple[str, float, float, int, int]]) -> None:
        """``nodes``: name, cores, GiB, GPUs and the number of pods of each."""
        self._room = {name: (cpu, memory, gpus, pods) for name, cpu, memory, gpus, pods in nodes}
        self._on: dict[str, dict[str, Pod]] = {name: {} for name in self._room}

    def follow(self, pod: Pod, gone: bool) -> None:
        """Take in somebody else's pod as the watch shows it."""
        if pod.node and not pod.done and not gone:
            self.enter(pod)
        else:
            self.leave(pod)

    def enter(self, pod: Pod) -> None:
        """The pod lives on its node from now on."""
        if pod.node in self._on:
            self._on[pod.node][pod.uid] = pod

    def leave(self, pod: Pod) -> None:
        """It does so no more."""
        for residents in [self._on[pod.node]] if pod.node in self._on else self._on.values():
            residents.pop(pod.uid, None)

    def residents(self) -> set[str]:
        """UIDs of all that live on some node."""
        return {uid for residents in self._on.values() for uid in residents}

    def forget(self, uid: str) -> None:
        """A pod is gone of which nothing more is known."""
        for residents in self._on.values():
            residents.pop(uid, None)

    def refusal(self, pod: Pod) -> str:
        """Why its node's kubelet does not run a pod that was just bound; empty where it does."""
        if pod.node not in self._room:
            return "NodeAffinity"
        cpu, memory, gpus, pods = self._room[pod.node]
        others = [other for other in self._on[pod.node].values() if other.uid != pod.uid]
        for reason, asked, room in (
            ("OutOfpods", len(others) + 1, pods),
            ("OutOfcpu", pod.cpu + sum(other.cpu for other in others), cpu),
            ("OutOfmemory", pod.memory + sum(other.memory for other in others), memory),
            (f"OutOf{RESOURCE_GPU}", pod.gpus + sum(other.gpus for other in others), gpus),
        ):
            if asked > room + _EPSILON:
                return reason
        return ""


class Container:
    """The status of one pod with its one container, as patches for the API server."""

    def __init__(self) -> None:
        self._item: Json = {"status": {"conditions": []}}

    def runs(self, when: str) -> Json:
        """It started."""
        manifest.running(self._item, when)
        return self._patch()

    def ended(self, *, oom: bool, when: str) -> Json:
        """It did its work, or was killed for want of memory."""
        reason, code = ("OOMKilled", 137) if oom else ("Completed", 0)
        manifest.ended(self._item, reason=reason, exit_code=code, when=when)
        return self._patch()

    def _patch(self) -> Json:
        status = self._item["status"]
        for container in status["containerStatuses"]:
            container["imageID"] = ""
        return {"status": status}


def refused(reason: str, when: str) -> Json:
    """The kubelet did not run the pod."""
    message = f"Pod was rejected: the node has not what it asks for ({reason})"
    return {
        "status": {"phase": "Failed", "reason": reason, "message": message, "startTime": when},
    }
