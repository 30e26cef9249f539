"""Which arms of the suite ``federation`` are compared, and what came of it in plain words.

Called by ``agent.benchmark.federation``.
"""

from collections.abc import Sequence

from agent.benchmark.federation_data import Data, Liar
from agent.benchmark.federation_training import NOBODY, UNSEEN, lied, together
from agent.benchmark.suite import Comparison, Means, Result, Row

NEWCOMER, MEMBERS = "speeds, newcomer", "speeds, members"
RULE, ALONE, AVERAGE, KNOWN, OWN = "rule", "alone", "average", "known speeds", "own jobs"
DEFAULTS = "hub's defaults"
SET_ASIDE = "set_aside"
"""Figure: in which share of the rounds the hub refused the liar's update."""
_METRIC = "mean_completion"
SPEED_BAND, LIAR_BAND, PERSONAL_BAND = 0.01, 0.02, 0.01
"""What counts as no worse: of predicted speeds, of a liar among the members, of an own policy."""
_TO_RULE = "learned policies to the rule"
_TO_AVERAGE = "a single peer's policy to the average of peers', on clusters that none of them saw"
_PERSONAL = "federated policies, at all sizes, to "
_LIAR = "a liar's cost to the honest members"
_NEWCOMER = "a newcomer's predicted speeds to known ones"
_MEMBERS = "a member's predicted speeds to known ones"


def comparisons(data: Data, names: Sequence[str]) -> list[Comparison]:
    """All comparisons that the members that are there allow."""
    sizes = [n for n in data.sizes if n <= len(names)]
    federated = tuple(together(n) for n in sizes if n > 1)
    made = [
        Comparison(
            _METRIC, RULE, settings=(together(n),), pooled=False, band=0.01,
            title=f"{_TO_RULE}, {n} member{'s' if n > 1 else ''}",
        )
        for n in sizes
    ]  # fmt: skip
    if federated:
        others = tuple(arm for arm in data.arms if arm != "fedavg")
        made += [
            Comparison(
                _METRIC, base, arms=others, settings=federated, band=PERSONAL_BAND,
                title=f"{_PERSONAL}{base}",
            )
            for base in (ALONE, "fedavg")
        ]  # fmt: skip
    if len(names) > 3:
        made.append(
            Comparison(_METRIC, AVERAGE, settings=(UNSEEN,), pooled=False, title=_TO_AVERAGE)
        )
    if len(names) >= data.liar_members:
        made += [
            Comparison(
                _METRIC, NOBODY, arms=tuple(data.liars),
                settings=(lied(data.liar_members, strategy),), pooled=False, band=LIAR_BAND,
                title=f"{_LIAR}: {strategy}",
            )
            for strategy in data.robust
        ]  # fmt: skip
    made += [
        Comparison(_METRIC, KNOWN, settings=(setting,), pooled=False, band=SPEED_BAND, title=title)
        for setting, title in ((NEWCOMER, _NEWCOMER), (MEMBERS, _MEMBERS))
    ]
    return made


def notes(data: Data, left_out: Sequence[str]) -> list[str]:
    """What the arms are and how the figures came about."""
    training, speeds = data.training, data.speeds
    lies = "; ".join(f"{name}, {_lie(liar)}" for name, liar in data.liars.items())
    said = [
        "Members learn from the train part of their trace and are judged on its sealed part. "
        "All know the run times of the jobs that they have lived through, but for newcomers.",
        "Policies: speeds are known to all. Every member tries candidates on its own jobs, "
        f"{training.rounds} rounds of {training.steps} optimiser steps follow; updates are "
        "quantised and pass the hub's own validation and strategy. No gate holds back a policy "
        "that does harm, as a live agent's does. A correction decides where it leads by more than "
        f"{data.margin:g}.",
        f"{RULE}: {data.rule}, which every policy corrects. {ALONE}: each member's own policy, "
        "learned without others. fedavg, fedprox, fedmedian and the like are the hub's strategies, "
        "all members then have the same policy; fedprox's number is how strongly learning is "
        "pulled to it. eta: the share of what it learned by itself that a member keeps; 0 is "
        f"fedavg and 1 learning alone. {DEFAULTS}: a hub without settings.",
        "Unseen clusters: the members are halved, and each half is judged with the other's "
        f"policies. {AVERAGE}: what the other half learned together with fedavg. only north: what "
        "north of the other half learned alone.",
        f"One liar of {data.liar_members}: the last member learns as ever and sends something "
        f"else; the others are judged, against the same federation while nobody lies. {lies}. "
        "set aside: in which share of the rounds the hub's checks refused what that member sent; "
        "what it would have taught is then missing.",
        "Speeds: the rule decides by predicted speeds; each site's true speeds differ from the "
        f"published ones by {100 * speeds.spread:g} %, a newcomer knows nothing of "
        "its own. What jobs that share a GPU do to each other is known to all. Who lies of speeds "
        f"tells its slowest GPU model to be {speeds.liar_factor:g} times as fast as it is.",
    ]
    if left_out:
        said.append(f"Left out, as their traces are not there: {', '.join(left_out)}.")
    return said


