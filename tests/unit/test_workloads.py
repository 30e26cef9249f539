"""Workloads: set loads are met, kinds and sizes follow the trace, and seeds repeat."""

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from agent.simulator import traces
from agent.simulator.hardware import SpeedTable, load_speeds
from agent.simulator.nodes import NodeMix, node_mix, openb_mix
from agent.simulator.tables import SHIPPED
from agent.simulator.traces import Jobs
from agent.simulator.workloads import (
    Options,
    Workload,
    fastest_s,
    gpu_capacity,
    gpu_work,
    offered_load,
    prepare,
    synthetic,
    window,
)

GAVEL = "job_type,total_steps,arrival_time_s,scale_factor\n"
MIX = node_mix({"k80": 3, "p100": 3, "v100": 3})


@pytest.fixture(scope="module")
def speeds() -> SpeedTable:
    return load_speeds(SHIPPED / "gavel")


@pytest.fixture(scope="module")
def small() -> SpeedTable:
    """Two job types, A on 1 and 2 GPUs and B on 1, with speeds for working out by hand."""
    return SpeedTable(
        gpu_types=("k80", "p100", "v100"),
        job_types=("A", "B"),
        kind_type=np.array([0, 0, 1]),
        kind_gpus=np.array([1, 2, 1]),
        speed=np.array([[1.0, 2.0, 4.0], [1.0, 4.0, 4.0], [0.5, 2.0, 1.0]]),
        beside=np.ones((3, 2, 2)),
        fits=np.ones((3, 2, 2), dtype=bool),
    )


@pytest.fixture(scope="module")
def shipped() -> dict[str, Jobs]:
    jobs = {vc: gavel(vc) for vc in ("103959", "7f04ca", "ed69ec", "11cb48")}
    jobs["philly"] = traces.read_philly(SHIPPED / "philly" / "philly.csv", "7f04ca")
    jobs["swf"] = traces.read_swf(SHIPPED / "swf" / "lublin_256.swf")
    jobs["openb"] = traces.read_openb_pods(SHIPPED / "openb" / "openb_pod_list_gpuspec10.csv")
    return jobs


def gavel(vc: str) -> Jobs:
    return traces.read_gavel(SHIPPED / "gavel" / f"msr_seed0_{vc}.csv")


def from_text(tmp_path: Path, text: str) -> Jobs:
    path = tmp_path / "jobs.csv"
    path.write_text(GAVEL + text)
    return traces.read_gavel(path)


def same(a: Workload, b: Workload) -> bool:
    arrays = [field.name for field in fields(Workload) if field.name != "dropped"]
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in arrays)


def test_offered_load_worked_out_by_hand(tmp_path: Path, small: SpeedTable) -> None:
    nodes = node_mix({"k80": 1, "v100": 2}, gpus=4, cpu_only=1)
    # Relative speeds: A1 (1/4, 1/2, 1), A2 (1/4, 1, 1), B1 (1/4, 1, 1/2): k80 is worth 1/4 and
    # v100 5/6 of a fastest-type GPU.
    capacity = 4 * 0.25 + 8 * (5 / 6)
    assert gpu_capacity(nodes, small) == pytest.approx(capacity)
    ready = prepare(from_text(tmp_path, "A,40,0,1\nA,80,10,2\nB,60,50,1\n"), small, nodes, seed=0)
    # Fastest run times 40/4, 80/4, 60/2 s on 1, 2, 1 GPUs.
    np.testing.assert_allclose(fastest_s(ready, small), [10, 20, 30])
    np.testing.assert_allclose(gpu_work(ready, small), [10, 40, 30])
    assert offered_load(ready, small, nodes) == pytest.approx(80 / (50 * capacity))


