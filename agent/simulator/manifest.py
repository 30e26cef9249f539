"""Nodes and pods of the embedded cluster as Kubernetes objects; called by cluster.py.

The objects are dictionaries with a real API server's fields, without ``kind`` and ``apiVersion``,
which api.py adds where Kubernetes has them. Functions that change a pod change it in place; the
store encodes it when it is put.
"""

import re
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime

from agent.arrays import Floats
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
)
from agent.simulator.store import Json

NAMESPACE = "default"
ANNOTATION_JOB_TYPE = "fedsched.io/job-type-name"
"""Annotation: the job type as the trace has it, where a label value cannot say it."""
GPU_PRODUCTS = {"k80": "Tesla-K80", "p100": "Tesla-P100-PCIE-16GB", "v100": "Tesla-V100-SXM2-16GB"}
"""Product names, as gpu-feature-discovery labels them, of the GPU types that were measured."""
_UIDS = uuid.UUID("5a7cf2a5-4f0f-5c0e-9a53-6a4d5e7b9f10")


def uid(seed: int, kind: str, name: str) -> str:
    """The UID of an object: always the same for one seed, kind and name."""
    return str(uuid.uuid5(_UIDS, f"{seed}/{kind}/{name}"))


def timestamp(unix: float) -> str:
    """RFC 3339 with microseconds, which a cluster that runs a thousand times faster needs."""
    moment = datetime.fromtimestamp(unix, UTC)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def label_value(text: str) -> str:
    """The nearest valid label value: ``LM (batch size 80)`` → ``LM-batch-size-80``."""
    value = re.sub(r"[^A-Za-z0-9._]+", "-", text)[:63]
    return value.strip("-._")


def label_values(names: Sequence[str]) -> list[str]:
    """A label value for each name, different ones for different names."""
    taken: dict[str, str] = {}
    for name in names:
        value, number = label_value(name) or "unnamed", 2
        while taken.get(value, name) != name:
            suffix = f"-{number}"
            value, number = label_value(name)[: 63 - len(suffix)] + suffix, number + 1
        taken[value] = name
    by_name = {name: value for value, name in taken.items()}
    return [by_name[name] for name in names]


