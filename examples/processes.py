"""Starts processes, brings back those that die, ends them all; used by the examples.

A supervised process that is killed comes back with the same command line, as Kubernetes would
bring a pod back: kill any of them with ``kill -9`` and watch the others go on.
"""

import contextlib
import ctypes
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

_PR_SET_PDEATHSIG = 1
FULL = 1 << 20
"""Free bytes below which a process that ended is taken to have died of the disk."""
START_SECONDS = 300.0
"""How long a process may take to come up: a dozen start at once, on two cores or fewer."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PORTS = range(15_000, 32_000)
"""Where servers get their ports: below those that the kernel hands to outgoing connections, so
that the port of a server that is away is still free when it comes back."""
_given = set[int]()
"""Ports that somebody in this process has got; who binds one does so later, often minutes."""


class ExampleError(Exception):
    """An example cannot go on; the message says why and what to do."""


class StoppedError(Exception):
    """Ctrl-C, SIGTERM, or a terminal that was closed; says which signal."""


def free_ports(count: int) -> list[int]:
    """Ports of the loopback address that nobody listens on now and that no earlier call gave away.

    Raises OSError for none.
    """
    with contextlib.ExitStack() as stack:
        found: list[int] = []
        for port in random.SystemRandom().sample(PORTS, len(PORTS)):
            if len(found) == count:
                break
            if port in _given:
                continue
            opened = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                opened.bind(("127.0.0.1", port))
                found.append(port)
    if len(found) < count:
        raise OSError(f"fewer than {count} free ports on loopback; end what listens there")
    _given.update(found)
    return found


def check_free(port: int) -> None:
    """Raise ExampleError where somebody listens on the dashboard's port already."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the hub binds it
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ExampleError(
                f"port {port} of the dashboard is taken ({error.strerror}); name another one, or "
                "let --dashboard-port 0 take a free one"
            ) from error


def fedsched(*arguments: str) -> list[str]:
    """The command line of ``fedsched`` with these arguments, by this interpreter."""
    return [sys.executable, "-m", "common.cli", *arguments]


def _die_with_parent() -> None:
    """In the child: be killed by the kernel when the thread that started it ends (Linux only).

    SIGKILL, because a kube-apiserver whose etcd is gone never gets to the end of a SIGTERM.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@dataclass
class Process:
    """One child process with its log file. It ends with the thread that started it."""

    name: str
    command: list[str]
    log: Path
    restart: bool = True
    """Whether a supervisor brings it back when it dies by itself."""
    popen: subprocess.Popen[bytes] | None = None
    restarts: int = 0

    def start(self) -> None:
        """Start it; its output goes to the end of its log."""
        environment = os.environ | {
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "OMP_NUM_THREADS": "1",
        }
        with self.log.open("ab") as log:
            self.popen = subprocess.Popen(
                self.command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the parent, which ends them in order
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,
            )

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self.popen is not None and self.popen.poll() is None

    def kill(self) -> None:
        """End it by SIGKILL, as a crash would, and wait until it has gone."""
        if self.popen is not None:
            self.popen.kill()
            self.popen.wait()

    def stop(self, seconds: float = 10.0) -> None:
        """End it by SIGTERM; by SIGKILL where it takes longer than so many seconds."""
        if self.popen is None:
            return
        self.popen.terminate()
        try:
            self.popen.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()

    def last_words(self) -> str:
        """The end of its log."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        lines = text.splitlines()[-8:]
        if shutil.disk_usage(self.log.parent).free < FULL:
            lines.append("error: the disk is full; free some of it, or name another with --out")
        return "\n".join(lines)

    def last_line(self) -> str:
        """The last message of its log, in one line."""
        _, error, text = self.last_words().rpartition("error: ")
        return " ".join((error + text).split())[-300:]


@dataclass
class Supervisor:
    """All processes of one run of an example."""

    say: Callable[[str], None]
    processes: list[Process] = field(default_factory=list)
    interrupted: str = ""
    """The signal that ends the run; empty while there was none."""
    starting: bool = False
    """Whether a process is being started: an exception now would lose sight of it."""

    def interrupt(self, name: str) -> None:
        """A signal came: raise StoppedError, now or as soon as nothing can be lost by it."""
        self.interrupted = self.interrupted or name
        if not self.starting:
            self.check()

    @contextlib.contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Put off what :meth:`interrupt` would raise to the end of the block."""
        self.starting = True
        try:
            yield
        finally:
            self.starting = False
        self.check()

    def check(self) -> None:
        """Raise StoppedError once a signal came."""
        if self.interrupted:
            raise StoppedError(self.interrupted)

    def start(self, name: str, command: list[str], log: Path, *, restart: bool = True) -> Process:
        """Start and from now on watch a process."""
        self.check()
        process = Process(name, command, log, restart)
        with self._undisturbed():
            process.start()
            self.processes.append(process)
        return process

    def watch(self) -> None:
        """Bring back what died. Raises ExampleError for a process that cannot be brought back."""
        self.check()
        for process in self.processes:
            assert process.popen is not None
            status = process.popen.poll()
            if status is None:
                continue
            how = f"signal {-status}" if status < 0 else f"status {status}"
            if not process.restart or process.restarts >= 20:
                raise ExampleError(
                    f"{process.name} ended with {how}. The end of {process.log}:\n"
                    f"{process.last_words()}"
                )
            process.restarts += 1
            why = f" ({process.last_line()})" if status > 0 else ""
            self.say(f"{process.name} ended with {how}{why}; starting it again")
            with self._undisturbed():
                process.start()

    def wait_for(
        self, process: Process, ready: Path, seconds: float = START_SECONDS
    ) -> dict[str, object]:
        """Wait until a process wrote its ready file, and return what is in it.

        Raises ExampleError, with the end of its log, where it died or took longer.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.check()
            if ready.exists():
                found: dict[str, object] = json.loads(ready.read_text())
                return found
            if not process.alive:
                break
            time.sleep(0.05)
        raise ExampleError(
            f"{process.name} did not come up. The end of {process.log}:\n{process.last_words()}"
        )

    def stop(self) -> None:
        """End every process: politely, then for certain.

        What cannot be brought back is the world of the others, which say goodbye to it: it ends
        after them.
        """
        for world in (False, True):
            running = [p for p in self.processes if p.alive and p.restart != world]
            for process in running:
                assert process.popen is not None
                process.popen.terminate()
            deadline = time.monotonic() + 10.0
            for process in running:
                process.stop(max(deadline - time.monotonic(), 0.1))
        self.processes.clear()


@contextlib.contextmanager
def stoppable(supervisor: Supervisor) -> Iterator[None]:
    """Turn the first signal into :class:`StoppedError`; end all processes, however it ends.

    Further signals are passed over: an impatient second Ctrl-C must not leave processes behind.
    Once stopped, they are so to the end of this process, whose exit status is to say how it ended.
    The interpreter swallows what is raised inside some of its callbacks, so the supervisor is told
    as well and raises it at its next step.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        del frame
        if not supervisor.interrupted:
            supervisor.interrupt(signal.Signals(number).name)

    def pass_over() -> None:
        for name in SIGNALS:
            signal.signal(name, signal.SIG_IGN)

    before = {name: signal.signal(name, stop) for name in SIGNALS}
    try:
        yield
    finally:
        pass_over()
        supervisor.stop()
        if not supervisor.interrupted:
            for name, handler in before.items():
                signal.signal(name, handler)
