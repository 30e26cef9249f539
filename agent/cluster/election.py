"""Which of several replicas leads: by a lease of their own, or beside the holder of another's.

Run by ``agent.scheduling.member``. The lease is a coordination.k8s.io/v1 Lease and dealt with as
client-go does: whether it is still held is judged by how long it stayed unchanged on this process's
own clock, never by the times that are written in it, and a leader stops well before the others may
begin. To lead means to lift gates and to learn; every replica answers kube-scheduler.
"""

import asyncio
import datetime as dt
import logging
import random
import socket
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any, Protocol

from agent.cluster import leader_file
from agent.cluster.kubernetes import FAILURES, ApiError
from agent.cluster.leader_file import Leadership
from agent.settings import ElectionSettings

log = logging.getLogger(__name__)
RENEW, RETRY = 2 / 3, 2 / 15
"""Shares of the lease's length (client-go's 10 s and 2 s of 15 s): a leader that could not renew
for so long stops; how often is looked and renewed."""
LAST_LOOKS = 3
"""How often who ends tries to see whether another leads, where the API server is slow or away."""


class LeaseStore(Protocol):
    """What an election needs of a lease; :class:`agent.cluster.writes.Lease` is one."""

    async def read(self) -> dict[str, Any] | None:
        """The lease, None where there is none."""

    async def create(self, spec: dict[str, Any]) -> dict[str, Any]:
        """Make it."""

    async def replace(self, lease: dict[str, Any]) -> dict[str, Any]:
        """Write it over the version that was read."""


