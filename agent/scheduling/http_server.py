"""A small HTTP/1.1 server for answers that wait for nothing: extender, health checks, metrics.

Used by ``agent.scheduling.serve`` and the latency benchmark. kube-scheduler places one pod after
the other, so what a request costs is added to every pod, and a web framework would take a third of
it. httptools, which is Node.js's parser, reads the requests. Answers come whole, with their length,
in the order of the requests.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from http import HTTPStatus
from typing import NamedTuple

import httptools

log = logging.getLogger(__name__)
MAX_REQUEST_BYTES = 256 << 20
"""5,000 whole node objects are about 60 MB."""
KEEP_ALIVE_SECONDS = 120.0
"""Above the 90 s after which kube-scheduler's client drops an idle connection itself."""


class Request(NamedTuple):
    """One request, read whole."""

    body: bytes
    transport: asyncio.Transport
    """The connection that it came by."""


class Answer(NamedTuple):
    """One answer."""

    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    status: int = 200


Routes = Mapping[tuple[str, str], Callable[[Request], Answer]]
"""What answers, by method and path."""


def text(status: int, message: str) -> Answer:
    """A line of text."""
    return Answer(f"{message}\n".encode(), status=status)


class _Connection(asyncio.Protocol):
    """One client's connection; httptools calls the ``on_`` methods."""

    def __init__(self, routes: Routes, connections: "set[_Connection]") -> None:
        self._routes, self._connections = routes, connections
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._heard = self._loop.time()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._connections.add(self)
        self._idle = self._loop.call_later(KEEP_ALIVE_SECONDS, self._close_if_idle)

    def connection_lost(self, _: Exception | None) -> None:
        self._connections.discard(self)
        self._idle.cancel()

    def close(self) -> None:
        """Close it once what was answered is sent."""
        self._transport.close()

    def _close_if_idle(self) -> None:
        left = self._heard + KEEP_ALIVE_SECONDS - self._loop.time()
        if left <= 0.0:
            self.close()
        else:
            self._idle = self._loop.call_later(left, self._close_if_idle)

    def pause_writing(self) -> None:
        """Hear no more of a client that does not read its answers."""
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        """It reads again."""
        self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        if self._transport.is_closing():
            return
        self._heard = self._loop.time()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._send(text(HTTPStatus.BAD_REQUEST, "no other protocol is spoken here"), False)
        except httptools.HttpParserError as error:
            self._send(text(HTTPStatus.BAD_REQUEST, f"not an HTTP request: {error}"), False)

    def on_message_begin(self) -> None:
        self._url, self._body, self._size, self._expects = b"", list[bytes](), 0, False

    def on_url(self, part: bytes) -> None:
        self._url += part

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"expect" and value.lower() == b"100-continue":
            self._expects = True

    def on_headers_complete(self) -> None:
        if self._expects:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, part: bytes) -> None:
        self._size += len(part)
        if self._size <= MAX_REQUEST_BYTES:
            self._body.append(part)
        elif not self._transport.is_closing():
            limit = f"a request holds at most {MAX_REQUEST_BYTES} bytes"
            self._send(text(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, limit), False)

    def on_message_complete(self) -> None:
        if self._transport.is_closing():
            return
        method, path = self._parser.get_method().decode(), self._url.partition(b"?")[0].decode()
        self._send(self._answer(method, path), self._parser.should_keep_alive())

    def _answer(self, method: str, path: str) -> Answer:
        handler = self._routes.get((method, path))
        if handler is None:
            if any(path == known for _, known in self._routes):
                return text(HTTPStatus.METHOD_NOT_ALLOWED, f"{path} takes no {method}")
            return text(HTTPStatus.NOT_FOUND, f"there is no {path}")
        try:
            return handler(Request(b"".join(self._body), self._transport))
        except Exception:
            log.exception("%s %s failed", method, path)
            return text(HTTPStatus.INTERNAL_SERVER_ERROR, "failed; see the agent's log")

    def _send(self, answer: Answer, keep: bool) -> None:
        head = (
            f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}\r\n"
            f"Content-Type: {answer.content_type}\r\nContent-Length: {len(answer.body)}\r\n"
        )
        end = b"\r\n" if keep else b"Connection: close\r\n\r\n"
        self._transport.write(b"".join((head.encode(), end, answer.body)))
        if not keep:
            self.close()


@contextlib.asynccontextmanager
async def listening(routes: Routes, host: str, port: int) -> AsyncIterator[int]:
    """Answer at ``host`` for as long as the context lasts; its bound port. Raises OSError."""
    connections: set[_Connection] = set()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Connection(routes, connections), host, port)
    try:
        yield int(server.sockets[0].getsockname()[1])
    finally:
        server.close()
        for connection in tuple(connections):
            connection.close()
        await server.wait_closed()
