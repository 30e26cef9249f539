"""The true world of the embedded cluster: GPUs, measured speeds, interference and memory needs.

Called by workloads.py, nodes.py, simulation.py and the learner's twin. Speeds and co-location are
Gavel's measurements; what Gavel did not measure (host memory, GPU memory, cores) are this module's
assumptions, stated where they are made.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from agent.cluster.gpus import GPU_SPECS, GpuSpec
from agent.simulator.tables import TraceError, trace_file
from agent.simulator.traces import read_gavel_colocated, read_gavel_isolated

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


GPU_TYPES = ("k80", "p100", "v100")  # those that Gavel measured; the order of every [.., T] axis
GPU_COUNTS = (1, 2, 4, 8)
SPEED_FILES = ("simulation_throughputs_isolated.csv", "simulation_throughputs_colocated.csv")
# Two jobs that the co-location table marks as not fitting crawl at this relative speed: a
# positive number keeps every run time finite, and ``fits`` tells what really happened.
DOES_NOT_FIT = 0.02


def nearest_type(spec: GpuSpec) -> int:
    """The measured GPU type (index into GPU_TYPES) whose speed this GPU's would resemble most.

    Nearest in log TFLOP/s and log GB/s, the two numbers that bound a training step.
    """
    distance = [
        np.log(spec.tflops / GPU_SPECS[name].tflops) ** 2
        + np.log(spec.bandwidth / GPU_SPECS[name].bandwidth) ** 2
        for name in GPU_TYPES
    ]
    return int(np.argmin(distance))


@dataclass(frozen=True)
class SpeedTable:
    """True speeds of every kind of work, and how neighbours on one GPU slow each other down.

    A kind is a job type on a number of GPUs (1, 2, 4 or 8, on one node).
    gpu_types: T names. job_types: J names.
    kind_type: i8[K], index into job_types. kind_gpus: i8[K].
    speed: f8[K, T], steps/s, all above 0.
    beside: f8[T, J, J], in (0, 1]: [t, a, b] is the speed of job type a beside one of type b on
        one GPU of type t, relative to a alone.
    fits: bool[T, J, J], False where the two do not fit into the GPU's memory together.
    """

    gpu_types: tuple[str, ...]
    job_types: tuple[str, ...]
    kind_type: IntArray
    kind_gpus: IntArray
    speed: FloatArray
    beside: FloatArray
    fits: BoolArray

    def __len__(self) -> int:
        return len(self.kind_type)

    @property
    def names(self) -> tuple[str, ...]:
        """K names such as ``LM (batch size 80) x4``."""
        pairs = zip(self.kind_type, self.kind_gpus, strict=True)
        return tuple(f"{self.job_types[kind]} x{gpus}" for kind, gpus in pairs)

    @property
    def relative(self) -> FloatArray:
        """f8[K, T]: each kind's speed relative to its fastest GPU type, in (0, 1]."""
        return np.asarray(self.speed / self.speed.max(axis=1, keepdims=True), dtype=np.float64)

    def kind(self, job_type: str, gpus: int) -> int:
        """The index of a kind; -1 when it was not measured on all GPU types."""
        if job_type not in self.job_types:
            return -1
        number = self.job_types.index(job_type)
        found = np.flatnonzero((self.kind_type == number) & (self.kind_gpus == gpus))
        return int(found[0]) if len(found) else -1


def load_speeds(folder: Path | None = None) -> SpeedTable:
    """Gavel's speed tables from ``folder``; None: from the traces' ``gavel/`` folder.

    Only kinds that ran on all three GPU types are kept (80 of 83: ResNet-50 with batches of 128
    did not fit on two and more k80), so that every kind can run wherever it has room. The rows
    of GPUs spread over several nodes (``unconsolidated``) are left out: a gang stays on a node.
    Errors: TraceError for a malformed or missing table, or when no kind is left.
    """
    paths = [
        trace_file(f"gavel/{name}") if folder is None else folder / name for name in SPEED_FILES
    ]
    alone = read_gavel_isolated(paths[0])
    together = read_gavel_colocated(paths[1])
    candidates = sorted({(job_type, gpus) for _, job_type, gpus in alone if gpus in GPU_COUNTS})
    kinds = [
        (job_type, gpus)
        for job_type, gpus in candidates
        if all(alone.get((gpu, job_type, gpus), 0.0) > 0 for gpu in GPU_TYPES)
    ]
    if not kinds:
        raise TraceError(paths[0], f"no job type was measured on all of {', '.join(GPU_TYPES)}")
    job_types = tuple(sorted({job_type for job_type, _ in kinds}))
    shape = (len(GPU_TYPES), len(job_types), len(job_types))
    beside = np.full(shape, np.nan)
    for t, gpu in enumerate(GPU_TYPES):
        for a, first in enumerate(job_types):
            for b, second in enumerate(job_types):
                own = alone.get((gpu, first, 1), 0.0)
                pair = together.get((gpu, first, second))
                if pair is None and (gpu, second, first) in together:
                    pair = together[(gpu, second, first)][::-1]
                if pair is not None and own > 0:
                    beside[t, a, b] = pair[0] / own
    fits = ~(beside == 0)
    return SpeedTable(
        gpu_types=GPU_TYPES,
        job_types=job_types,
        kind_type=np.array([job_types.index(job_type) for job_type, _ in kinds], dtype=np.int64),
        kind_gpus=np.array([gpus for _, gpus in kinds], dtype=np.int64),
        speed=np.array([[alone[(gpu, *kind)] for gpu in GPU_TYPES] for kind in kinds]),
        beside=_complete(beside),
        fits=fits,
    )