class Election:
    """One replica's part in it; ``mode`` is ``lease`` or ``follow``."""

    def __init__(
        self,
        settings: ElectionSettings,
        lease: LeaseStore,
        state: Path,
        path: Path,
        *,
        monotonic: Callable[[], float],
        clock: Callable[[], float],
        rng: random.Random,
        changed: Callable[[bool, str], None],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """``changed`` gets whether this replica leads from now on, and who holds the lease.

        ``state`` is the state directory, ``path`` the leader file. Raises OSError where neither can
        be written.
        """
        self._settings, self._lease, self._path = settings, lease, path
        self._monotonic, self._clock, self._rng, self._sleep = monotonic, clock, rng, sleep
        self._changed = changed
        self.identity = settings.identity or socket.gethostname()
        if settings.mode == "lease" and not settings.identity:
            # Stays over a restart: who was killed while it led need not wait for its own lease.
            self.identity += f"_{leader_file.replica_id(state)}"
        self._observed: dict[str, Any] | None = None
        self._observed_at = -float("inf")
        self._read_at = -float("inf")
        self._until = -float("inf")
        self._told: tuple[bool, str] | None = None
        self.holder = ""
        """Who held the lease when it was last read."""

    @property
    def leading(self) -> bool:
        """Whether this replica leads, at this moment."""
        return self._monotonic() < self._until

    async def last_out(self) -> bool:
        """Whether no other replica leads, at a last look: who ends then leaves its work to nobody.

        To lead is too much to ask: a kube-scheduler that ends together with this replica lets go
        at once of the lease that is followed.
        """
        if self.leading:
            return True
        for left in reversed(range(LAST_LOOKS)):
            try:
                await self._look()
                break
            except FAILURES as error:
                name, why = self._settings.name, str(error) or type(error).__name__
                log.warning("lease %s: %s; who leads is not known", name, why)
                if not left:
                    log.error("gates may be left; `fedsched agent lift-gates` lifts them")
                    return False
                await self._sleep(1.0)
        length = float((self._observed or {}).get("leaseDurationSeconds") or 0.0)
        lapsed = self._monotonic() >= self._observed_at + length
        return not self.holder or self._ours or lapsed

    @property
    def _ours(self) -> bool:
        """Whether the holder is this replica, or the process that it follows on its host."""
        following = self._settings.mode == "follow"
        host = self.holder.rpartition("_")[0] if following else ""
        return self.identity in (self.holder, host)

    async def run(self) -> None:
        """Never returns; end it by cancelling its task, then call :meth:`release`."""
        while True:
            await self.step()
            pause = self._settings.seconds * RETRY
            await self._sleep(pause * self._rng.uniform(0.8, 1.2))

    async def step(self) -> None:
        """Look at the lease once, take or renew it where it may be, and say how it stands."""
        try:
            if self._settings.mode == "follow":
                await self._follow()
            else:
                await self._contend()
        except FAILURES as error:
            log.warning("lease %s: %s; trying again", self._settings.name, error)
        await self._tell()

    async def _look(self) -> dict[str, Any] | None:
        """Read the lease and note whether it has changed."""
        lease = await self._lease.read()
        spec = None if lease is None else lease.get("spec") or {}
        if spec != self._observed:
            self._observed, self._observed_at = spec, self._monotonic()
        self.holder = "" if spec is None else spec.get("holderIdentity") or ""
        return lease

    async def _contend(self) -> None:
        asked = self._monotonic()
        lease = await self._look()
        old = self._observed or {}
        length = float(old.get("leaseDurationSeconds") or self._settings.seconds)
        if self.holder and self.holder != self.identity:
            self._until = -float("inf")
            if self._monotonic() < self._observed_at + length:
                return
        spec = {**old, **self._claim(self.identity, self._settings.seconds)}
        if self.holder == self.identity:
            spec["acquireTime"] = old.get("acquireTime") or spec["acquireTime"]
        else:
            spec["leaseTransitions"] = int(old.get("leaseTransitions") or 0) + (lease is not None)
        try:
            if lease is None:
                await self._lease.create(spec)
            else:
                await self._lease.replace({**lease, "spec": spec})
        except ApiError as error:
            if error.status != HTTPStatus.CONFLICT:
                raise
            await self._look()  # another was faster
            return
        # Counted from before the request: nobody can have read the lease later than that.
        self._until = asked + self._settings.seconds * RENEW
        self.holder = self.identity

    async def _follow(self) -> None:
        asked, before, known_at = self._monotonic(), self._observed, self._read_at
        await self._look()
        self._read_at = asked
        if not self._ours:
            self._until = -float("inf")
        elif self._observed is not before and known_at > -float("inf"):
            # Seen renewed, and not just found lying there; renewed after the look before.
            length = float((self._observed or {}).get("leaseDurationSeconds") or 0.0)
            self._until = known_at + length * RENEW

    def _claim(self, holder: str, seconds: float) -> dict[str, Any]:
        now = dt.datetime.fromtimestamp(self._clock(), dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        return {
            "holderIdentity": holder,
            "leaseDurationSeconds": max(int(seconds), 1),
            "acquireTime": now,
            "renewTime": now,
        }

    async def _tell(self) -> None:
        """Write the leader file, and say where the leader is another."""
        leading = await self._write()
        found = (leading, self.holder)
        if found != self._told:
            self._told = found
            log.info(
                "%s; the lease %s is held by %s",
                "this replica leads" if leading else "this replica does not lead",
                self._settings.name,
                self.holder or "nobody",
            )
            self._changed(*found)

    async def _write(self) -> bool:
        """Write the leader file; whether this replica leads."""
        seconds = self._settings.seconds
        left = min(max(self._until - self._monotonic(), 0.0), seconds)
        about = Leadership(left > 0.0, self.holder, self._clock() + left, seconds)
        try:
            await asyncio.to_thread(leader_file.write, self._path, about)
        except OSError as error:
            log.error("%s cannot be written: %s; the learner pauses", self._path, error)
        return about.leading

    async def release(self) -> None:
        """Let another take over at once; call it when nothing is written any more."""
        led, self._until = self.leading, -float("inf")
        await self._write()
        if not led or self._settings.mode == "follow":
            return
        try:
            lease = await self._look()
            if lease is not None and self.holder == self.identity:
                spec = {**(self._observed or {}), **self._claim("", 1.0)}
                await self._lease.replace({**lease, "spec": spec})
                log.info("the lease %s is let go", self._settings.name)
        except FAILURES as error:
            log.warning(
                "lease %s could not be released (%s); it lapses", self._settings.name, error
            )
