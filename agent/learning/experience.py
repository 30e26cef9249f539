"""From journaled decisions to batches: credit by where pods landed, delayed rewards, contiguity.

``agent.learning.learner`` calls :func:`take`, learns from the batch and hands the fates back to
:meth:`agent.learning.store.Store.commit`. A decision is credited only on the node where its pod
was observed: kube-scheduler weighs other scores besides ours, so what was preferred is not always
what happened.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from agent.journal import Decision, PodEvent, floats
from agent.learning.batch import F32, Batch
from agent.learning.reward import (
    CHARGED,
    DEFAULT_WEIGHTS,
    Interval,
    RewardWeights,
    RunTimeMean,
    pending_seconds,
    rewards,
)
from agent.learning.store import ENDED, OpenDecision, Store
from common.features import FEATURE_COUNT

Scores = Callable[[str, F32], "F32 | None"]
"""Corrections [C] that a policy, by its version, gives to features [C, F]; None: not known."""


def no_corrections(version: str, features: F32) -> F32 | None:
    """The behaviour of the rule alone, whose version is empty."""
    return None if version else np.zeros(len(features), np.float32)


@dataclass(frozen=True)
class Taken:
    """What :func:`take` found."""

    batch: Batch | None
    """The transitions in the order of their decisions; None where none is ready."""
    fates: list[tuple[int, str]] = field(default_factory=list)
    """(seq, fate) of every decision dealt with; commit them with what was learned."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Means over the batch: ``reward`` and its terms."""
    scheduled: int = 0
    """Pods among the fates that were seen bound after our decision."""


@dataclass
class _Row:
    """A decision whose pod's whereabouts and outcome are known, to be closed by its follower."""

    seq: int
    decision: Decision
    features: F32
    action: int
    log_prob: float
    killed: bool
    placed: bool
    follower: int = -1
    elapsed: float = 0.0
    job_seconds: float = 0.0
    imbalance_seconds: float = 0.0


def take(
    store: Store,
    limit: int,
    *,
    outcome_wait: float,
    weights: RewardWeights = DEFAULT_WEIGHTS,
    run_time_prior: float = 3600.0,
    scores: Scores = no_corrections,
) -> Taken:
    """Build a batch of at most ``limit`` transitions from the oldest decisions that are ready.

    A decision is ready once its pod was seen on a node, the pod has ended or ``outcome_wait``
    cluster seconds have passed, and a later decision of the same session exists. The first one
    that is not ready holds back those behind it, so that runs stay contiguous. Nothing is changed
    in the store: whoever is killed here takes the same batch again.
    """
    rows: list[_Row] = []
    fates: list[tuple[int, str]] = []
    scheduled = 0
    waiting: _Row | None = None
    for item in store.open_decisions():
        if item.uid and store.decided_again(item.uid, item.seq):
            fates.append((item.seq, "superseded"))
            continue
        if waiting is not None:
            if _close(waiting, item):
                rows.append(waiting)
                fates.append((waiting.seq, "learned"))
            else:
                fates.append((waiting.seq, "unfollowed"))
            scheduled += waiting.placed
            waiting = None
        if len(rows) >= limit:
            break
        found = _resolve(store, item, outcome_wait, scores)
        if found is None:
            break
        if isinstance(found, str):
            fates.append((item.seq, found))
            # Wherever it landed, it was scheduled after our decision.
            scheduled += found == "elsewhere"
        else:
            waiting = found
    if not rows:
        return Taken(None, fates, scheduled=scheduled)
    mean = RunTimeMean(store.counter("runs"), store.counter("run_seconds"), run_time_prior).seconds
    batch, metrics = _batch(rows, mean, weights)
    return Taken(batch, fates, metrics, scheduled)


def _resolve(
    store: Store, item: OpenDecision, outcome_wait: float, scores: Scores
) -> _Row | str | None:
    """The decision's row, or its fate where it cannot be learned from, or None: not yet."""
    decision = item.decision
    features, rule_scores = _arrays(decision)
    if features is None or rule_scores is None:
        return "invalid"
    if not item.uid:
        return _Row(item.seq, decision, features, decision.action, decision.log_prob, False, False)
    events = store.events(item.uid)
    ended = any(kind in events for kind in ENDED)
    if not ended and store.now - decision.time < outcome_wait:
        return None
    node = _node(events)
    if not node:
        return "unplaced"
    action = _landed(decision, item.uid, node)
    log_prob: float | None = decision.log_prob
    if action is None:
        return "elsewhere"
    if action != decision.action:
        correction = scores(decision.policy, features)
        log_prob = _log_prob(decision, rule_scores, correction, action)
        if log_prob is None:
            return "elsewhere"
    assert log_prob is not None
    killed = any(kind in events for kind in CHARGED)
    return _Row(item.seq, decision, features, action, log_prob, killed, True)


