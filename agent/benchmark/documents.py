"""Reports for readers: tables in the terminal, ``results.md``; called by ``commands``."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from agent.benchmark.report import ALL, Report, decode
from agent.benchmark.runner import Spent
from agent.benchmark.suite import Comparison, Result, Row
from agent.benchmark.suites import SUITES
from agent.data_files import DataFileError

HEAD = (
    "# Results\n\n"
    "Every figure here is made by `fedsched benchmark`; this page is rendered from the JSON files "
    "in [results](results), which hold them all. Policies are compared window by window, on the "
    "same jobs with the same random numbers. ± is a 95 % interval over windows, clustered by the "
    "trace that they were cut from (windows/traces). Better and worse hold with Holm's adjustment "
    "over the rows of their table; no worse says that the interval ends within the stated band, or "
    "at the baseline where none is stated; all else is undecided. Jobs that did not finish count "
    "with their time so far and what was left of them. Test windows are sealed: nothing was "
    "trained or tuned on them. What was aimed at, and what of it was missed, is said by hand.\n"
)


@dataclass(frozen=True)
class Grid:
    """A table before it is drawn."""

    title: str
    header: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)


def number(value: float) -> str:
    """A figure with three digits that count, thousands whole."""
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    if size >= 10:
        return f"{value:.1f}"
    if size >= 1:
        return f"{value:.2f}"
    return "0" if value == 0 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """A time as in ``1 h 5 min`` or ``2 min 10 s``; hours without seconds."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def spent_line(name: str, spent: Sequence[Spent]) -> str:
    """What a suite or several took, as in ``scale: 3,000 cells, 2 min 10 s, 4 min 5 s of CPU``."""
    wall, cpu = sum(one.wall_seconds for one in spent), sum(one.cpu_seconds for one in spent)
    cells = sum(one.cells for one in spent)
    return f"{name}: {cells:,} cells, {duration(wall)}, {duration(cpu)} of CPU"


def change(row: Row, comparison: Comparison) -> str:
    """The difference with its interval, as in ``-39.1 ± 1.0 %``."""
    half = (row.high - row.low) / 2.0
    if comparison.difference:
        return f"{row.mean:+.3g} ± {half:.2g}"
    return f"{100.0 * (row.mean - 1.0):+.1f} ± {100.0 * half:.1f} %"


def _probability(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def comparison_grid(result: Result) -> Grid:
    """One comparison's rows."""
    comparison = result.comparison
    name = comparison.metric.replace("_", " ")
    title = comparison.title or f"{name} against {comparison.baseline}"
    if comparison.band:
        band = f"{100 * comparison.band:g} %" if not comparison.difference else f"{comparison.band}"
        title += f" (no worse: within {band})"
    if comparison.higher_is_better:
        title += " (higher is better)"
    several = any(row.setting != ALL for row in result.rows)
    grid = Grid(
        title,
        ["policy", *(["setting"] if several else []), f"to {comparison.baseline}",
         "interval", "windows", "p (Holm)", "verdict"],
    )  # fmt: skip
    for row in result.rows:
        if comparison.difference:
            ends = f"{row.low:+.3g} … {row.high:+.3g}"
        else:
            ends = f"{100 * (row.low - 1):+.1f} … {100 * (row.high - 1):+.1f} %"
        grid.rows.append(
            [row.arm, *([row.setting] if several else []), change(row, comparison), ends,
             f"{row.windows}/{row.traces}", _probability(row.p_holm), row.verdict]
        )  # fmt: skip
    return grid


def means_grid(report: Report, title: str, means: dict[str, dict[str, dict[str, float]]]) -> Grid:
    """Mean figures of every arm in every setting."""
    metrics = list(
        dict.fromkeys(m for arms in means.values() for row in arms.values() for m in row)
    )
    units = {m: report.units.get(m, ("", 1.0)) for m in metrics}
    heads = [m.replace("_", " ") + (f", {units[m][0]}" if units[m][0] else "") for m in metrics]
    grid = Grid(title, ["setting", "policy", *heads])
    for setting, arms in means.items():
        for arm, figures in arms.items():
            cells = [number(figures[m] / units[m][1]) if m in figures else "–" for m in metrics]
            grid.rows.append([setting, arm, *cells])
    return grid


def grids(report: Report) -> list[Grid]:
    """All tables of a report, comparisons first."""
    found = [comparison_grid(result) for result in report.comparisons if result.rows]
    found.append(means_grid(report, "Means over windows", report.means))
    if any(row for arms in report.timing.means.values() for row in arms.values()):
        title = "Measured on this machine, other on another"
        found.append(means_grid(report, title, report.timing.means))
    return found


def _facts(report: Report) -> list[str]:
    windows = sorted(set(report.windows.values()))
    span = f"{windows[0]}" if len(windows) == 1 else f"{windows[0]} to {windows[-1]}"
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    return [
        f"Command: `{report.command}`.",
        f"{span} windows a setting, of: {', '.join(report.traces)}. Seeds: {report.seeds}.",
        f"Made on {report.machine}; {versions}; code and data {report.fingerprint}.",
    ]


def show(report: Report, console: Console) -> None:
    """Comparisons and findings in the terminal."""
    for result in report.comparisons:
        grid = comparison_grid(result)
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=grid.title, title_justify="left")
        kept = [i for i, head in enumerate(grid.header) if head != "windows"]  # it is below
        for i in kept:
            name = grid.header[i] in ("policy", "setting")
            table.add_column(grid.header[i], justify="left" if name else "right", no_wrap=not name)
        for row in grid.rows:
            table.add_row(*(row[i] for i in kept))
        console.print(table)
    for text in [*report.findings, *_facts(report)]:
        console.print(text)
    for text in report.failures:
        console.print(f"[red]failed[/red]: {text}", soft_wrap=True)


