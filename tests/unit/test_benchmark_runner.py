"""The benchmark's runner: what is done stays done, what fails is named, nothing else is lost."""

import io
import json
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from rich.console import Console

from agent.benchmark.fingerprint import fingerprint, modules
from agent.benchmark.report import encode, make_report
from agent.benchmark.runner import TIMES, Outcome, Spent, read_lines, read_times, run
from agent.lock import sole
from tests.unit.tiny_suite import FOLDER, TOIL_SECONDS, TinySuite


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    (tmp_path / "input").write_text("1")
    (tmp_path / "ran").write_text("")
    order(tmp_path)
    return tmp_path


def order(folder: Path, **orders: str) -> None:
    wanted = {name.replace("_", " "): value for name, value in orders.items()}
    (folder / "orders.json").write_text(json.dumps(wanted))


def ran(folder: Path) -> list[str]:
    """Cells that were worked off since the last call."""
    lines = (folder / "ran").read_text().splitlines()
    (folder / "ran").write_text("")
    return lines


def work(folder: Path, *, fresh: bool = False, workers: int = 1) -> tuple[Outcome, str]:
    told = io.StringIO()
    outcome = run(
        TinySuite(), "reduced", folder / "out", workers=workers, fresh=fresh,
        console=Console(file=told, width=300),
    )  # fmt: skip
    return outcome, told.getvalue()


def test_what_is_done_is_not_done_again_unless_its_basis_changed(folder: Path) -> None:
    outcome, told = work(folder)
    assert len(outcome.figures) == len(ran(folder)) == 12
    assert "prepared for reduced" in told
    assert not outcome.failures

    again, _ = work(folder)
    assert (again.figures, again.resumed) == (outcome.figures, 12)
    assert ran(folder) == []

    (folder / "input").write_text("2")
    work(folder)
    assert len(ran(folder)) == 12


def test_a_failing_cell_and_a_dying_worker_are_named_and_the_rest_goes_on(folder: Path) -> None:
    order(folder, fast_a_0="raise", slow_a_1="die", fast_b_2="nan")
    outcome, told = work(folder, workers=2)
    why = {f"{cell.arm} {cell.window}": error for cell, error in outcome.failures}
    assert set(why) == {"fast a 0", "slow a 1", "fast b 2"}
    assert why["fast a 0"].startswith("ValueError: no such luck (tiny_suite.py:")
    assert "died with exit code 3" in why["slow a 1"]
    assert "no finite figure: mean_completion" in why["fast b 2"]
    assert "fast, window a 0 of a, seed 0: ValueError: no such luck" in told
    assert len(outcome.figures) == 9

    order(folder)
    ran(folder)
    mended, _ = work(folder)
    assert sorted(ran(folder)) == ["fast a 0", "fast b 2", "slow a 1"]
    assert len(mended.figures) == 12


def test_a_run_that_is_stopped_keeps_what_is_done(folder: Path) -> None:
    order(folder, slow_b_0="stop")
    with pytest.raises(KeyboardInterrupt):
        work(folder)
    done = len(read_lines(folder / "out" / "cells.jsonl"))
    assert 0 < done < 12
    order(folder)
    ran(folder)
    outcome, _ = work(folder)
    assert len(outcome.figures) == 12
    assert len(ran(folder)) == 12 - done


def spent(folder: Path) -> Spent:
    return read_times(folder / "out")["tiny reduced"]


def test_what_a_suite_took_is_added_up_over_the_runs_that_its_figures_are_from(
    folder: Path,
) -> None:
    order(folder, slow_b_0="stop")
    with pytest.raises(KeyboardInterrupt):
        work(folder)
    first = spent(folder)
    assert 0 < first.cells < 12
    assert min(first.wall_seconds, first.cpu_seconds) > 0.0

    order(folder)
    work(folder)
    whole = spent(folder)
    assert whole.cells == 12
    assert whole.wall_seconds > first.wall_seconds
    assert whole.cpu_seconds > first.cpu_seconds

    work(folder)  # nothing was left to do
    assert spent(folder) == whole


