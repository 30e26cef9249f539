"""A bare control plane on which the tests of kube-scheduler's behaviour start schedulers.

Called by the fixtures in ``conftest.py``. There is an API server and etcd but no controller manager
and no kwok: nodes and pods are exactly what a test makes them, and nothing else moves.
"""

import re
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import yaml
from kubernetes import client
from prometheus_client.parser import text_string_to_metric_families

from examples.lab.control_plane import ControlPlane, node_manifest
from tests.kubernetes.facts.recording import WAIT, RecordingExtender

NODES = 300
"""Above 100, so that kube-scheduler samples, and small enough to be made in seconds."""
PAIR = ("n-000", "n-001")
"""The nodes labelled ``group=pair``; pods of :meth:`Bench.pod` may go nowhere else."""
SINGLE = "n-002"
"""The only node labelled ``group=single``."""

Value = TypeVar("Value")


def until(condition: Callable[[], Value], what: str) -> Value:
    """Wait for a true value, and return it."""
    end = time.monotonic() + WAIT
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.02)
    raise AssertionError(f"waited in vain until {what}")


def extender(server: RecordingExtender, **settings: Any) -> dict[str, Any]:
    """An entry of ``extenders`` that prefers, with node names alone on the wire."""
    return {
        "urlPrefix": server.url,
        "prioritizeVerb": "prioritize",
        "weight": 13,
        "nodeCacheCapable": True,
        "httpTimeout": "30s",  # so that a slow machine is no failure; tests of time-outs set it
        **settings,
    }


class Scheduler:
    """One running kube-scheduler and what it writes down."""

    def __init__(self, plane: ControlPlane, name: str) -> None:
        self.plane, self.name = plane, name

    def lines(self, *words: str) -> list[str]:
        """Lines of its log that hold all of these words."""
        text = self.plane.log(self.name).read_text(errors="replace")
        return [line for line in text.splitlines() if all(word in line for word in words)]

    def config(self) -> Any:
        """The configuration that it runs with, defaults filled in."""
        text = self.plane.log(self.name).read_text()
        found = re.search(r'"Using component config" config=<\n(.*?)\n >$', text, re.S | re.M)
        assert found, "the configuration is logged at level 2 and above"
        return yaml.safe_load(textwrap.dedent(found[1]).replace("\t", ""))

    def plugins(self, pod: str) -> dict[str, dict[str, int]]:
        """Weighted score by node and plugin of the last attempt at this pod (log level 10)."""
        found: dict[str, dict[str, int]] = {}
        for line in self.lines("Plugin scored node for pod", f'pod="default/{pod}"'):
            fields = dict(re.findall(r'(\w+)="?([^" ]+)"?', line))
            found.setdefault(fields["node"], {})[fields["plugin"]] = int(fields["score"])
        return found

    def totals(self, pod: str) -> dict[str, int]:
        """Score by node that decided (log level 10)."""
        found = {}
        for line in self.lines("Calculated node's final score for pod", f'pod="default/{pod}"'):
            fields = dict(re.findall(r'(\w+)="?([^" ]+)"?', line))
            found[fields["node"]] = int(fields["score"])
        return found

    def added(self, pod: str) -> dict[str, int]:
        """What the extenders' scores added to the plugins' by node (log level 10)."""
        plugins = {node: sum(scores.values()) for node, scores in self.plugins(pod).items()}
        return {node: total - plugins[node] for node, total in self.totals(pod).items()}

    def metrics(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        """All its metrics, by name and labels."""
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(self.plane.metrics(self.name))
            for sample in family.samples
        }

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's series that have these labels."""
        return sum(
            value
            for (found, pairs), value in self.metrics().items()
            if found == name and labels.items() <= dict(pairs).items()
        )


class Bench:
    """The control plane, its nodes and short ways to make and see pods."""

    def __init__(self, plane: ControlPlane) -> None:
        self.plane = plane
        self.core: Any = client.CoreV1Api(plane.api())  # its types know no plain objects
        self.core.create_namespaced_service_account("default", {"metadata": {"name": "default"}})
        groups = {**dict.fromkeys(PAIR, "pair"), SINGLE: "single"}
        names = [f"n-{number:03}" for number in range(NODES)]
        plane.create_nodes(
            node_manifest(name, labels={"group": groups.get(name, "rest")}) for name in names
        )

    def scheduler(
        self,
        name: str,
        extenders: Sequence[dict[str, Any]],
        *,
        profile: Mapping[str, Any] = MappingProxyType({}),
        profiles: Sequence[dict[str, Any]] = (),
        verbosity: int = 10,
    ) -> Scheduler:
        """Start a kube-scheduler; pods name it, or one of its further ``profiles``."""
        config = {
            "profiles": [{"schedulerName": name, **profile}, *profiles],
            "extenders": list(extenders),
        }
        self.plane.start_scheduler(config, name=name, arguments=[f"-v={verbosity}"])
        return Scheduler(self.plane, name)

    def pod(
        self,
        name: str,
        scheduler: str,
        *,
        group: str = "pair",
        cpu: str = "10m",
        gated: bool = False,
        **spec: Any,
    ) -> Any:
        """Create a pod that may go to one group of nodes (none: anywhere)."""
        spec.setdefault("nodeSelector", {"group": group} if group else {})
        if gated:
            spec["schedulingGates"] = [{"name": "fedsched.io/queue"}]
        container = {
            "name": "main",
            "image": "none",
            "resources": {"requests": {"cpu": cpu, "memory": "10Mi"}},
        }
        manifest = {
            "metadata": {"name": name},
            "spec": {"schedulerName": scheduler, "containers": [container], **spec},
        }
        return self.core.create_namespaced_pod("default", manifest)

    def read(self, name: str) -> Any:
        """The pod as the API server has it."""
        return self.core.read_namespaced_pod(name, "default")

    def node_of(self, name: str) -> str:
        """Wait until the pod is bound; its node."""
        return str(until(lambda: self.read(name).spec.node_name, f"{name} is bound"))

    def condition(self, name: str, reason: str) -> Any:
        """Wait until the pod is said not to be scheduled for this reason; the condition."""

        def found() -> Any:
            conditions = self.read(name).status.conditions or []
            return next((c for c in conditions if c.reason == reason), None)

        return until(found, f"{name} has a condition of reason {reason}")
