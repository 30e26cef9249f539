"""What the agent reads from the Kubernetes API: list, watch and node metrics.

Used by ``agent.cluster.reflector`` and ``agent.scheduling.serve``. The transport is an
``aiohttp.ClientSession`` given as an argument, so that TLS and tokens are the caller's and a test
needs only a small server. Objects stay undecoded here.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping

import aiohttp
import msgspec

from agent.cluster import objects

NODES = "/api/v1/nodes"
PODS = "/api/v1/pods"
NODE_METRICS = "/apis/metrics.k8s.io/v1beta1/nodes"
PAGE = 500
PROMPT_SECONDS = 1.0
"""An answer that begins later than this says nothing of the server's clock."""

log = logging.getLogger(__name__)


class GoneError(Exception):
    """410: the resource version is too old (or the continue token); list anew."""


class ApiError(Exception):
    """The API server answered with an error; ``status`` is the HTTP status."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}: {text[:300]}")
        self.status = status


class ListMeta(msgspec.Struct, frozen=True, rename="camel"):
    """Where a page stands."""

    resource_version: str = ""
    continue_: str | None = msgspec.field(default=None, name="continue")


class Page(msgspec.Struct, frozen=True):
    """A page of a list; its objects are still to be decoded."""

    metadata: ListMeta
    items: list[msgspec.Raw] | None = None


_decode_page = msgspec.json.Decoder(Page).decode
MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding may end in."""
FAILURES = (aiohttp.ClientError, asyncio.TimeoutError, OSError, ApiError, *MALFORMED)
"""What a try at the API server may end in; every one of them is worth another try."""


class Client:
    """The requests that the agent makes of one API server."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        *,
        watch_timeout: int = 300,
        read_timeout: float = 75.0,
        hear: Callable[[str], None] = lambda _: None,
    ) -> None:
        """``hear`` gets the ``Date`` header of each prompt answer (``agent.cluster.clock``)."""
        self._session, self._url, self._hear = session, url.rstrip("/"), hear
        self._watch_timeout = watch_timeout
        # A list may be long, but it does not fall silent; a watch may live for ever.
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=read_timeout)

    @contextlib.asynccontextmanager
    async def _get(
        self, path: str, query: Mapping[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        asked = time.monotonic()
        async with self._session.get(
            self._url + path, params=query, timeout=self._timeout
        ) as answer:
            date = answer.headers.get("Date")
            if date and time.monotonic() - asked < PROMPT_SECONDS:
                self._hear(date)
            await _check(answer)
            yield answer

    async def pages(self, path: str) -> AsyncGenerator[Page, None]:
        """All objects at ``path``, page by page; the last page has the version to watch from.

        Raises GoneError where a page came too late, and one of :data:`FAILURES`.
        """
        query = {"limit": str(PAGE)}
        while True:
            async with self._get(path, query) as answer:
                page = _decode_page(await answer.read())
            yield page
            if not page.metadata.continue_:
                return
            query = {"limit": str(PAGE), "continue": page.metadata.continue_}

    async def watch(self, path: str, version: str) -> AsyncGenerator[bytes, None]:
        """The lines of one watch from ``version`` on, until the server ends it.

        Raises GoneError and one of :data:`FAILURES`.
        """
        query = {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(self._watch_timeout),
        }
        async with self._get(path, query) as answer:
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
        usage: dict[str, tuple[float, float]] = {}
        items = [item async for page in self.pages(NODE_METRICS) for item in page.items or ()]
        for item in items:
            try:
                name, cpu, memory = objects.node_usage(item)
            except objects.ObjectError as error:
                log.warning("passed over %s", error)
                continue
            usage[name] = (cpu, memory)
        return usage


async def _check(answer: aiohttp.ClientResponse) -> None:
    if answer.status == 410:
        raise GoneError
    if answer.status >= 300:
        raise ApiError(answer.status, await answer.text(errors="replace"))
