"""kube-scheduler's side of the extender protocol over HTTP; kube_scheduler.py calls it.

Field names are those of Go's ``ExtenderArgs``, ``ExtenderFilterResult`` and ``HostPriorityList``; a
reply is read as strictly as Go reads it. Whatever goes wrong is counted by kind.
"""

import time
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Annotated, TypeVar

import aiohttp
import msgspec
from pydantic import BaseModel, ConfigDict, Field

MAX_EXTENDER_PRIORITY = 10
MAX_NODE_SCORE = 100
FAILURES = ("timeout", "connection", "status", "bad_json", "bad_reply", "error")
"""Kinds of failure: no answer in time, none at all, not HTTP 200, not JSON, JSON of another form (a
score that is no integer), and an ``Error`` that the extender reports itself (filter only)."""

T = TypeVar("T")
_Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class ExtenderSettings(BaseModel):
    """One entry of ``extenders`` in a KubeSchedulerConfiguration."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str = Field(pattern=r"^http://")
    """``urlPrefix``, such as ``http://127.0.0.1:8888``."""
    filter_verb: str = ""
    """Appended to the URL for filter calls; empty: the extender does not filter."""
    prioritize_verb: str = "prioritize"
    """Appended to the URL for prioritize calls; empty: the extender does not score."""
    weight: int = Field(default=20, ge=1)
    """Score × weight × 10 is added to the plugins' total: 13 and more dominates them."""
    timeout_seconds: float = Field(default=0.1, gt=0)
    """``httpTimeout``, wall seconds whatever the cluster's clock does."""
    ignorable: bool = False
    """Whether a failed filter call is passed over instead of failing the attempt."""


class ExtenderError(Exception):
    """A call failed; ``kind`` is one of :data:`FAILURES`."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class _HostPriority(msgspec.Struct):
    host: str = msgspec.field(name="Host", default="")
    score: _Int64 = msgspec.field(name="Score", default=0)


class _FilterResult(msgspec.Struct):
    node_names: list[str] | None = msgspec.field(name="NodeNames", default=None)
    failed: dict[str, str] | None = msgspec.field(name="FailedNodes", default=None)
    unresolvable: dict[str, str] | None = msgspec.field(
        name="FailedAndUnresolvableNodes", default=None
    )
    error: str = msgspec.field(name="Error", default="")


_priorities = msgspec.json.Decoder(list[_HostPriority] | None)
_filtered = msgspec.json.Decoder(_FilterResult)


class Extender:
    """One extender, called over one kept connection, as kube-scheduler's client does.

    Use it as an asynchronous context manager. calls and failures count by verb and by kind;
    latencies are wall seconds of the answered prioritize calls.
    """

    def __init__(
        self, settings: ExtenderSettings, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self.settings = settings
        self.calls: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.latencies: list[float] = []
        self._monotonic = monotonic
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "Extender":
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=1, keepalive_timeout=90.0),
            timeout=aiohttp.ClientTimeout(total=self.settings.timeout_seconds),
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def filter(self, pod: bytes, nodes: list[str]) -> tuple[list[str], dict[str, str]]:
        """The nodes that the extender leaves, in the order given, and reasons for the others.

        pod: a v1.Pod in JSON. Errors: ExtenderError, already counted.
        """
        try:
            body = await self._post("filter", self.settings.filter_verb, pod, nodes)
            result = _decode(_filtered, body)
            if result.error:
                raise ExtenderError("error", result.error)
            left = set(result.node_names or ())
            if strangers := left.difference(nodes):
                raise ExtenderError("bad_reply", f"it returned unknown nodes: {sorted(strangers)}")
        except ExtenderError as error:
            self.failures[error.kind] += 1
            raise
        reasons = {**(result.failed or {}), **(result.unresolvable or {})}
        return [name for name in nodes if name in left], reasons

    async def prioritize(self, pod: bytes, nodes: list[str]) -> dict[str, int]:
        """What to add to each node's total: Score × weight × 10; empty where the call failed.

        A failure is counted and ignored, as kube-scheduler does; one score that is no integer
        spoils the whole reply.
        """
        start = self._monotonic()
        try:
            body = await self._post("prioritize", self.settings.prioritize_verb, pod, nodes)
            entries = _decode(_priorities, body) or []
        except ExtenderError as error:
            self.failures[error.kind] += 1
            return {}
        self.latencies.append(self._monotonic() - start)
        factor = self.settings.weight * MAX_NODE_SCORE // MAX_EXTENDER_PRIORITY
        totals: dict[str, int] = {}
        for entry in entries:
            totals[entry.host] = totals.get(entry.host, 0) + entry.score * factor
        return totals

    async def _post(self, call: str, verb: str, pod: bytes, nodes: list[str]) -> bytes:
        assert self._session is not None, "use the extender as an asynchronous context manager"
        self.calls[call] += 1
        names = msgspec.json.encode(nodes)
        url = f"{self.settings.url.rstrip('/')}/{verb.lstrip('/')}"
        try:
            async with self._session.post(
                url,
                data=b'{"Pod":' + pod + b',"Nodes":null,"NodeNames":' + names + b"}",
                headers={"Content-Type": "application/json"},
            ) as response:
                body = await response.read()
                if response.status != 200:
                    raise ExtenderError("status", f"HTTP {response.status} from {url}")
                return body
        except TimeoutError as error:
            seconds = self.settings.timeout_seconds
            raise ExtenderError("timeout", f"no answer from {url} in {seconds} s") from error
        except aiohttp.ClientError as error:
            raise ExtenderError("connection", f"{url}: {error}") from error


def _decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise ExtenderError("bad_reply", str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ExtenderError("bad_json", str(error)) from error
