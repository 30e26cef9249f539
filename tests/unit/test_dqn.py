"""DQN's parts against values worked out by hand, and DQN against problems with a known optimum."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from agent.learning.algorithm import LearningError
from agent.learning.dqn import Dqn, DqnSettings, double_target, dueling
from agent.learning.replay import Replay, narrow
from common.features import FEATURE_COUNT
from common.policy import initial_arrays
from tests.unit.tiny_problems import Bandit, Problem, TwoSteps, make_batch

HALF = 100.0 * math.log(2.0)
INF = float("inf")
SETTINGS = DqnSettings(tau=100.0, learning_rate=2e-3, reward_scale=1.0, restraint=0.0)


def row(rule: list[float], action: int, reward: float, elapsed: float, ends: bool) -> dict:
    features = np.full((len(rule), FEATURE_COUNT), reward, np.float32)
    outcome = {"action": action, "reward": reward, "elapsed": elapsed, "ends": ends}
    return {"features": features, "rule": rule} | outcome


def test_dueling_values_by_hand_leave_padding_out_of_the_mean() -> None:
    # A = ½·(0, −1) = (0, −0.5), mean −0.25; Q = 2 + A + 0.25. The padding's 7 counts for nothing.
    q = dueling(
        torch.tensor([[0.0, -1.0, 7.0]]),
        torch.tensor([2.0]),
        torch.tensor([[True, True, False]]),
        advantage_scale=0.5,
    )
    torch.testing.assert_close(q, torch.tensor([[2.25, 1.75, -torch.inf]]))


def test_the_value_of_a_forced_decision_is_that_of_its_state() -> None:
    q = dueling(
        torch.tensor([[-3.0, 0.0]]), torch.tensor([1.5]), torch.tensor([[True, False]]), 1.0
    )
    assert q[0, 0].item() == 1.5


def test_double_target_by_hand_takes_the_online_choice_at_the_target_networks_value() -> None:
    # Row 1: online prefers column 1, which the target network values at 5 (its own best is 8).
    # −1 + ½·5 = 1.5. Row 2: γ = 0, a true end: the reward alone.
    target = double_target(
        torch.tensor([-1.0, -2.0]),
        torch.tensor([0.5, 0.0]),
        torch.tensor([[1.0, 3.0, -torch.inf], [4.0, 0.0, 0.0]]),
        torch.tensor([[8.0, 5.0, -torch.inf], [9.0, 0.0, 0.0]]),
    )
    torch.testing.assert_close(target, torch.tensor([1.5, -2.0]))


def test_first_loss_by_hand_with_the_mask_in_the_target() -> None:
    # A fresh network: V = 0, corrections 0, scale ½. The second decision is cut off by the batch:
    # it is the first one's successor and is not learned from.
    #   Q(s, a1)  = ½·(−0.5) − ½·(−0.25) = −0.125
    #   Q(s', ·)  = ½·(−1, 0) + 0.25 = (−0.25, 0.25); padding would add a candidate of score 9
    #   target    = −0.3 + ½·0.25 = −0.175;  error 0.05;  Huber 0.05² / 2 = 0.00125
    batch = make_batch(
        [row([0.0, -0.5], 1, -0.3, HALF, False), row([-1.0, 0.0], 1, 4.0, 5.0, True)]
    )
    batch.rule_scores[:, 2] = 9.0
    settings = dataclasses.replace(SETTINGS, warm_up=1, updates_per_decision=0.1)
    metrics = Dqn(settings, seed=0).update(batch)
    assert metrics["steps"] == 1
    assert metrics["value_loss"] == pytest.approx(0.00125, rel=1e-4)
    assert metrics["q_mean"] == pytest.approx(-0.125)


def test_a_true_end_is_learned_from_its_reward_alone() -> None:
    # Q = −0.125 as above; target −1.125; error 1 is where Huber turns linear: 1 − ½.
    batch = make_batch([row([0.0, -0.5], 1, -1.125, INF, True)])
    metrics = Dqn(dataclasses.replace(SETTINGS, warm_up=1), seed=0).update(batch)
    assert metrics["value_loss"] == pytest.approx(0.5)


def test_nothing_is_trained_before_the_warm_up() -> None:
    learner = Dqn(dataclasses.replace(SETTINGS, warm_up=3), seed=0)
    batch = make_batch([row([0.0, -0.5], 1, -1.0, INF, True)] * 2)
    assert learner.update(batch)["steps"] == 0
    np.testing.assert_array_equal(
        learner.arrays()["value.1.bias"], initial_arrays(0)["value.1.bias"]
    )
    assert learner.update(batch)["steps"] == 1


def test_the_target_network_follows_by_the_polyak_share() -> None:
    learner = Dqn(dataclasses.replace(SETTINGS, warm_up=1, polyak=0.25), seed=0)
    learner.update(make_batch([row([0.0, -0.5], 1, -1.0, INF, True)]))
    # Both started at 0; after one step the target has gone a quarter of the way.
    online = learner.network.value[1].bias.item()
    assert online != 0.0
    assert learner.target.value[1].bias.item() == pytest.approx(0.25 * online)


def test_weights_from_outside_replace_the_target_network_too() -> None:
    learner = Dqn(SETTINGS, seed=0)
    arrays = initial_arrays(7)
    learner.set_weights(arrays)
    for weights in (learner.network.state_dict(), learner.target.state_dict()):
        for name, array in arrays.items():
            np.testing.assert_array_equal(weights[name].numpy(), array)


@pytest.mark.parametrize(
    "problem",
    [
        pytest.param(Bandit(), id="bandit whose context decides"),
        pytest.param(TwoSteps(), id="two steps by bootstrapping"),
    ],
)
def test_dqn_finds_the_known_optimum_that_the_rule_misses(problem: Problem) -> None:
    learner = Dqn(dataclasses.replace(SETTINGS, reward_scale=None), seed=0)
    rng = np.random.default_rng(0)
    assert problem.optimal(learner.arrays()) < 0.15
    for _ in range(45):
        learner.update(problem.collect(learner.arrays(), 64, rng))
    assert problem.optimal(learner.arrays()) >= 0.95


def test_the_proximal_term_holds_weights_near_the_shared_ones() -> None:
    def distance(mu: float) -> float:
        learner, rng = Dqn(SETTINGS, seed=0), np.random.default_rng(0)
        learner.set_global(initial_arrays(0), mu)
        for _ in range(4):
            metrics = learner.update(Bandit().collect(learner.arrays(), 64, rng))
        assert (metrics["proximal_term"] > 0.0) == (mu > 0.0)
        return metrics["distance_to_global"]

    assert distance(3.0) < 0.5 * distance(0.0)


def test_a_failed_update_leaves_learner_and_replay_as_they_were() -> None:
    settings = dataclasses.replace(SETTINGS, capacity=80)
    learner, rng = Dqn(settings, seed=0), np.random.default_rng(0)
    learner.update(Bandit().collect(learner.arrays(), 64, rng))
    before = learner.state()
    # Each reward is finite in float32, the sum of their losses is not: only the loss can show it.
    batch = make_batch([row([0.0, -0.5], 1, 3e38, INF, True)] * 64)
    batch.features[:] = 0.0
    with pytest.raises(LearningError, match="loss is NaN or infinite"):
        learner.update(batch)
    assert learner.state() == before


def test_the_ring_keeps_the_latest_decisions_with_their_successors() -> None:
    replay = Replay(capacity=5, max_candidates=3)
    rewards = iter(range(100))
    for count in (3, 3):
        last = [i == count - 1 for i in range(count)]
        replay.add(make_batch([row([0.0], 0, float(next(rewards)), 10.0, end) for end in last]))
    # Rewards 0..5 went in, 0 is overwritten; 2 and 5 were cut off and are successors only.
    assert replay.size == 5
    sample = replay.sample(np.random.default_rng(0), 200)
    pairs = zip(sample.reward, sample.next.features[:, 0, 0].numpy(), strict=True)
    assert {(float(now), float(after)) for now, after in pairs} == {(1, 2), (3, 4), (4, 5)}


def test_a_narrow_decision_keeps_nothing_of_the_wide_one_whose_slot_it_takes() -> None:
    replay = Replay(capacity=1, max_candidates=3)
    replay.add(make_batch([row([0.0, -1.0, -2.0], 2, 1.0, INF, True)]))
    replay.add(make_batch([row([0.0], 0, 1.0, INF, True)], width=1))
    now = replay.sample(np.random.default_rng(0), 1).now
    assert now.mask.tolist() == [[True, False, False]]
    assert not now.features[0, 1:].any()


def test_a_batch_beyond_the_capacity_leaves_its_latest_rows() -> None:
    replay = Replay(capacity=3, max_candidates=3)
    replay.add(make_batch([row([0.0], 0, float(i), INF, True) for i in range(10)]))
    assert sorted(set(replay.sample(np.random.default_rng(0), 60).reward)) == [7.0, 8.0, 9.0]


def test_the_last_row_of_a_batch_has_no_successor_even_when_unmarked() -> None:
    replay = Replay(capacity=8, max_candidates=3)
    replay.add(make_batch([row([0.0], 0, 1.0, 10.0, False)]))
    assert len(replay.learnable()) == 0


def test_many_candidates_are_narrowed_to_the_taken_one_and_the_rules_best() -> None:
    batch = make_batch([row([-0.5, 0.0, -2.0, -1.0], 2, 1.0, 5.0, True)], width=5)
    kept = narrow(batch, 3)
    np.testing.assert_array_equal(kept.rule_scores, [[-2.0, 0.0, -0.5]])
    assert kept.action[0] == 0
    assert kept.mask.all()
    assert narrow(batch, 5) is batch


def test_undo_takes_an_addition_back_across_growth_and_the_rings_end() -> None:
    replay = Replay(capacity=4, max_candidates=3)
    replay.add(make_batch([row([0.0], 0, float(i), INF, True) for i in range(3)], width=1))
    before = {name: tensor.clone() for name, tensor in replay.content().items()}
    undo = replay.add(make_batch([row([0.0, -1.0], 1, 9.0, INF, True)] * 3, width=2))
    replay.undo(undo)
    assert (replay.head, replay.size) == (3, 3)
    for name, tensor in replay.content().items():
        if name in ("features", "mask", "rule_scores"):
            assert not tensor[:, 1:].any()
            tensor = tensor[:, :1]
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("name", ["temperature", "tau", "polyak", "advantage_scale"])
def test_settings_out_of_range_are_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        DqnSettings(**{name: 0.0})


def test_restraint_brings_an_unfounded_correction_back_to_the_rule() -> None:
    arrays = initial_arrays()
    # Every candidate is corrected alike, so that no choice speaks for or against it.
    arrays["correction.bias"] = np.array([1.0], np.float32)
    batch = TwoSteps().collect(initial_arrays(), 128, np.random.default_rng(0))
    sizes = []
    for restraint in (0.0, 1.0):
        learner = Dqn(dataclasses.replace(SETTINGS, restraint=restraint), seed=0)
        learner.set_weights(arrays)
        for _ in range(3):
            learner.update(batch)
        sizes.append(abs(float(learner.arrays()["correction.bias"][0])))
    assert sizes[1] < sizes[0] - 0.02
