"""The endless federation rounds: invite, wait, validate, aggregate, checkpoint, personalise.

Run by the server in a thread of its own. The loop knows members only through Flower's ``Grid``. A
round always completes: an update that does not hold is set aside with its reason, a member that
vanishes is asked again when it comes back, one that joins during a round takes part in it, and a
round without a valid update keeps the policy. A checkpoint is the policy's file and then one
registry transaction that names it; whatever the moment of a crash, the next start finds the last
finished round whole and goes on with a new number.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event
from typing import Protocol

from flwr.app import Message
from flwr.serverapp import Grid
from flwr.serverapp import strategy as flower

from common import link_pb2 as pb
from common.codec import decode_speeds, encode_peers
from common.speeds import SpeedTable
from common.weights import Arrays, check_same_form, interpolate, load, norm, save, version_id
from coordinator.link import Reply, open_reply, personal_message, trained
from coordinator.registry import Registry
from coordinator.settings import CoordinatorSettings
from coordinator.speeds import peer_speeds
from coordinator.strategy import AggregateError, aggregate, invitations, make_strategy
from coordinator.validation import (
    Candidate,
    Counted,
    Limits,
    RejectedError,
    check_norm,
    examine,
    norm_bound,
)
from coordinator.views import NewUpdate

log = logging.getLogger(__name__)

POLL_SECONDS = 0.05
MAX_INVITATIONS = 5
"""How often a member whose session breaks before it answers is asked within one round."""
MAX_IDLE_PAUSE = 60.0


class CheckpointError(RuntimeError):
    """The last round's policy cannot be restored; the message says how to go on."""


class Hub(Protocol):
    """What the loop needs of the link beside Flower's ``Grid``."""

    def member_of(self, node_id: int) -> str: ...
    def traffic(self) -> tuple[int, int]: ...
    def record_metrics(self, member: str, metrics: dict[str, float]) -> None: ...
    def report(self, kind: str, text: str, member: str | None = None) -> None: ...


@dataclass
class _Round:
    """A round in progress."""

    number: int
    version: str
    pending: dict[str, int] = field(default_factory=dict)
    """Node by the id of the message that it has not answered."""
    invitations: dict[int, int] = field(default_factory=dict)
    """How often each node was invited."""
    answered: set[int] = field(default_factory=set)
    candidates: dict[str, tuple[Candidate, pb.Update, Message]] = field(default_factory=dict)
    set_aside: list[NewUpdate] = field(default_factory=list)


