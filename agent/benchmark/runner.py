"""Works the cells of a suite off and keeps what is done; called by ``agent.benchmark.commands``.

Every cell's figures are a line of ``cells.jsonl``, written as soon as they are there. A line holds
as long as its digest does: of the cell and of everything that its figures depend on. So a run that
was broken off goes on where it was, and a change works off anew what it touches and nothing else.
What the figures took lies beside them in ``times.json``, by suite and size.
"""

import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from agent.benchmark.fingerprint import fingerprint
from agent.benchmark.suite import Cell, Figures, Size, Suite
from agent.benchmark.suites import reference
from agent.benchmark.workers import Answer, answers, prepare
from agent.lock import LockedError, sole
from common.weights import write_atomic

SYNC_SECONDS = 1.0
"""Lines reach the system at once, and the disk at least this often."""
TIMES = "times.json"
"""In the output folder: what suites took."""


class Line(msgspec.Struct, frozen=True):
    """One line of ``cells.jsonl``."""

    digest: str
    cell: Cell
    figures: Figures


class Spent(msgspec.Struct, frozen=True):
    """What the figures of a suite took at one size, in all runs together that they are from."""

    fingerprint: str
    """Of the figures; for others it begins anew."""
    cells: int = 0
    """That are done."""
    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0
    """Of preparation and workers, with all processes that they started."""


@dataclass
class Outcome:
    """All that is known of a suite's cells after a run."""

    fingerprint: str
    figures: dict[Cell, Figures] = field(default_factory=dict)
    failures: list[tuple[Cell, str]] = field(default_factory=list)
    resumed: int = 0
    """Cells that were done before."""


def digest(cell: Cell, basis: str) -> str:
    """What names a cell's line: other figures, another digest."""
    return hashlib.sha256(basis.encode() + msgspec.json.encode(cell)).hexdigest()[:20]


def read_lines(path: Path) -> dict[str, Line]:
    """Lines by digest, the last one of each; torn or foreign ones are passed over."""
    found: dict[str, Line] = {}
    if path.exists():
        for text in path.read_bytes().splitlines():
            try:
                line = msgspec.json.decode(text, type=Line)
            except msgspec.DecodeError:
                continue
            found[line.digest] = line
    return found


def read_times(output: Path) -> dict[str, Spent]:
    """What each suite took, by ``<suite> <size>``; of another version's file, nothing."""
    try:
        return msgspec.json.decode((output / TIMES).read_bytes(), type=dict[str, Spent])
    except (OSError, RecursionError, msgspec.DecodeError):
        return {}


class _Meter:
    """Adds what a run takes to what the runs before it took, however it ends but by a kill.

    CPU time is that of children, which is known once they ended: within, wait for all of them.
    """

    def __init__(self, output: Path, key: str, outcome: Outcome, *, fresh: bool) -> None:
        self._output, self._key, self._outcome = output, key, outcome
        spent = read_times(output).get(key)
        whole = spent is not None and spent.fingerprint == outcome.fingerprint and not fresh
        self._before = spent if spent is not None and whole else Spent(outcome.fingerprint)

    def __enter__(self) -> None:
        self._wall, self._cpu = time.monotonic(), _children_cpu()

    def __exit__(self, *_: object) -> None:
        spent = msgspec.structs.replace(
            self._before,
            cells=len(self._outcome.figures),
            wall_seconds=self._before.wall_seconds + time.monotonic() - self._wall,
            cpu_seconds=self._before.cpu_seconds + _children_cpu() - self._cpu,
        )
        times = read_times(self._output) | {self._key: spent}
        text = msgspec.json.format(msgspec.json.encode(times), indent=1)
        write_atomic(self._output / TIMES, text + b"\n")


def _children_cpu() -> float:
    """CPU seconds of all children that have ended, and of theirs."""
    times = os.times()
    return times.children_user + times.children_system


