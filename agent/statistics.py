"""Paired comparisons of completion times; the gate, the benchmark and reports state them alike."""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import stdtrit  # not scipy.stats: that takes seconds to import


@dataclass(frozen=True)
class Ratio:
    """A geometric mean ratio with its 95 % interval, over ``windows`` paired windows."""

    mean: float
    low: float
    high: float
    windows: int

    @property
    def significant(self) -> bool:
        """Whether the interval leaves out 1."""
        return self.high < 1.0 or self.low > 1.0

    def __str__(self) -> str:
        half = 100.0 * (self.high - self.low) / 2.0
        return f"{100.0 * (self.mean - 1.0):+.1f} ± {half:.1f} %"


def paired_ratio(ours: npt.ArrayLike, baseline: npt.ArrayLike) -> Ratio:
    """``ours`` over ``baseline``, window by window, under common random numbers.

    The window is the unit of analysis: mean and Student's t interval of the log ratios.

    Args:
        ours: [W] a figure that is above 0 and better when lower, one entry per window.
        baseline: [W] the same of what it is compared with, in the same windows.

    Raises:
        ValueError: the shapes differ, there are fewer than two windows, or a figure is not above 0.
    """
    a, b = np.asarray(ours, np.float64), np.asarray(baseline, np.float64)
    if a.shape != b.shape or a.ndim != 1 or len(a) < 2:
        raise ValueError(f"need two lists of at least two windows each, got {a.shape}, {b.shape}")
    if not (np.isfinite(a).all() and np.isfinite(b).all() and (a > 0).all() and (b > 0).all()):
        raise ValueError("every figure must be finite and above 0")
    logs = np.log(a / b)
    n = len(logs)
    half = float(stdtrit(n - 1, 0.975) * logs.std(ddof=1) / math.sqrt(n))
    mean = float(logs.mean())
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half), n)
