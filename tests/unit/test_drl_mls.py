"""The suite ``drl-mls`` end to end at a tiny size: learners, ablations, pairing, and its data."""

from pathlib import Path

import numpy as np
import pytest
import yaml
from msgspec.structs import replace

from agent.benchmark.drl_learners import Learner, weights_file
from agent.benchmark.drl_mls import DrlMls
from agent.benchmark.suite import Cell, Result, Row
from agent.benchmark.suites import data_file
from agent.data_files import DataFileError
from agent.learning.ablated import record_ablated, simulate_ablated
from agent.learning.batch import Batch
from agent.learning.reward import RewardWeights
from agent.scheduling.decision import make_policy
from agent.simulator import splits
from agent.simulator.runs import simulate
from common.features import COLUMN
from common.policy import initial_arrays
from common.weights import load

DATA = data_file("drl-mls")


def written(folder: Path, **changes: object) -> Path:
    """The suite's data with changes, small enough for a test."""
    content = yaml.safe_load(DATA.read_text())
    content |= {
        "nodes": {"v100": 1, "k80": 1},
        "arrivals": ["alibaba"],
        "loads": [1.2],
        "jobs": 20,
        "batches": {"reduced": 1, "full": 1},
        "training": {"seeds": 1, "rounds": {"reduced": 2, "full": 3}, "batches": 2, "jobs": 15},
    }
    path = folder / "drl-mls.yaml"
    path.write_text(yaml.safe_dump(content | changes, allow_unicode=True))
    return path


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[DrlMls, Path]:
    folder = tmp_path_factory.mktemp("drl")
    suite = DrlMls(written(folder))
    suite.prepare("reduced", folder, print)
    return suite, folder


def cell_of(suite: DrlMls, arm: str) -> Cell:
    return next(cell for cell in suite.cells("reduced") if cell.arm == arm)


def heard(suite: DrlMls, folder: Path, learner: Learner, *, delayed: bool = True) -> Batch:
    """What an untrained learner hears of its third lesson."""
    lesson = suite._world(folder).lesson(2)
    batch = record_ablated(
        lesson.simulation, learner.policy(initial_arrays(), temperature=0.25), seed=1,
        decisions=500, mean_run_seconds=lesson.mean_run_seconds, weights=RewardWeights(),
        delayed=delayed,
    )  # fmt: skip
    assert batch is not None
    return batch


def test_every_arm_has_figures_that_repeat_and_respect_the_bound(
    prepared: tuple[DrlMls, Path],
) -> None:
    suite, folder = prepared
    bound = suite.run(cell_of(suite, "lower bound"), folder)
    seen = {}
    for cell in suite.cells("reduced"):
        if cell.trace != "ed69ec" or cell.arm == "lower bound":
            continue
        figures = suite.run(cell, folder)
        assert figures == suite.run(cell, folder)
        seen[cell.arm] = figures
    assert set(seen) == {*suite.data.policies, *suite.data.trained} - {"lower bound"}
    own = suite.run(
        next(c for c in suite.cells("reduced") if c.arm == "lower bound" and c.trace == "ed69ec"),
        folder,
    )
    assert bound
    for figures in seen.values():
        if figures["unfinished"] == 0:
            assert figures["mean_completion"] >= own["mean_completion"]
            assert figures["makespan"] >= own["makespan"]
    assert len({figures["mean_completion"] for figures in seen.values()}) > 4


def test_training_repeats_and_what_is_there_is_kept(
    prepared: tuple[DrlMls, Path], tmp_path: Path
) -> None:
    suite, folder = prepared
    again = DrlMls(written(tmp_path))
    for arm in (suite.data.whole, "plain dqn"):
        kept = weights_file(folder, arm, 0)
        stamp = kept.stat().st_mtime_ns
        suite.prepare("reduced", folder, print)
        assert kept.stat().st_mtime_ns == stamp
    (tmp_path / "knowledge.json").write_bytes((folder / "knowledge.json").read_bytes())
    for arm in suite.data.trained:  # all but one are there, so that one is trained
        if arm != suite.data.whole:
            path = weights_file(tmp_path, arm, 0)
            path.write_bytes(weights_file(folder, arm, 0).read_bytes())
    again.prepare("reduced", tmp_path, print)
    own, _ = load(weights_file(folder, suite.data.whole, 0))
    other, _ = load(weights_file(tmp_path, suite.data.whole, 0))
    start = initial_arrays()
    assert all(np.array_equal(own[name], other[name]) for name in own)
    assert any(not np.array_equal(own[name], start[name]) for name in own)


