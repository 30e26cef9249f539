"""Readers of public workload traces, called by workloads.py, hardware.py and the command line.

Each reader turns one file into plain arrays in one common record, sorted by arrival. Rows that
a format itself declares unusable are dropped and counted by reason; anything else that does not
fit raises a TraceError with file, line and column. Formats and their sources are described in
``examples/traces/SOURCES.md``.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from agent.simulator.tables import (
    Row,
    TraceError,
    find_traces,
    read_csv,
    read_text,
    trace_file,
    unique_index,
)

__all__ = [
    "Jobs",
    "OpenbNodes",
    "TraceError",
    "find_traces",
    "read_gavel",
    "read_gavel_colocated",
    "read_gavel_isolated",
    "read_jobs",
    "read_openb_nodes",
    "read_openb_pods",
    "read_philly",
    "read_swf",
    "trace_file",
]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

GIB_PER_MIB = 1.0 / 1024.0
GIB_PER_KB = 1.0 / 1024.0**2

GAVEL = ("job_type", "total_steps", "arrival_time_s", "scale_factor")
GAVEL_ISOLATED = ("worker_type", "job_type", "scale_factor", "steps_per_second")
GAVEL_COLOCATED = (
    "worker_type",
    "job_type_a",
    "scale_factor_a",
    "job_type_b",
    "scale_factor_b",
    "steps_per_second_a",
    "steps_per_second_b",
)
PHILLY = ("timestamp", "duration", "num_gpus", "cluster")
OPENB_NODES = ("sn", "cpu_milli", "memory_mib", "gpu", "model")
OPENB_PODS = ("name", "cpu_milli", "memory_mib", "num_gpu", "gpu_milli")
_SWF_FIELDS = (
    "job number,submit time,wait time,run time,allocated processors,average CPU time,"
    "used memory,requested processors,requested time,requested memory,status,user,group,"
    "executable,queue,partition,preceding job,think time"
)
SWF = tuple(_SWF_FIELDS.split(","))


@dataclass(frozen=True)
class Jobs:
    """The jobs of one trace, sorted by arrival; one entry of every array per job.

    arrival_s: f8[P], seconds since the first arrival (NaN: the trace has no times).
    gpus: i8[P], whole GPUs of the gang (SWF: processors); 0 for a shared GPU or none.
    share: f8[P], the part of one GPU asked for, in (0, 1); 0 when whole GPUs or none.
    job_type: i8[P], index into ``job_types``; -1 unknown.
    steps: f8[P], training steps to do; NaN unknown.
    duration_s: f8[P], seconds it ran in the trace; NaN unknown.
    cpu: f8[P], cores asked for; NaN unknown. memory: f8[P], GiB of the host; NaN unknown.
    deadline_s: f8[P], on the clock of ``arrival_s``; NaN none or unknown.
    cluster: i8[P], index into ``clusters``; -1 unknown.
    gpu_spec: i8[P], index into ``gpu_specs``, the GPU models that will do; -1 any.
    dropped: rows left out, counted by reason.
    """

    source: str
    arrival_s: FloatArray
    gpus: IntArray
    share: FloatArray
    job_type: IntArray
    steps: FloatArray
    duration_s: FloatArray
    cpu: FloatArray
    memory: FloatArray
    deadline_s: FloatArray
    cluster: IntArray
    gpu_spec: IntArray
    job_types: tuple[str, ...] = ()
    clusters: tuple[str, ...] = ()
    gpu_specs: tuple[tuple[str, ...], ...] = ()
    dropped: Mapping[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.gpus)


@dataclass(frozen=True)
class OpenbNodes:
    """Nodes of the Alibaba openb trace: names, cores f8[N], GiB f8[N], GPUs i8[N], GPU model."""

    names: tuple[str, ...]
    cpu: FloatArray
    memory: FloatArray
    gpus: IntArray
    models: tuple[str, ...]  # "" for a node without GPUs

    def __len__(self) -> int:
        return len(self.names)


class _Collector:
    """Gathers rows as lists and closes them into a sorted Jobs record."""

    def __init__(self, path: Path, source: str) -> None:
        self.path, self.source = path, source
        self.rows: list[tuple[float, ...]] = []
        self.dropped: Counter[str] = Counter()
        self.job_types: list[str] = []
        self.clusters: list[str] = []
        self.specs: list[str] = []

    def add(
        self,
        arrival: float,
        gpus: int,
        *,
        share: float = 0.0,
        job_type: int = -1,
        steps: float = math.nan,
        duration: float = math.nan,
        cpu: float = math.nan,
        memory: float = math.nan,
        cluster: int = -1,
        spec: int = -1,
    ) -> None:
        self.rows.append(
            (arrival, gpus, share, job_type, steps, duration, cpu, memory, cluster, spec)
        )

    def jobs(self) -> Jobs:
        if not self.rows:
            reasons = ", ".join(f"{count} {reason}" for reason, count in self.dropped.items())
            raise TraceError(
                self.path, f"no usable job ({reasons or 'no job in the file'}); use another trace"
            )
        table = np.array(self.rows, dtype=np.float64)
        # Stable: jobs that arrive together, and those without times (NaN), keep the file's order.
        table = table[np.argsort(table[:, 0], kind="stable")]
        columns = [np.ascontiguousarray(column) for column in table.T]
        arrival, gpus, share, job_type, steps, duration, cpu, memory, cluster, spec = columns
        return Jobs(
            source=self.source,
            arrival_s=arrival - arrival[0],
            gpus=gpus.astype(np.int64),
            share=share,
            job_type=job_type.astype(np.int64),
            steps=steps,
            duration_s=duration,
            cpu=cpu,
            memory=memory,
            deadline_s=np.full(len(table), np.nan),
            cluster=cluster.astype(np.int64),
            gpu_spec=spec.astype(np.int64),
            job_types=tuple(self.job_types),
            clusters=tuple(self.clusters),
            gpu_specs=tuple(tuple(spec.split("|")) for spec in self.specs),
            dropped=dict(self.dropped),
        )


def read_gavel(path: Path) -> Jobs:
    """Gavel's job file of one Philly virtual cluster: job type, steps, GPUs, arrival.

    Source: Narayanan et al., Gavel, OSDI 2020. Rows with 0 GPUs are dropped.
    """
    found = _Collector(path, "gavel")
    number = unique_index(found.job_types)
    for row in read_csv(path, GAVEL):
        gpus = row.integer("scale_factor", minimum=0)
        arrival = row.number("arrival_time_s", minimum=0)
        steps = row.positive("total_steps")
        if not row.text("job_type"):
            raise row.fail("job_type", "a job type")
        if gpus == 0:
            found.dropped["asks for 0 GPUs"] += 1
            continue
        found.add(arrival, gpus, job_type=number(row.text("job_type")), steps=steps)
    return found.jobs()


def read_philly(path: Path, cluster: str | None = None) -> Jobs:
    """Microsoft's Philly trace, of one virtual cluster or (None) of all of them.

    Source: Jeon et al., USENIX ATC 2019, as prepared for Pollux. Jobs with 0 GPUs or that ran
    0 s are dropped. Times carry no zone; differences ignore a change of summer time.
    """
    found = _Collector(path, "philly")
    number = unique_index(found.clusters)
    names: set[str] = set()
    for row in read_csv(path, PHILLY):
        gpus = row.integer("num_gpus", minimum=0)
        duration = row.number("duration", minimum=0)
        arrival = row.moment("timestamp")
        name = row.text("cluster")
        names.add(name)
        if cluster is not None and name != cluster:
            continue
        if gpus == 0 or duration == 0:
            found.dropped["asks for 0 GPUs" if gpus == 0 else "ran 0 s"] += 1
            continue
        found.add(arrival, gpus, duration=duration, cluster=number(name))
    if cluster is not None and cluster not in names:
        raise TraceError(path, f"no virtual cluster {cluster!r}; it has {', '.join(sorted(names))}")
    return found.jobs()


def read_openb_pods(path: Path) -> Jobs:
    """Alibaba's openb pods (cluster-trace-gpu-v2023); shared GPUs become ``share``.

    The variants without times give NaN arrivals in the file's order. A pod that was never
    scheduled has an unknown duration. Nothing is dropped: pods without GPUs are real pods.
    """
    found = _Collector(path, "openb")
    spec_number = unique_index(found.specs)
    for row in read_csv(path, OPENB_PODS):
        gpus = row.integer("num_gpu", minimum=0)
        milli = row.integer("gpu_milli", minimum=0)
        if milli > 1000 or (gpus > 0) != (milli > 0) or (gpus > 1 and milli != 1000):
            raise row.fail("gpu_milli", "1000 for whole GPUs, 1 to 999 with num_gpu 1, 0 with none")
        shared = 0 < milli < 1000
        arrival = duration = math.nan
        if "creation_time" in row.columns:
            arrival = row.number("creation_time", minimum=0)
            if row.has("scheduled_time") and row.has("deletion_time"):
                begin = row.number("scheduled_time", minimum=0)
                duration = row.number("deletion_time") - begin
                if duration < 0:
                    raise row.fail("deletion_time", f"a time not before scheduled_time ({begin:g})")
        found.add(
            arrival,
            0 if shared else gpus,
            share=milli / 1000.0 if shared else 0.0,
            duration=duration if duration != 0 else math.nan,
            cpu=row.number("cpu_milli", minimum=0) / 1000.0,
            memory=row.number("memory_mib", minimum=0) * GIB_PER_MIB,
            spec=spec_number(row.text("gpu_spec")) if row.has("gpu_spec") else -1,
        )
    return found.jobs()


def read_openb_nodes(path: Path) -> OpenbNodes:
    """Alibaba's openb nodes: cores, host memory, GPUs and their model, in the file's order."""
    rows: list[tuple[float, float, int]] = []
    names: list[str] = []
    models: list[str] = []
    for row in read_csv(path, OPENB_NODES):
        gpus = row.integer("gpu", minimum=0)
        if gpus > 0 and not row.has("model"):
            raise row.fail("model", f"the model of the {gpus} GPUs")
        names.append(row.text("sn"))
        models.append(row.text("model") if gpus > 0 else "")
        rows.append((row.positive("cpu_milli") / 1000, row.positive("memory_mib"), gpus))
    table = np.array(rows, dtype=np.float64)
    return OpenbNodes(
        names=tuple(names),
        cpu=table[:, 0].copy(),
        memory=table[:, 1] * GIB_PER_MIB,
        gpus=table[:, 2].astype(np.int64),
        models=tuple(models),
    )


def read_swf(path: Path) -> Jobs:
    """Standard Workload Format (Feitelson's archive): 18 fields a line, comments after ``;``.

    GPUs are the requested processors, else the allocated ones; memory is per processor in KB.
    Jobs with run time -1 (unknown) or 0 (cancelled) or without processors are dropped.
    """
    found = _Collector(path, "swf")
    number = unique_index(found.clusters)
    columns = {name: index for index, name in enumerate(SWF)}
    for line, text in enumerate(read_text(path).split("\n"), start=1):
        cells = text.partition(";")[0].split()
        if not cells:
            continue
        if len(cells) != len(SWF):
            column = str(min(len(cells), len(SWF)) + 1)
            if len(cells) < len(SWF):
                column += f" ({SWF[len(cells)]})"
            problem = f"expected {len(SWF)} fields, found {len(cells)}"
            raise TraceError(path, problem, line=line, column=column)
        row = Row(path, line, cells, columns)
        submit = row.number("submit time", minimum=0)
        run = row.number("run time", minimum=-1)
        if -1 < run < 0:
            raise row.fail("run time", "-1 (unknown) or a number of at least 0")
        requested = row.integer("requested processors", minimum=-1)
        allocated = row.integer("allocated processors", minimum=-1)
        processors = requested if requested > 0 else allocated
        memory = [row.number(f"{kind} memory", minimum=-1) for kind in ("requested", "used")]
        per_processor = next((value for value in memory if value > 0), math.nan)
        partition = row.text("partition")
        if run <= 0 or processors <= 0:
            reason = "run time unknown" if run < 0 else "ran 0 s" if run == 0 else "no processors"
            found.dropped[reason] += 1
            continue
        found.add(
            submit,
            processors,
            duration=run,
            memory=per_processor * processors * GIB_PER_KB,
            cluster=-1 if partition == "-1" else number(partition),
        )
    return found.jobs()


def read_jobs(path: Path, cluster: str | None = None) -> Jobs:
    """Jobs of any of the formats above, told apart by the ending ``.swf`` and the header.

    cluster: one virtual cluster (or SWF partition) of the trace; None takes all.
    Errors: TraceError for an unknown header, for a cluster that the trace does not have.
    """
    if path.suffix == ".swf":
        return _only(path, read_swf(path), cluster)
    header = {name.strip() for name in read_text(path).lstrip().partition("\n")[0].split(",")}
    if header >= set(PHILLY):
        return read_philly(path, cluster)
    if header >= set(GAVEL):
        return _only(path, read_gavel(path), cluster)
    if header >= set(OPENB_PODS):
        return _only(path, read_openb_pods(path), cluster)
    raise TraceError(
        path,
        "expected a header of Gavel, Philly or openb pods (or a file ending in .swf), found "
        + ",".join(sorted(header)),
        line=1,
    )


def _only(path: Path, jobs: Jobs, cluster: str | None) -> Jobs:
    """The jobs of one cluster, arrivals counted from its first."""
    if cluster is None:
        return jobs
    if cluster not in jobs.clusters:
        names = ", ".join(jobs.clusters) or "no clusters"
        raise TraceError(path, f"no cluster {cluster!r} in this trace; it has {names}")
    mine = jobs.cluster == jobs.clusters.index(cluster)
    arrays = {
        name: value[mine] for name, value in vars(jobs).items() if isinstance(value, np.ndarray)
    }
    arrays["arrival_s"] = arrays["arrival_s"] - arrays["arrival_s"][0]
    return replace(jobs, **arrays)


def read_gavel_isolated(path: Path) -> dict[tuple[str, str, int], float]:
    """Gavel's speeds alone: (GPU type, job type, GPUs) to steps/s; 0 means it did not run."""
    speeds: dict[tuple[str, str, int], float] = {}
    for row in read_csv(path, GAVEL_ISOLATED):
        key = row.text("worker_type"), row.text("job_type"), row.integer("scale_factor", minimum=1)
        if key in speeds:
            raise row.fail("job_type", "one row for each GPU type, job type and GPU count")
        speeds[key] = row.number("steps_per_second", minimum=0)
    return speeds


def read_gavel_colocated(path: Path) -> dict[tuple[str, str, str], tuple[float, float]]:
    """Gavel's speeds of two one-GPU jobs on one GPU: (GPU type, a, b) to steps/s of a and of b.

    0 means that the two do not fit together.
    """
    speeds: dict[tuple[str, str, str], tuple[float, float]] = {}
    for row in read_csv(path, GAVEL_COLOCATED):
        for column in ("scale_factor_a", "scale_factor_b"):
            if row.integer(column) != 1:
                raise row.fail(column, "1, for only one-GPU jobs share a GPU")
        key = row.text("worker_type"), row.text("job_type_a"), row.text("job_type_b")
        if key in speeds:
            raise row.fail("job_type_b", "one row for each GPU type and pair of job types")
        speeds[key] = (
            row.number("steps_per_second_a", minimum=0),
            row.number("steps_per_second_b", minimum=0),
        )
    return speeds
