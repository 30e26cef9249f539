"""The hub's link as a Flower ``Grid``; the only module that touches Flower's messages.

The round loop and Flower's strategies see a ``Grid`` of nodes; behind it are the members' sessions
over ``link.proto``. Messages to members are built by Flower's strategies and translated here;
members' answers come back as Flower messages that carry the untrusted ``Update`` unopened, until
the round loop has validated it.

Outside a Flower task a ``Message`` needs a task identity that only a private module can set
(:func:`_become_task`); a test holds that touch point to the pinned Flower release.
"""

import hashlib
import logging
import secrets
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.serverapp import Grid

from common import link_pb2 as pb
from common.codec import encode_arrays
from common.weights import Arrays, version_id

TRAIN = "train"
PERSONALIZE = "train.personalize"
WEIGHT_KEY = "num-examples"
DISCONNECTED = 101
"""Error code: the member's session ended before it answered."""
MEMBER_FAILED = 102
"""Error code: the member answered that it has nothing to send; the reason is a name of
``Failure.Reason``."""

log = logging.getLogger(__name__)


def _become_task() -> None:
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1


_become_task()
# Flower logs every step of every round at INFO; the round loop has its own lines.
logging.getLogger("flwr").setLevel(logging.ERROR)


def node_id_of(member: str) -> int:
    """The 63-bit node id of a member, from its name."""
    return int.from_bytes(hashlib.sha256(member.encode()).digest()[:8], "big") >> 1


def to_record(arrays: Arrays) -> ArrayRecord:
    """Flower's record of named arrays, in the order of their names."""
    return ArrayRecord({name: Array(np.asarray(arrays[name])) for name in sorted(arrays)})


def from_record(record: ArrayRecord) -> Arrays:
    """Inverse of :func:`to_record`, in float32."""
    return {name: np.asarray(array.numpy(), np.float32) for name, array in record.items()}


def with_speeds(message: Message, peers: pb.PeerSpeeds) -> Message:
    """A copy of a strategy's message to one node with that member's peer speeds added."""
    content = RecordDict(dict(message.content.items()))
    content["speeds"] = ConfigRecord({"peers": peers.SerializeToString()})
    metadata = message.metadata
    return Message(content, metadata.dst_node_id, metadata.message_type, group_id=metadata.group_id)


def personal_message(
    member: str, arrays: Arrays, config: Mapping[str, Any], peers: pb.PeerSpeeds
) -> Message:
    """A personalised policy for one member; ``config`` holds the other fields of Personalize."""
    content = RecordDict(
        {
            "arrays": to_record(arrays),
            "config": ConfigRecord(dict(config)),
            "speeds": ConfigRecord({"peers": peers.SerializeToString()}),
        }
    )
    return Message(content, node_id_of(member), PERSONALIZE)


@dataclass(frozen=True)
class Reply:
    """A member's answer, opened: an untrusted update, or why there is none."""

    node_id: int
    update: pb.Update | None
    adopted: bool
    error: str
    retry: bool
    """The member vanished before it answered; it may be asked again once it is back."""


def open_reply(message: Message) -> Reply:
    """Open a reply of the grid."""
    node_id = message.metadata.src_node_id
    if message.has_error():
        code = message.error.code
        return Reply(node_id, None, False, message.error.reason or "", code == DISCONNECTED)
    record = message.content.config_records["reply"]
    update, adopted = record.get("update"), bool(record.get("adopted", False))
    parsed = pb.Update.FromString(update) if isinstance(update, bytes) else None
    return Reply(node_id, parsed, adopted, "", False)


def trained(message: Message, arrays: Arrays, num_examples: int) -> Message:
    """The reply with its content replaced by what Flower's strategies aggregate."""
    message.content = RecordDict(
        {"arrays": to_record(arrays), "metrics": MetricRecord({WEIGHT_KEY: num_examples})}
    )
    return message


def _translate(message: Message, wire_id: int) -> pb.HubMessage:
    content = message.content
    arrays = from_record(content.array_records["arrays"])
    config: dict[str, Any] = dict(content.config_records["config"])
    speeds: dict[str, Any] = dict(content.config_records.get("speeds") or {})
    peers = pb.PeerSpeeds.FromString(speeds.get("peers", b""))
    if message.metadata.message_type == TRAIN:
        return pb.HubMessage(
            train=pb.Train(
                id=wire_id,
                round=config["server-round"],
                version=version_id(arrays),
                arrays=encode_arrays(arrays),
                proximal_mu=config.get("proximal-mu", 0.0),
                speeds=peers,
            )
        )
    return pb.HubMessage(
        personalize=pb.Personalize(
            id=wire_id,
            round=config["server-round"],
            version=config["version"],
            arrays=encode_arrays(arrays),
            eta=config["eta"],
            proximal_mu=config.get("proximal-mu", 0.0),
            accepted_pods=config["accepted-pods"],
            speeds=peers,
        )
    )


@dataclass(frozen=True)
class _Pending:
    message: Message
    member: str
    session: int


