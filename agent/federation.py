"""The member's end of the federation link; started by the learner's process, beside the learner.

It keeps one stream to the hub open, hands what comes from there to the learner, and uploads what
the learner learned when an upload is due. It needs neither Flower nor torch. What leaves the
cluster is exactly what ``link.proto`` declares; of the learner's metrics only the declared names.
"""

import logging
import queue
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import grpc
import numpy as np

from agent.backoff import Backoff
from agent.uploads import UploadPolicy, UploadState, read_state, write_state
from common import link_pb2 as pb
from common.codec import MalformedError, decode_arrays, decode_peers, encode_delta, encode_speeds
from common.identity import Bundle
from common.metrics import allowed
from common.speeds import Peers, SpeedRowError, SpeedTable
from common.speeds import check as check_speeds
from common.weights import Arrays, check_same_form, copy, delta, norm, quantise

log = logging.getLogger(__name__)

METHOD = f"/{pb.DESCRIPTOR.services_by_name['Link'].full_name}/Session"
MAX_BACKOFF_SECONDS = 30.0
_OPTIONS = [
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", 64 << 20),
    # Reconnecting is done here, with a fresh channel each time.
    ("grpc.enable_retries", 0),
]


@dataclass(frozen=True)
class LocalState:
    """What a learner has, as of one moment."""

    arrays: Arrays
    """The policy that it shares: the one that passed its gate. Must not change after it was handed
    over."""
    learning_rounds: int
    """Learning rounds so far."""
    scheduled_pods: int
    """Pods that its agent has scheduled so far; only ever grows, also over restarts."""
    speeds: SpeedTable
    """Its own observations alone, by :func:`common.speeds.speed_key`."""
    metrics: dict[str, float]
    """Any; of these, names in :data:`common.metrics.DECLARED` are sent."""
    candidate: Arrays | None = None
    """The policy that it is learning on, where that is another: what it learns from an upload to
    the answer is kept."""


@dataclass(frozen=True)
class SharedPolicy:
    """A policy from the hub."""

    kind: Literal["global", "personalised"]
    """``global``: the anchor of the proximal term, and the start of a learner that has no policy
    of its own. ``personalised``: to be learned on from."""
    arrays: Arrays
    round: int
    proximal_mu: float
    """Weight of the term ``mu/2 * ||w - w_global||**2`` in the learner's loss."""
    at_upload: Arrays | None = None
    """What the learner was learning on at the upload that this one answers. What it learned since
    is kept by :func:`common.weights.carry_progress`. None: take the policy as it is."""


class Learner(Protocol):
    """What the link needs of a learner. The calls come from the link's thread, one at a time."""

    def local(self) -> LocalState:
        """A consistent snapshot; called about once a second."""

    def adopt(self, policy: SharedPolicy) -> bool:
        """Take a policy up; False when it is kept out."""

    def adopt_speeds(self, peers: Peers) -> None:
        """Replace what is known of the peers' speeds."""


@dataclass(frozen=True)
class _Task:
    """A Train message that waits for its answer."""

    reply_to: int
    round: int
    version: str
    base: Arrays
    again: bool
    """The hub asks a second time in one round: the first answer was lost."""


