"""An API server that replays: list and watch of a fleet of any size, with faults on demand.

Used by ``examples.lab.scale`` and the tests. It speaks what the agent's reflector hears of a real
one (pages with continue tokens, each list one snapshot; versions, bookmarks, 410 by status and by
ERROR event, ``Date``), fast enough that the agent's own work is what is measured, and it breaks off
or talks nonsense when told to.
"""

import asyncio
import bisect
import dataclasses
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from email.utils import formatdate
from typing import Literal

from aiohttp import web

from examples.lab.fleet import RUNNING, Fleet, NodeState, PodState

Kind = Literal["nodes", "pods"]
ListFault = Literal["gone", "cut", "error"]
GONE = b'{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Expired","code":410}'
ERROR = b'{"kind":"Status","apiVersion":"v1","status":"Failure","message":"broken","code":500}'
HISTORY = 100_000
"""Events that are kept for watches that begin in the past."""
_BATCH = 256
"""Events that go out in one write at most."""


class _Log:
    """The events of one kind of object: versions, lines and a wake-up for those who follow."""

    def __init__(self) -> None:
        self.versions: list[int] = []
        self.lines: list[bytes] = []
        self.forgotten = 0  # the oldest version that a watch may begin at
        self.dropped = 0  # events before the first that is kept
        self.news = asyncio.Event()
        self.generation = 0  # goes up to break all watches off
        self.mid_line = False
        self.silent = False

    def append(self, version: int, line: bytes) -> None:
        self.versions.append(version)
        self.lines.append(line)
        if len(self.lines) > 2 * HISTORY:
            self.cut(HISTORY)
        self.wake()

    def cut(self, count: int) -> None:
        """Forget the oldest events."""
        if count:
            self.forgotten = self.versions[count - 1]
        del self.versions[:count], self.lines[:count]
        self.dropped += count

    def wake(self) -> None:
        self.news.set()
        self.news = asyncio.Event()


