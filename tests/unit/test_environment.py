"""The Gymnasium environment: checker, masks, seeds, rewards, and a library that trains on it."""

import warnings
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from agent.learning.environment import SchedulingEnvironment
from agent.learning.reward import RewardWeights
from agent.simulator import splits
from agent.simulator.workloads import fastest_s
from examples.bring_your_own import play, train

IDS = ("fedsched/Queue-v0", "fedsched/Place-v0")
SMALL: dict[str, Any] = {"jobs": 12, "clusters": ("103959",), "nodes": {"v100": 1, "k80": 1}}


def make(name: str = IDS[0], **arguments: Any) -> SchedulingEnvironment:
    environment = gymnasium.make(name, **(SMALL | arguments)).unwrapped
    assert isinstance(environment, SchedulingEnvironment)
    return environment


def episode(environment: SchedulingEnvironment, seed: int, draw: int = 0) -> list[float]:
    """Times and rewards of an episode of random candidates."""
    rng = np.random.default_rng(draw)
    _, info = environment.reset(seed=seed)
    told = [info["time"]]
    ended = not environment.action_masks().any()
    while not ended:
        action = int(rng.choice(np.flatnonzero(environment.action_masks())))
        _, reward, ended, _, info = environment.step(action)
        told += [reward, info["time"]]
    return told


@pytest.mark.parametrize("name", IDS)
def test_gymnasiums_checker_finds_nothing(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(make(name))


@pytest.mark.parametrize("name", IDS)
def test_a_seed_repeats_an_episode_even_between_steps_of_another(name: str) -> None:
    first, other, again = make(name), make(name), make(name)
    expected = episode(first, 5)
    rng = np.random.default_rng(0)
    _, info = again.reset(seed=5)
    other.reset(seed=6)
    told = [info["time"]]
    ended = False
    while not ended:
        action = int(rng.choice(np.flatnonzero(again.action_masks())))
        _, reward, ended, _, info = again.step(action)
        told += [reward, info["time"]]
        if other.action_masks().any():
            other.step(0)
    assert told == expected
    assert episode(make(name), 6) != expected


def test_candidates_come_first_and_padding_is_zero() -> None:
    environment = make()
    observation, info = environment.reset(seed=1)
    count = int(environment.action_masks().sum())
    assert count >= 2
    assert environment.action_masks()[:count].all()
    assert np.array_equal(observation["action_mask"].astype(bool), environment.action_masks())
    assert np.array_equal(info["action_mask"], observation["action_mask"])
    assert not observation["features"][count:].any()
    assert observation["rule_scores"][info["rule_action"]] == 0.0
    assert (observation["rule_scores"] <= 0.0).all()


def test_the_reward_sums_up_to_completion_times() -> None:
    environment = make(
        weights=RewardWeights(alpha=0.0, beta=0.0, gamma=0.0, delta=1.0), load=(2, 2)
    )
    workload = environment.draw(np.random.default_rng(2))
    _, info = environment.reset(seed=1, options={"workload": workload})
    assert info["time"] == 0.0 or len(workload) > 1
    total, ended = 0.0, False
    # What runs before the first decision has no decision to be credited to.
    unseen = float(environment._ledger.sums[1])
    while not ended:
        _, reward, ended, _, info = environment.step(info["rule_action"])
        total += reward
    mean = float(fastest_s(workload, environment.speeds).mean())
    assert info["unfinished"] == 0
    assert -total * mean + unseen == pytest.approx(
        info["mean_completion"] * len(workload), rel=1e-4
    )


def test_an_action_that_is_no_candidate_costs_a_kill_or_is_refused() -> None:
    environment = make(weights=RewardWeights(alpha=0.0, beta=0.0, gamma=1000.0, delta=0.0))
    environment.reset(seed=1)
    _, reward, _, _, info = environment.step(63)
    assert info["infeasible"]
    assert -1999.0 < reward <= -1000.0
    strict = make(strict=True)
    strict.reset(seed=1)
    with pytest.raises(ValueError, match="action_masks"):
        strict.step(63)


def test_only_failing_binds_still_end_the_episode() -> None:
    environment = make()
    _, info = environment.reset(seed=1)
    for _ in range(10_000):
        _, _, ended, _, info = environment.step(63)
        if ended:
            break
    assert info["unfinished"] == 0


def test_what_cannot_be_is_refused_with_its_cure() -> None:
    for arguments, cure in (
        ({"rule": "quickest"}, "hrrn-eft"),
        ({"load": (0.9, 0.6)}, r"\(0.6, 1.2\)"),
        ({"jobs": 1}, "at least 2"),
        ({"place_only": True, "nodes": {"v100": 65}}, "Queue-v0"),
    ):
        with pytest.raises(ValueError, match=cure):
            make(**arguments)
    with pytest.raises(splits.SealedError):
        make(part="sealed")
    with pytest.raises(ValueError, match="Workload"):
        make().reset(options={"workload": 5})
    with pytest.raises(gymnasium.error.ResetNeeded):
        make().step(0)


def test_environments_run_side_by_side() -> None:
    vector = gymnasium.make_vec(IDS[0], num_envs=3, vectorization_mode="sync", **SMALL)
    observation, _ = vector.reset(seed=1)
    assert observation["features"].shape == (3, 64, 32)
    for _ in range(60):  # beyond the ends of episodes
        observation, reward, _, _, _ = vector.step(np.zeros(3, np.int64))
        assert np.isfinite(reward).all()
    vector.close()


def test_maskable_ppo_trains_and_repeats_by_seed() -> None:
    models = [train(make(), steps=1024, seed=2) for _ in range(2)]
    weights = [[p.detach().numpy() for p in model.policy.parameters()] for model in models]
    assert all(np.array_equal(a, b) for a, b in zip(*weights, strict=True))
    environment = make(part="validation")
    workload = environment.draw(np.random.default_rng(0))

    def choose(observation: dict[str, Any], info: dict[str, Any]) -> int:
        masks = info["action_mask"].astype(bool)
        action, _ = models[0].predict(observation, action_masks=masks, deterministic=True)
        assert masks[int(action)]
        return int(action)

    times = [play(environment, workload, choose, seed=1) for _ in range(2)]
    assert times[0] == times[1] > 0


def test_clusters_without_jobs_of_a_part_draw_none(tmp_path: Path) -> None:
    slices = Path(__file__).parents[2] / "examples" / "traces" / "gavel"
    (tmp_path / "gavel").mkdir()
    for name in ("11cb48", "ed69ec"):  # of the first only the train part is shipped
        file = f"msr_seed0_{name}.csv"
        (tmp_path / "gavel" / file).write_bytes((slices / file).read_bytes())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDSCHED_TRACES", str(tmp_path))
        both = SchedulingEnvironment(jobs=5, part="validation", clusters=("11cb48", "ed69ec"))
        for seed in range(10):
            assert len(both.draw(np.random.default_rng(seed))) == 5
        with pytest.raises(ValueError, match="no validation jobs of 11cb48: set FEDSCHED_TRACES"):
            SchedulingEnvironment(jobs=5, part="validation", clusters=("11cb48",))
