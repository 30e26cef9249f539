"""A federation of three real Kubernetes clusters with emulated jobs; ``demo.py`` drives it.

Of each member run a control plane, the node emulator with its jobs, Prometheus, kube-scheduler,
which asks the member's agent as its extender, and the agent's processes as in the other demo.
"""

import contextlib
import dataclasses
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import kubernetes

from agent.simulator.hardware import SpeedTable
from examples.lab import prometheus
from examples.lab.build import binaries
from examples.lab.control_plane import ControlPlane, answer, until
from examples.lab.figures import Figures
from examples.lab.manifests import pod_manifest
from examples.lab.rights import grant
from examples.laptop.federation import Federation, Options
from examples.laptop.members import MEMBERS, Member
from examples.processes import ExampleError, Supervisor, free_ports

SCHEDULER = "fedsched"
"""``schedulerName`` of the jobs' pods."""
WEIGHT = 13
"""Of the extender: so much that the agent's word outweighs kube-scheduler's own scores."""
BURST = 200
"""Pods that are scheduled in one go, at the end, to see how many a second can be."""
SCHEDULED = {"result": "scheduled", "profile": SCHEDULER}


class LabFederation(Federation):
    """Everything that the demo on real clusters runs."""

    # kube-scheduler counts whole GPUs, whatever part of one a pod says that it uses.
    members = tuple(dataclasses.replace(member, shared=0.0) for member in MEMBERS)
    learners_prefix = ("nice", "-n", "5")
    """Elsewhere learners have their own cores; here all share a few, and scheduling goes first."""

    def __init__(
        self, supervisor: Supervisor, run: Path, speeds: SpeedTable, options: Options
    ) -> None:
        super().__init__(supervisor, run, speeds, options)
        self.planes: dict[str, ControlPlane] = {}
        self._stack = contextlib.ExitStack()
        self._say: Callable[[str], None] = supervisor.say
        self._extender: dict[str, dict[str, Any]] = {}
        self._playing = True

    def start(self, say: Callable[[str], None]) -> None:
        """Build what is missing, start everything and set the clusters' clocks going."""
        self._say = say
        binaries(say)
        super().start(say)

    def start_cluster(self, member: Member) -> tuple[str, dict[str, Any]]:
        """Start a member's control plane, emulator, Prometheus and kube-scheduler."""
        name = member.name
        self._say(f"Starting the cluster of {name} …")
        folder = self.run / f"{name}-cluster"
        plane = self._stack.enter_context(ControlPlane(folder, name=name))
        self.planes[name] = plane
        kubeconfig = grant(plane)
        exporter, monitor = free_ports(2)
        self._emulate(plane, member, exporter)
        plane.run(
            "prometheus",
            prometheus.command(
                plane.binaries / "prometheus",
                folder / "prometheus",
                prometheus.scrape_config(f"127.0.0.1:{exporter}", member.mix()),
                monitor,
            ),
            ready=prometheus.ready_url(monitor),
        )
        plane.start_scheduler(scheduler_config(f"http://127.0.0.1:{self.serve_ports[name]}"))
        found = {
            "kubernetes": {"kubeconfig": str(kubeconfig), "in_cluster": "never"},
            "telemetry": {
                "seconds": 2.0,
                "prometheus_url": f"http://127.0.0.1:{monitor}",
                "window": "5s",  # in which the clusters live for hours
            },
        }
        return f"http://127.0.0.1:{exporter}", found

    def _emulate(self, plane: ControlPlane, member: Member, port: int) -> None:
        """Start the emulator, which creates the nodes, and wait until they are Ready."""
        name = member.name
        settings = member.cluster_settings(self.played[name], self.scales[name], "")
        del settings["extender"]
        settings |= {
            "port": port,
            "kubeconfig": str(plane.kubeconfig),
            "namespace": "jobs",
            "scheduler_name": SCHEDULER,
            "hostname_label": "Hostname" if member == self.members[0] else "hostname",
        }
        ready = self.run / f"{name}-cluster.ready"
        plane.run(
            "emulator",
            [sys.executable, "-m", "examples.lab.emulator",
             "--config", self.write(f"{name}-emulator.yaml", settings),
             "--ready-file", str(ready), "--result", str(self.run / f"{name}-result.json")],
            restart=False,
        )  # fmt: skip
        until(ready.exists, f"the emulator of {name} is ready; see {plane.log('emulator')}")
        nodes = len(member.mix())
        until(lambda: len(plane.ready_nodes()) == nodes, f"the nodes of {name} are Ready")

    def watch(self) -> None:
        """Bring back what died, of the agents and of the clusters."""
        super().watch()
        for plane in self.planes.values():
            self.supervisor.check()
            plane.revive(self.supervisor.say)

    def poll(self) -> dict[str, Any]:
        """What everybody tells now, with what each agent says of its answers."""
        found = super().poll()
        for member in self.members:
            name = member.name
            if self._playing:
                with contextlib.suppress(OSError):  # a process that is coming back
                    url = f"http://127.0.0.1:{self.serve_ports[name]}/metrics"
                    self._extender[name] = extender_figures(Figures(answer(url, 2.0)))
            if name in found and name in self._extender:
                found[name]["extender"] = self._extender[name]
        return found

    def finish(
        self,
    ) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, list[list[float]]]]:
        """See how fast each cluster schedules, then take the last word of everybody."""
        self.poll()
        self._playing = False  # what follows is not of the jobs
        rates = {}
        for name, plane in self.planes.items():
            self.supervisor.check()
            self._say(f"Scheduling {BURST} pods in one go on {name} …")
            before = Figures(plane.metrics())
            rates[name] = {
                "attempt_p50_ms": _attempt_ms(before, 0.5),
                "attempt_p99_ms": _attempt_ms(before, 0.99),
                "pods_per_second": burst(plane),
            }
        live, rounds, curves = super().finish()
        return (
            {n: found | {"kube_scheduler": rates[n]} for n, found in live.items()},
            rounds,
            curves,
        )

    def close(self) -> None:
        """End all processes: agents and hub first, then the clusters."""
        super().close()
        self._stack.close()


