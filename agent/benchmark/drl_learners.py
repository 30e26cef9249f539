"""Trains the learners of ``drl-mls``: plain ones from scratch, and ours with a part taken away.

All see the same batches of train jobs, as many of them and in the same order, from the same seeds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from agent.arrays import Features
from agent.learning.ablated import Ablated, record_ablated
from agent.learning.algorithm import Algorithm
from agent.learning.batch import concatenate
from agent.learning.dqn import Dqn, DqnSettings
from agent.learning.ppo import Ppo, PpoSettings
from agent.learning.reward import RewardWeights
from agent.scheduling.decision import Policy
from agent.scheduling.rules import RULES
from agent.scheduling.scorer import scorer
from agent.simulator.simulation import Simulation
from agent.simulator.stepping import semantics
from common.features import FEATURE_NAMES
from common.weights import Arrays, load

TEMPERATURE = 0.25
"""Of exploration, in the unit of the rule's score."""
MOST_DECISIONS = 2000
"""Of one batch that a learner learns from; further ones are passed over."""


class Learner(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a learner decides, sees, starts from and is rewarded for."""

    rule: str = "priced-eft"
    """Orders the pods and, unless it starts from scratch, scores the candidates."""
    algorithm: Literal["ppo", "dqn"] = "ppo"
    place_only: bool = False
    residual: bool = True
    """It corrects the rule's scores; without, it starts from scratch."""
    delayed: bool = True
    """A decision is credited with what follows; without, with what happens until the next."""
    masked: bool = True
    """Only what is feasible is offered; without, a choice that cannot be bound costs a kill."""
    hidden: tuple[str, ...] = ()
    """Beginnings of the names of features that it does not see."""
    weights: dict[str, float] = {}
    """Prices of the reward's terms that differ from the default ones."""

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise ValueError(f"no rule {self.rule!r}; there are {', '.join(RULES)}")
        semantics(RULES[self.rule], place_only=self.place_only)
        for beginning in self.hidden:
            if not any(name.startswith(beginning) for name in FEATURE_NAMES):
                raise ValueError(f"no feature begins with {beginning!r}; see common.features")
        if unknown := sorted(self.weights.keys() - RewardWeights.__dataclass_fields__.keys()):
            raise ValueError(f"the reward has no weight {unknown[0]!r}: alpha, beta, gamma, delta")
        RewardWeights(**self.weights)

    def columns(self) -> Features:
        """[FEATURE_COUNT] 1 for what it sees, 0 for the rest."""
        seen = [not name.startswith(self.hidden) for name in FEATURE_NAMES]
        return np.array(seen if self.hidden else [True] * len(seen), np.float32)

    def policy(self, arrays: Arrays, *, temperature: float = 0.0) -> Ablated:
        """The learner's policy with these weights; greedy unless it has a temperature."""
        rule = RULES[self.rule]
        return Ablated(
            Policy(rule, scorer(arrays), True, 0.0, temperature),
            semantics(rule, place_only=self.place_only, unmasked=not self.masked),
            self.columns(),
            self.residual,
        )


@dataclass(frozen=True)
class Lesson:
    """One batch to learn from."""

    simulation: Simulation
    mean_run_seconds: float
    """Of its jobs, each on its fastest type."""


Lessons = Callable[[int], Lesson]
"""The lesson of a number, made anew at each call."""


def _algorithm(learner: Learner, seed: int) -> Algorithm:
    # Restraint pulls a correction to 0, which is the rule; from scratch there is none to return to.
    restraint = 0.05 if learner.residual else 0.0
    if learner.algorithm == "dqn":
        return Dqn(
            DqnSettings(
                learning_rate=1e-3, restraint=restraint, capacity=16_384, updates_per_decision=0.1
            ),
            seed=seed,
        )
    entropy = 0.0 if learner.residual else 0.01
    return Ppo(PpoSettings(learning_rate=1e-3, restraint=restraint, entropy=entropy), seed=seed)


def train(
    learner: Learner, lessons: Lessons, *, rounds: int, batches: int, seed: int
) -> tuple[Arrays, int]:
    """Weights after ``rounds`` updates on the decisions of ``batches`` lessons each, and how many
    decisions those were; deterministic by seed."""
    algorithm = _algorithm(learner, seed)
    weights, decisions = RewardWeights(**learner.weights), 0
    for number in range(rounds):
        policy = learner.policy(algorithm.arrays(), temperature=TEMPERATURE)
        heard = []
        for k in range(number * batches, (number + 1) * batches):
            lesson = lessons(k)
            batch = record_ablated(
                lesson.simulation,
                policy,
                seed=(seed * 1_000_003 + k) % (1 << 31),
                decisions=MOST_DECISIONS,
                mean_run_seconds=lesson.mean_run_seconds,
                weights=weights,
                delayed=learner.delayed,
            )
            if batch is not None:
                heard.append(batch)
        if heard:
            decisions += sum(map(len, heard))
            algorithm.update(concatenate(heard))
    return algorithm.arrays(), decisions


def weights_file(folder: Path, arm: str, seed: int) -> Path:
    """Where an arm's weights lie."""
    words = "-".join("".join(c if c.isalnum() else " " for c in arm).split())
    return folder / f"{words}-{seed}.safetensors"


@cache
def trained(path: Path) -> Arrays:
    """The weights in a file that :func:`weights_file` names."""
    arrays, _ = load(path)
    return arrays
