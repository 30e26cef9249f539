"""Paired comparisons of completion times; the gate, the benchmark and reports state them alike."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import stdtr, stdtrit  # not scipy.stats: that takes seconds to import

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Mean:
    """A mean with its 95 % interval, over ``count`` observations in ``clusters`` clusters."""

    mean: float
    low: float
    high: float
    count: int
    clusters: int
    p: float
    """Two-sided, of a mean that is 0 in truth."""


@dataclass(frozen=True)
class Ratio:
    """A geometric mean ratio with its 95 % interval, over ``windows`` paired windows."""

    mean: float
    low: float
    high: float
    windows: int
    clusters: int = 0
    """Clusters of windows that the interval allows for; as many as windows where each is its
    own."""
    p: float = math.nan
    """Two-sided, of a ratio that is 1 in truth."""

    @property
    def significant(self) -> bool:
        """Whether the interval leaves out 1."""
        return self.high < 1.0 or self.low > 1.0

    def __str__(self) -> str:
        half = 100.0 * (self.high - self.low) / 2.0
        return f"{100.0 * (self.mean - 1.0):+.1f} ± {half:.1f} %"


def clustered_mean(
    values: npt.ArrayLike, clusters: Sequence[str] = (), *, level: float = 0.95
) -> Mean:
    """Mean and Student's t interval (by default of 95 %) of [W] values, alike within clusters.

    Observations of one cluster may depend on each other in any way; clusters do not. The standard
    error is the cluster-robust one with the correction for few and unequal clusters (CR2), and so
    are the degrees of freedom (Bell and McCaffrey, Survey Methodology 28(2), 2002): G−1 for G
    clusters of one size. With clusters of one value each it is the usual interval.

    Args:
        clusters: [W] names; empty, or one name throughout: every value is a cluster of its own.

    Raises:
        ValueError: fewer than two values, one that is not finite, or not one name for each.
    """
    x = np.asarray(values, np.float64)
    if x.ndim != 1 or len(x) < 2:
        raise ValueError(f"need a list of at least two values, got {x.shape}")
    if len(clusters) not in (0, len(x)):
        raise ValueError(f"{len(x)} values, but names of clusters for {len(clusters)}")
    if not np.isfinite(x).all():
        raise ValueError("every value must be finite")
    if len(set(clusters)) < 2:
        group = np.arange(len(x))
    else:
        group = np.unique(np.asarray(clusters), return_inverse=True)[1]
    mean, count = float(x.mean()), len(x)
    sizes = np.bincount(group).astype(np.float64)
    sums = np.bincount(group, weights=x - mean)
    inflation = 1.0 / (1.0 - sizes / count)
    error = math.sqrt(float(inflation @ sums**2)) / count
    # The variance estimate is a sum of squares that are correlated like this; matching its first
    # two moments to a chi-square's gives the degrees of freedom.
    root = np.sqrt(inflation)
    squares = root[:, None] * (np.diag(sizes) - np.outer(sizes, sizes) / count) * root
    degrees = float(np.trace(squares) ** 2 / (squares**2).sum())
    half = float(stdtrit(degrees, 0.5 + level / 2.0)) * error
    if error > 0.0:
        p = 2.0 * float(stdtr(degrees, -abs(mean) / error))
    else:
        p = 1.0 if mean == 0.0 else 0.0
    return Mean(mean, mean - half, mean + half, count, len(sizes), p)


def paired_ratio(
    ours: npt.ArrayLike,
    baseline: npt.ArrayLike,
    clusters: Sequence[str] = (),
    *,
    level: float = 0.95,
) -> Ratio:
    """``ours`` over ``baseline``, window by window, under common random numbers.

    The window is the unit of analysis: mean and Student's t interval of the log ratios, clustered
    as in :func:`clustered_mean`.

    Args:
        ours: [W] a figure that is above 0, one entry per window.
        baseline: [W] the same of what it is compared with, in the same windows.
        clusters: [W] what each window was cut from; empty where windows do not depend on each
            other.
        level: confidence of the interval.

    Raises:
        ValueError: the shapes differ, there are fewer than two windows, or a figure is not above 0.
    """
    a, b = _pair(ours, baseline)
    both = np.append(a, b)
    if not (np.isfinite(both) & (both > 0)).all():
        raise ValueError("every figure must be finite and above 0")
    logs = clustered_mean(np.log(a / b), clusters, level=level)
    low, mean, high = (math.exp(value) for value in (logs.low, logs.mean, logs.high))
    return Ratio(mean, low, high, logs.count, logs.clusters, logs.p)


def paired_difference(
    ours: npt.ArrayLike, baseline: npt.ArrayLike, clusters: Sequence[str] = ()
) -> Mean:
    """``ours`` less ``baseline``, window by window, for figures that may be 0; else the same.

    Raises:
        ValueError: the shapes differ, there are fewer than two windows, or a figure is not finite.
    """
    a, b = _pair(ours, baseline)
    return clustered_mean(a - b, clusters)


def _pair(ours: npt.ArrayLike, baseline: npt.ArrayLike) -> tuple[Floats, Floats]:
    a, b = np.asarray(ours, np.float64), np.asarray(baseline, np.float64)
    if a.shape != b.shape or a.ndim != 1 or len(a) < 2:
        raise ValueError(f"need two lists of at least two windows each, got {a.shape}, {b.shape}")
    return a, b


def holm(p: Sequence[float]) -> list[float]:
    """p-values adjusted for as many looks: below 0.05 the family's chance of one false alarm is.

    Holm's step-down procedure (Scandinavian J. of Statistics 6(2), 1979), in the order given.
    """
    adjusted, largest = [0.0] * len(p), 0.0
    for rank, i in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        largest = max(largest, min(1.0, (len(p) - rank) * p[i]))
        adjusted[i] = largest
    return adjusted