def _complete(beside: FloatArray) -> FloatArray:
    """Fills the pairs that were not measured and marks those that do not fit.

    Estimate of a missing pair on a GPU type: how much a suffers from its neighbours (mean log
    of its row) plus how much b hurts (mean log of its column) less the mean of all; a row or
    column without any pair counts as the mean, and a GPU type without any as equal time slices.
    """
    filled = beside.copy()
    for table in filled:
        known = table > 0
        logs = np.where(known, np.log(np.where(known, table, 1.0)), 0.0)
        mean = logs.sum() / known.sum() if known.any() else np.log(0.5)
        with np.errstate(invalid="ignore"):
            rows = np.where(known.any(1), logs.sum(1) / known.sum(1), mean)
            columns = np.where(known.any(0), logs.sum(0) / known.sum(0), mean)
        estimate = np.exp(rows[:, None] + columns[None, :] - mean)
        table[:] = np.where(np.isnan(table), estimate, table)
    filled[filled == 0] = DOES_NOT_FIT
    return np.clip(filled, DOES_NOT_FIT, 1.0)


@dataclass(frozen=True)
class Needs:
    """What one GPU's worth of each job type asks for and keeps busy; f8[J] each.

    cpu: cores. memory: GiB of host memory. gpu_memory: GiB on each GPU.
    cpu_use: mean busy part of the cores asked for, in (0, 1].
    disk, network: MB/s read from disk and moved over the network.
    """

    cpu: FloatArray
    memory: FloatArray
    gpu_memory: FloatArray
    cpu_use: FloatArray
    disk: FloatArray
    network: FloatArray


# Assumptions, per GPU: cores; host GiB; GPU GiB without a batch and per sample of the batch;
# busy part of the cores; disk MB/s; network MB/s. Input pipelines set the order: ImageNet
# (ResNet-50) decodes JPEGs, CIFAR-10 (ResNet-18), Multi30k (Transformer) and Wikitext-2 (LM) sit
# in memory, ML-20M (Recommendation) is a sparse matrix on the host, A3C runs its emulators on
# the host. GPU memory is set so that "the requests of two fit" agrees with Gavel's marks of
# pairs that did not fit in 97 pairs of 100.
_FAMILIES: dict[str, tuple[float, float, float, float, float, float, float]] = {
    "ResNet-50": (6.0, 24.0, 1.5, 0.074, 0.85, 110.0, 60.0),
    "ResNet-18": (3.0, 8.0, 1.0, 0.006, 0.70, 8.0, 10.0),
    "Transformer": (2.0, 10.0, 1.0, 0.034, 0.50, 4.0, 25.0),
    "LM": (2.0, 6.0, 1.2, 0.030, 0.45, 2.0, 20.0),
    "Recommendation": (4.0, 20.0, 1.0, 0.0005, 0.65, 30.0, 15.0),
    "CycleGAN": (4.0, 12.0, 6.0, 0.0, 0.60, 40.0, 5.0),
    "A3C": (6.0, 8.0, 1.5, 0.0, 0.90, 1.0, 5.0),
}
_OTHER = (4.0, 12.0, 4.0, 0.0, 0.6, 20.0, 20.0)


def needs(job_types: tuple[str, ...]) -> Needs:
    """The needs of each job type by family and batch size; an unknown family gets middling ones.

    Host memory grows with the batch too, by a 32nd of what the GPU holds of it (pinned and
    prefetched copies).
    """
    rows = []
    for job_type in job_types:
        family, _, rest = job_type.partition(" (")
        batch = re.search(r"batch size (\d+)", rest)
        samples = float(batch.group(1)) if batch else 0.0
        cpu, host, base, per_sample, cpu_use, disk, network = _FAMILIES.get(family, _OTHER)
        held = per_sample * samples
        rows.append((cpu, host + held / 32.0, base + held, cpu_use, disk, network))
    table = np.array(rows, dtype=np.float64).reshape(len(rows), 6)
    return Needs(*(np.ascontiguousarray(column) for column in table.T))


def peak_ratio(
    rng: np.random.Generator, count: int, *, exceed: float = 0.01, sigma: float = 0.2
) -> FloatArray:
    """f8[count]: the actual peak of memory relative to its request, lognormal.

    exceed: the share of jobs above 1, whose peak passes the request; drawn once for host and
    once for GPU memory, 0.01 makes about 2 % of the jobs risk an OOM kill. sigma: spread of the
    log; the median follows from both (0.63 by default: requests carry headroom).
    Errors: ValueError unless 0 < exceed < 1 and sigma > 0.
    """
    if not 0 < exceed < 1 or sigma <= 0:
        raise ValueError(f"need 0 < exceed < 1 and sigma > 0, got {exceed} and {sigma}")
    log_median = -sigma * NormalDist().inv_cdf(1.0 - exceed)
    return rng.lognormal(log_median, sigma, count)
