"""Paired ratios, clustered intervals and Holm's adjustment against known values."""

import math

import numpy as np
import pytest

from agent.statistics import clustered_mean, holm, paired_difference, paired_ratio


def test_the_ratio_is_geometric_and_its_interval_is_students() -> None:
    ratio = paired_ratio([math.e, 1.0, math.exp(2.0)], [1.0, 1.0, 1.0])
    # Log ratios 1, 0, 2: mean 1, standard deviation 1, t(0.975, 2) = 4.3027.
    assert ratio.mean == pytest.approx(math.e)
    assert ratio.high == pytest.approx(math.exp(1.0 + 4.3027 / math.sqrt(3.0)), rel=1e-4)
    assert ratio.low == pytest.approx(math.exp(1.0 - 4.3027 / math.sqrt(3.0)), rel=1e-4)
    assert not ratio.significant
    # t = √3 at 2 degrees of freedom: p = 1 − t/√(t² + 2).
    assert ratio.p == pytest.approx(1.0 - math.sqrt(3.0 / 5.0))


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


def test_equal_clusters_count_as_one_observation_each() -> None:
    # Three clusters of two with means 1, 2 and 6: mean 3, their deviation √7, t(0.975, 2) = 4.3027.
    found = clustered_mean([0.5, 1.5, 2.0, 2.0, 5.0, 7.0], ["a", "a", "b", "b", "c", "c"])
    assert (found.mean, found.count, found.clusters) == (3.0, 6, 3)
    assert found.high - found.mean == pytest.approx(4.3027 * math.sqrt(7.0 / 3.0), rel=1e-4)


def test_unequal_clusters_have_the_corrected_error_and_degrees_of_freedom() -> None:
    # Sizes 1, 1, 2; deviations from the mean 2 add up to −2, −1 and 3 in the clusters. CR2:
    # √(4/(1−1/4) + 1/(1−1/4) + 9/(1−2/4)) / 4 = √(74/3)/4. The matrix of the degrees of freedom
    # is [[1, −1/3, −s], [−1/3, 1, −s], [−s, −s, 2]] with s² = 2/3: 16 / (6 + 2/9 + 8/3) = 1.8.
    found = clustered_mean([0.0, 1.0, 3.0, 4.0], ["a", "b", "c", "c"])
    error = math.sqrt(74.0 / 3.0) / 4.0
    assert found.mean == 2.0
    t = 4.7949  # scipy.stats.t.ppf(0.975, 1.8)
    assert found.high - found.mean == pytest.approx(t * error, rel=1e-3)


def test_one_cluster_and_none_give_the_plain_interval() -> None:
    values = [1.0, 2.0, 4.0]
    assert clustered_mean(values, ["x", "x", "x"]) == clustered_mean(values)
    assert clustered_mean(values, ["x", "y", "z"]) == clustered_mean(values)


def test_the_clustered_interval_covers_the_truth_where_the_plain_one_does_not() -> None:
    rng, sizes = np.random.default_rng(1), (1, 4, 4, 5, 14, 15, 18, 19)
    names = [str(g) for g, size in enumerate(sizes) for _ in range(size)]
    covered = {"plain": 0, "clustered": 0}
    for _ in range(1000):
        values = rng.normal(0.0, 1.0, len(names)) + np.repeat(rng.normal(0.0, 0.7, 8), sizes)
        for kind, found in (
            ("plain", clustered_mean(values)),
            ("clustered", clustered_mean(values, names)),
        ):
            covered[kind] += found.low <= 0.0 <= found.high
    assert covered["clustered"] >= 920
    assert covered["plain"] <= 750


def test_a_difference_may_be_of_figures_that_are_0() -> None:
    found = paired_difference([0.0, 0.1, 0.2], [0.0, 0.2, 0.4])
    assert found.mean == pytest.approx(-0.1)
    assert found.low < -0.1 < found.high


def test_holm_adjusts_in_steps_and_keeps_the_order() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == pytest.approx([1.0, 1.0])
    assert holm([]) == []


@pytest.mark.parametrize(
    ("values", "clusters"),
    [([1.0], []), ([1.0, 2.0], ["a"]), ([1.0, math.inf], [])],
    ids=["one value", "a name missing", "not finite"],
)
def test_a_mean_without_an_interval_is_refused(values: list[float], clusters: list[str]) -> None:
    with pytest.raises(ValueError, match=r"two values|names of clusters|finite"):
        clustered_mean(values, clusters)
