"""Which jobs of a trace may be learned from, tuned on and judged by: the one way to windows.

Called by whatever trains or tunes (parts ``train`` and ``validation``) and by the benchmark, which
alone opens ``sealed``. Parts follow each other in time and are fixed in ``splits.yaml``.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
import numpy as np

from agent.data_files import DataFileError, read_data
from agent.simulator.hardware import SpeedTable
from agent.simulator.nodes import NodeMix
from agent.simulator.traces import Jobs, TraceError, find_traces, read_jobs, trace_file
from agent.simulator.workloads import Options, Workload, prepare, window

FILE = Path(__file__).with_name("splits.yaml")
WINDOW = 150
STRIDE = 75

Part = Literal["train", "validation", "sealed"]
Range = tuple[int, int]


class SealedError(RuntimeError):
    """Jobs that are kept to judge by were asked for where something is trained or tuned."""


_kept_shut = 0


@contextmanager
def training() -> Iterator[None]:
    """Within, sealed jobs are out of reach for the whole process, whatever it claims to be."""
    global _kept_shut
    _kept_shut += 1
    try:
        yield
    finally:
        _kept_shut -= 1


class Split(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The parts of one trace: [from, to) of its jobs in order of arrival."""

    file: str
    """Below the folder of traces."""
    jobs: int
    """How many the whole trace has."""
    train: Range
    validation: Range
    sealed: Range
    shipped: int = 0
    """How many the shipped slice has, its first ones; 0: the whole trace is shipped or none."""

    def __post_init__(self) -> None:
        edges = [0, *self.train, *self.validation, *self.sealed, self.jobs]
        if sorted(edges) != edges:
            raise ValueError(
                f"train {self.train}, validation {self.validation} and sealed {self.sealed} must "
                f"follow each other without overlap in 0 to {self.jobs}"
            )


class Splits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of ``splits.yaml``."""

    traces: dict[str, Split]


@dataclass(frozen=True)
class Window:
    """Consecutive usable jobs of one part of a trace."""

    trace: str
    part: Part
    start: int
    stop: int
    """Of the usable jobs of the part."""
    jobs: Jobs
    """All jobs of the part."""

    @property
    def name(self) -> str:
        """Such as ``sealed 75–225``."""
        return f"{self.part} {self.start}–{self.stop}"

    def workload(
        self,
        speeds: SpeedTable,
        nodes: NodeMix,
        *,
        load: float,
        seed: int,
        options: Options | None = None,
    ) -> Workload:
        """The window at an offered load; ``seed`` draws what the trace does not say of its jobs."""
        return window(
            self.jobs, speeds, nodes, load=load, start=self.start, stop=self.stop,
            seed=seed, options=options,
        )  # fmt: skip


@cache
def splits(path: Path = FILE) -> dict[str, Split]:
    """The splits by trace. Raises DataFileError."""
    return read_data(path, Splits).traces


def available(path: Path = FILE) -> tuple[str, ...]:
    """Names of the traces that are there, whole or as a slice, in the order of the file.

    Raises TraceError where the folder of traces itself is not there.
    """
    find_traces()
    found = []
    for name, split in splits(path).items():
        try:
            trace_file(split.file)
        except TraceError:
            continue
        found.append(name)
    return tuple(found)


_read = cache(read_jobs)


def _whole(name: str, path: Path) -> tuple[Split, Jobs]:
    """A trace whose length is what its split was made for."""
    known = splits(path)
    if name not in known:
        raise KeyError(f"no split for a trace {name!r} in {path}; there are {', '.join(known)}")
    split = known[name]
    file = trace_file(split.file)
    jobs = _read(file)
    total = len(jobs) + sum(jobs.dropped.values())
    if total not in (split.jobs, split.shipped):
        expected = f"{split.jobs}" + (f" or {split.shipped} (slice)" if split.shipped else "")
        raise DataFileError(
            f"{path}, key traces.{name}.jobs: the split is of a trace of {expected} jobs and "
            f"{file} has {total}; put that trace there, or make a split of this one"
        )
    return split, jobs


def part_jobs(trace: str, part: Part, *, evaluation: bool = False, path: Path = FILE) -> Jobs:
    """The jobs of a part, in order of arrival; a shipped slice may have few of it, or none.

    Args:
        evaluation: set by the benchmark alone, where it judges what has been trained before.

    Raises:
        SealedError: the sealed part without ``evaluation``, or within :func:`training`.
        KeyError: no split of that trace. ValueError: no such part.
        DataFileError: the trace is not the one that the split was made for.
    """
    if part not in get_args(Part):
        raise ValueError(f"no part {part!r}; there are {', '.join(get_args(Part))}")
    if part == "sealed" and (_kept_shut or not evaluation):
        raise SealedError(
            f"the sealed jobs of {trace} are there to judge by and nothing else: train on 'train', "
            "tune on 'validation'; only 'fedsched benchmark' opens them"
        )
    split, jobs = _whole(trace, path)
    first, last = getattr(split, part)
    fields: dict[str, Any] = {
        name: value[first:last]
        for name, value in vars(jobs).items()
        if isinstance(value, np.ndarray)
    }
    return replace(jobs, **fields, dropped={})


def windows(
    trace: str,
    part: Part,
    speeds: SpeedTable,
    nodes: NodeMix,
    *,
    length: int = WINDOW,
    stride: int = STRIDE,
    count: int | None = None,
    evaluation: bool = False,
    path: Path = FILE,
) -> list[Window]:
    """All windows of ``length`` jobs, usable on ``nodes``, of a part; empty where it has too few.

    They start ``stride`` jobs apart; or there are ``count``, spread evenly over the part however
    long it is, so that every trace weighs the same. Windows that start closer than their length
    share jobs: intervals over them are to be clustered by trace. Raises as :func:`part_jobs` does.
    """
    jobs = part_jobs(trace, part, evaluation=evaluation, path=path)
    usable = len(prepare(jobs, speeds, nodes, seed=0)) if len(jobs) else 0
    if usable < length:
        return []
    if count is None:
        starts = list(range(0, usable - length + 1, stride))
    else:
        starts = [int(start) for start in np.linspace(0, usable - length, count)]
    return [Window(trace, part, start, start + length, jobs) for start in starts]
