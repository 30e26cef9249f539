"""``python -m examples.lab scale``: ``agent serve`` beside a cluster of any size, measured.

The cluster is replayed (``examples.lab.stream``), the agent is the real process, and prioritize is
asked from a third process, so that what is timed is the agent and not who asks. What it prints is
about the machine that it runs on; the memory is not.
"""

import asyncio
import json
import random
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from examples.lab.fleet import (
    JOBS,
    RUNNING,
    SUCCEEDED,
    Fleet,
    PodState,
    populate,
)
from examples.lab.served import Agent, Timing, bodies, probe
from examples.lab.stream import StreamServer

LAPSE_SECONDS = 30.0
BATCH = 100
"""Events between two looks at how far the agent has come."""
BEHIND = 2000
"""Events that the agent may be behind before the next ones wait."""


def churn(server: StreamServer, rng: random.Random) -> Iterator[None]:
    """A cluster's life, one event with each step and six of them of pods for two of nodes.

    A running pod reports, ends and is deleted; another of its kind comes and gets its place.
    """
    pods, fleet = server.fleet.pods, server.fleet
    running = [number for number, pod in pods.items() if pod.phase == RUNNING]
    last = max(pods, default=0)
    while running:
        at = rng.randrange(len(running))
        old = running[at]
        kind, place = old % JOBS, pods[old].node
        last += 1 + (kind - last - 1) % JOBS
        server.change_pod(old, steps=pods[old].steps + 1.0)
        yield
        server.change_node(rng.randrange(len(fleet.nodes)))
        yield
        server.change_pod(old, phase=SUCCEEDED, finished=time.time())
        yield
        server.delete_pod(old)
        yield
        server.add_pod(last, PodState(created=time.time(), steps=1.0))
        yield
        server.start_pod(last, place)
        running[at] = last
        yield
        other = running[rng.randrange(len(running))]
        server.change_pod(other, steps=pods[other].steps + 1.0)
        yield
        server.change_node(rng.randrange(len(fleet.nodes)))
        yield


async def measure(
    nodes: int,
    pods: int,
    *,
    events: int,
    rate: int,
    seconds: float,
    candidates: int = 500,
    say: Console | None = None,
) -> dict[str, float]:
    """All figures by name; see :func:`scale` for the arguments."""
    tell = (say or Console(quiet=True)).print
    rng, found = random.Random(0), {"nodes": float(nodes), "pods": float(pods)}
    fleet = Fleet()
    populate(fleet, nodes, pods, now=time.time())
    asked = bodies(fleet, candidates, rng)
    loop = asyncio.get_running_loop()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        pool = stack.enter_context(ProcessPoolExecutor(1, mp_context=get_context("spawn")))
        async with StreamServer(fleet).serving() as server:
            # The pods that prioritize is asked about are never bound here: they lapse soon.
            agent = Agent(folder, server.url, assume_seconds=2.0)
            stack.callback(agent.process.stop)

            def asking(for_seconds: float) -> asyncio.Future[Timing]:
                return loop.run_in_executor(pool, probe, agent.port, asked, for_seconds, 0.01)

            def note(name: str, timing: Timing) -> None:
                found[f"{name}_p50_ms"], found[f"{name}_p99_ms"] = timing.p50_ms, timing.p99_ms
                found[f"{name}_worst_ms"] = timing.worst_ms
                found[f"{name}_answers"] = float(timing.answers)
                found[f"{name}_without_opinion"] = float(timing.without_opinion)

            tell("starting agent serve (kernels are compiled at the first start) …")
            await agent.start()
            began, idle = time.monotonic(), agent.cpu()
            found["start_mib"] = agent.memory()
            tell(f"syncing {nodes:,} nodes and {pods:,} pods …")
            await agent.synced()
            found["sync_seconds"] = time.monotonic() - began
            found["sync_cpu_seconds"] = agent.cpu() - idle
            found["synced_mib"] = agent.memory()
            await asking(0.5)  # warm connections and caches
            tell("asking prioritize in a quiet cluster …")
            note("quiet", await asking(seconds))

            life = churn(server, rng)
            tell(f"asking prioritize at {rate:,} events a second …")
            asks = asking(seconds)
            start, sent = time.monotonic(), 0
            while not asks.done():
                while sent < rate * (time.monotonic() - start):
                    next(life)
                    sent += 1
                await asyncio.sleep(0.01)
            note("busy", await asks)
            found["busy_events_per_second"] = sent / (time.monotonic() - start)

            tell(f"sending {events:,} events as fast as they are taken …")
            begun, cpu, began = await agent.watched("events"), agent.cpu(), time.monotonic()
            got = begun
            for number in range(0, events, BATCH):
                for _ in range(BATCH):
                    next(life)
                await asyncio.sleep(0)
                while number + BATCH - (got - begun) > BEHIND:
                    await asyncio.sleep(0.01)
                    got = await agent.watched("events")
            while got - begun < events:
                await asyncio.sleep(0.01)
                got = await agent.watched("events")
            found["events"] = float(events)
            found["events_per_second"] = events / (time.monotonic() - began)
            found["cpu_us_per_event"] = 1e6 * (agent.cpu() - cpu) / events
            found["after_events_mib"] = agent.memory()
            alive = sum(pod.phase != SUCCEEDED for pod in fleet.pods.values())
            while (counted := await agent.pods()) != alive and time.monotonic() - began < 60.0:
                await asyncio.sleep(0.1)
            found["wrong_pods"] = abs(counted - alive)

            tell("listing anew after a 410 while prioritize is asked …")
            lists, cpu = await agent.watched("lists", resource="pods"), agent.cpu()
            began = time.monotonic()
            asks = asking(seconds)
            server.forget("pods")
            await agent.heard("lists", lists + 1)
            found["relist_seconds"] = time.monotonic() - began
            found["relist_cpu_seconds"] = agent.cpu() - cpu
            note("relist", await asks)
            found["after_relist_mib"] = agent.memory()

            tell("losing all pods while prioritize is asked …")
            fleet.pods.clear()
            asks, began = asking(seconds), time.monotonic()
            server.forget("pods")
            await agent.heard("lists", lists + 2)
            found["empty_seconds"] = time.monotonic() - began
            note("empty", await asks)
            began = time.monotonic()
            while (left := await agent.pods()) and time.monotonic() - began < LAPSE_SECONDS:
                await asyncio.sleep(0.1)
            found["left_pods"] = left
            found["emptied_mib"] = agent.memory()
    return found


