"""Reports of the benchmark: what may be claimed, against cases by hand; and the committed page."""

import json
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from agent.benchmark import commands, plots
from agent.benchmark.documents import (
    change,
    comparison_grid,
    duration,
    number,
    results_page,
    spent_line,
)
from agent.benchmark.fingerprint import fingerprint
from agent.benchmark.report import compare, decode, encode, make_report, verdict
from agent.benchmark.runner import TIMES, Outcome, Spent
from agent.benchmark.suite import Cell, Comparison, Curve, Figures, Row
from agent.benchmark.suites import load_suite
from tests.unit.tiny_suite import TinySuite

ROOT = Path(__file__).resolve().parents[2]
RATIO = Comparison("mean_completion", "slow", band=0.01)


def row(low: float, high: float, p: float = 0.001) -> Row:
    return Row("fast", "all", (low + high) / 2, low, high, 10, 4, p, p, "")


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (row(0.90, 0.99), "better"),
        (row(1.001, 1.2), "worse"),
        (row(0.98, 1.009, 0.6), "no worse"),
        (row(0.98, 1.02, 0.6), "undecided"),
        (row(0.90, 0.99, 0.2), "no worse"),  # Holm's adjustment takes the claim away
        (row(1.001, 1.2, 0.2), "undecided"),
        (row(1.0, 1.0, 1.0), "no worse"),
    ],
)
def test_only_what_the_interval_and_holm_allow_is_claimed(found: Row, said: str) -> None:
    assert verdict(found, RATIO) == said


def test_shares_are_compared_by_difference_and_higher_may_be_better() -> None:
    shares = Comparison("allocated", "slow", difference=True, higher_is_better=True, band=0.01)
    assert verdict(row(0.02, 0.05), shares) == "better"
    assert verdict(row(-0.05, -0.02), shares) == "worse"
    assert verdict(row(-0.005, 0.02, 0.6), shares) == "no worse"
    assert change(row(0.02, 0.05), shares) == "+0.035 ± 0.015"


def cells(arm: str, means: dict[tuple[str, str], list[float]]) -> dict[Cell, Figures]:
    return {
        Cell("tiny", setting, arm, f"{trace} {n}", trace, n): {"mean_completion": value}
        for (setting, trace), values in means.items()
        for n, value in enumerate(values)
    }


def test_rows_are_paired_by_window_within_a_setting_and_pooled_where_asked() -> None:
    base = cells("slow", {("0.6", "a"): [10.0, 20.0], ("0.8", "b"): [40.0, 80.0, 5.0]})
    ours = cells("fast", {("0.6", "a"): [5.0, 10.0], ("0.8", "b"): [20.0, 40.0]})
    figures = dict(reversed({**base, **ours}.items()))  # the order of cells does not matter
    (pooled,) = compare(Comparison("mean_completion", "slow"), figures).rows
    assert (pooled.mean, pooled.windows, pooled.traces) == (0.5, 4, 2)
    each = compare(Comparison("mean_completion", "slow", pooled=False), figures).rows
    assert {(row.setting, row.windows) for row in each} == {("0.6", 2), ("0.8", 2)}
    (only,) = compare(Comparison("mean_completion", "slow", settings=("0.6",)), figures).rows
    assert only.windows == 2


def test_every_row_of_a_comparison_is_in_one_family() -> None:
    noisy = [1.0, 1.2, 0.9, 1.1]
    figures = cells("slow", {("s", "a"): [1.0] * 4})
    figures |= cells("one", {("s", "a"): noisy}) | cells("two", {("s", "a"): noisy})
    rows = compare(Comparison("mean_completion", "slow"), figures).rows
    assert [row.p_holm for row in rows] == pytest.approx([min(2 * row.p, 1.0) for row in rows])


def test_what_cannot_be_compared_is_said() -> None:
    figures = cells("fast", {("s", "a"): [1.0, 2.0]})
    with pytest.raises(ValueError, match="nothing to compare with: no mean_completion of 'slow'"):
        compare(RATIO, figures)
    figures |= cells("slow", {("s", "a"): [0.0, 2.0]})
    with pytest.raises(ValueError, match="compare it with 'difference'"):
        compare(RATIO, figures)


def outcome() -> Outcome:
    suite = TinySuite()
    figures = {
        cell: {
            "mean_completion": 3600.0 * (10 + cell.seed) * (0.9 if cell.arm == "fast" else 1.0),
            "cost_us": 5.0,
        }
        for cell in suite.cells("reduced")
    }
    return Outcome("0123", figures)


