"""Members that learn policies, members that lie, and the hub between them, for ``federation``.

Called by the suite's ``prepare``. The hub is the real one with its members in this process: what
members send passes through the link's messages, quantised, and through the hub's validation.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import numpy as np

from agent.benchmark.federation_data import Cluster, Liar, Training
from agent.benchmark.knowledge import fill
from agent.learning.distillation import Teacher
from agent.learning.ppo import Ppo, PpoSettings
from agent.scheduling.decision import make_policy
from agent.simulator.hardware import load_speeds
from agent.simulator.labels import Labels, label
from agent.simulator.simulation import new_simulation
from agent.simulator.workloads import fastest_s
from common import link_pb2 as pb
from common.codec import decode_arrays, encode_delta
from common.policy import initial_arrays
from common.weights import Arrays, delta, norm, quantise

History = Sequence[tuple[float, float]]
_GROUP = "fedsched.aggregation"
_LABEL_SEED = 10_000  # windows to learn from are drawn with other seeds than those lived through


class Hub(Protocol):
    """What the suite needs of ``coordinator.offline.OfflineHub``."""

    @property
    def policy(self) -> Arrays: ...
    def round(self) -> dict[str, str]: ...
    def close(self) -> None: ...


Answer = Callable[[pb.HubMessage], pb.MemberMessage]
OpenHub = Callable[[Path, Arrays, Mapping[str, Answer], Mapping[str, Any]], Hub]


def open_hub() -> OpenHub:
    """The hub's class. Raises RuntimeError where the hub is not installed."""
    found = [point for point in entry_points(group=_GROUP) if point.name == "hub"]
    try:
        hub: OpenHub = found[0].load()
    except (IndexError, ImportError) as error:
        raise RuntimeError(
            "a federation needs the hub beside the agent, and it is not installed here "
            f"({error}): pip install 'fedsched[learn,coordinator]'"
        ) from error
    return hub


def teach(
    cluster: Cluster, training: Training, history: History, *, load: float, rule: str,
    labels: int, seed: int,
) -> tuple[Labels, int]:  # fmt: skip
    """What candidates led to on the cluster's own jobs, and how many jobs that took.

    Gains are in typical run times of a job (their geometric mean), as the rule's scores are logs
    of times: in mean run times, which a few jobs of weeks decide, most choices would count for
    nothing.
    """
    speeds, made, windows = load_speeds(), list[Labels](), 0
    while sum(len(part.gain) for part in made) < labels:
        draw = _LABEL_SEED * (seed + 1) + windows
        jobs = cluster.drawn(speeds, jobs=training.jobs, load=load, seed=draw)
        sim = new_simulation(jobs, cluster.nodes, speeds, seed=draw)
        fill(sim, None, history)
        seconds = fastest_s(jobs, speeds)
        found = label(
            sim, make_policy(rule), seed=draw, rows=labels, share=training.share,
            others=training.others, horizon=training.horizon * float(seconds.mean()),
        )  # fmt: skip
        typical = np.float32(np.exp(np.log(seconds).mean()))
        made.append(replace(found, gain=found.gain / typical))
        windows += 1
    return joined(made), windows * training.jobs


def joined(parts: Sequence[Labels]) -> Labels:
    """Labels of several windows as one; no decision of one is taken for one of another."""
    sizes = [int(part.decision.max(initial=-1)) + 1 for part in parts]
    starts = np.cumsum([0, *sizes[:-1]])
    return Labels(
        features=np.concatenate([part.features for part in parts]),
        rule_scores=np.concatenate([part.rule_scores for part in parts]),
        gain=np.concatenate([part.gain for part in parts]),
        decision=np.concatenate([p.decision + n for p, n in zip(parts, starts, strict=True)]),
    )


