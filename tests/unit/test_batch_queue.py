"""Orders of a batch machine's queue: when they are decided, what they promise, what ours learns."""

from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.benchmark import batch_queue as suites
from agent.benchmark.batch_queue import BatchQueue, cut, learn
from agent.benchmark.cross_entropy import cross_entropy
from agent.data_files import DataFileError
from agent.simulator import splits
from agent.simulator.batch_queue import (
    DECISIONS,
    ORDERS,
    Batch,
    bounded_slowdown,
    discipline,
    makespan_bound,
    run_queue,
)
from agent.simulator.splits import SealedError
from agent.simulator.tables import ENVIRONMENT
from agent.simulator.traces import Jobs

MACHINE = 8


def batch(*jobs: tuple[float, float, int], estimates: list[float] | None = None) -> Batch:
    """Jobs of (submitted, runs, processors); without ``estimates`` users know their run times."""
    submit, run, processors = (np.array(column) for column in zip(*jobs, strict=True))
    run = run.astype(np.float64)
    estimate = run if estimates is None else np.array(estimates, np.float64)
    return Batch(submit.astype(np.float64), estimate, run, processors.astype(np.int64))


def starts(jobs: Batch, order: str, decide: str, *learned: float, machine: int = 4) -> list[float]:
    found: list[float] = run_queue(jobs, machine, discipline(order, decide, learned))[0].tolist()
    return found


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    count = draw(st.integers(1, 25))
    gaps = draw(st.lists(st.integers(0, 30), min_size=count, max_size=count))
    run = draw(st.lists(st.integers(1, 60), min_size=count, max_size=count))
    wide = draw(st.lists(st.integers(1, MACHINE), min_size=count, max_size=count))
    more = draw(st.lists(st.integers(0, 40), min_size=count, max_size=count))
    submit = np.cumsum(gaps) - gaps[0]
    jobs = list(zip(submit.tolist(), run, wide, strict=True))
    return batch(*jobs, estimates=[r + m for r, m in zip(run, more, strict=True)])


def test_a_committed_pick_holds_up_a_shorter_job_that_comes_later() -> None:
    # The second job needs the whole machine and waits for the first one's end; the third is short
    # and would fit.
    jobs = batch((0, 10, 3), (1, 20, 4), (2, 5, 1))
    assert starts(jobs, "sjf", "committed") == [0, 10, 30]
    assert starts(jobs, "sjf", "re-decided") == [0, 10, 2]
    assert starts(jobs, "fcfs", "re-decided") == [0, 10, 30]
    assert starts(jobs, "fcfs", "skip-ahead") == [0, 10, 2]


def test_easy_lets_pass_who_ends_before_the_first_can_start_and_nobody_else() -> None:
    # The first in the queue can start at 10. A job of 8 s passes; one of 9 s would hold it up.
    jobs = batch((0, 10, 3), (1, 20, 4), (2, 8, 1))
    start, promised = run_queue(jobs, 4, discipline("fcfs", "easy"))
    assert start.tolist() == [0, 10, 2]
    assert promised[1] == 10
    assert starts(batch((0, 10, 3), (1, 20, 4), (2, 9, 1)), "fcfs", "easy") == [0, 10, 30]
    # The first needs 3 of the 4 that are free at 10: the fourth is anybody's, however long.
    assert starts(batch((0, 10, 3), (1, 20, 3), (2, 900, 1)), "fcfs", "easy") == [0, 10, 2]


@settings(max_examples=150, deadline=None)
@given(jobs=batches())
def test_easy_never_delays_what_it_promised_to_the_first(jobs: Batch) -> None:
    start, promised = run_queue(jobs, MACHINE, discipline("fcfs", "easy"))
    told = ~np.isnan(promised)
    assert (start[told] <= promised[told]).all()


@settings(max_examples=150, deadline=None)
@given(
    jobs=batches(), order=st.sampled_from(sorted(ORDERS)), decide=st.sampled_from(sorted(DECISIONS))
)
def test_no_processor_is_used_twice_and_every_job_runs(
    jobs: Batch, order: str, decide: str
) -> None:
    start, _ = run_queue(jobs, MACHINE, discipline(order, decide, (0.5, 0.2, 0.3, 0.2)))
    assert (start >= jobs.submit).all()
    for now in start:
        runs = (start <= now) & (now < start + jobs.run)
        assert jobs.processors[runs].sum() <= MACHINE
    assert makespan_bound(jobs, MACHINE) <= (start + jobs.run).max() + 1e-9


