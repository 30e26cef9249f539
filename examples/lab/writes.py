"""Writes to a real API server that must get there: in order for each object, tried until they do.

The node emulator makes them, as a kubelet and a job controller would: what they have to say waits
for an API server that is away.
"""

import asyncio
import json
import logging
import random
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

import aiohttp

from agent.backoff import Backoff
from agent.cluster.kubernetes import FAILURES, ApiError

log = logging.getLogger(__name__)
Json = dict[str, Any]
AT_ONCE = 16
"""Requests under way at one time."""
LONGEST_PAUSE = 2.0
JSON = "application/json"
MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
_DONE = (HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT)
_REFUSED = (HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY)


class Writes:
    """Chains of writes, one for each key; chains run side by side."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        *,
        rng: random.Random,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """``session`` carries the credentials for ``url``; ``rng`` spreads the pauses."""
        self._session, self._url, self._rng, self._sleep = session, url.rstrip("/"), rng, sleep
        self._room = asyncio.Semaphore(AT_ONCE)
        self._chains: dict[str, deque[Callable[[], Awaitable[None]]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.counts: Counter[str] = Counter()
        """done, tried_again, gone (there was nothing to write to, or it was there already) and
        refused (the API server does not take it; it is passed over)."""

    def submit(self, key: str, step: Callable[[], Awaitable[None]]) -> None:
        """Run ``step``, which makes requests, after all that was submitted under ``key`` before."""
        chain = self._chains.get(key)
        if chain is not None:
            chain.append(step)
            return
        self._chains[key] = deque([step])
        task = asyncio.create_task(self._run(key))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def write(self, key: str, method: str, path: str, body: Json, kind: str = JSON) -> None:
        """Submit a single request."""

        async def step() -> None:
            await self.request(method, path, body, kind)

        self.submit(key, step)

    async def _run(self, key: str) -> None:
        chain = self._chains[key]
        while chain:
            try:
                await chain[0]()
            except Exception:
                log.exception("writing %s failed; it is passed over", key)
                self.counts["refused"] += 1
            chain.popleft()
        del self._chains[key]

    async def request(
        self, method: str, path: str, body: Json | None = None, kind: str = JSON
    ) -> Json | None:
        """The object that the API server answers with; None where there was nothing to do.

        Tries again for as long as the server is away or busy. Raises ApiError where it does not
        accept the credentials.
        """
        backoff = Backoff(self._rng, longest=LONGEST_PAUSE)
        while True:
            try:
                async with (
                    self._room,
                    self._session.request(
                        method,
                        self._url + path,
                        data=None if body is None else json.dumps(body).encode(),
                        headers={"Content-Type": kind},
                        timeout=aiohttp.ClientTimeout(total=10.0),
                    ) as answer,
                ):
                    text = await answer.text(errors="replace")
                    if answer.status < HTTPStatus.MULTIPLE_CHOICES:
                        self.counts["done"] += 1
                        found: Json = json.loads(text)
                        return found
                    if answer.status in _DONE:
                        self.counts["gone"] += 1
                        return None
                    if answer.status in _REFUSED:
                        self.counts["refused"] += 1
                        log.error("%s %s is refused: %s", method, path, text[:500])
                        return None
                    raise ApiError(answer.status, text)
            except FAILURES as error:
                if isinstance(error, ApiError) and error.status == HTTPStatus.UNAUTHORIZED:
                    raise
                self.counts["tried_again"] += 1
                log.info("%s %s: %s; trying again", method, path, error)
            await self._sleep(backoff.next())

    @property
    def waiting(self) -> int:
        """Objects with something still to be written."""
        return len(self._chains)

    async def flush(self, seconds: float) -> bool:
        """Wait until all is written, at most so long; whether it is."""
        try:
            async with asyncio.timeout(seconds):
                while self._tasks:
                    await asyncio.wait(self._tasks)
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Give up what is not written yet."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
