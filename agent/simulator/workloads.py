"""Turns traces into workloads at a set offered load, called by the simulator and benchmark.py.

A trace says when jobs came, how many GPUs they asked for and how long they ran; a workload adds
what the simulator must know besides (kind of work, memory, cores, peaks) and stretches time so
that the same jobs load a given cluster as much as one wants. Everything is drawn per job of the
whole trace, from streams of their own, so that a window's jobs do not depend on the window and
one option does not disturb what another draws.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from agent.simulator.hardware import SpeedTable, needs, peak_ratio
from agent.simulator.nodes import NodeMix, measured_type
from agent.simulator.traces import Jobs

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

ANY_TYPE = -1  # all bits set: every GPU type will do
CPU_ONLY = -1  # the kind of a job without GPUs
SHARED_GPU_MEMORY = 6.0  # GiB: two such jobs fit the smallest GPU, of 12 GiB
# Streams of random numbers, so that drawing more of one leaves the others as they were.
_KIND, _DURATION, _SHARED, _PEAK, _DEADLINE, _SAMPLE, _GAPS = range(7)


@dataclass(frozen=True)
class Options:
    """How jobs of a trace become jobs of a workload; every field has a use in tests or demos."""

    max_gpus: int = 8
    """Larger gangs are cut to this; then to the power of two below (Gavel's 1, 2, 4, 8)."""
    reference: str = "v100"
    """The GPU type on which a trace's durations are kept, where it has no steps."""
    shared: float = 0.0
    """Chance that a one-GPU job asks for a share, if two like it fit a GPU of 12 GiB."""
    share: float = 0.5
    """The part of a GPU such a job asks for."""
    exceed: float = 0.01
    """The share of jobs whose host (and, drawn anew, GPU) memory peak passes the request."""
    deadlines: float = 0.0
    """The share of jobs with a deadline."""
    slack: tuple[float, float] = (1.5, 5.0)
    """A deadline is the arrival plus so many run times on the fastest type, drawn evenly."""
    longest: float = np.inf
    """Seconds on the fastest GPU type to which longer jobs are cut, so that a run that is lived
    through comes to an end."""
    cpu_only: bool = False
    """Keep jobs without GPUs (kind -1, one step per second on every node)."""

    def __post_init__(self) -> None:
        """Refuses what would give a workload that looks right and is not."""
        if self.max_gpus < 1:
            raise ValueError(f"max_gpus must be at least 1, got {self.max_gpus}")
        if not self.longest > 0:
            raise ValueError(f"longest is a run time above 0 s, got {self.longest}")
        for name in ("shared", "deadlines"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is a share from 0 to 1, got {getattr(self, name)}")
        if not 0 < self.share < 1:
            raise ValueError(f"share is a part of one GPU, above 0 and below 1, got {self.share}")


@dataclass(frozen=True)
class Workload:
    """Jobs for the simulator, sorted by arrival; one entry of every array per job.

    arrival: f8[P] s from 0. kind: i8[P], into the SpeedTable; -1 for a job without GPUs, which
    does one step per second on every node. steps: f8[P].
    cpu: f8[P] cores and memory: f8[P] GiB of the host, as requested.
    gpus: i8[P] whole GPUs of the gang; 0 when shared or none. share: f8[P], 0 when whole.
    gpu_memory: f8[P] GiB on each GPU, as requested.
    memory_peak, gpu_memory_peak: f8[P] GiB actually reached.
    deadline: f8[P] s on the clock of ``arrival``; inf without.
    allowed: i8[P], bit t set when GPU type t will do; -1 any.
    dropped: jobs of the trace that were left out, counted by reason.
    """

    arrival: FloatArray
    kind: IntArray
    steps: FloatArray
    cpu: FloatArray
    memory: FloatArray
    gpus: IntArray
    share: FloatArray
    gpu_memory: FloatArray
    memory_peak: FloatArray
    gpu_memory_peak: FloatArray
    deadline: FloatArray
    allowed: IntArray
    dropped: Mapping[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.arrival)

    def take(self, rows: IntArray | BoolArray | slice) -> "Workload":
        """The named jobs in the named order, arrivals unchanged."""
        arrays: dict[str, Any] = {
            name: value[rows] for name, value in vars(self).items() if isinstance(value, np.ndarray)
        }
        return replace(self, **arrays)


def gpu_capacity(nodes: NodeMix, speeds: SpeedTable) -> float:
    """Fastest-type GPUs that the cluster is worth: each GPU counts its mean relative speed.

    The mean is over all kinds, unweighted, so that it belongs to the cluster and not to a trace.
    """
    worth = np.append(speeds.relative.mean(axis=0), 0.0)  # the last entry: NO_GPU, index -1
    return float((nodes.capacity[:, 2] * worth[nodes.gpu_type]).sum())


def gpu_work(workload: Workload, speeds: SpeedTable) -> FloatArray:
    """f8[P]: seconds on the fastest GPU type times GPUs (or the part of one) of every job."""
    held = workload.gpus + workload.share
    return np.where(held > 0, fastest_s(workload, speeds) * held, 0.0)


def fastest_s(workload: Workload, speeds: SpeedTable) -> FloatArray:
    """f8[P]: run time on the fastest GPU type, alone, in seconds."""
    best = np.append(speeds.speed.max(axis=1), 1.0)  # the last entry: CPU_ONLY, index -1
    return np.asarray(workload.steps / best[workload.kind], dtype=np.float64)


def offered_load(workload: Workload, speeds: SpeedTable, nodes: NodeMix) -> float:
    """GPU work that arrives per second between first and last arrival, relative to capacity.

    1 keeps all GPUs busy on the average. Errors: ValueError without GPUs or without a span.
    """
    capacity = gpu_capacity(nodes, speeds)
    span = float(np.ptp(workload.arrival)) if len(workload) else 0.0
    if capacity <= 0 or span <= 0:
        raise ValueError("a load needs nodes with GPUs and at least two arrivals apart in time")
    return float(gpu_work(workload, speeds).sum()) / (span * capacity)


def prepare(
    jobs: Jobs, speeds: SpeedTable, nodes: NodeMix, *, seed: int, options: Options | None = None
) -> Workload:
    """All usable jobs of a trace on the trace's own clock (NaN where it has no times).

    Gangs become 1, 2, 4 or 8 GPUs. A job of known type and steps (Gavel) keeps both, and is
    dropped when its kind was not measured on every GPU type; any other job gets a random kind of
    its GPU count and the steps that take its duration on ``options.reference``. Jobs of unknown
    duration get that of another job of the trace. Jobs that no node could ever hold are dropped.
    Errors: ValueError for a trace without durations and steps, for an unknown reference type.
    """
    options = options or Options()
    count = len(jobs)
    if options.reference not in speeds.gpu_types:
        raise ValueError(f"unknown reference type {options.reference!r}: not in {speeds.gpu_types}")
    whole = np.minimum(jobs.gpus, options.max_gpus)
    whole = np.where(whole > 0, 2 ** np.floor(np.log2(np.maximum(whole, 1))), 0).astype(np.int64)
    per_kind = np.where(jobs.share > 0, 1, whole)  # a shared GPU runs a one-GPU kind
    kind = _kinds(jobs, per_kind, speeds, seed)
    steps = _steps(jobs, kind, speeds, seed, options.reference)

    job_type = np.where(kind >= 0, speeds.kind_type[kind], 0)
    table = needs(speeds.job_types)
    units = np.maximum(per_kind, 1)
    gpu_memory = np.where(per_kind > 0, table.gpu_memory[job_type], 0.0)
    draw = np.random.default_rng([seed, _SHARED]).random(count)
    sharing = (whole == 1) & (draw < options.shared) & (gpu_memory <= SHARED_GPU_MEMORY)
    share = np.where(sharing, options.share, jobs.share)
    cpu = np.where(np.isnan(jobs.cpu), table.cpu[job_type] * units, jobs.cpu)
    memory = np.where(np.isnan(jobs.memory), table.memory[job_type] * units, jobs.memory)
    peaks = np.random.default_rng([seed, _PEAK])
    made = Workload(
        arrival=jobs.arrival_s,
        kind=kind,
        steps=steps,
        cpu=cpu,
        memory=memory,
        gpus=np.where(share > 0, 0, whole),
        share=share,
        gpu_memory=gpu_memory,
        memory_peak=memory * peak_ratio(peaks, count, exceed=options.exceed),
        gpu_memory_peak=gpu_memory * peak_ratio(peaks, count, exceed=options.exceed),
        deadline=np.full(count, np.inf),
        allowed=_allowed(jobs),
    )
    fits_in = options.longest / np.maximum(fastest_s(made, speeds), 1e-9)
    made = replace(made, steps=steps * np.minimum(fits_in, 1.0))
    slack = jobs.deadline_s - jobs.arrival_s
    drawn = np.random.default_rng([seed, _DEADLINE])
    chosen = drawn.random(count) < options.deadlines
    run_times = drawn.uniform(*options.slack, count) * fastest_s(made, speeds)
    slack = np.where(np.isnan(slack), np.where(chosen, run_times, np.inf), slack)
    # Kept as slack after the arrival until the arrivals are final.
    made = replace(made, deadline=slack)

    unmeasured = (per_kind > 0) & (kind < 0)
    no_gpu = (per_kind == 0) & (not options.cpu_only)
    homeless = ~(unmeasured | no_gpu | _placeable(made, nodes))
    dropped = dict(jobs.dropped)
    for reason, rows in (
        ("kind not measured on every GPU type", unmeasured),
        ("asks for no GPU", no_gpu),
        ("fits no node", homeless),
    ):
        if rows.any():
            dropped[reason] = dropped.get(reason, 0) + int(rows.sum())
    return replace(made.take(~(unmeasured | no_gpu | homeless)), dropped=dropped)


def _kinds(jobs: Jobs, gpus: IntArray, speeds: SpeedTable, seed: int) -> IntArray:
    """i8[P] kinds: the trace's own where it names job types, else drawn by GPU count; -1 none."""
    known = np.array(
        [[speeds.kind(name, 2**power) for power in range(4)] for name in jobs.job_types],
        dtype=np.int64,
    ).reshape(-1, 4)
    power = np.log2(np.maximum(gpus, 1)).astype(np.int64)
    draw = np.random.default_rng([seed, _KIND]).random(len(jobs))
    kind = np.full(len(jobs), CPU_ONLY, dtype=np.int64)
    small = needs(speeds.job_types).gpu_memory[speeds.kind_type] <= SHARED_GPU_MEMORY
    for p, shared in [(0, True), *((p, False) for p in range(4))]:
        of_size = np.flatnonzero((speeds.kind_gpus == 2**p) & (small | (not shared)))
        rows = (power == p) & (gpus > 0) & (jobs.job_type < 0) & ((jobs.share > 0) == shared)
        if len(of_size):
            kind[rows] = of_size[(draw[rows] * len(of_size)).astype(np.int64)]
    named = (jobs.job_type >= 0) & (gpus > 0)
    kind[named] = known[jobs.job_type[named], power[named]]
    return kind


def _steps(jobs: Jobs, kind: IntArray, speeds: SpeedTable, seed: int, reference: str) -> FloatArray:
    """f8[P] steps: the trace's own, else those that keep its duration on the reference type."""
    duration = jobs.duration_s
    missing = np.isnan(jobs.steps) & np.isnan(duration)
    if missing.any():
        known = duration[~np.isnan(duration)]
        if not len(known):
            raise ValueError(
                f"the {jobs.source} trace has neither durations nor steps; use another"
            )
        drawn = np.random.default_rng([seed, _DURATION]).choice(known, len(jobs))
        duration = np.where(missing, drawn, duration)
    speed = np.append(speeds.speed[:, speeds.gpu_types.index(reference)], 1.0)[kind]
    return np.where(np.isnan(jobs.steps), duration * speed, jobs.steps)


def _allowed(jobs: Jobs) -> IntArray:
    """i8[P] bit masks; a spec that names only unknown models allows any type."""
    masks = [ANY_TYPE]
    for models in jobs.gpu_specs:
        types = [t for t in map(measured_type, models) if t >= 0]
        masks.insert(-1, sum(1 << t for t in set(types)) if types else ANY_TYPE)
    return np.array(masks, dtype=np.int64)[jobs.gpu_spec]  # -1, the last entry, is any


def _placeable(workload: Workload, nodes: NodeMix) -> BoolArray:
    """bool[P]: some empty node can hold the job as requested."""
    fits = np.zeros(len(workload), dtype=bool)
    shapes = np.column_stack([nodes.capacity, nodes.gpu_type, nodes.gpu_memory])
    held = workload.gpus + np.ceil(workload.share)
    for cpu, memory, gpus, gpu_type, gpu_memory in np.unique(shapes, axis=0):
        room = (workload.cpu <= cpu) & (workload.memory <= memory) & (held <= gpus)
        bit = 1 << int(gpu_type) if gpu_type >= 0 else 0
        suits = ((workload.allowed & bit) != 0) & (workload.gpu_memory <= gpu_memory)
        fits |= room & (suits | (held == 0))
    return fits


def window(
    jobs: Jobs,
    speeds: SpeedTable,
    nodes: NodeMix,
    *,
    load: float,
    start: int = 0,
    stop: int | None = None,
    seed: int = 0,
    options: Options | None = None,
) -> Workload:
    """The trace's usable jobs ``start:stop`` in their order, arrivals stretched to ``load``.

    Errors: ValueError when the window leaves the trace, and as in offered_load.
    """
    ready = prepare(jobs, speeds, nodes, seed=seed, options=options)
    stop = len(ready) if stop is None else stop
    if not 0 <= start < stop <= len(ready):
        raise ValueError(
            f"window {start}:{stop} leaves the {jobs.source} trace, which has {len(ready)} usable "
            f"jobs (dropped: {dict(ready.dropped)})"
        )
    return _scaled(ready.take(slice(start, stop)), speeds, nodes, load)


def synthetic(
    jobs: Jobs,
    speeds: SpeedTable,
    nodes: NodeMix,
    *,
    arrivals: str,
    count: int,
    load: float,
    seed: int,
    options: Options | None = None,
    like: Jobs | None = None,
) -> Workload:
    """``count`` jobs drawn with replacement from a trace's mix, arriving by a process.

    arrivals: ``poisson`` (exponential gaps), ``uniform`` (gaps even between 0 and twice the
    mean) or ``alibaba`` (a stretch of the gaps between the arrivals of ``like``, the openb pods,
    bursts and lulls kept); the offered load is then set exactly, as for a window.
    Errors: ValueError for another process, for ``alibaba`` without ``like``, for fewer than two
    jobs, and as in offered_load.
    """
    if count < 2:
        raise ValueError(f"a synthetic workload needs at least 2 jobs, got {count}")
    gaps = np.random.default_rng([seed, _GAPS])
    if arrivals == "poisson":
        between = gaps.exponential(1.0, count)
    elif arrivals == "uniform":
        between = gaps.uniform(0.0, 2.0, count)
    elif arrivals == "alibaba":
        between = _stretch(_gaps_like(like), count, gaps)
    else:
        raise ValueError(f"arrivals are 'poisson', 'uniform' or 'alibaba', not {arrivals!r}")
    ready = prepare(jobs, speeds, nodes, seed=seed, options=options)
    if not len(ready):
        raise ValueError(f"no usable job in the {jobs.source} trace: {dict(ready.dropped)}")
    drawn = ready.take(np.random.default_rng([seed, _SAMPLE]).integers(len(ready), size=count))
    return _scaled(replace(drawn, arrival=np.cumsum(between)), speeds, nodes, load)


def _gaps_like(like: Jobs | None) -> FloatArray:
    """Gaps between a trace's arrivals, s, but for those of its first hundredth of jobs: openb
    begins with services that had been there for weeks before the others came."""
    arrival = np.sort(like.arrival_s) if like is not None else np.empty(0)
    found = np.diff(arrival[-(-len(arrival) // 100) :])
    if not len(found) or np.isnan(found).any():
        raise ValueError("arrivals like Alibaba's need a trace with arrival times: openb's pods")
    return found


def _stretch(gaps: FloatArray, count: int, rng: np.random.Generator) -> FloatArray:
    """``count`` consecutive gaps from a random place on, going on at the start behind the last."""
    return gaps[(int(rng.integers(len(gaps))) + np.arange(count)) % len(gaps)]


def _scaled(part: Workload, speeds: SpeedTable, nodes: NodeMix, load: float) -> Workload:
    """The workload from time 0 at exactly the offered load, deadlines set from the slack."""
    if not 0 < load < np.inf:
        raise ValueError(f"an offered load is a number above 0, such as 0.8, got {load}")
    if np.isnan(part.arrival).any():
        raise ValueError("this trace has no arrival times; use synthetic arrivals with its jobs")
    factor = offered_load(part, speeds, nodes) / load
    if factor <= 0:
        raise ValueError("these jobs bring no GPU work, so no load can be set; take other jobs")
    arrival = (part.arrival - part.arrival.min()) * factor
    return replace(part, arrival=arrival, deadline=arrival + part.deadline)