def test_a_window_stretches_the_arrivals_and_nothing_else(
    tmp_path: Path, small: SpeedTable
) -> None:
    nodes = node_mix({"v100": 1})
    jobs = from_text(tmp_path, "B,9,0,1\nA,40,100,1\nA,80,110,2\nB,60,150,1\nB,5,990,1\n")
    made = window(jobs, small, nodes, load=0.5, start=1, stop=4)
    # 80 GPU-seconds at load 0.5 on 8 * 5/6 GPUs: a span of 24 s with the gaps 1:4 of the trace.
    np.testing.assert_allclose(made.arrival, [0.0, 24 * 10 / 50, 24.0])
    assert made.steps.tolist() == [40.0, 80.0, 60.0]
    assert made.kind.tolist() == [0, 1, 2]
    assert made.gpus.tolist() == [1, 2, 1]
    assert np.isinf(made.deadline).all()
    assert made.allowed.tolist() == [-1, -1, -1]


@pytest.mark.parametrize("load", [0.3, 0.9])
@pytest.mark.parametrize("name", ["103959", "7f04ca", "ed69ec", "11cb48", "philly", "swf", "openb"])
def test_every_trace_is_brought_to_the_set_load(
    shipped: dict[str, Jobs], speeds: SpeedTable, name: str, load: float
) -> None:
    made = window(shipped[name], speeds, MIX, load=load, seed=3, stop=150)
    assert offered_load(made, speeds, MIX) == pytest.approx(load)
    assert made.arrival[0] == 0
    assert (np.diff(made.arrival) >= 0).all()
    for name_of in ("steps", "cpu", "memory", "gpu_memory", "memory_peak", "gpu_memory_peak"):
        values = getattr(made, name_of)
        assert values.dtype == np.float64
        assert values.shape == (150,)
        assert (values > 0).all(), name_of
        assert np.isfinite(values).all(), name_of
    assert ((made.gpus > 0) != (made.share > 0)).all()
    whole = made.gpus > 0
    assert set(made.gpus[whole]) <= {1, 2, 4, 8}
    np.testing.assert_array_equal(speeds.kind_gpus[made.kind[whole]], made.gpus[whole])
    assert (speeds.kind_gpus[made.kind[~whole]] == 1).all()


@pytest.mark.parametrize("arrivals", ["poisson", "uniform"])
def test_synthetic_arrivals_have_the_load_and_the_gaps_of_their_process(
    shipped: dict[str, Jobs], speeds: SpeedTable, arrivals: str
) -> None:
    made = synthetic(
        shipped["103959"], speeds, MIX, arrivals=arrivals, count=20_000, load=0.7, seed=5
    )
    assert len(made) == 20_000
    assert offered_load(made, speeds, MIX) == pytest.approx(0.7)
    gaps = np.diff(made.arrival)
    # Coefficient of variation: 1 for exponential gaps, 1/sqrt(3) for even ones.
    expected = 1.0 if arrivals == "poisson" else 3**-0.5
    assert gaps.std() / gaps.mean() == pytest.approx(expected, rel=0.03)
    if arrivals == "uniform":
        assert gaps.max() <= 2.01 * gaps.mean()
    # Sizes and kinds in the proportions of the trace.
    ready = prepare(shipped["103959"], speeds, MIX, seed=5)
    for gpus in (1, 2, 4):
        assert (made.gpus == gpus).mean() == pytest.approx((ready.gpus == gpus).mean(), abs=0.015)
    counts = [np.bincount(w.kind, minlength=80) / len(w) for w in (made, ready)]
    np.testing.assert_allclose(counts[0], counts[1], atol=0.01)


def test_a_seed_repeats_the_workload_and_another_changes_it(
    shipped: dict[str, Jobs], speeds: SpeedTable
) -> None:
    options = Options(shared=0.5, deadlines=0.5)

    def make(seed: int) -> Workload:
        return synthetic(
            shipped["philly"], speeds, MIX, arrivals="poisson", count=99, load=0.5, seed=seed,
            options=options,
        )  # fmt: skip

    assert same(make(1), make(1))
    one, two = make(1), make(2)
    for name in ("arrival", "kind", "steps", "share", "memory_peak", "deadline"):
        assert not np.array_equal(getattr(one, name), getattr(two, name)), name


