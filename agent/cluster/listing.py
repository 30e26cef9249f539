"""A list that comes page by page and says, at its end, what there is no more.

``agent.cluster.state`` makes one for each list of nodes or pods; ``agent.cluster.reflector`` fills
it between other work of the event loop, so each step is small and leaves a sound picture behind:
what was listed already is as it is now, the rest as it was known before.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

Record = TypeVar("Record")


class Listing(Generic[Record]):
    """One list under way."""

    def __init__(
        self,
        known: Iterable[str],
        key: Callable[[Record], str],
        apply: Callable[[Record], None],
        miss: Callable[[str], None],
        done: Callable[[], None] = lambda: None,
    ) -> None:
        """``known`` are the keys of what there was; ``miss`` is told each that did not come, and
        ``done`` that the list is whole."""
        self._missing = dict.fromkeys(known)
        self._key, self._apply, self._miss, self._done = key, apply, miss, done

    def add(self, record: Record) -> None:
        """Take in one record."""
        self._missing.pop(self._key(record), None)
        self._apply(record)

    def keep(self, key: str) -> None:
        """It is there, but cannot be read: what was known of it goes on."""
        self._missing.pop(key, None)

    def finish(self) -> Iterator[None]:
        """The list is whole: what did not come is gone, one with each step."""
        for key in self._missing:
            self._miss(key)
            yield
        self._done()

    def take(self, records: Iterable[Record]) -> None:
        """The whole list at once."""
        for record in records:
            self.add(record)
        for _ in self.finish():
            pass
