"""The learning loop's body: experience in, a better policy out, everything committed at once.

``agent.learning.learn`` calls :meth:`OnlineLearner.round` until it is told to stop. A round ends
with one transaction that marks its decisions as consumed and saves the learner that learned from
them; files and the federation's snapshot follow it and are mended from it after a crash.
"""

import logging
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from agent.federation import LocalState
from agent.learning import promotion
from agent.learning.algorithm import CheckpointError, LearningError
from agent.learning.algorithms import make_algorithm
from agent.learning.batch import concatenate
from agent.learning.experience import Taken, take
from agent.learning.gate import GateSettings
from agent.learning.handover import Handover, Offer
from agent.learning.practice import LABEL_MINIBATCH, LABEL_STEPS, Practice
from agent.learning.promotion import RULE_VERSION, Gatekeeper, Live, corrections_of, write_live
from agent.learning.publish import SpeedsPublisher
from agent.learning.reward import RewardWeights, RunTimeMean
from agent.learning.speeds import SpeedModel, sample
from agent.learning.store import Store
from agent.learning.twin import gpu_models
from agent.settings import Settings
from common.policy import initial_arrays
from common.speeds import Peers, SpeedRow
from common.weights import Arrays, carry_progress, copy, write_atomic

log = logging.getLogger(__name__)

STATE_BLOB = "learner"


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """The learner as it lies in the store."""

    algorithm: str
    state: bytes
    learning_rounds: int
    transitions: int
    """Real decisions learned from; equals the store's count of that fate."""
    live: Live
    shared: bool
    """Whether a policy of the hub was taken up."""
    peers: list[tuple[int, float, float, float]]
    members: int
    metrics: dict[str, float]
    unconfirmed: list[tuple[int, float, float, float]] = []