def test_processes_that_a_suite_starts_count_and_a_fresh_run_counts_anew(folder: Path) -> None:
    order(folder, prepare="toil")
    work(folder)
    toiled = spent(folder)
    assert toiled.cpu_seconds >= TOIL_SECONDS
    days = replace(toiled, cpu_seconds=1e6)
    (folder / "out" / TIMES).write_bytes(msgspec.json.encode({"tiny reduced": days}))
    work(folder, fresh=True)
    assert TOIL_SECONDS <= spent(folder).cpu_seconds < 1e6

    (folder / "input").write_text("2")  # other figures
    order(folder, slow_b_0="stop")
    with pytest.raises(KeyboardInterrupt):
        work(folder)
    assert spent(folder).fingerprint != toiled.fingerprint
    assert spent(folder).cells < 12


def test_a_file_of_times_that_cannot_be_read_costs_the_times_and_nothing_else(
    folder: Path,
) -> None:
    (folder / "out").mkdir()
    (folder / "out" / TIMES).write_text('{"tiny reduced": 3}')
    outcome, _ = work(folder)
    assert spent(folder).cells == len(outcome.figures) == 12


def test_a_torn_line_costs_its_own_cell_only(folder: Path) -> None:
    outcome, _ = work(folder)
    path = folder / "out" / "cells.jsonl"
    path.write_bytes(path.read_bytes()[:-40])
    ran(folder)
    again, _ = work(folder)
    assert len(ran(folder)) == 1
    assert {c: f["mean_completion"] for c, f in again.figures.items()} == {
        c: f["mean_completion"] for c, f in outcome.figures.items()
    }
    assert len(read_lines(path)) == 12
    work(folder)
    assert ran(folder) == []


def test_two_runs_have_the_same_report_to_the_byte_but_for_timing(folder: Path) -> None:
    suite, texts = TinySuite(), []
    for _ in range(2):
        outcome, _ = work(folder, fresh=True)
        assert len(ran(folder)) == 12
        report = json.loads(encode(make_report(suite, "reduced", outcome, suite.cells("reduced"))))
        assert set(report["timing"]["means"]["load 0.8"]["fast"]) == {"cost_us"}
        del report["timing"]
        texts.append(json.dumps(report))
    assert texts[0] == texts[1]


def test_sealed_jobs_are_out_of_reach_while_a_suite_prepares(folder: Path) -> None:
    order(folder, prepare="peek")
    with pytest.raises(RuntimeError, match=r"could not prepare: .*SealedError: the sealed jobs"):
        work(folder)
    assert ran(folder) == []


def test_two_runs_into_one_folder_are_refused(folder: Path) -> None:
    with (
        sole(folder / "out", "benchmark"),
        pytest.raises(RuntimeError, match="another benchmark writes to"),
    ):
        work(folder)


def test_unpaired_cells_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = TinySuite().cells("reduced")
    for wrong in ([*cells, cells[0]], [replace(cells[0], seed=7), *cells[1:]], []):
        monkeypatch.setattr(TinySuite, "cells", lambda _, __, wrong=wrong: wrong)
        with pytest.raises(ValueError, match=r"two equal cells|not be paired|has no cells"):
            work(folder)


def test_the_fingerprint_is_of_all_code_that_a_suite_reaches_and_of_no_other(folder: Path) -> None:
    reached = {path.name for path in modules("agent.benchmark.mixed_nodes")}
    assert {"mixed_nodes.py", "engine.py", "rules.py", "speeds.py", "weights.py"} <= reached
    assert not {"runner.py", "report.py", "commands.py", "dashboard"} & reached
    suite = TinySuite()
    before = fingerprint(suite, "reduced")
    assert before == fingerprint(suite, "reduced") != fingerprint(suite, "full")
    (folder / "input").write_text("other")
    assert before != fingerprint(suite, "reduced")
