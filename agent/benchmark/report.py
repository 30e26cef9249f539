"""From the cells of a suite to its report: means, paired comparisons, tables, JSON.

Called by ``agent.benchmark.commands``; ``agent.benchmark.documents`` renders reports, for a reader
and for the terminal.
"""

import os
import platform
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from agent.benchmark.fingerprint import libraries
from agent.benchmark.runner import Outcome
from agent.benchmark.suite import Cell, Comparison, Curve, Figures, Means, Result, Row, Size, Suite
from agent.statistics import holm, paired_difference, paired_ratio

ALL = "all"
LEVEL = 0.05
_ROUNDING = 1e-12


class Timing(msgspec.Struct, frozen=True):
    """What differs from one run to the next."""

    means: dict[str, dict[str, dict[str, float]]]
    """Of the timed metrics, [setting][arm][metric]."""
    curves: list[Curve]


class Report(msgspec.Struct, frozen=True):
    """All that a suite found; the same to the byte for each run but for ``timing``."""

    suite: str
    title: str
    size: Size
    command: str
    machine: str
    versions: dict[str, str]
    fingerprint: str
    """Of code, data and inputs."""
    traces: list[str]
    seeds: str
    windows: dict[str, int]
    """By setting."""
    units: dict[str, tuple[str, float]]
    notes: list[str]
    findings: list[str]
    comparisons: list[Result]
    means: dict[str, dict[str, dict[str, float]]]
    failures: list[str]
    timing: Timing


def machine() -> str:
    """The machine in a line: cores, processor, operating system, Python."""
    model = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    return (
        f"{os.cpu_count()} cores, {model}, {platform.system()}, Python {platform.python_version()}"
    )


def _means(figures: Mapping[Cell, Figures]) -> dict[str, dict[str, dict[str, float]]]:
    """[setting][arm][metric], means over windows, in the order of the cells."""
    gathered: dict[str, dict[str, dict[str, list[float]]]] = {}
    for cell, found in figures.items():
        arm = gathered.setdefault(cell.setting, {}).setdefault(cell.arm, defaultdict(list))
        for metric, value in found.items():
            arm[metric].append(value)
    return {
        setting: {
            arm: {metric: float(np.mean(values)) for metric, values in metrics.items()}
            for arm, metrics in arms.items()
        }
        for setting, arms in gathered.items()
    }


def _only(means: Means, timed: frozenset[str], keep: bool) -> dict[str, dict[str, Figures]]:
    """The means of the timed metrics, or of all others."""
    return {
        setting: {
            arm: {m: value for m, value in metrics.items() if (m in timed) == keep}
            for arm, metrics in arms.items()
        }
        for setting, arms in means.items()
    }


def _row(
    comparison: Comparison, arm: str, setting: str, pairs: Sequence[tuple[Cell, float, float]]
) -> Row:
    """One arm against the baseline; p_holm and verdict are set once the family is whole."""
    ours, base = [pair[1] for pair in pairs], [pair[2] for pair in pairs]
    traces = [pair[0].trace for pair in pairs]
    if comparison.difference:
        difference = paired_difference(ours, base, traces)
        mean, low, high, p = difference.mean, difference.low, difference.high, difference.p
    else:
        try:
            ratio = paired_ratio(ours, base, traces)
        except ValueError as error:
            raise ValueError(
                f"{comparison.metric} of {arm} or {comparison.baseline} in {setting!r} gives no "
                f"ratio ({error}); compare it with 'difference'"
            ) from error
        mean, low, high, p = ratio.mean, ratio.low, ratio.high, ratio.p
    return Row(arm, setting, mean, low, high, len(pairs), len(set(traces)), p, p, "undecided")


