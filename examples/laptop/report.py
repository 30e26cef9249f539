"""The end of the demo: the table per member, the picture and the JSON; called by ``demo``."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from rich import box
from rich.table import Table

from agent.statistics import Ratio
from examples.laptop.evaluation import ALONE, ARMS, BASELINE, FEDERATED, RULE, SHARED_RULE, Arm
from examples.laptop.members import EVALUATION_JOBS

COLOURS = {
    BASELINE: "#9aa0a6",
    RULE: "#5b8def",
    ALONE: "#e0a030",
    SHARED_RULE: "#8fd0b0",
    FEDERATED: "#2e9e6b",
}

LEAST = 0.0005
"""A difference that is smaller, 0.0 % as figures are shown, is none."""
SMOOTH = 8
"""Points of a learning curve that are averaged to draw one."""


@dataclass(frozen=True)
class Outcome:
    """All that a run of the demo found."""

    arms: dict[str, list[Arm]]
    """By member."""
    live: dict[str, dict[str, Any]]
    """By member: what its cluster reported at the end, and LeastAllocated's mean on those jobs."""
    rounds: list[dict[str, Any]]
    """Of the federation, oldest first, as the hub's API tells them."""
    curves: dict[str, list[list[float]]]
    """Mean reward of the learning rounds by member: [time, value], oldest first."""
    windows: int
    """Windows of unseen jobs a member."""


def _said(ratio: Ratio | None) -> str:
    """A ratio with a star where its interval leaves out no difference."""
    if ratio is None:
        return "–"
    return f"{ratio}{' *' if ratio.significant else ''}"


def held_out_table(outcome: Outcome) -> Table:
    """Every member's arms on jobs that no agent has seen."""
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        title=f"Jobs that no agent has seen: {outcome.windows} windows of {EVALUATION_JOBS} jobs "
        "a member",
        caption="Mean over windows; unfinished jobs count elapsed plus what is left.\n"
        "* the difference is larger than its 95 % interval; all others are noise.",
    )
    table.add_column("member", no_wrap=True)
    table.add_column("policy", no_wrap=True)
    for column in ("mean, h", "p99, h", "makespan, h", "to Least-\nAllocated", "to best rule"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("OOM\nkills", justify="right")
    table.add_column("unfin-\nished", justify="right")
    for member, arms in outcome.arms.items():
        for arm in arms:
            table.add_row(
                member if arm.name == BASELINE else "",
                arm.name,
                f"{arm.mean / 3600:.2f}",
                f"{arm.p99 / 3600:.1f}",
                f"{arm.makespan / 3600:.1f}",
                _said(arm.against_baseline),
                _said(arm.against_rule),
                str(arm.oom_kills),
                str(arm.unfinished),
                end_section=arm.name == FEDERATED,
            )
    return table


def live_table(outcome: Outcome) -> Table:
    """What happened on the live clusters, one run each: no interval, so no claim."""
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        title="The live clusters, jobs placed by the agents through kube-scheduler's protocol",
    )
    table.add_column("member")
    real = all("kube_scheduler" in live for live in outcome.live.values())
    for column in (
        "jobs", "mean, h", "same jobs,\nLeast-\nAllocated, h", "unfin-\nished", "OOM\nkills",
        "answers", "no answer", "prioritize\np50 ms", "p99 ms",
        *(("attempt\np50 ms", "p99 ms", "pods/s") if real else ()),
    ):  # fmt: skip
        table.add_column(column, justify="right")
    for member, live in outcome.live.items():
        extender, scheduler = live["extender"], live.get("kube_scheduler", {})
        table.add_row(
            member,
            str(live["jobs"]),
            f"{live['mean_completion_counted_seconds'] / 3600:.2f}",
            f"{live['baseline_mean_seconds'] / 3600:.2f}",
            str(live["unfinished"] + live["not_arrived"] + live["failed"]),
            str(live["oom_kills"]),
            str(sum(extender["calls"].values())),
            str(sum(extender["failures"].values())),
            _figure(extender["prioritize_p50_ms"]),
            _figure(extender["prioritize_p99_ms"]),
            *(_figure(figure) for figure in scheduler.values()),
        )
    if real:
        hours = max(live["clock_scale"] for live in outcome.live.values()) / 3600
        table.caption = (
            f"A second is up to {hours:.1f} h of a cluster's time, so what scheduling takes "
            "counts; LeastAllocated is simulated without it.\n"
            "attempt: kube-scheduler's whole attempt at a pod, the agent's answer in it.\n"
            "pods/s: many pods that wait at once, scheduled with the agent asked for each."
        )
    return table


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def verdict(outcome: Outcome) -> list[str]:
    """One plain sentence per member and agent: better, worse or no difference, with the figure."""
    lines = []
    for member, arms in outcome.arms.items():
        for arm in arms:
            if arm.name not in (ALONE, FEDERATED) or arm.against_rule is None:
                continue
            ratio = arm.against_rule
            word = "better than" if ratio.mean < 1.0 else "WORSE than"
            if not ratio.significant or abs(ratio.mean - 1.0) < LEAST:
                word = "no different from"
            trained = f"policy {arm.policy[:8]}" if arm.policy else "no policy passed its gate"
            lines.append(f"{member}, {arm.name}: {word} the best rule, {ratio} ({trained})")
    return lines


