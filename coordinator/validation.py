"""Decides which updates may enter the aggregate; called by the round loop for every answer.

A strategy of Flower's fails as a whole on one inconsistent reply, and a mean follows one absurd
one. So each update is opened here first, against the exact policy that was sent, and what does not
hold is set aside with a reason that an operator can read.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from common import link_pb2 as pb
from common.codec import MalformedError, decode_delta, decode_speeds, shapes_of
from common.speeds import SpeedRowError, SpeedTable
from common.speeds import check as check_speeds
from common.weights import Arrays, apply, dequantise, norm


class RejectedError(ValueError):
    """An update is set aside; the message is the reason."""


@dataclass(frozen=True)
class Limits:
    """Bounds of a sane update; see the settings of the same names."""

    free_delta_norm: float
    norm_factor: float
    max_delta_norm: float
    max_examples: int


@dataclass(frozen=True)
class Counted:
    """What the hub has counted of a member: its counter (None at first) and the pods."""

    counter: int | None
    pods: int


@dataclass(frozen=True)
class Candidate:
    """An update that is well formed; its size is still to be compared with the others'."""

    arrays: Arrays
    """The member's policy: what it was sent plus its change."""
    delta_norm: float
    num_examples: int
    """Pods scheduled since its last accepted update."""
    speeds: SpeedTable


def examine(
    update: pb.Update,
    base: Arrays,
    round_number: int,
    version: str,
    counted: Counted,
    limits: Limits,
) -> Candidate:
    """Open an update.

    Args:
        update: what the member sent.
        base: the policy that it was sent.
        round_number: the running round.
        version: version of ``base``.
        counted: what was counted of this member before.
        limits: bounds.

    Raises:
        RejectedError: with the reason.
    """
    if update.base_round != round_number or update.base_version != version:
        raise RejectedError(
            f"it refers to round {update.base_round}, not to round {round_number} as it was sent"
        )
    num_examples = _examples(update, counted, limits)
    try:
        with np.errstate(over="ignore"):  # what overflows is infinite, and refused below
            change = dequantise(decode_delta(update.tensors, shapes_of(base)))
        speeds = decode_speeds(update.speeds)
        check_speeds(speeds)
    except (MalformedError, SpeedRowError) as error:
        raise RejectedError(str(error)) from error
    for name, array in change.items():
        if not np.isfinite(array).all():
            raise RejectedError(f"{name} holds NaN or infinite entries")
    size = norm(change)
    if not math.isfinite(size) or size > limits.max_delta_norm:
        raise RejectedError(
            f"its change has a norm of {size:.3g}, at most {limits.max_delta_norm:g} is allowed"
        )
    return Candidate(apply(base, change), size, num_examples, speeds)


def _examples(update: pb.Update, counted: Counted, limits: Limits) -> int:
    same = update.counter == counted.counter
    num_examples: int = update.scheduled_pods - (counted.pods if same else 0)
    if num_examples <= 0:
        raise RejectedError(
            f"it counts {num_examples} newly scheduled pods, at least 1 must have been scheduled"
        )
    if num_examples > limits.max_examples:
        raise RejectedError(
            f"it counts {num_examples} newly scheduled pods, at most {limits.max_examples} are "
            "believed (max_examples)"
        )
    return num_examples


def norm_bound(norms: Sequence[float], history: Sequence[float], limits: Limits) -> float:
    """Largest norm that is accepted in a round.

    ``norm_factor`` times the median of this round's ``norms`` and of the ``history`` of accepted
    ones, but never below ``free_delta_norm`` nor above ``max_delta_norm``.
    """
    known = [*norms, *history]
    usual = limits.norm_factor * statistics.median(known) if known else 0.0
    return min(limits.max_delta_norm, max(limits.free_delta_norm, usual))


def check_norm(candidate: Candidate, bound: float) -> None:
    """Raise RejectedError when a change is larger than ``bound``."""
    if candidate.delta_norm > bound:
        raise RejectedError(
            f"its change has a norm of {candidate.delta_norm:.3g}, far beyond the others' "
            f"(at most {bound:.3g})"
        )
