"""Answers about the federation as plain JSON values; called by ``dashboard.app`` for every route.

Each function composes what the registry's reader tells. Times are seconds since the epoch, sizes
are bytes, durations are seconds. Texts that came from members or operators are passed on as data
and never as markup.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from coordinator.reader import Reader
from coordinator.views import Event, Member, Overview, Round, Update

Json = dict[str, Any]

_REASONS = (
    ("member_failed", r"no usable answer"),
    ("aggregation", r"could not aggregate"),
    ("stale", r"refers to round"),
    ("norm", r"norm of"),
    ("examples", r"scheduled pods"),
    ("speeds", r"speed"),
    ("not_finite", r"nan|infinite"),
    ("shape", r"has shape"),
    ("arrays", r"the array|an array"),
    ("encoding", r"positions?|levels?|bytes|scale"),
)
"""Classes of reasons and words that tell them, in order of precedence.

The words are those of ``coordinator.validation``, ``coordinator.rounds``, ``coordinator.strategy``
and ``common.codec``.
"""

_RECENT_EVENTS = 500
"""How far back a refusal is looked for; older ones no longer say how a member stands."""


def finite(value: Any) -> Any:
    """``value`` with every NaN and infinity in it as None: JSON has no word for them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def reason_class(reason: str) -> str:
    """The class of a reason for setting an update aside, of a small fixed set.

    Reasons hold numbers and names of tensors; as labels of a metric they would be without bound.
    """
    text = reason.lower()
    found = (name for name, words in _REASONS if re.search(rf"\b(?:{words})\b", text))
    return next(found, "other")


def rejections_by_class(reader: Reader) -> dict[str, int]:
    """How many updates were set aside, by class of reason."""
    counts: dict[str, int] = {}
    for reason, count in reader.rejections().items():
        name = reason_class(reason)
        counts[name] = counts.get(name, 0) + count
    return dict(sorted(counts.items()))


def overview(reader: Reader, now: float) -> Json:
    """The federation at a glance, with one sentence that says how it stands."""
    seen = reader.overview()
    # Two suffice in health; after crashes interrupted rounds lie before the last finished one.
    latest = reader.rounds(50)
    last = next((r for r in latest if r.finished is not None), None)
    updates = reader.updates(last.accepted + last.rejected) if last else []
    rejected = [u for u in updates if last and u.round == last.number and not u.accepted]
    return {
        **asdict(seen),
        "now": now,
        "sentence": sentence(seen, last, rejected),
        "last_round": _round(last, rejected) if last else None,
        "rejected_by_reason": rejections_by_class(reader),
    }


def sentence(seen: Overview, last: Round | None, rejected: list[Update]) -> str:
    """How the federation stands, in words that change only when the facts do."""
    if not seen.members:
        return "No member is enrolled yet."
    if seen.members == 1:
        members = f"The only member is {'connected' if seen.connected else 'not connected'}"
    elif seen.connected == seen.members:
        members = f"All {seen.members} members are connected"
    else:
        verb = "are" if seen.connected > 1 else "is"
        members = f"{seen.connected or 'None'} of {seen.members} members {verb} connected"
    if last is None:
        state = f"round {seen.current_round} is the first" if seen.current_round else "no round yet"
        return f"{members}; {state}."
    answers = last.accepted + last.rejected
    if not answers:
        outcome = f"round {last.number} got no update and kept the shared policy"
    elif not last.rejected:
        outcome = f"round {last.number} blended {last.accepted} {_plural(answers, 'update')}"
    else:
        blended = f"{last.accepted or 'none'} of {answers} {_plural(answers, 'update')}"
        outcome = f"round {last.number} blended {blended} and set {last.rejected} aside"
        if rejected:
            outcome += f" ({'; '.join(f'{u.member}: {u.reason}' for u in rejected[:2])})"
    going = f"; round {seen.current_round} is under way" if seen.current_round else ""
    return f"{members}; {outcome}{going}."


def rounds(reader: Reader, limit: int, since: float = 0.0) -> list[Json]:
    """The latest rounds after number ``since``, newest first, with what was set aside and why."""
    found = [r for r in reader.rounds(limit) if r.number > since]
    # Updates are kept in the order of rounds: these are all of the rounds found, and no others.
    answers = reader.updates(sum(r.accepted + r.rejected for r in found)) if found else []
    aside: dict[int, list[Update]] = {}
    for update in answers:
        if not update.accepted:
            aside.setdefault(update.round, []).append(update)
    return [_round(r, aside.get(r.number, [])) for r in found]


def members(reader: Reader) -> list[Json]:
    """All members by name: state, traffic, newest metrics and newest update."""
    found = reader.members()
    values = reader.latest_metrics()
    updates: dict[str, Update] = {}
    for update in reader.updates(20 * len(found)) if found else ():
        updates.setdefault(update.member, update)
    refusals = _refusals(reader.events(_RECENT_EVENTS))
    answer = []
    for member in found:
        # Members that rarely answer are not among the latest updates of all.
        known = updates.get(member.name) or next(iter(reader.updates(1, member.name)), None)
        refusal = _standing(member, refusals.get(member.name))
        answer.append(
            {
                **asdict(member),
                "state": "refused" if refusal else _state(member),
                "refusal": asdict(refusal) if refusal else None,
                "metrics": values.get(member.name, {}),
                "last_update": asdict(known) if known else None,
            }
        )
    return answer


def has_member(reader: Reader, name: str) -> bool:
    """Whether a member of that name was ever enrolled."""
    return any(member.name == name for member in reader.members())


def curve(reader: Reader, member: str, name: str, limit: int, since: float) -> Json:
    """The newest ``limit`` points of a member's curve after the time ``since``, oldest first."""
    points = reader.metrics(member, name, since)[-limit:]
    return {"member": member, "name": name, "points": [[p.time, p.value] for p in points]}


def events(reader: Reader, limit: int, since: float) -> list[Json]:
    """The latest events after the time ``since``, newest first."""
    return [asdict(event) for event in reader.events(limit) if event.time > since]


def _round(seen: Round, rejected: Iterable[Update]) -> Json:
    duration = None if seen.finished is None else seen.finished - seen.started
    aside = [{"member": u.member, "reason": u.reason} for u in rejected]
    return {**asdict(seen), "duration": duration, "set_aside": aside}


def _refusals(found: list[Event]) -> dict[str, Event]:
    """The newest refused connection of every member named in one."""
    newest: dict[str, Event] = {}
    for event in found:
        if event.member is not None and event.kind.startswith("refus"):
            newest.setdefault(event.member, event)
    return newest


def _standing(member: Member, refusal: Event | None) -> Event | None:
    """The refusal, if it is the last that was heard of the member."""
    if refusal is None or member.revoked or member.state == "connected":
        return None
    return refusal if refusal.time >= (member.last_seen or 0.0) else None


def _state(member: Member) -> str:
    return "away" if member.state == "disconnected" else member.state


def _plural(count: int, noun: str) -> str:
    return noun if count == 1 else f"{noun}s"