def picture(outcome: Outcome, path: Path) -> None:
    """Draw mean completion times with intervals, the federation's traffic and learning curves."""
    figure, axes = plt.subplots(1, 3, figsize=(15, 4.6), constrained_layout=True)
    _draw_arms(axes[0], outcome)
    _draw_rounds(axes[1], outcome)
    _draw_curves(axes[2], outcome)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_arms(axis: Any, outcome: Outcome) -> None:
    shown = [name for name in ARMS if name != BASELINE]
    for place, arms in enumerate(outcome.arms.values()):
        for offset, name in enumerate(shown):
            ratio = next(arm.against_baseline for arm in arms if arm.name == name)
            if ratio is None:
                continue
            x = place + (offset - 1.5) * 0.21
            axis.bar(
                x, 100 * ratio.mean, 0.19, color=COLOURS[name], label=name if place == 0 else None
            )
            axis.errorbar(
                x,
                100 * ratio.mean,
                [[100 * (ratio.mean - ratio.low)], [100 * (ratio.high - ratio.mean)]],
                color="#333333",
                capsize=3,
            )
            axis.text(x, 2, f"{100 * (ratio.mean - 1):+.0f}", ha="center", color="white", size=8)
        axis.set_xticks(range(len(outcome.arms)), list(outcome.arms))
    axis.axhline(100, color=COLOURS[BASELINE], linestyle="--", linewidth=1)
    axis.set_ylabel("mean completion time, % of LeastAllocated")
    axis.set_title("Jobs that no agent has seen (95 % intervals)")
    axis.legend(frameon=False, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.08))


def _draw_rounds(axis: Any, outcome: Outcome) -> None:
    finished = [r for r in outcome.rounds if r.get("finished")]
    numbers = [r["number"] for r in finished]
    axis.plot(numbers, [r["bytes_in"] / 1e3 for r in finished], color="#2e9e6b", marker="o", ms=3)
    axis.plot(numbers, [r["bytes_out"] / 1e3 for r in finished], color="#5b8def", marker="o", ms=3)
    if numbers:
        last = finished[-1]
        axis.annotate(
            "up, INT8", (numbers[-1], last["bytes_in"] / 1e3), (5, 0), textcoords="offset points"
        )
        axis.annotate(
            "down", (numbers[-1], last["bytes_out"] / 1e3), (5, 0), textcoords="offset points"
        )
        axis.set_xlim(numbers[0] - 0.5, numbers[-1] + max(2.0, 0.15 * len(numbers)))
    axis.set_ylim(bottom=0)
    axis.set_xlabel("federation round")
    axis.set_ylabel("kB, all members")
    axis.set_title("Traffic of the federation")


def _draw_curves(axis: Any, outcome: Outcome) -> None:
    colours = ("#5b8def", "#e0a030", "#2e9e6b")
    for colour, (member, points) in zip(colours, outcome.curves.items(), strict=False):
        if len(points) < SMOOTH:
            continue
        values = np.array([value for _, value in points])
        smooth = np.convolve(values, np.ones(SMOOTH) / SMOOTH, "valid")
        times = [time - points[0][0] for time, _ in points[SMOOTH - 1 :]]
        axis.plot(times, smooth, color=colour, label=member)
    if axis.lines:
        axis.legend(frameon=False, loc="lower right")
    axis.set_xlabel("seconds")
    axis.set_ylabel(f"mean reward, running mean of {SMOOTH} points")
    axis.set_title("Learning")


def write_json(outcome: Outcome, path: Path) -> None:
    """Write everything as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(dataclasses.asdict(outcome), indent=1, default=str))


def aggregate(outcome: Outcome) -> str:
    """One line on the arms over all members: how many differ, and in which direction."""
    better = worse = 0
    for arms in outcome.arms.values():
        for arm in arms:
            if arm.name in (ALONE, FEDERATED) and arm.against_rule is not None:
                better += arm.against_rule.high < 1.0
                worse += arm.against_rule.low > 1.0
    total = 2 * len(outcome.arms)
    return (
        f"Of {total} agents {better} beat the rule that they start from, {worse} lose to it, "
        f"{total - better - worse} cannot be told from it ({RULE}: {outcome.windows} windows each)."
    )
