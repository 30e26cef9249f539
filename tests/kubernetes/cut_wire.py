"""A TCP connection that a test can cut or slow down; called by the tests of safety."""

import asyncio
import contextlib
import json
import threading
from pathlib import Path

import yaml

from examples.processes import free_ports
from tests.kubernetes.member import WAIT


class Wire:
    """A proxy to a port of loopback, in a thread of its own; a context manager."""

    def __init__(self, target: int) -> None:
        self.port = free_ports(1)[0]
        self.delay = 0.0
        """Seconds by which everything is late."""
        self.unanswered: set[asyncio.StreamReader] = set()
        """Callers that have asked something, are there still and have heard nothing."""
        self._target = target
        self._open = threading.Event()
        self._open.set()
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="wire", daemon=True)

    def __enter__(self) -> "Wire":
        self._thread.start()
        assert self._ready.wait(WAIT)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(WAIT)

    def cut(self) -> None:
        """Nothing goes through any more; connections stay and are accepted."""
        self._open.clear()

    def mend(self) -> None:
        """Everything goes through again, also what waited."""
        self._open.set()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        server = await asyncio.start_server(self._connect, "127.0.0.1", self.port)
        self._ready.set()
        await self._stop.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connect(self, near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        try:
            far, there = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            back.close()
            return
        for reader, writer in ((near, there), (far, back)):
            task = asyncio.create_task(self._pump(reader, writer, near))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        caller: asyncio.StreamReader,
    ) -> None:
        try:
            while data := await reader.read(1 << 16):
                if reader is caller:
                    self.unanswered.add(caller)
                else:
                    self.unanswered.discard(caller)
                await asyncio.sleep(self.delay)
                while not self._open.is_set():
                    await asyncio.sleep(0.01)
                writer.write(data)
                await writer.drain()
        except OSError:
            pass  # the other end has gone, and so does this one
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
            self.unanswered.discard(caller)


def through(kubeconfig: Path, wire: Wire, target: Path) -> Path:
    """A copy of a kubeconfig at ``target`` whose API server is reached by the wire."""
    content = yaml.safe_load(kubeconfig.read_text())
    for entry in content["clusters"]:
        entry["cluster"]["server"] = f"https://127.0.0.1:{wire.port}"
    target.write_text(json.dumps(content))
    return target
