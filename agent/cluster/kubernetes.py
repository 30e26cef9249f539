"""The agent's side of the Kubernetes API: list/watch, node metrics, and lifting its own gate.

Called by ``agent.scheduling.serve``. The transport is an ``aiohttp.ClientSession`` given as an
argument, so that TLS and tokens are the caller's and a test needs only a small server. The stream
is read raw and decoded into slim records: that takes about 35 µs for a pod event.
"""

import asyncio
import logging
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Generic, TypeVar

import aiohttp
import msgspec

from agent.cluster import objects
from agent.cluster.records import GATE, Pod

NODES = "/api/v1/nodes"
PODS = "/api/v1/pods"
NODE_METRICS = "/apis/metrics.k8s.io/v1beta1/nodes"
PAGE = 500
QUICK_SECONDS = 1.0
"""A watch that ends sooner without an event counts as a failure: the next one waits longer."""

log = logging.getLogger(__name__)
Record = TypeVar("Record")
Sleep = Callable[[float], Awaitable[None]]


class GoneError(Exception):
    """410: the resource version is too old (or the continue token); list anew."""


class ApiError(Exception):
    """The API server answered with an error; ``status`` is the HTTP status."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}: {text[:300]}")
        self.status = status


class _ListMeta(msgspec.Struct, frozen=True, rename="camel"):
    resource_version: str = ""
    continue_: str | None = msgspec.field(default=None, name="continue")


class _List(msgspec.Struct, frozen=True):
    metadata: _ListMeta
    items: list[msgspec.Raw] | None = None


class _Event(msgspec.Struct, frozen=True):
    type: str
    object: msgspec.Raw


class _Versioned(msgspec.Struct, frozen=True, rename="camel"):
    class Meta(msgspec.Struct, frozen=True, rename="camel"):
        resource_version: str = ""

    metadata: Meta


class _Status(msgspec.Struct, frozen=True):
    code: int = 0
    message: str = ""


_decode_list = msgspec.json.Decoder(_List).decode
_decode_event = msgspec.json.Decoder(_Event).decode
_decode_version = msgspec.json.Decoder(_Versioned).decode
_decode_status = msgspec.json.Decoder(_Status).decode
FAILURES = (aiohttp.ClientError, asyncio.TimeoutError, OSError, ApiError, msgspec.DecodeError)
"""What a try at the API server may end in; every one of them is worth another try."""


class Backoff:
    """Waits that double from ``first`` to ``longest`` seconds, each with half of it random."""

    def __init__(self, rng: random.Random, *, first: float = 0.1, longest: float = 30.0) -> None:
        self._rng, self._first, self._longest = rng, first, longest
        self._tries = 0

    def reset(self) -> None:
        """Begin again with the first wait."""
        self._tries = 0

    def next(self) -> float:
        """The next wait, seconds."""
        whole = min(self._first * 2.0 ** min(self._tries, 30), self._longest)
        self._tries += 1
        return whole * self._rng.uniform(0.5, 1.0)


class Client:
    """The requests that the agent makes of one API server."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        *,
        watch_timeout: int = 300,
        read_timeout: float = 75.0,
    ) -> None:
        self._session, self._url = session, url.rstrip("/")
        self._watch_timeout = watch_timeout
        # A list may be long, but it does not fall silent; a watch may live for ever.
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=read_timeout)

    async def list(self, path: str) -> tuple[list[msgspec.Raw], str]:
        """All objects at ``path``, page by page, and the resource version to watch from.

        Raises GoneError where a page came too late, and one of :data:`FAILURES`.
        """
        found: list[msgspec.Raw] = []
        query = {"limit": str(PAGE)}
        while True:
            async with self._session.get(
                self._url + path, params=query, timeout=self._timeout
            ) as answer:
                await _check(answer)
                page = _decode_list(await answer.read())
            found += page.items or ()
            if not page.metadata.continue_:
                return found, page.metadata.resource_version
            query = {"limit": str(PAGE), "continue": page.metadata.continue_}

    async def watch(self, path: str, version: str) -> AsyncIterator[bytes]:
        """The lines of one watch from ``version`` on, until the server ends it.

        Raises GoneError and one of :data:`FAILURES`.
        """
        query = {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(self._watch_timeout),
        }
        async with self._session.get(
            self._url + path, params=query, timeout=self._timeout
        ) as answer:
            await _check(answer)
            yield b""  # the watch is open
            rest = bytearray()
            async for chunk in answer.content.iter_any():
                rest += chunk
                if b"\n" in chunk:
                    *lines, tail = bytes(rest).split(b"\n")
                    rest = bytearray(tail)
                    for line in lines:
                        if line.strip():
                            yield line

    async def node_usage(self) -> dict[str, tuple[float, float]]:
        """Measured use by node name: CPU cores and memory GiB. Raises one of :data:`FAILURES`."""
        items, _ = await self.list(NODE_METRICS)
        usage: dict[str, tuple[float, float]] = {}
        for item in items:
            try:
                name, cpu, memory = objects.node_usage(item)
            except objects.ObjectError as error:
                log.warning("passed over %s", error)
                continue
            usage[name] = (cpu, memory)
        return usage

    async def lift_gate(self, pod: Pod) -> None:
        """Take fedsched's gate off ``pod``; a gate or pod that is gone already is fine.

        A JSON patch that first tests which gate it removes: other controllers' gates stay. Raises
        one of :data:`FAILURES`; an ApiError of status 409 or 422 means that the gates moved
        meanwhile, and that the pod as the watch shows it next should be tried.
        """
        if GATE not in pod.gates:
            return
        place = f"/spec/schedulingGates/{pod.gates.index(GATE)}"
        patch = [
            {"op": "test", "path": f"{place}/name", "value": GATE},
            {"op": "remove", "path": place},
        ]
        async with self._session.patch(
            f"{self._url}/api/v1/namespaces/{pod.namespace}/pods/{pod.name}",
            data=msgspec.json.encode(patch),
            headers={"Content-Type": "application/json-patch+json"},
            timeout=aiohttp.ClientTimeout(total=10.0),
        ) as answer:
            if answer.status != 404:
                await _check(answer)


