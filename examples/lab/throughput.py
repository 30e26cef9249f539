"""``python -m examples.lab throughput``: what an agent costs a real kube-scheduler, in pods/s.

Bursts of pods are scheduled by a kube-scheduler alone, by one that asks the agent and, on demand,
by one that asks a Go extender that answers at once. The arms take turns on one cluster, so that
whatever else the machine does hits all of them; the ratio within a repetition is what counts.
"""

import json
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import kubernetes
import msgspec
import typer
import yaml
from rich.console import Console
from rich.table import Table

from agent.cluster.records import RESOURCE_GPU
from agent.statistics import paired_ratio
from examples.lab.control_plane import ControlPlane, answer, node_manifest, pod_manifest, until
from examples.lab.figures import Figures
from examples.lab.rights import grant
from examples.processes import ExampleError, fedsched, free_ports

ALONE, AGENT, GO = "kube-scheduler alone", "with the agent", "with a Go extender at once"
NAMESPACE = "burst"
MODELS = (("Tesla-V100-SXM2-16GB", 16384), ("Tesla-P100-PCIE-16GB", 16384))
GPU_NODES = 10
"""One node of so many has eight GPUs."""
GPU_PODS = 10
"""One pod of so many asks for one GPU, where there are enough of them."""
WEIGHT = 13
"""Of the extender's scores: above all default scores together."""
POLL_SECONDS = 0.25
BURST_SECONDS = 600.0
_SIDE_BY_SIDE = 8
_SCHEDULED = re.compile(
    r'^scheduler_schedule_attempts_total\{.*result="scheduled".*\} (\S+)$', re.M
)


class Burst(msgspec.Struct, frozen=True):
    """One burst of pods under one arm."""

    arm: str
    pods_per_second: float
    opinions: int = 0
    """The agent's answers with scores. Fewer than pods: kube-scheduler was alone with the others,
    the agent having been silent or late (or nobody asked, one node alone being left)."""
    p50_ms: float = 0.0
    """The agent's own time to answer; within the buckets of its histogram."""
    p99_ms: float = 0.0


def _extenders(
    port: int, timeout: float, resources: Sequence[str], percentage: int
) -> dict[str, Any]:
    return {
        "percentageOfNodesToScore": percentage,
        "extenders": [
            {
                "urlPrefix": f"http://127.0.0.1:{port}",
                "prioritizeVerb": "prioritize",
                "weight": WEIGHT,
                "httpTimeout": f"{1e3 * timeout:.0f}ms",
                "nodeCacheCapable": True,
                "ignorable": True,
                "managedResources": [{"name": name} for name in resources],
            }
        ],
    }


