"""``fedsched benchmark latency``: what a prioritize answer costs while a learner trains.

Mounted by ``agent.benchmark``. The extender and a server of the same kind that answers at once run
in processes of their own and are asked in turn, so that whatever else the machine does hits both
alike; the ratio of the two is what counts, not the milliseconds of one machine.
"""

import asyncio
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import numpy as np
import typer
from aiohttp import web
from rich.console import Console
from rich.table import Table

from agent.cluster.gpus import sheet
from agent.cluster.records import Node, Pod
from agent.cluster.state import ClusterState
from agent.journal import Journal
from agent.scheduling.extender import Extender
from agent.scheduling.guard import LivePolicy
from agent.scheduling.metrics import Metrics
from agent.scheduling.recorder import Recorder
from agent.scheduling.serve import warm_up
from agent.settings import ServeSettings
from common.features import FEATURES_VERSION
from common.policy import initial_arrays
from common.weights import save

MODELS = ("k80", "p100", "v100")
PODS = 50
"""Different pods that are asked about in turn."""
START_SECONDS = 300.0


def _request(number: int, candidates: int) -> bytes:
    """An ExtenderArgs with that many node names."""
    pod = {
        "metadata": {
            "name": f"pod-{number}",
            "uid": f"uid-{number}",
            "labels": {"fedsched.io/job-type": f"type-{number % 5}"},
        },
        "spec": {"containers": [{"resources": {"requests": {"cpu": "1", "nvidia.com/gpu": "1"}}}]},
    }
    names = [f"node-{n}" for n in range(candidates)]
    return json.dumps({"Pod": pod, "Nodes": None, "NodeNames": names}).encode()


def _extender(folder: Path, candidates: int) -> web.Application:
    """The real extender with a learned policy, on nodes that run two pods each."""
    settings = ServeSettings(budget_seconds=10.0)  # measure slow answers too
    save(
        folder / "policy.safetensors",
        initial_arrays(),
        {"version": "benchmark", "features_version": str(FEATURES_VERSION)},
    )
    warm_up(settings.rule)
    metrics = Metrics()
    policy = LivePolicy(folder / "policy.safetensors", settings, metrics)
    policy.poll()
    recorder = Recorder(Journal(folder / "journal"), metrics, "benchmark")
    state = ClusterState(clock=time.time, emit=recorder.event, spec=sheet)
    state.replace_nodes(
        Node(
            name=f"node-{n}",
            cpu=64.0,
            memory=256.0,
            gpus=8,
            gpu_model=MODELS[n % len(MODELS)],
            gpu_memory=16.0,
        )
        for n in range(candidates)
    )
    for number in range(2 * candidates):
        state.apply_pod(
            Pod(
                uid=f"running-{number}",
                name=f"running-{number}",
                job_type=f"type-{number % 5}",
                gpus=2,
                node=f"node-{number % candidates}",
                phase="Running",
            )
        )
    return Extender(state, policy, recorder, settings, metrics, fresh=lambda: True).app()


def _baseline(_: Path, candidates: int) -> web.Application:
    """The same kind of server, with an answer of the same size ready."""
    names = (f"node-{n}" for n in range(candidates))
    answer = json.dumps([{"Host": name, "Score": 5} for name in names]).encode()

    async def prioritize(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=answer, content_type="application/json")

    app = web.Application(client_max_size=1 << 28)
    app.router.add_post("/prioritize", prioritize)
    return app


def _serve(
    make: Callable[[Path, int], web.Application], folder: Path, candidates: int, port: Connection
) -> None:
    async def run() -> None:
        runner = web.AppRunner(make(folder, candidates), access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(run())


def _train(ready: Connection) -> None:
    """A learner's load: gradient steps on a network of the scorer's form, for ever."""
    import torch

    torch.set_num_threads(1)
    from common.features import FEATURE_COUNT
    from common.policy import HIDDEN

    net = torch.nn.Sequential(
        torch.nn.Linear(FEATURE_COUNT, HIDDEN),
        torch.nn.ReLU(),
        torch.nn.Linear(HIDDEN, HIDDEN),
        torch.nn.ReLU(),
        torch.nn.Linear(HIDDEN, 1),
    )
    optimiser = torch.optim.Adam(net.parameters())
    x = torch.randn(4096, FEATURE_COUNT)
    ready.send(True)
    while True:
        optimiser.zero_grad()
        net(x).square().mean().backward()
        optimiser.step()


async def _measure(ports: list[int], bodies: list[bytes], requests: int) -> list[list[float]]:
    """Seconds of each answer by server; the two are asked in turn, each first every other time."""
    seconds: list[list[float]] = [[], []]
    async with aiohttp.ClientSession() as session:
        for turn in range(-20, requests):
            for which in (0, 1) if turn % 2 else (1, 0):
                url = f"http://127.0.0.1:{ports[which]}/prioritize"
                began = time.perf_counter()
                async with session.post(url, data=bodies[turn % len(bodies)]) as answer:
                    scores = await answer.read()
                if turn >= 0:
                    seconds[which].append(time.perf_counter() - began)
                if answer.status != 200 or len(scores) < 100:
                    raise RuntimeError(f"no scores came back: HTTP {answer.status} {scores[:80]!r}")
    return seconds


def measure(requests: int = 500, candidates: int = 500, training: bool = True) -> dict[str, float]:
    """p50 and p99 of both servers in ms, and their ratios (extender / answering at once)."""
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))

        def start(target: Callable[..., None], *arguments: Any) -> Any:
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=target, args=(*arguments, there), daemon=True)
            process.start()
            stack.callback(process.join)
            stack.callback(process.terminate)
            there.close()
            if not here.poll(START_SECONDS):
                raise RuntimeError(f"{target.__name__} did not start in {START_SECONDS:g} s")
            try:
                return here.recv()
            except EOFError:
                raise RuntimeError(f"{target.__name__} ended at its start; see above") from None

        ports = [start(_serve, make, folder, candidates) for make in (_extender, _baseline)]
        if training:
            start(_train)
        bodies = [_request(number, candidates) for number in range(PODS)]
        ours, plain = asyncio.run(_measure(ports, bodies, requests))
    result: dict[str, float] = {"requests": requests, "candidates": candidates}
    for percent in (50, 99):
        a, b = float(np.percentile(ours, percent)), float(np.percentile(plain, percent))
        result |= {
            f"extender_p{percent}_ms": 1e3 * a,
            f"at_once_p{percent}_ms": 1e3 * b,
            f"p{percent}_ratio": a / b,
        }
    return result


def latency(
    requests: Annotated[int, typer.Option(min=10, help="Requests to each server.")] = 500,
    candidates: Annotated[int, typer.Option(min=2, help="Nodes in each request.")] = 500,
    training: Annotated[bool, typer.Option(help="Train in another process meanwhile.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Time a prioritize answer against a server of the same kind that answers at once."""
    found = measure(requests, candidates, training)
    if as_json:
        typer.echo(json.dumps(found))
        return
    load = "a learner trains" if training else "nothing trains"
    table = Table(title=f"prioritize, {candidates} candidates, {requests} requests, {load}")
    for column in ("", "extender", "answers at once", "ratio"):
        table.add_column(column, justify="right" if column else "left")
    for p in ("p50", "p99"):
        ours, plain = found[f"extender_{p}_ms"], found[f"at_once_{p}_ms"]
        table.add_row(p, f"{ours:.2f} ms", f"{plain:.2f} ms", f"{found[f'{p}_ratio']:.2f}")
    Console().print(table)