def verdict(row: Row, comparison: Comparison) -> str:
    """better or worse beyond doubt (Holm's p below 5 %), no worse within the band, or undecided."""
    equal = 0.0 if comparison.difference else 1.0
    low, high = row.low - equal, row.high - equal
    if comparison.higher_is_better:
        low, high = -high, -low
    if row.p_holm < LEVEL and (high < 0.0 or low > 0.0):
        return "better" if high < 0.0 else "worse"
    return "no worse" if high <= comparison.band + _ROUNDING else "undecided"


def compare(comparison: Comparison, figures: Mapping[Cell, Figures]) -> Result:
    """All rows of a comparison that have at least two pairs of cells.

    Raises:
        ValueError: no cell of the baseline has the metric, or figures allow no ratio.
    """
    chosen = {
        cell: found[comparison.metric]
        for cell, found in figures.items()
        if comparison.metric in found
        and (not comparison.settings or cell.setting in comparison.settings)
    }
    base = {
        (cell.setting, cell.window): value
        for cell, value in chosen.items()
        if cell.arm == comparison.baseline
    }
    if not base:
        raise ValueError(
            f"nothing to compare with: no {comparison.metric} of {comparison.baseline!r} in "
            f"{', '.join(comparison.settings) or 'any setting'}"
        )
    pairs: dict[tuple[str, str], list[tuple[Cell, float, float]]] = defaultdict(list)
    for cell, value in chosen.items():
        wanted = cell.arm in comparison.arms if comparison.arms else cell.arm != comparison.baseline
        place = (cell.setting, cell.window)
        if wanted and place in base:
            setting = ALL if comparison.pooled else cell.setting
            pairs[setting, cell.arm].append((cell, value, base[place]))
    rows = [
        _row(comparison, arm, setting, found)
        for (setting, arm), found in pairs.items()
        if len(found) > 1
    ]
    adjusted = holm([row.p for row in rows])
    rows = [msgspec.structs.replace(r, p_holm=p) for r, p in zip(rows, adjusted, strict=True)]
    return Result(
        comparison,
        tuple(msgspec.structs.replace(row, verdict=verdict(row, comparison)) for row in rows),
    )


def _spans(seeds: set[int]) -> str:
    """Numbers as ranges, such as ``0–3, 7``."""
    spans: list[list[int]] = []
    for seed in sorted(seeds):
        if spans and seed == spans[-1][1] + 1:
            spans[-1][1] = seed
        else:
            spans.append([seed, seed])
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in spans)


def make_report(suite: Suite, size: Size, outcome: Outcome, cells: Sequence[Cell]) -> Report:
    """The report of a run; ``cells`` are all that were asked for, in their order.

    Raises:
        ValueError: a comparison has nothing to compare.
    """
    figures = {cell: outcome.figures[cell] for cell in cells if cell in outcome.figures}
    means = _means(figures)
    results = [compare(comparison, figures) for comparison in suite.comparisons]
    steady = _only(means, suite.timed, False)
    drawn: dict[str, set[str]] = defaultdict(set)
    for cell in figures:
        drawn[cell.setting].add(cell.window)
    return Report(
        suite=suite.name,
        title=suite.title,
        size=size,
        command=f"fedsched benchmark {suite.name}{' --full' if size == 'full' else ''}",
        machine=machine(),
        versions=libraries(),
        fingerprint=outcome.fingerprint,
        traces=sorted({cell.trace for cell in figures}),
        seeds=_spans({cell.seed for cell in figures}),
        windows={setting: len(windows) for setting, windows in drawn.items()},
        units=dict(suite.units),
        notes=list(suite.notes),
        findings=suite.findings(steady, results),
        comparisons=results,
        means=steady,
        failures=sorted(f"{c.setting}, {c.arm}, {c.window}: {why}" for c, why in outcome.failures),
        timing=Timing(_only(means, suite.timed, True), suite.curves(means)),
    )


def encode(report: Report) -> bytes:
    """The report as JSON, in lines, so that version control shows what changed."""
    return msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"


def decode(text: bytes) -> Report:
    """Read what :func:`encode` wrote. Raises msgspec.DecodeError."""
    return msgspec.json.decode(text, type=Report)
