"""Kubernetes JSON to slim records: v1.Node, v1.Pod and NodeMetrics, decoded in part.

Called by ``agent.cluster.kubernetes`` for list/watch answers and by ``agent.scheduling.extender``
for the pods that kube-scheduler sends.
"""

import math
import re
import sys
from datetime import datetime
from functools import lru_cache

import msgspec

from agent.cluster import wire
from agent.cluster.constraints import BARRING, Scope
from agent.cluster.outcomes import reason
from agent.cluster.records import (
    ANNOTATION_DEADLINE,
    ANNOTATION_GPU_MEMORY,
    ANNOTATION_GPU_MODELS,
    ANNOTATION_GPU_SHARE,
    ANNOTATION_PROGRESS,
    GATE,
    LABEL_GPU_COUNT,
    LABEL_GPU_MEMORY,
    LABEL_GPU_PRODUCT,
    LABEL_GPU_REPLICAS,
    LABEL_GPU_SHARING,
    LABEL_JOB_TYPE,
    RESOURCE_GPU,
    RESOURCE_GPU_SHARED,
    Node,
    Pod,
)

GIB = float(1 << 30)
MANY_GPUS = 1 << 10
"""More than this counts as this: no node has so many, and the arrays can hold the number."""
PRESSURES = ("MemoryPressure", "DiskPressure", "PIDPressure")
LABEL_COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"
MIG_DEVICES = "nvidia.com/mig-"
UNSPECIFIED_SHARE = 0.5
"""Share of one GPU for a pod that asks for ``nvidia.com/gpu.shared`` without saying how much."""

_QUANTITY = re.compile(
    r"([+-]?(?:\d+\.?\d*|\.\d+))(?:([eE][+-]?\d+)|(n|u|m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei))?"
)
_SUFFIX = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_SUFFIX |= {"E": 1e18} | {f"{unit}i": 1024.0**power for power, unit in enumerate("KMGTPE", 1)}
_DRAWN = re.compile(r"(-(\d+|[bcdfghjklmnpqrstvwxz2456789]{5,10}))+$")
"""The end of a name: numbers, and what Kubernetes draws, from an alphabet without vowels."""


class ObjectError(ValueError):
    """An object is not what its kind says it is; the message names the object and the field."""


_decode_pod = msgspec.json.Decoder(wire.Pod).decode
_decode_whereabouts = msgspec.json.Decoder(wire.PodPlaces).decode
_decode_node = msgspec.json.Decoder(wire.Node).decode
_decode_metrics = msgspec.json.Decoder(wire.NodeMetrics).decode


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
    """A v1.Node. Raises ObjectError; ``devices`` are not in it (``agent.cluster.devices``)."""
    try:
        raw = _decode_node(data)
        has = {name: quantity(value) for name, value in (raw.status.allocatable or {}).items()}
        labels = raw.metadata.labels or {}
        gpus = _gpus(has.get(RESOURCE_GPU, 0.0))
        replicas = 1.0
        if gpus:
            # Time-sliced under the plain name: each replica is handed out as if it were a GPU.
            replicas = max(float(labels.get(LABEL_GPU_REPLICAS, "1")), 1.0)
        elif has.get(RESOURCE_GPU_SHARED, 0.0) > 0.0:
            gpus = _gpus(int(labels.get(LABEL_GPU_COUNT, "1")))
        gpu_memory = float(labels.get(LABEL_GPU_MEMORY, "0")) if gpus else 0.0
        if not 0.0 <= gpu_memory < math.inf:
            raise ValueError(f"label {LABEL_GPU_MEMORY} is {labels[LABEL_GPU_MEMORY]!r}, no MiB")
        conditions = raw.status.conditions or ()
        ready = all(c.status == "True" for c in conditions if c.type == "Ready")
        pressure = tuple(c.type for c in conditions if c.type in PRESSURES and c.status == "True")
        return Node(
            name=raw.metadata.name,
            cpu=has.get("cpu", 0.0),
            memory=has.get("memory", 0.0) / GIB,
            gpus=gpus,
            gpu_model=labels.get(LABEL_GPU_PRODUCT, "") if gpus else "",
            gpu_memory=gpu_memory / 1024.0 / replicas,
            sharing=_sharing(has, labels),
            ready=ready and not raw.spec.unschedulable and not pressure,
            pressure=pressure,
            labels={sys.intern(key): sys.intern(value) for key, value in labels.items()},
            taints=tuple(taint for taint in raw.spec.taints or () if taint.effect in BARRING),
            addresses=tuple(one.address for one in raw.status.addresses or ()),
        )
    except (msgspec.DecodeError, ValueError) as error:
        raise ObjectError(f"a v1.Node that cannot be read: {error}") from error


