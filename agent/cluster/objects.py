"""Kubernetes JSON to slim records: v1.Node, v1.Pod and NodeMetrics, decoded in part.

Called by ``agent.cluster.kubernetes`` for list/watch answers and by ``agent.scheduling.extender``
for the pods that kube-scheduler sends. Only the fields that fedsched reads are decoded, which is
what makes a list of 100,000 pods bearable.
"""

import math
import re
from datetime import datetime
from functools import lru_cache

import msgspec
from msgspec import field

from agent.cluster.records import (
    ANNOTATION_DEADLINE,
    ANNOTATION_GPU_MEMORY,
    ANNOTATION_GPU_MODELS,
    ANNOTATION_GPU_SHARE,
    ANNOTATION_PROGRESS,
    GATE,
    LABEL_GPU_MEMORY,
    LABEL_GPU_PRODUCT,
    LABEL_JOB_TYPE,
    RESOURCE_GPU,
    RESOURCE_GPU_SHARED,
    Node,
    Pod,
)

GIB = float(1 << 30)
LABEL_GPU_COUNT = "nvidia.com/gpu.count"
MANY_GPUS = 1 << 10
"""More than this counts as this: no node has so many, and the arrays can hold the number."""
UNSPECIFIED_SHARE = 0.5
"""Share of one GPU for a pod that asks for ``nvidia.com/gpu.shared`` without saying how much."""

_QUANTITY = re.compile(
    r"([+-]?(?:\d+\.?\d*|\.\d+))(?:([eE][+-]?\d+)|(n|u|m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei))?"
)
_SUFFIX = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_SUFFIX |= {"E": 1e18} | {f"{unit}i": 1024.0**power for power, unit in enumerate("KMGTPE", 1)}


class ObjectError(ValueError):
    """An object is not what its kind says it is; the message names the object and the field."""


class _Meta(msgspec.Struct, frozen=True, rename="camel"):
    name: str
    uid: str = ""
    namespace: str = "default"
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    creation_timestamp: str | None = None


Quantities = dict[str, str | int | float]


class _Resources(msgspec.Struct, frozen=True):
    requests: Quantities | None = None
    limits: Quantities | None = None


class _Container(msgspec.Struct, frozen=True, rename="camel"):
    resources: _Resources | None = None
    restart_policy: str | None = None


class _Gate(msgspec.Struct, frozen=True):
    name: str


class _PodSpec(msgspec.Struct, frozen=True, rename="camel"):
    containers: list[_Container] | None = None
    init_containers: list[_Container] | None = None
    overhead: Quantities | None = None
    node_name: str | None = None
    scheduler_name: str = "default-scheduler"
    scheduling_gates: list[_Gate] | None = None


class _Terminated(msgspec.Struct, frozen=True, rename="camel"):
    reason: str | None = None
    exit_code: int = 0
    finished_at: str | None = None


class _ContainerState(msgspec.Struct, frozen=True):
    terminated: _Terminated | None = None


class _ContainerStatus(msgspec.Struct, frozen=True, rename="camel"):
    state: _ContainerState | None = None
    last_state: _ContainerState | None = None


class _PodStatus(msgspec.Struct, frozen=True, rename="camel"):
    phase: str = "Pending"
    reason: str | None = None
    start_time: str | None = None
    container_statuses: list[_ContainerStatus] | None = None


class _Pod(msgspec.Struct, frozen=True):
    metadata: _Meta
    spec: _PodSpec = field(default_factory=_PodSpec)
    status: _PodStatus = field(default_factory=_PodStatus)


class _Condition(msgspec.Struct, frozen=True):
    type: str
    status: str


class _NodeSpec(msgspec.Struct, frozen=True):
    unschedulable: bool | None = None


class _NodeStatus(msgspec.Struct, frozen=True):
    allocatable: Quantities | None = None
    conditions: list[_Condition] | None = None


class _Node(msgspec.Struct, frozen=True):
    metadata: _Meta
    spec: _NodeSpec = field(default_factory=_NodeSpec)
    status: _NodeStatus = field(default_factory=_NodeStatus)


