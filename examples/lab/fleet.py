"""Nodes and pods of a large cluster as an API server encodes them, varied from recorded ones.

Used by ``examples.lab.stream``. The samples came from a real API server, managed fields and all,
which is most of their 6 to 8 KB; what differs between two pods is cut out of them once, so that an
object costs microseconds and a list of 100,000 is made while it is sent.
"""

import json
import random
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SAMPLES = Path(__file__).parent / "samples"
MODELS = (
    ("NVIDIA-A100-SXM4-40GB", "40960"),
    ("Tesla-V100-SXM2-16GB", "16384"),
    ("Tesla-T4", "15360"),
)
GPUS = 8
GPU_NODES = 4
"""One node of so many has GPUs."""
JOBS = 10
"""One pod of so many is a job on one GPU; the others serve."""
JOB_TYPES = 20
PENDING, RUNNING, SUCCEEDED = "Pending", "Running", "Succeeded"
_HOLE = re.compile(rb"@(\w+)@")


class Template:
    """An object with holes, written as ``@name@`` in its strings."""

    def __init__(self, sample: Any) -> None:
        data = json.dumps(sample, separators=(",", ":")).encode()
        self._parts = _HOLE.split(data)  # text, hole, text, hole, …, text
        self._holes = [hole.decode() for hole in self._parts[1::2]]

    def fill(self, values: Mapping[str, str]) -> bytes:
        """The object with all its holes filled."""
        parts = list(self._parts)
        parts[1::2] = [values[hole].encode() for hole in self._holes]
        return b"".join(parts)


def _sample(name: str) -> Any:
    return json.loads((SAMPLES / f"{name}.json").read_text("utf-8"))


def _pod_template(name: str, phase: str) -> Template:
    pod = _sample(name)
    meta, spec, status = pod["metadata"], pod["spec"], pod["status"]
    meta |= {"name": "@name@", "uid": "@uid@", "resourceVersion": "@version@"}
    meta["creationTimestamp"] = "@created@"
    if "fedsched.io/job-type" in meta["labels"]:
        meta["labels"]["fedsched.io/job-type"] = "@job@"
        meta["annotations"]["fedsched.io/steps-per-second"] = "@steps@"
    if phase == PENDING:
        del spec["nodeName"]
        waits = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
        pod["status"] = {"phase": PENDING, "conditions": [waits], "qosClass": "Burstable"}
        return Template(pod)
    spec["nodeName"] = "@node@"
    status |= {"phase": phase, "startTime": "@started@"}
    if phase == SUCCEEDED:
        ended = {"exitCode": 0, "reason": "Completed", "finishedAt": "@finished@"}
        status["containerStatuses"][0]["state"] = {"terminated": ended}
    return Template(pod)


def _node_template(gpus: bool) -> Template:
    node = _sample("node")
    meta, status = node["metadata"], node["status"]
    meta |= {"name": "@name@", "uid": "@uid@", "resourceVersion": "@version@"}
    meta["labels"]["kubernetes.io/hostname"] = "@name@"
    status["conditions"][0] |= {"status": "@ready@", "lastHeartbeatTime": "@heard@"}
    if gpus:
        meta["labels"] |= {"nvidia.com/gpu.product": "@model@", "nvidia.com/gpu.memory": "@memory@"}
    else:
        for label in [label for label in meta["labels"] if label.startswith("nvidia.com/")]:
            del meta["labels"][label]
        for part in ("capacity", "allocatable"):
            del status[part]["nvidia.com/gpu"]
    return Template(node)


def stamp(moment: float) -> str:
    """Unix seconds as Kubernetes writes them, RFC 3339 in whole seconds."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(moment))


def is_job(number: int) -> bool:
    """Whether the pod of that number asks for a GPU."""
    return number % JOBS == 0


@dataclass
class PodState:
    """What changes of one pod; times are Unix seconds of the API server's clock."""

    created: float
    node: str = ""
    phase: str = PENDING
    started: float = 0.0
    finished: float = 0.0
    steps: float = 0.0
    version: int = 1


@dataclass
class NodeState:
    """What changes of one node."""

    heard: float
    ready: bool = True
    version: int = 1


@dataclass
class Fleet:
    """All nodes and pods, by number."""

    nodes: dict[int, NodeState] = field(default_factory=dict)
    pods: dict[int, PodState] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._pods = {
            (job, phase): _pod_template("job" if job else "service", phase)
            for job in (False, True)
            for phase in (PENDING, RUNNING, SUCCEEDED)
        }
        self._nodes = {gpus: _node_template(gpus) for gpus in (False, True)}

    def node(self, number: int, state: NodeState) -> bytes:
        """A v1.Node."""
        model, memory = MODELS[number // GPU_NODES % len(MODELS)]
        values = {
            "name": node_name(number),
            "uid": f"{number:08x}-0000-4000-8000-{number:012x}",
            "version": str(state.version),
            "ready": "True" if state.ready else "Unknown",
            "heard": stamp(state.heard),
            "model": model,
            "memory": memory,
        }
        return self._nodes[number % GPU_NODES == 0].fill(values)

    def pod(self, number: int, state: PodState) -> bytes:
        """A v1.Pod."""
        job = is_job(number)
        values = {
            "name": f"{'resnet50-train' if job else 'web-5468668fb5'}-{number:07d}",
            "uid": pod_uid(number),
            "version": str(state.version),
            "created": stamp(state.created),
            "job": f"type-{number // JOBS % JOB_TYPES}",
            "steps": f"{state.steps:.3f}",
            "node": state.node,
            "started": stamp(state.started),
            "finished": stamp(state.finished),
        }
        return self._pods[job, state.phase].fill(values)


def node_name(number: int) -> str:
    """Name of a node, as long as a cloud's."""
    return (
        f"ip-10-{number // 65536}-{number // 256 % 256}-{number % 256}.eu-west-1.compute.internal"
    )


def pod_uid(number: int) -> str:
    """UID of a pod."""
    return f"{number:08x}-1aac-4564-ba98-{number:012x}"


def populate(fleet: Fleet, nodes: int, pods: int, *, now: float, seed: int = 0) -> None:
    """Fill a fleet: pods that run, spread over the nodes, and one of 200 that waits.

    Jobs run on nodes with GPUs as long as there are free ones, and wait beyond that.
    """
    rng = random.Random(seed)
    for number in range(nodes):
        fleet.nodes[number] = NodeState(heard=now - rng.random() * 300.0)
    free = [node_name(n) for n in range(0, nodes, GPU_NODES) for _ in range(GPUS)]
    rng.shuffle(free)
    for number in range(pods):
        state = PodState(created=now - rng.random() * 864_000.0, steps=rng.uniform(0.5, 20.0))
        if number % 200 and (not is_job(number) or free):
            state.node = free.pop() if is_job(number) else node_name(rng.randrange(nodes))
            state.phase, state.started = RUNNING, min(state.created + 5.0, now)
        fleet.pods[number] = state
