"""``make demo``: starts the federation, shows it while it runs, and reports on it at the end."""

import contextlib
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape

from agent.simulator.hardware import load_speeds
from agent.simulator.tables import TraceError
from examples.laptop import report
from examples.laptop.display import Display
from examples.laptop.evaluation import ALONE, FEDERATED, WINDOWS, evaluate
from examples.laptop.federation import LEAST_ROUNDS, Federation
from examples.laptop.members import MEMBERS
from examples.laptop.processes import DemoError, StoppedError, Supervisor

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
console = Console()
if not console.is_terminal:
    console = Console(width=110)  # tables in a log keep their columns


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def stoppable(supervisor: Supervisor) -> Iterator[None]:
    """Turn the first signal into :class:`StoppedError`; end all processes, however it ends.

    Further signals are passed over: an impatient second Ctrl-C must not leave processes behind.
    The interpreter swallows what is raised inside some of its callbacks, so the supervisor is told
    as well and raises it at its next step.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        del frame
        if not supervisor.interrupted:
            supervisor.interrupt(signal.Signals(number).name)

    def pass_over() -> None:
        for name in SIGNALS:
            signal.signal(name, signal.SIG_IGN)

    before = {name: signal.signal(name, stop) for name in SIGNALS}
    try:
        yield
    finally:
        pass_over()
        supervisor.stop()
        for name, handler in before.items():
            signal.signal(name, handler)


def prepare(output: Path, json_file: Path | None) -> Path:
    """Make the folders now, so that no figure is lost at the end for want of one.

    Returns the folder of this run. Raises DemoError where something cannot be written.
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
        raise DemoError(
            f"{error.filename or output} cannot be written ({error.strerror}); "
            "name another place with --out or --json"
        ) from error
    return run


def made(folder: Path) -> Path:
    """The folder, made where it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@app.command()
def demo(
    seconds: Annotated[
        float, typer.Option(min=20, help="How long the live clusters take, about.")
    ] = 150.0,
    jobs: Annotated[
        int, typer.Option(min=20, max=300, help="Jobs that each live cluster plays.")
    ] = 240,
    algorithm: Annotated[Literal["ppo", "dqn"], typer.Option(help="How agents learn.")] = "ppo",
    output: Annotated[
        Path, typer.Option("--out", help="Folder for the picture, logs and states.")
    ] = Path("demo-out"),
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write all figures to this file.")
    ] = None,
    dashboard_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the dashboard; 0 takes a free one.")
    ] = 0,
    rounds: Annotated[
        int,
        typer.Option(min=1, help="Federation rounds to wait for, a minute at most, at the end."),
    ] = LEAST_ROUNDS,
    windows: Annotated[
        int, typer.Option(min=2, help="Windows of unseen jobs that each policy is judged on.")
    ] = WINDOWS,
) -> None:
    """A whole federation on this machine: a hub and three unlike simulated clusters.

    Each cluster's pods are placed by its own agent, which learns from what becomes of them; the
    hub blends what the agents learned over mutually authenticated gRPC. No Kubernetes is needed.
    FEDSCHED_TRACES names a folder of full traces to use instead of the shipped slices.
    """
    supervisor = Supervisor(say=lambda text: console.print(f"[yellow]![/yellow] {escape(text)}"))
    status = 0
    run: Path | None = None
    try:
        run = prepare(output, json_file)
        with stoppable(supervisor):
            speeds = load_speeds()
            federation = Federation(
                supervisor, run, speeds, seconds, jobs, algorithm, dashboard_port, rounds
            )
            _run(federation, seconds, windows, output, json_file)
    except StoppedError as signalled:
        console.print(f"\nStopped by {signalled}.")
        status = 130
    except (DemoError, TraceError, ValueError, OSError) as error:
        console.print(f"[red]error:[/red] {escape(str(error))}", highlight=False)
        status = 1
    if run is not None:
        console.print(f"Everything that was started has ended. Logs and states: {run}")
    raise typer.Exit(status)


def _run(
    federation: Federation, seconds: float, windows: int, output: Path, json_file: Path | None
) -> None:
    console.print("Enrolling three members and starting their processes …")
    federation.start(console.print)
    console.print(f"[bold]Dashboard: {federation.dashboard}[/bold]  (while the demo runs)")
    with Display(console, federation, seconds) as display:
        while not federation.over:
            federation.supervisor.watch()
            display.show(federation.poll())
            time.sleep(0.5)
        display.show(federation.poll())
    live, rounds, curves = federation.finish()
    console.print("The clusters are done. Judging what was learned on jobs that no agent saw …")
    arms = {}
    with console.status("") as shown:
        for member in MEMBERS:
            done = 0

            def tick(name: str = member.name) -> None:
                nonlocal done
                done += 1
                federation.supervisor.check()
                shown.update(f"{name}: window {done} of {windows}")

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
                windows=windows,
            )
    outcome = report.Outcome(arms=arms, live=live, rounds=rounds, curves=curves, windows=windows)
    console.print(report.live_table(outcome))
    console.print(report.held_out_table(outcome))
    for line in report.verdict(outcome):
        console.print(line, highlight=False)
    console.print(report.aggregate(outcome), highlight=False)
    finished = sum(1 for r in rounds if r.get("finished"))
    traffic = sum(r["bytes_in"] for r in rounds) / 1e3, sum(r["bytes_out"] for r in rounds) / 1e3
    console.print(
        f"{finished} federation rounds; {traffic[0]:.0f} kB up, {traffic[1]:.0f} kB down in all."
    )
    report.picture(outcome, output / "demo.png")
    console.print(f"Picture: {output / 'demo.png'}")
    if json_file is not None:
        report.write_json(outcome, json_file)
        console.print(f"Figures: {json_file}")


if __name__ == "__main__":
    sys.exit(app())
