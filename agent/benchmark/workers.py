"""Worker processes that work cells off; ``agent.benchmark.runner`` hands the cells out.

A worker that dies takes nothing with it but the cell that it was at: that is reported as failed,
another process takes the worker's place, and what was queued behind is handed out anew.
"""

import contextlib
import multiprocessing
import os
import signal
import traceback
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

from agent.benchmark.suite import Cell, Figures, Say, Size, Suite
from agent.benchmark.suites import load_suite
from agent.simulator import splits

AHEAD = 3
"""Cells that a worker holds, so that it never waits for the next."""
_SPAWN = multiprocessing.get_context("spawn")
# With one thread the libraries add up in one order, and two workers do not get in each other's way.
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


@dataclass(frozen=True)
class Answer:
    """What became of a cell: figures, or why there are none."""

    cell: Cell
    figures: Figures
    error: str = ""


def _why(error: BaseException) -> str:
    """The error and the line of ours where it arose, on one line."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


def work(suite: Suite, cell: Cell, folder: Path) -> Answer:
    """Work one cell off in this process."""
    try:
        figures = {name: float(value) for name, value in suite.run(cell, folder).items()}
        wrong = [n for n, value in figures.items() if not abs(value) < float("inf")]
        if wrong or not figures:
            raise ValueError(f"no finite figure: {', '.join(wrong) or 'none at all'}")
    except Exception as error:  # noqa: BLE001 - one cell must not cost the others
        return Answer(cell, {}, _why(error))
    return Answer(cell, figures)


def _serve(name: str, folder: Path, port: Connection) -> None:
    """A worker's life: cells in, answers out, until there is no more or the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to see
    suite = load_suite(name)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while (cell := port.recv()) is not None:
            port.send(work(suite, cell, folder))


def _prepare(name: str, size: Size, folder: Path, port: Connection) -> None:
    """Let a suite prepare itself: a text for each thing it says, then None or an error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with splits.training():  # what is fitted here has no business with what judges it
            load_suite(name).prepare(size, folder, port.send)
    except Exception as error:  # noqa: BLE001 - reported where the command runs
        port.send(RuntimeError(_why(error)))
    else:
        port.send(None)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Children started within have the libraries use one thread each."""
    before = {name: os.environ.get(name) for name in _ONE_THREAD}
    os.environ.update(_ONE_THREAD)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _end(process: SpawnProcess) -> None:
    process.terminate()
    process.join()


def prepare(name: str, size: Size, folder: Path, say: Say) -> None:
    """Let a suite prepare itself, in a process as its cells are worked off in.

    Raises:
        RuntimeError: it failed, or its process died.
    """
    ours, theirs = _SPAWN.Pipe(duplex=False)
    process = _SPAWN.Process(target=_prepare, args=(name, size, folder, theirs))
    with _one_thread():
        process.start()
    theirs.close()
    try:
        while (told := ours.recv()) is not None:
            if isinstance(told, RuntimeError):
                raise RuntimeError(f"suite {name} could not prepare: {told}")
            say(told)
    except EOFError:
        process.join()
        raise RuntimeError(
            f"suite {name} could not prepare: its process died with exit code {process.exitcode}"
        ) from None
    finally:
        _end(process)


@dataclass
class _Worker:
    process: SpawnProcess
    port: Connection
    held: deque[Cell] = field(default_factory=deque)
    """Handed out and not answered; it is at the first."""


def _start(name: str, folder: Path) -> _Worker:
    ours, theirs = _SPAWN.Pipe()
    process = _SPAWN.Process(target=_serve, args=(name, folder, theirs), daemon=False)
    with _one_thread():
        process.start()
    theirs.close()
    return _Worker(process, ours)


def answers(
    name: str, cells: Sequence[Cell], folder: Path, workers: int
) -> Generator[Answer, None, None]:
    """Work all cells off in ``workers`` processes; answers come as they are ready.

    The processes end with the iteration, however it ends.
    """
    todo, crew = deque(cells), [_start(name, folder) for _ in range(min(workers, len(cells)))]
    try:
        while todo or any(worker.held for worker in crew):
            for worker in crew:
                while todo and len(worker.held) < AHEAD:
                    cell = todo.popleft()
                    worker.held.append(cell)
                    with contextlib.suppress(OSError):  # a dead one is noticed below
                        worker.port.send(cell)
            ports = {worker.port: i for i, worker in enumerate(crew) if worker.held}
            for port in wait(list(ports)):
                assert isinstance(port, Connection)
                worker = crew[ports[port]]
                try:
                    answer = port.recv()
                except (EOFError, ConnectionResetError):
                    worker.process.join()
                    code, culprit = worker.process.exitcode, worker.held.popleft()
                    todo.extendleft(reversed(worker.held))
                    crew[ports[port]] = _start(name, folder)
                    yield Answer(culprit, {}, f"its process died with exit code {code}")
                else:
                    worker.held.popleft()
                    yield answer
    finally:
        for worker in crew:
            _end(worker.process)
