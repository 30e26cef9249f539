"""Discounting by elapsed time and the scale of returns; called by PPO and DQN.

Decisions of a scheduler are not equally spaced, so the discount between two of them follows from
the time between them: a semi-Markov decision process (Bradtke and Duff 1994).
"""

import math

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]


def discount(elapsed: npt.NDArray[np.floating], tau: float) -> F64:
    """``exp(−elapsed / tau)`` [B], both in mean run times of a job.

    An infinite ``elapsed`` marks a true end: nothing that follows counts, the discount is 0.
    """
    return np.exp(-np.asarray(elapsed, np.float64) / tau)


def discounted_returns(
    reward: npt.NDArray[np.floating], gamma: F64, ends: npt.NDArray[np.bool_]
) -> F64:
    """Discounted sum of the rewards [B] from each row to the end of its trajectory."""
    total = np.zeros(len(reward), np.float64)
    following = 0.0
    for row in range(len(reward) - 1, -1, -1):
        following = float(reward[row]) + (0.0 if ends[row] else float(gamma[row]) * following)
        total[row] = following
    return total


class ReturnScale:
    """Running root mean square of the returns, by which rewards are divided.

    Rewards differ by orders of magnitude between a quiet cluster and a crowded one. Divided by
    it, values are about ±1 everywhere, so that one learning rate fits, the value loss does not
    drown the policy's, and value heads of different members can be averaged. The mean is not
    taken out: that would change which policy is best where trajectories differ in length.
    """

    def __init__(self, fixed: float | None = None, window: int = 10_000) -> None:
        self.fixed = fixed
        self.window = window
        """Decisions over which the running mean forgets."""
        self.count = 0.0
        self.mean_square = 0.0

    def observe(self, returns: F64) -> None:
        """Take the returns [B] of new decisions into the running mean."""
        if len(returns) == 0:
            return
        self.count = min(self.count + len(returns), float(self.window))
        share = min(len(returns) / self.count, 1.0)
        self.mean_square += share * (float(np.mean(np.square(returns))) - self.mean_square)

    @property
    def factor(self) -> float:
        """What a reward is multiplied by: the fixed factor, or 1 / RMS (1 before any return)."""
        if self.fixed is not None:
            return self.fixed
        return 1.0 / math.sqrt(self.mean_square) if self.mean_square > 1e-12 else 1.0
