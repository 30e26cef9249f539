"""Nodes and pods of the lab as Kubernetes takes them; used by the lab, its demo and the tests."""

from collections.abc import Mapping, Sequence
from typing import Any

from agent.cluster.records import (
    GATE,
    LABEL_GPU_COUNT,
    LABEL_GPU_MEMORY,
    LABEL_GPU_PRODUCT,
    RESOURCE_GPU,
)

PAUSE = "registry.k8s.io/pause:3.10"
"""An image by name only: nothing pulls it where kwok stands in for the kubelet."""


def node_manifest(
    name: str,
    *,
    cpu: int = 32,
    memory: str = "256Gi",
    pods: int = 110,
    gpus: int = 0,
    gpu_product: str = "",
    gpu_memory_mib: int = 0,
    labels: Mapping[str, str] | None = None,
    taints: Sequence[Mapping[str, str]] | None = None,
) -> dict[str, Any]:
    """A node whose capacity is allocatable whole, with gpu-feature-discovery's labels for GPUs.

    Args:
        memory: as a Kubernetes quantity.
        gpus: of the whole node, all ``gpu_product`` with ``gpu_memory_mib`` MiB each.
    """
    room = {"cpu": str(cpu), "memory": memory, "pods": str(pods)}
    marks = {
        "kubernetes.io/hostname": name,
        "kubernetes.io/os": "linux",
        "kubernetes.io/arch": "amd64",
    }
    if gpus:
        room[RESOURCE_GPU] = str(gpus)
        marks[LABEL_GPU_COUNT] = str(gpus)
        if gpu_product:
            marks[LABEL_GPU_PRODUCT] = gpu_product
        if gpu_memory_mib:
            marks[LABEL_GPU_MEMORY] = str(gpu_memory_mib)
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": marks | dict(labels or {})},
        "spec": {"taints": [dict(taint) for taint in taints]} if taints else {},
        "status": {"allocatable": room, "capacity": room},
    }


def sample_nodes(count: int) -> list[dict[str, Any]]:
    """Nodes to try things on: every other one with four GPUs."""
    nodes = []
    for n in range(count):
        if n % 2:
            product, memory = "NVIDIA-A100-SXM4-40GB", 40960
            nodes.append(
                node_manifest(f"gpu-{n // 2}", gpus=4, gpu_product=product, gpu_memory_mib=memory)
            )
        else:
            nodes.append(node_manifest(f"cpu-{n // 2}"))
    return nodes


def pod_manifest(
    name: str,
    *,
    namespace: str = "default",
    cpu: str = "1",
    memory: str = "1Gi",
    gpus: int = 0,
    scheduler: str = "default-scheduler",
    gated: bool = False,
    labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """A pod of one container that requests so much; ``gated`` leaves its turn to the agent."""
    resources: dict[str, Any] = {"requests": {"cpu": cpu, "memory": memory}}
    if gpus:
        resources["requests"][RESOURCE_GPU] = str(gpus)
        resources["limits"] = {RESOURCE_GPU: str(gpus)}
    spec: dict[str, Any] = {
        "schedulerName": scheduler,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 0,
        "containers": [{"name": "main", "image": PAUSE, "resources": resources}],
    }
    if gated:
        spec["schedulingGates"] = [{"name": GATE}]
    metadata = {
        "name": name,
        "namespace": namespace,
        "labels": dict(labels or {}),
        "annotations": dict(annotations or {}),
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
