"""The embedded cluster as a process: a small Kubernetes cluster as seen from outside.

``fedsched agent simulate-cluster`` and the demo run it, and so does
``python -m agent.simulator.cluster``. The lab's node emulator starts and ends in the same way.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from aiohttp import web

from agent.settings import SettingsError
from agent.simulator.cluster_settings import ClusterSettings, load_settings
from agent.simulator.embedded import EmbeddedCluster
from agent.simulator.store import Json
from agent.simulator.tables import TraceError
from common.weights import write_atomic

LOG = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def serve(cluster: EmbeddedCluster) -> AsyncIterator[int]:
    """Serve the cluster's API meanwhile; gives the port. Errors: OSError where it is taken."""
    runner = web.AppRunner(cluster.api.application(), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, cluster.settings.host, cluster.settings.port)
        await site.start()
        yield int(runner.addresses[0][1])
    finally:
        cluster.store.close()
        await runner.cleanup()


@contextlib.contextmanager
def stopping() -> Iterator[asyncio.Event]:
    """An event that SIGTERM and SIGINT set in the running loop; within, they do nothing else."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGINT)
    for number in signals:
        loop.add_signal_handler(number, stop.set)
    try:
        yield stop
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


def write_ready(path: Path | None, url: str, port: int) -> None:
    """Tell who waits for ``path`` that ``url`` answers, and by which process."""
    if path is not None:
        write_atomic(path, json.dumps({"pid": os.getpid(), "port": port, "url": url}).encode())


def write_result(path: Path | None, outcome: Json) -> None:
    """Write the result for people and programs to read; no file is ever half written."""
    if path is not None:
        write_atomic(path, json.dumps(outcome, allow_nan=False, indent=1).encode())


def run_command(run: Callable[[], Json], result: Path, *errors: type[Exception]) -> None:
    """``run`` as a command that says in a line how it ended.

    What is wrong with settings, traces or ports, and ``errors``, exits with 2 and that line.
    """
    wrong: tuple[type[Exception], ...] = (SettingsError, TraceError, ValueError, OSError, *errors)
    try:
        outcome = run()
    except wrong as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    how = "interrupted" if outcome["interrupted"] else "done"
    typer.echo(f"{how}: {outcome['finished']} of {outcome['jobs']} jobs finished; see {result}")


async def run_cluster(
    settings: ClusterSettings, *, result: Path | None = None, ready_file: Path | None = None
) -> Json:
    """Run one embedded cluster to its end, or to SIGTERM or SIGINT, and return its result.

    result: where to write it as JSON. ready_file: where to write pid, port and URL once the API
    answers. Both are replaced atomically.
    """
    cluster = EmbeddedCluster(settings)
    with stopping() as stop:
        async with serve(cluster) as port:
            url = f"http://{settings.host}:{port}"
            write_ready(ready_file, url, port)
            LOG.info("%s: API at %s", settings.name, url)
            running = asyncio.create_task(cluster.run())
            stopped = asyncio.create_task(stop.wait())
            await asyncio.wait((running, stopped), return_when=asyncio.FIRST_COMPLETED)
            interrupted = not running.done()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            outcome = cluster.result(interrupted=interrupted)
            write_result(result, outcome)
            if not running.cancelled():
                running.result()
            if not interrupted and settings.linger_seconds > 0.0:
                await asyncio.wait((stopped,), timeout=settings.linger_seconds)
            stopped.cancel()
            return outcome


def simulate_cluster(
    config: Annotated[Path | None, typer.Option(help="YAML file of settings.")] = None,
    result: Annotated[Path, typer.Option(help="Where to write the result, JSON.")] = Path(
        "result.json"
    ),
    ready_file: Annotated[Path | None, typer.Option(help="Gets pid and port, JSON.")] = None,
    until: Annotated[float | None, typer.Option(help="End at this cluster second.")] = None,
) -> None:
    """Run an embedded cluster: simulated nodes and jobs behind a Kubernetes API on loopback."""

    def run() -> Json:
        settings = load_settings(config, **({} if until is None else {"until": until}))
        return asyncio.run(run_cluster(settings, result=result, ready_file=ready_file))

    run_command(run, result)


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    app.command()(simulate_cluster)
    app()