@settings(max_examples=50, deadline=None)
@given(jobs=batches())
def test_skipping_ahead_leaves_nothing_idle_that_a_waiting_job_could_use(jobs: Batch) -> None:
    start, _ = run_queue(jobs, MACHINE, discipline("saf", "skip-ahead"))
    moments = np.concatenate([jobs.submit, start + jobs.run])
    for now in moments:
        runs = (start <= now) & (now < start + jobs.run)
        waits = (jobs.submit <= now) & (start > now)
        if waits.any():
            assert jobs.processors[waits].min() > MACHINE - jobs.processors[runs].sum()


@pytest.mark.parametrize(
    ("order", "first"),
    [
        ("fcfs", 1),  # submitted first
        ("sjf", 2),  # 20 s against 30 s
        ("saf", 1),  # 30 against 20 times 2
        ("wfp3", 2),  # (50/20)³ · 2 = 31 against (90/30)³ = 27
        ("unicep", 1),  # 90/(0.1 · 30) = 30 against 50/(1 · 20) = 2.5
        ("f1", 1),  # log10(30) + 870 · log10(10) = 871 against 2.6 + 870 · log10(50) = 1481
        ("hrrn", 1),  # 1 + 90/30 against 1 + 50/20
    ],
)
def test_orders_take_first_what_their_definition_says(order: str, first: int) -> None:
    jobs = batch((0, 100, 2), (10, 30, 1), (50, 20, 2))
    start = starts(jobs, order, "re-decided", machine=2)
    assert start[first] == 100
    assert start[3 - first] > 100


def test_a_reserve_is_kept_from_long_jobs_and_not_from_short_ones() -> None:
    # A job of an hour must leave half of the machine free, one of six minutes nothing.
    jobs = batch((0, 7200, 1), (1, 3600, 2), (2, 360, 2))
    learned = (1.0, 0.0, 0.5, 0.5)
    assert starts(jobs, "weighted", "skip-ahead", *learned) == [0, 7200, 2]
    assert starts(jobs, "weighted", "skip-ahead") == [0, 1, 3601]
    # With nothing running it starts however wide it is: a reserve holds up nobody for ever.
    assert starts(batch((0, 36000, 4)), "weighted", "skip-ahead", *learned) == [0]


def test_slow_down_is_bounded_by_ten_seconds_of_run_time() -> None:
    jobs = batch((0, 1, 4), (0, 100, 4), (0, 5, 4))
    start = np.array([0.0, 49.0, 149.0])
    assert bounded_slowdown(jobs, start).tolist() == [1.0, 1.49, 15.4]


def test_a_job_that_no_machine_has_room_for_is_refused() -> None:
    with pytest.raises(ValueError, match="machine has 4"):
        run_queue(batch((0, 10, 5)), 4, discipline("fcfs", "easy"))
    with pytest.raises(ValueError, match="not above 0"):
        run_queue(batch((0, 0, 1)), 4, discipline("fcfs", "easy"))
    with pytest.raises(ValueError, match="there are fcfs"):
        discipline("lifo", "easy")


def test_cross_entropy_finds_the_least_cost_and_does_so_again() -> None:
    def cost(point: np.ndarray) -> float:
        return float((point[0] - 3.0) ** 2 + (point[1] + 1.0) ** 2)

    def fit(seed: int) -> list[float]:
        found: list[float] = cross_entropy(
            iter([cost] * 40), [0.0, 0.0], [2.0, 2.0], iterations=40, samples=20, elite=5, seed=seed
        ).tolist()
        return found

    assert fit(0) == pytest.approx([3.0, -1.0], abs=0.1)
    assert fit(0) == fit(0) != fit(1)
    with pytest.raises(ValueError, match="elite"):
        cross_entropy(iter([cost]), [0.0], [1.0], iterations=1, samples=4, elite=1, seed=0)
    with pytest.raises(ValueError, match="alike in length"):
        cross_entropy(iter([cost]), [0.0], [0.0], iterations=1, samples=4, elite=2, seed=0)


