"""``leader.json``: whether this replica leads, from ``agent serve`` to ``agent learn``.

Written by ``agent.cluster.election`` at each renewal and read by ``agent.learning.learn``. It says
until when it holds, so that a serving process that was killed leaves no learner leading for ever.
"""

import contextlib
import uuid
from pathlib import Path

import msgspec

from common.weights import write_atomic


class Leadership(msgspec.Struct, frozen=True):
    """What the election found last."""

    leading: bool
    holder: str
    """Who holds the lease; empty where nobody does."""
    until: float
    """Unix seconds of this machine's clock."""
    seconds: float
    """How long it held when it was written."""

    def holds(self, now: float) -> bool:
        """Whether this replica leads at Unix time ``now``.

        One that ends further off than it ever could was written before the clock was set back.
        """
        return self.leading and 0.0 < self.until - now <= self.seconds


def write(path: Path, leadership: Leadership) -> None:
    """Replace the file. Raises OSError."""
    write_atomic(path, msgspec.json.encode(leadership))


def read(path: Path) -> Leadership:
    """The file's content; nobody leads where it is missing or broken."""
    with contextlib.suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
        return msgspec.json.decode(path.read_bytes(), type=Leadership)
    return Leadership(leading=False, holder="", until=0.0, seconds=0.0)


def replica_id(state: Path) -> str:
    """A name that this state directory keeps and no other has. Raises OSError."""
    path = state / "replica-id"
    with contextlib.suppress(FileNotFoundError):
        if kept := path.read_text("utf-8").strip():
            return kept
    made = str(uuid.uuid4())
    write_atomic(path, made.encode())
    return made
