"""``fedsched benchmark latency``: what a prioritize answer costs while a learner trains.

Mounted by ``agent.benchmark.commands``; ``examples.lab.latency`` names a Go extender to compare
with. The extender and one that answers at once are asked in turn, over one connection each, so that
whatever else the machine does hits both alike; the ratio of the two is what counts, not the
milliseconds of one machine.
"""

import asyncio
import json
import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from agent.cluster.gpus import sheet
from agent.cluster.records import Node, Pod
from agent.cluster.state import ClusterState
from agent.journal import Journal
from agent.scheduling.extender import Extender
from agent.scheduling.guard import LivePolicy
from agent.scheduling.http_server import Answer, Routes, listening
from agent.scheduling.metrics import Metrics
from agent.scheduling.recorder import Recorder
from agent.scheduling.serve import warm_up
from agent.settings import LearnSettings, ServeSettings
from common.features import FEATURES_VERSION
from common.policy import initial_arrays
from common.weights import save

MODELS = ("k80", "p100", "v100")
PODS = 50
"""Different pods that are asked about in turn."""
START_SECONDS = 300.0


def _request(number: int, candidates: int) -> bytes:
    """An ExtenderArgs with that many node names, and a pod as an API server fills it in."""
    token = {"serviceAccountToken": {"expirationSeconds": 3607, "path": "token"}}
    pod = {
        "metadata": {
            "name": f"pod-{number}",
            "namespace": "default",
            "uid": f"7b0c6e1e-5b0a-4c7e-9a63-{number:012d}",
            "resourceVersion": str(1000 + number),
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "labels": {"fedsched.io/job-type": f"type-{number % 5}", "app": "train"},
        },
        "spec": {
            "volumes": [
                {"name": "kube-api-access", "projected": {"sources": [token], "defaultMode": 420}}
            ],
            "containers": [
                {
                    "name": "main",
                    "image": "registry.example/train:1",
                    "command": ["python", "train.py"],
                    "env": [{"name": f"VARIABLE_{n}", "value": str(n)} for n in range(8)],
                    "resources": {"requests": {"cpu": "1", "memory": "1Gi", "nvidia.com/gpu": "1"}},
                    "volumeMounts": [
                        {
                            "name": "kube-api-access",
                            "readOnly": True,
                            "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount",
                        }
                    ],
                    "terminationMessagePath": "/dev/termination-log",
                    "terminationMessagePolicy": "File",
                    "imagePullPolicy": "IfNotPresent",
                }
            ],
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 30,
            "dnsPolicy": "ClusterFirst",
            "serviceAccountName": "default",
            "securityContext": {},
            "schedulerName": "fedsched",
            "tolerations": [
                {"key": f"node.kubernetes.io/{state}", "operator": "Exists", "effect": "NoExecute"}
                for state in ("not-ready", "unreachable")
            ],
            "priority": 0,
            "enableServiceLinks": True,
            "preemptionPolicy": "PreemptLowerPriority",
        },
        "status": {"phase": "Pending", "qosClass": "Burstable"},
    }
    names = [f"node-{n}" for n in range(candidates)]
    return json.dumps({"Pod": pod, "Nodes": None, "NodeNames": names}).encode()


def _extender(folder: Path, candidates: int) -> Routes:
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
    return Extender(state, policy, recorder, settings, metrics, fresh=lambda: True).routes()


def _baseline(_: Path, candidates: int) -> Routes:
    """The same kind of server, with an answer of the same size ready."""
    names = (f"node-{n}" for n in range(candidates))
    ready = json.dumps([{"Host": name, "Score": 5} for name in names]).encode()
    return {("POST", "/prioritize"): lambda _: Answer(ready, "application/json")}


def _serve(
    make: Callable[[Path, int], Routes], folder: Path, candidates: int, port: Connection
) -> None:
    async def run() -> None:
        async with listening(make(folder, candidates), "127.0.0.1", 0) as bound:
            port.send(("127.0.0.1", bound))
            await asyncio.Event().wait()

    asyncio.run(run())


def _train(ready: Connection) -> None:
    """A learner's load: gradient steps on a network of the scorer's form, for ever."""
    os.nice(LearnSettings().nice)  # as ``agent learn`` gives way
    import torch

    torch.set_num_threads(1)
    from agent.learning.adam import Adam
    from common.features import FEATURE_COUNT
    from common.policy import HIDDEN

    net = torch.nn.Sequential(
        torch.nn.Linear(FEATURE_COUNT, HIDDEN),
        torch.nn.ReLU(),
        torch.nn.Linear(HIDDEN, HIDDEN),
        torch.nn.ReLU(),
        torch.nn.Linear(HIDDEN, 1),
    )
    optimiser = Adam(net.parameters(), rate=1e-3)
    x = torch.randn(4096, FEATURE_COUNT)
    ready.send(True)
    while True:
        optimiser.zero_grad()
        net(x).square().mean().backward()
        optimiser.step()


