"""Which policy is live: the best one that passed the gate; owns ``policy/current.safetensors``.

``agent.learning.learner`` asks at the end of a round and commits :class:`Live` with its own state;
the file is written after the commit and mended from it at a start, so a kill between the two
leaves no difference.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as save_arrays

from agent.learning.gate import GateSettings, Verdict, compare
from agent.learning.twin import Twin
from agent.scheduling.decision import make_policy
from agent.scheduling.scorer import corrections, scorer
from common.features import FEATURES_VERSION
from common.policy import ARCHITECTURE, initial_arrays
from common.weights import Arrays, WeightsFileError, copy, load, save, version_id

log = logging.getLogger(__name__)

REMEMBERED = 8
"""Versions whose weights are kept to score the decisions that they made."""
RULE_VERSION = version_id(initial_arrays())[:16]
"""Version of the start weights, which correct nothing: with them the rule decides."""


class Live(msgspec.Struct, frozen=True, kw_only=True):
    """What is live and how it came to be; saved with the learner's state."""

    version: str = ""
    """Version of the live policy; empty while the rule alone decides."""
    learning_round: int = 0
    """Learning round that it is of."""
    weights: dict[str, bytes] = {}
    """Weights (safetensors) of the latest live versions, the oldest first."""
    failures: int = 0
    """Comparisons in a row that the candidate failed."""
    accepted: int = 0
    rejected: int = 0
    gain: float = 0.0
    """Gain of the latest candidate over the rule, a share of the mean completion time."""

    def arrays(self, version: str | None = None) -> Arrays | None:
        """Weights of a version (the live one by default); None where they are not kept."""
        content = self.weights.get(self.version if version is None else version)
        return None if content is None else copy(load_arrays(content))


def corrections_of(
    live: Live, version: str, features: np.ndarray[tuple[int, ...], np.dtype[np.float32]]
) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]] | None:
    """Corrections [C] that a remembered policy gives to ``features`` [C, F]; None: not known.

    An empty version is the rule alone and corrects nothing.
    """
    out = np.zeros(len(features))
    if version:
        arrays = live.arrays(version)
        if arrays is None:
            return None
        corrections(scorer(arrays), features, len(features), out)
    return out.astype(np.float32)


@dataclass(frozen=True)
class Gatekeeper:
    """Compares candidates with the rule and with the live policy.

    ``rule`` and ``margin`` are what ``agent serve`` decides with: what is judged is what goes live.
    """

    rule: str
    margin: float
    patience: int
    settings: GateSettings = field(default_factory=GateSettings)

    def consider(
        self, live: Live, candidate: Arrays, twin: Twin, *, learning_round: int, seed: int
    ) -> tuple[Live, Verdict]:
        """What is live after a comparison, and how the candidate did.

        The candidate goes live if it passes and does at least as well as the live policy in the
        same windows. A live policy that is now significantly worse than the rule is withdrawn.
        """
        current = live.arrays()
        arms = [candidate] if current is None else [candidate, current]
        verdict, *others = compare(
            twin,
            make_policy(self.rule),
            [make_policy(self.rule, arrays, margin=self.margin) for arrays in arms],
            seed=seed,
            settings=self.settings,
        )
        accepted = verdict.passed and all(
            verdict.mean.mean <= other.mean.mean or not other.passed for other in others
        )
        now = replace_struct(live, gain=verdict.gain)
        log.info(
            "gate at round %d: %s against the rule in %d windows (p99 %s): %s",
            learning_round,
            verdict.mean,
            verdict.mean.windows,
            verdict.p99,
            "goes live" if accepted else "held back",
        )
        if accepted:
            now = replace_struct(
                promoted(now, candidate, learning_round), failures=0, accepted=live.accepted + 1
            )
            return now, verdict
        now = replace_struct(
            now,
            failures=0 if verdict.passed else live.failures + 1,
            rejected=live.rejected + 1,
        )
        if others and others[0].mean.low > 1.0:
            log.warning(
                "the live policy %s is now worse than the rule (%s); the rule decides again",
                live.version,
                others[0].mean,
            )
            now = promoted(now, initial_arrays(), learning_round)
        return now, verdict

    def has_lost_its_way(self, live: Live) -> bool:
        """Whether learning should go on from the best policy instead."""
        return live.failures >= self.patience


def replace_struct(live: Live, **changes: object) -> Live:
    """A copy of ``live`` with some fields changed."""
    return msgspec.structs.replace(live, **changes)


def promoted(live: Live, arrays: Arrays, learning_round: int) -> Live:
    """``live`` with ``arrays`` as the policy that decides."""
    version = version_id(arrays)[:16]
    kept = {v: w for v, w in live.weights.items() if v != version}
    kept[version] = bytes(save_arrays(arrays))
    for old in list(kept)[:-REMEMBERED]:
        del kept[old]
    return replace_struct(live, version=version, learning_round=learning_round, weights=kept)


def write_live(path: Path, live: Live) -> bool:
    """Make the policy file agree with ``live``; returns whether it had to be written.

    Raises:
        OSError: the file cannot be written; the old one is untouched.
    """
    arrays = live.arrays()
    if arrays is None:
        return False
    try:
        if load(path)[1].get("version") == live.version:
            return False
    except WeightsFileError:
        pass  # missing or damaged: written below
    save(
        path,
        arrays,
        {
            "version": live.version,
            "features_version": str(FEATURES_VERSION),
            "architecture": ARCHITECTURE,
            "learning_round": str(live.learning_round),
        },
    )
    return True


def begin(path: Path, set_weights: Callable[[Arrays], None]) -> Live:
    """Let a learner that has no state, or lost it, start from the policy file if there is one.

    Returns what is live; none where the file is missing or does not fit.
    """
    if not path.exists():
        return Live()
    try:
        arrays, about = load(path)
        version = about["version"]
        if about.get("features_version") != str(FEATURES_VERSION):
            raise ValueError("it was made for other features")
        set_weights(arrays)
    except (ValueError, KeyError) as error:
        log.warning("%s is no start for learning: %s", path, error)
        return Live()
    return Live(version=version, weights={version: save_arrays(arrays)})
