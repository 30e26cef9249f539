"""Paired ratios against values worked out by hand."""

import math

import pytest

from agent.statistics import paired_ratio


def test_the_ratio_is_geometric_and_its_interval_is_students() -> None:
    ratio = paired_ratio([math.e, 1.0, math.exp(2.0)], [1.0, 1.0, 1.0])
    # Log ratios 1, 0, 2: mean 1, standard deviation 1, t(0.975, 2) = 4.3027.
    assert ratio.mean == pytest.approx(math.e)
    assert ratio.high == pytest.approx(math.exp(1.0 + 4.3027 / math.sqrt(3.0)), rel=1e-4)
    assert ratio.low == pytest.approx(math.exp(1.0 - 4.3027 / math.sqrt(3.0)), rel=1e-4)
    assert not ratio.significant


def test_equal_runs_are_no_difference_and_clear_ones_are() -> None:
    assert not paired_ratio([2.0, 3.0], [2.0, 3.0]).significant
    better = paired_ratio([0.90, 0.91, 0.89, 0.90], [1.0, 1.0, 1.0, 1.0])
    assert better.significant
    assert str(better).startswith("-10.0 ±")


@pytest.mark.parametrize(
    ("ours", "baseline"),
    [([1.0], [1.0]), ([1.0, 2.0], [1.0]), ([1.0, 0.0], [1.0, 1.0]), ([1.0, math.nan], [1.0, 1.0])],
    ids=["one window", "unpaired", "zero", "not a number"],
)
def test_what_cannot_be_compared_is_refused(ours: list[float], baseline: list[float]) -> None:
    with pytest.raises(ValueError, match=r"windows each|above 0"):
        paired_ratio(ours, baseline)