class _Client:
    """One kept-alive connection that costs next to nothing itself; answers carry their length."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._host = f"{address[0]}:{address[1]}"
        self._socket = socket.create_connection(address, timeout=START_SECONDS)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader = self._socket.makefile("rb")

    def seconds(self, body: bytes) -> float:
        """Time of one answer with scores. Raises RuntimeError where there are none in it."""
        head = (
            f"POST /prioritize HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        began = time.perf_counter()
        self._socket.sendall(head.encode() + body)
        status, length, chunked = self._reader.readline(), 0, False
        while (line := self._reader.readline().lower()) not in (b"\r\n", b""):
            name, _, value = line.partition(b":")
            if name == b"content-length":
                length = int(value)
            chunked |= name == b"transfer-encoding"
        scores = self._chunks() if chunked else self._reader.read(length)
        took = time.perf_counter() - began
        if b" 200 " not in status or len(scores) < 100:
            raise RuntimeError(f"no scores came back: {status!r} {scores[:80]!r}")
        return took

    def _chunks(self) -> bytes:
        """The body of an answer in chunks, as Go sends large ones."""
        whole = b""
        while size := int(self._reader.readline(), 16):
            whole += self._reader.read(size)
            self._reader.readline()
        self._reader.readline()
        return whole

    def close(self) -> None:
        """Close the connection."""
        self._reader.close()
        self._socket.close()


def _ask(clients: list[_Client], bodies: list[bytes], requests: int) -> list[list[float]]:
    """Seconds of each answer by server; the two are asked in turn, each first every other time."""
    seconds: list[list[float]] = [[], []]
    for turn in range(-20, requests):
        for which in (0, 1) if turn % 2 else (1, 0):
            took = clients[which].seconds(bodies[turn % len(bodies)])
            if turn >= 0:
                seconds[which].append(took)
    return seconds


def measure(
    requests: int = 500,
    candidates: int = 500,
    training: bool = True,
    rounds: int = 1,
    against: str | None = None,
) -> dict[str, float]:
    """p50 and p99 of both servers in ms, and their ratios (extender / answering at once).

    Each is the median over ``rounds`` of so many requests: a round that the machine was busy with
    other things in has no say. ``against`` is the URL of the extender that answers at once; without
    it, one of the same kind as ours is started.
    """
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

        ours = start(_serve, _extender, folder, candidates)
        if against is None:
            plain = start(_serve, _baseline, folder, candidates)
        else:
            parts = urlsplit(against)
            plain = (parts.hostname or "", parts.port or 80)
        if training:
            start(_train)
        clients = [_Client(ours), _Client(plain)]
        for client in clients:
            stack.callback(client.close)
        bodies = [_request(number, candidates) for number in range(PODS)]
        times = np.array([_ask(clients, bodies, requests) for _ in range(rounds)])
    found: dict[str, float] = {"requests": requests, "rounds": rounds, "candidates": candidates}
    for percent in (50, 99):
        a, b = np.percentile(times, percent, axis=2).T
        found |= {
            f"extender_p{percent}_ms": 1e3 * float(np.median(a)),
            f"at_once_p{percent}_ms": 1e3 * float(np.median(b)),
            f"p{percent}_ratio": float(np.median(a / b)),
        }
    return found


def latency(
    requests: Annotated[int, typer.Option(min=10, help="Requests to each, a round.")] = 500,
    candidates: Annotated[int, typer.Option(min=2, help="Nodes in each request.")] = 500,
    training: Annotated[bool, typer.Option(help="Train in another process meanwhile.")] = True,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the median one counts.")] = 5,
    against: Annotated[
        str | None, typer.Option(help="URL of an extender that answers at once; none: our own.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Time a prioritize answer against a server that answers at once."""
    report(measure(requests, candidates, training, rounds, against), training, as_json)


def report(found: dict[str, float], training: bool, as_json: bool) -> None:
    """Print what :func:`measure` found."""
    if as_json:
        typer.echo(json.dumps(found))
        return
    load = "a learner trains" if training else "nothing trains"
    table = Table(
        title=f"prioritize, {found['candidates']:.0f} candidates, median of {found['rounds']:.0f} "
        f"rounds of {found['requests']:.0f} requests, {load}"
    )
    for column in ("", "extender", "answers at once", "ratio"):
        table.add_column(column, justify="right" if column else "left")
    for p in ("p50", "p99"):
        ours, plain = found[f"extender_{p}_ms"], found[f"at_once_{p}_ms"]
        table.add_row(p, f"{ours:.2f} ms", f"{plain:.2f} ms", f"{found[f'{p}_ratio']:.2f}")
    Console().print(table)
