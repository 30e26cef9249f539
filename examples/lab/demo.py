"""``make demo-kubernetes``: a federation of three real clusters, shown live and reported on."""

from pathlib import Path

import typer

from examples.lab.federation import LabFederation
from examples.laptop import run
from examples.laptop.federation import LEAST_ROUNDS, Options

WINDOWS = 100


def demo(
    seconds: run.Seconds = 150.0,
    jobs: run.JobCount = 120,
    algorithm: run.Algorithm = "ppo",
    output: run.Output = Path("demo-out"),
    json_file: run.JsonFile = None,
    dashboard_port: run.DashboardPort = 0,
    rounds: run.Rounds = LEAST_ROUNDS,
    windows: run.Windows = WINDOWS,
) -> None:
    """A federation of three real Kubernetes clusters on this machine, about six minutes.

    Real API servers, schedulers, controllers and Prometheus; the nodes and what runs on them are
    emulated, trace time going many times faster than the clock. Each cluster's kube-scheduler
    asks its own agent, which has the rights that its chart grants; the hub blends what they learn.
    """
    options = Options(seconds, jobs, algorithm, output, json_file, dashboard_port, rounds, windows)
    raise typer.Exit(run.demonstrate(LabFederation, options, run.console()))
