"""Pictures of a report: intervals of all comparisons, and a suite's curves; called by commands."""

import re
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from agent.benchmark.report import ALL, Report
from agent.benchmark.suite import Curve, Result

COLOURS = {"better": "#2e9e6b", "no worse": "#5b8def", "undecided": "#9aa0a6", "worse": "#d9534f"}
# Text stays text, and two runs draw the same file.
_STYLE: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "fedsched", "font.size": 9}


def _intervals(result: Result, axes: Axes) -> None:
    """A forest plot of one comparison."""
    comparison, rows = result.comparison, result.rows
    percent = 1.0 if comparison.difference else 100.0
    equal = 0.0 if comparison.difference else 1.0
    for place, row in enumerate(rows):
        colour = COLOURS[row.verdict]
        ends = [percent * (row.low - equal), percent * (row.high - equal)]
        axes.plot(ends, [place, place], color=colour, linewidth=2)
        axes.plot(percent * (row.mean - equal), place, "o", color=colour, markersize=4)
    axes.axvline(0.0, color="black", linewidth=0.8)
    names = [row.arm if row.setting == ALL else f"{row.arm}, {row.setting}" for row in rows]
    axes.set_yticks(range(len(rows)), names)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    unit = "difference" if comparison.difference else "%"
    axes.set_xlabel(f"{comparison.metric.replace('_', ' ')} to {comparison.baseline}, {unit}")
    if comparison.title:
        axes.set_title(comparison.title, fontsize=9, loc="left")


def _curve(curve: Curve, axes: Axes) -> None:
    for name, points in curve.lines.items():
        axes.plot([x for x, _ in points], [y for _, y in points], "o-", label=name, markersize=3)
    if curve.log_x:
        axes.set_xscale("log")
    if curve.log_y:
        axes.set_yscale("log")
    axes.set_xlabel(curve.x)
    axes.set_ylabel(curve.y)
    axes.set_title(curve.title, fontsize=9, loc="left")
    axes.legend(fontsize=7)


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None})
    # matplotlib leaves blanks at the ends of lines, which version control would point at.
    path.write_text(re.sub(r"[ \t]+$", "", path.read_text(), flags=re.MULTILINE))
    plt.close(figure)


def draw(report: Report, folder: Path) -> list[Path]:
    """Write ``<suite>.svg`` and, for each curve, ``<suite>-<number>.svg``; returns their paths."""
    made = []
    for old in (folder / f"{report.suite}.svg", *folder.glob(f"{report.suite}-[0-9].svg")):
        old.unlink(missing_ok=True)
    shown = [result for result in report.comparisons if result.rows]
    with plt.rc_context(_STYLE):
        if shown:
            heights = [len(result.rows) + 2.5 for result in shown]
            figure, axes = plt.subplots(
                len(shown), 1, figsize=(9, 0.24 * sum(heights)), squeeze=False,
                layout="constrained", gridspec_kw={"height_ratios": heights},
            )  # fmt: skip
            for result, place in zip(shown, axes[:, 0], strict=True):
                _intervals(result, place)
            made.append(folder / f"{report.suite}.svg")
            _save(figure, made[-1])
        for count, curve in enumerate(report.timing.curves, start=1):
            figure, single = plt.subplots(figsize=(7, 4), layout="constrained")
            _curve(curve, single)
            made.append(folder / f"{report.suite}-{count}.svg")
            _save(figure, made[-1])
    return made
