"""Writes decisions and pod events into the journal before an answer goes out.

Called by extender, queue and cluster state. A disk that is full or gone costs records, which are
counted, and never an answer.
"""

import logging
import uuid

import numpy as np

from agent.cluster.state import ClusterState
from agent.cluster.view import PENDING, RUNNING
from agent.journal import Decision, Journal, PodEvent, Progress
from agent.scheduling.decision import Choice
from agent.scheduling.guard import LivePolicy
from agent.scheduling.metrics import Metrics

log = logging.getLogger(__name__)


class Recorder:
    """One session's records. ``session`` names the process in every decision."""

    def __init__(self, journal: Journal, metrics: Metrics, session: str) -> None:
        self._journal, self._metrics, self.session = journal, metrics, session
        self._failing = False

    def event(self, record: PodEvent | Progress) -> None:
        """Append one pod event or progress reading."""
        self._append(record)

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
                pods=[state.pod_name(int(slot)) for slot in choice.pods],
                nodes=[state.node_name(int(row)) for row in choice.nodes],
                features=np.ascontiguousarray(choice.features, np.float32).tobytes(),
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

    def _append(self, record: Decision | PodEvent | Progress) -> None:
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
