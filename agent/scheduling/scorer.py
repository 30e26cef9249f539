"""The scorer's forward pass as an array kernel; the decision and the simulator call it.

The learner's torch network computes the same from the same arrays; a test holds the two equal.
"""

import math
from typing import NamedTuple

import numpy as np

from agent.arrays import Floats, kernel
from common.policy import BOUND, check_arrays
from common.weights import Arrays


class Scorer(NamedTuple):
    """The weights that scoring needs, transposed for the kernel: float64, C order."""

    w1: Floats
    """[FEATURE_COUNT, HIDDEN]"""
    b1: Floats
    w2: Floats
    """[HIDDEN, HIDDEN]"""
    b2: Floats
    w3: Floats
    """[HIDDEN]"""
    b3: Floats
    """[1]"""


def scorer(arrays: Arrays) -> Scorer:
    """Prepare named arrays for :func:`corrections`.

    Raises:
        ValueError: the arrays are not finite weights of this architecture.
    """
    check_arrays(arrays)

    def double(name: str) -> Floats:
        return np.ascontiguousarray(arrays[name].T, dtype=np.float64)

    return Scorer(
        double("encoder.0.weight"),
        double("encoder.0.bias"),
        double("encoder.1.weight"),
        double("encoder.1.bias"),
        double("correction.weight")[:, 0].copy(),
        double("correction.bias"),
    )


@kernel
def corrections(net: Scorer, features: Floats, count: int, out: Floats) -> None:
    """Write the corrections, each within ±BOUND, of the first ``count`` rows of ``features``.

    ``features`` is [M, FEATURE_COUNT], ``out`` is [M]. Zero inputs and dead units are passed over.
    """
    hidden = net.b1.shape[0]
    first, second = np.empty(hidden), np.empty(hidden)
    for i in range(count):
        first[:] = net.b1
        for a in range(features.shape[1]):
            x = features[i, a]
            if x != 0.0:
                for c in range(hidden):
                    first[c] += x * net.w1[a, c]
        second[:] = net.b2
        for a in range(hidden):
            x = first[a]
            if x > 0.0:
                for c in range(hidden):
                    second[c] += x * net.w2[a, c]
        z = net.b3[0]
        for c in range(hidden):
            if second[c] > 0.0:
                z += second[c] * net.w3[c]
        out[i] = BOUND * math.tanh(z)
