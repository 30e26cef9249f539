"""The node emulator as a process: the lab's demo and tests run it beside a real control plane.

``python -m examples.lab.emulator --config emulator.yaml``. It serves what a display asks
(``/fedsched/progress``), lets a waiting clock go (``/fedsched/start``), and what Prometheus scrapes
(``/metrics/…``, see exporter.py).
"""

import asyncio
import contextlib
import logging
from pathlib import Path
from typing import Annotated

import typer
from aiohttp import web

from agent.cluster.access import Access, AccessError
from agent.cluster.kubernetes import ApiError
from agent.settings import KubernetesSettings
from agent.simulator.cluster import run_command, stopping, write_ready, write_result
from agent.simulator.store import Json
from examples.lab.emulated_cluster import EmulatedCluster
from examples.lab.emulator_settings import EmulatorSettings, load_settings
from examples.lab.exporter import Exporter

log = logging.getLogger(__name__)
PROGRESS, START = "/fedsched/progress", "/fedsched/start"
FLUSH_SECONDS = 20.0
"""How long what is left to write may take at the end."""


def application(cluster: EmulatedCluster, exporter: Exporter) -> web.Application:
    """The HTTP face of one emulated cluster."""

    async def show(_: web.Request) -> web.Response:
        return web.json_response(cluster.progress())

    async def start(_: web.Request) -> web.Response:
        cluster.clock.start()
        return web.json_response(cluster.progress())

    async def healthy(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    app = web.Application()
    app.router.add_get("/healthz", healthy)
    app.router.add_get(PROGRESS, show)
    app.router.add_post(START, start)
    exporter.add_routes(app.router)
    return app


async def emulate(
    settings: EmulatorSettings, *, result: Path | None = None, ready_file: Path | None = None
) -> Json:
    """Emulate until the jobs are over, or SIGTERM or SIGINT, and return the result.

    result: where to write it as JSON. ready_file: gets pid, port and URL once the nodes are there
    and the port answers. Both are replaced atomically. Raises AccessError and ApiError where the
    API server cannot be used, OSError where the port is taken.
    """
    kubernetes = KubernetesSettings(kubeconfig=settings.kubeconfig, in_cluster="never")
    with contextlib.closing(Access(kubernetes)) as access, stopping() as stop:
        async with access.session() as session:
            cluster = EmulatedCluster(settings, session, access.url)
            exporter = Exporter(cluster)
            runner = web.AppRunner(
                application(cluster, exporter), access_log=None, shutdown_timeout=1.0
            )
            await runner.setup()
            try:
                await web.TCPSite(runner, settings.host, settings.port).start()
                port = int(runner.addresses[0][1])
                life = asyncio.create_task(_live(cluster, port, ready_file))
                outcome = await _see_out(cluster, life, exporter, stop)
                write_result(result, outcome)
                if not outcome["interrupted"]:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(settings.linger_seconds):
                            await stop.wait()
                return outcome
            finally:
                cluster.jobs.close()
                await cluster.writes.close()
                await runner.cleanup()


async def _live(cluster: EmulatedCluster, port: int, ready_file: Path | None) -> None:
    await cluster.prepare()
    url = f"http://{cluster.settings.host}:{port}"
    write_ready(ready_file, url, port)
    log.info("%s: %d nodes emulated; %s", cluster.settings.name, len(cluster.mix), url)
    await cluster.run()


async def _see_out(
    cluster: EmulatedCluster, life: asyncio.Task[None], exporter: Exporter, stop: asyncio.Event
) -> Json:
    """The result, once the jobs are over or ``stop`` is set. Raises what something died of."""
    tasks = (life, asyncio.create_task(exporter.run()), asyncio.create_task(_until(stop)))
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        if life in done and not await cluster.writes.flush(FLUSH_SECONDS):
            log.error("what is not written yet: that of %d jobs", cluster.writes.waiting)
        return cluster.result(interrupted=life not in done)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _until(stop: asyncio.Event) -> None:
    await stop.wait()


def main(
    config: Annotated[Path, typer.Option(help="YAML file of settings.")],
    result: Annotated[Path, typer.Option(help="Where to write the result, JSON.")] = Path(
        "result.json"
    ),
    ready_file: Annotated[Path | None, typer.Option(help="Gets pid and port, JSON.")] = None,
) -> None:
    """Emulate nodes and jobs on a real cluster."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")

    def run() -> Json:
        return asyncio.run(emulate(load_settings(config), result=result, ready_file=ready_file))

    run_command(run, result, AccessError, ApiError)


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    app.command()(main)
    app()
