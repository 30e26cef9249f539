"""``make demo``: starts the federation, shows it while it runs, and reports on it at the end."""

import sys
from pathlib import Path

import typer

from examples.laptop import run
from examples.laptop.evaluation import WINDOWS
from examples.laptop.federation import LEAST_ROUNDS, Federation, Options

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def demo(
    seconds: run.Seconds = 150.0,
    jobs: run.JobCount = 240,
    algorithm: run.Algorithm = "ppo",
    output: run.Output = Path("demo-out"),
    json_file: run.JsonFile = None,
    dashboard_port: run.DashboardPort = 0,
    rounds: run.Rounds = LEAST_ROUNDS,
    windows: run.Windows = WINDOWS,
) -> None:
    """A whole federation on this machine: a hub and three unlike simulated clusters.

    Each cluster's pods are placed by its own agent, which learns from what becomes of them; the
    hub blends what the agents learned over mutually authenticated gRPC. No Kubernetes is needed.
    FEDSCHED_TRACES names a folder of full traces to use instead of the shipped slices.
    """
    options = Options(seconds, jobs, algorithm, output, json_file, dashboard_port, rounds, windows)
    raise typer.Exit(run.demonstrate(Federation, options, run.console()))


if __name__ == "__main__":
    sys.exit(app())
