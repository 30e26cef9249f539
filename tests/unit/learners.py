"""A state directory with a learner to step, for the tests of learner, process and link."""

from pathlib import Path
from typing import Any

import numpy as np

from agent.journal import Decision, Journal, Record
from agent.learning.learner import OnlineLearner
from agent.learning.store import Store
from agent.settings import LearnSettings, Settings
from common.features import FEATURE_COUNT
from tests.unit.journals import decision

FAST: dict[str, Any] = {
    "batch": 16,
    "min_batch": 4,
    "poll_seconds": 0.01,
    "outcome_wait": 1e6,
    "gate_rounds": 1000,
    "gate_windows": 2,
    "gate_jobs": 20,
    "labels": 0,
}


class Member:
    """A state directory with a journal to write and a learner to step."""

    def __init__(self, state: Path, **learn: Any) -> None:
        self.settings = Settings(state=state, learn=LearnSettings(**{**FAST, **learn}))
        self.journal = Journal(self.settings.journal_dir)
        self.now = 0.0
        self.open()

    def open(self) -> None:
        self.store = Store(self.settings.state / "experience.sqlite")
        self.learner = OnlineLearner(
            self.settings, self.store, journal=self.settings.journal_dir, clock=lambda: self.now
        )

    def reopen(self) -> None:
        self.store.close()
        self.open()

    def write(self, *records: Record) -> None:
        for record in records:
            self.journal.append(record)

    def waits(self, first: int, count: int) -> None:
        """Decisions to wait: ``count`` of them, all but the last ready at once."""
        self.write(*(varied(decision(first + n)) for n in range(count)))


def varied(made: Decision) -> Decision:
    """The decision with features that tell candidates apart."""
    number = int(made.id[1:])
    features = np.random.default_rng(number).normal(size=(len(made.pods), FEATURE_COUNT))
    fields = {name: getattr(made, name) for name in made.__struct_fields__}
    return Decision(**{**fields, "features": features.astype(np.float32).tobytes()})