def scale(
    nodes: Annotated[int, typer.Option(min=1, help="Nodes; one of four has GPUs.")] = 5000,
    pods: Annotated[int, typer.Option(min=200, help="Pods; one of ten is a GPU job.")] = 100_000,
    events: Annotated[
        int, typer.Option(min=100, help="Events that are sent as fast as they are taken.")
    ] = 100_000,
    rate: Annotated[int, typer.Option(min=1, help="Events a second beside prioritize.")] = 1000,
    seconds: Annotated[float, typer.Option(min=0.5, help="How long each part asks.")] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure memory, sync, events and prioritize of an agent beside a large cluster.

    The cluster is replayed from recorded objects of a real API server; nothing else is needed.
    """
    say = Console(stderr=True)
    found = asyncio.run(measure(nodes, pods, events=events, rate=rate, seconds=seconds, say=say))
    if as_json:
        typer.echo(json.dumps(found))
        return
    console = Console()
    sizes = Table(title=f"agent serve beside {nodes:,} nodes and {pods:,} pods")
    for column in ("", "resident", "time", "CPU"):
        sizes.add_column(column, justify="right" if column else "left")
    sizes.add_row("started", f"{found['start_mib']:.0f} MiB", "", "")
    sizes.add_row(
        "synced",
        f"{found['synced_mib']:.0f} MiB",
        f"{found['sync_seconds']:.1f} s",
        f"{found['sync_cpu_seconds']:.1f} s",
    )
    sizes.add_row(
        f"{events:,} events",
        f"{found['after_events_mib']:.0f} MiB",
        f"{found['events_per_second']:,.0f}/s",
        f"{found['cpu_us_per_event']:.0f} µs each",
    )
    sizes.add_row(
        "listed anew",
        f"{found['after_relist_mib']:.0f} MiB",
        f"{found['relist_seconds']:.1f} s",
        f"{found['relist_cpu_seconds']:.1f} s",
    )
    sizes.add_row(
        "all pods gone", f"{found['emptied_mib']:.0f} MiB", f"{found['empty_seconds']:.1f} s", ""
    )
    console.print(sizes)
    answers = Table(title="prioritize, as the caller sees it")
    for column in ("while", "p50", "p99", "worst", "answers", "without opinion"):
        answers.add_column(column, justify="left" if column == "while" else "right")
    parts = {
        "quiet": "nothing happens",
        "busy": f"{rate:,} events/s",
        "relist": "all pods are listed anew",
        "empty": "all pods go",
    }
    for name, text in parts.items():
        answers.add_row(
            text,
            f"{found[f'{name}_p50_ms']:.1f} ms",
            f"{found[f'{name}_p99_ms']:.1f} ms",
            f"{found[f'{name}_worst_ms']:.1f} ms",
            f"{found[f'{name}_answers']:.0f}",
            f"{found[f'{name}_without_opinion']:.0f}",
        )
    console.print(answers)
