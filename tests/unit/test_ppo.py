"""PPO's parts against values worked out by hand, and PPO against problems with a known optimum."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from agent.learning.algorithm import LearningError
from agent.learning.ppo import (
    Ppo,
    PpoSettings,
    clipped_loss,
    gae,
    normalise,
    successor_values,
)
from agent.learning.returns import ReturnScale, discount, discounted_returns
from common.features import FEATURE_COUNT
from common.policy import initial_arrays
from tests.unit.tiny_problems import Bandit, Problem, TwoSteps, make_batch

HALF = 100.0 * math.log(2.0)
"""Seconds that discount by one half at a horizon of 100 s."""

SETTINGS = PpoSettings(
    tau=100.0, learning_rate=3e-3, minibatch=64, reward_scale=1.0, restraint=0.0, entropy=0.003
)


def two_candidates(**row: object) -> dict:
    features = np.zeros((2, FEATURE_COUNT), np.float32)
    features[0, 0] = features[1, 1] = 1.0
    defaults = {"features": features, "rule": [0.0, 0.0], "elapsed": np.inf, "ends": True}
    return defaults | {"log_prob": math.log(0.5)} | row


def forced(**row: object) -> dict:
    features = np.ones((1, FEATURE_COUNT), np.float32)
    defaults = {"features": features, "rule": [0.0], "action": 0, "log_prob": 0.0}
    return defaults | {"elapsed": np.inf, "ends": True} | row


def test_discount_follows_elapsed_time_and_is_zero_at_a_true_end() -> None:
    gamma = discount(np.array([0.0, HALF, 2 * HALF, np.inf]), tau=100.0)
    np.testing.assert_allclose(gamma, [1.0, 0.5, 0.25, 0.0])


def test_advantages_by_hand_where_the_batch_cuts_the_trajectory_off() -> None:
    # γ = ½ throughout, λ = ½. The last row bootstraps from its own value, 2.
    # δ = 1 + ½·1 − ½ = 1;  2 + ½·2 − 1 = 2;  3 + ½·2 − 2 = 2
    # A3 = 2;  A2 = 2 + ¼·2 = 2.5;  A1 = 1 + ¼·2.5 = 1.625
    value, ends = np.array([0.5, 1.0, 2.0]), np.array([False, False, True])
    advantage, returns = gae(
        np.array([1.0, 2.0, 3.0]),
        value,
        successor_values(value, ends),
        np.full(3, HALF),
        ends,
        tau=100.0,
        gae_lambda=0.5,
    )
    np.testing.assert_allclose(advantage, [1.625, 2.5, 2.0])
    np.testing.assert_allclose(returns, [2.125, 3.5, 4.0])


def test_advantages_by_hand_with_uneven_gaps_and_a_true_end() -> None:
    # γ = 1, ¼, 0; λ = ½. Behind the end nothing counts.
    # δ = 1 + 1·1 − ½ = 1.5;  2 + ¼·2 − 1 = 1.5;  3 − 2 = 1
    # A3 = 1;  A2 = 1.5 + ⅛·1 = 1.625;  A1 = 1.5 + ½·1.625 = 2.3125
    value, ends = np.array([0.5, 1.0, 2.0]), np.array([False, False, True])
    elapsed = np.array([0.0, 2 * HALF, np.inf])
    reward = np.array([1.0, 2.0, 3.0])
    advantage, _ = gae(
        reward, value, successor_values(value, ends), elapsed, ends, tau=100.0, gae_lambda=0.5
    )
    np.testing.assert_allclose(advantage, [2.3125, 1.625, 1.0])


def test_trajectories_in_one_batch_do_not_leak_into_each_other() -> None:
    value, ends = np.array([1.0, 50.0, 50.0]), np.array([True, False, True])
    reward, elapsed = np.array([2.0, 9.0, 9.0]), np.array([HALF, HALF, HALF])
    advantage, _ = gae(
        reward, value, successor_values(value, ends), elapsed, ends, tau=100.0, gae_lambda=0.9
    )
    # 2 + ½·1 − 1: the value of the other trajectory's first state is not this one's next.
    assert advantage[0] == pytest.approx(1.5)


def test_discounted_returns_by_hand() -> None:
    # 4; 2 + ½·4 = 4; the row before belongs to another trajectory.
    returns = discounted_returns(
        np.array([7.0, 2.0, 4.0]), np.full(3, 0.5), np.array([True, False, True])
    )
    np.testing.assert_allclose(returns, [7.0, 4.0, 4.0])


def test_rewards_are_scaled_by_the_root_mean_square_of_returns() -> None:
    scale = ReturnScale()
    assert scale.factor == 1.0
    scale.observe(np.array([-3.0, -4.0, -5.0, 0.0]))
    # mean square (9 + 16 + 25) / 4 = 12.5; then two of 0 more: 50 / 6.
    assert scale.factor == pytest.approx(12.5**-0.5)
    scale.observe(np.zeros(2))
    assert scale.factor == pytest.approx((50.0 / 6.0) ** -0.5)
    assert ReturnScale(fixed=0.1).factor == 0.1


def test_clipped_loss_by_hand() -> None:
    # min(1.5, 1.2)·1; min(−1.5, −1.2); min(0.5, 0.8)·1; min(−0.5, −0.8); the loss is the negative.
    ratio, advantage = torch.tensor([1.5, 1.5, 0.5, 0.5]), torch.tensor([1.0, -1.0, 1.0, -1.0])
    torch.testing.assert_close(
        clipped_loss(ratio, advantage, 0.2), torch.tensor([-1.2, 1.5, -0.5, 0.8])
    )


def test_advantages_are_normalised_over_decisions_with_a_choice() -> None:
    free = np.array([True, False, True])
    np.testing.assert_allclose(
        normalise(np.array([3.0, 1000.0, 1.0]), free), [1.0, 0.0, -1.0], atol=1e-6
    )
    np.testing.assert_array_equal(normalise(np.array([5.0]), np.array([False])), [0.0])
    np.testing.assert_array_equal(normalise(np.array([5.0]), np.array([True])), [0.0])


def test_losses_of_the_first_step_by_hand_with_decisions_of_other_policies() -> None:
    # A fresh network takes either candidate with ½. The first row was a 1-in-8 choice of an older
    # policy: weight 4, limited to 2. The second was greedy (log probability 0): weight ½.
    # Advantages are ±1: policy loss −(2·1 + ½·(−1)) / 2 = −0.75. Values are 0: ½ · mean(1, 1).
    batch = make_batch(
        [
            two_candidates(action=0, reward=1.0, log_prob=math.log(1 / 8)),
            two_candidates(action=1, reward=-1.0, log_prob=0.0),
        ],
        width=2,
    )
    settings = dataclasses.replace(SETTINGS, epochs=1, entropy=0.1, value=0.5)
    metrics = Ppo(settings, seed=0).update(batch)
    assert metrics["policy_loss"] == pytest.approx(-0.75, abs=1e-5)
    assert metrics["value_loss"] == pytest.approx(0.5)
    assert metrics["entropy"] == pytest.approx(math.log(2.0))
    assert metrics["approx_kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["clip_fraction"] == 0.0
    assert metrics["explained_variance"] == pytest.approx(0.0)
    assert metrics["loss"] == pytest.approx(-0.75 - 0.1 * math.log(2.0) + 0.25, abs=1e-5)


def test_epochs_end_where_the_policy_has_moved_enough() -> None:
    batch = Bandit().collect(initial_arrays(), 64, np.random.default_rng(0))
    far = Ppo(dataclasses.replace(SETTINGS, target_kl=1e-9, epochs=8), seed=0).update(batch)
    near = Ppo(dataclasses.replace(SETTINGS, target_kl=1e9, epochs=8), seed=0).update(batch)
    assert near["steps"] == 8
    assert far["steps"] == 1


def test_forced_decisions_teach_the_value_and_not_the_policy() -> None:
    learner = Ppo(SETTINGS, seed=0)
    batch = make_batch([forced(reward=float(r)) for r in (-3, -1, -2, 5)])
    metrics = learner.update(batch)
    assert metrics["policy_loss"] == 0.0
    assert metrics["entropy"] == 0.0
    assert metrics["forced"] == 1.0
    arrays = learner.arrays()
    assert not arrays["correction.weight"].any()
    assert not arrays["correction.bias"].any()
    assert arrays["value.1.bias"].any()


def test_forced_decisions_dilute_and_shift_nothing_for_the_others() -> None:
    # Rewards 1 and −1 with a choice are advantages ±1, whatever the forced rows earned: the policy
    # loss is −(2·1 + ½·(−1)) / 2 as without them. Value loss ½ · mean(1, 1, 9, 9).
    free = [
        two_candidates(action=0, reward=1.0, log_prob=math.log(1 / 4)),
        two_candidates(action=1, reward=-1.0, log_prob=0.0),
    ]
    batch = make_batch([*free, forced(reward=3.0), forced(reward=3.0)], width=2)
    metrics = Ppo(dataclasses.replace(SETTINGS, epochs=1), seed=0).update(batch)
    assert metrics["policy_loss"] == pytest.approx(-0.75, abs=1e-5)
    assert metrics["entropy"] == pytest.approx(math.log(2.0))
    assert metrics["value_loss"] == pytest.approx(2.5)


def test_a_better_outcome_raises_the_odds_of_its_action() -> None:
    rows = [two_candidates(action=i % 2, reward=float(i % 2)) for i in range(32)]
    learner = Ppo(SETTINGS, seed=0)
    learner.update(make_batch(rows, width=2))
    with torch.no_grad():
        features = torch.from_numpy(rows[0]["features"])[None]
        correction, _ = learner.network(features, torch.ones(1, 2, dtype=torch.bool))
    assert correction[0, 1] > correction[0, 0]


@pytest.mark.parametrize(
    ("problem", "gae_lambda"),
    [
        pytest.param(Bandit(), 0.95, id="bandit whose context decides"),
        # With λ = 0 the second step's cost reaches the first through the value head alone.
        pytest.param(TwoSteps(), 0.0, id="two steps by bootstrapping"),
        pytest.param(TwoSteps(), 0.95, id="two steps by returns"),
    ],
)
def test_ppo_finds_the_known_optimum_that_the_rule_misses(
    problem: Problem, gae_lambda: float
) -> None:
    settings = dataclasses.replace(SETTINGS, gae_lambda=gae_lambda, reward_scale=None)
    learner, rng = Ppo(settings, seed=0), np.random.default_rng(0)
    assert problem.optimal(learner.arrays()) < 0.15
    for _ in range(35):
        learner.update(problem.collect(learner.arrays(), 256, rng))
    assert problem.optimal(learner.arrays()) >= 0.95


def test_the_proximal_term_holds_weights_near_the_shared_ones() -> None:
    def distance(mu: float) -> float:
        learner, rng = Ppo(SETTINGS, seed=0), np.random.default_rng(0)
        learner.set_global(initial_arrays(0), mu)
        for _ in range(6):
            metrics = learner.update(Bandit().collect(learner.arrays(), 128, rng))
        assert (metrics["proximal_term"] > 0.0) == (mu > 0.0)
        return metrics["distance_to_global"]

    assert distance(3.0) < 0.5 * distance(0.0)


def test_a_loss_that_overflows_leaves_the_learner_as_it_was() -> None:
    learner, rng = Ppo(SETTINGS, seed=0), np.random.default_rng(0)
    learner.update(Bandit().collect(learner.arrays(), 64, rng))
    before = learner.state()
    batch = make_batch([two_candidates(action=0, reward=1e30), two_candidates(action=1, reward=0)])
    with pytest.raises(LearningError, match="loss is NaN or infinite"):
        learner.update(batch)
    assert learner.state() == before


@pytest.mark.parametrize("name", ["temperature", "tau", "clip", "learning_rate"])
def test_settings_out_of_range_are_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        PpoSettings(**{name: 0.0})


def test_restraint_brings_an_unfounded_correction_back_to_the_rule() -> None:
    arrays = initial_arrays()
    # Every candidate is corrected alike, so that no choice speaks for or against it.
    arrays["correction.bias"] = np.array([1.0], np.float32)
    rows = [two_candidates(action=i % 2, reward=0.0) for i in range(32)]
    sizes = []
    for restraint in (0.0, 0.5):
        learner = Ppo(dataclasses.replace(SETTINGS, restraint=restraint, entropy=0.0), seed=0)
        learner.set_weights(arrays)
        for _ in range(20):
            learner.update(make_batch(rows, width=2))
        sizes.append(abs(float(learner.arrays()["correction.bias"][0])))
    assert sizes[1] < sizes[0] - 0.05
