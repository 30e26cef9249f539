"""The nodes of an embedded cluster, called by workloads.py and whoever sets a simulation up."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from agent.cluster.gpus import GPU_SPECS, gpu_spec
from agent.simulator.hardware import GPU_TYPES, nearest_type
from agent.simulator.traces import OpenbNodes

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

NO_GPU = -1  # the GPU type of a node without GPUs
# Alibaba does not say what G2 and G3 are; they stand in for a mid-range and a fast type.
UNDISCLOSED = {"G2": "p100", "G3": "v100"}


@dataclass(frozen=True)
class NodeMix:
    """The nodes of one cluster.

    capacity: f8[N, 3], CPU cores, host memory in GiB, GPUs.
    gpu_type: i8[N], index into the speed table's GPU types; -1 without GPUs.
    gpu_memory: f8[N], GiB of each GPU; 0 without.
    """

    capacity: FloatArray
    gpu_type: IntArray
    gpu_memory: FloatArray
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.names)


def node_mix(
    counts: Mapping[str, int],
    *,
    gpus: int = 8,
    cpu_per_gpu: float = 8.0,
    memory_per_gpu: float = 48.0,
    cpu_only: int = 0,
) -> NodeMix:
    """Nodes by GPU type, such as ``{"k80": 3, "v100": 1}``, in the order given.

    gpus: on each node. cpu_per_gpu: cores. memory_per_gpu: GiB of the host. cpu_only: further
    nodes without GPUs and otherwise the same.
    Errors: ValueError for an unknown GPU type, a negative count or no node at all.
    """
    unknown = [name for name in counts if name not in GPU_TYPES]
    if unknown:
        known = ", ".join(GPU_TYPES)
        raise ValueError(f"no speeds for GPU type {unknown[0]!r}; measured are {known}")
    if min([cpu_only, *counts.values()]) < 0 or cpu_only + sum(counts.values()) == 0 or gpus < 1:
        raise ValueError(f"need at least one node and GPU, got {dict(counts)} x {gpus}, {cpu_only}")
    types = [GPU_TYPES.index(name) for name, count in counts.items() for _ in range(count)]
    names = [f"{name}-{number}" for name, count in counts.items() for number in range(count)]
    gpu_type = np.array(types + [NO_GPU] * cpu_only, dtype=np.int64)
    capacity = np.tile(
        np.array([gpus * cpu_per_gpu, gpus * memory_per_gpu, gpus]), (len(gpu_type), 1)
    )
    capacity[gpu_type == NO_GPU, 2] = 0.0
    memory = [GPU_SPECS[GPU_TYPES[t]].memory if t >= 0 else 0.0 for t in gpu_type]
    return NodeMix(
        capacity=capacity,
        gpu_type=gpu_type,
        gpu_memory=np.array(memory, dtype=np.float64),
        names=(*names, *(f"cpu-{number}" for number in range(cpu_only))),
    )


def measured_type(model: str) -> int:
    """The measured GPU type (index) that stands for a GPU model of a trace; -1 when unknown.

    A model that was not measured runs like the nearest data sheet: T4 as k80, A10 as v100.
    """
    if model in UNDISCLOSED:
        return GPU_TYPES.index(UNDISCLOSED[model])
    spec = gpu_spec(model)
    return NO_GPU if spec is None else nearest_type(spec)


def openb_mix(nodes: OpenbNodes) -> NodeMix:
    """The nodes of the openb trace: cores, memory and GPUs theirs, speeds of the nearest type.

    Errors: ValueError for a GPU model of which nothing is known.
    """
    gpu_type = np.array([measured_type(m) if m else NO_GPU for m in nodes.models], dtype=np.int64)
    unknown = [m for m, t in zip(nodes.models, gpu_type, strict=True) if m and t == NO_GPU]
    if unknown:
        raise ValueError(f"unknown GPU model {unknown[0]!r}; add its data sheet to GPU_SPECS")
    specs = [gpu_spec(model) for model in nodes.models]
    memory = [
        spec.memory if spec is not None else GPU_SPECS[GPU_TYPES[t]].memory if t >= 0 else 0.0
        for spec, t in zip(specs, gpu_type, strict=True)
    ]
    return NodeMix(
        capacity=np.column_stack([nodes.cpu, nodes.memory, nodes.gpus.astype(np.float64)]),
        gpu_type=gpu_type,
        gpu_memory=np.array(memory, dtype=np.float64),
        names=nodes.names,
    )
