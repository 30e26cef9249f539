"""Fits a few numbers to a noisy cost by the cross-entropy method; for suites that tune a rule.

Source: Rubinstein and Kroese, The Cross-Entropy Method, 2004.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from agent.arrays import Floats

Cost = Callable[[Floats], float]
KEEP = 0.4
"""How much of the former mean and spread an iteration keeps."""
FLOOR = 0.02
"""Part of the first spread that each iteration adds, so that it does not settle too soon."""


def cross_entropy(
    costs: Iterator[Cost],
    start: Sequence[float],
    spread: Sequence[float],
    *,
    iterations: int,
    samples: int,
    elite: int,
    seed: int,
) -> Floats:
    """Numbers with a low expected cost: the same for the same arguments.

    Each iteration draws ``samples`` normal points (and looks at the mean), measures all by one cost
    of ``costs`` - common random numbers - and moves mean and spread towards the ``elite`` best.

    Raises:
        ValueError: lengths differ, a spread is not above 0, or there is no room for the elite.
    """
    mean, first = np.array(start, np.float64), np.array(spread, np.float64)
    if mean.shape != first.shape or mean.ndim != 1 or not (first > 0).all():
        raise ValueError(f"start {start} and spread {spread} must be alike in length, spread > 0")
    if not 1 < elite <= samples or iterations < 1:
        raise ValueError(
            f"need 2 to {samples} of {samples} as elite, and an iteration; got {elite}"
        )
    rng, wide = np.random.default_rng(seed), first.copy()
    for _ in range(iterations):
        points = np.vstack([mean, mean + wide * rng.standard_normal((samples, len(mean)))])
        cost = next(costs)
        best = points[np.argsort([cost(point) for point in points], kind="stable")[:elite]]
        mean = KEEP * mean + (1.0 - KEEP) * best.mean(axis=0)
        wide = KEEP * wide + (1.0 - KEEP) * best.std(axis=0) + FLOOR * first
    return mean