def test_a_job_is_the_same_in_every_window_and_under_other_options(
    shipped: dict[str, Jobs], speeds: SpeedTable
) -> None:
    jobs = shipped["philly"]
    wide = window(jobs, speeds, MIX, load=0.5, start=0, stop=100, seed=1)
    late = window(jobs, speeds, MIX, load=0.9, start=50, stop=100, seed=1)
    options = Options(shared=1.0, deadlines=1.0)
    other = window(jobs, speeds, MIX, load=0.5, start=0, stop=100, seed=1, options=options)
    for name in ("kind", "steps", "memory_peak", "gpu_memory_peak"):
        np.testing.assert_array_equal(getattr(wide, name)[50:], getattr(late, name))
        np.testing.assert_array_equal(getattr(wide, name), getattr(other, name))


def test_gangs_are_cut_to_eight_and_to_powers_of_two(tmp_path: Path, speeds: SpeedTable) -> None:
    lm = "LM (batch size 80)"
    text = "".join(f"{lm},9,{at},{gpus}\n" for at, gpus in enumerate((1, 2, 3, 7, 8, 12, 64)))
    jobs = from_text(tmp_path, text)
    assert prepare(jobs, speeds, MIX, seed=0).gpus.tolist() == [1, 2, 2, 4, 8, 8, 8]
    four = prepare(jobs, speeds, MIX, seed=0, options=Options(max_gpus=4))
    assert four.gpus.tolist() == [1, 2, 2, 4, 4, 4, 4]


def test_jobs_that_cannot_run_are_dropped_and_counted(tmp_path: Path, small: SpeedTable) -> None:
    text = "A,9,0,1\nB,9,1,2\nZ,9,2,1\nA,9,3,2\nA,9,4,0\n"
    made = prepare(from_text(tmp_path, text), small, node_mix({"k80": 2}, gpus=1), seed=0)
    assert made.kind.tolist() == [0]
    assert made.dropped == {
        "asks for 0 GPUs": 1,
        "kind not measured on every GPU type": 2,
        "fits no node": 1,
    }


def test_a_job_that_no_gpu_can_hold_is_dropped(
    shipped: dict[str, Jobs], speeds: SpeedTable
) -> None:
    tight = replace(MIX, gpu_memory=np.full(len(MIX), 4.0))
    everywhere = prepare(shipped["ed69ec"], speeds, MIX, seed=0)
    made = prepare(shipped["ed69ec"], speeds, tight, seed=0)
    assert made.gpu_memory.max() <= 4.0
    assert made.dropped["fits no node"] == (everywhere.gpu_memory > 4.0).sum() > 0


def test_durations_are_kept_on_the_reference_type(
    shipped: dict[str, Jobs], speeds: SpeedTable
) -> None:
    jobs = shipped["philly"]
    for t, reference in enumerate(speeds.gpu_types):
        made = prepare(jobs, speeds, MIX, seed=2, options=Options(reference=reference))
        assert len(made) == len(jobs)
        np.testing.assert_allclose(made.steps / speeds.speed[made.kind, t], jobs.duration_s)
    assert len(set(made.kind.tolist())) > 20
    with pytest.raises(ValueError, match="unknown reference type 'h100'"):
        prepare(jobs, speeds, MIX, seed=2, options=Options(reference="h100"))


def test_longer_jobs_are_cut_and_the_others_stay(
    shipped: dict[str, Jobs], speeds: SpeedTable
) -> None:
    jobs = shipped["103959"]
    whole = prepare(jobs, speeds, MIX, seed=0)
    cut = prepare(jobs, speeds, MIX, seed=0, options=Options(longest=3600.0))
    times, before = fastest_s(cut, speeds), fastest_s(whole, speeds)
    assert (before > 3600.0).any()
    assert times == pytest.approx(np.minimum(before, 3600.0))
    assert same(replace(cut, steps=whole.steps), whole)


