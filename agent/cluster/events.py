"""Kubernetes Events about the agent's own pod: what an operator should see without reading logs.

Told by ``agent.scheduling.member``, which also runs it. Nothing waits for an Event: what is told is
put aside, said once however often it repeats, and dropped where too much of it waits.
"""

import asyncio
import datetime as dt
import logging
import random
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

from agent.backoff import Backoff
from agent.cluster.access import Access
from agent.cluster.kubernetes import FAILURES, ApiError
from agent.settings import KubernetesSettings

log = logging.getLogger(__name__)
CONTROLLER = "fedsched.io/agent"
QUIET_SECONDS = 300.0
"""An Event of one reason follows another no sooner, unless it says the opposite."""
MOST_WAITING = 64
LONGEST_NOTE = 1024
"""What the API server takes."""
Kind = Literal["Normal", "Warning"]


@dataclass
class _Told:
    reason: str
    kind: Kind
    note: str
    at: float
    """Unix seconds."""
    times: int = 1


class EventRecorder:
    """Writes Events one after another, at its own pace."""

    def __init__(
        self,
        settings: KubernetesSettings,
        access: Access,
        create: Callable[[dict[str, Any]], Awaitable[None]],
        *,
        clock: Callable[[], float],
        rng: random.Random,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """``create`` makes an Event at the API server (``agent.cluster.writes.create_event``)."""
        self._create, self._clock, self._rng, self._sleep = create, clock, rng, sleep
        self._namespace = access.namespace
        self._pod = settings.pod or (socket.gethostname() if access.in_pod else "")
        self._uid = settings.pod_uid
        self._waiting: dict[str, _Told] = {}
        self._last: dict[str, float] = {}
        self._wake = asyncio.Event()
        self.dropped = 0
        """Events that were told and never made."""

    def tell(self, reason: str, note: str, kind: Kind = "Warning", *, ends: str = "") -> None:
        """Say ``note`` under ``reason`` (CamelCase); ``ends`` names the reason that it ends.

        Goes to the log at once. Never waits and never fails.
        """
        log.log(logging.WARNING if kind == "Warning" else logging.INFO, "%s: %s", reason, note)
        self._last.pop(ends, None)
        if not self._pod:
            return
        if reason in self._waiting:
            told = self._waiting[reason]
            told.note, told.at, told.times = note, self._clock(), told.times + 1
        elif len(self._waiting) < MOST_WAITING:
            self._waiting[reason] = _Told(reason, kind, note, self._clock())
        else:
            self.dropped += 1
        self._wake.set()

    async def run(self) -> None:
        """Never returns; end it by cancelling its task."""
        backoff = Backoff(self._rng, first=1.0)
        while True:
            due = self._due()
            if due is None:
                self._wake.clear()
                # What is held back becomes due by time alone.
                await (self._sleep(1.0) if self._waiting else self._wake.wait())
                continue
            if await self._write(due):
                backoff.reset()
            else:
                await self._sleep(backoff.next())

    async def flush(self) -> None:
        """Make what waits, without trying again; for the way out."""
        while self._waiting:
            _, told = self._waiting.popitem()
            await self._write(told)

    def _due(self) -> _Told | None:
        now = self._clock()
        for reason in self._waiting:
            if abs(now - self._last.get(reason, -float("inf"))) >= QUIET_SECONDS:
                return self._waiting.pop(reason)
        return None

    async def _write(self, told: _Told) -> bool:
        try:
            await self._create(self._event(told))
        except ApiError as error:
            if error.status < 500 and error.status != 429:  # it will not become right by waiting
                log.warning("no Event %s: %s", told.reason, error)
                self._last[told.reason] = self._clock()
                self.dropped += 1
                return True
            self._again(told)
            return False
        except FAILURES:
            self._again(told)
            return False
        self._last[told.reason] = self._clock()
        return True

    def _again(self, told: _Told) -> None:
        later = self._waiting.get(told.reason)
        if later is None:
            self._waiting[told.reason] = told
        else:
            later.times += told.times

    def _event(self, told: _Told) -> dict[str, Any]:
        moment = dt.datetime.fromtimestamp(told.at, dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        note = f"{told.note} ({told.times} times)" if told.times > 1 else told.note
        return {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {"generateName": f"{self._pod}-", "namespace": self._namespace},
            "eventTime": moment,
            "type": told.kind,
            "reason": told.reason,
            "action": "Schedule",
            "note": note[:LONGEST_NOTE],
            "regarding": {
                "apiVersion": "v1",
                "kind": "Pod",
                "name": self._pod,
                "namespace": self._namespace,
                **({"uid": self._uid} if self._uid else {}),
            },
            "reportingController": CONTROLLER,
            "reportingInstance": self._pod[:128],
        }
