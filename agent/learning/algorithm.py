"""What PPO and DQN share: network, optimiser, proximal anchor, checks and checkpoints.

``agent.learning.learner`` drives either algorithm through :class:`Algorithm` alone.
"""

import json
import struct
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor

from agent.learning.adam import Adam
from agent.learning.batch import Batch
from agent.learning.distillation import Teacher, distillation_loss
from agent.learning.network import Network, load_arrays, to_arrays
from agent.learning.proximal import Proximal
from agent.learning.returns import ReturnScale
from common.policy import ARCHITECTURE
from common.weights import Arrays

CHECKPOINT_FORMAT = 2
DISTILLATION_GRAD_NORM = 1.0


class LearningError(ValueError):
    """A batch cannot be learned from, or an update went astray; the learner is as it was before."""


class CheckpointError(ValueError):
    """Saved learner state is damaged or of another algorithm or architecture."""


class Tensors(NamedTuple):
    """The part of a batch that enters the network, as tensors that share the batch's memory."""

    features: Tensor
    """[B, C, F]"""
    mask: Tensor
    """[B, C] bool"""
    rule_scores: Tensor
    """[B, C]"""
    action: Tensor
    """[B] int64"""

    def rows(self, index: Tensor) -> "Tensors":
        """The rows at ``index`` [M]."""
        return Tensors(*(tensor[index] for tensor in self))


def tensors(batch: Batch) -> Tensors:
    """The batch's arrays as tensors; padding of the rule's scores is set to 0."""
    return Tensors(
        torch.from_numpy(np.ascontiguousarray(batch.features, np.float32)),
        torch.from_numpy(np.ascontiguousarray(batch.mask)),
        torch.from_numpy(np.where(batch.mask, batch.rule_scores, 0.0).astype(np.float32)),
        torch.from_numpy(np.ascontiguousarray(batch.action, np.int64)),
    )


def check_batch(batch: Batch) -> None:
    """Raise LearningError, naming field and row, where a batch cannot be learned from."""

    def refuse(bad: Any, what: str) -> None:
        rows = np.flatnonzero(np.asarray(bad))
        if len(rows):
            raise LearningError(
                f"{what} in row {rows[0]} ({len(rows)} of {len(batch)} rows); "
                "set these decisions aside and learn from the others"
            )

    if len(batch) == 0:
        raise LearningError("the batch is empty; wait for decisions before an update")
    refuse(~batch.mask.any(1), "no candidate")
    known = (batch.action >= 0) & (batch.action < batch.mask.shape[1])
    refuse(~known, "the action is no column")
    refuse(~batch.mask[np.arange(len(batch)), batch.action], "the action is padding")
    refuse(~np.isfinite(batch.features).all((1, 2)), "features hold NaN or infinity")
    refuse(
        (~np.isfinite(batch.rule_scores) & batch.mask).any(1), "rule_scores hold NaN or infinity"
    )
    refuse(~np.isfinite(batch.log_prob) | (batch.log_prob > 1e-4), "log_prob is no log probability")
    refuse(~np.isfinite(batch.reward), "reward is NaN or infinite")
    refuse(np.isnan(batch.elapsed) | (batch.elapsed < 0), "elapsed is negative or NaN")
    refuse(np.isposinf(batch.elapsed) & ~batch.ends, "elapsed is infinite, yet a decision follows")


