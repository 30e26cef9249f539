"""The shared scorer: one description of its layers and its start weights.

The learner builds its torch network from :data:`LAYERS`, the extender and the simulator score with
``agent.scheduling.scorer``, and the hub checks what members send. The network sees one candidate at
a time, so the same weights serve three nodes and five thousand. Its output is a *bounded
correction* of the rule's score whose last layer starts at zero: a fresh agent equals the rule.
"""

import hashlib
import math

import numpy as np

from common.features import FEATURE_COUNT, FEATURES_VERSION
from common.weights import Arrays

HIDDEN = 48
BOUND = 1.0
"""The correction lies within ±BOUND, in the unit of the rule's score (log of expected time)."""

LAYERS: tuple[tuple[str, int, int], ...] = (
    ("encoder.0", FEATURE_COUNT, HIDDEN),
    ("encoder.1", HIDDEN, HIDDEN),
    ("correction", HIDDEN, 1),
    ("value.0", HIDDEN, HIDDEN),
    ("value.1", HIDDEN, 1),
)
"""(name, inputs, outputs) of each linear layer, as PyTorch names and orients its weights.

``encoder`` → ReLU → ReLU → ``correction`` scores a candidate; ``value`` reads the mean of the
candidates' codes and is used by the learner alone.
"""

ARCHITECTURE = hashlib.sha256(repr((FEATURES_VERSION, LAYERS)).encode()).hexdigest()[:16]
"""Identifies features and layers; two sides that differ in it cannot exchange weights."""


def initial_arrays(seed: int = 0) -> Arrays:
    """Start weights by name, float32: ``X.weight`` [outputs, inputs] and ``X.bias`` [outputs].

    He initialisation (https://arxiv.org/abs/1502.01852); the two output layers start at zero.
    """
    rng = np.random.default_rng(seed)
    arrays: Arrays = {}
    for name, inputs, outputs in LAYERS:
        scale = 0.0 if name in ("correction", "value.1") else math.sqrt(2.0 / inputs)
        weight = rng.normal(0.0, 1.0, (outputs, inputs)) * scale
        arrays[f"{name}.weight"] = weight.astype(np.float32)
        arrays[f"{name}.bias"] = np.zeros(outputs, np.float32)
    return arrays


def check_arrays(arrays: Arrays) -> None:
    """Raise ValueError, naming the array, unless these are finite weights of this architecture."""
    expected = {name: array.shape for name, array in initial_arrays().items()}
    if missing := sorted(expected.keys() ^ arrays.keys()):
        raise ValueError(
            f"the policy's arrays differ from this version's in {', '.join(missing)}; "
            "train it anew or update both sides"
        )
    for name, array in arrays.items():
        if array.shape != expected[name]:
            raise ValueError(f"{name} has shape {array.shape}, expected {expected[name]}")
        if not np.isfinite(array).all():
            raise ValueError(f"{name} holds NaN or infinite weights")
