"""Proximal policy optimisation over candidates; ``agent.learning.learner`` drives it.

J. Schulman et al., https://arxiv.org/abs/1707.06347, with generalised advantage estimation
(https://arxiv.org/abs/1506.02438) under a semi-Markov discount, and an importance weight that lets
it learn from decisions of older policies (J. Hilton et al., https://arxiv.org/abs/2110.00641).
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agent.learning.algorithm import Algorithm, Tensors, tensors
from agent.learning.batch import Batch
from agent.learning.network import mean_square, policy_entropy, policy_log_probs
from agent.learning.returns import F64, discount, discounted_returns


@dataclass(frozen=True)
class PpoSettings:
    """Settings of :class:`Ppo`."""

    learning_rate: float = 5e-4
    """Adam's step size."""
    clip: float = 0.2
    """How far the ratio of new to old probability may leave 1 and still be rewarded."""
    tau: float = 10.0
    """Horizon in mean run times of a job: the discount over a time Δt is exp(−Δt/τ)."""
    gae_lambda: float = 0.95
    """GAE's λ per decision: 0 trusts the value head, 1 the observed rewards."""
    entropy: float = 0.0
    """Weight of the entropy bonus, per nat. Off: the rule's scores keep the policy soft, and
    a bonus drifts away from the rule wherever rewards say little."""
    restraint: float = 0.2
    """Weight of the candidates' mean squared correction: without evidence the policy returns to the
    rule."""
    value: float = 0.5
    """Weight of the value loss."""
    epochs: int = 4
    """Passes over a batch."""
    minibatch: int = 256
    """Decisions in an optimiser step."""
    max_grad_norm: float = 0.5
    """Norm to which a gradient is clipped."""
    target_kl: float = 0.03
    """Approximate KL divergence (nats) from the policy before the update that ends its epochs."""
    importance_limit: float = 2.0
    """Upper bound of the importance weight of a decision that another policy made."""
    temperature: float = 0.25
    """Softmax temperature of the policy, in the unit of the rule's score."""
    reward_scale: float | None = None
    """Factor on rewards; None divides them by the running root mean square of returns."""

    def __post_init__(self) -> None:
        positive = ("learning_rate", "clip", "tau", "epochs", "minibatch", "max_grad_norm")
        for name in (*positive, "target_kl", "importance_limit", "temperature"):
            if not getattr(self, name) > 0:
                raise ValueError(f"PPO's {name} is {getattr(self, name)}; it must be above 0")
        if not 0.0 <= self.gae_lambda <= 1.0:
            raise ValueError(f"PPO's gae_lambda is {self.gae_lambda}; it must lie in 0..1")


def successor_values(value: F64, ends: npt.NDArray[np.bool_]) -> F64:
    """Value [B] of the state after each row: the next row's, and its own where a trajectory ends.

    A trajectory that ends in the batch goes on in the cluster: it is truncated, and the state one
    decision later is best guessed to be worth as much as this one. A true end has an infinite
    elapsed time, whose discount of 0 makes the guess void.
    """
    following = np.append(value[1:], value[-1:])
    return np.where(ends, value, following)


def gae(
    reward: npt.NDArray[np.floating],
    value: F64,
    next_value: F64,
    elapsed: npt.NDArray[np.floating],
    ends: npt.NDArray[np.bool_],
    tau: float,
    gae_lambda: float,
) -> tuple[F64, F64]:
    """Generalised advantage estimation with the discount γ_t = exp(−elapsed_t / tau).

    δ_t = r_t + γ_t V(s_{t+1}) − V(s_t) and A_t = δ_t + γ_t λ A_{t+1}, where A_{t+1} is 0 behind the
    last row of a trajectory.

    Args:
        reward: [B] from each decision to the next.
        value: [B] of the state that was decided in.
        next_value: [B] of the state after it, see :func:`successor_values`.
        elapsed: [B] mean run times to the next decision; infinite at a true end.
        ends: [B] whether a trajectory's last row.
        tau: horizon, in the same unit.
        gae_lambda: λ in 0..1.

    Returns:
        Advantages [B] and the value head's targets [B], advantage + value.
    """
    gamma = discount(elapsed, tau)
    delta = reward + gamma * next_value - value
    advantage = np.zeros_like(delta)
    following = 0.0
    for row in range(len(delta) - 1, -1, -1):
        carried = 0.0 if ends[row] else float(gamma[row]) * gae_lambda * following
        following = float(delta[row]) + carried
        advantage[row] = following
    return advantage, advantage + value


def normalise(advantage: F64, free: npt.NDArray[np.bool_]) -> F64:
    """Advantages [B] to mean 0 and deviation 1 over the ``free`` rows; 0 in the others.

    Forced rows say nothing about a choice, so they must not shift the others' either.
    """
    chosen = advantage[free]
    if not len(chosen):
        return np.zeros_like(advantage)
    return np.where(free, (advantage - chosen.mean()) / (chosen.std() + 1e-8), 0.0)


