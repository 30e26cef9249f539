"""Rewards against values worked out by hand."""

import numpy as np
import pytest

from agent.learning.reward import (
    Interval,
    RewardWeights,
    RunTimeMean,
    pending_seconds,
    rewards,
)


def interval(**values: float) -> Interval:
    names = Interval.__dataclass_fields__
    return Interval(**{name: np.array([values.get(name, 0.0)]) for name in names})


def test_each_term_is_priced_by_its_own_weight() -> None:
    weights = RewardWeights(alpha=0.5, beta=0.1, gamma=3.0, delta=2.0)
    # Mean run time 100 s. 40 pending seconds, 300 job seconds, 20 of imbalance, one OOM kill:
    # 0.5 * 0.4 + 2 * 3 + 0.1 * 0.2 + 3 * 1 = 0.2 + 6 + 0.02 + 3 = 9.22
    got = rewards(
        interval(pending_seconds=40, job_seconds=300, imbalance_seconds=20, kills=1),
        100.0,
        weights,
    )
    assert got.pending[0] == pytest.approx(-0.2)
    assert got.jobs[0] == pytest.approx(-6.0)
    assert got.imbalance[0] == pytest.approx(-0.02)
    assert got.kills[0] == pytest.approx(-3.0)
    assert got.total[0] == pytest.approx(-9.22)


def test_the_unit_of_time_does_not_matter() -> None:
    seconds = interval(pending_seconds=60, job_seconds=600, imbalance_seconds=6)
    minutes = interval(pending_seconds=1, job_seconds=10, imbalance_seconds=0.1)
    assert rewards(seconds, 120.0).total == pytest.approx(rewards(minutes, 2.0).total)


def test_completion_time_outweighs_spreading_by_default() -> None:
    busy = rewards(interval(job_seconds=1.0), 1.0).total[0]
    uneven = rewards(interval(imbalance_seconds=1.0), 1.0).total[0]
    assert busy / uneven == pytest.approx(100.0)


def test_a_decision_without_events_costs_nothing() -> None:
    assert rewards(interval(), 10.0).total[0] == 0.0


def test_pending_time_counts_the_pods_left_in_the_queue() -> None:
    # Five wait; one is placed (four go on waiting for 10 s); then the decision is to wait.
    got = pending_seconds(np.array([5.0, 4.0]), np.array([1.0, 0.0]), np.array([10.0, 3.0]))
    assert got.tolist() == [40.0, 12.0]


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_weight_that_is_no_price_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="beta"):
        RewardWeights(beta=value)


def test_a_clock_that_goes_back_is_refused() -> None:
    with pytest.raises(ValueError, match="job_seconds"):
        rewards(interval(job_seconds=-1.0), 10.0)


def test_the_mean_run_time_must_be_positive() -> None:
    with pytest.raises(ValueError, match="mean run time"):
        rewards(interval(), 0.0)


def test_the_run_time_mean_moves_from_its_prior_to_the_data() -> None:
    assert RunTimeMean(prior_seconds=600.0).seconds == 600.0
    # (10 * 600 + 30 * 200) / (10 + 30) = 12000 / 40
    assert RunTimeMean(30, 30 * 200.0, prior_seconds=600.0).seconds == pytest.approx(300.0)
