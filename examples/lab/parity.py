"""``python -m examples.lab parity``: whether the lab tells the same story as the simulator."""

import json
import tempfile
from pathlib import Path
from typing import Annotated, get_args

import numpy as np
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from agent.settings import RuleName
from agent.simulator.cluster_settings import NodeSettings, WorkloadSettings
from agent.simulator.tables import TraceError
from examples.lab.comparison import BASELINE, HOUR, TOLERANCE, Comparison, Trial, compare
from examples.lab.control_plane import ControlPlane
from examples.processes import ExampleError

SHOWN = 8
"""Jobs in the table of the largest differences."""
NODES = {"k80": 3, "p100": 3, "v100": 3}
_NO_KILLS = 1e-6
"""Share of the jobs whose memory passes what they asked for: as good as none."""


def trial(
    *,
    rule: str = "hrrn-eft",
    jobs: int = 150,
    load: float = 0.9,
    hours: float = 12.0,
    seconds: float = 240.0,
    nodes: dict[str, int] | None = None,
) -> Trial:
    """A trial on Philly's jobs, cut to ``hours`` each so that all of them come to their end."""
    return Trial(
        rule=rule,
        nodes=NodeSettings(counts=nodes or NODES),
        workload=WorkloadSettings(jobs=jobs, load=load, longest=hours * HOUR, exceed=_NO_KILLS),
        seconds=seconds,
    )


def parity(
    rule: Annotated[str, typer.Option(help="The policy, a rule by its name.")] = "hrrn-eft",
    jobs: Annotated[int, typer.Option(min=2, help="Jobs of the trace.")] = 150,
    load: Annotated[float, typer.Option(help="Offered load; 1 keeps all GPUs busy.")] = 0.9,
    hours: Annotated[float, typer.Option(help="Longer jobs are cut to this.")] = 12.0,
    seconds: Annotated[
        float, typer.Option(help="Wall seconds for the lab's run; sets the scale of its clock.")
    ] = 240.0,
    output: Annotated[
        Path | None, typer.Option("--json", help="Write all figures to this file.")
    ] = None,
) -> None:
    """Run one policy on the same jobs in the simulator and on a real cluster, and compare.

    Status 0 where the mean completion times agree within 10 %, 1 where they do not, 2 where the
    lab cannot be run. Scheduling takes wall time, and the lab's clock runs fast: the fewer seconds
    it gets, the more of the jobs' time is scheduling.
    """
    console = Console()
    if not console.is_terminal:
        console = Console(width=110)
    if rule not in get_args(RuleName):
        raise typer.BadParameter(f"{rule!r} is none of {', '.join(get_args(RuleName))}")
    try:
        found = _run(trial(rule=rule, jobs=jobs, load=load, hours=hours, seconds=seconds), console)
        if output is not None:
            output.write_text(json.dumps(found.as_json(), indent=1, allow_nan=False))
    except (ExampleError, TraceError, ValueError, OSError) as error:
        console.print(f"error: {error}", style="red", markup=False, highlight=False)
        raise typer.Exit(2) from error
    show(found, console)
    raise typer.Exit(0 if found.agrees else 1)


def _run(chosen: Trial, console: Console) -> Comparison:
    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False)

    with tempfile.TemporaryDirectory(prefix="fedsched-parity-") as name:
        folder = Path(name)
        say("Starting etcd, kube-apiserver, kube-controller-manager and kwok …")
        with ControlPlane(folder / "lab") as cluster:
            return compare(chosen, cluster, folder, say)


def show(found: Comparison, console: Console) -> None:
    """Print both sides, the jobs that differ most, and the verdict."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("", "mean, h", "p50, h", "p99, h", "to simulator"):
        table.add_column(heading, justify="left" if not heading else "right")
    rule, reference = found.trial.rule, found.simulated
    for name, times in (
        (f"simulator, {rule}", reference.completion),
        (f"lab, {rule}", found.completion),
        (f"simulator with the lab's delays, {rule}", found.delayed.completion),
        (f"simulator, {BASELINE}", found.baseline.completion),
    ):
        figures = [f"{np.mean(times) / HOUR:.2f}"]
        figures += [f"{np.percentile(times, p) / HOUR:.2f}" for p in (50, 99)]
        change = float(np.mean(times)) / reference.mean - 1.0
        table.add_row(name, *figures, f"{100 * change:+.1f} %" if change else "–")
    console.print(table)
    console.print(differences(found))
    wall = found.overhead / found.scale * 1e3
    console.print(
        f"Scheduling, from the event to the binding: {np.nanmedian(wall):.0f} ms in the median, "
        f"{np.nanpercentile(wall, 99):.0f} ms at p99 of the wall's clock; at {found.scale:.0f}:1 "
        f"that is {100 * found.overhead_share:.1f} % of the jobs' time.",
        highlight=False,
    )
    verdict = "agree" if found.agrees else "DO NOT agree"
    console.print(
        f"The mean completion times {verdict} within {100 * TOLERANCE:.0f} %: they differ by "
        f"{100 * found.difference:+.1f} %.",
        style="green" if found.agrees else "red",
        highlight=False,
    )
    if not found.agrees:
        console.print(
            f"With each job starting as late as in the lab, the simulator itself differs by "
            f"{100 * (found.delayed.mean / found.simulated.mean - 1.0):+.1f} %. Where scheduling "
            "explains much of it, end what else runs on this machine, or give the lab more "
            "--seconds.",
            highlight=False,
        )


def differences(found: Comparison) -> Table:
    """The jobs whose completion times differ most."""
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, title="Largest differences", title_justify="left"
    )
    for heading in ("job", "simulator, h", "lab, h", "difference, h", "of it scheduling, h"):
        table.add_column(heading, justify="right")
    apart = found.completion - found.simulated.completion
    for job in np.argsort(-np.abs(apart))[:SHOWN].tolist():
        values = (found.simulated.completion, found.completion, apart, found.overhead)
        table.add_row(str(job), *(f"{column[job] / HOUR:.2f}" for column in values))
    return table