def _lie(liar: Liar) -> str:
    """What a liar sends, in words."""
    if liar.broken:
        sent = "entries that are no numbers"
    elif liar.random:
        sent = f"a random change of norm {liar.random:g}"
    else:
        sent = f"{liar.scale:g} times the honest change"
    return sent + (f" and {liar.pods:,} pods claimed a round" if liar.pods else "")


def findings(data: Data, means: Means, results: Sequence[Result]) -> list[str]:
    """A sentence or two on each question that the suite asks, in the order of the tables."""
    said, aside = [], False
    for result in results:
        title, rows = result.comparison.title, result.rows
        if not rows:
            continue
        if title in (_NEWCOMER, _MEMBERS):
            said.append(_speeds("A newcomer" if title == _NEWCOMER else "A member", rows))
        elif title == _TO_AVERAGE:
            said += _unseen(rows)
        elif title.startswith(_LIAR):
            if not aside:
                said.append(_checks(data, means))
            aside = True
            said.append(_lies(result.comparison.settings[0], rows))
        elif title.startswith(_PERSONAL):
            base = result.comparison.baseline
            said.append(f"Federated, at all sizes together, to {base}: {_sorted(rows)}.")
        else:
            said.append(_to_rule(title, rows))
    return said


def _to_rule(title: str, rows: Sequence[Row]) -> str:
    told = [f"{row.arm} {_percent(row)}" for row in rows if row.arm in (ALONE, "fedavg", DEFAULTS)]
    better, worse = (
        ", ".join(row.arm for row in rows if row.verdict == verdict) or "none"
        for verdict in ("better", "worse")
    )
    return (
        f"{title.capitalize()}: {'; '.join(told)}. Beyond doubt better than the rule: {better}; "
        f"worse: {worse}."
    )


def _sorted(rows: Sequence[Row]) -> str:
    """The arms by verdict, with the range of their means."""
    said = []
    for verdict in ("better", "no worse", "undecided", "worse"):
        these = [row for row in rows if row.verdict == verdict]
        if these:
            ends = min(row.mean for row in these), max(row.mean for row in these)
            low, high = (f"{100 * (end - 1):+.1f}" for end in ends)
            span = f"{low} %" if low == high else f"{low} to {high} %"
            said.append(f"{verdict} are {', '.join(row.arm for row in these)} ({span})")
    return "; ".join(said)


def _unseen(rows: Sequence[Row]) -> list[str]:
    singles = [row for row in rows if row.arm != RULE]
    worse = sum(row.verdict == "worse" for row in singles)
    ahead = sum(row.mean > 1.0 for row in singles)
    said = [
        f"On clusters that none of them saw, the average of peers is ahead of {ahead} of "
        f"{len(singles)} single peers' policies, beyond doubt of {worse}."
    ]
    return said + [f"There the rule is {_percent(r)} against it." for r in rows if r.arm == RULE]


def _checks(data: Data, means: Means) -> str:
    """How often the hub's checks refused each lie, under all strategies."""
    shares: dict[str, list[float]] = {}
    for strategy in data.robust:
        arms = means.get(lied(data.liar_members, strategy), {})
        for lie in data.liars:
            if SET_ASIDE in arms.get(lie, {}):
                shares.setdefault(lie, []).append(arms[lie][SET_ASIDE])
    always = [lie for lie, found in shares.items() if min(found) == 1.0]
    never = [lie for lie, found in shares.items() if max(found) == 0.0]
    some = [
        f"{lie} ({100 * min(found):.0f} to {100 * max(found):.0f} %)"
        for lie, found in shares.items()
        if lie not in always and lie not in never
    ]
    told = (("every round", always), ("some rounds", some), ("no round", never))
    said = "; ".join(f"in {when}: {', '.join(lies)}" for when, lies in told if lies)
    return f"The hub's checks set aside, whatever its strategy, {said}."


def _lies(setting: str, rows: Sequence[Row]) -> str:
    """What lies cost under one strategy; the worst is the one that may cost most."""
    name = setting.capitalize()
    if all(row.low == row.high == 1.0 for row in rows):
        return f"{name}: no lie changes any figure."
    worst = max(rows, key=lambda row: row.high)
    within = [row.arm for row in rows if row.high <= 1.0 + LIAR_BAND]
    return (
        f"{name}: the lie that may cost most is {worst.arm}, {_percent(worst)}. Shown to cost at "
        f"most {100 * LIAR_BAND:g} %: {', '.join(within) or 'none'}."
    )


def _speeds(who: str, rows: Sequence[Row]) -> str:
    told = "; ".join(f"{row.arm} {_percent(row)}" for row in rows)
    within = [row.arm for row in rows if row.high <= 1.0 + SPEED_BAND]
    return (
        f"{who} that decides by predicted speeds, to one that knows them, by what it has heard: "
        f"{told}. Shown to be within {100 * SPEED_BAND:g} %: {', '.join(within) or 'none'}."
    )


def _percent(row: Row) -> str:
    low, mean, high = (100.0 * (value - 1.0) for value in (row.low, row.mean, row.high))
    return f"{mean:+.1f} % ({low:+.1f} to {high:+.1f})"
