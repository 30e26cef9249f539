"""The agent's own time: wall time at the start, then what the monotonic clock counts.

Used by ``agent.scheduling.member`` for the cluster state and its client. The wall clock of a node
may be set by an hour in either direction at any moment; what a pod has waited must not. The API
server's clock may be another one again: its ``Date`` header says how far ahead it is, so that the
times in its objects can be told in ours.
"""

import logging
from collections.abc import Callable
from email.utils import parsedate_to_datetime

TOLERANCE_SECONDS = 2.0
"""Differences up to this are not told from the header's resolution and a slow answer."""

log = logging.getLogger(__name__)


class SteadyClock:
    """Unix seconds that go forward as the monotonic clock does and never step."""

    def __init__(self, wall: Callable[[], float], monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._offset = wall() - monotonic()
        self._ahead = 0.0

    def now(self) -> float:
        """Unix seconds: the wall clock's at the start, and what has passed since."""
        return self._offset + self._monotonic()

    def ahead(self) -> float:
        """How far the API server's clock is ahead of :meth:`now`, s; 0 where they agree."""
        return self._ahead

    def hear(self, date: str) -> None:
        """Take in an HTTP ``Date`` header that has just come; one that cannot be read is ignored.

        It is cut to whole seconds, so the middle of its second is taken.
        """
        try:
            ahead = parsedate_to_datetime(date).timestamp() + 0.5 - self.now()
        except ValueError:
            return
        if abs(ahead) <= TOLERANCE_SECONDS:
            ahead = 0.0
        if abs(ahead - self._ahead) > TOLERANCE_SECONDS:
            log.warning("the API server's clock is %+.0f s from the agent's own", ahead)
            self._ahead = ahead
