"""Labels worked out by hand, the loss towards them, and that the scorer learns from them."""

import dataclasses

import numpy as np
import pytest
import torch

from agent.learning.algorithm import LearningError
from agent.learning.distillation import Pairs, Teacher, distillation_loss
from agent.learning.network import Network
from agent.learning.ppo import Ppo, PpoSettings
from agent.scheduling.decision import make_policy
from agent.simulator.labels import Labels, label
from agent.simulator.simulation import new_simulation
from common.features import COLUMN, FEATURE_COUNT
from tests.unit.test_engine import SPEEDS, cluster, work


def test_labels_are_the_completion_time_that_a_candidate_saves() -> None:
    # a: 400 steps, 400 s on the slow node, 100 s on the fast one; b: 100 s on either.
    sim = new_simulation(work({"steps": 400.0}, {"kind": 1, "steps": 500.0}), cluster(0, 2), SPEEDS)
    labels = label(sim, make_policy("fastest"), seed=0, rows=20, share=1.0, explore=0.0)
    assert labels.decision.tolist() == [0, 0, 0, 0, 1, 1]
    # The rule: a fast, b slow, 100 s each. Either way round with a slow: 400 + 100. b first on the
    # slow node: nothing lost.
    assert labels.gain[0] == 0.0
    assert sorted(labels.gain[1:4].tolist()) == pytest.approx([-300.0, -300.0, 0.0])
    # Then b alone: now, or when a ends at 100 s.
    assert labels.gain[4:].tolist() == pytest.approx([0.0, -100.0])
    assert labels.features[5, COLUMN["wait"]] == 1.0
    assert labels.rule_scores[[0, 4]].tolist() == [0.0, 0.0]
    assert (labels.rule_scores[[1, 2, 3, 5]] < 0.0).all()


def test_labels_are_the_same_for_the_same_seed_and_end_with_their_room() -> None:
    def labelled(seed: int, rows: int) -> Labels:
        jobs = [{"arrival": 7.0 * i, "kind": i % 2, "steps": 200.0 + 30.0 * i} for i in range(20)]
        sim = new_simulation(work(*jobs), cluster(0, 1, 2), SPEEDS, seed=1)
        return label(sim, make_policy("hrrn-eft"), seed=seed, rows=rows, share=0.5)

    first, again, other = labelled(3, 60), labelled(3, 60), labelled(4, 60)
    np.testing.assert_array_equal(first.gain, again.gain)
    assert not np.array_equal(first.gain, other.gain)
    assert 0 < len(labelled(3, 12).gain) <= 12


def pairs(gain: list[float], *, feature: str = "wait", score: float = -0.5) -> Pairs:
    """Candidates that differ from the rule's choice in one feature, set to 1."""
    features = np.zeros((len(gain), FEATURE_COUNT), np.float32)
    features[:, COLUMN[feature]] = 1.0
    return Pairs(
        features=features,
        rule_features=np.zeros_like(features),
        rule_scores=np.full(len(gain), score, np.float32),
        gain=np.array(gain, np.float32),
    )


@pytest.mark.parametrize(
    ("gain", "loss"),
    [
        # A fresh scorer says −0.5. Huber with β 0.2: |d| − 0.1 where |d| is above 0.2.
        (0.5, 0.9),
        (-0.4, 0.1**2 / 0.4),
        (7.0, 1.4),  # counts as 1
        (-7.0, 0.4),  # counts as −1, and −0.5 is not yet that bad
    ],
)
def test_the_loss_is_hubers_distance_to_the_limited_gain(gain: float, loss: float) -> None:
    assert float(distillation_loss(Network(), pairs([gain])).detach()) == pytest.approx(loss)


def test_what_is_scored_as_bad_as_the_limit_teaches_no_more() -> None:
    assert float(distillation_loss(Network(), pairs([-5.0], score=-1.5)).detach()) == 0.0
    assert float(distillation_loss(Network(), pairs([0.0], score=-1.5)).detach()) > 0.0


def test_the_teacher_keeps_the_newest_labels_without_the_rules_own_choices() -> None:
    teacher = Teacher(3)
    labels = Labels(
        features=np.arange(4, dtype=np.float32)[:, None].repeat(FEATURE_COUNT, axis=1),
        rule_scores=np.array([0.0, -0.1, 0.0, -0.2], np.float32),
        gain=np.array([0.0, 50.0, 0.0, -20.0], np.float32),
        decision=np.array([0, 0, 1, 1]),
    )
    assert teacher.add(labels, 100.0) == 2
    assert len(teacher) == 2
    teacher.add(labels, 100.0)
    assert len(teacher) == 3
    drawn = teacher.sample(np.random.default_rng(0), 200)
    assert set(drawn.gain.tolist()) == {np.float32(0.5), np.float32(-0.2)}
    np.testing.assert_array_equal(drawn.features[:, 0] - drawn.rule_features[:, 0], 1.0)
    with pytest.raises(ValueError, match="no labels"):
        Teacher(3).sample(np.random.default_rng(0), 1)
    with pytest.raises(ValueError, match="at least 1"):
        Teacher(0)


def taught(gain: float) -> Teacher:
    teacher = Teacher(100)
    teacher._pairs = pairs([gain] * 100)
    return teacher


def test_a_candidate_that_saves_time_comes_to_beat_the_rules_choice() -> None:
    learner = Ppo(PpoSettings(learning_rate=3e-3), seed=0)
    metrics = learner.distil(taught(0.4), steps=150, minibatch=32)
    assert metrics["labels"] == 100.0
    sample = pairs([0.4])
    rows = torch.from_numpy(np.concatenate([sample.features, sample.rule_features]))[:, None]
    with torch.no_grad():
        corrections, _ = learner.network(rows, torch.ones(2, 1, dtype=torch.bool))
    assert float(corrections[0, 0] - corrections[1, 0]) - 0.5 == pytest.approx(0.4, abs=0.05)


def test_labels_that_are_not_finite_change_nothing() -> None:
    learner = Ppo(seed=0)
    before = learner.state()
    broken = taught(0.4)
    assert broken._pairs is not None
    broken._pairs = dataclasses.replace(
        broken._pairs, features=np.full_like(broken._pairs.features, np.nan)
    )
    with pytest.raises(LearningError, match="NaN"):
        learner.distil(broken, steps=3, minibatch=8)
    assert learner.state() == before
