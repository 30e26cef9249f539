"""Speed tables as they cross the link; filled by the learner's speed model, summed by the hub.

A table is additive: for each key it holds the count, sum and sum of squares of log speeds, so
that many clusters' tables combine by adding. A key is an eight-byte hash of a text such as
``job type | GPUs | GPU type``: whoever knows the text finds the row, and no name crosses the link.
(A hash of a guessable text can be guessed; it hides names from a log, not from a dictionary.)
"""

import hashlib
import math
from collections.abc import Mapping
from typing import NamedTuple

MAX_ROWS = 10_000
"""Most rows that one member may send."""
MAX_COUNT = 1e9
"""Largest count of one row."""
MAX_MEAN = 50.0
"""Largest absolute mean of a row, in log steps per second: e**50 is beyond any machine."""


class SpeedRow(NamedTuple):
    """Count, sum and sum of squares of log speeds (log steps per second)."""

    n: float
    sum_x: float
    sum_x2: float


SpeedTable = dict[int, SpeedRow]
"""Rows by :func:`speed_key`."""


class Peers(NamedTuple):
    """What a member is told of the others' speeds."""

    members: int
    """How many they are."""
    rows: SpeedTable
    """The sum of their tables, as far as they confirm each other."""
    unconfirmed: SpeedTable
    """What one of many tells alone: it may be a lie."""


NOBODY = Peers(0, {}, {})


class SpeedRowError(ValueError):
    """A row breaks a bound that every honest table keeps; the message names it."""


def speed_key(text: str) -> int:
    """The unsigned 64-bit key of ``text``: BLAKE2b with an eight-byte digest, big-endian."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def add(left: Mapping[int, SpeedRow], right: Mapping[int, SpeedRow]) -> SpeedTable:
    """The sum of two tables, row by row."""
    total = dict(left)
    for key, row in right.items():
        old = total.get(key, SpeedRow(0.0, 0.0, 0.0))
        total[key] = SpeedRow(old.n + row.n, old.sum_x + row.sum_x, old.sum_x2 + row.sum_x2)
    return total


def check(table: Mapping[int, SpeedRow]) -> None:
    """Raise SpeedRowError unless every row could come from real observations.

    The sum of squares must reach ``sum_x**2 / n`` (Cauchy-Schwarz), up to rounding.
    """
    if len(table) > MAX_ROWS:
        raise SpeedRowError(
            f"the speed table has {len(table)} rows, at most {MAX_ROWS} are allowed"
        )
    for key, row in table.items():
        where = f"speed row {key:016x}"
        if not all(math.isfinite(value) for value in row):
            raise SpeedRowError(f"{where} is not finite")
        if not 0.0 <= row.n <= MAX_COUNT:
            raise SpeedRowError(f"{where} has a count of {row.n}, allowed are 0..{MAX_COUNT:g}")
        if row.n == 0.0:
            if row.sum_x or row.sum_x2:
                raise SpeedRowError(f"{where} has sums but no observations")
            continue
        if abs(row.sum_x / row.n) > MAX_MEAN:
            raise SpeedRowError(f"{where} has a mean beyond ±{MAX_MEAN:g} log steps per second")
        least = row.sum_x**2 / row.n
        if row.sum_x2 < least - 1e-9 * max(1.0, least):
            raise SpeedRowError(f"{where} has a sum of squares below what its sum implies")
        if row.sum_x2 / row.n > 4.0 * MAX_MEAN**2:
            raise SpeedRowError(f"{where} has a mean square beyond {4.0 * MAX_MEAN**2:g}")
