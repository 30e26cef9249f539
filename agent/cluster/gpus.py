"""Data sheets of GPU models by product name; cluster state, speed model and simulator read it.

The features describe hardware by these numbers, and the speed model starts from them.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class GpuSpec:
    """One GPU as its data sheet has it: FP32 TFLOP/s, memory GB/s and memory GiB."""

    name: str
    tflops: float
    bandwidth: float
    memory: float


# NVIDIA's data sheets; FP32 without sparsity and without tensor cores, boost clock. A K80 board
# carries two GPUs; Kubernetes counts each, so the numbers are those of one.
GPU_SPECS = {
    spec.name: spec
    for spec in (
        GpuSpec("k80", 4.37, 240.0, 12.0),
        GpuSpec("p100", 9.3, 732.0, 16.0),
        GpuSpec("v100", 15.7, 900.0, 16.0),
        GpuSpec("v100-32g", 15.7, 900.0, 32.0),
        GpuSpec("t4", 8.1, 320.0, 16.0),
        GpuSpec("l4", 30.3, 300.0, 24.0),
        GpuSpec("l40s", 91.6, 864.0, 48.0),
        GpuSpec("a10", 31.2, 600.0, 24.0),
        GpuSpec("a100-40g", 19.5, 1555.0, 40.0),
        GpuSpec("a100-80g", 19.5, 2039.0, 80.0),
        GpuSpec("h100", 66.9, 3350.0, 80.0),
        GpuSpec("h100-pcie", 51.2, 2000.0, 80.0),
        GpuSpec("h200", 66.9, 4800.0, 141.0),
    )
}

# Patterns over the product names of gpu-feature-discovery (nvidia.com/gpu.product) and of the
# openb trace (V100M16: a V100 of 16 GiB), lower case; the first that matches the whole decides.
_PRODUCTS = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"k80", "k80"),
        (r"p100(-(pcie|sxm2)-16gb)?", "p100"),
        (r"v100m32|v100-\w+-32gb(-ls)?", "v100-32g"),
        (r"v100(m16|-\w+-16gb)?", "v100"),
        (r"t4", "t4"),
        (r"l4", "l4"),
        (r"l40s", "l40s"),
        (r"a10g?", "a10"),
        (r"a100-(\w+-80gb|80gb-\w+)", "a100-80g"),
        (r"a100(-\w+-40gb)?", "a100-40g"),
        (r"h100-pcie", "h100-pcie"),
        (r"h100(-80gb-hbm3)?", "h100"),
        (r"h200", "h200"),
    )
)


def gpu_spec(product: str) -> GpuSpec | None:
    """The data sheet of a GPU by product name, such as ``NVIDIA-A100-SXM4-80GB``; None: unknown.

    A time-sliced GPU (``-SHARED``) is the whole GPU; a MIG slice is not and stays unknown.
    """
    name = product.strip().lower().replace(" ", "-").removesuffix("-shared")
    name = name.removeprefix("nvidia-").removeprefix("tesla-")
    if name in GPU_SPECS:
        return GPU_SPECS[name]
    return next((GPU_SPECS[spec] for rule, spec in _PRODUCTS if rule.fullmatch(name)), None)


def sheet(product: str) -> tuple[float, float, float] | None:
    """TFLOP/s, GB/s and GiB by product name, as the cluster state wants them; None: unknown."""
    spec = gpu_spec(product)
    return None if spec is None else (spec.tflops, spec.bandwidth, spec.memory)