class _NodeMetrics(msgspec.Struct, frozen=True):
    metadata: _Meta
    usage: Quantities


_decode_pod = msgspec.json.Decoder(_Pod).decode
_decode_node = msgspec.json.Decoder(_Node).decode
_decode_metrics = msgspec.json.Decoder(_NodeMetrics).decode


@lru_cache(maxsize=8192)
def quantity(text: str | int | float) -> float:
    """The value of a Kubernetes quantity: ``500m`` is 0.5, ``16Gi`` is 2**34, ``2e3`` is 2000.

    Raises ValueError for anything else, and for what is beyond any number.
    """
    match = _QUANTITY.fullmatch(str(text))
    if match is None:
        raise ValueError(f"{text!r} is not a quantity (such as 500m, 16Gi, 1 or 2e3)")
    number, exponent, suffix = match.groups()
    value = float(number + (exponent or "")) * _SUFFIX.get(suffix, 1.0)
    if math.isinf(value):
        raise ValueError(f"{text!r} is a quantity beyond any number")
    return value


def timestamp(text: str | None) -> float:
    """RFC 3339 to Unix seconds; 0 for none. Raises ValueError for anything else."""
    if not text:
        return 0.0
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:  # it would be read in the time zone of this machine
        raise ValueError(f"{text!r} has no offset from UTC (such as Z or +01:00)")
    return moment.timestamp()


def _gpus(value: float) -> int:
    return int(min(max(value, 0.0), MANY_GPUS))


def node(data: bytes | msgspec.Raw) -> Node:
    """A v1.Node. Raises ObjectError."""
    try:
        raw = _decode_node(data)
        has = {name: quantity(value) for name, value in (raw.status.allocatable or {}).items()}
        labels = raw.metadata.labels or {}
        gpus = _gpus(has.get(RESOURCE_GPU, 0.0))
        if not gpus and has.get(RESOURCE_GPU_SHARED, 0.0) > 0.0:
            gpus = _gpus(int(labels.get(LABEL_GPU_COUNT, "1")))
        gpu_memory = float(labels.get(LABEL_GPU_MEMORY, "0")) if gpus else 0.0
        if not 0.0 <= gpu_memory < math.inf:
            raise ValueError(f"label {LABEL_GPU_MEMORY} is {labels[LABEL_GPU_MEMORY]!r}, no MiB")
        ready = all(c.status == "True" for c in raw.status.conditions or () if c.type == "Ready")
        return Node(
            name=raw.metadata.name,
            cpu=has.get("cpu", 0.0),
            memory=has.get("memory", 0.0) / GIB,
            gpus=gpus,
            gpu_model=labels.get(LABEL_GPU_PRODUCT, "") if gpus else "",
            gpu_memory=gpu_memory / 1024.0,
            ready=ready and not raw.spec.unschedulable,
        )
    except (msgspec.DecodeError, ValueError) as error:
        raise ObjectError(f"a v1.Node that cannot be read: {error}") from error


def _request(container: _Container, name: str) -> float:
    resources = container.resources
    if resources is None:
        return 0.0
    # Extended resources may be given as a limit alone, which then is the request too.
    value = (resources.requests or {}).get(name, (resources.limits or {}).get(name))
    return 0.0 if value is None else quantity(value)


def _requests(spec: _PodSpec, name: str) -> float:
    """What kube-scheduler reserves: containers and sidecars summed, or the largest init phase."""
    running = sum(_request(container, name) for container in spec.containers or ())
    sidecars = largest = 0.0
    for container in spec.init_containers or ():
        value = _request(container, name)
        if container.restart_policy == "Always":
            sidecars += value
            largest = max(largest, sidecars)
        else:
            largest = max(largest, sidecars + value)
    overhead = (spec.overhead or {}).get(name)
    return max(running + sidecars, largest) + (0.0 if overhead is None else quantity(overhead))