def test_openb_pods_bring_their_own_requests_parts_and_gpu_models(
    shipped: dict[str, Jobs], speeds: SpeedTable
) -> None:
    jobs = shipped["openb"]
    nodes = openb_mix(traces.read_openb_nodes(SHIPPED / "openb" / "openb_node_list_all_node.csv"))
    made = prepare(jobs, speeds, nodes, seed=4, options=Options(cpu_only=True))
    assert len(made) + sum(made.dropped.values()) == len(jobs)
    assert len(made) > 0.9 * len(jobs)
    assert np.isin(made.cpu, jobs.cpu).all()
    shared = made.share > 0
    assert 50 < shared.sum() < len(made)
    assert (made.gpus[shared] == 0).all()
    assert (made.gpu_memory[shared] <= 6.0).all()
    bare = made.kind == -1
    assert bare.sum() == ((jobs.gpus == 0) & (jobs.share == 0)).sum()
    assert (made.gpus[bare] == 0).all()
    assert (made.gpu_memory[bare] == 0).all()
    np.testing.assert_array_equal(gpu_work(made, speeds)[bare], 0.0)
    # T4 stands as k80 (bit 0), P100 as p100 (bit 1), both V100 as v100 (bit 2).
    assert {-1, 0b001, 0b010, 0b100} <= set(made.allowed.tolist())
    without = prepare(jobs, speeds, nodes, seed=4)
    assert len(without) == len(made) - bare.sum()
    assert without.dropped["asks for no GPU"] == bare.sum()


def test_pods_that_were_never_scheduled_borrow_a_duration(
    shipped: dict[str, Jobs], speeds: SpeedTable
) -> None:
    jobs = shipped["openb"]
    assert np.isnan(jobs.duration_s).any()
    made = prepare(jobs, speeds, MIX, seed=4)
    known = jobs.duration_s[~np.isnan(jobs.duration_s)]
    durations = made.steps / speeds.speed[made.kind, 2]
    assert np.isclose(durations[:, None], known[None, :]).any(axis=1).all()


def test_no_job_is_allowed_only_where_no_such_node_stands(
    shipped: dict[str, Jobs], speeds: SpeedTable
) -> None:
    made = prepare(shipped["openb"], speeds, node_mix({"p100": 2}), seed=4)
    assert (made.allowed & 0b010 != 0).all()
    assert made.dropped["fits no node"] > 0


def test_a_set_part_of_the_one_gpu_jobs_asks_for_half_a_gpu(
    shipped: dict[str, Jobs], speeds: SpeedTable
) -> None:
    jobs = shipped["ed69ec"]
    whole = prepare(jobs, speeds, MIX, seed=6)
    assert (whole.share == 0).all()
    made = prepare(jobs, speeds, MIX, seed=6, options=Options(shared=0.4))
    shared = made.share > 0
    small = whole.gpu_memory <= 6.0
    assert set(made.share[shared]) == {0.5}
    assert (made.gpus[shared] == 0).all()
    assert not shared[~small].any()
    assert shared[small].mean() == pytest.approx(0.4, abs=0.05)
    half = gpu_work(made, speeds)[shared] / gpu_work(whole, speeds)[shared]
    np.testing.assert_allclose(half, 0.5)
    gangs = prepare(shipped["7f04ca"], speeds, MIX, seed=6, options=Options(shared=1.0))
    assert (gangs.gpus >= 2).any()


def test_about_two_jobs_of_a_hundred_risk_running_out_of_memory(
    shipped: dict[str, Jobs], speeds: SpeedTable
) -> None:
    total = over = 0
    for seed in range(20):
        ready = prepare(shipped["103959"], speeds, MIX, seed=seed)
        beyond = (ready.memory_peak > ready.memory) | (ready.gpu_memory_peak > ready.gpu_memory)
        total, over = total + len(ready), over + int(beyond.sum())
    assert 0.01 < over / total < 0.03


