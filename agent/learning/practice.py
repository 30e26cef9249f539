"""What the learner practises on the cluster's own simulator; ``agent.learning.learner`` drives it.

It keeps the twin of the cluster up to date, rolls policies out on it, and tries candidates for the
teacher. What is trained on has other seeds than what the gate judges by.
"""

import logging

import numpy as np

from agent.cluster import nodes_file
from agent.cluster.records import Node
from agent.learning.batch import Batch
from agent.learning.distillation import Teacher
from agent.learning.reward import RewardWeights
from agent.learning.rollouts import rollout
from agent.learning.speeds import SpeedModel
from agent.learning.store import Store
from agent.learning.twin import Twin, build
from agent.scheduling.decision import make_policy
from agent.settings import Settings
from agent.simulator.labels import label
from common.weights import Arrays

log = logging.getLogger(__name__)

_ROLLOUT_SEED, _LABEL_SEED = 1 << 30, 1 << 29  # the gate's lie below both
LABEL_MEMORY = 30_000
"""Labels that the teacher keeps."""
LABEL_STEPS = 48
"""Optimiser steps towards the labels in each learning round."""
LABEL_MINIBATCH = 256


class Practice:
    """The cluster's own simulator and what it is used for."""

    def __init__(self, settings: Settings, store: Store, speeds: SpeedModel) -> None:
        self._settings, self._learn = settings, settings.learn
        self._store, self._speeds = store, speeds
        self._twin: Twin | None = None
        self._age = 0
        self.teacher = Teacher(LABEL_MEMORY)

    def nodes(self) -> list[Node]:
        """The nodes that ``agent serve`` told of; empty while it has not."""
        try:
            return nodes_file.read(self._settings.nodes_file)
        except nodes_file.NodesFileError as error:
            log.debug("%s", error)
            return []

    def twin(self, *, fresh: bool = False) -> Twin | None:
        """The cluster's simulator, used for at most ``gate_rounds`` rounds before it is built anew.

        None while too few jobs have finished or the nodes are not known.
        """
        if self._twin is None or fresh or self._age >= self._learn.gate_rounds:
            self._speeds.update(self._store.speed_sums())
            self._twin = build(self._store, self._speeds, self.nodes())
            self._age = 0
        return self._twin

    @property
    def wanted(self) -> bool:
        """Whether there is something to practise, and a twin to do it on."""
        return bool(self._learn.rollouts or self._learn.labels) and self.twin() is not None

    def rollouts(
        self,
        arrays: Arrays,
        temperature: float,
        *,
        seed: int,
        mean_run_seconds: float,
        weights: RewardWeights,
    ) -> list[Batch]:
        """Decisions of a policy on the twin."""
        twin = self.twin() if self._learn.rollouts else None
        self._age += 1
        if twin is None:
            return []
        # No margin: what is learned from must be what the algorithm takes the policy to be.
        rule = self._settings.serve.rule
        policy = make_policy(rule, arrays, margin=0.0, temperature=temperature)
        made = [
            rollout(
                twin.simulation(seed=_ROLLOUT_SEED + seed, window=n, jobs=self._learn.gate_jobs),
                policy,
                seed=_ROLLOUT_SEED + seed + n,
                decisions=self._learn.rollout_decisions,
                mean_run_seconds=mean_run_seconds,
                weights=weights,
            )
            for n in range(self._learn.rollouts)
        ]
        return [batch for batch in made if batch is not None]

    def teach(self, *, seed: int) -> int:
        """Try ``labels`` candidates on the twin for the teacher; returns how many it kept."""
        twin = self.twin() if self._learn.labels else None
        if twin is None:
            return 0
        labels = label(
            twin.simulation(seed=_LABEL_SEED + seed, window=0, jobs=self._learn.gate_jobs),
            make_policy(self._settings.serve.rule),
            seed=_LABEL_SEED + seed,
            rows=self._learn.labels,
        )
        if not len(labels.gain) or not np.isfinite(labels.gain).all():
            return 0
        return self.teacher.add(labels, twin.mean_seconds)
