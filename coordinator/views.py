"""What the registry tells a reader: plain records, made by it and shown by dashboard and commands.

Times are seconds since the epoch (UTC), sizes are bytes.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Member:
    """A member cluster as the hub knows it."""

    name: str
    enrolled_at: float
    revoked: bool
    fingerprint: str
    certificate_expires: float
    state: str
    """``connected``, ``disconnected``, ``never seen`` or ``revoked``."""
    last_seen: float | None
    features_version: int | None
    architecture: str | None
    software_version: str | None
    bytes_in: int
    """Received from the member, since it was enrolled."""
    bytes_out: int
    scheduled_pods: int
    """Pods of the member's current counter that entered accepted updates."""
    accepted_updates: int
    rejected_updates: int


@dataclass(frozen=True)
class Round:
    """A federation round."""

    number: int
    started: float
    finished: float | None
    state: str
    """``open``, ``finished`` or ``interrupted``."""
    strategy: str
    invited: int
    accepted: int
    rejected: int
    version: str | None
    global_norm: float | None
    bytes_in: int
    bytes_out: int


@dataclass(frozen=True)
class Update:
    """One member's answer in one round."""

    round: int
    member: str
    received: float
    accepted: bool
    reason: str
    """Why it was set aside; empty when accepted."""
    num_examples: int
    """Scheduled pods that weigh it."""
    learning_rounds: int
    delta_norm: float | None
    size: int


@dataclass(frozen=True)
class Point:
    """One point of a learning curve."""

    time: float
    value: float


@dataclass(frozen=True)
class Event:
    """A refusal, a rejected update, a restart."""

    time: float
    kind: str
    member: str | None
    text: str


@dataclass(frozen=True)
class Overview:
    """The federation at a glance."""

    members: int
    """Enrolled and not revoked."""
    connected: int
    rounds: int
    """Finished rounds."""
    current_round: int | None
    """The open round, if one runs."""
    strategy: str | None
    version: str | None
    """Version of the global policy."""
    accepted_updates: int
    rejected_updates: int
    scheduled_pods: int
    """Pods in accepted updates."""
    bytes_in: int
    bytes_out: int


@dataclass(frozen=True)
class NewUpdate:
    """An answer to be recorded with the round that it belongs to."""

    member: str
    accepted: bool
    reason: str = ""
    num_examples: int = 0
    learning_rounds: int = 0
    delta_norm: float | None = None
    size: int = 0
    counter: int | None = None
    """Identity of the pod counter; needed when accepted."""
    scheduled_pods: int = 0
    """The counter's value; becomes the member's accepted pods."""
    speed_table: bytes | None = None


@dataclass(frozen=True)
class Checkpoint:
    """The last finished round and where its policy lies."""

    round: int
    version: str
    policy_file: str