class Algorithm(ABC):
    """A learner of the shared scorer's weights: deterministic by its seed, on one thread.

    A failed update raises :class:`LearningError` and leaves weights, optimiser, counters and random
    state as they were.
    """

    name: str

    def __init__(self, *, seed: int, learning_rate: float, reward_scale: float | None) -> None:
        # The network is small: more threads would only take cores from the serving process.
        torch.set_num_threads(1)
        self.network = Network(seed)
        self.optimiser = Adam(self.network.parameters(), rate=learning_rate)
        self.proximal = Proximal(self.network)
        self.scale = ReturnScale(reward_scale)
        self.rng = np.random.default_rng(seed)
        self.updates = 0
        """Successful updates so far."""

    def update(self, batch: Batch) -> dict[str, float]:
        """Learn from ``batch``; return the update's metrics by their standard names, all finite.

        Raises:
            LearningError: the batch or what came of it is not finite; nothing has changed.
        """
        check_batch(batch)
        self._check_finite_outputs(batch)
        before = self._snapshot()
        try:
            metrics = self._learn(batch)
            self._check_weights()
        except BaseException:
            self._restore(*before)
            raise
        self.updates += 1
        return metrics

    def distil(self, teacher: Teacher, *, steps: int, minibatch: int) -> dict[str, float]:
        """Take optimiser steps towards the teacher's labels; return the mean loss.

        Raises:
            LearningError: a label, or what came of it, is not finite; nothing has changed.
        """
        before = self._snapshot()
        try:
            losses = []
            for _ in range(steps):
                loss = distillation_loss(self.network, teacher.sample(self.rng, minibatch))
                losses.append(float(loss.detach()))
                self._step(loss + self.proximal.term(), DISTILLATION_GRAD_NORM)
            self._check_weights()
        except BaseException:
            self._restore(*before)
            raise
        return {"distillation_loss": float(np.mean(losses)), "labels": float(len(teacher))}

    @abstractmethod
    def _learn(self, batch: Batch) -> dict[str, float]:
        """The algorithm's own update of a batch that was found sound."""

    def _check_finite_outputs(self, batch: Batch) -> None:
        data = tensors(batch)
        with torch.no_grad():
            corrections, values = self.network(data.features, data.mask)
        if not (torch.isfinite(corrections).all() and torch.isfinite(values).all()):
            raise LearningError(
                "the network's output overflows on this batch: its features are out of range; "
                "set the batch aside and check the features' units"
            )

    def _check_weights(self) -> None:
        for name, weight in self.network.named_parameters():
            if not torch.isfinite(weight).all():
                raise LearningError(f"the update made {name} NaN or infinite; it was undone")

    def _step(self, loss: Tensor, max_grad_norm: float) -> float:
        """One optimiser step; return the gradient's norm before clipping."""
        if not torch.isfinite(loss):
            raise LearningError(
                "the loss is NaN or infinite; the update was undone: "
                "set the batch aside, or lower the learning rate if this recurs"
            )
        self.optimiser.zero_grad()
        torch.autograd.backward(loss)
        norm = torch.nn.utils.clip_grad_norm_(self.network.parameters(), max_grad_norm)
        if not torch.isfinite(norm):
            raise LearningError("the gradient is NaN or infinite; the update was undone")
        self.optimiser.step()
        return float(norm)

    def arrays(self) -> Arrays:
        """A copy of the weights by name."""
        return to_arrays(self.network)

    def set_weights(self, arrays: Arrays) -> None:
        """Go on from other weights, such as a policy pushed by the hub; Adam's moments stay.

        Raises:
            ValueError: they are not finite weights of this architecture; nothing has changed.
        """
        load_arrays(self.network, arrays)

    def set_global(self, arrays: Arrays, mu: float) -> None:
        """Anchor FedProx's term at the shared policy ``arrays``; 0 for ``mu`` exerts no pull.

        Raises:
            ValueError: they are not this architecture's, or ``mu`` is negative.
        """
        self.proximal.set(arrays, mu)

    def state(self) -> bytes:
        """All that a killed learner needs to go on exactly where it was: safetensors, no pickle."""
        content, counters = self._saved()
        counters = {
            **counters,
            "format": CHECKPOINT_FORMAT,
            "algorithm": self.name,
            "architecture": ARCHITECTURE,
        }
        return bytes(save_safetensors(content, {"counters": json.dumps(counters)}))

    def restore(self, state: bytes) -> None:
        """Continue from what :meth:`state` returned.

        Raises:
            CheckpointError: it is damaged, or another algorithm's or architecture's; nothing has
                changed.
        """
        try:
            content = load_safetensors(state)
            (length,) = struct.unpack_from("<Q", state)
            header = json.loads(state[8 : 8 + length])
            counters = json.loads(header["__metadata__"]["counters"])
        except (SafetensorError, struct.error, ValueError, KeyError) as error:
            raise CheckpointError(
                f"the learner's saved state is damaged ({error}); delete it to start anew"
            ) from error
        own = {
            "format": CHECKPOINT_FORMAT,
            "algorithm": self.name,
            "architecture": ARCHITECTURE,
        }
        for key, value in own.items():
            if counters.get(key) != value:
                raise CheckpointError(
                    f"the learner's saved state has {key} {counters.get(key)!r}, this learner "
                    f"{value!r}; choose the former setting or delete the state to start anew"
                )
        before = self._snapshot()
        try:
            self._load(content, counters)
        except (LookupError, ValueError, RuntimeError, TypeError) as error:
            self._restore(*before)
            raise CheckpointError(
                f"the learner's saved state is incomplete ({error}); delete it to start anew"
            ) from error

    def _saved(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and JSON counters of :meth:`state`; extended where an algorithm keeps more."""
        return self._snapshot()

    def _load(self, content: dict[str, Tensor], counters: dict[str, Any]) -> None:
        """Take back what :meth:`_saved` gave; KeyError or ValueError where it is not all there."""
        self._restore(content, counters)

    def _snapshot(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        content = {f"network.{n}": w.clone() for n, w in self.network.state_dict().items()}
        content |= {f"adam.{name}": moment for name, moment in self.optimiser.state().items()}
        for name, array in self.proximal.arrays().items():
            content[f"global.{name}"] = torch.from_numpy(array)
        counters = {
            "updates": self.updates,
            "random": self.rng.bit_generator.state,
            "mu": self.proximal.mu,
            "scale_count": self.scale.count,
            "scale_mean_square": self.scale.mean_square,
        }
        return content, counters

    def _restore(self, content: dict[str, Tensor], counters: dict[str, Any]) -> None:
        def part(prefix: str) -> dict[str, Tensor]:
            return {n.removeprefix(prefix): t for n, t in content.items() if n.startswith(prefix)}

        load_arrays(self.network, {n: t.numpy() for n, t in part("network.").items()})
        self.optimiser.restore(part("adam."))
        if shared := part("global."):
            arrays = {name: tensor.numpy() for name, tensor in shared.items()}
            self.proximal.set(arrays, float(counters["mu"]))
        else:
            self.proximal.clear()
        self.updates = int(counters["updates"])
        self.rng.bit_generator.state = counters["random"]
        self.scale.count = float(counters["scale_count"])
        self.scale.mean_square = float(counters["scale_mean_square"])