def _arrays(decision: Decision) -> tuple[F32 | None, F32 | None]:
    """(features, rule scores), or None where they do not fit this version or each other."""
    count = len(decision.pods)
    sound = (
        count > 0
        and len(decision.nodes) == count
        and 0 <= decision.action < count
        and len(decision.features) == 4 * count * FEATURE_COUNT
        and len(decision.rule_scores) == 4 * count
        and math.isfinite(decision.log_prob)
        and decision.log_prob <= 0.0
    )
    if not sound:
        return None, None
    features = floats(decision.features, FEATURE_COUNT)
    rule_scores = floats(decision.rule_scores)
    if not (np.isfinite(features).all() and np.isfinite(rule_scores).all()):
        return None, None
    return features, rule_scores


def _node(events: dict[str, PodEvent]) -> str:
    """Where the pod was seen; events behind a missed ``bound`` name the node as well."""
    for kind in ("bound", "started", *ENDED):
        if kind in events and events[kind].node:
            return events[kind].node
    return ""


def _landed(decision: Decision, uid: str, node: str) -> int | None:
    """The candidate row of this pod on this node, the preferred row first."""
    rows: tuple[int, ...] = (decision.action, *range(len(decision.pods)))
    for row in rows:
        if decision.pods[row] == uid and decision.nodes[row] == node:
            return row
    return None


def _log_prob(
    decision: Decision, rule_scores: F32, correction: F32 | None, action: int
) -> float | None:
    """log softmax((rule + correction) / temperature)[action]; None where it cannot be known.

    A greedy policy gives other candidates than its own no probability to speak of.
    """
    if decision.temperature <= 0.0 or correction is None:
        return None
    z = (rule_scores.astype(np.float64) + correction) / decision.temperature
    z -= z.max()
    value = float(z[action] - math.log(np.exp(z).sum()))
    return value if math.isfinite(value) else None


def _close(row: _Row, follower: OpenDecision) -> bool:
    """Write into ``row`` what passed until its follower; False where the session ended."""
    now, then = row.decision, follower.decision
    if now.session != then.session:
        return False
    row.follower = follower.seq
    # Counters of one session never fall; the guard is for clocks that were set back.
    row.elapsed = max(then.time - now.time, 0.0)
    row.job_seconds = max(then.job_seconds - now.job_seconds, 0.0)
    row.imbalance_seconds = max(then.imbalance_seconds - now.imbalance_seconds, 0.0)
    return True


def _batch(
    rows: list[_Row], mean_run_seconds: float, weights: RewardWeights
) -> tuple[Batch, dict[str, float]]:
    def column(values: list[float]) -> npt.NDArray[np.float64]:
        return np.array(values, np.float64)

    elapsed = column([row.elapsed for row in rows])
    earned = rewards(
        Interval(
            pending_seconds(
                column([row.decision.pending for row in rows]),
                column([row.placed for row in rows]),
                elapsed,
            ),
            column([row.job_seconds for row in rows]),
            column([row.imbalance_seconds for row in rows]),
            column([row.killed for row in rows]),
        ),
        mean_run_seconds,
        weights,
    )
    width = max(len(row.features) for row in rows)
    features = np.zeros((len(rows), width, FEATURE_COUNT), np.float32)
    mask = np.zeros((len(rows), width), np.bool_)
    rule_scores = np.zeros((len(rows), width), np.float32)
    for i, row in enumerate(rows):
        count = len(row.features)
        features[i, :count] = row.features
        mask[i, :count] = True
        rule_scores[i, :count] = floats(row.decision.rule_scores)
    followers = np.array([row.follower for row in rows])
    behind = np.array([row.seq for row in rows[1:]] + [-1])
    batch = Batch(
        features=features,
        mask=mask,
        rule_scores=rule_scores,
        action=np.array([row.action for row in rows], np.int64),
        log_prob=column([row.log_prob for row in rows]).astype(np.float32),
        reward=earned.total,
        elapsed=(elapsed / mean_run_seconds).astype(np.float32),
        ends=followers != behind,
    )
    metrics = {
        "reward": float(earned.total.mean()),
        "reward_pending": float(earned.pending.mean()),
        "reward_jobs": float(earned.jobs.mean()),
        "reward_imbalance": float(earned.imbalance.mean()),
        "reward_oom": float(earned.kills.mean()),
    }
    return batch, metrics
