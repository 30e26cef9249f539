"""The course of a demo, whatever its clusters are: live part, judgement, tables; used by both."""

import tempfile
import time
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape

from agent.simulator.hardware import load_speeds
from agent.simulator.tables import TraceError
from examples.laptop import report
from examples.laptop.display import Display
from examples.laptop.evaluation import ALONE, FEDERATED, evaluate
from examples.laptop.federation import Federation, Options
from examples.processes import ExampleError, StoppedError, Supervisor, stoppable

Seconds = Annotated[float, typer.Option(min=20, help="How long the live clusters take, about.")]
JobCount = Annotated[int, typer.Option(min=20, max=300, help="Jobs that each live cluster plays.")]
Algorithm = Annotated[Literal["ppo", "dqn"], typer.Option(help="How agents learn.")]
Output = Annotated[Path, typer.Option("--out", help="Folder for the picture, logs and states.")]
JsonFile = Annotated[
    Path | None, typer.Option("--json", help="Also write all figures to this file.")
]
DashboardPort = Annotated[
    int, typer.Option(min=0, max=65535, help="Port of the dashboard; 0 takes a free one.")
]
Rounds = Annotated[
    int,
    typer.Option(
        min=1, help="Rounds of two and more members to wait for, two minutes at most, at the end."
    ),
]
Windows = Annotated[
    int, typer.Option(min=2, help="Windows of unseen jobs that each policy is judged on.")
]


def console() -> Console:
    """The terminal, or a log in which tables keep their columns."""
    found = Console()
    return found if found.is_terminal else Console(width=130)


def prepare(output: Path, json_file: Path | None) -> Path:
    """Make the folders now, so that no figure is lost at the end for want of one.

    Returns the folder of this run. Raises ExampleError where something cannot be written.
    """
    try:
        run = Path(tempfile.mkdtemp(prefix="run-", dir=made(output))).resolve()
        if json_file is not None:
            new = not made(json_file.parent).joinpath(json_file.name).exists()
            with json_file.open("a"):  # what an earlier run wrote stays until this one ends
                pass
            if new:
                json_file.unlink()
    except OSError as error:
        raise ExampleError(
            f"{error.filename or output} cannot be written ({error.strerror}); "
            "name another place with --out or --json"
        ) from error
    return run


def made(folder: Path) -> Path:
    """The folder, made where it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def demonstrate(kind: type[Federation], options: Options, console: Console) -> int:
    """Run a demo from its folders to its tables; whatever happens, leave no process behind.

    Returns the exit status: 0, 1 where it could not go on, 130 where a signal stopped it.
    """
    supervisor = Supervisor(say=lambda text: console.print(f"[yellow]![/yellow] {escape(text)}"))
    status = 0
    run: Path | None = None
    try:
        run = prepare(options.output, options.json_file)
        with stoppable(supervisor):
            federation = kind(supervisor, run, load_speeds(), options)
            try:
                _run(federation, options, console)
            finally:
                federation.close()
    except StoppedError as signalled:
        console.print(f"\nStopped by {signalled}.")
        status = 130
    except (ExampleError, TraceError, ValueError, OSError) as error:
        console.print(f"[red]error:[/red] {escape(str(error))}", highlight=False)
        status = 1
    if run is not None:
        console.print(f"Everything that was started has ended. Logs and states: {run}")
    return status


def _run(federation: Federation, options: Options, console: Console) -> None:
    console.print("Enrolling three members and starting their processes …")
    federation.start(console.print)
    console.print(f"[bold]Dashboard: {federation.dashboard}[/bold]  (while the demo runs)")
    with Display(console, federation, options.seconds) as display:
        while not federation.over:
            federation.watch()
            display.show(federation.poll())
            time.sleep(0.5)
        display.show(federation.poll())
    live, rounds, curves = federation.finish()
    console.print("The clusters are done. Judging what was learned on jobs that no agent saw …")
    arms = {}
    with console.status("") as shown:
        for member in federation.members:
            done = 0

            def tick(name: str = member.name) -> None:
                nonlocal done
                done += 1
                federation.supervisor.check()
                shown.update(f"{name}: window {done} of {options.windows}")

            states = {
                FEDERATED: federation.run / member.name,
                ALONE: federation.run / f"{member.name}-alone",
            }
            arms[member.name] = evaluate(
                member,
                states,
                federation.played[member.name],
                federation.speeds,
                tick,
                windows=options.windows,
            )
    outcome = report.Outcome(
        arms=arms, live=live, rounds=rounds, curves=curves, windows=options.windows
    )
    _report(outcome, options, console)


def _report(outcome: report.Outcome, options: Options, console: Console) -> None:
    console.print(report.live_table(outcome))
    console.print(report.held_out_table(outcome))
    for line in report.verdict(outcome):
        console.print(line, highlight=False)
    console.print(report.aggregate(outcome), highlight=False)
    rounds = outcome.rounds
    finished = sum(1 for r in rounds if r.get("finished"))
    traffic = sum(r["bytes_in"] for r in rounds) / 1e3, sum(r["bytes_out"] for r in rounds) / 1e3
    console.print(
        f"{finished} federation rounds; {traffic[0]:.0f} kB up, {traffic[1]:.0f} kB down in all."
    )
    report.picture(outcome, options.output / "demo.png")
    console.print(f"Picture: {options.output / 'demo.png'}")
    if options.json_file is not None:
        report.write_json(outcome, options.json_file)
        console.print(f"Figures: {options.json_file}")