def clipped_loss(ratio: Tensor, advantage: Tensor, clip: float) -> Tensor:
    """PPO's surrogate loss of each row [M]: −min(ratio·A, clamp(ratio, 1 ± clip)·A)."""
    return -torch.min(ratio * advantage, ratio.clamp(1.0 - clip, 1.0 + clip) * advantage)


class Ppo(Algorithm):
    """PPO on the shared scorer: π(a|s) = softmax((rule score + correction) / temperature)."""

    name = "ppo"

    def __init__(self, settings: PpoSettings | None = None, *, seed: int) -> None:
        self.settings = settings or PpoSettings()
        super().__init__(
            seed=seed,
            learning_rate=self.settings.learning_rate,
            reward_scale=self.settings.reward_scale,
        )

    def _evaluate(self, data: Tensors) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Log probability of the taken action, entropy, value and mean squared correction; [M]."""
        corrections, value = self.network(data.features, data.mask)
        scores = data.rule_scores + corrections
        log_probs = policy_log_probs(scores, data.mask, self.settings.temperature)
        taken = log_probs.gather(1, data.action.unsqueeze(1)).squeeze(1)
        return taken, policy_entropy(log_probs), value, mean_square(corrections, data.mask)

    def _learn(self, batch: Batch) -> dict[str, float]:
        s = self.settings
        data = tensors(batch)
        ends = batch.ends.copy()
        ends[-1] = True

        # The policy before the update is what ratios are clipped around and KL is measured from.
        # Where another policy made the decision (an older one, or a greedy one), the row is
        # weighted by how much likelier this one is to make it: 1 where they are the same.
        with torch.no_grad():
            old_log_prob, _, old_value, _ = self._evaluate(data)
            behaviour = torch.from_numpy(batch.log_prob.astype(np.float32))
            importance = (old_log_prob - behaviour).exp().clamp(max=s.importance_limit)

        raw = batch.reward.astype(np.float64)
        self.scale.observe(discounted_returns(raw, discount(batch.elapsed, s.tau), ends))
        reward, value = raw * self.scale.factor, old_value.numpy().astype(np.float64)
        advantage, returns = gae(
            reward, value, successor_values(value, ends), batch.elapsed, ends, s.tau, s.gae_lambda
        )
        forced = batch.mask.sum(1) == 1
        free = torch.from_numpy(~forced)
        normal = torch.from_numpy(normalise(advantage, ~forced).astype(np.float32))
        target = torch.from_numpy(returns.astype(np.float32))

        history: dict[str, list[float]] = {}
        stop = False
        for _ in range(s.epochs):
            order = self.rng.permutation(len(batch))
            for start in range(0, len(batch), s.minibatch):
                rows = torch.from_numpy(order[start : start + s.minibatch])
                log_prob, entropy, value_now, squared = self._evaluate(data.rows(rows))
                # Forced rows (one candidate) offer no choice: only the value learns from them.
                weight = free[rows].to(log_prob.dtype)
                count = weight.sum().clamp(min=1.0)
                log_ratio = log_prob - old_log_prob[rows]
                ratio = log_ratio.exp()
                surrogate = importance[rows] * clipped_loss(ratio, normal[rows], s.clip)
                policy_loss = (surrogate * weight).sum() / count
                entropy_mean = (entropy * weight).sum() / count
                value_loss = 0.5 * (value_now - target[rows]).square().mean()
                proximal = self.proximal.term()
                restraint = s.restraint * (squared * weight).sum() / count
                loss = policy_loss - s.entropy * entropy_mean + s.value * value_loss
                loss = loss + restraint + proximal
                with torch.no_grad():
                    # http://joschu.net/blog/kl-approx.html, the estimator of low variance.
                    kl = (((ratio - 1.0) - log_ratio) * weight).sum() / count
                    clipped = (((ratio - 1.0).abs() > s.clip) * weight).sum() / count
                if float(kl) > s.target_kl:
                    stop = True
                    break
                measured = {
                    "loss": loss,
                    "policy_loss": policy_loss,
                    "value_loss": value_loss,
                    "entropy": entropy_mean,
                    "approx_kl": kl,
                    "clip_fraction": clipped,
                    "proximal_term": proximal,
                }
                for key, tensor in measured.items():
                    history.setdefault(key, []).append(float(tensor.detach()))
                history.setdefault("grad_norm", []).append(self._step(loss, s.max_grad_norm))
            if stop:
                break

        variance = float(np.var(returns))
        explained = 1.0 - float(np.var(returns - value)) / variance if variance > 1e-12 else 0.0
        return {
            **{key: float(np.mean(values)) for key, values in history.items()},
            "explained_variance": explained,
            "distance_to_global": self.proximal.distance(),
            "reward": float(np.mean(raw)),
            "forced": float(np.mean(forced)),
            "steps": float(len(history["loss"])),
        }
