"""Sums the members' speed tables for each other; called by the round loop.

Every member is sent the sum over the *others*, so that its own observations are not counted twice.
From three others on, none of them is believed alone. A key that only one knows stays out, one that
two know stays out unless their means agree to within ``clip``. Where three and more know a key,
each is first moved towards the rest: its mean to within ``clip`` of the median of their means. A
count is at most twice the median one, of two the lesser; a variance is at most ten times the
median. One liar then shifts a shared mean by less than ``clip``, and invents none. With fewer than
three others there is no majority to ask, and all are believed.

What stays out is sent apart, for a member may believe that work is *slower* somewhere than it
thought: of two the slower, and of all peers alike no more rows than one may send.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from common.speeds import MAX_ROWS, Peers, SpeedRow, SpeedTable

MAJORITY = 3
"""Least number of peers among whom one is not believed alone."""
_COUNT_RATIO = 2.0
_VARIANCE_RATIO = 10.0

Floats = npt.NDArray[np.float64]


def _median(values: Floats, known: npt.NDArray[np.bool_], *, lower: bool = False) -> Floats:
    """Median [K] over the known entries of ``values`` [M, K]; 0 where none is known.

    ``lower``: of two in the middle the lesser, and not their mean.
    """
    ordered = np.sort(np.where(known, values, np.inf), axis=0)
    count = known.sum(axis=0)
    columns = np.arange(values.shape[1])
    low = ordered[np.maximum(count - 1, 0) // 2, columns]
    high = low if lower else ordered[np.minimum(count // 2, values.shape[0] - 1), columns]
    return np.where(count > 0, (np.where(count > 0, low, 0) + np.where(count > 0, high, 0)) / 2, 0)


def peer_speeds(tables: Mapping[str, SpeedTable], member: str, clip: float) -> Peers:
    """How many other members have a table, the clipped sum of their tables, and what stays out.

    Args:
        tables: each member's whole, validated table.
        member: whom the sum is for; its own table is left out.
        clip: largest distance of a mean from the median of the means, log steps per second.
    """
    peers = [name for name in sorted(tables) if name != member and tables[name]]
    keys = sorted({key for name in peers for key, row in tables[name].items() if row.n > 0})
    if not keys:
        return Peers(len(peers), {}, {})
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

    unconfirmed: SpeedTable = {}
    if len(peers) >= MAJORITY:
        knowers = known.sum(axis=0)
        lowest = np.min(mean, axis=0, initial=np.inf, where=known)
        highest = np.max(mean, axis=0, initial=-np.inf, where=known)
        kept = (knowers >= MAJORITY) | ((knowers == 2) & (highest - lowest <= clip))
        teller = np.argmin(np.where(known, mean, np.inf), axis=0)  # the slowest
        for line, name in enumerate(peers):
            told = np.flatnonzero(~kept & (teller == line))
            best = told[np.argsort(-n[line, told], kind="stable")][: MAX_ROWS // len(peers)]
            unconfirmed |= {keys[column]: tables[name][keys[column]] for column in best}
        keys = [key for key, keep in zip(keys, kept, strict=True) if keep]
        n, mean, variance = n[:, kept], mean[:, kept], variance[:, kept]
        known = known[:, kept]
        middle = _median(mean, known)
        mean = np.clip(mean, middle - clip, middle + clip)
        n = np.minimum(n, _COUNT_RATIO * _median(n, known, lower=True))
        spread = _VARIANCE_RATIO * _median(variance, known) + clip**2
        variance = np.minimum(variance, spread)
    columns = (
        n.sum(axis=0),
        (n * mean).sum(axis=0),
        np.where(known, n * (variance + mean**2), 0.0).sum(axis=0),
    )
    rows = zip(keys, *(column.tolist() for column in columns), strict=True)
    confirmed = {key: SpeedRow(*values) for key, *values in rows}
    return Peers(len(peers), confirmed, unconfirmed)