class StreamServer:
    """Serves one fleet; change it through the methods, so that the watches hear of it."""

    def __init__(
        self,
        fleet: Fleet,
        *,
        page: int = 500,
        bookmark_seconds: float = 60.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``page`` bounds a list's pages; ``clock`` is the API server's own, Unix seconds."""
        self.fleet, self._page, self._clock = fleet, page, clock
        self._bookmark_seconds = bookmark_seconds
        self.version = 1
        self.list_faults: dict[Kind, list[ListFault]] = {"nodes": [], "pods": []}
        """What happens instead of the next pages but the first: 410, half a page, or a 500."""
        self.spoilt: set[int] = set()
        """Numbers of pods that a list shows with a field of another type than it has."""
        self.counts: Counter[str] = Counter()
        """``lists``, ``pages`` and ``watches``, each with its kind."""
        self.url = ""
        self._logs: dict[Kind, _Log] = {"nodes": _Log(), "pods": _Log()}
        self._snapshots: dict[int, tuple[int, list[tuple[int, NodeState | PodState]]]] = {}

    # Changes --------------------------------------------------------------------------------

    def add_pod(self, number: int, state: PodState) -> None:
        """A new pod."""
        self.fleet.pods[number] = state
        self._tell_pod("ADDED", number)

    def start_pod(self, number: int, node: str) -> None:
        """kube-scheduler binds it, and it runs."""
        pod = self.fleet.pods[number]
        pod.node, pod.phase, pod.started = node, RUNNING, self._clock()
        self._tell_pod("MODIFIED", number)

    def change_pod(self, number: int, **changes: object) -> None:
        """Fields of its state change."""
        for name, value in changes.items():
            setattr(self.fleet.pods[number], name, value)
        self._tell_pod("MODIFIED", number)

    def delete_pod(self, number: int) -> None:
        """It is gone."""
        self._tell_pod("DELETED", number)
        del self.fleet.pods[number]

    def change_node(self, number: int, *, ready: bool = True) -> None:
        """A node is new, or its heartbeat comes with this readiness."""
        state = self.fleet.nodes.setdefault(number, NodeState(heard=0.0))
        state.ready, state.heard = ready, self._clock()
        self.version += 1
        state.version = self.version
        self.say("nodes", "MODIFIED", self.fleet.node(number, state))

    def delete_node(self, number: int) -> None:
        """It is gone."""
        state = self.fleet.nodes.pop(number)
        self.version += 1
        state.version = self.version
        self.say("nodes", "DELETED", self.fleet.node(number, state))

    def _tell_pod(self, what: str, number: int) -> None:
        state = self.fleet.pods[number]
        self.version += 1
        state.version = self.version
        self.say("pods", what, self.fleet.pod(number, state))

    # Faults ---------------------------------------------------------------------------------

    def say(self, kind: Kind, what: str, data: bytes) -> None:
        """Send an event with this object, whatever it is."""
        self.send(kind, b'{"type":"%s","object":%s}\n' % (what.encode(), data))

    def send(self, kind: Kind, line: bytes) -> None:
        """Send these bytes to whoever watches."""
        self._logs[kind].append(self.version, line)

    def compact(self, kind: Kind) -> None:
        """No watch may begin before now; those that are open and have heard of now go on."""
        log = self._logs[kind]
        log.cut(len(log.lines))
        log.forgotten = self.version
        log.wake()

    def forget(self, kind: Kind) -> None:
        """Compact at a version that nobody has heard of: all open watches end with a 410."""
        self.version += 1
        self.compact(kind)

    def break_off(self, kind: Kind, *, mid_line: bool = False) -> None:
        """Drop the connections of all watches, in the middle of a line if so told."""
        log = self._logs[kind]
        log.generation += 1
        log.mid_line = mid_line
        log.wake()

    def fall_silent(self, kind: Kind, silent: bool = True) -> None:
        """Watches stay open and say nothing, no bookmark either."""
        self._logs[kind].silent = silent
        self._logs[kind].wake()

    # Serving --------------------------------------------------------------------------------

    def _headers(self) -> dict[str, str]:
        return {
            "Date": formatdate(self._clock(), usegmt=True),
            "Content-Type": "application/json",
        }

    async def _collection(self, request: web.Request) -> web.StreamResponse:
        kind: Kind = "nodes" if request.match_info["kind"] == "nodes" else "pods"
        if "watch" in request.query:
            self.counts[f"watches {kind}"] += 1
            return await self._watch(request, kind)
        return await self._list(request, kind)

    async def _list(self, request: web.Request, kind: Kind) -> web.StreamResponse:
        token = request.query.get("continue", "")
        if not token:
            self.counts[f"lists {kind}"] += 1
            found: dict[int, NodeState] | dict[int, PodState] = getattr(self.fleet, kind)
            # A snapshot, as etcd gives it: what changes while it is paged is in the watch.
            snapshot = [(number, dataclasses.replace(state)) for number, state in found.items()]
            name, start = max(self._snapshots, default=0) + 1, 0
            self._snapshots[name] = self.version, snapshot
        else:
            name, start = map(int, token.split("."))
            if self.list_faults[kind]:
                del self._snapshots[name]
                return await self._fail(request, self.list_faults[kind].pop(0))
        self.counts[f"pages {kind}"] += 1
        version, snapshot = self._snapshots[name]
        end = start + min(self._page, int(request.query["limit"]))
        parts = []
        for number, state in snapshot[start:end]:
            if isinstance(state, PodState):
                data = self.fleet.pod(number, state)
                if number in self.spoilt:
                    data = data.replace(b'"nodeName":"', b'"nodeName":7,"was":"')
                parts.append(data)
            else:
                parts.append(self.fleet.node(number, state))
        more = b""
        if end < len(snapshot):
            more = b',"continue":"%d.%d"' % (name, end)
        else:
            del self._snapshots[name]
        head = b'{"kind":"List","metadata":{"resourceVersion":"%d"%s},"items":[' % (version, more)
        body = head + b",".join(parts) + b"]}"
        return web.Response(body=body, headers=self._headers())

    async def _fail(self, request: web.Request, fault: ListFault) -> web.StreamResponse:
        if fault == "gone":
            return web.Response(status=410, body=GONE, headers=self._headers())
        if fault == "error":
            return web.Response(status=500, body=ERROR, headers=self._headers())
        answer = web.StreamResponse(headers=self._headers())
        answer.content_length = 1_000_000
        await answer.prepare(request)
        await answer.write(b'{"kind":"List","items":[{"metadata":{"na')
        _abort(request)
        return answer

    async def _watch(self, request: web.Request, kind: Kind) -> web.StreamResponse:
        log, since = self._logs[kind], int(request.query["resourceVersion"])
        answer = web.StreamResponse(headers=self._headers())
        await answer.prepare(request)
        at = log.dropped + bisect.bisect_right(log.versions, since)
        generation, ends = log.generation, time.monotonic() + float(request.query["timeoutSeconds"])
        while time.monotonic() < ends:
            news = log.news
            if since < log.forgotten and at <= log.dropped:
                await answer.write(b'{"type":"ERROR","object":%s}\n' % GONE)
                return answer
            if log.generation != generation:
                if log.mid_line:
                    await answer.write(b'{"type":"MODIFIED","object":{"metadata":{"na')
                _abort(request)
                return answer
            lines = [] if log.silent else log.lines[at - log.dropped : at - log.dropped + _BATCH]
            if lines:
                at += len(lines)
                since = log.versions[at - log.dropped - 1]
                await answer.write(b"".join(lines))
                continue
            try:
                async with asyncio.timeout(min(self._bookmark_seconds, ends - time.monotonic())):
                    await news.wait()
            except TimeoutError:
                if not log.silent:
                    since = self.version
                    await answer.write(
                        b'{"type":"BOOKMARK","object":{"metadata":{"resourceVersion":"%d"}}}\n'
                        % since
                    )
        return answer

    @asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator["StreamServer"]:
        """Serve on loopback for as long as the context lasts; :attr:`url` says where."""
        app = web.Application()
        app.router.add_get("/api/v1/{kind:nodes|pods}", self._collection)
        runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True
        )
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()


def _abort(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()
