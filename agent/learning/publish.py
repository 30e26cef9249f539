"""Keeps what the decision path reads of speeds and run times up to date; used by the learner."""

import math
from pathlib import Path

import msgspec
import numpy as np

from agent.cluster import speeds_file
from agent.cluster.speeds_file import SpeedsFile, WorkRuns
from agent.learning.run_times import RunTimes, fit, job_of, runs_of
from agent.learning.speeds import SpeedModel
from agent.learning.store import Store
from agent.learning.twin import known_kinds

KINDS = 200
"""Kinds of work that the file lists, the most frequent first."""
RUNS = 4000
"""Newest pods whose run times are learned from."""
WORKS = 1000
"""Works that the file lists, the latest first to stay."""


class SpeedsPublisher:
    """Writes the file where what is known has changed enough to matter.

    Args:
        path: the speeds file.
        store: the experience, for kinds and sums.
        model: the speed model to predict with.
    """

    def __init__(self, path: Path, store: Store, model: SpeedModel) -> None:
        self.path, self.store, self.model = path, store, model
        self.run_times = RunTimes()
        """As they stood when the file was written last."""
        self._written: tuple[object, ...] = ()

    def publish(self, models: list[str]) -> bool:
        """Predict for the GPU ``models`` and the kinds seen; returns whether the file was written.

        Without models those are taken that pods were seen on. Readings come by the second, so that
        a file is written for every 5 % more of them, or of runs, for new kinds or models and for
        new peers.

        Raises:
            OSError: the file cannot be written.
        """
        models = models or self._bound_models()
        kinds = known_kinds(self.store)[:KINDS]
        seen, runs = self.store.counter("speed_observations"), self.store.counter("runs")
        stamp = (
            tuple(models),
            tuple(kinds),
            int(np.log1p(seen) * 20),
            int(np.log1p(runs) * 20),
            self.model.peers.members,
            *(hash(tuple(sorted(rows.items()))) for rows in self.model.peers[1:]),
        )
        if stamp == self._written or not (models or kinds):
            return False
        self.model.update(self.store.speed_sums())
        speeds_file.write(self.path, self._with_run_times(self.model.file(kinds, models)))
        self._written = stamp
        return True

    def _with_run_times(self, speeds: SpeedsFile) -> SpeedsFile:
        slowdown = {
            ((kind.job_type, kind.gpus), model): slower
            for kind in speeds.kinds
            for model, slower in zip(speeds.gpu_models, kind.slowdown, strict=True)
        }
        finished = {job_of(event): event for event in self.store.latest_events("finished", RUNS)}
        created = self.store.latest_events("created", RUNS)
        runs = runs_of(created, finished, lambda kind, model: slowdown.get((kind, model), 0.0))
        self.run_times = known = fit([run for run in runs if run is not None])
        works = []
        for work in list(known.works)[-WORKS:]:
            mean, trust = known.own(work)
            if not math.isnan(mean):
                works.append(WorkRuns(work=work, log_seconds=mean, trust=trust))
        kinds = []
        for kind in speeds.kinds:
            count, mean = known.kinds.get((kind.job_type, kind.gpus), (0, 0.0))
            kinds.append(msgspec.structs.replace(kind, runs=count, log_seconds=mean))
        return msgspec.structs.replace(speeds, kinds=kinds, works=works)

    def _bound_models(self) -> list[str]:
        bound = self.store.latest_events("bound", 500)
        return sorted({event.gpu_model for event in bound if event.gpu_model})
