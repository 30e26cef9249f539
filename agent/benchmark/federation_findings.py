"""Which arms of the suite ``federation`` are compared, and what came of it in plain words.

Called by ``agent.benchmark.federation``.
"""

from collections.abc import Sequence

from agent.benchmark.federation_data import Data
from agent.benchmark.federation_training import NOBODY, UNSEEN, lied, together
from agent.benchmark.suite import Comparison, Means, Result, Row

NEWCOMER, MEMBERS = "speeds, newcomer", "speeds, members"
RULE, ALONE, AVERAGE, KNOWN, OWN = "rule", "alone", "average", "known speeds", "own jobs"
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
            title=f"{_TO_RULE}, {n} members",
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


def findings(data: Data, means: Means, results: Sequence[Result]) -> list[str]:
    """A sentence on each question that the suite asks."""
    del means
    said = []
    for result in results:
        title, rows = result.comparison.title, result.rows
        if title == _NEWCOMER:
            said += [
                f"A newcomer with {row.arm} is {_percent(row)} against known speeds"
                f"{_within(row, SPEED_BAND)}."
                for row in rows
            ]
        elif title == _TO_AVERAGE and rows:
            singles = [row for row in rows if row.arm != RULE]
            worse = sum(row.verdict == "worse" for row in singles)
            ahead = sum(row.mean > 1.0 for row in singles)
            said.append(
                f"On clusters that none of them saw, the average of peers is ahead of {ahead} of "
                f"{len(singles)} single peers' policies, beyond doubt of {worse}."
            )
            said += [f"There the rule is {_percent(r)} against it." for r in rows if r.arm == RULE]
        elif title.startswith(_LIAR) and rows:
            worst = max(rows, key=lambda row: row.mean)
            said.append(
                f"{result.comparison.settings[0]}: the worst of {len(rows)} lies, "
                f"{worst.arm}, costs {_percent(worst)}{_within(worst, LIAR_BAND)}."
            )
        elif title.startswith(_PERSONAL):
            said += [
                f"{row.arm} against {result.comparison.baseline}: {_percent(row)}, {row.verdict}."
                for row in rows
            ]
    del data
    return said


def _percent(row: Row) -> str:
    low, mean, high = (100.0 * (value - 1.0) for value in (row.low, row.mean, row.high))
    return f"{mean:+.1f} % ({low:+.1f} to {high:+.1f})"


def _within(row: Row, band: float) -> str:
    if row.high <= 1.0 + band:
        return f", within {100 * band:g} %"
    return f", not shown to be within {100 * band:g} %"
