"""An extender that writes down what a real kube-scheduler asks and answers as a test says.

Called by the tests of kube-scheduler's behaviour. It is a plain HTTP server on loopback, in a
thread of its own so that a test may wait for kube-scheduler with ordinary calls.
"""

import asyncio
import json
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

WAIT = 240.0
"""Longest wait for something that must happen, seconds; it only bounds a failing test."""

LAST_CHUNK = 0.1
"""By how much the end of a chunked answer, which has no content, is behind the rest, seconds."""


@dataclass(frozen=True)
class Call:
    """One request of kube-scheduler."""

    verb: str
    body: bytes
    headers: dict[str, str]
    connection: int
    """The client's port: one for each TCP connection."""
    time: float
    """When it came, on the monotonic clock, seconds."""
    args: dict[str, Any] = field(repr=False)

    @property
    def pod(self) -> str:
        """The pod's name."""
        return str(self.args["Pod"]["metadata"]["name"])

    @property
    def nodes(self) -> list[str]:
        """Names of the candidates, in either form of the request."""
        if self.args["NodeNames"] is not None:
            return list(self.args["NodeNames"])
        return [item["metadata"]["name"] for item in self.args["Nodes"]["items"]]


@dataclass(frozen=True)
class Answer:
    """What to answer; ``chunked`` sends it without a Content-Length."""

    body: bytes
    status: int = 200
    chunked: bool = False
    delay: float = 0.0
    """Seconds before the answer."""


Reply = Callable[[Call], Answer]


def scores(**points: Any) -> Reply:
    """A prioritize answer with these scores by node (underscores stand for dashes)."""
    return lambda _: as_json(
        [{"Host": node.replace("_", "-"), "Score": score} for node, score in points.items()]
    )


def as_json(value: Any) -> Answer:
    """The value as JSON."""
    return Answer(json.dumps(value).encode())


def keep_all(call: Call) -> Answer:
    """A filter answer that keeps every node."""
    if call.args["NodeNames"] is None:
        return as_json({"Nodes": call.args["Nodes"]})
    return as_json({"NodeNames": call.nodes})


def no_opinion(_: Call) -> Answer:
    """An empty prioritize answer."""
    return as_json([])


class RecordingExtender:
    """The server; a context manager. ``replies`` maps a verb to what it answers."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.replies: dict[str, Reply] = {"filter": keep_all, "prioritize": no_opinion}
        self.url = ""
        self._calls: list[Call] = []
        self._tls = tls
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="recording-extender", daemon=True)

    def __enter__(self) -> "RecordingExtender":
        self._thread.start()
        assert self._ready.wait(WAIT)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(WAIT)
        assert not self._thread.is_alive()
        self._loop.close()

    def calls(self, pod: str = "", verb: str = "") -> list[Call]:
        """What was asked so far, about one pod and with one verb where these are given."""
        return [
            call for call in list(self._calls) if pod in ("", call.pod) and verb in ("", call.verb)
        ]

    def until(self, count: int, pod: str = "", verb: str = "") -> list[Call]:
        """Wait until there are so many calls."""
        end = time.monotonic() + WAIT
        while time.monotonic() < end:
            if len(found := self.calls(pod, verb)) >= count:
                return found
            time.sleep(0.01)
        raise AssertionError(f"waited in vain for {count} calls {verb} about {pod}")

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        app = web.Application(client_max_size=256 << 20)
        app.router.add_post("/{verb}", self._on_call)
        runner = web.AppRunner(app, access_log=None, keepalive_timeout=120.0, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=self._tls).start()
        scheme = "https" if self._tls else "http"
        self.url = f"{scheme}://127.0.0.1:{runner.addresses[0][1]}"
        self._ready.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _on_call(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        assert request.transport is not None
        call = Call(
            verb=request.match_info["verb"],
            body=body,
            headers=dict(request.headers),
            connection=request.transport.get_extra_info("peername")[1],
            time=time.monotonic(),
            args=json.loads(body),
        )
        self._calls.append(call)
        answer = self.replies[call.verb](call)
        await asyncio.sleep(answer.delay)
        if not answer.chunked:
            return web.Response(
                body=answer.body, status=answer.status, content_type="application/json"
            )
        response = web.StreamResponse(status=answer.status)
        response.enable_chunked_encoding()
        await response.prepare(request)
        await response.write(answer.body)
        await asyncio.sleep(LAST_CHUNK)
        await response.write_eof()
        return response