def small_suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **changes: object) -> BatchQueue:
    """The suite as shipped, on a log of this test's own: many short jobs, and long wide ones."""
    rng = np.random.default_rng(0)
    run = np.where(rng.random(400) < 0.3, 20000, 30) * rng.uniform(0.5, 1.5, 400)
    wide = np.where(run > 1000, 100, 16)
    lines = [f"{i} {40 * i} -1 {run[i]:.0f} {wide[i]} " + " ".join(["-1"] * 13) for i in range(400)]
    (tmp_path / "log.swf").write_text("; a log\n" + "\n".join(lines) + "\n")
    parts = {
        "file": "log.swf", "jobs": 400, "train": [0, 160], "validation": [160, 240],
        "sealed": [240, 400],
    }  # fmt: skip
    known = tmp_path / "splits.yaml"
    known.write_text(yaml.safe_dump({"traces": {"log": parts}}))
    splits.splits.cache_clear()
    suites._batch.cache_clear()
    monkeypatch.setattr(suites, "SPLITS", known)
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path))
    data = yaml.safe_load(Path("agent/benchmark/suites/batch-queue.yaml").read_text())
    data |= {"trace": "log", "window": 60}
    data["learning"] |= {"iterations": 4, "samples": 8, "elite": 3, "windows": 2}
    path = tmp_path / "batch-queue.yaml"
    path.write_text(yaml.safe_dump(data | changes))
    return BatchQueue(path)


def test_numbers_are_fitted_without_the_sealed_jobs_and_the_same_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = small_suite(tmp_path, monkeypatch)
    opened: list[tuple[str, bool]] = []
    real = splits.part_jobs

    def watched(trace: str, part: splits.Part, **options: bool) -> Jobs:
        opened.append((part, options.get("evaluation", False)))
        return real(trace, part, path=suites.SPLITS)

    with monkeypatch.context() as patch:
        patch.setattr(splits, "part_jobs", watched)
        suite.prepare("reduced", tmp_path, lambda _: None)
    assert opened == [("train", False), ("validation", False)]
    parts = [real("log", part, path=suites.SPLITS) for part in ("train", "validation")]
    numbers, before, after = learn(suite.data, *parts)
    assert (tmp_path / suites.LEARNED).read_text() == str(list(numbers)).replace(" ", "")
    # Its own windows choose between what it started from and what was fitted.
    assert (numbers == suite.data.learning.start) == (after > before)
    with pytest.raises(SealedError):
        real("log", "sealed", path=suites.SPLITS)


def test_windows_share_no_job_and_cells_of_one_are_paired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = small_suite(tmp_path, monkeypatch)
    suite.prepare("reduced", tmp_path, lambda _: None)
    cells = suite.cells("full")
    arms = len(suite.data.arms) + 1
    assert {cell.trace for cell in cells} == {"log sealed 0–60", "log sealed 60–120"}
    assert len(cells) == 2 * (1 + suite.data.draws.full) * arms
    chosen = [cell for cell in cells if cell.window.endswith("#0")]
    figures = {cell: suite.run(cell, tmp_path) for cell in chosen}
    assert figures == {cell: suite.run(cell, tmp_path) for cell in chosen}
    for cell, found in figures.items():
        bound = next(
            figures[c]["makespan"]
            for c in figures
            if c.arm == suites.BOUND and (c.setting, c.window) == (cell.setting, cell.window)
        )
        assert found["makespan"] >= bound


def test_users_estimates_are_too_long_by_up_to_the_factor_and_never_too_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_suite(tmp_path, monkeypatch)
    jobs = splits.part_jobs("log", "train", path=suites.SPLITS)
    made = cut(jobs, 10, 50, 5.0, 3)
    ratio = made.estimate / made.run
    assert ratio.min() >= 1.0
    assert 4.0 < ratio.max() <= 5.0
    assert made.submit[0] == 0.0
    assert (cut(jobs, 10, 50, 1.0, 3).estimate == made.run).all()


def test_a_log_shorter_than_a_window_is_refused_with_the_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = small_suite(tmp_path, monkeypatch, window=100)
    with pytest.raises(ValueError, match="FEDSCHED_TRACES"):
        suite.prepare("reduced", tmp_path, lambda _: None)


@pytest.mark.parametrize(
    ("changes", "cure"),
    [
        ({"arms": {"a": {"order": "lifo", "decide": "easy"}}}, "there are fcfs"),
        ({"arms": {"a": {"order": "fcfs", "decide": "never"}}}, "there are committed"),
        ({"arms": {"a": {"order": "weighted", "decide": "easy"}}}, "learned: true"),
        ({"ours": "none"}, "no arm 'none'"),
        ({"baselines": []}, "at least one arm"),
        ({"estimates": {"short": 0.5}}, "at least once"),
        ({"part": "tests"}, "key part"),
    ],
)
def test_wrong_data_is_refused_with_the_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], cure: str
) -> None:
    with pytest.raises(DataFileError, match=cure):
        small_suite(tmp_path, monkeypatch, **changes)