class OnlineLearner:
    """One member's learner over its store.

    Args:
        settings: the member's settings; the rule and margin of ``serve`` are those of the gate.
        store: the experience, open; the learner is its only writer.
        journal: folder of the journal to read.
        owns_journal: whether read segments may be deleted.
        clock: monotonic seconds, for pacing alone.
    """

    def __init__(
        self,
        settings: Settings,
        store: Store,
        *,
        journal: Path,
        owns_journal: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings, self.learn, self.store = settings, settings.learn, store
        self.journal, self.owns_journal = journal, owns_journal
        self._clock = clock
        self.weights = RewardWeights(
            self.learn.alpha, self.learn.beta, self.learn.gamma, self.learn.delta
        )
        self.algorithm, self.temperature = make_algorithm(self.learn)
        gate = GateSettings(
            self.learn.gate_windows,
            self.learn.gate_jobs,
            self.learn.gate_tolerance,
            self.learn.gate_tail_tolerance,
        )
        self.gatekeeper = Gatekeeper(
            settings.serve.rule, settings.serve.margin, self.learn.gate_patience, gate
        )
        self.speeds = SpeedModel()
        self.learning_rounds = self.transitions = 0
        # What a state that is missing or lost is replaced by; a sound one replaces this.
        self.live = promotion.begin(settings.policy_file, self.algorithm.set_weights)
        self.shared = False
        self.metrics: dict[str, float] = {}
        self._restore()
        self._last_round = clock()
        self._publisher = SpeedsPublisher(settings.speeds_file, store, self.speeds)
        self.practice = Practice(settings, store, self.speeds)
        write_live(settings.policy_file, self.live)
        self.handover = Handover(self._snapshot())

    # ---- one round ----

    def round(self) -> bool:
        """Take in what came, learn if enough is ready, take up what the hub sent, and commit.

        Returns whether there was anything to do.
        """
        ingested = self.store.ingest(self.journal, sample)
        offer, peers = self.handover.take()
        adopted = False
        try:
            before = self.learning_rounds
            if peers is not None:
                self.speeds.absorb(peers)
            taken = self._ready()
            fates = [] if taken is None else taken.fates
            if taken is not None:
                fates = self._learn(taken)
            learned = self.learning_rounds > before
            adopted = self._adopt(offer)
            if taken is not None or offer is not None or peers is not None:
                pushed = adopted and offer is not None and offer.policy.kind == "personalised"
                if pushed or (learned and self.learning_rounds % self.learn.gate_rounds == 0):
                    self._gate()
                self._update_metrics()
                self.store.commit(
                    fates,
                    {STATE_BLOB: self._saved()},
                    {"scheduled": taken.scheduled if taken else 0},
                )
                self._after_commit()
        except BaseException:
            adopted = False
            raise
        finally:
            self.handover.settle(offer, adopted)
        if ingested or peers is not None or taken is not None:
            self._publisher.publish(gpu_models(self.practice.nodes()))
            self.write_status()
        if ingested and self.owns_journal:
            self.store.forget_segments(self.journal, keep=self.learn.keep_segments)
        return taken is not None or offer is not None

    def _ready(self) -> Taken | None:
        """Experience to learn from now; None where it is worth waiting for more."""
        taken = take(
            self.store,
            self.learn.batch,
            outcome_wait=self.learn.outcome_wait,
            weights=self.weights,
            run_time_prior=self.learn.run_time_prior,
            scores=lambda version, features: corrections_of(self.live, version, features),
        )
        if len(taken.fates) >= self.learn.min_batch:
            return taken
        if self._clock() - self._last_round < self.learn.idle_seconds:
            return None
        if taken.fates or self.practice.wanted:
            return taken
        return None

    def _learn(self, taken: Taken) -> list[tuple[int, str]]:
        """Update the policy; the fates of the decisions, set aside where they cannot be learned."""
        self._last_round = self._clock()
        seed = self._round_seed()
        self.practice.teach(seed=seed)
        practised = self.practice.rollouts(
            self.algorithm.arrays(),
            self.temperature,
            seed=seed,
            mean_run_seconds=self._mean_run_seconds(),
            weights=self.weights,
        )
        real = [] if taken.batch is None else [taken.batch]
        metrics: dict[str, float] = {}
        fates = [(seq, "invalid" if fate == "learned" else fate) for seq, fate in taken.fates]
        for batches in ([*real, *practised], real):
            if not batches:
                continue
            try:
                metrics |= self.algorithm.update(concatenate(batches))
            except LearningError as error:
                log.error("a batch was not learned from: %s", error)
                continue
            self.transitions += sum(len(batch) for batch in real)
            fates = taken.fates
            break
        metrics |= self._distil()
        if metrics:
            self.metrics = {**self.metrics, **metrics, **taken.metrics}
            self.learning_rounds += 1
        return fates

    def _distil(self) -> dict[str, float]:
        """Go a few steps towards the teacher's labels, once there are enough for a minibatch."""
        teacher = self.practice.teacher
        if len(teacher) < LABEL_MINIBATCH:
            return {}
        try:
            return self.algorithm.distil(teacher, steps=LABEL_STEPS, minibatch=LABEL_MINIBATCH)
        except LearningError as error:
            log.error("the labels were not learned from: %s", error)
            return {}

    def _adopt(self, offer: Offer | None) -> bool:
        """Take up a policy of the hub; False where it does not fit."""
        if offer is None:
            return False
        policy = offer.policy
        try:
            if policy.kind == "global":
                self.algorithm.set_global(policy.arrays, policy.proximal_mu)
                if not self.shared and self.learning_rounds == 0:
                    self.algorithm.set_weights(policy.arrays)
            else:
                arrays = policy.arrays
                if policy.at_upload is not None:
                    arrays = carry_progress(arrays, self.algorithm.arrays(), policy.at_upload)
                self.algorithm.set_weights(arrays)
        except ValueError as error:
            log.error("the hub's policy of round %d was kept out: %s", policy.round, error)
            return False
        self.shared = True
        return True

    # ---- the gate ----

    def _round_seed(self) -> int:
        return (self.learn.seed * 100_003 + self.learning_rounds) % (1 << 29)

    def _gate(self) -> None:
        twin = self.practice.twin(fresh=True)
        if twin is None:
            log.info("no comparison yet: too few finished jobs, or the nodes are not known")
            return
        seed = self._round_seed()
        self.live, verdict = self.gatekeeper.consider(
            self.live,
            self.algorithm.arrays(),
            twin,
            learning_round=self.learning_rounds,
            seed=seed,
        )
        self.metrics.update(
            completion_vs_rule=verdict.mean.mean,
            gate_low=verdict.mean.low,
            gate_high=verdict.mean.high,
            gate_p99=verdict.p99.mean,
        )
        if self.gatekeeper.has_lost_its_way(self.live):
            best = self.live.arrays() or initial_arrays()
            log.warning(
                "the candidate failed %d comparisons in a row; learning goes on from %s",
                self.live.failures,
                self.live.version or "the rule",
            )
            self.algorithm.set_weights(best)
            self.live = promotion.replace_struct(self.live, failures=0)

    def speeds_now(self) -> SpeedModel:
        """The speed model with all that the store has seen."""
        self.speeds.update(self.store.speed_sums())
        return self.speeds

    def _restore(self) -> None:
        content = self.store.blob(STATE_BLOB)
        if content is None:
            return
        try:
            saved = msgspec.msgpack.decode(content, type=Saved)
        except msgspec.DecodeError as error:
            log.error(
                "the learner's state is of another version (%s); it starts anew and keeps its "
                "experience",
                error,
            )
            return
        self.learning_rounds, self.transitions = saved.learning_rounds, saved.transitions
        self.live = saved.live
        self.shared, self.metrics = saved.shared, saved.metrics
        rows, unconfirmed = (
            {key: SpeedRow(*row) for key, *row in told} for told in (saved.peers, saved.unconfirmed)
        )
        self.speeds.absorb(Peers(saved.members, rows, unconfirmed))
        try:
            self.algorithm.restore(saved.state)
        except CheckpointError as error:
            # Another algorithm or architecture was chosen: the best policy so far is the start.
            log.warning("%s; learning goes on from the live policy", error)
            try:
                self.algorithm.set_weights(self.live.arrays() or initial_arrays())
            except ValueError as misfit:
                log.warning("the live policy does not fit either (%s): starting anew", misfit)
                self.live = Live()

    def _saved(self) -> bytes:
        peers = self.speeds.peers
        return msgspec.msgpack.encode(
            Saved(
                algorithm=self.learn.algorithm,
                state=self.algorithm.state(),
                learning_rounds=self.learning_rounds,
                transitions=self.transitions,
                live=self.live,
                shared=self.shared,
                peers=[(key, *row) for key, row in peers.rows.items()],
                unconfirmed=[(key, *row) for key, row in peers.unconfirmed.items()],
                members=peers.members,
                metrics=self.metrics,
            )
        )

    def arrays(self) -> Arrays:
        """A copy of the candidate's weights."""
        return copy(self.algorithm.arrays())

    def _mean_run_seconds(self) -> float:
        return RunTimeMean(
            self.store.counter("runs"),
            self.store.counter("run_seconds"),
            self.learn.run_time_prior,
        ).seconds

    def _update_metrics(self) -> None:
        completion = self.store.completion_seconds()
        self.metrics.update(
            learning_rounds=self.learning_rounds,
            experiences=self.store.counter("decisions"),
            jobs_finished=self.store.counter("pods_finished"),
            oom_kills=self.store.counter("pods_oom"),
            speed_observations=self.store.counter("speed_observations"),
            gate_gain=self.live.gain,
            gate_accepted=self.live.accepted,
            gate_rejected=self.live.rejected,
        )
        known = self._publisher.run_times
        self.metrics.update(
            run_time_error_by_kind=known.by_kind,
            run_time_error=known.by_work,
            run_time_coverage=known.coverage,
        )
        if completion:
            self.metrics["mean_completion_seconds"] = float(np.mean(completion))
            self.metrics["p99_completion_seconds"] = float(np.quantile(completion, 0.99))

    def _judged(self) -> Arrays:
        """What is shared: the policy that passed the gate, so that peers average judged ones.

        While the rule decides alone (nothing passed, or what was live was withdrawn), the shared
        policy as it came: no opinion.
        """
        rule_alone = self.live.version in ("", RULE_VERSION)
        live = None if rule_alone else self.live.arrays()
        return live or self.algorithm.proximal.arrays() or initial_arrays()

    def _snapshot(self) -> LocalState:
        scheduled = int(self.store.counter("scheduled"))
        return LocalState(
            arrays=self._judged(),
            candidate=self.arrays(),
            learning_rounds=self.learning_rounds,
            scheduled_pods=scheduled,
            speeds=self.speeds_now().rows(),
            metrics={**self.metrics, "scheduled_pods": float(scheduled)},
        )

    def _after_commit(self) -> None:
        if write_live(self.settings.policy_file, self.live):
            log.info("policy %s is live", self.live.version)
        self.handover.publish(self._snapshot())

    def status(self) -> dict[str, object]:
        """How the learner stands, for a display."""
        return {
            "learning_rounds": self.learning_rounds,
            "policy": self.live.version,
            "fates": self.store.fates(),
            "open": self.store.open_count(),
            "scheduled_pods": int(self.store.counter("scheduled")),
            "late_outcomes": int(self.store.counter("late_outcomes")),
            "dropped_segments": int(self.store.counter("dropped_segments")),
            "peers": self.speeds.peers.members,
            "metrics": self.metrics,
        }

    def write_status(self) -> None:
        """Replace ``learn-status.json`` in the state directory."""
        path = self.settings.state / "learn-status.json"
        write_atomic(path, msgspec.json.encode(self.status()))
