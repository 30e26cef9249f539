"""Growing, jittered waits between tries at what is away; for watches, gates and the link."""

import random


class Backoff:
    """Waits that double from ``first`` to ``longest`` seconds, each with half of it random."""

    def __init__(self, rng: random.Random, *, first: float = 0.1, longest: float = 30.0) -> None:
        self._rng, self._first, self._longest = rng, first, longest
        self._tries = 0

    def reset(self) -> None:
        """Begin again with the first wait."""
        self._tries = 0

    def next(self) -> float:
        """The next wait, seconds."""
        whole = min(self._first * 2.0 ** min(self._tries, 30), self._longest)
        self._tries += 1
        return whole * self._rng.uniform(0.5, 1.0)