def scheduler_config(agent: str) -> dict[str, Any]:
    """kube-scheduler's configuration with the agent at this URL as its extender."""
    return {
        "profiles": [{"schedulerName": SCHEDULER}],
        "extenders": [
            {
                "urlPrefix": agent,
                "filterVerb": "filter",
                "prioritizeVerb": "prioritize",
                "weight": WEIGHT,
                "httpTimeout": "100ms",
                "nodeCacheCapable": True,
                "ignorable": True,
            }
        ],
    }


def extender_figures(agent: Figures) -> dict[str, Any]:
    """An agent's answers since its last start, in the form in which an embedded cluster tells."""

    def milliseconds(share: float) -> float | None:
        found = agent.quantile("fedsched_extender_seconds", share, verb="prioritize")
        return None if found is None else found * 1e3

    return {
        "calls": agent.by("fedsched_extender_answers_total", "verb"),
        "failures": agent.by("fedsched_extender_no_opinion_total", "reason"),
        "prioritize_p50_ms": milliseconds(0.5),
        "prioritize_p99_ms": milliseconds(0.99),
    }


def _attempt_ms(scheduler: Figures, share: float) -> float | None:
    name = "scheduler_scheduling_attempt_duration_seconds"
    found = scheduler.quantile(name, share, **SCHEDULED)
    return None if found is None else found * 1e3


def burst(plane: ControlPlane, pods: int = BURST) -> float:
    """Pods a second that kube-scheduler binds, its agent asked for each, when many wait at once.

    It is held while they are created, so that their creation does not count. They are of a
    namespace of their own, which goes with them.
    """
    namespace = f"burst-{time.time_ns()}"
    plane.kubectl("create", "namespace", namespace)
    plane.wait_for_service_account(namespace)
    core: Any = kubernetes.client.CoreV1Api(plane.api())

    def create(number: int) -> None:
        pod = pod_manifest(
            f"burst-{number}", namespace=namespace, cpu="10m", memory="16Mi", scheduler=SCHEDULER
        )
        core.create_namespaced_pod(namespace, pod, _preload_content=False).read()

    def bound() -> float:
        figures = Figures(plane.metrics())
        return figures.total("scheduler_schedule_attempts_total", **SCHEDULED)

    process = plane.processes["kube-scheduler"].popen
    if process is None:
        raise ExampleError(f"{plane.name} has no kube-scheduler")
    before = bound()
    process.send_signal(signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(create, range(pods)))
    finally:
        process.send_signal(signal.SIGCONT)
    began = time.monotonic()
    until(lambda: bound() >= before + pods, f"{pods} pods of {namespace} are scheduled")
    seconds = time.monotonic() - began
    plane.kubectl("delete", "namespace", namespace, "--wait=false")
    return pods / seconds
