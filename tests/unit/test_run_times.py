"""Run times: what earlier runs tell, when that is believed, how a restarted agent knows them."""

import json
import math
from pathlib import Path

import msgspec
import numpy as np
import pytest

from agent.cluster import objects, speeds_file
from agent.cluster.speeds_file import KindSpeeds, SpeedsFile, SpeedsFileError, WorkRuns
from agent.journal import Journal, PodEvent
from agent.learning.publish import SpeedsPublisher
from agent.learning.run_times import LEAST_RUNS, Run, fit, runs_of
from agent.learning.speeds import SpeedModel, sample
from agent.learning.store import Store
from agent.learning.twin import build
from agent.scheduling.outlook import observe, pod_log_run_time, pod_run_time
from tests.unit.journals import NODES, life_of_pods
from tests.unit.test_state import Cluster, node, pod

KIND = ("resnet", 1)


def repeated(count: int, works: int, between: float, within: float, seed: int = 0) -> list[Run]:
    """Runs of ``works`` works of one kind, log-normal about a level that each work has."""
    rng = np.random.default_rng(seed)
    level = rng.normal(7.0, between, works)
    runs = []
    for i in range(count):
        work = int(rng.integers(works))
        log_seconds = float(rng.normal(level[work], within))
        came = 1e4 * i
        runs.append(Run(came, came + math.exp(log_seconds), KIND, f"work-{work}", log_seconds))
    return runs


def test_own_runs_count_where_works_differ_and_predict_them_better() -> None:
    known = fit(repeated(600, works=20, between=1.5, within=0.3))
    assert known.weight <= 1.0
    assert known.by_work < 0.4 < 1.2 < known.by_kind
    n, mean = known.works["work-3"]
    assert known.own("work-3") == (mean, n / (n + known.weight))
    assert math.isnan(known.own("never seen")[0])


def test_own_runs_count_nothing_where_works_do_not_differ() -> None:
    known = fit(repeated(600, works=20, between=0.0, within=1.0))
    assert math.isinf(known.weight)
    assert known.by_work == known.by_kind
    assert math.isnan(known.own("work-3")[0])


def test_few_runs_are_no_ground_to_believe() -> None:
    known = fit(repeated(LEAST_RUNS, works=2, between=3.0, within=0.1))
    assert math.isinf(known.weight)
    assert math.isnan(known.coverage)
    assert fit([]).own("x") == pytest.approx((math.nan, 1.0), nan_ok=True)


def test_the_interval_holds_its_share_though_the_work_of_the_cluster_changes() -> None:
    calm = repeated(500, works=10, between=0.5, within=0.3)
    wild = repeated(500, works=10, between=0.5, within=1.5, seed=1)
    late = calm[-1].created + 1e5
    moved = [moved_to(run, created=run.created + late, ended=run.ended + late) for run in wild]
    known = fit(calm + moved)
    assert known.coverage == pytest.approx(0.8, abs=0.03)
    assert known.half_width > 1.5 * fit(calm).half_width


def moved_to(run: Run, *, created: float, ended: float) -> Run:
    return Run(created, ended, run.kind, run.work, run.log_seconds)


def test_a_run_is_predicted_only_from_those_that_had_ended_before_it_came() -> None:
    runs = repeated(200, works=5, between=1.5, within=0.1)
    at_once = [moved_to(run, created=float(i), ended=1e9) for i, run in enumerate(runs)]
    assert math.isinf(fit(at_once).weight), "nothing had ended, so nothing could be known"
    assert not math.isinf(fit(runs).weight)


def test_a_run_left_out_does_not_tell_its_own_size() -> None:
    known = fit(repeated(600, works=20, between=1.5, within=0.3))
    n, mean = known.works["work-3"]
    own, trust = known.own("work-3", leave_out=mean + 1.0)
    assert own == pytest.approx((n * mean - mean - 1.0) / (n - 1))
    assert trust == (n - 1) / (n - 1 + known.weight)


def test_runs_count_as_on_the_fastest_model_and_unfinished_pods_are_none() -> None:
    came = [
        PodEvent(uid=uid, kind="created", time=5.0, job_type="resnet", gpus=1, work="w")
        for uid in ("a", "b")
    ]
    ended = {"a": PodEvent(uid="a", kind="finished", time=99.0, gpu_model="k", run_seconds=80.0)}
    run, missing = runs_of(came, ended, lambda _, model: math.log(4.0) if model == "k" else 0.0)
    assert missing is None
    assert run == Run(5.0, 99.0, KIND, "w", pytest.approx(math.log(20.0)))


# ---- what runs of the same work have in common ----


@pytest.mark.parametrize(
    ("metadata", "image", "work"),
    [
        ({"name": "train-7"}, "hub.io/team/train:v3", "default/train hub.io/team/train"),
        ({"name": "a-x7k2p", "generateName": "a-"}, "r:5000/a@sha256:1", "default/a r:5000/a"),
        (
            {
                "name": "nightly-29012345-zxcvb",
                "namespace": "ml",
                "ownerReferences": [
                    {"kind": "Job", "name": "nightly-29012345", "uid": "u", "controller": True}
                ],
            },
            "bert",
            "ml/nightly /bert",
        ),
        (
            {
                "name": "web-7d9f8b6c5-x7k2p",
                "ownerReferences": [
                    {"kind": "ReplicaSet", "name": "web-7d9f8b6c5", "uid": "u", "controller": True}
                ],
            },
            "web:1",
            "default/web /web",
        ),
        ({"name": "resnet50"}, "", "default/resnet50 /"),
    ],
)
def test_work_is_named_by_what_stays_from_run_to_run(
    metadata: dict[str, object], image: str, work: str
) -> None:
    containers = [{"name": "main", "image": image}] if image else []
    raw = {"metadata": {"uid": "u", **metadata}, "spec": {"containers": containers}}
    assert objects.pod(json.dumps(raw).encode()).work == work