def _markdown(grid: Grid) -> str:
    lines = [f"**{grid.title}**", "", "| " + " | ".join(grid.header) + " |"]
    lines.append("|---" * 1 + "|---:" * (len(grid.header) - 1) + "|")
    lines += ["| " + " | ".join(row) + " |" for row in grid.rows]
    return "\n".join(lines)


def section(report: Report, pictures: Sequence[str], remarks: str = "") -> str:
    """A report as a section of Markdown; ``pictures`` are paths as seen from the page.

    ``remarks`` are Markdown too: what no program knows, such as what was aimed at.
    """
    parts = [f"## {report.suite}", report.title]
    if remarks:
        parts.append(remarks.strip())
    if report.findings:
        parts.append("\n".join(f"- {text}" for text in report.findings))
    if report.notes:
        parts.append("What the names mean, and how the figures came about:")
        parts.append("\n".join(f"- {text}" for text in report.notes))
    parts += [f"![{report.suite}]({picture})" for picture in pictures]
    parts += [_markdown(grid) for grid in grids(report)]
    if report.failures:
        parts.append("Failed cells:\n\n" + "\n".join(f"- {text}" for text in report.failures))
    parts.append("\n".join(f"- {text}" for text in _facts(report)))
    return "\n\n".join(parts) + "\n"


def read_reports(folder: Path) -> list[Report]:
    """All reports in a folder, in the order of the suites.

    Raises:
        DataFileError: one is broken, or of another version of this program.
    """
    found = []
    for name in SUITES:
        file = folder / f"{name}.json"
        if file.exists():
            try:
                found.append(decode(file.read_bytes()))
            except msgspec.DecodeError as error:
                raise DataFileError(
                    f"{file}: no report that can be read ({error}); make it anew with 'fedsched "
                    f"benchmark {name}', or take it away"
                ) from error
    return found


def results_page(folder: Path, shown_from: Path) -> str:
    """The page of all reports in ``folder``, with pictures linked as seen from ``shown_from``.

    Remarks by hand on a suite are in ``<suite>.md`` beside its report.
    """
    parts = [HEAD]
    for report in read_reports(folder):
        pictures = sorted(folder.glob(f"{report.suite}.svg"))
        pictures += sorted(folder.glob(f"{report.suite}-[0-9].svg"))
        links = [picture.relative_to(shown_from).as_posix() for picture in pictures]
        remarks = folder / f"{report.suite}.md"
        parts.append(section(report, links, remarks.read_text() if remarks.exists() else ""))
    return "\n".join(parts)