def test_an_untrained_residual_learner_is_the_rule_and_one_from_scratch_is_not(
    prepared: tuple[DrlMls, Path],
) -> None:
    suite, folder = prepared
    world, arrays = suite._world(folder), initial_arrays()
    lesson = world.lesson(0).simulation
    rule = simulate(world.lesson(0).simulation, make_policy(Learner().rule), seed=0)
    residual = simulate_ablated(lesson, Learner().policy(arrays), seed=0)
    assert np.array_equal(residual.completion, rule.completion)
    scratch = Learner(residual=False).policy(arrays)
    other = simulate_ablated(world.lesson(0).simulation, scratch, seed=0)
    assert not np.array_equal(other.completion, rule.completion)


def test_a_hidden_feature_is_not_seen(prepared: tuple[DrlMls, Path]) -> None:
    blind = heard(*prepared, Learner(hidden=("effect_", "pod_size"))).features
    seeing = heard(*prepared, Learner()).features
    assert blind.shape == seeing.shape
    for name, column in COLUMN.items():
        if name.startswith("effect_") or name == "pod_size":
            assert not blind[:, :, column].any()
        else:
            assert np.array_equal(blind[:, :, column], seeing[:, :, column])
    assert seeing[:, :, COLUMN["pod_size"]].any()
    assert seeing[:, :, COLUMN["effect_against_best"]].any()


def test_immediate_rewards_are_each_an_episode_of_their_own(
    prepared: tuple[DrlMls, Path],
) -> None:
    whole, cut = (heard(*prepared, Learner(), delayed=delayed) for delayed in (True, False))
    assert np.array_equal(whole.reward, cut.reward)
    assert whole.ends.sum() == 1
    assert np.isfinite(whole.elapsed).all()
    assert cut.ends.all()
    assert np.isposinf(cut.elapsed).all()
    assert (whole.mask.sum(1) > 1).all()  # forced decisions are none


def test_lessons_are_train_jobs_of_all_traces(prepared: tuple[DrlMls, Path]) -> None:
    suite, folder = prepared
    world, traces = suite._world(folder), splits.available()
    steps = {trace: set(splits.part_jobs(trace, "train").steps.tolist()) for trace in traces}
    for number, trace in enumerate(traces):
        lesson = world.lesson(number).simulation
        assert len(lesson.steps) == 15
        assert set(lesson.steps.tolist()) <= steps[trace]


def test_arms_of_a_batch_are_paired_and_arrivals_share_jobs(tmp_path: Path) -> None:
    suite = DrlMls(written(tmp_path, arrivals=["uniform", "poisson", "alibaba"]))
    cells = suite.cells("reduced")
    assert len({cell.setting for cell in cells}) == 3
    arms = len(suite.data.policies) + len(suite.data.trained)
    assert len(cells) == 3 * arms * len({cell.trace for cell in cells})
    world = suite._world(tmp_path)
    made = [world.batch("ed69ec", "sealed", process, 1.2, 0, 20) for process in suite.data.arrivals]
    assert all(np.array_equal(made[0].steps, other.steps) for other in made)
    assert not np.array_equal(made[0].arrival, made[2].arrival)


def test_findings_state_goal_and_noise(tmp_path: Path) -> None:
    suite = DrlMls(written(tmp_path))
    ours = next(c for c in suite.comparisons if c.metric == "mean_completion")
    parts = next(c for c in suite.comparisons if c.baseline == suite.data.whole)

    def row(arm: str, mean: float, low: float, high: float) -> Row:
        return Row(arm, "all", mean, low, high, 8, 4, 0.1, 0.1, "undecided")

    rows = tuple(row(arm, 2.0, 1.9, 2.1) for arm in suite.data.baselines[1:])
    said = suite.findings(
        {},
        [
            Result(ours, (*rows, row(suite.data.baselines[0], 1.25, 1.2, 1.3))),
            Result(
                parts,
                (
                    row("without mask", 1.01, 1.001, 1.03),  # not beyond doubt among so many
                    replace(row("without memory", 1.2, 1.1, 1.3), verdict="worse"),
                ),
            ),
        ],
    )
    assert "-20.0 %" in said[0]
    assert "missed by 2.2 points" in said[0]
    assert suite.data.baselines[0] in said[0]
    assert said[1:] == [
        "Without mask: +1.0 % mean completion, which is within noise.",
        "Without memory: +20.0 % mean completion.",
    ]


@pytest.mark.parametrize(
    ("changes", "key", "cure"),
    [
        ({"ours": "best of all"}, "best of all", "policies"),
        ({"loads": [0.0]}, "loads", "0.8"),
        ({"arrivals": ["bursty"]}, "arrivals", "bursty"),
        ({"learners": {"plain ppo": {"hidden": ["colour"]}}}, "learners", "common.features"),
        ({"whole": "half"}, "half", "ablations"),
    ],
)
def test_bad_data_name_file_key_and_cure(
    tmp_path: Path, changes: dict[str, object], key: str, cure: str
) -> None:
    with pytest.raises(DataFileError) as error:
        DrlMls(written(tmp_path, **changes))
    assert "drl-mls.yaml" in str(error.value)
    assert key in str(error.value)
    assert cure in str(error.value)