class Sessions(Protocol):
    """The members' sessions: those of ``coordinator.sessions``, or members in this process."""

    def members(self) -> list[str]: ...
    def traffic(self) -> tuple[int, int]: ...
    def send(self, member: str, message: pb.HubMessage) -> int | None: ...
    def report(self, kind: str, text: str, member: str | None = None) -> None: ...
    def metrics(self, member: str, values: dict[str, float]) -> None: ...


class LinkGrid(Grid):
    """Flower's ``Grid`` over the members' sessions; its methods may be called from any thread."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._changed = threading.Condition()
        self._names: dict[int, str] = {}
        self._pending: dict[int, _Pending] = {}
        self._replies: dict[int, Message] = {}
        self._latest: dict[tuple[str, str], int] = {}
        self._run: Any = None

    def member_of(self, node_id: int) -> str:
        """Name of a member that has been connected."""
        with self._changed:
            return self._names[node_id]

    def traffic(self) -> tuple[int, int]:
        """Bytes received from and sent to members since the start."""
        return self._sessions.traffic()

    def record_metrics(self, member: str, metrics: dict[str, float]) -> None:
        """Record a member's metrics, checked."""
        self._sessions.metrics(member, metrics)

    def report(self, kind: str, text: str, member: str | None = None) -> None:
        """Log and record an event."""
        self._sessions.report(kind, text, member)

    # ---- Grid ----

    def set_run(self, run: Any) -> None:
        """Keep Flower's description of the run; unused here."""
        self._run = run

    @property
    def run(self) -> Any:
        """What :meth:`set_run` was given."""
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """A message to a node."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Nodes of the connected members."""
        members = self._sessions.members()
        with self._changed:
            self._names.update((node_id_of(member), member) for member in members)
        return [node_id_of(member) for member in members]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages; an unanswered earlier one of the same type to a node is given up."""
        ids = []
        for message in messages:
            # Unguessable and never reused, so that an answer meant for another round, hub
            # process or member cannot be taken for one to this message.
            wire_id = secrets.randbits(63) | 1
            kind: str = message.metadata.message_type
            wire = _translate(message, wire_id)
            with self._changed:
                member = self._names.get(message.metadata.dst_node_id, "")
                stale = self._latest.get((member, kind), 0)
                self._pending.pop(stale, None)
                self._replies.pop(stale, None)
                self._latest[member, kind] = wire_id
                session = self._sessions.send(member, wire)
                if session is None:
                    self._fail(wire_id, message, "not connected")
                else:
                    self._pending[wire_id] = _Pending(message, member, session)
            ids.append(str(wire_id))
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Take the answers that have come to these messages."""
        with self._changed:
            return [
                self._replies.pop(number)
                for number in map(int, message_ids)
                if number in self._replies
            ]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send messages and wait for all answers, or for ``timeout`` seconds."""
        waiting = list(self.push_messages(messages))
        numbers = [int(number) for number in waiting]
        end = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while any(number not in self._replies for number in numbers):
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    break
                self._changed.wait(left)
        return self.pull_messages(waiting)

    # ---- what sessions report ----

    def joined(self, member: str) -> None:
        """A member's session began."""
        with self._changed:
            self._names[node_id_of(member)] = member

    def left(self, member: str, session: int) -> None:
        """A session ended: what was in flight on it fails at once."""
        with self._changed:
            for wire_id, pending in list(self._pending.items()):
                if pending.session == session:
                    del self._pending[wire_id]
                    self._fail(wire_id, pending.message, f"{member} disconnected")

    def replied(self, member: str, message: pb.MemberMessage, fault: str = "") -> None:
        """A member answered; late, unknown and foreign answers are ignored.

        A ``fault`` is why the answer must not be opened; it becomes the reason of an error.
        """
        kind: Literal["update", "failure", "adopted", "hello", "status"] | None
        kind = message.WhichOneof("kind")
        if kind not in ("update", "failure", "adopted"):
            return
        answer = getattr(message, kind)
        with self._changed:
            pending = self._pending.get(answer.reply_to)
            wanted = None if pending is None else pending.message.metadata.message_type
            fits = kind == "failure" or (kind == "update") == (wanted == TRAIN)
            if pending is None or pending.member != member or not fits:
                log.info("%s sent an answer that nothing waits for; it is ignored", member)
                return
            del self._pending[answer.reply_to]
            if fault:
                reply = Message(Error(MEMBER_FAILED, fault), reply_to=pending.message)
            elif kind == "failure":
                try:
                    reason = pb.Failure.Reason.Name(answer.reason)
                except ValueError:
                    reason = "UNSPECIFIED"
                reply = Message(Error(MEMBER_FAILED, reason), reply_to=pending.message)
            else:
                value = answer.SerializeToString() if kind == "update" else answer.adopted
                record = RecordDict({"reply": ConfigRecord({kind: value})})
                reply = Message(record, reply_to=pending.message)
            self._replies[answer.reply_to] = reply
            self._changed.notify_all()

    def _fail(self, wire_id: int, message: Message, reason: str) -> None:
        self._replies[wire_id] = Message(Error(DISCONNECTED, reason), reply_to=message)
        self._changed.notify_all()
