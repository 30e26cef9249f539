"""Pictures of a report: intervals of all comparisons, and a suite's curves; called by commands."""

import re
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from agent.benchmark.report import ALL, Report
from agent.benchmark.suite import Curve, Result

MARKS = {
    "better": ("#009e73", "o"),
    "no worse": ("#0072b2", "s"),
    "undecided": ("#767676", "D"),
    "worse": ("#d55e00", "X"),
}
"""Colour and marker of each verdict. The colours are of Okabe and Ito's palette (Color Universal
Design, 2008), which people who see fewer colours can tell apart; in print the shapes do it."""
COLOURS = "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#000000", "#767676"
LINES = "osD^vPX<>*"
"""Colours, of the same palette, and markers of a chart's lines, one after the other."""
_LEGEND_ROWS = 2.0
# Text stays text, and two runs draw the same file.
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "fedsched",
    "font.size": 9,
}


def _intervals(result: Result, axes: Axes) -> None:
    """A forest plot of one comparison."""
    comparison, rows = result.comparison, result.rows
    percent = 1.0 if comparison.difference else 100.0
    equal = 0.0 if comparison.difference else 1.0
    for place, row in enumerate(rows):
        points = [percent * (end - equal) for end in (row.low, row.mean, row.high)]
        axes.plot(points, [place] * 3, markevery=[1], **_look(row.verdict))
    axes.axvline(0.0, color="black", linewidth=0.8)
    names = [row.arm if row.setting == ALL else f"{row.arm}, {row.setting}" for row in rows]
    axes.set_yticks(range(len(rows)), names)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    unit = "difference" if comparison.difference else "%"
    axes.set_xlabel(f"{comparison.metric.replace('_', ' ')} to {comparison.baseline}, {unit}")
    if comparison.title:
        axes.set_title(comparison.title, fontsize=9, loc="left")


def _look(verdict: str) -> dict[str, Any]:
    """How an interval and the marker of its mean are drawn."""
    colour, marker = MARKS[verdict]
    return {
        "color": colour, "linewidth": 2, "marker": marker, "markersize": 8,
        "markeredgecolor": "white", "markeredgewidth": 0.4,
    }  # fmt: skip


def _legend(figure: Figure) -> None:
    """All verdicts, above the plots, whichever occur: pictures are read side by side."""
    handles = [Line2D([], [], label=verdict, **_look(verdict)) for verdict in MARKS]
    figure.legend(
        handles=handles, loc="outside upper left", ncols=len(MARKS), frameon=False,
        title="mean and 95 % interval", alignment="left",
    )  # fmt: skip


def _curve(curve: Curve, axes: Axes) -> None:
    looks = zip(cycle(COLOURS), cycle(LINES), strict=False)
    for (name, points), (colour, marker) in zip(curve.lines.items(), looks, strict=False):
        x, y = [x for x, _ in points], [y for _, y in points]
        axes.plot(x, y, color=colour, marker=marker, label=name, markersize=4.5)
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
                len(shown), 1, figsize=(9, 0.24 * (sum(heights) + _LEGEND_ROWS)), squeeze=False,
                layout="constrained", gridspec_kw={"height_ratios": heights},
            )  # fmt: skip
            for result, place in zip(shown, axes[:, 0], strict=True):
                _intervals(result, place)
            _legend(figure)
            made.append(folder / f"{report.suite}.svg")
            _save(figure, made[-1])
        for count, curve in enumerate(report.timing.curves, start=1):
            figure, single = plt.subplots(figsize=(7, 4), layout="constrained")
            _curve(curve, single)
            made.append(folder / f"{report.suite}-{count}.svg")
            _save(figure, made[-1])
    return made
