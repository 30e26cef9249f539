"""Decision problems with a known optimum that the rule misses, for the tests of PPO and DQN.

Both act through the kernel that decides in production, not through the learner's own network.
"""

import itertools
from typing import Protocol

import numpy as np

from agent.learning.batch import Batch
from agent.scheduling.scorer import corrections, scorer
from common.features import FEATURE_COUNT
from common.weights import Arrays

TEMPERATURE = 0.25


def probabilities(
    arrays: Arrays, features: np.ndarray, rule_scores: np.ndarray, temperature: float = TEMPERATURE
) -> np.ndarray:
    """π [C] over the candidates of one decision, by the production kernel."""
    out = np.zeros(len(features))
    corrections(scorer(arrays), features, len(features), out)
    logits = (rule_scores + out) / temperature
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def make_batch(rows: list[dict], width: int = 3) -> Batch:
    """A batch of rows, each with its features [n, F], rule scores [n] and outcome by name."""
    count = len(rows)
    features = np.zeros((count, width, FEATURE_COUNT), np.float32)
    mask = np.zeros((count, width), np.bool_)
    rule = np.zeros((count, width), np.float32)
    for i, row in enumerate(rows):
        n = len(row["rule"])
        features[i, :n], mask[i, :n], rule[i, :n] = row["features"], True, row["rule"]
    return Batch(
        features=features,
        mask=mask,
        rule_scores=rule,
        action=np.array([row["action"] for row in rows], np.int64),
        log_prob=np.array([row.get("log_prob", 0.0) for row in rows], np.float32),
        reward=np.array([row["reward"] for row in rows], np.float32),
        elapsed=np.array([row["elapsed"] for row in rows], np.float32),
        ends=np.array([row["ends"] for row in rows], np.bool_),
    )


class Problem(Protocol):
    def collect(self, arrays: Arrays, count: int, rng: np.random.Generator) -> Batch: ...

    def optimal(self, arrays: Arrays) -> float: ...


def _act(arrays: Arrays, features: np.ndarray, rule: np.ndarray, rng: np.random.Generator) -> dict:
    p = probabilities(arrays, features, rule)
    action = int(rng.choice(len(p), p=p))
    log_prob = np.log(p[action])
    return {"features": features, "rule": rule, "action": action, "log_prob": log_prob}


class Bandit:
    """Three kinds of candidates in any order; which of kinds 1 and 2 is right depends on a context.

    The rule always takes kind 0, by 0.5. The right kind earns 0, the others −1.
    """

    def candidates(self, context: int, kinds: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        features = np.zeros((3, FEATURE_COUNT), np.float32)
        features[:, 0] = 2 * context - 1
        features[np.arange(3), 1 + np.array(kinds)] = 1.0
        return features, np.where(np.array(kinds) == 0, 0.0, -0.5)

    def collect(self, arrays: Arrays, count: int, rng: np.random.Generator) -> Batch:
        rows = []
        for _ in range(count):
            context, kinds = int(rng.integers(2)), tuple(int(k) for k in rng.permutation(3))
            row = _act(arrays, *self.candidates(context, kinds), rng)
            right = kinds[row["action"]] == 1 + context
            rows.append(row | {"reward": 0.0 if right else -1.0, "elapsed": np.inf, "ends": True})
        return make_batch(rows)

    def optimal(self, arrays: Arrays) -> float:
        """Mean probability of the right kind over all contexts and orders."""
        shares = []
        for context, kinds in itertools.product(range(2), itertools.permutations(range(3))):
            p = probabilities(arrays, *self.candidates(context, kinds))
            shares.append(p[kinds.index(1 + context)])
        return float(np.mean(shares))


class TwoSteps:
    """A choice that costs 0.3 now and spares 2 in the next, forced decision 10 s later.

    The rule takes the choice that is free now, by 0.5.
    """

    features = np.zeros((2, FEATURE_COUNT), np.float32)
    features[:, 3] = 1.0
    features[0, 4] = features[1, 5] = 1.0
    rule = np.array([0.0, -0.5])
    """The free choice, and the one that pays in the end."""

    def collect(self, arrays: Arrays, count: int, rng: np.random.Generator) -> Batch:
        rows: list[dict] = []
        for _ in range(count // 2):
            first = _act(arrays, self.features, self.rule, rng)
            wise = first["action"] == 1
            rows.append(first | {"reward": -0.3 if wise else 0.0, "elapsed": 10.0, "ends": False})
            after = np.zeros((1, FEATURE_COUNT), np.float32)
            after[0, 6 if wise else 7] = 1.0
            reward = 0.0 if wise else -2.0
            rows.append({"features": after, "rule": [0.0], "action": 0, "reward": reward})
            rows[-1] |= {"elapsed": np.inf, "ends": True}
        return make_batch(rows, width=2)

    def optimal(self, arrays: Arrays) -> float:
        """Probability of the choice that pays in the end."""
        return float(probabilities(arrays, self.features, self.rule)[1])