# ---- the file, and an agent that starts again ----


def told(**changes: object) -> SpeedsFile:
    kinds = [KindSpeeds(job_type="a", gpus=1, slowdown=[0.0], runs=50, log_seconds=5.0)]
    file = SpeedsFile(gpu_models=["v100"], job_types=["a"], kinds=kinds, interference=[[0.0]])
    return msgspec.structs.replace(file, **changes)


def test_an_agent_that_starts_again_knows_the_run_times_of_before() -> None:
    c = Cluster()
    c.state.apply_node(node("n0"))
    c.state.set_speeds(told())
    c.state.apply_pod(pod("x"))
    c.state.apply_pod(pod("y", job_type="b"))
    view = c.state.view
    assert view.history_kind.tolist() == [[50.0, 250.0], [0.0, 0.0]]
    assert view.history_type.tolist() == [[50.0, 250.0], [0.0, 0.0]]
    assert view.history_gpus[0].tolist() == [50.0, 250.0]


def test_what_the_learner_counted_replaces_what_was_counted_here() -> None:
    c = Cluster()
    c.state.apply_node(node("n0"))
    for uid, job_type in (("x", "a"), ("y", "b")):
        c.state.apply_pod(pod(uid, node="n0", job_type=job_type))
        c.now += math.exp(3.0)
        c.state.apply_pod(pod(uid, node="n0", job_type=job_type, phase="Succeeded"))
    c.state.set_speeds(told())
    c.state.set_speeds(told())
    view = c.state.view
    assert view.history_kind[0].tolist() == [50.0, 250.0]
    assert view.history_kind[1].tolist() == pytest.approx([1.0, 3.0])
    assert view.history_gpus[0].tolist() == pytest.approx([51.0, 253.0])


def test_pods_of_known_work_are_estimated_by_it_those_that_wait_already_too() -> None:
    c = Cluster()
    c.state.apply_node(node("n0"))
    c.state.apply_pod(pod("x", work="w"))
    works = [WorkRuns(work="w", log_seconds=9.0, trust=0.75)]
    c.state.set_speeds(told(works=works))
    c.state.apply_pod(pod("y", work="w"))
    c.state.apply_pod(pod("z", work="other"))
    view = c.state.view
    context = observe(view)
    by_kind = pod_log_run_time(view, context, c.state.slots["z"])
    for uid in ("x", "y"):
        log_time = pod_log_run_time(view, context, c.state.slots[uid])
        assert log_time == pytest.approx(by_kind + 0.75 * (9.0 - by_kind))
        assert pod_run_time(view, context, c.state.slots[uid]) == pytest.approx(math.exp(log_time))
    c.state.set_speeds(told())
    assert pod_log_run_time(view, context, c.state.slots["x"]) == by_kind


@pytest.mark.parametrize(
    "changes",
    [
        {"works": [WorkRuns(work="w", log_seconds=math.inf, trust=0.5)]},
        {"works": [WorkRuns(work="w", log_seconds=1.0, trust=1.5)]},
        {"kinds": [KindSpeeds(job_type="a", gpus=1, slowdown=[0.0], runs=-1)]},
    ],
)
def test_impossible_run_times_are_refused(changes: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(SpeedsFileError, match="impossible run times"):
        speeds_file.write(tmp_path / "speeds.json", told(**changes))


def test_the_learner_tells_run_times_and_the_twin_uses_them(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    for record in life_of_pods(300, gap=20_000.0):
        if isinstance(record, PodEvent):
            name = int(record.uid.removeprefix("pod-")) % 10
            changes: dict[str, object] = {"work": f"w{name}"} if record.kind == "created" else {}
            if record.kind == "finished":
                changes["run_seconds"] = 100.0 * 2.0**name
            record = msgspec.structs.replace(record, **changes)
        journal.append(record)
    journal.close()
    store = Store(tmp_path / "experience.sqlite")
    store.ingest(tmp_path / "journal", sample)
    model = SpeedModel()
    publisher = SpeedsPublisher(tmp_path / "speeds.json", store, model)
    assert publisher.publish(["k80", "p100", "v100"])
    told = speeds_file.read(tmp_path / "speeds.json")
    assert sum(kind.runs for kind in told.kinds) == 300
    assert {runs.work for runs in told.works} == {f"w{i}" for i in range(10)}
    assert publisher.run_times.by_work < 0.7 * publisher.run_times.by_kind
    twin = build(store, model, NODES)
    store.close()
    assert twin is not None
    assert np.corrcoef(twin.size, np.log(twin.seconds))[0, 1] > 0.8
    view = twin.simulation(seed=0, window=0, jobs=50).cluster
    assert set(view.size) <= set(twin.size)
    assert ((view.trust > 0.5) & (view.trust < 1.0)).all()
