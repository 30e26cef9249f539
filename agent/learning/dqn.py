"""Deep Q-learning over candidates; ``agent.learning.learner`` drives it.

V. Mnih et al., https://doi.org/10.1038/nature14236, double (https://arxiv.org/abs/1509.06461) and
dueling (https://arxiv.org/abs/1511.06581), under a semi-Markov discount.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from agent.learning.algorithm import Algorithm, Tensors, tensors
from agent.learning.batch import Batch
from agent.learning.network import (
    Network,
    load_arrays,
    mean_square,
    policy_entropy,
    policy_log_probs,
)
from agent.learning.replay import Replay
from agent.learning.returns import discount, discounted_returns
from common.weights import Arrays


@dataclass(frozen=True)
class DqnSettings:
    """Settings of :class:`Dqn`."""

    learning_rate: float = 5e-4
    """Adam's step size."""
    tau: float = 10.0
    """Horizon in mean run times of a job: the discount over a time Δt is exp(−Δt/τ)."""
    advantage_scale: float = 0.5
    """What one unit of score is worth in units of the (scaled) return."""
    capacity: int = 4096
    """Decisions in the replay buffer."""
    max_candidates: int = 64
    """Candidates kept of a decision: the taken one and the rule's best."""
    warm_up: int = 64
    """Decisions that must be in the buffer before the first step."""
    minibatch: int = 64
    """Decisions in an optimiser step."""
    updates_per_decision: float = 0.25
    """Optimiser steps per new decision; at least one step an update."""
    polyak: float = 0.01
    """Share of the way that the target network goes towards the network in each step."""
    max_grad_norm: float = 10.0
    """Norm to which a gradient is clipped."""
    restraint: float = 0.1
    """Weight of the candidates' mean squared correction: without evidence the policy returns to the
    rule."""
    temperature: float = 0.25
    """Softmax temperature of the acting policy, in the unit of the rule's score."""
    reward_scale: float | None = None
    """Factor on rewards; None divides them by the running root mean square of returns."""

    def __post_init__(self) -> None:
        positive = ("learning_rate", "tau", "advantage_scale", "capacity", "max_candidates")
        for name in (*positive, "minibatch", "updates_per_decision", "max_grad_norm"):
            if not getattr(self, name) > 0:
                raise ValueError(f"DQN's {name} is {getattr(self, name)}; it must be above 0")
        if not self.temperature > 0:
            raise ValueError(f"DQN's temperature is {self.temperature}; it must be above 0")
        if not 0.0 < self.polyak <= 1.0:
            raise ValueError(f"DQN's polyak is {self.polyak}; it must lie in 0..1 and not be 0")


def dueling(scores: Tensor, value: Tensor, mask: Tensor, advantage_scale: float) -> Tensor:
    """Q(s, a) = V(s) + A(s, a) − mean over the candidates of A, with A = scores · advantage_scale.

    Args:
        scores: [B, C] rule score + correction; padding may hold any finite number.
        value: [B].
        mask: [B, C] bool with at least one candidate a row.

    Returns:
        [B, C]; −inf for padding. With a single candidate Q is V.
    """
    advantage = advantage_scale * scores
    weight = mask.to(advantage.dtype)
    mean = (advantage * weight).sum(1, keepdim=True) / weight.sum(1, keepdim=True)
    return (value.unsqueeze(1) + advantage - mean).masked_fill(~mask, -torch.inf)


def double_target(
    reward: Tensor, gamma: Tensor, next_online: Tensor, next_target: Tensor
) -> Tensor:
    """r + γ · Q_target(s', argmax_a Q_online(s', a)) [M]; both Q [M, C] hold −inf for padding."""
    best = next_online.argmax(1, keepdim=True)
    return reward + gamma * next_target.gather(1, best).squeeze(1)