def quantity_cpu(cores: float) -> str:
    """Cores as a Kubernetes quantity: ``4`` or ``2500m``."""
    milli = round(cores * 1000)
    return str(milli // 1000) if milli % 1000 == 0 else f"{milli}m"


def quantity_memory(gib: float) -> str:
    """GiB as a Kubernetes quantity: ``16Gi``, or bytes where that is not exact.

    Whoever adds up what the API shows must come to the same sums as the engine: no rounding up.
    """
    size = round(gib * 1024**3)
    return f"{size >> 30}Gi" if size % 1024**3 == 0 else str(size)


def _condition(kind: str, ok: bool, when: str, reason: str = "", message: str = "") -> Json:
    condition = {"type": kind, "status": "True" if ok else "False", "lastTransitionTime": when}
    if reason:
        condition["reason"] = reason
    if message:
        condition["message"] = message
    return condition


def node(
    name: str, *, capacity: Floats, gpu_type: str, gpu_memory: float, seed: int, created: str
) -> Json:
    """A node. capacity: [3] cores, GiB of the host, GPUs. gpu_memory: GiB of each GPU."""
    gpus = int(capacity[2])
    labels = {
        "kubernetes.io/hostname": name,
        "kubernetes.io/os": "linux",
        "kubernetes.io/arch": "amd64",
    }
    resources = {
        "cpu": quantity_cpu(float(capacity[0])),
        "memory": quantity_memory(float(capacity[1])),
        "pods": "110",
    }
    if gpus:
        labels |= {
            LABEL_GPU_PRODUCT: GPU_PRODUCTS.get(gpu_type, gpu_type),
            LABEL_GPU_MEMORY: str(round(gpu_memory * 1024)),
            "nvidia.com/gpu.count": str(gpus),
        }
        resources[RESOURCE_GPU] = str(gpus)
    return {
        "metadata": {
            "name": name,
            "uid": uid(seed, "node", name),
            "creationTimestamp": created,
            "labels": labels,
            "annotations": {},
        },
        "spec": {},
        "status": {
            "capacity": dict(resources),
            "allocatable": resources,
            "conditions": [
                _condition("MemoryPressure", False, created, "KubeletHasSufficientMemory"),
                _condition("DiskPressure", False, created, "KubeletHasNoDiskPressure"),
                _condition("PIDPressure", False, created, "KubeletHasSufficientPID"),
                _condition("Ready", True, created, "KubeletReady"),
            ],
            "addresses": [{"type": "Hostname", "address": name}],
            "nodeInfo": {"kubeletVersion": "v1.36.0"},
        },
    }


def pod(
    name: str,
    *,
    job: str,
    job_type: str,
    job_label: str,
    cpu: float,
    memory: float,
    gpus: int,
    share: float,
    gpu_memory: float,
    models: Sequence[str],
    deadline: str,
    scheduler: str,
    gated: bool,
    seed: int,
    created: str,
) -> Json:
    """A pending pod of ``job``. cpu: cores. memory: GiB. gpu_memory: GiB on each of its GPUs.

    models: GPU products that it accepts, empty for any. deadline: RFC 3339, empty for none.
    """
    annotations: dict[str, str] = {}
    if job_type:
        annotations[ANNOTATION_JOB_TYPE] = job_type
    if gpu_memory > 0:
        annotations[ANNOTATION_GPU_MEMORY] = f"{gpu_memory:g}"
    if share > 0:
        annotations[ANNOTATION_GPU_SHARE] = f"{share:g}"
    if models:
        annotations[ANNOTATION_GPU_MODELS] = ",".join(models)
    if deadline:
        annotations[ANNOTATION_DEADLINE] = deadline
    requests = {"cpu": quantity_cpu(cpu), "memory": quantity_memory(memory)}
    limits = {}
    if gpus:
        requests[RESOURCE_GPU] = limits[RESOURCE_GPU] = str(gpus)
    labels = {"batch.kubernetes.io/job-name": job}
    if job_label:
        labels[LABEL_JOB_TYPE] = job_label
    spec: Json = {
        "schedulerName": scheduler,
        "restartPolicy": "Never",
        "priority": 0,
        "containers": [
            {
                "name": "main",
                "image": "embedded.invalid/workload:1",
                "resources": {"requests": requests, "limits": limits},
            }
        ],
    }
    conditions = []
    if gated:
        spec["schedulingGates"] = [{"name": GATE}]
        message = "Scheduling is blocked due to non-empty scheduling gates"
        conditions.append(_condition("PodScheduled", False, created, "SchedulingGated", message))
    return {
        "metadata": {
            "name": name,
            "namespace": NAMESPACE,
            "uid": uid(seed, "pod", name),
            "creationTimestamp": created,
            "labels": labels,
            "annotations": annotations,
            "ownerReferences": [
                {
                    "apiVersion": "batch/v1",
                    "kind": "Job",
                    "name": job,
                    "uid": uid(seed, "job", job),
                    "controller": True,
                }
            ],
        },
        "spec": spec,
        "status": {"phase": "Pending", "conditions": conditions, "qosClass": "Burstable"},
    }


def set_condition(item: Json, condition: Json) -> None:
    """Put the condition in the place of the one of its type."""
    others = [c for c in item["status"]["conditions"] if c["type"] != condition["type"]]
    item["status"]["conditions"] = [*others, condition]


def ungated(item: Json) -> None:
    """The last scheduling gate is gone: the scheduler has not looked at the pod yet."""
    others = [c for c in item["status"]["conditions"] if c["type"] != "PodScheduled"]
    item["status"]["conditions"] = others


def unschedulable(item: Json, message: str, when: str) -> None:
    """The scheduler found no node."""
    set_condition(item, _condition("PodScheduled", False, when, "Unschedulable", message))


def bound(item: Json, node_name: str, when: str) -> None:
    """The scheduler bound the pod; it has not started yet."""
    item["spec"]["nodeName"] = node_name
    set_condition(item, _condition("PodScheduled", True, when))


def running(item: Json, when: str) -> None:
    """The kubelet started it."""
    item["status"] |= {"phase": "Running", "startTime": when}
    for kind in ("Initialized", "ContainersReady", "Ready"):
        set_condition(item, _condition(kind, True, when))
    state = {"running": {"startedAt": when}}
    item["status"]["containerStatuses"] = [_container(state, ready=True)]


def ended(item: Json, *, reason: str, exit_code: int, when: str) -> None:
    """Its container ended: ``Completed`` with exit code 0, or ``OOMKilled`` with 137."""
    item["status"]["phase"] = "Succeeded" if exit_code == 0 else "Failed"
    why = "PodCompleted" if exit_code == 0 else "PodFailed"
    for kind in ("ContainersReady", "Ready"):
        set_condition(item, _condition(kind, False, when, why))
    started = item["status"].get("startTime", when)
    terminated = {
        "exitCode": exit_code,
        "reason": reason,
        "startedAt": started,
        "finishedAt": when,
    }
    item["status"]["containerStatuses"] = [_container({"terminated": terminated}, ready=False)]


def progress(item: Json, steps_per_second: float) -> None:
    """What the workload reports of itself."""
    item["metadata"]["annotations"][ANNOTATION_PROGRESS] = f"{steps_per_second:.6g}"


def node_metrics(name: str, *, cpu: float, memory: float, when: str) -> Json:
    """One item of a NodeMetricsList. cpu: cores. memory: GiB in use."""
    return {
        "metadata": {"name": name, "creationTimestamp": when},
        "timestamp": when,
        "window": "10s",
        "usage": {"cpu": f"{round(cpu * 1e9)}n", "memory": f"{round(memory * 1024**2)}Ki"},
    }


def _container(state: Json, *, ready: bool) -> Json:
    return {
        "name": "main",
        "image": "embedded.invalid/workload:1",
        "ready": ready,
        "restartCount": 0,
        "state": state,
    }
