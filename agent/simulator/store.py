"""Versioned API objects with a bounded history; the embedded cluster writes them, api.py serves.

One counter numbers every change of every collection, as etcd's revision does. Objects are encoded
once, when they change; lists and watches hand out those bytes, so a reader never sees half a change
and a slow reader costs nothing but the history that it may fall out of.
"""

import asyncio
import contextlib
from bisect import bisect_right
from itertools import islice
from typing import Any, NamedTuple

import msgspec

Json = dict[str, Any]

HISTORY = 8192
"""Events that a collection remembers for its watchers."""
SNAPSHOTS = 16
"""Paginated lists that may be under way at once in a collection; the oldest gives way."""


class ApiError(Exception):
    """A request that is refused: HTTP ``code``, Kubernetes ``reason`` and a message for people."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason, self.message = code, reason, message

    def status(self) -> Json:
        """The ``Status`` object that an API server answers with."""
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            "code": self.code,
        }


class Event(NamedTuple):
    """One change: its version, ``ADDED``, ``MODIFIED`` or ``DELETED``, and the object's JSON."""

    version: int
    change: str
    body: bytes


class Page(NamedTuple):
    """A part of a list, all parts of which show the state at one version."""

    version: int
    bodies: list[bytes]
    token: str
    """Continues the list; empty on the last page."""
    remaining: int


class _Snapshot(NamedTuple):
    version: int
    bodies: list[bytes]


class Store:
    """The collections of one API server; ``changed`` wakes whoever waits for any change."""

    def __init__(self) -> None:
        self.version = 1
        self.closed = False
        self._changed = asyncio.Event()

    async def wait(self, timeout: float) -> None:
        """Return after the next change, at :meth:`close`, or after ``timeout`` wall seconds."""
        changed = self._changed  # taken before the first await, so that no change is missed
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await changed.wait()

    def next_version(self) -> int:
        """Number a change and wake the waiting."""
        self.version += 1
        self._wake()
        return self.version

    def close(self) -> None:
        """End every watch."""
        self.closed = True
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class Collection:
    """The objects of one resource by ``namespace/name`` (or name), kept and listed in that order.

    kind, api_version: of the single object, such as ``Pod`` and ``v1``.
    """

    def __init__(
        self, store: Store, kind: str, api_version: str = "v1", history: int = HISTORY
    ) -> None:
        self.store, self.kind, self.api_version = store, kind, api_version
        self.objects: dict[str, Json] = {}
        self._bodies: dict[str, bytes] = {}
        self._history = history
        self._events: list[Event] = []
        self._forgotten = store.version
        self._snapshots: dict[str, _Snapshot] = {}
        self._lists = 0

    def put(self, key: str, item: Json) -> None:
        """Add or replace an object; sets its ``metadata.resourceVersion``."""
        change = "MODIFIED" if key in self.objects else "ADDED"
        self._record(key, item, change)
        self.objects[key] = item

    def delete(self, key: str) -> None:
        """Remove an object; its last state goes to the watchers under the version of its end."""
        self._record(key, self.objects.pop(key), "DELETED")
        del self._bodies[key]

    def body(self, key: str) -> bytes:
        """The JSON of one object; Errors: ApiError 404."""
        body = self._bodies.get(key)
        if body is None:
            name = key.rpartition("/")[2]
            raise ApiError(404, "NotFound", f'{self.kind.lower()}s "{name}" not found')
        return body

    def page(self, limit: int = 0, token: str = "") -> Page:
        """A list, or the part of it that ``token`` continues; at most ``limit`` items, 0 for all.

        Errors: ApiError 410 where the list that the token belongs to is no longer held.
        """
        if token:
            number, _, start_text = token.partition(".")
            snapshot = self._snapshots.get(number)
            if snapshot is None or not start_text.isdecimal():
                raise ApiError(
                    410,
                    "Expired",
                    "The provided continue parameter is too old or not of this server: "
                    "start the list again without it",
                )
            start = int(start_text)
        else:
            self._lists += 1
            number, start = str(self._lists), 0
            bodies = [self._bodies[key] for key in sorted(self._bodies)]
            snapshot = _Snapshot(self.store.version, bodies)
        stop = min(start + limit, len(snapshot.bodies)) if limit else len(snapshot.bodies)
        remaining = len(snapshot.bodies) - stop
        if remaining > 0 and not token:
            self._snapshots[number] = snapshot
            for old in list(islice(self._snapshots, max(len(self._snapshots) - SNAPSHOTS, 0))):
                del self._snapshots[old]
        # A token stays good after its last page: a client may ask again for a page that it lost.
        return Page(
            version=snapshot.version,
            bodies=snapshot.bodies[start:stop],
            token=f"{number}.{stop}" if remaining > 0 else "",
            remaining=max(remaining, 0),
        )

    def since(self, version: int) -> list[Event]:
        """The events after ``version``, oldest first.

        Errors: ApiError 410 where some of them are forgotten, or where this server never was at
        that version (it has been restarted and must be listed anew).
        """
        if version < self._forgotten:
            raise ApiError(
                410, "Expired", f"too old resource version: {version} ({self._forgotten})"
            )
        if version > self.store.version:
            raise ApiError(
                410,
                "Expired",
                f"resource version {version} is ahead of this server's {self.store.version}",
            )
        return self._events[bisect_right(self._events, version, key=lambda event: event.version) :]

    def _record(self, key: str, item: Json, change: str) -> None:
        version = self.store.next_version()
        item["metadata"]["resourceVersion"] = str(version)
        body = msgspec.json.encode(item)
        self._bodies[key] = body
        self._events.append(Event(version, change, body))
        if len(self._events) >= 2 * self._history:  # cut in bulk: one copy per ``history`` events
            self._forgotten = self._events[-self._history - 1].version
            del self._events[: -self._history]
