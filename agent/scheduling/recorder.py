"""Writes decisions and pod events into the journal before an answer goes out.

Called by extender, queue and cluster state. A disk that is full or gone costs records, which are
counted, and never an answer.
"""

import logging
import uuid

import numpy as np

from agent.arrays import Ints
from agent.cluster.outcomes import OUTCOMES
from agent.cluster.state import ClusterState
from agent.cluster.view import PENDING, RUNNING
from agent.journal import Census, Decision, Journal, PodEvent, Progress, Record
from agent.scheduling.decision import Choice
from agent.scheduling.guard import LivePolicy
from agent.scheduling.metrics import Metrics

log = logging.getLogger(__name__)


def _named(numbers: Ints, names: list[str]) -> list[str]:
    """Names by number; empty for −1 (waiting)."""
    if numbers[0] >= 0 and (numbers == numbers[0]).all():  # prioritize: one pod throughout
        return [names[numbers[0]]] * len(numbers)
    if numbers.min() >= 0:  # hundreds of nodes
        return list(map(names.__getitem__, numbers.tolist()))
    return [names[number] if number >= 0 else "" for number in numbers.tolist()]


class Recorder:
    """One session's records. ``session`` names the process in every decision."""

    def __init__(self, journal: Journal, metrics: Metrics, session: str) -> None:
        self._journal, self._metrics, self.session = journal, metrics, session
        self._failing = False

    def event(self, record: PodEvent | Progress) -> None:
        """Append one pod event or progress reading."""
        if isinstance(record, PodEvent):
            if record.kind in OUTCOMES:
                self._metrics.ends.labels(record.kind).inc()
            elif record.kind == "bound":
                self._metrics.pending_seconds.observe(record.pending_seconds)
        self._append(record)

    def census(self, state: ClusterState) -> None:
        """Append which pods there are, once a session: the others ended while none ran."""
        there = state.life.known() | state.pods.keys()
        self._append(Census(time=float(state.view.clock[0]), uids=sorted(there)))

    def decision(self, verb: str, choice: Choice, state: ClusterState, policy: LivePolicy) -> None:
        """Append one choice, made at the state's present time by the policy in use."""
        if choice.action != choice.rule_row:
            self._metrics.overridden.inc()
        view = state.view
        self._append(
            Decision(
                id=uuid.uuid4().hex,
                session=self.session,
                time=float(view.clock[0]),
                verb=verb,
                policy=policy.version,
                pods=_named(choice.pods, state.slots.names),
                nodes=_named(choice.nodes, state.rows.names),
                features=choice.features.tobytes(),
                rule_scores=choice.rule_scores.astype(np.float32).tobytes(),
                action=choice.action,
                log_prob=choice.log_prob,
                temperature=policy.current.temperature,
                pending=int(view.counts[PENDING]),
                running=int(view.counts[RUNNING]),
                job_seconds=state.job_seconds,
                imbalance_seconds=state.imbalance_seconds,
            )
        )

    def _append(self, record: Record) -> None:
        try:
            self._journal.append(record)
        except OSError as error:
            self._metrics.journal_failures.inc()
            if not self._failing:  # once, and not once a pod
                log.error("the journal in %s takes no records: %s", self._journal.folder, error)
            self._failing = True
        else:
            self._metrics.journal_records.inc()
            self._failing = False
