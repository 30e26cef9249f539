"""The scorer's forward pass as an array kernel; the decision and the simulator call it.

The learner's torch network computes the same from the same arrays; a test holds the two equal.
"""

import math
from typing import NamedTuple

import numpy as np

from agent.arrays import Features, Floats, Ints, inlined, kernel
from common.policy import BOUND, HIDDEN, check_arrays
from common.weights import Arrays

FEW = 64
"""Up to so many candidates are all scored; among more, nodes that look alike are scored once."""


class Scorer(NamedTuple):
    """The weights that scoring needs, transposed for the kernel: float32, C order."""

    w1: Features
    """[FEATURE_COUNT, HIDDEN]"""
    b1: Features
    w2: Features
    """[HIDDEN, HIDDEN]"""
    b2: Features
    w3: Features
    """[HIDDEN]"""
    b3: Features
    """[1]"""


def scorer(arrays: Arrays) -> Scorer:
    """Prepare named arrays for :func:`corrections`.

    Raises:
        ValueError: the arrays are not finite weights of this architecture.
    """
    check_arrays(arrays)

    def turned(name: str) -> Features:
        return np.ascontiguousarray(arrays[name].T, dtype=np.float32)

    return Scorer(
        turned("encoder.0.weight"),
        turned("encoder.0.bias"),
        turned("encoder.1.weight"),
        turned("encoder.1.bias"),
        turned("correction.weight")[:, 0].copy(),
        turned("correction.bias"),
    )


@inlined
def _layer(
    inputs: Features, i: int, j: int, k: int, m: int, weights: Features, bias: Features,
    out: Features,
) -> None:  # fmt: skip
    """Write ``bias`` + rows i, j, k and m of ``inputs`` times ``weights`` into ``out`` [4, HIDDEN].

    Four rows by four inputs at a time: each weight is loaded once for four rows, and what is summed
    up is written once for four inputs. One by one, memory would take twice as long.
    """
    for r in range(4):
        for c in range(HIDDEN):
            out[r, c] = bias[c]
    for a in range(0, len(weights), 4):
        i0, i1, i2, i3 = inputs[i, a], inputs[i, a + 1], inputs[i, a + 2], inputs[i, a + 3]
        j0, j1, j2, j3 = inputs[j, a], inputs[j, a + 1], inputs[j, a + 2], inputs[j, a + 3]
        k0, k1, k2, k3 = inputs[k, a], inputs[k, a + 1], inputs[k, a + 2], inputs[k, a + 3]
        m0, m1, m2, m3 = inputs[m, a], inputs[m, a + 1], inputs[m, a + 2], inputs[m, a + 3]
        for c in range(HIDDEN):
            w0, w1, w2, w3 = weights[a, c], weights[a + 1, c], weights[a + 2, c], weights[a + 3, c]
            out[0, c] += (i0 * w0 + i1 * w1) + (i2 * w2 + i3 * w3)
            out[1, c] += (j0 * w0 + j1 * w1) + (j2 * w2 + j3 * w3)
            out[2, c] += (k0 * w0 + k1 * w1) + (k2 * w2 + k3 * w3)
            out[3, c] += (m0 * w0 + m1 * w1) + (m2 * w2 + m3 * w3)


@inlined
def _rectify(codes: Features) -> None:
    for r in range(4):
        for c in range(HIDDEN):
            codes[r, c] = max(codes[r, c], np.float32(0.0))


@kernel
def _originals(features: Features, count: int) -> Ints:
    """[count] the first row that is the same as each of the first ``count`` rows, to the bit."""
    first = np.arange(count)
    if count <= FEW:
        return first
    bits, words = features.view(np.uint64), features.shape[1] // 2
    size = 256
    while size < 2 * count:
        size *= 2
    table = np.full(size, -1, np.int64)
    for i in range(count):
        digest = np.uint64(0)
        for w in range(words):
            digest = (digest ^ bits[i, w]) * np.uint64(0x9E3779B97F4A7C15)
            digest ^= digest >> np.uint64(32)
        at = np.int64(digest & np.uint64(size - 1))
        while table[at] >= 0:
            other, same = table[at], True
            for w in range(words):
                if bits[i, w] != bits[other, w]:
                    same = False
                    break
            if same:
                first[i] = other
                break
            at = (at + 1) & (size - 1)
        else:
            table[at] = i
    return first


@kernel
def corrections(net: Scorer, features: Features, count: int, out: Floats) -> None:
    """Write the corrections, each within ±BOUND, of the first ``count`` rows of ``features``.

    ``features`` is [M, FEATURE_COUNT], ``out`` is [M].
    """
    first, second = np.empty((4, HIDDEN), np.float32), np.empty((4, HIDDEN), np.float32)
    original = _originals(features, count)
    rows = np.empty(count + 3, np.int64)
    distinct = 0
    for i in range(count):
        if original[i] == i:
            rows[distinct] = i
            distinct += 1
    rows[distinct : distinct + 3] = count - 1  # past the end, the last row again
    for i in range(0, distinct, 4):
        _layer(features, rows[i], rows[i + 1], rows[i + 2], rows[i + 3], net.w1, net.b1, first)
        _rectify(first)
        _layer(first, 0, 1, 2, 3, net.w2, net.b2, second)
        _rectify(second)
        for r in range(min(4, distinct - i)):
            z = net.b3[0]
            for c in range(HIDDEN):
                z += second[r, c] * net.w3[c]
            out[rows[i + r]] = BOUND * math.tanh(z)
    for i in range(count):
        out[i] = out[original[i]]
