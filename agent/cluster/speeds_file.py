"""The file in which the learner tells the decision path how fast work runs where, and how long.

Written by ``agent.learning.publish`` whenever its predictions changed, read by
``agent.scheduling.serve`` as soon as the file is another one. It is JSON, replaced atomically, and
stays within the member: it names job types and GPU models.
"""

import math
import os
from pathlib import Path

import msgspec

from common.weights import write_atomic

SPEEDS_VERSION = 1


class SpeedsFileError(ValueError):
    """A speeds file is missing, torn or inconsistent; the message says which."""


class KindSpeeds(msgspec.Struct, frozen=True, kw_only=True):
    """Predictions for one kind of work, a job type with a number of GPUs."""

    job_type: str
    gpus: int
    """1 for shared pods too; 0 for work without a GPU."""
    slowdown: list[float]
    """[T] log of (steps/s on the kind's fastest model / steps/s on this one), ≥ 0, in the order of
    ``gpu_models``."""
    runs: int = 0
    """Finished runs that the learner knows of."""
    log_seconds: float = 0.0
    """Their mean log run time on the kind's fastest model, log s."""


class WorkRuns(msgspec.Struct, frozen=True, kw_only=True):
    """How long earlier runs of the same work took (``agent.cluster.records.Pod.work``)."""

    work: str
    log_seconds: float
    """Their mean log run time on the fastest model, log s."""
    trust: float
    """What that counts against the estimate for the kind, 0 to 1."""


class SpeedsFile(msgspec.Struct, frozen=True, kw_only=True):
    """All that the learner knows about speeds. ``T`` GPU models, ``J`` job types."""

    version: int = SPEEDS_VERSION
    gpu_models: list[str]
    """[T] names as nodes carry them in ``nvidia.com/gpu.product``."""
    job_types: list[str]
    """[J] rows and columns of ``interference``."""
    kinds: list[KindSpeeds]
    interference: list[list[float]]
    """[J, J] log slow-down of the row's job type beside the column's on one GPU, ≥ 0."""
    prior: list[float] = []
    """[T] predicted log slow-down, ≥ 0, of a kind that ``kinds`` does not list; empty: all 0."""
    prior_interference: float = 0.0
    """Log slow-down of a pair that ``interference`` does not cover, ≥ 0."""
    works: list[WorkRuns] = []


_decoder = msgspec.json.Decoder(SpeedsFile)


def check(speeds: SpeedsFile) -> None:
    """Raise SpeedsFileError, naming the row, unless shapes agree and values are finite and ≥ 0."""
    if speeds.version != SPEEDS_VERSION:
        raise SpeedsFileError(
            f"speeds of version {speeds.version}, this agent reads {SPEEDS_VERSION}; "
            "run serve and learn from one release"
        )
    rows = [
        (f"kind {k.job_type!r} × {k.gpus}", k.slowdown, speeds.gpu_models) for k in speeds.kinds
    ]
    rows += [
        (f"interference of {j!r}", row, speeds.job_types)
        for j, row in zip(speeds.job_types, speeds.interference, strict=False)
    ]
    if speeds.prior:
        rows.append(("the prior", speeds.prior, speeds.gpu_models))
    rows.append(("the prior interference", [speeds.prior_interference], [""]))
    if len(speeds.interference) != len(speeds.job_types):
        rows_count, names = len(speeds.interference), len(speeds.job_types)
        raise SpeedsFileError(f"interference has {rows_count} rows for {names} job types")
    for what, values, columns in rows:
        if len(values) != len(columns):
            raise SpeedsFileError(f"{what} has {len(values)} values, expected {len(columns)}")
        if not all(math.isfinite(value) and value >= 0.0 for value in values):
            raise SpeedsFileError(f"{what} holds a value that is negative or not finite")
    for kind in speeds.kinds:
        if kind.runs < 0 or not math.isfinite(kind.log_seconds):
            raise SpeedsFileError(f"kind {kind.job_type!r} × {kind.gpus} has impossible run times")
    for work in speeds.works:
        if not (math.isfinite(work.log_seconds) and 0.0 <= work.trust <= 1.0):
            raise SpeedsFileError(f"work {work.work!r} has impossible run times")


def write(path: Path, speeds: SpeedsFile) -> None:
    """Check ``speeds`` and replace ``path`` atomically. Raises SpeedsFileError and OSError."""
    check(speeds)
    write_atomic(path, msgspec.json.format(msgspec.json.encode(speeds), indent=1))


def read(path: Path) -> SpeedsFile:
    """Read what :func:`write` wrote. Raises SpeedsFileError where it is not there or not sound."""
    try:
        speeds = _decoder.decode(path.read_bytes())
    except OSError as error:
        raise SpeedsFileError(f"{path} cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SpeedsFileError(
            f"{path} is not a speeds file: {error}; delete it and the learner writes it anew"
        ) from error
    try:
        check(speeds)
    except SpeedsFileError as error:
        raise SpeedsFileError(f"{path}: {error}") from error
    return speeds


Stamp = tuple[int, int, int]


def stamp(path: Path) -> Stamp | None:
    """What changes when a file is replaced (inode, mtime in ns, size); None where there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