async def _check(answer: aiohttp.ClientResponse) -> None:
    if answer.status == 410:
        raise GoneError
    if answer.status >= 300:
        raise ApiError(answer.status, await answer.text(errors="replace"))


class Reflector(Generic[Record]):
    """Keeps somebody's picture of one kind of object true: list, watch, and again for ever.

    ``replace`` gets all records after a list, ``change`` each later one with whether it was
    deleted. Objects that cannot be read are counted in :attr:`counts` and passed over.
    """

    def __init__(
        self,
        client: Client,
        path: str,
        read: Callable[[msgspec.Raw], Record],
        *,
        replace: Callable[[list[Record]], None],
        change: Callable[[Record, bool], None],
        monotonic: Callable[[], float],
        rng: random.Random,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._client, self._path, self._read = client, path, read
        self._replace, self._change = replace, change
        self._monotonic, self._sleep = monotonic, sleep
        self._backoff = Backoff(rng)
        self.synced = asyncio.Event()
        """Set once the first list is in."""
        self.last_contact = -float("inf")
        """When the server last said something, on the monotonic clock."""
        self.counts: Counter[str] = Counter()
        """lists, watches, events, bookmarks, malformed, gone, failures."""

    async def run(self) -> None:
        """Never returns; end it by cancelling its task."""
        version = ""
        while True:
            try:
                if not version:
                    version = await self._list()
                opened, events = self._monotonic(), self.counts["events"]
                version = await self._watch(version)
                quick = self._monotonic() - opened < QUICK_SECONDS
                if not quick or self.counts["events"] > events:
                    self._backoff.reset()
                    continue
            except GoneError:
                version = ""
                self.counts["gone"] += 1
            except FAILURES as error:
                self.counts["failures"] += 1
                log.warning("%s: %s; trying again", self._path, _brief(error))
            await self._sleep(self._backoff.next())

    async def _list(self) -> str:
        items, version = await self._client.list(self._path)
        self._replace([record for item in items if (record := self._decode(item)) is not None])
        self.counts["lists"] += 1
        self.last_contact = self._monotonic()
        self.synced.set()
        return version

    async def _watch(self, version: str) -> str:
        """Follow one watch to its end; the version to go on from, empty where to list anew."""
        self._version = version
        try:
            async for line in self._client.watch(self._path, version):
                self.last_contact = self._monotonic()
                if not line:
                    self.counts["watches"] += 1
                else:
                    self._line(line)
        except FAILURES as error:
            # What was read until then counts: go on from there.
            self.counts["failures"] += 1
            log.info("%s: watch broke: %s", self._path, _brief(error))
        return self._version

    def _line(self, line: bytes) -> None:
        try:
            event = _decode_event(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self._malformed(error)
            return
        if event.type == "ERROR":
            self._error(event.object)
            return
        try:
            version = _decode_version(event.object).metadata.resource_version
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self._malformed(error)
            return
        if event.type == "BOOKMARK":
            self.counts["bookmarks"] += 1
        elif (record := self._decode(event.object)) is not None:
            self.counts["events"] += 1
            self._change(record, event.type == "DELETED")
        if version:
            self._version = version

    def _error(self, data: msgspec.Raw) -> None:
        status = _decode_status(data)
        if status.code == 410:
            raise GoneError
        raise ApiError(status.code, status.message or "the watch ended with an ERROR event")

    def _decode(self, data: msgspec.Raw) -> Record | None:
        try:
            return self._read(data)
        except objects.ObjectError as error:
            self._malformed(error)
            return None

    def _malformed(self, error: Exception) -> None:
        self.counts["malformed"] += 1
        log.warning("%s: passed over an object: %s", self._path, error)


def _brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
