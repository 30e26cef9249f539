"""When a member uploads, and what it must not forget about its uploads; used by the link's end.

Everything lies in one file that is replaced atomically, so that a crash leaves either the state
before an upload or the one after it.
"""

import logging
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from common.weights import Arrays, WeightsFileError, load, save

log = logging.getLogger(__name__)

FILE = "federation.safetensors"
_PARTS = ("residual", "upload", "pending")


@dataclass(frozen=True)
class UploadPolicy:
    """An upload is due when any of these is reached since the last one."""

    learning_rounds: int = 50
    """Learning rounds."""
    seconds: float = 3600.0
    """Time."""
    drift: float = 0.25
    """How far the local policy moved, relative to the norm of the shared one."""

    def due(self, learning_rounds: int, seconds: float, drift: float) -> bool:
        """Whether an upload is due after so much learning, time and drift."""
        return (
            learning_rounds >= self.learning_rounds
            or seconds >= self.seconds
            or drift >= self.drift
        )


@dataclass
class UploadState:
    """Counters, and the arrays of the last upload.

    The pod counter is absolute: the hub subtracts what it has accepted. An upload that is repeated
    after a lost answer is therefore counted once, and one that was lost is counted with the next.
    """

    counter: int = field(default_factory=lambda: secrets.randbits(64))
    """Random identity of the pod counter."""
    baseline: int = 0
    """The learner's count of scheduled pods where the counter begins."""
    accepted_pods: int = 0
    """The counter's value that the hub acknowledged last."""
    learning_rounds: int = 0
    """The learner's learning rounds at the last upload."""
    round: int = 0
    """Round of an upload whose outcome is unknown; 0: none."""
    residual: Arrays | None = None
    """What quantisation lost in uploads that were taken up."""
    upload: Arrays | None = None
    """The local policy as it was at that upload."""
    pending: Arrays | None = None
    """The residual that holds once that upload is taken up."""

    def count(self, scheduled_pods: int) -> int:
        """The counter's value for the learner's count; begins anew if the learner lost its own."""
        if scheduled_pods - self.baseline < self.accepted_pods:
            log.warning(
                "the learner counts %d scheduled pods, fewer than before; a new counter begins",
                scheduled_pods,
            )
            self.counter = secrets.randbits(64)
            self.baseline = self.accepted_pods = 0
        return scheduled_pods - self.baseline

    def settle(self, accepted_pods: int, adopted: bool) -> None:
        """The upload was accepted and what came back was adopted or not.

        An adopted policy was built from the quantised upload, so what that lost lives only in the
        residual. A policy that was kept still holds it, and the residual starts empty.
        """
        self.accepted_pods = accepted_pods
        self.residual = self.pending if adopted else None
        self.upload = self.pending = None
        self.round = 0


def write_state(directory: Path, state: UploadState) -> None:
    """Replace the state in ``directory`` atomically."""
    arrays: Arrays = {}
    for part in _PARTS:
        content: Arrays | None = getattr(state, part)
        arrays.update({f"{part}/{name}": array for name, array in (content or {}).items()})
    metadata = {
        "counter": f"{state.counter:016x}",
        "baseline": str(state.baseline),
        "accepted_pods": str(state.accepted_pods),
        "learning_rounds": str(state.learning_rounds),
        "round": str(state.round),
    }
    save(directory / FILE, arrays, metadata)


def read_state(directory: Path, scheduled_pods: int) -> UploadState:
    """Read the state, or begin a new one.

    Args:
        directory: the agent's state directory.
        scheduled_pods: the learner's present count. If the file is broken the new counter begins
            there: what was accepted before is unknown, and pods must not count twice.
    """
    path = directory / FILE
    if not path.exists():
        return UploadState()
    try:
        arrays, metadata = load(path)
        parts: dict[str, Arrays] = {part: {} for part in _PARTS}
        for key, array in arrays.items():
            part, _, name = key.partition("/")
            parts[part][name] = array
        return UploadState(
            counter=int(metadata["counter"], 16),
            baseline=int(metadata["baseline"]),
            accepted_pods=int(metadata["accepted_pods"]),
            learning_rounds=int(metadata["learning_rounds"]),
            round=int(metadata["round"]),
            **{part: content or None for part, content in parts.items()},
        )
    except (WeightsFileError, KeyError, ValueError) as error:
        log.warning("the federation state is lost, uploads begin anew: %s", error)
        return UploadState(baseline=scheduled_pods)