def nodes(count: int) -> Iterator[dict[str, Any]]:
    """Nodes of which one in ``GPU_NODES`` has eight GPUs, of two models in turn."""
    for n in range(count):
        product, memory = MODELS[n // GPU_NODES % len(MODELS)]
        yield (
            node_manifest(f"node-{n}", gpus=8, gpu_product=product, gpu_memory_mib=memory)
            if n % GPU_NODES == 0
            else node_manifest(f"node-{n}")
        )


def _gpus(node_count: int) -> int:
    return 8 * -(-node_count // GPU_NODES)


class Bench:
    """Bursts on one cluster."""

    def __init__(
        self,
        plane: ControlPlane,
        node_count: int,
        pods: int,
        learn: bool,
        timeout: float,
        resources: Sequence[str] = (),
        percentage: int = 0,
    ) -> None:
        self._plane, self._pods, self._learn, self._timeout = plane, pods, learn, timeout
        self._resources, self._percentage = resources, percentage
        self._gpus = _gpus(node_count)
        self._core: Any = kubernetes.client.CoreV1Api(plane.api())
        self._number = 0
        plane.create_nodes(nodes(node_count))
        plane.kubectl("create", "namespace", NAMESPACE)
        plane.wait_for_service_account(NAMESPACE)
        self._kubeconfig = grant(plane)

    def burst(self, arm: str) -> Burst:
        """Schedule one burst. Raises ExampleError where it does not end in time."""
        self._number += 1
        try:
            if arm == ALONE:
                return Burst(arm, self._schedule({}))
            with self._go() if arm == GO else self._agent() as port:
                config = _extenders(port, self._timeout, self._resources, self._percentage)
                rate = self._schedule(config)
                if arm == GO:
                    return Burst(arm, rate)
                said = Figures(answer(f"http://127.0.0.1:{port}/metrics"))
        finally:
            self._clear()
        p50, p99 = (
            said.quantile("fedsched_extender_seconds", share, verb="prioritize") or 0.0
            for share in (0.5, 0.99)
        )
        return Burst(
            arm,
            rate,
            int(
                said.total("fedsched_extender_answers_total", verb="prioritize")
                - said.total("fedsched_extender_no_opinion_total")
            ),
            1e3 * p50,
            1e3 * p99,
        )

    def _schedule(self, config: dict[str, Any]) -> float:
        """Pods/s of a kube-scheduler that finds all pods waiting when it starts."""
        name = f"kube-scheduler-{self._number}"
        self._create(name)
        profile, began = {"profiles": [{"schedulerName": name}]}, time.monotonic()
        self._plane.start_scheduler({**config, **profile}, name=name)
        try:
            return self._rate(name, began)
        finally:
            self._plane.stop(name)

    def _rate(self, name: str, began: float) -> float:
        """Between the first and the last look at which some but not all were scheduled.

        The start of the process and the wait for the last look are in neither. A burst that is
        too short for two such looks is timed as a whole, since ``began``.
        """
        between: list[tuple[float, float]] = []
        while True:
            text = self._plane.metrics(name)
            now, count = time.monotonic(), sum(map(float, _SCHEDULED.findall(text)))
            if count >= self._pods:
                break
            if now - began > BURST_SECONDS:
                raise ExampleError(
                    f"{count:.0f} of {self._pods} pods were scheduled in {BURST_SECONDS:.0f} s; "
                    f"see {self._plane.log(name)}"
                )
            if count:
                between.append((now, count))
            time.sleep(POLL_SECONDS)
        if len(between) < 2 or between[0][1] == between[-1][1]:
            return self._pods / (now - began)
        (start, first), (end, last) = between[0], between[-1]
        return (last - first) / (end - start)

    def _create(self, scheduler: str) -> None:
        def create(number: int) -> None:
            wants = number % GPU_PODS == 0 and number // GPU_PODS < self._gpus
            pod = pod_manifest(
                # Never a name again: kwok confirms deletions late, and by name.
                f"pod-{self._number}-{number}",
                namespace=NAMESPACE,
                cpu="500m",
                gpus=int(wants),
                scheduler=scheduler,
                labels={"fedsched.io/job-type": f"type-{number % 5}"},
            )
            self._core.create_namespaced_pod(NAMESPACE, pod, _preload_content=False).read()

        with ThreadPoolExecutor(_SIDE_BY_SIDE) as pool:
            list(pool.map(create, range(self._pods)))

    def _clear(self) -> None:
        def gone() -> bool:
            # On a busy machine it takes several calls, all but the last of which are given up.
            self._core.delete_collection_namespaced_pod(NAMESPACE, grace_period_seconds=0)
            return not self._core.list_namespaced_pod(NAMESPACE, limit=1).items

        until(gone, "the pods of the burst are gone", BURST_SECONDS)

    @contextmanager
    def _agent(self) -> Iterator[int]:
        """A new agent, serve and learn, with the rights that its chart grants; its port."""
        (port,), name = free_ports(1), f"agent-{self._number}"
        folder = self._plane.folder / name
        folder.mkdir()
        config = folder / "agent.yaml"
        settings = {
            "state": str(folder / "state"),
            "kubernetes": {"kubeconfig": str(self._kubeconfig), "in_cluster": "never"},
            "serve": {"port": port, "budget_seconds": self._timeout / 2},
        }
        config.write_text(yaml.safe_dump(settings))
        parts = ["serve", "learn"] if self._learn else ["serve"]
        try:
            for part in parts:
                up = folder / f"{part}.up"
                command = fedsched("agent", part, "--config", str(config), "--ready-file", str(up))
                ready = f"http://127.0.0.1:{port}/readyz" if part == "serve" else ""
                self._plane.run(f"{name}-{part}", command, ready=ready)
                # Starting takes seconds of CPU, which are no part of running beside a scheduler.
                until(up.exists, f"{name}-{part} is up; see {self._plane.log(f'{name}-{part}')}")
            yield port
        finally:
            for part in parts:
                self._stop(f"{name}-{part}")

    @contextmanager
    def _go(self) -> Iterator[int]:
        """The Go extender that answers at once; its port."""
        (port,), name = free_ports(1), f"extender-{self._number}"
        program = str(self._plane.binaries / "extender")
        try:
            url = f"http://127.0.0.1:{port}/healthz"
            self._plane.run(name, [program, f"-listen=127.0.0.1:{port}"], ready=url)
            yield port
        finally:
            self._stop(name)

    def _stop(self, name: str) -> None:
        if self._plane.alive(name):
            self._plane.kill(name)


def measure(
    node_count: int,
    pods: int,
    repetitions: int,
    *,
    learn: bool = True,
    go: bool = False,
    timeout: float = 0.1,
    resources: Sequence[str] = (),
    percentage: int = 0,
    say: Callable[[str], None] = print,
) -> list[list[Burst]]:
    """Bursts by repetition, one of each arm; their order turns round from one to the next.

    ``timeout`` is how long kube-scheduler waits for an extender, s; the agent's budget is half.
    ``resources`` restrict an extender to pods that ask for one of them. ``percentage`` is the share
    of nodes that kube-scheduler looks at where it asks an extender; 0 is its own choice.
    """
    arms = [ALONE, AGENT, GO] if go else [ALONE, AGENT]
    found = []
    with tempfile.TemporaryDirectory() as folder, ControlPlane(Path(folder)) as plane:
        say(f"creating {node_count} nodes …")
        bench = Bench(plane, node_count, pods, learn, timeout, resources, percentage)
        for repetition in range(repetitions):
            bursts = {}
            for arm in arms if repetition % 2 == 0 else reversed(arms):
                bursts[arm] = bench.burst(arm)
                rate = bursts[arm].pods_per_second
                say(f"[{repetition + 1}/{repetitions}] {arm}: {rate:.0f} pods/s")
            found.append([bursts[arm] for arm in arms])
    return found


def throughput(
    node_count: Annotated[
        int, typer.Option("--nodes", min=2, help="Nodes; one in 10 has GPUs.")
    ] = 1000,
    pods: Annotated[int, typer.Option(min=100, help="Pods of each burst.")] = 3000,
    repetitions: Annotated[int, typer.Option(min=2, help="Bursts of each arm.")] = 3,
    learn: Annotated[bool, typer.Option(help="Run the learner beside the agent too.")] = True,
    go: Annotated[bool, typer.Option(help="Add a Go extender that answers at once.")] = False,
    gpus_only: Annotated[
        bool, typer.Option("--gpus-only", help="Ask only about the pods that want a GPU.")
    ] = False,
    percentage: Annotated[
        int,
        typer.Option(
            min=0,
            max=100,
            help="percentageOfNodesToScore where an extender is asked; 0: kube-scheduler's own.",
        ),
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure the pods/s of a real kube-scheduler with the agent against those without."""
    console = Console(stderr=True)
    found = measure(
        node_count,
        pods,
        repetitions,
        learn=learn,
        go=go,
        resources=[RESOURCE_GPU] if gpus_only else [],
        percentage=percentage,
        say=console.print,
    )
    rates = {
        bursts[0].arm: [b.pods_per_second for b in bursts] for bursts in zip(*found, strict=True)
    }
    ratios = {
        arm: paired_ratio(values, rates[ALONE]) for arm, values in rates.items() if arm != ALONE
    }
    asked = [burst for bursts in found for burst in bursts if burst.arm == AGENT]
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "nodes": node_count,
                    "pods": pods,
                    "repetitions": [msgspec.to_builtins(bursts) for bursts in found],
                    "ratios": {arm: [r.mean, r.low, r.high] for arm, r in ratios.items()},
                }
            )
        )
        return
    table = Table(title=f"{pods:,} pods on {node_count:,} nodes, {repetitions} times in turn")
    for column in ("", "pods/s", "least", "most", "to kube-scheduler alone (95 % interval)"):
        table.add_column(column, justify="right" if column else "left")
    for arm, values in rates.items():
        ratio = ratios.get(arm)
        table.add_row(
            arm,
            f"{sum(values) / len(values):.0f}",
            f"{min(values):.0f}",
            f"{max(values):.0f}",
            f"{ratio.mean:.2f} ({ratio.low:.2f} to {ratio.high:.2f})" if ratio else "",
        )
    out = Console()
    out.print(table)
    each = min(-(-pods // GPU_PODS), _gpus(node_count)) if gpus_only else pods
    wanted, got = each * len(asked), sum(b.opinions for b in asked)
    times = ", ".join(f"{b.p50_ms:.1f} / {b.p99_ms:.1f} ms" for b in asked)
    out.print(f"The agent had an opinion on {got:,} of {wanted:,} pods.")
    out.print(f"Its own time to answer, p50 / p99 of each burst: {times}.")