class Dqn(Algorithm):
    """Double, dueling DQN on the shared scorer.

    The greedy action is that of the highest rule score + correction, as in the extender. The acting
    policy is PPO's too, softmax((rule score + correction) / temperature): since A is the score
    times ``advantage_scale``, that is Boltzmann exploration on Q. What it tries is never far from
    what the rule holds good, as an ε-greedy choice among all nodes would be.
    """

    name = "dqn"

    def __init__(self, settings: DqnSettings | None = None, *, seed: int) -> None:
        self.settings = settings or DqnSettings()
        super().__init__(
            seed=seed,
            learning_rate=self.settings.learning_rate,
            reward_scale=self.settings.reward_scale,
        )
        self.target = Network(seed)
        self.target.requires_grad_(False)
        self.replay = Replay(self.settings.capacity, self.settings.max_candidates)

    def set_weights(self, arrays: Arrays) -> None:
        """Go on from other weights, in the target network as well; see the base class."""
        super().set_weights(arrays)
        load_arrays(self.target, arrays)

    def _q(self, network: Network, data: Tensors) -> Tensor:
        """Q of every candidate [M, C], −inf for padding."""
        corrections, value = network(data.features, data.mask)
        scores = data.rule_scores + corrections
        return dueling(scores, value, data.mask, self.settings.advantage_scale)

    def _learn(self, batch: Batch) -> dict[str, float]:
        s = self.settings
        ends = batch.ends.copy()
        ends[-1] = True
        undo = self.replay.add(batch)
        try:
            raw = batch.reward.astype(np.float64)
            self.scale.observe(discounted_returns(raw, discount(batch.elapsed, s.tau), ends))
            steps = 0
            if len(self.replay.learnable()) >= max(s.warm_up, 1):
                steps = max(1, math.ceil(len(batch) * s.updates_per_decision))
            history = [self._train_once() for _ in range(steps)]
            self._check_weights()
        except BaseException:
            self.replay.undo(undo)
            raise
        measured = {
            key: float(np.mean([entry[key] for entry in history])) if history else 0.0
            for key in ("loss", "value_loss", "grad_norm", "proximal_term", "q_mean")
        }
        return {
            **measured,
            "entropy": self._entropy(batch),
            "distance_to_global": self.proximal.distance(),
            "reward": float(np.mean(raw)),
            "forced": float(np.mean(batch.mask.sum(1) == 1)),
            "replay": float(self.replay.size),
            "steps": float(steps),
        }

    def _train_once(self) -> dict[str, float]:
        s = self.settings
        sample = self.replay.sample(self.rng, s.minibatch)
        gamma = torch.from_numpy(discount(sample.elapsed, s.tau).astype(np.float32))
        reward = torch.from_numpy((sample.reward * self.scale.factor).astype(np.float32))
        with torch.no_grad():
            target = double_target(
                reward, gamma, self._q(self.network, sample.next), self._q(self.target, sample.next)
            )
        q = self._q(self.network, sample.now).gather(1, sample.now.action.unsqueeze(1)).squeeze(1)
        td_loss = functional.smooth_l1_loss(q, target)
        proximal = self.proximal.term()
        corrections, _ = self.network(sample.now.features, sample.now.mask)
        restraint = s.restraint * mean_square(corrections, sample.now.mask).mean()
        loss = td_loss + restraint + proximal
        grad_norm = self._step(loss, s.max_grad_norm)
        with torch.no_grad():
            pairs = zip(self.target.parameters(), self.network.parameters(), strict=True)
            for slow, fast in pairs:
                slow.lerp_(fast, s.polyak)
        return {
            "loss": float(loss.detach()),
            "value_loss": float(td_loss.detach()),
            "grad_norm": grad_norm,
            "proximal_term": float(proximal.detach()),
            "q_mean": float(q.detach().mean()),
        }

    def _entropy(self, batch: Batch) -> float:
        data = tensors(batch)
        with torch.no_grad():
            corrections, _ = self.network(data.features, data.mask)
            scores = data.rule_scores + corrections
            log_probs = policy_log_probs(scores, data.mask, self.settings.temperature)
            return float(policy_entropy(log_probs).mean())

    def _snapshot(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        content, counters = super()._snapshot()
        content.update({f"target.{n}": w.clone() for n, w in self.target.state_dict().items()})
        return content, counters

    def _restore(self, content: dict[str, Tensor], counters: dict[str, Any]) -> None:
        super()._restore(content, counters)
        part = {n.removeprefix("target."): w for n, w in content.items() if n.startswith("target.")}
        load_arrays(self.target, {name: w.numpy() for name, w in part.items()})

    def _saved(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        content, counters = super()._saved()
        content.update({f"replay.{name}": rows for name, rows in self.replay.content().items()})
        return content, counters

    def _load(self, content: dict[str, Tensor], counters: dict[str, Any]) -> None:
        super()._load(content, counters)
        rows = {n.removeprefix("replay."): t for n, t in content.items() if n.startswith("replay.")}
        capacity, width = self.settings.capacity, self.settings.max_candidates
        self.replay = Replay.from_content(rows, capacity, width)
