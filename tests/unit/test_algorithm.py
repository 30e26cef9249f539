"""What PPO and DQN promise alike: restarts, determinism, and refusal of what cannot be learned."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch

from agent.learning.algorithm import Algorithm, CheckpointError, LearningError
from agent.learning.batch import Batch
from agent.learning.dqn import Dqn, DqnSettings
from agent.learning.ppo import Ppo, PpoSettings
from common.metrics import DECLARED
from common.policy import initial_arrays
from tests.unit.tiny_problems import TwoSteps

MAKERS: dict[str, Callable[[int], Algorithm]] = {
    "ppo": lambda seed: Ppo(PpoSettings(minibatch=16), seed=seed),
    # A ring that the batches below have wrapped, so that a restart finds it rotated.
    "dqn": lambda seed: Dqn(DqnSettings(warm_up=8, capacity=72), seed=seed),
}


@pytest.fixture(params=list(MAKERS))
def make(request: pytest.FixtureRequest) -> Callable[[int], Algorithm]:
    return MAKERS[request.param]


def batches(count: int) -> list[Batch]:
    rng = np.random.default_rng(0)
    return [TwoSteps().collect(initial_arrays(), 32, rng) for _ in range(count)]


def trained(make: Callable[[int], Algorithm]) -> Algorithm:
    learner = make(1)
    learner.set_global(initial_arrays(2), 0.01)
    for batch in batches(3):
        learner.update(batch)
    return learner


def test_a_restored_learner_goes_on_bit_for_bit(make: Callable[[int], Algorithm]) -> None:
    first = trained(make)
    saved = first.state()
    second = make(99)
    second.restore(saved)
    assert second.state() == saved
    assert second.updates == 3
    for batch in batches(3):
        assert first.update(batch) == second.update(batch)
    assert first.state() == second.state()


def test_equal_seeds_learn_equal_weights_and_others_do_not(
    make: Callable[[int], Algorithm],
) -> None:
    def learned(seed: int) -> bytes:
        learner = make(seed)
        for batch in batches(2):
            learner.update(batch)
        return learner.state()

    assert learned(1) == learned(1)
    assert learned(1) != learned(2)


def test_settings_of_the_running_learner_win_over_the_saved_ones() -> None:
    saved = Ppo(PpoSettings(learning_rate=1e-3), seed=0)
    saved.update(batches(1)[0])
    other = Ppo(PpoSettings(learning_rate=5e-3), seed=0)
    other.restore(saved.state())
    assert other.optimiser.rate == 5e-3


def test_damaged_state_is_refused_and_changes_nothing(make: Callable[[int], Algorithm]) -> None:
    learner = trained(make)
    before = learner.state()
    for broken in (b"", b"not a checkpoint", before[: len(before) // 2]):
        with pytest.raises(CheckpointError, match="delete it"):
            learner.restore(broken)
    assert learner.state() == before


def test_state_of_another_algorithm_is_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match="'dqn'"):
        MAKERS["ppo"](0).restore(MAKERS["dqn"](0).state())


def test_state_with_a_missing_part_is_refused_and_changes_nothing(
    make: Callable[[int], Algorithm], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = trained(make)
    whole = other._saved

    def incomplete() -> tuple[dict[str, torch.Tensor], dict[str, object]]:
        content, counters = whole()
        content.popitem()
        if isinstance(other, Ppo):
            del counters["updates"]
        return content, counters

    monkeypatch.setattr(other, "_saved", incomplete)
    learner = make(5)
    before = learner.state()
    with pytest.raises(CheckpointError, match="incomplete"):
        learner.restore(other.state())
    assert learner.state() == before


def test_weights_from_outside_are_taken_and_bad_ones_refused(
    make: Callable[[int], Algorithm],
) -> None:
    learner = trained(make)
    pushed = initial_arrays(8)
    learner.set_weights(pushed)
    for name, array in learner.arrays().items():
        np.testing.assert_array_equal(array, pushed[name])
    before = learner.state()
    pushed["correction.bias"][0] = np.inf
    with pytest.raises(ValueError, match=r"correction\.bias"):
        learner.set_weights(pushed)
    assert learner.state() == before


FAULTS: dict[str, tuple[str, Callable[[Batch], Batch]]] = {
    "NaN reward": (
        "reward",
        lambda b: dataclasses.replace(b, reward=np.where(b.ends, np.nan, b.reward)),
    ),
    "infinite feature": (
        "features",
        lambda b: dataclasses.replace(b, features=np.full_like(b.features, np.inf)),
    ),
    "features that overflow": (
        "overflows",
        lambda b: dataclasses.replace(b, features=np.full_like(b.features, 3e38)),
    ),
    "NaN rule score": (
        "rule_scores",
        lambda b: dataclasses.replace(b, rule_scores=np.full_like(b.rule_scores, np.nan)),
    ),
    "negative time": (
        "elapsed",
        lambda b: dataclasses.replace(b, elapsed=np.full_like(b.elapsed, -1.0)),
    ),
    "infinite time within a trajectory": (
        "decision follows",
        lambda b: dataclasses.replace(b, ends=np.zeros_like(b.ends)),
    ),
    "action on padding": (
        "padding",
        lambda b: dataclasses.replace(b, action=np.ones_like(b.action)),
    ),
    "action out of range": (
        "no column",
        lambda b: dataclasses.replace(b, action=np.full_like(b.action, 7)),
    ),
    "no candidate": (
        "no candidate",
        lambda b: dataclasses.replace(b, mask=np.zeros_like(b.mask)),
    ),
    "probability above one": (
        "log_prob",
        lambda b: dataclasses.replace(b, log_prob=np.full_like(b.log_prob, 0.5)),
    ),
    "empty": (
        "empty",
        lambda b: Batch(**{f.name: getattr(b, f.name)[:0] for f in dataclasses.fields(b)}),
    ),
}


@pytest.mark.parametrize("fault", list(FAULTS))
def test_a_bad_batch_is_refused_by_cause_and_changes_nothing(
    make: Callable[[int], Algorithm], fault: str
) -> None:
    cause, spoil = FAULTS[fault]
    learner = trained(make)
    before = learner.state()
    with pytest.raises(LearningError, match=cause):
        learner.update(spoil(batches(1)[0]))
    assert learner.state() == before
    learner.update(batches(1)[0])


def test_metrics_are_finite_and_those_shared_with_the_hub_are_declared(
    make: Callable[[int], Algorithm],
) -> None:
    metrics = trained(make).update(batches(1)[0])
    assert np.isfinite(list(metrics.values())).all()
    shared = {"loss", "value_loss", "entropy", "proximal_term", "distance_to_global", "reward"}
    assert shared <= metrics.keys()
    assert shared <= DECLARED.keys()
