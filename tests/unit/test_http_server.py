"""The HTTP server of the extender keeps the protocol's rules that kube-scheduler's client needs."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest

from agent.scheduling import http_server
from agent.scheduling.http_server import Answer, Request, listening


def _echo(request: Request) -> Answer:
    return Answer(request.body, "application/octet-stream")


def _broken(_: Request) -> Answer:
    raise ZeroDivisionError


ROUTES = {("POST", "/echo"): _echo, ("GET", "/broken"): _broken}


@asynccontextmanager
async def wire() -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    async with listening(ROUTES, "127.0.0.1", 0) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            yield reader, writer
        finally:
            writer.close()


def post(body: bytes, *headers: bytes) -> bytes:
    lines = [b"POST /echo HTTP/1.1", b"Host: x", b"Content-Length: %d" % len(body), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


async def head(reader: asyncio.StreamReader) -> bytes:
    return await reader.readuntil(b"\r\n\r\n")


async def test_requests_in_pieces_and_in_heaps_are_answered_in_their_order() -> None:
    async with wire() as (reader, writer):
        for byte in post(b"one"):
            writer.write(bytes([byte]))
            await writer.drain()
        writer.write(post(b"two") + post(b"three"))
        for body in (b"one", b"two", b"three"):
            assert b"HTTP/1.1 200 OK\r\n" in (found := await head(reader))
            assert b"Content-Length: %d\r\n" % len(body) in found
            assert await reader.readexactly(len(body)) == body


async def test_a_body_of_megabytes_and_one_in_chunks_come_back_whole() -> None:
    async with listening(ROUTES, "127.0.0.1", 0) as port, aiohttp.ClientSession() as session:
        url, large = f"http://127.0.0.1:{port}/echo", bytes(range(256)) * (1 << 14)

        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(3):
                yield b"piece"

        for sent, back in ((large, large), (pieces(), b"piece" * 3)):
            async with session.post(url, data=sent) as answer:
                assert await answer.read() == back


async def test_what_is_not_there_or_goes_wrong_has_its_own_status_and_the_next_is_answered() -> (
    None
):
    async with listening(ROUTES, "127.0.0.1", 0) as port, aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{port}"
        asked = [("GET", "/no"), ("GET", "/echo"), ("GET", "/broken"), ("POST", "/echo?timeout=1s")]
        found = []
        for method, path in asked:
            async with session.request(method, url + path) as answer:
                found.append(answer.status)
    assert found == [404, 405, 500, 200]


@pytest.mark.parametrize("nonsense", [b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/9.9 x\r\n\r\n"])
async def test_what_is_no_http_gets_a_400_and_a_closed_connection(nonsense: bytes) -> None:
    async with wire() as (reader, writer):
        writer.write(nonsense)
        found = await reader.read()
    assert found.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert b"Connection: close\r\n" in found


async def test_a_request_beyond_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "MAX_REQUEST_BYTES", 10)
    async with wire() as (reader, writer):
        writer.write(post(b"x" * 10) + post(b"x" * 11))
        assert b" 200 " in await head(reader)
        assert b" 413 " in await reader.read()


async def test_who_waits_for_leave_to_send_its_body_gets_it() -> None:
    async with wire() as (reader, writer):
        writer.write(post(b"x" * 5, b"Expect: 100-continue")[:-5])
        assert await head(reader) == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"x" * 5)
        assert b" 200 " in await head(reader)


async def test_an_idle_connection_is_closed_and_one_in_use_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, ahead = asyncio.get_running_loop(), [0.0]
    tick = loop.time
    monkeypatch.setattr(loop, "time", lambda: tick() + ahead[0])

    async def later(part: float) -> None:
        ahead[0] += part * http_server.KEEP_ALIVE_SECONDS
        for _ in range(5):  # what is due by then comes to pass
            await asyncio.sleep(0)

    async with wire() as (reader, writer):
        for _ in range(3):
            await later(0.7)
            writer.write(post(b"x"))
            assert b" 200 " in await head(reader)
            assert await reader.readexactly(1) == b"x"
        await later(1.1)
        assert await reader.read() == b""


async def test_a_client_that_asks_for_it_is_let_go_after_the_answer() -> None:
    async with wire() as (reader, writer):
        writer.write(post(b"x", b"Connection: close"))
        assert (await reader.read()).endswith(b"Connection: close\r\n\r\nx")


async def test_the_end_of_listening_closes_connections_and_the_port() -> None:
    async with listening(ROUTES, "127.0.0.1", 0) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(b"x"))
        await head(reader)
    assert await reader.read() == b"x"
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)
    writer.close()
