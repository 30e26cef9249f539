"""``fedsched agent``: the commands of one member cluster; mounted by ``common.cli``."""

import asyncio
import logging
import os
from pathlib import Path
from typing import Annotated

import typer

from agent.settings import PREFIX, Settings, SettingsError, load

app = typer.Typer(
    help="One member cluster: answer kube-scheduler, learn, simulate.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
Config = Annotated[
    Path | None,
    typer.Option(help="YAML file of settings; FEDSCHED_AGENT_… variables win over it."),
]
ReadyFile = Annotated[
    Path | None, typer.Option(help="Gets pid and port as JSON once the process is up.")
]
Verbose = Annotated[bool, typer.Option("--verbose", help="Log more.")]


def _begin(config: Path | None, verbose: bool) -> Settings:
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    try:
        return load(config)
    except SettingsError as error:
        raise _failed(error) from error


def _failed(error: Exception) -> typer.Exit:
    typer.echo(f"error: {error}", err=True)
    return typer.Exit(2)


@app.command()
def serve(config: Config = None, ready_file: ReadyFile = None, verbose: Verbose = False) -> None:
    """Answer kube-scheduler's extender calls, and order and defer gated pods."""
    from agent.cluster.access import AccessError
    from agent.lock import LockedError
    from agent.scheduling.serve import serve as run

    settings = _begin(config, verbose)
    try:
        asyncio.run(run(settings, ready_file))
    except (LockedError, AccessError, OSError) as error:
        raise _failed(error) from error


@app.command("lift-gates")
def lift_gates(
    config: Config = None,
    seconds: Annotated[float, typer.Option(help="Give up after this long.", min=0.0)] = 120.0,
    verbose: Verbose = False,
) -> None:
    """Lift every fedsched gate in the cluster: where the agent is gone, or before it goes."""
    from agent.cluster.access import AccessError
    from agent.cluster.kubernetes import ApiError
    from agent.scheduling.lift_gates import run

    settings = _begin(config, verbose)
    try:
        lifted = asyncio.run(run(settings, seconds, typer.echo))
    except TimeoutError as error:
        typer.echo(f"error: gates are left after {seconds:g} s; run it again", err=True)
        raise typer.Exit(1) from error
    except (AccessError, ApiError) as error:
        raise _failed(error) from error
    typer.echo(f"no gate is left; {lifted} were lifted")


@app.command()
def learn(
    config: Config = None,
    ready_file: ReadyFile = None,
    journal: Annotated[
        Path | None,
        typer.Option(help="Read this journal folder instead of the state directory's."),
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Learn from the journal, share with the federation, and write policies for serving."""
    from agent.learning.learn import run

    settings = _begin(config, verbose)
    os.nice(settings.learn.nice)
    try:
        run(settings, ready_file=ready_file, journal=journal)
    except (RuntimeError, OSError, ValueError) as error:
        raise _failed(error) from error


@app.command("simulate-cluster")
def simulate_cluster(
    config: Annotated[Path | None, typer.Option(help="YAML file of settings.")] = None,
    result: Annotated[Path, typer.Option(help="Where to write the result, JSON.")] = Path(
        "result.json"
    ),
    ready_file: ReadyFile = None,
    until: Annotated[float | None, typer.Option(help="End at this cluster second.")] = None,
) -> None:
    """Run an embedded cluster: simulated nodes and jobs behind a Kubernetes API on loopback."""
    from agent.simulator.cluster import simulate_cluster as run

    run(config=config, result=result, ready_file=ready_file, until=until)


@app.command("settings")
def print_settings(
    simulator: Annotated[
        bool, typer.Option("--simulate-cluster", help="Those of simulate-cluster instead.")
    ] = False,
) -> None:
    """Print every setting with its default and its meaning, as a file for --config."""
    from common.documented import documented_yaml

    if simulator:
        from agent.simulator.cluster_settings import ClusterSettings

        typer.echo(documented_yaml(ClusterSettings, ""), nl=False)
    else:
        typer.echo(documented_yaml(Settings, PREFIX), nl=False)
