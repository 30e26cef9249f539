"""Keeps the decision path's speeds file in step with the speed model; used by the learner."""

from pathlib import Path

import numpy as np

from agent.cluster import speeds_file
from agent.learning.speeds import SpeedModel
from agent.learning.store import Store
from agent.learning.twin import known_kinds

KINDS = 200
"""Kinds of work that the file lists, the most frequent first."""


class SpeedsPublisher:
    """Writes the file where what is known has changed enough to matter.

    Args:
        path: the speeds file.
        store: the experience, for kinds and sums.
        model: the speed model to predict with.
    """

    def __init__(self, path: Path, store: Store, model: SpeedModel) -> None:
        self.path, self.store, self.model = path, store, model
        self._written: tuple[object, ...] = ()

    def publish(self, models: list[str]) -> bool:
        """Predict for the GPU ``models`` and the kinds seen; returns whether the file was written.

        Without models those are taken that pods were seen on. Readings come by the second, so that
        a file is written for every 5 % more of them, for new kinds or models and for new peers.

        Raises:
            OSError: the file cannot be written.
        """
        models = models or self._bound_models()
        kinds = known_kinds(self.store)[:KINDS]
        seen = self.store.counter("speed_observations")
        stamp = (
            tuple(models),
            tuple(kinds),
            int(np.log1p(seen) * 20),
            self.model.members,
            hash(tuple(sorted(self.model.peers.items()))),
        )
        if stamp == self._written or not (models or kinds):
            return False
        self.model.update(self.store.speed_sums())
        speeds_file.write(self.path, self.model.file(kinds, models))
        self._written = stamp
        return True

    def _bound_models(self) -> list[str]:
        bound = self.store.latest_events("bound", 500)
        return sorted({event.gpu_model for event in bound if event.gpu_model})