class Member:
    """The link's end in a thread of its own."""

    def __init__(
        self,
        bundle: Bundle,
        learner: Learner,
        state_dir: Path,
        *,
        features_version: int,
        architecture: str,
        software_version: str,
        policy: UploadPolicy | None = None,
        keep: float = 1.0,
        status_seconds: float = 15.0,
        tick_seconds: float = 1.0,
        first_backoff: float = 1.0,
        active: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        """Prepare the link; :meth:`start` opens it.

        Args:
            bundle: who this member is and where the hub is.
            learner: what learns here.
            state_dir: the agent's state directory.
            features_version, architecture, software_version: must match the hub's, but for the
                last, which is only shown.
            policy: when an upload is due.
            keep: fraction of entries per tensor that is sent, in (0, 1]; 1 sends all.
            status_seconds: between two points of the learning curves.
            tick_seconds: between two looks at the learner.
            first_backoff: first waiting time after a lost connection, seconds.
            active: whether this replica may have a link at all; without it the stream is closed.
            clock: monotonic seconds.
            rng: source of the jitter.
        """
        self._bundle, self._learner, self._state_dir = bundle, learner, state_dir
        self._hello = pb.Hello(
            member=bundle.member,
            features_version=features_version,
            architecture=architecture,
            software_version=software_version,
        )
        self._policy = policy or UploadPolicy()
        self._keep = keep
        self._status_seconds, self._tick_seconds = status_seconds, tick_seconds
        self._active, self._clock = active, clock
        self._backoff = Backoff(
            rng or random.Random(), first=first_backoff, longest=MAX_BACKOFF_SECONDS
        )
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self.run, name="federation", daemon=True)
        self._task: _Task | None = None
        self._state = UploadState()
        self._reference: Arrays | None = None
        """The local policy that drift is measured from: at the last upload, or as adopted since.
        Not the shared policy: a member may differ from that for good."""
        self._last_upload = self._last_status = 0.0
        self.connected = False
        """Whether the hub has answered on the present stream."""
        self.last_error = ""
        """Why the latest stream ended; empty before the first end."""

    def start(self) -> None:
        """Begin in a thread."""
        self._thread.start()

    def stop(self) -> None:
        """Close the stream and wait for the thread."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def run(self) -> None:
        """Keep a session open until :meth:`stop`; the body of the thread."""
        self._state = read_state(self._state_dir, self._learner.local().scheduled_pods)
        self._last_upload = self._clock()
        while not self._stop.is_set():
            if not self._active():
                self._stop.wait(self._tick_seconds)
                continue
            ended = self._session()
            self.connected = False
            self.last_error = ended
            self._task = None
            if not self._stop.is_set() and self._active():
                wait = self._backoff.next()
                log.warning("no link to the hub (%s); next try in %.1f s", self.last_error, wait)
                self._stop.wait(wait)

    # ---- one session ----

    def _session(self) -> str:
        credentials = grpc.ssl_channel_credentials(
            self._bundle.ca, self._bundle.key, self._bundle.certificate
        )
        options = [*_OPTIONS, ("grpc.ssl_target_name_override", self._bundle.server_name)]
        outbox: queue.SimpleQueue[pb.MemberMessage | None] = queue.SimpleQueue()
        inbox: queue.SimpleQueue[pb.HubMessage | str] = queue.SimpleQueue()
        outbox.put(pb.MemberMessage(hello=self._hello))
        with grpc.secure_channel(self._bundle.hub, credentials, options=options) as channel:
            call = channel.stream_stream(
                METHOD,
                request_serializer=pb.MemberMessage.SerializeToString,
                response_deserializer=pb.HubMessage.FromString,
            )(iter(outbox.get, None))
            reader = threading.Thread(target=_read, args=(call, inbox), daemon=True)
            reader.start()
            try:
                return self._converse(inbox, outbox)
            finally:
                outbox.put(None)
                call.cancel()
                reader.join()

    def _converse(
        self,
        inbox: "queue.SimpleQueue[pb.HubMessage | str]",
        outbox: "queue.SimpleQueue[pb.MemberMessage | None]",
    ) -> str:
        while not self._stop.is_set():
            if not self._active():
                return "another replica leads"
            try:
                item = inbox.get(timeout=self._tick_seconds)
            except queue.Empty:
                item = None
            if isinstance(item, str):
                return item
            if item is not None:
                self.connected = True
                self._backoff.reset()
            for answer in self._step(item):
                outbox.put(answer)
        return "stopped"

    def _step(self, item: pb.HubMessage | None) -> list[pb.MemberMessage]:
        """What to send after a message, or after a tick without one."""
        answers: list[pb.MemberMessage] = []
        reply_to = 0
        try:
            if item is not None and item.WhichOneof("kind") == "train":
                reply_to = item.train.id
                answers += self._on_train(item.train)
            elif item is not None and item.WhichOneof("kind") == "personalize":
                reply_to = item.personalize.id
                answers.append(self._on_personalize(item.personalize))
            if self._task is not None:
                reply_to = self._task.reply_to
            answers += self._on_tick()
        except Exception:
            # A fault of the learner must end neither the link nor the hub's round.
            log.exception("the learner failed; the hub is told that there is no answer")
            self._task = None
            answers.append(_failure(reply_to, pb.Failure.INTERNAL))
        return answers

    # ---- messages ----

    def _on_train(self, train: pb.Train) -> list[pb.MemberMessage]:
        try:
            base = decode_arrays(train.arrays)
            peers = decode_peers(train.speeds)
            check_same_form(base, self._learner.local().arrays)
        except (MalformedError, ValueError) as error:
            log.error("the hub's policy does not fit: %s", error)
            return [_failure(train.id, pb.Failure.INCOMPATIBLE)]
        again = self._state.round == train.round
        self._task = _Task(train.id, train.round, train.version, base, again)
        self._learner.adopt_speeds(peers)
        self._learner.adopt(SharedPolicy("global", copy(base), train.round, train.proximal_mu))
        log.info("round %d: training from policy %s", train.round, train.version[:12])
        return []

    def _on_personalize(self, message: pb.Personalize) -> pb.MemberMessage:
        arrays = decode_arrays(message.arrays)
        matches = self._state.round == message.round
        at_upload = self._state.upload if matches else None
        self._learner.adopt_speeds(decode_peers(message.speeds))
        adopted = self._learner.adopt(
            SharedPolicy(
                "personalised", arrays, message.round, message.proximal_mu, at_upload=at_upload
            )
        )
        if adopted:
            self._reference = self._learner.local().arrays
        # After the learner: a crash between the two repeats no pod, for the hub has counted them;
        # it loses what one quantisation lost.
        self._state.settle(message.accepted_pods, adopted)
        write_state(self._state_dir, self._state)
        return pb.MemberMessage(adopted=pb.Adopted(reply_to=message.id, adopted=adopted))

    def _on_tick(self) -> list[pb.MemberMessage]:
        now = self._clock()
        report = now - self._last_status >= self._status_seconds
        if self._task is None and not report:
            return []
        local = self._learner.local()
        answers: list[pb.MemberMessage] = []
        if report and self.connected:
            self._last_status = now
            answers.append(pb.MemberMessage(status=pb.Status(metrics=allowed(local.metrics))))
        if self._task is not None and self._is_due(self._task, local, now):
            task, self._task = self._task, None
            # Also when there turns out to be nothing to send: else the next round would get the
            # same answer at once, and so on without end.
            self._last_upload = now
            self._state.learning_rounds = local.learning_rounds
            self._reference = copy(local.arrays)
            answers.append(self._upload(task, local))
        return answers

    def _is_due(self, task: _Task, local: LocalState, now: float) -> bool:
        reference = task.base if self._reference is None else self._reference
        drift = norm(delta(local.arrays, reference)) / max(norm(task.base), 1e-12)
        if local.learning_rounds < self._state.learning_rounds:
            self._state.learning_rounds = 0  # the learner began to count anew
        learned = local.learning_rounds - self._state.learning_rounds
        # A drift that is not a number is due as well: the answer then says what is wrong.
        strange = not np.isfinite(drift)
        due = self._policy.due(learned, now - self._last_upload, drift)
        return task.again or strange or due

    def _upload(self, task: _Task, local: LocalState) -> pb.MemberMessage:
        pods = self._state.count(local.scheduled_pods)
        if pods <= self._state.accepted_pods:
            return _failure(task.reply_to, pb.Failure.NOTHING_NEW)
        try:
            change = delta(local.arrays, task.base)
            code, pending = quantise(change, self._state.residual, self._keep)
        except ValueError as error:
            log.error("the local policy cannot be sent: %s", error)
            return _failure(task.reply_to, pb.Failure.NOT_FINITE)
        speeds = local.speeds
        try:
            check_speeds(speeds)
        except SpeedRowError as error:
            log.error("the speed table is left out of the upload: %s", error)
            speeds = {}
        self._state.round = task.round
        candidate = local.arrays if local.candidate is None else local.candidate
        self._state.upload, self._state.pending = copy(candidate), pending
        write_state(self._state_dir, self._state)
        log.info("round %d: uploading after %d scheduled pods", task.round, pods)
        return pb.MemberMessage(
            update=pb.Update(
                reply_to=task.reply_to,
                base_round=task.round,
                base_version=task.version,
                tensors=encode_delta(code),
                scheduled_pods=pods,
                counter=self._state.counter,
                learning_rounds=local.learning_rounds,
                speeds=encode_speeds(speeds),
                metrics=allowed(local.metrics),
            )
        )


def _failure(reply_to: int, reason: "pb.Failure.Reason") -> pb.MemberMessage:
    return pb.MemberMessage(failure=pb.Failure(reply_to=reply_to, reason=reason))


def _read(call: Any, inbox: "queue.SimpleQueue[pb.HubMessage | str]") -> None:
    """Move what the hub sends into ``inbox``; last comes a text that says why it ended."""
    try:
        for message in call:
            inbox.put(message)
        inbox.put("the hub closed the stream")
    except grpc.RpcError as error:
        inbox.put(f"{error.code().name}: {error.details()}")
