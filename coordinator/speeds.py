"""Sums the members' speed tables for each other; called by the round loop.

Every member is sent the sum over the *others*, so that its own observations are not counted twice.
Where at least three others know a key, each is first moved towards the rest: its mean to within
``clip`` of the median of their means, its count to at most ten times the median count, its variance
to at most ten times the median variance. One liar among many then shifts the shared mean by no more
than its honest weight times ``clip``; with fewer than three others there is no majority to ask.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from common.speeds import SpeedRow, SpeedTable

MAJORITY = 3
"""Least number of peers for clipping."""
_RATIO = 10.0

Floats = npt.NDArray[np.float64]


def _median(values: Floats, known: npt.NDArray[np.bool_]) -> Floats:
    """Median [K] over the known entries of ``values`` [M, K]; 0 where none is known."""
    ordered = np.sort(np.where(known, values, np.inf), axis=0)
    count = known.sum(axis=0)
    columns = np.arange(values.shape[1])
    low = ordered[np.maximum(count - 1, 0) // 2, columns]
    high = ordered[np.minimum(count // 2, values.shape[0] - 1), columns]
    return np.where(count > 0, (np.where(count > 0, low, 0) + np.where(count > 0, high, 0)) / 2, 0)


def peer_speeds(
    tables: Mapping[str, SpeedTable], member: str, clip: float
) -> tuple[int, SpeedTable]:
    """How many other members have a table, and the clipped sum of their tables.

    Args:
        tables: each member's whole, validated table.
        member: whom the sum is for; its own table is left out.
        clip: largest distance of a mean from the median of the means, log steps per second.
    """
    peers = [name for name in sorted(tables) if name != member and tables[name]]
    keys = sorted({key for name in peers for key, row in tables[name].items() if row.n > 0})
    if not keys:
        return len(peers), {}
    place = {key: column for column, key in enumerate(keys)}
    sums = np.zeros((3, len(peers), len(keys)))
    for line, name in enumerate(peers):
        for key, row in tables[name].items():
            if row.n > 0:
                sums[:, line, place[key]] = row
    n, total, squares = sums
    known = n > 0
    mean = np.divide(total, n, out=np.zeros_like(n), where=known)
    variance = np.divide(squares, n, out=np.zeros_like(n), where=known) - mean**2
    variance = np.maximum(variance, 0.0)

    many = known.sum(axis=0) >= MAJORITY
    middle = _median(mean, known)
    mean = np.where(many, np.clip(mean, middle - clip, middle + clip), mean)
    n = np.where(many, np.minimum(n, _RATIO * _median(n, known)), n)
    spread = _RATIO * _median(variance, known) + clip**2
    variance = np.where(many, np.minimum(variance, spread), variance)
    columns = (
        n.sum(axis=0),
        (n * mean).sum(axis=0),
        np.where(known, n * (variance + mean**2), 0.0).sum(axis=0),
    )
    rows = zip(keys, *(column.tolist() for column in columns), strict=True)
    return len(peers), {key: SpeedRow(*values) for key, *values in rows}