def _sharing(allocatable: dict[str, float], labels: dict[str, str]) -> str:
    # The strategy is a label of nodes without slices too: the product's name tells.
    if "-MIG-" in labels.get(LABEL_GPU_PRODUCT, "") or any(
        name.startswith(MIG_DEVICES) and count > 0.0 for name, count in allocatable.items()
    ):
        return "mig"
    strategy = labels.get(LABEL_GPU_SHARING, "none")
    return "" if strategy == "none" else sys.intern(strategy)


def _request(container: wire.Container, name: str) -> float:
    resources = container.resources
    if resources is None:
        return 0.0
    # Extended resources may be given as a limit alone, which then is the request too.
    value = (resources.requests or {}).get(name, (resources.limits or {}).get(name))
    return 0.0 if value is None else quantity(value)


def _requests(spec: wire.PodSpec, name: str) -> float:
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


def _reason(status: wire.PodStatus, done: bool) -> str:
    containers = (*(status.container_statuses or ()), *(status.init_container_statuses or ()))
    states = [state for c in containers for state in (c.state, c.last_state)]
    disruptions = [
        c.reason or ""
        for c in status.conditions or ()
        if c.type == "DisruptionTarget" and c.status == "True"
    ]
    return reason(
        status.reason or "",
        [state.terminated for state in states if state is not None and state.terminated],
        disruptions[0] if disruptions else "",
        done,
    )


def _deleting(meta: wire.Meta, finished: float) -> bool:
    """Whether deletion was asked for before the pod's end; the time stamp is that of its latest."""
    if meta.deletion_timestamp is None:
        return False
    asked = timestamp(meta.deletion_timestamp) - (meta.deletion_grace_period_seconds or 0.0)
    return not 0.0 < finished <= asked


@lru_cache(maxsize=4096)
def _one(scope: Scope) -> Scope:
    """The same object for equal scopes: pods of one template share it."""
    return scope


def _scope(data: bytes | msgspec.Raw) -> Scope:
    spec = _decode_whereabouts(data).spec
    node = spec.affinity.node_affinity if spec.affinity is not None else None
    required = node.required if node is not None else None
    return _one(
        Scope(
            selector=tuple(sorted((spec.node_selector or {}).items())),
            terms=None if required is None else required.node_selector_terms or (),
            tolerations=spec.tolerations or (),
        )
    )


def _controller(meta: wire.Meta) -> tuple[str, str]:
    """UID of the pod's controller and, where replacements keep it, the pod's index under it."""
    for owner in meta.owner_references or ():
        if owner.controller:
            index = (meta.annotations or {}).get(LABEL_COMPLETION_INDEX, "")
            if owner.kind == "StatefulSet":
                index = meta.name
            return sys.intern(owner.uid), sys.intern(index)
    return "", ""


def _work(raw: wire.Pod) -> str:
    """What a pod has in common with earlier runs of the same work, whoever started them.

    A controller's name is steadier than the pod's; numbers (CronJobs, indices) and drawn suffixes
    at its end, and the image's tag, change from run to run.
    """
    meta = raw.metadata
    name = next((o.name for o in meta.owner_references or () if o.controller and o.name), "")
    stem = _DRAWN.sub("", name or meta.generate_name.rstrip("-") or meta.name)
    containers = raw.spec.containers or ()
    image = containers[0].image.partition("@")[0] if containers else ""
    folder, _, last = image.rpartition("/")
    return f"{meta.namespace}/{stem} {folder}/{last.partition(':')[0]}"


def _finished(status: wire.PodStatus) -> float:
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
        done = status.phase in ("Succeeded", "Failed")
        finished = _finished(status) if done else 0.0
        owner, index = _controller(raw.metadata)
        return Pod(
            uid=raw.metadata.uid,
            name=raw.metadata.name,
            namespace=sys.intern(raw.metadata.namespace),
            job_type=sys.intern((raw.metadata.labels or {}).get(LABEL_JOB_TYPE, "")),
            cpu=_requests(spec, "cpu"),
            memory=_requests(spec, "memory") / GIB,
            gpus=gpus,
            gpu_share=share,
            gpu_memory=notes.number(ANNOTATION_GPU_MEMORY, 0.0),
            gpu_models=tuple(model.strip() for model in models if model.strip()),
            scheduler=sys.intern(spec.scheduler_name),
            gated=GATE in gates,
            gates=gates,
            scope=_scope(data) if GATE in gates else None,
            claims=len(spec.resource_claims or ()),
            owner=owner,
            index=index,
            work=sys.intern(_work(raw)),
            created=timestamp(raw.metadata.creation_timestamp),
            deadline=notes.time(ANNOTATION_DEADLINE, math.inf),
            node=sys.intern(spec.node_name or ""),
            phase=sys.intern(status.phase),
            reason=sys.intern(_reason(status, done)),
            deleting=_deleting(raw.metadata, finished),
            started=timestamp(status.start_time),
            finished=finished,
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
