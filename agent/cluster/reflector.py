"""Keeps somebody's picture of one kind of object true: list, watch, and again for ever.

Made by ``agent.scheduling.member``, one for nodes and one for pods. Objects are decoded into slim
records one by one as they come, about 35 µs each. A list of 100,000 pods takes seconds; so that
kube-scheduler is answered meanwhile, the event loop goes on after every few milliseconds of it.
"""

import asyncio
import contextlib
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import msgspec

from agent.backoff import Backoff
from agent.cluster import objects
from agent.cluster.kubernetes import FAILURES, MALFORMED, ApiError, Client, GoneError
from agent.cluster.listing import Listing

QUICK_SECONDS = 1.0
"""A watch that ends sooner without an event counts as a failure: the next one waits longer."""
RELIST_AFTER = 8
"""Failures of the watch in a row after which its version is given up and all is listed anew."""
SLICE_SECONDS = 0.0005
"""Work on a list or a watch that is done in one go; an answer takes several turns of the loop."""

log = logging.getLogger(__name__)
Record = TypeVar("Record")


class _Event(msgspec.Struct, frozen=True):
    type: str
    object: msgspec.Raw


class _Versioned(msgspec.Struct, frozen=True, rename="camel"):
    class Meta(msgspec.Struct, frozen=True, rename="camel"):
        resource_version: str = ""

    metadata: Meta


class _Named(msgspec.Struct, frozen=True):
    class Meta(msgspec.Struct, frozen=True):
        name: str = ""
        uid: str = ""

    metadata: Meta


class _Status(msgspec.Struct, frozen=True):
    code: int = 0
    message: str = ""


_decode_event = msgspec.json.Decoder(_Event).decode
_decode_version = msgspec.json.Decoder(_Versioned).decode
_decode_names = msgspec.json.Decoder(_Named).decode
_decode_status = msgspec.json.Decoder(_Status).decode


class Reflector(Generic[Record]):
    """One kind of object of one API server.

    ``listing`` begins a list (see :class:`Listing`), ``change`` gets each later record with whether
    it was deleted. Objects that cannot be read are counted in :attr:`counts` and passed over; the
    picture then goes on with what was known of them.
    """

    def __init__(
        self,
        client: Client,
        path: str,
        read: Callable[[msgspec.Raw], Record],
        *,
        listing: Callable[[], Listing[Record]],
        change: Callable[[Record, bool], None],
        monotonic: Callable[[], float],
        rng: random.Random,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._client, self._path, self._read = client, path, read
        self._listing, self._change = listing, change
        self._monotonic, self._sleep = monotonic, sleep
        self._backoff = Backoff(rng)
        self._version = ""
        self._began = monotonic()
        self.synced = asyncio.Event()
        """Set once the first list is in."""
        self.last_contact = -float("inf")
        """When the picture was last known to be true, on the monotonic clock."""
        self.counts: Counter[str] = Counter()
        """lists, watches, events, bookmarks, malformed, gone, failures."""

    async def run(self) -> None:
        """Never returns; end it by cancelling its task."""
        poor = 0
        while True:
            try:
                if not self._version:
                    await self._list()
                    poor = 0
                opened, events = self._monotonic(), self.counts["events"]
                await self._watch()
                quick = self._monotonic() - opened < QUICK_SECONDS
                if not quick or self.counts["events"] > events:
                    self._backoff.reset()
                    poor = 0
                    continue
                poor += 1
                if poor >= RELIST_AFTER:
                    self._version = ""
            except GoneError:
                self._version = ""
                self.counts["gone"] += 1
            except FAILURES as error:
                self.counts["failures"] += 1
                log.warning("%s: %s; trying again", self._path, _brief(error))
            await self._sleep(self._backoff.next())

    async def _breathe(self) -> None:
        """Let the rest of the process go on where this has worked for a while."""
        if self._monotonic() - self._began > SLICE_SECONDS:
            await asyncio.sleep(0)
            self._began = self._monotonic()

    async def _list(self) -> None:
        listing, version = self._listing(), ""
        async with contextlib.aclosing(self._client.pages(self._path)) as pages:
            async for page in pages:
                self._began = self._monotonic()
                for item in page.items or ():
                    record = self._decode(item)
                    if record is None:
                        self._keep(listing, item)
                    else:
                        listing.add(record)
                    await self._breathe()
                version = page.metadata.resource_version
        for _ in listing.finish():
            await self._breathe()
        self._version = version
        self.counts["lists"] += 1
        self.last_contact = self._monotonic()
        self.synced.set()

    def _keep(self, listing: Listing[Record], item: msgspec.Raw) -> None:
        """What cannot be read is not gone; nodes go by name, pods by UID."""
        with contextlib.suppress(*MALFORMED):
            names = _decode_names(item).metadata
            listing.keep(names.name)
            listing.keep(names.uid)

    async def _watch(self) -> None:
        """Follow one watch to its end; :attr:`_version` goes with it."""
        try:
            async with contextlib.aclosing(self._client.watch(self._path, self._version)) as lines:
                async for line in lines:
                    self.last_contact = self._monotonic()
                    if not line:
                        self.counts["watches"] += 1
                    else:
                        self._line(line)
                    await self._breathe()
        except FAILURES as error:
            # What was read until then counts: go on from there.
            self.counts["failures"] += 1
            log.info("%s: watch broke: %s", self._path, _brief(error))

    def _line(self, line: bytes) -> None:
        try:
            event = _decode_event(line)
        except MALFORMED as error:
            self._malformed(error)
            return
        if event.type == "ERROR":
            self._error(event.object)
            return
        try:
            version = _decode_version(event.object).metadata.resource_version
        except MALFORMED as error:
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
        """The server gave the watch up: its version is of no use whatever the reason."""
        self._version = ""
        status = _decode_status(data)
        if status.code == 410:
            raise GoneError
        raise ApiError(status.code, status.message or "the watch ended with an ERROR event")

    def _decode(self, data: msgspec.Raw) -> Record | None:
        try:
            return self._read(data)
        except (objects.ObjectError, *MALFORMED) as error:
            self._malformed(error)
            return None

    def _malformed(self, error: Exception) -> None:
        self.counts["malformed"] += 1
        log.warning("%s: passed over an object: %s", self._path, error)


def _brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