class RoundLoop:
    """Keeps the global policy and improves it round by round."""

    def __init__(
        self,
        grid: Grid,
        hub: Hub,
        registry: Registry,
        settings: CoordinatorSettings,
        initial: Arrays,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Restore the last checkpoint, or begin with the policy ``initial``.

        Args:
            grid: the members.
            hub: names, byte counts and reports.
            registry: where rounds are kept.
            settings: see there.
            initial: start weights; their names and shapes bind every member.
            clock: monotonic seconds.

        Raises:
            CheckpointError: the last round's file is missing, broken or of another architecture.
        """
        self._grid, self._hub, self._registry, self._settings = grid, hub, registry, settings
        self._clock = clock
        self._strategy: flower.FedAvg = make_strategy(settings)
        self._limits = Limits(
            free_delta_norm=settings.free_delta_norm,
            norm_factor=settings.norm_factor,
            max_delta_norm=settings.max_delta_norm,
            max_examples=settings.max_examples,
        )
        self._counted_traffic = (0, 0)
        self._idle_pause = 0.0
        self._pushed: list[str] = []
        """Ids of the personalised policies of the last round."""
        self.policy = self._restore(initial)
        """The global policy."""

    def _restore(self, initial: Arrays) -> Arrays:
        last = self._registry.checkpoint()
        if last is None:
            return initial
        path = self._settings.policy_dir / last.policy_file
        advice = f"restore {path} from a copy, or start a new federation in another state_dir"
        try:
            arrays, _ = load(path)
            check_same_form(arrays, initial)
        except ValueError as error:
            raise CheckpointError(
                f"round {last.round} cannot be resumed: {error}; {advice}"
            ) from error
        if version_id(arrays) != last.version:
            raise CheckpointError(f"{path} is not the policy of round {last.round}; {advice}")
        log.info("resuming after round %d, policy %s", last.round, last.version[:12])
        return arrays

    def run(self, stop: Event) -> None:
        """Run rounds until ``stop`` is set or ``max_rounds`` is reached."""
        while not stop.is_set():
            if len(list(self._grid.get_node_ids())) < self._settings.min_members:
                stop.wait(POLL_SECONDS)
                continue
            number = self.run_round(stop)
            if number is not None and number == self._settings.max_rounds:
                log.info("round %d was the last (max_rounds)", number)
                return
            stop.wait(max(self._settings.round_pause, self._idle_pause))

    def run_round(self, stop: Event) -> int | None:
        """Run one round; return its number, or None when ``stop`` ended it early."""
        number = self._registry.begin_round(self._settings.strategy)
        current = _Round(number, version_id(self.policy))
        log.info("round %d begins (%s)", number, self._settings.strategy)
        if not self._collect(current, stop):
            return None
        replies = self._grid.pull_messages(self._pushed)
        taken = sum(open_reply(reply).adopted for reply in replies)
        if self._pushed:
            log.info("%d of %d members took their policy", taken, len(self._pushed))
        self._pushed = []
        self._compare_sizes(current)
        self._aggregate(current)
        self._checkpoint(current)
        self._personalise(current)
        idle = min(MAX_IDLE_PAUSE, max(self._settings.idle_pause, 2 * self._idle_pause))
        self._idle_pause = 0.0 if current.candidates else idle
        return number

    # ---- invite and wait ----

    def _collect(self, current: _Round, stop: Event) -> bool:
        end = self._clock() + self._settings.round_timeout
        while True:
            self._invite(current)
            for message in self._grid.pull_messages(list(current.pending)):
                self._answer(current, message)
            if current.answered and not current.pending:
                return True
            if self._clock() >= end:
                late = sorted(self._hub.member_of(node) for node in current.pending.values())
                log.info("round %d times out without %s", current.number, ", ".join(late) or "any")
                return True
            if stop.wait(POLL_SECONDS):
                return False

    def _invite(self, current: _Round) -> None:
        asked = {*current.pending.values(), *current.answered}
        nodes = [node for node in self._grid.get_node_ids() if node not in asked]
        if not nodes:
            return
        tables = self._tables()
        speeds = {node: self._peers(self._hub.member_of(node), tables) for node in nodes}
        messages = invitations(self._strategy, current.number, self.policy, self._grid, speeds)
        ids = list(self._grid.push_messages(messages))
        for message, wire_id in zip(messages, ids, strict=True):
            node = message.metadata.dst_node_id
            current.pending[wire_id] = node
            current.invitations[node] = current.invitations.get(node, 0) + 1

    def _answer(self, current: _Round, message: Message) -> None:
        reply = open_reply(message)
        for wire_id, node in list(current.pending.items()):
            if node == reply.node_id:
                del current.pending[wire_id]
        member = self._hub.member_of(reply.node_id)
        if reply.retry:
            if current.invitations[reply.node_id] < MAX_INVITATIONS:
                return
            reply = replace(reply, error=f"its session broke {MAX_INVITATIONS} times")
        current.answered.add(reply.node_id)
        if reply.update is None:
            self._decline(current, member, reply)
            return
        update = reply.update
        self._hub.record_metrics(member, dict(update.metrics))
        counted = Counted(*self._registry.pod_counter(member))
        try:
            candidate = examine(
                update, self.policy, current.number, current.version, counted, self._limits
            )
        except RejectedError as error:
            self._set_aside(current, member, update, str(error), None)
            return
        current.candidates[member] = (candidate, update, message)

    def _decline(self, current: _Round, member: str, reply: Reply) -> None:
        if reply.error == "NOTHING_NEW":
            log.info("round %d: %s scheduled nothing new", current.number, member)
            return
        reason = f"no usable answer: {reply.error}"
        current.set_aside.append(NewUpdate(member, accepted=False, reason=reason))
        self._hub.report("set aside", f"round {current.number}, {member}: {reason}", member)

    def _set_aside(
        self, current: _Round, member: str, update: pb.Update, reason: str, size: float | None
    ) -> None:
        current.set_aside.append(
            NewUpdate(
                member,
                accepted=False,
                reason=reason,
                learning_rounds=min(update.learning_rounds, 1 << 62),
                delta_norm=size,
                size=update.ByteSize(),
            )
        )
        self._hub.report("set aside", f"round {current.number}, {member}: {reason}", member)

    # ---- aggregate ----

    def _compare_sizes(self, current: _Round) -> None:
        norms = [candidate.delta_norm for candidate, _, _ in current.candidates.values()]
        bound = norm_bound(norms, self._registry.accepted_norms(), self._limits)
        for member, (candidate, update, _) in list(current.candidates.items()):
            try:
                check_norm(candidate, bound)
            except RejectedError as error:
                del current.candidates[member]
                self._set_aside(current, member, update, str(error), candidate.delta_norm)

    def _aggregate(self, current: _Round) -> None:
        if not current.candidates:
            return
        # In the order of names, so that the same updates give the same bits.
        replies = [
            trained(message, candidate.arrays, candidate.num_examples)
            for _, (candidate, _, message) in sorted(current.candidates.items())
        ]
        try:
            self.policy = aggregate(self._strategy, current.number, replies, self.policy)
        except AggregateError as error:
            self._hub.report("aggregation", f"round {current.number}: {error}; policy is kept")
            # Set aside, and not accepted, so that their pods count in the next round.
            for member, (candidate, update, _) in current.candidates.items():
                self._set_aside(current, member, update, str(error), candidate.delta_norm)
            current.candidates.clear()

    def _checkpoint(self, current: _Round) -> None:
        version = version_id(self.policy)
        name = f"round-{current.number:08d}.safetensors"
        directory = self._settings.policy_dir
        save(directory / name, self.policy, {"round": str(current.number), "version": version})
        received, sent = self._hub.traffic()
        before_in, before_out = self._counted_traffic
        self._counted_traffic = (received, sent)
        accepted = [
            NewUpdate(
                member,
                accepted=True,
                num_examples=candidate.num_examples,
                learning_rounds=min(update.learning_rounds, 1 << 62),
                delta_norm=candidate.delta_norm,
                size=update.ByteSize(),
                counter=update.counter,
                scheduled_pods=update.scheduled_pods,
                speed_table=pb.PeerSpeeds(rows=update.speeds).SerializeToString(),
            )
            for member, (candidate, update, _) in sorted(current.candidates.items())
        ]
        self._registry.finish_round(
            current.number,
            invited=len(current.invitations),
            updates=[*accepted, *current.set_aside],
            version=version,
            policy_file=name,
            global_norm=norm(self.policy),
            bytes_in=received - before_in,
            bytes_out=sent - before_out,
        )
        _prune(directory, self._settings.kept_policies, name)
        log.info(
            "round %d finished: %d accepted, %d set aside, policy %s",
            current.number,
            len(accepted),
            len(current.set_aside),
            version[:12],
        )

    # ---- personalise ----

    def _personalise(self, current: _Round) -> None:
        tables = self._tables()
        config = {
            "server-round": current.number,
            "version": version_id(self.policy),
            "eta": self._settings.eta,
            "proximal-mu": getattr(self._strategy, "proximal_mu", 0.0),
        }
        messages = [
            personal_message(
                member,
                interpolate(candidate.arrays, self.policy, self._settings.eta),
                {**config, "accepted-pods": update.scheduled_pods},
                self._peers(member, tables),
            )
            for member, (candidate, update, _) in sorted(current.candidates.items())
        ]
        # Nobody waits: a stream keeps its order, so each member has its policy before the next
        # round's invitation, and one that hangs holds up no other.
        self._pushed = list(self._grid.push_messages(messages))

    def _tables(self) -> dict[str, SpeedTable]:
        return {
            member: decode_table(content)
            for member, content in self._registry.speed_tables().items()
        }

    def _peers(self, member: str, tables: dict[str, SpeedTable]) -> pb.PeerSpeeds:
        return encode_peers(peer_speeds(tables, member, self._settings.speed_clip))


def decode_table(content: bytes) -> SpeedTable:
    """A speed table that the registry holds (it was validated before it was stored)."""
    return decode_speeds(pb.PeerSpeeds.FromString(content).rows)


def _prune(directory: Path, kept: int, newest: str) -> None:
    """Delete all but the newest policies up to that of the round just finished."""
    names = sorted(p for p in directory.glob("round-*.safetensors") if p.name <= newest)
    for path in names[:-kept]:
        path.unlink(missing_ok=True)