class _Annotations:
    """Reads a pod's annotations; one that is wrong is passed over and said in ``problem``."""

    def __init__(self, values: dict[str, str] | None) -> None:
        self.values = values or {}
        self.problem = ""

    def number(self, name: str, default: float, below: float = math.inf) -> float:
        text = self.values.get(name)
        if text is None:
            return default
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if 0.0 <= value < below:
            return value
        limit = "" if math.isinf(below) else f" below {below:g}"
        self.problem = f"annotation {name} is {text!r}, expected a number from 0{limit}; ignored"
        return default

    def time(self, name: str, default: float) -> float:
        try:
            return timestamp(self.values.get(name)) or default
        except ValueError:
            text = self.values[name]
            self.problem = f"annotation {name} is {text!r}, expected RFC 3339; ignored"
            return default


def _oom_killed(status: _PodStatus) -> bool:
    """Reason and exit code must agree: the reason alone gives false positives."""
    states = [s for c in status.container_statuses or () for s in (c.state, c.last_state)]
    return any(
        s.terminated.reason == "OOMKilled" and s.terminated.exit_code == 137
        for s in states
        if s is not None and s.terminated is not None
    )


def _finished(status: _PodStatus) -> float:
    ends = [c.state.terminated for c in status.container_statuses or () if c.state is not None]
    return max((timestamp(end.finished_at) for end in ends if end is not None), default=0.0)


def pod(data: bytes | msgspec.Raw) -> Pod:
    """A v1.Pod. Raises ObjectError; a wrong annotation is passed over (see ``Pod.problem``)."""
    try:
        raw = _decode_pod(data)
        if not raw.metadata.uid:
            raise ValueError(f"pod {raw.metadata.name} has no metadata.uid")
        spec, status = raw.spec, raw.status
        notes = _Annotations(raw.metadata.annotations)
        gates = tuple(gate.name for gate in spec.scheduling_gates or ())
        gpus = _gpus(_requests(spec, RESOURCE_GPU))
        share = 0.0
        if not gpus:
            shared = UNSPECIFIED_SHARE if _requests(spec, RESOURCE_GPU_SHARED) > 0.0 else 0.0
            share = notes.number(ANNOTATION_GPU_SHARE, shared, below=1.0)
        models = notes.values.get(ANNOTATION_GPU_MODELS, "").split(",")
        return Pod(
            uid=raw.metadata.uid,
            name=raw.metadata.name,
            namespace=raw.metadata.namespace,
            job_type=(raw.metadata.labels or {}).get(LABEL_JOB_TYPE, ""),
            cpu=_requests(spec, "cpu"),
            memory=_requests(spec, "memory") / GIB,
            gpus=gpus,
            gpu_share=share,
            gpu_memory=notes.number(ANNOTATION_GPU_MEMORY, 0.0),
            gpu_models=tuple(model.strip() for model in models if model.strip()),
            scheduler=spec.scheduler_name,
            gated=GATE in gates,
            gates=gates,
            created=timestamp(raw.metadata.creation_timestamp),
            deadline=notes.time(ANNOTATION_DEADLINE, math.inf),
            node=spec.node_name or "",
            phase=status.phase,
            reason="OOMKilled" if _oom_killed(status) else status.reason or "",
            started=timestamp(status.start_time),
            finished=_finished(status) if status.phase in ("Succeeded", "Failed") else 0.0,
            steps_per_second=notes.number(ANNOTATION_PROGRESS, 0.0),
            problem=notes.problem,
        )
    except (msgspec.DecodeError, ValueError) as error:
        raise ObjectError(f"a v1.Pod that cannot be read: {error}") from error


def node_usage(data: bytes | msgspec.Raw) -> tuple[str, float, float]:
    """A NodeMetrics as (node name, CPU cores used, memory GiB used). Raises ObjectError."""
    try:
        raw = _decode_metrics(data)
        used = raw.usage
        return raw.metadata.name, quantity(used["cpu"]), quantity(used["memory"]) / GIB
    except (msgspec.DecodeError, KeyError, ValueError) as error:
        raise ObjectError(f"a NodeMetrics that cannot be read: {error!r}") from error
