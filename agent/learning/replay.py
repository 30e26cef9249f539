"""The replay buffer, the latest decisions in a ring of arrays; ``agent.learning.dqn`` uses it."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agent.learning.algorithm import Tensors
from agent.learning.batch import Batch


class Sample(NamedTuple):
    """``M`` decisions with the states that followed them."""

    now: Tensors
    next: Tensors
    """The decisions after these; where ``elapsed`` is infinite, these again, and void."""
    reward: npt.NDArray[np.float64]
    elapsed: npt.NDArray[np.float64]


class Undo(NamedTuple):
    """What :meth:`Replay.add` overwrote."""

    head: int
    size: int
    slots: npt.NDArray[np.int64]
    rows: dict[str, npt.NDArray[Any]]


def narrow(batch: Batch, width: int) -> Batch:
    """Keep of each row the taken candidate and the rule's best others, ``width`` in all.

    The correction is bounded, so what is dropped is what it could not lift to the top anyway where
    the rule's scores spread by more than twice the bound.
    """
    if batch.mask.shape[1] <= width:
        return batch
    rows = np.arange(len(batch))
    key = np.where(batch.mask, batch.rule_scores, -np.inf)
    key[rows, batch.action] = np.inf
    kept = np.argsort(-key, axis=1, kind="stable")[:, :width]
    return Batch(
        features=np.take_along_axis(batch.features, kept[:, :, None], 1),
        mask=np.take_along_axis(batch.mask, kept, 1),
        rule_scores=np.take_along_axis(batch.rule_scores, kept, 1),
        action=np.zeros(len(batch), np.int64),
        log_prob=batch.log_prob,
        reward=batch.reward,
        elapsed=batch.elapsed,
        ends=batch.ends,
    )


class Replay:
    """Up to ``capacity`` decisions of up to ``max_candidates`` candidates; the oldest go first.

    A decision's successor is the next slot of the ring, so each state is kept once. The last row of
    a trajectory that was cut off by the batch has no successor: it is kept as its predecessor's,
    but not sampled itself. The last row with an infinite ``elapsed`` is a true end and is sampled.
    """

    def __init__(self, capacity: int, max_candidates: int) -> None:
        self.capacity = capacity
        self.max_candidates = max_candidates
        self.head = 0
        """The slot that is written next."""
        self.size = 0
        self._arrays: dict[str, npt.NDArray[Any]] = {
            "features": np.zeros((capacity, 0, 0), np.float32),
            "mask": np.zeros((capacity, 0), np.bool_),
            "rule_scores": np.zeros((capacity, 0), np.float32),
            "action": np.zeros(capacity, np.int64),
            "reward": np.zeros(capacity, np.float64),
            "elapsed": np.zeros(capacity, np.float64),
            "ends": np.zeros(capacity, np.bool_),
        }

    def _grow(self, width: int, feature_count: int) -> None:
        old = self._arrays["mask"].shape[1]
        if width <= old:
            return
        for name, shape in (
            ("features", (self.capacity, width, feature_count)),
            ("mask", (self.capacity, width)),
            ("rule_scores", (self.capacity, width)),
        ):
            wider = np.zeros(shape, self._arrays[name].dtype)
            if old:
                wider[:, :old] = self._arrays[name]
            self._arrays[name] = wider

    def add(self, batch: Batch) -> Undo:
        """Write the rows of ``batch``, of which those beyond the capacity are passed over."""
        batch = narrow(batch, self.max_candidates)
        width = batch.mask.shape[1]
        self._grow(width, batch.features.shape[2])
        count = min(len(batch), self.capacity)
        slots = (self.head + np.arange(count)) % self.capacity
        undo = Undo(
            self.head, self.size, slots, {name: a[slots] for name, a in self._arrays.items()}
        )
        for name, array in self._arrays.items():
            new = getattr(batch, name)[-count:]
            if array.ndim == 1:
                array[slots] = new
            else:
                array[slots] = 0
                array[slots, :width] = new
        self._arrays["ends"][slots[-1]] = True
        self.head = int((self.head + count) % self.capacity)
        self.size = min(self.size + count, self.capacity)
        return undo

    def undo(self, undo: Undo) -> None:
        """Take the latest :meth:`add` back."""
        for name, rows in undo.rows.items():
            self._arrays[name][undo.slots] = rows
        self.head, self.size = undo.head, undo.size

    def _slots(self) -> npt.NDArray[np.int64]:
        """The filled slots, oldest first."""
        return np.arange(self.head - self.size, self.head) % self.capacity

    def learnable(self) -> npt.NDArray[np.int64]:
        """Slots that may be sampled, oldest first: with a successor, or a true end."""
        # By age, not by slot, so that a restored buffer, whose ring starts anew, draws alike.
        slots = self._slots()
        ends, elapsed = self._arrays["ends"][slots], self._arrays["elapsed"][slots]
        return slots[~ends | np.isposinf(elapsed)]

    def sample(self, rng: np.random.Generator, count: int) -> Sample:
        """Draw ``count`` decisions with replacement. Raises ValueError where none is learnable."""
        slots = rng.choice(self.learnable(), count)
        after = np.where(self._arrays["ends"][slots], slots, (slots + 1) % self.capacity)
        return Sample(
            self._tensors(slots),
            self._tensors(after),
            self._arrays["reward"][slots],
            self._arrays["elapsed"][slots],
        )

    def _tensors(self, slots: npt.NDArray[np.int64]) -> Tensors:
        return Tensors(
            *(
                torch.from_numpy(self._arrays[name][slots])
                for name in ("features", "mask", "rule_scores", "action")
            )
        )

    def content(self) -> dict[str, Tensor]:
        """The decisions, oldest first, by name."""
        slots = self._slots()
        return {name: torch.from_numpy(array[slots]) for name, array in self._arrays.items()}

    @classmethod
    def from_content(
        cls, content: dict[str, Tensor], capacity: int, max_candidates: int
    ) -> "Replay":
        """A buffer of what :meth:`content` returned; of a larger one, the latest rows.

        Raises:
            KeyError, ValueError: an array is missing or of another shape.
        """
        replay = cls(capacity, max_candidates)
        rows = {name: content[name].numpy() for name in replay._arrays}
        if len(rows["action"]):
            replay.add(Batch(**rows, log_prob=np.zeros(len(rows["action"]), np.float32)))
        return replay