class Learner:
    """A member: learns in each round from where the hub left it, and uploads what has changed."""

    def __init__(self, labels: Labels, training: Training, *, jobs: int, seed: int) -> None:
        """``jobs`` of its own it has scheduled, an equal part of them in each round."""
        self._training = training
        self._teacher = Teacher(len(labels.gain))
        self._teacher.add(labels, 1.0)
        self._algorithm = Ppo(PpoSettings(learning_rate=training.learning_rate), seed=seed)
        # All begin from one policy, whatever seed draws their minibatches.
        self._algorithm.set_weights(initial_arrays())
        self._pods_each = max(jobs // training.rounds, 1)
        self._pods = 0
        self._residual: Arrays | None = None
        self._pending: Arrays | None = None

    @property
    def policy(self) -> Arrays:
        """What it would decide by now."""
        return self._algorithm.arrays()

    def learn(self) -> None:
        """One round's optimiser steps."""
        self._algorithm.distil(
            self._teacher, steps=self._training.steps, minibatch=self._training.minibatch
        )

    def __call__(self, message: pb.HubMessage) -> pb.MemberMessage:
        """Answer a message of the hub's."""
        if message.WhichOneof("kind") == "train":
            return pb.MemberMessage(update=self._train(message.train))
        pushed = message.personalize
        self._algorithm.set_weights(decode_arrays(pushed.arrays))
        self._residual = self._pending
        return pb.MemberMessage(adopted=pb.Adopted(reply_to=pushed.id, adopted=True))

    def _train(self, train: pb.Train) -> pb.Update:
        base = decode_arrays(train.arrays)
        self._algorithm.set_global(base, train.proximal_mu)
        self.learn()
        self._pods += self._pods_each
        code, self._pending = quantise(self.change(base), self._residual)
        return pb.Update(
            reply_to=train.id,
            base_round=train.round,
            base_version=train.version,
            tensors=encode_delta(code),
            scheduled_pods=self.pods(),
            counter=1,
            learning_rounds=train.round,
        )

    def change(self, base: Arrays) -> Arrays:
        """What it sends as its change of the policy ``base``."""
        return delta(self.policy, base)

    def pods(self) -> int:
        """How many pods it says that it has scheduled."""
        return self._pods


class LyingLearner(Learner):
    """A member that learns like the others and sends something else."""

    def __init__(
        self, labels: Labels, training: Training, *, jobs: int, seed: int, kind: Liar
    ) -> None:
        super().__init__(labels, training, jobs=jobs, seed=seed)
        self._kind, self._rng = kind, np.random.default_rng([seed, 13])
        self._claimed = 0

    def change(self, base: Arrays) -> Arrays:
        honest = super().change(base)
        if not self._kind.random:
            return {name: (self._kind.scale * a).astype(np.float32) for name, a in honest.items()}
        drawn = {
            name: self._rng.standard_normal(a.shape).astype(np.float32)
            for name, a in honest.items()
        }
        factor = np.float32(self._kind.random / norm(drawn))
        return {name: factor * array for name, array in drawn.items()}

    def pods(self) -> int:
        self._claimed += self._kind.pods
        return self._claimed or super().pods()

    def _train(self, train: pb.Train) -> pb.Update:
        update = super()._train(train)
        if self._kind.broken:
            for tensor in update.tensors:
                tensor.scale = math.nan
        return update


@dataclass(frozen=True)
class Course:
    """What came of a federation."""

    shared: Arrays
    policies: dict[str, Arrays]
    """What each member decides by in the end."""
    refused: dict[str, int]
    """In how many rounds each member's update was set aside."""


def federate(learners: Mapping[str, Learner], settings: Mapping[str, Any], rounds: int) -> Course:
    """Let the members learn together for some rounds, from the rule on."""
    with TemporaryDirectory() as folder:
        hub = open_hub()(Path(folder), initial_arrays(), learners, settings)
        try:
            refused = dict.fromkeys(learners, 0)
            for _ in range(rounds):
                for name in hub.round():
                    refused[name] += 1
            shared = hub.policy
        finally:
            hub.close()
    return Course(shared, {name: learner.policy for name, learner in learners.items()}, refused)