def test_deadlines_leave_the_slack_asked_for(shipped: dict[str, Jobs], speeds: SpeedTable) -> None:
    options = Options(deadlines=0.3, slack=(2.0, 3.0))
    made = window(shipped["103959"], speeds, MIX, load=0.5, seed=9, options=options)
    bound = np.isfinite(made.deadline)
    assert bound.mean() == pytest.approx(0.3, abs=0.05)
    slack = ((made.deadline - made.arrival) / fastest_s(made, speeds))[bound]
    assert slack.min() >= 2.0 - 1e-6
    assert slack.max() <= 3.0 + 1e-6
    assert np.ptp(slack) > 0.8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"load": 0.0}, "above 0"),
        ({"load": float("nan")}, "above 0"),
        ({"load": 0.5, "start": 5, "stop": 5}, "window 5:5 leaves the gavel trace"),
        ({"load": 0.5, "stop": 10_000}, "which has 951 usable jobs"),
        ({"load": 0.5, "stop": 1}, "two arrivals"),
        ({"load": 0.5, "nodes": node_mix({}, cpu_only=2)}, "which has 0 usable jobs"),
    ],
)
def test_a_window_that_cannot_be_is_refused_with_the_reason(
    shipped: dict[str, Jobs], speeds: SpeedTable, arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        window(shipped["ed69ec"], speeds, **{"nodes": MIX, **arguments})


def test_jobs_without_times_or_durations_are_refused_with_the_cure(
    tmp_path: Path, shipped: dict[str, Jobs], speeds: SpeedTable
) -> None:
    path = tmp_path / "pods.csv"
    path.write_text("name,cpu_milli,memory_mib,num_gpu,gpu_milli\na,1,1,1,1000\nb,1,1,1,1000\n")
    with pytest.raises(ValueError, match="openb trace has neither durations nor steps"):
        window(traces.read_openb_pods(path), speeds, MIX, load=0.5)
    timeless = vars(shipped["ed69ec"]) | {"arrival_s": np.full(951, np.nan)}
    with pytest.raises(ValueError, match="use synthetic arrivals"):
        window(Jobs(**timeless), speeds, MIX, load=0.5)
    jobs = Jobs(**timeless)
    made = synthetic(jobs, speeds, MIX, arrivals="uniform", count=10, load=0.5, seed=0)
    assert offered_load(made, speeds, MIX) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="'uniform' or 'alibaba', not 'bursty'"):
        synthetic(jobs, speeds, MIX, arrivals="bursty", count=9, load=0.5, seed=0)
    with pytest.raises(ValueError, match="openb's pods"):
        synthetic(jobs, speeds, MIX, arrivals="alibaba", count=9, load=0.5, seed=0, like=jobs)


def test_arrivals_like_alibabas_are_a_stretch_of_its_gaps(
    speeds: SpeedTable, shipped: dict[str, Jobs]
) -> None:
    def gaps(seed: int, count: int) -> np.ndarray:
        made = synthetic(
            shipped["ed69ec"], speeds, MIX, arrivals="alibaba", count=count, load=0.8, seed=seed,
            like=shipped["openb"],
        )  # fmt: skip
        assert offered_load(made, speeds, MIX) == pytest.approx(0.8)
        return np.diff(made.arrival)

    arrival = np.sort(shipped["openb"].arrival_s)
    own = np.diff(arrival[int(np.ceil(len(arrival) / 100)) :])
    ring = np.append(own, own)
    found = gaps(seed=1, count=50)
    starts = [
        i for i in range(len(own))
        if np.allclose(found / found.sum(), ring[i : i + 49] / ring[i : i + 49].sum())
    ]  # fmt: skip
    assert len(starts) == 1
    assert not np.allclose(gaps(seed=2, count=50), found)


@pytest.mark.parametrize(
    "bad", [{"shared": 1.5}, {"share": 1.0}, {"max_gpus": 0}, {"longest": 0.0}]
)
def test_options_out_of_range_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        Options(**bad)


def test_unlike_clusters_stay_unlike(shipped: dict[str, Jobs], speeds: SpeedTable) -> None:
    nodes: NodeMix = MIX
    mean = {
        vc: prepare(shipped[vc], speeds, nodes, seed=0).gpus.mean()
        for vc in ("ed69ec", "11cb48", "103959", "7f04ca")
    }
    assert mean["ed69ec"] == 1.0
    assert mean["ed69ec"] < mean["11cb48"] < mean["103959"] < mean["7f04ca"]