def test_a_report_survives_its_file_and_renders_the_same(tmp_path: Path) -> None:
    suite = TinySuite()
    report = make_report(suite, "reduced", outcome(), suite.cells("reduced"))
    again = decode(encode(report))
    assert again == report
    curve = Curve("Cost", "nodes", "µs", {"fast": [(9.0, 2.0), (30.0, 1.0)]}, log_x=True)
    named = replace(
        report,
        suite="scale",
        units={"mean_completion": ("h", 3600.0)},
        findings=["Fast is faster."],
        timing=replace(report.timing, curves=[curve]),
    )
    (tmp_path / "scale.json").write_bytes(encode(named))
    first = {path.name: path.read_bytes() for path in plots.draw(named, tmp_path)}
    assert set(first) == {"scale.svg", "scale-1.svg"}
    legend = [f">{verdict}</text>" for verdict in plots.MARKS]
    assert [text for text in legend if text in first["scale.svg"].decode()] == legend
    assert {path.name: path.read_bytes() for path in plots.draw(named, tmp_path)} == first
    (tmp_path / "scale.md").write_text("Aimed at: the moon.\n")
    page = results_page(tmp_path, tmp_path)
    for text in (
        "Aimed at: the moon.",
        "## scale", "- Fast is faster.", "![scale](scale-1.svg)", "| fast | -10.0 ± 0.0 % |",
        "| load 0.8 | slow | 11.0 |", "6 windows a setting, of: a, b. Seeds: 0–2.",
    ):  # fmt: skip
        assert text in page


def test_verdicts_and_lines_of_a_picture_differ_in_shape_as_well_as_in_colour() -> None:
    assert set(plots.MARKS) == {"better", "worse", "no worse", "undecided"}
    for looks in zip(*plots.MARKS.values(), strict=True):
        assert len(set(looks)) == len(plots.MARKS)
    assert len(set(plots.LINES)) == len(plots.LINES) > len(set(plots.COLOURS))


def test_figures_keep_three_digits() -> None:
    assert [number(x) for x in (12345.6, 99.96, 9.876, 0.0123456, 0.0)] == [
        "12,346", "100.0", "9.88", "0.0123", "0",
    ]  # fmt: skip
    grid = comparison_grid(compare(RATIO, outcome().figures))
    assert grid.title == "mean completion against slow (no worse: within 1 %)"
    assert grid.rows[0][-1] == "better"


def test_times_are_told_as_people_tell_them() -> None:
    assert [duration(x) for x in (0.4, 59.4, 59.6, 245.0, 3599.7, 3900.0)] == [
        "0 s", "59 s", "1 min 0 s", "4 min 5 s", "1 h 0 min", "1 h 5 min",
    ]  # fmt: skip
    mixed, scale = Spent("01", 3000, 130.0, 245.0), Spent("02", 40, 10.0, 15.0)
    assert spent_line("mixed-nodes", [mixed]) == (
        "mixed-nodes: 3,000 cells, 2 min 10 s, 4 min 5 s of CPU"
    )
    assert spent_line("all", [mixed, scale]) == "all: 3,040 cells, 2 min 20 s, 4 min 20 s of CPU"


def test_a_suite_that_cannot_run_is_told_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDSCHED_TRACES", str(tmp_path / "nowhere"))
    found = CliRunner().invoke(commands.app, ["mixed-nodes", "--output", str(tmp_path / "out")])
    assert found.exit_code == 1
    assert "FEDSCHED_TRACES names this folder and it is not there" in found.output.replace("\n", "")


def test_pages_are_rendered_from_reports_and_docs_only_from_whole_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite, out, docs = TinySuite(), tmp_path / "out", tmp_path / "docs"
    report = make_report(suite, "reduced", outcome(), suite.cells("reduced"))
    took: dict[str, Spent] = {}

    def made(name: str, *_: object) -> bool:
        if name == "federation":
            raise RuntimeError("no such luck")
        out.mkdir(exist_ok=True)
        (out / f"{name}.json").write_bytes(encode(replace(report, suite=name)))
        current = fingerprint(load_suite(name), "reduced")
        took[f"{name} reduced"] = Spent(current if name != "drl-mls" else "01", 40, 10.0, 15.0)
        (out / TIMES).write_bytes(msgspec.json.encode(took))
        return True

    monkeypatch.setattr(commands, "suite", made)
    options = ["--output", str(out), "--docs", str(docs)]
    found = CliRunner().invoke(commands.app, ["all", *options])
    assert found.exit_code == 1
    assert "no such luck" in found.output
    assert "not whole: federation" in found.output
    assert "scale: 40 cells, 10 s, 15 s of CPU\n" in found.output
    assert "all: 160 cells, 40 s, 1 min 0 s of CPU\n" in found.output
    assert "drl-mls: 40 cells" not in found.output  # that is another version's time
    assert "## scale" in (out / "results.md").read_text()
    assert not docs.exists()

    assert CliRunner().invoke(commands.app, ["report", *options]).exit_code == 0
    page = (docs / "results.md").read_text()
    assert page == results_page(docs / "results", docs)
    assert "![scale](results/scale.svg)" in page
    assert (docs / "results" / "scale.svg").exists()

    (out / "scale.json").write_text("{}")
    found = CliRunner().invoke(commands.app, ["report", *options])
    assert found.exit_code == 1
    assert "scale.json: no report that can be read" in found.output.replace("\n", "")
    assert (docs / "results.md").read_text() == page


def test_the_committed_page_is_what_its_json_renders_to() -> None:
    kept = ROOT / "docs" / "results"
    for path in sorted(kept.glob("*.json")):
        assert encode(decode(path.read_bytes())) == path.read_bytes()
        assert json.loads(path.read_text())["failures"] == []
    assert (ROOT / "docs" / "results.md").read_text() == results_page(kept, ROOT / "docs")
