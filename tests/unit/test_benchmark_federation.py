"""The suite federation: what is learned from, what the arms are, and that liars are dealt with."""

import msgspec
import numpy as np
import pytest
import yaml

from agent.benchmark.federation import Federation
from agent.benchmark.federation_data import Cluster, Data, Member
from agent.benchmark.federation_policies import Learner, joined, teach
from agent.benchmark.federation_speeds import exchange, lie, predict, table
from agent.benchmark.federation_training import (
    course_file,
    federations,
    learn_together,
    policy_file,
    read_policy,
)
from agent.benchmark.knowledge import Knowledge
from agent.benchmark.suites import data_file
from agent.data_files import DataFileError
from agent.learning.speeds import speed_text
from agent.simulator import splits
from agent.simulator.hardware import load_speeds
from agent.simulator.labels import Labels
from common.features import FEATURE_COUNT
from common.weights import flatten

SMALL = {
    "jobs": 60,
    "windows": {"reduced": 2, "full": 2},
    "sizes": [1, 3],
    "members": {
        "north": {"trace": "103959", "nodes": {"v100": 2, "k80": 2}, "shared": 0.3},
        "south": {"trace": "7f04ca", "nodes": {"v100": 1, "p100": 2, "k80": 2}},
        "east": {"trace": "ed69ec", "nodes": {"p100": 3, "k80": 1}},
    },
    "arms": {
        "fedavg": {"strategy": "fedavg", "eta": 0.0},
        "eta 1": {"strategy": "fedavg", "eta": 1.0},
    },
    "liar_members": 3,
    "robust": {"fedavg": {"strategy": "fedavg", "eta": 0.0}},
    "liars": {"not a number": {"broken": True}, "inverted": {"scale": -10.0}},
}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A small federation, with all that it has learned."""
    shipped = yaml.safe_load(data_file("federation").read_text())
    training = shipped["training"] | {
        "labels": {"reduced": 60, "full": 60}, "jobs": 40, "rounds": 2, "steps": 4,
        "minibatch": 16,
    }  # fmt: skip
    data = shipped | SMALL | {"training": training}
    data["speeds"] = data["speeds"] | {"windows": 1, "peers": [0, 2]}
    folder = tmp_path_factory.mktemp("federation")
    path = folder / "federation.yaml"
    path.write_text(yaml.safe_dump(data))
    suite = Federation(path)
    suite.prepare("reduced", folder, lambda _: None)
    return suite, folder


def test_every_cell_yields_the_same_figures_each_time(small):
    suite, folder = small
    cells = [cell for cell in suite.cells("reduced") if cell.window.endswith("#0")]
    assert {cell.setting for cell in cells} == {
        "policies, 1 member", "policies, 3 members", "one liar of 3, fedavg",
        "speeds, newcomer", "speeds, members",
    }  # fmt: skip
    for cell in cells:
        figures = suite.run(cell, folder)
        assert figures == suite.run(cell, folder), cell
        assert 0.0 < figures["mean_completion"] <= figures["p99"]
        assert figures["unfinished"] == 0.0


def test_liar_that_sends_no_numbers_is_set_aside_in_every_round(small):
    suite, folder = small
    aside = {}
    for cell in suite.cells("reduced"):
        if cell.setting.startswith("one liar") and cell.arm != "rule":
            aside[cell.arm] = suite.run(cell, folder)["set_aside"]
    assert aside == {"nobody lies": 0.0, "not a number": 1.0, "inverted": 0.0}


def test_member_that_keeps_all_of_its_own_policy_learns_as_if_alone(small):
    _, folder = small
    together, alone, start = (
        flatten(read_policy(path))
        for path in (
            policy_file(folder, "policies, 3 members", "eta 1", 0, "south"),
            policy_file(folder, "alone", "alone", 0, "south"),
            policy_file(folder, "policies, 3 members", "fedavg", 0, "south"),
        )
    )
    # What quantising lost is carried over, so that only the last round's loss is left.
    assert np.abs(together - alone).max() < 2e-4
    assert np.abs(start - alone).max() > 1e-3


def test_learning_resumes_where_it_broke_off(small):
    suite, folder = small
    first, second = list(federations(suite.data, ("north", "south", "east")))[:2]
    kept = course_file(folder, first, 0)
    stamp = kept.stat().st_mtime_ns
    redone = policy_file(folder, second.setting, second.arm, 0, "shared")
    before = redone.read_bytes()
    course_file(folder, second, 0).unlink()
    redone.unlink()
    for federated in (first, second):
        learn_together(suite.data, folder, federated, 0)
    assert kept.stat().st_mtime_ns == stamp
    assert redone.read_bytes() == before


def test_learning_sees_no_job_but_those_of_the_train_part(monkeypatch):
    asked, real = [], splits.part_jobs
    training = Federation().data.training

    def watched(trace, part, **options):
        asked.append((part, options.get("evaluation", False)))
        return real(trace, part, **options)

    monkeypatch.setattr(splits, "part_jobs", watched)
    cluster = Cluster("south", Member("7f04ca", {"v100": 1, "k80": 2}))
    labels, jobs = teach(cluster, training, [], load=0.8, rule="hrrn-eft", labels=20, seed=0)
    assert len(labels.gain) >= 20
    assert jobs % training.jobs == 0
    assert set(asked) == {("train", False)}


def test_decisions_of_two_windows_stay_apart():
    part = Labels(
        features=np.zeros((3, FEATURE_COUNT), np.float32),
        rule_scores=np.zeros(3, np.float32),
        gain=np.array([0.0, 1.0, 0.0], np.float32),
        decision=np.array([0, 0, 1]),
    )
    assert joined([part, part]).decision.tolist() == [0, 0, 1, 2, 2, 3]


def test_one_lying_table_among_many_changes_no_prediction_by_much():
    speeds = load_speeds()
    k80 = speeds.gpu_types.index("k80")
    honest = {}
    for name in "abcd":
        known = Knowledge({}, [], 0)
        for kind, steps in enumerate(speeds.speed):
            job_type = speeds.job_types[speeds.kind_type[kind]]
            for model, rate in zip(speeds.gpu_types, steps, strict=True):
                text = speed_text(job_type, int(speeds.kind_gpus[kind]), model)
                known.hear(text, float(np.log(rate)))
        honest[name] = known
    tables = {name: table(known) for name, known in honest.items()} | {"newcomer": {}}
    truth = predict(speeds, None, exchange(tables)["newcomer"]).slowdown
    tables["d"] = lie(honest["d"], speeds, 10.0)
    assert tables["d"].keys() == tables["a"].keys()
    fooled = predict(speeds, None, exchange(tables)["newcomer"]).slowdown
    assert np.abs(fooled[:, k80] - truth[:, k80]).max() < 0.3  # the lie is log 10 = 2.3
    alone = predict(speeds, None, exchange({"d": tables["d"], "newcomer": {}})["newcomer"]).slowdown
    assert np.abs(alone[:, k80] - truth[:, k80]).max() > 0.5


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"rule": "best"}, "no rule 'best'"),
        ({"sizes": [0]}, "sizes"),
        ({"members": {"a b": {"trace": "103959", "nodes": {"v100": 1}}}}, "blank"),
        ({"members": {"a": {"trace": "nowhere", "nodes": {"v100": 1}}}}, "'nowhere'"),
        ({"arms": {"rule": {}}}, "'rule' is taken"),
        ({"liars": {"x": {"scael": 1}}}, "scael"),
    ],
)
def test_data_that_make_no_sense_are_refused_by_name(tmp_path, change, wanted):
    data = yaml.safe_load(data_file("federation").read_text()) | change
    path = tmp_path / "federation.yaml"
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(DataFileError, match=wanted) as refusal:
        Federation(path)
    assert str(path) in str(refusal.value)


def test_members_whose_trace_is_not_there_take_no_part(monkeypatch):
    monkeypatch.delenv("FEDSCHED_TRACES", raising=False)
    suite = Federation()
    there = set(splits.available())
    judged = {cell.window.split(" ")[0] for cell in suite.cells("reduced")}
    assert judged
    assert {suite.data.members[name].trace for name in judged} <= there
    assert any(name in note for note in suite.notes for name in set(suite.data.members) - judged)


def test_shipped_data_round_trip_through_their_record():
    data = Federation().data
    assert msgspec.convert(msgspec.to_builtins(data), Data) == data


def test_learner_begins_from_the_rule_whatever_its_seed():
    labels = Labels(
        features=np.zeros((2, FEATURE_COUNT), np.float32),
        rule_scores=np.zeros(2, np.float32),
        gain=np.zeros(2, np.float32),
        decision=np.zeros(2, np.int64),
    )
    training = Federation().data.training
    one, other = (Learner(labels, training, jobs=10, seed=seed).policy for seed in (1, 2))
    assert flatten(one).tobytes() == flatten(other).tobytes()
    assert not one["correction.weight"].any()