class _Journal:
    """``cells.jsonl``, open to append."""

    def __init__(self, path: Path) -> None:
        torn = path.exists() and path.stat().st_size > 0 and not _ends_whole(path)
        self._file = path.open("ab")
        self._synced = time.monotonic()
        if torn:  # a run was killed while it wrote
            self._file.write(b"\n")

    def append(self, line: Line) -> None:
        self._file.write(msgspec.json.encode(line) + b"\n")
        self._file.flush()
        if time.monotonic() - self._synced > SYNC_SECONDS:
            os.fsync(self._file.fileno())
            self._synced = time.monotonic()

    def close(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()


def _ends_whole(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _check(suite: Suite, cells: Sequence[Cell]) -> None:
    """Raises ValueError for cells that could not be told apart or paired."""
    if not cells:
        raise ValueError(f"suite {suite.name} has no cells: are the traces there that it needs?")
    if len(set(cells)) < len(cells):
        raise ValueError(f"suite {suite.name} has two equal cells")
    one: dict[tuple[str, str], Cell] = {}
    for cell in cells:
        first = one.setdefault((cell.setting, cell.window), cell)
        if (cell.seed, cell.trace) != (first.seed, first.trace):
            raise ValueError(
                f"suite {suite.name}: {cell.arm} and {first.arm} differ in seed or trace on window "
                f"{cell.window!r} in {cell.setting!r}, so they would not be paired"
            )


def run(
    suite: Suite,
    size: Size,
    output: Path,
    *,
    workers: int,
    fresh: bool,
    console: Console,
    cells: Sequence[Cell] | None = None,
) -> Outcome:
    """Work off what is not done of a suite (or of ``cells`` of it), showing progress.

    What is done lies in ``output / "cells.jsonl"``; what the suite fitted in a folder beside it
    that is named after suite and fingerprint. ``fresh`` works everything off anew.

    Raises:
        RuntimeError: the suite could not prepare, or another run uses ``output``.
        ValueError: the suite's cells make no sense.
    """
    output.mkdir(parents=True, exist_ok=True)
    try:
        with sole(output, "benchmark"):
            return _run(suite, size, output, workers, fresh, console, cells)
    except LockedError as error:
        raise RuntimeError(
            f"another benchmark writes to {output}: wait for it, or name another --output"
        ) from error


def _run(
    suite: Suite,
    size: Size,
    output: Path,
    workers: int,
    fresh: bool,
    console: Console,
    cells: Sequence[Cell] | None,
) -> Outcome:
    cells = suite.cells(size) if cells is None else cells
    _check(suite, cells)
    basis = fingerprint(suite, size)
    folder = output / suite.name / basis
    if fresh:
        shutil.rmtree(folder, ignore_errors=True)
    path = output / "cells.jsonl"
    known = {} if fresh else read_lines(path)
    outcome, todo = Outcome(basis), []
    for cell in cells:
        line = known.get(digest(cell, basis))
        if line is None:
            todo.append(cell)
        else:
            outcome.figures[cell] = line.figures
    outcome.resumed = len(outcome.figures)
    if todo:
        folder.mkdir(parents=True, exist_ok=True)
        with _Meter(output, f"{suite.name} {size}", outcome, fresh=fresh):
            prepare(
                reference(suite), size, folder, lambda text: console.print(f"{suite.name}: {text}")
            )
            _work_off(suite, todo, folder, basis, workers, _Journal(path), outcome, console)
    return outcome


def _work_off(
    suite: Suite,
    todo: Sequence[Cell],
    folder: Path,
    basis: str,
    workers: int,
    journal: _Journal,
    outcome: Outcome,
    console: Console,
) -> None:
    progress = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("left"), TimeRemainingColumn(), console=console,
    )  # fmt: skip
    total = len(todo) + outcome.resumed
    try:
        # Closed, so that the workers have ended whatever ends the loop.
        with progress, contextlib.closing(answers(reference(suite), todo, folder, workers)) as came:
            task = progress.add_task(suite.name, total=total, completed=outcome.resumed)
            for done, answer in enumerate(came, 1):
                _keep(answer, basis, journal, outcome, console)
                progress.advance(task)
                if not console.is_terminal and done * 10 // len(todo) > (done - 1) * 10 // len(
                    todo
                ):
                    console.print(f"{suite.name}: {done} of {len(todo)} cells")
    finally:
        journal.close()


def _keep(
    answer: Answer, basis: str, journal: _Journal, outcome: Outcome, console: Console
) -> None:
    cell = answer.cell
    if answer.error:
        outcome.failures.append((cell, answer.error))
        console.print(
            f"[red]failed[/red]: {cell.suite}, {cell.setting}, {cell.arm}, window {cell.window} of "
            f"{cell.trace}, seed {cell.seed}: {answer.error}",
            soft_wrap=True,
        )
        return
    journal.append(Line(digest(cell, basis), cell, answer.figures))
    outcome.figures[cell] = answer.figures
