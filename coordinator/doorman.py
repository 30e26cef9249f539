"""Notices connections that fail the TLS handshake; stands before the gRPC server of the link.

gRPC refuses a peer without a certificate, or with one of another CA, inside its core and tells
nobody. The doorman accepts the members' connections, passes the bytes on unread to the server on
loopback, which alone holds the keys, and reports a connection that the server ended before any
session was seen on it, with the address that it came from.
"""

import asyncio
from collections.abc import Callable

_CHUNK = 64 * 1024


class Doorman:
    """A TCP relay in front of a server on loopback; lives in one event loop."""

    def __init__(self, upstream_port: int, on_refused: Callable[[str], None]) -> None:
        """Relay to 127.0.0.1:``upstream_port``; ``on_refused`` gets the remote ``host:port``."""
        self._upstream_port = upstream_port
        self._on_refused = on_refused
        self._server: asyncio.Server | None = None
        self._stopping = False
        self._remote: dict[int, str] = {}
        """Remote address by the local port of the connection to the server."""
        self._identified: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self, host: str, port: int) -> int:
        """Listen; return the bound port."""
        self._server = await asyncio.start_server(self._serve, host, port)
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def stop(self) -> None:
        """Close the listener and every connection."""
        self._stopping = True
        if self._server is not None:
            self._server.close()
        tasks = list(self._tasks)
        for writer in list(self._writers):
            writer.close()
        await asyncio.gather(*tasks, return_exceptions=True)

    def identify(self, peer: str) -> str:
        """Note that a session began on gRPC's ``peer``; return the remote address behind it."""
        tail = peer.rpartition(":")[2]
        port = int(tail) if tail.isdecimal() else -1
        if port in self._remote:  # else the connection is gone, and its port may be another's soon
            self._identified.add(port)
        return self._remote.get(port, peer)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._upstream_port)
        except OSError:
            writer.close()
            return
        port: int = up_writer.get_extra_info("sockname")[1]
        name = writer.get_extra_info("peername")
        self._remote[port] = f"{name[0]}:{name[1]}" if name else "unknown"
        self._writers |= {writer, up_writer}
        inward = asyncio.create_task(_pump(reader, up_writer))
        outward = asyncio.create_task(_pump(up_reader, writer))
        ended: list[asyncio.Task[bool]] = []
        for pump in (inward, outward):
            pump.add_done_callback(ended.append)
        try:
            await asyncio.wait({inward, outward}, return_when=asyncio.FIRST_COMPLETED)
            # A client that merely knocks (a health check) or hangs up itself was not refused. Both
            # pumps may have ended by now: the first one tells.
            by_client = ended[0].result() == (ended[0] is inward)
            if not by_client and not self._stopping and port not in self._identified:
                self._on_refused(self._remote[port])
        finally:
            for pump in (inward, outward):
                pump.cancel()
            await asyncio.gather(inward, outward, return_exceptions=True)
            for end in (writer, up_writer):
                end.close()
            self._writers -= {writer, up_writer}
            self._remote.pop(port, None)
            self._identified.discard(port)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """Pass bytes on until an end closes; whether it was the end that they come from."""
    while True:
        try:
            data = await reader.read(_CHUNK)
        except ConnectionError:
            return True
        if not data:
            return True
        try:
            writer.write(data)
            await writer.drain()
        except ConnectionError:
            return False
