"""A cluster's clock at a pace: cluster seconds from wall seconds, and what the API shows of them.

Kept by embedded.py and by the lab's node emulator.
"""

import asyncio
import math
from collections.abc import Callable
from datetime import UTC, datetime

from agent.simulator.manifest import timestamp

UNPACED_EPOCH = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
"""Time stamps count from here where the clock has no pace, so that two runs show the same ones."""


class Clock:
    """Cluster seconds since the start, ``scale`` of them in one wall second.

    With an infinite scale there is no pace: somebody else says how far the cluster is. wall: Unix
    seconds, or any other wall seconds, if ``epoch`` gives the Unix seconds of time stamps.
    """

    def __init__(
        self,
        scale: float,
        wall: Callable[[], float],
        *,
        epoch: Callable[[], float] | None = None,
    ) -> None:
        self.scale = scale
        self.paced = math.isfinite(scale)
        self._wall, self._epoch = wall, epoch or wall
        self.started = asyncio.Event()
        self._anchor()

    def start(self) -> None:
        """Let the clock go, where it was not going."""
        if not self.started.is_set():
            self._anchor()
            self.started.set()

    def _anchor(self) -> None:
        self._from = self._wall()
        self._unix = self._epoch() if self.paced else UNPACED_EPOCH

    def passed(self) -> float:
        """Cluster seconds since the start; 0 before it, and where the clock has no pace."""
        if not self.paced or not self.started.is_set():
            return 0.0
        return (self._wall() - self._from) * self.scale

    def stamp(self, seconds: float) -> str:
        """The API server's time, RFC 3339, at this cluster second."""
        return timestamp(self._unix + (seconds / self.scale if self.paced else seconds))
