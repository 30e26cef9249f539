"""What the suite federation says of its figures, against cases by hand."""

import pytest

from agent.benchmark.federation import Federation
from agent.benchmark.federation_findings import comparisons, findings, notes
from agent.benchmark.suite import Result, Row

NAMES = ("north", "west", "south", "east", "harbour")
DATA = Federation().data


def row(arm: str, low: float, high: float, verdict: str = "undecided") -> Row:
    return Row(arm, "a setting", (low + high) / 2, low, high, 20, 5, 0.5, 0.5, verdict)


def said(
    title: str, *rows: Row, means: dict[str, dict[str, dict[str, float]]] | None = None
) -> str:
    """All that is said of the comparison whose title begins so, if these are its rows."""
    found = [one for one in comparisons(DATA, NAMES) if one.title.startswith(title)]
    return "\n".join(findings(DATA, means or {}, [Result(found[0], rows)]))


def test_the_lie_that_is_told_of_is_the_one_that_may_cost_most_and_not_the_largest_mean() -> None:
    told = said(
        "a liar's cost to the honest members: krum",
        row("random within the limit", 1.0, 1.0, "no worse"),
        row("inverted tenfold", 0.92, 1.06),
    )
    assert "may cost most is inverted tenfold, -1.0 % (-8.0 to +6.0)." in told
    assert told.endswith("Shown to cost at most 2 %: random within the limit.")


def test_lies_that_change_no_figure_are_told_as_that() -> None:
    rows = [row(lie, 1.0, 1.0, "no worse") for lie in DATA.liars]
    told = said("a liar's cost to the honest members: multikrum", *rows)
    assert "One liar of 5, multikrum: no lie changes any figure." in told


def test_what_the_hub_refused_is_told_over_all_strategies() -> None:
    lies = {"inverted tenfold": 1.0, "random within the limit": 0.0, "not a number": 0.5}
    means = {
        f"one liar of 5, {strategy}": {
            lie: {"set_aside": share if strategy == "krum" or share != 0.5 else 1.0}
            for lie, share in lies.items()
        }
        for strategy in DATA.robust
    }
    told = said("a liar's cost", row("inverted tenfold", 0.9, 1.1), means=means)
    assert "in every round: inverted tenfold; " in told
    assert "in some rounds: not a number (50 to 100 %); " in told
    assert "in no round: random within the limit." in told


def test_arms_are_told_by_verdict_with_the_range_of_their_means() -> None:
    told = said(
        "federated policies, at all sizes, to alone",
        row("eta 0.1", 0.97, 0.99, "better"),
        row("eta 1", 0.999, 1.001, "no worse"),
        row("fedprox 1", 0.98, 1.04),
        row("fedmedian", 0.97, 1.01),
    )
    assert told == (
        "Federated, at all sizes together, to alone: better are eta 0.1 (-2.0 %); no worse are "
        "eta 1 (+0.0 %); undecided are fedprox 1, fedmedian (-1.0 to +1.0 %)."
    )


@pytest.mark.parametrize(("high", "within"), [(1.009, "9 peers"), (1.02, "none")])
def test_newcomers_are_within_the_band_where_the_whole_interval_is(
    high: float, within: str
) -> None:
    told = said("a newcomer's", row("0 peers", 1.05, 1.1, "worse"), row("9 peers", 0.99, high))
    assert "by what it has heard: 0 peers +7.5 % (+5.0 to +10.0); 9 peers" in told
    assert told.endswith(f"Shown to be within 1 %: {within}.")


def test_policies_beyond_doubt_better_or_worse_than_the_rule_are_named() -> None:
    told = said(
        "learned policies to the rule, 3 members",
        row("alone", 1.01, 1.03, "worse"),
        row("fedavg", 0.97, 0.99, "better"),
        row("eta 0.1", 0.98, 1.02),
    )
    assert "alone +2.0 % (+1.0 to +3.0); fedavg -2.0 % (-3.0 to -1.0)." in told
    assert told.endswith("better than the rule: fedavg; worse: alone.")


def test_notes_explain_every_lie_and_name_who_is_left_out() -> None:
    told = "\n".join(notes(DATA, ["desert"]))
    assert all(f"{lie}, " in told for lie in DATA.liars)
    assert "-3 times the honest change and 1,000,000 pods claimed a round" in told
    assert told.endswith("their traces are not there: desert.")


def test_one_member_is_told_in_the_singular() -> None:
    titles = [one.title for one in comparisons(DATA, NAMES)]
    assert "learned policies to the rule, 1 member" in titles
    assert "learned policies to the rule, 3 members" in titles
