"""Agents' ways to a lab cluster: connections, roles, gated pods and real serving processes."""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kubernetes
import yaml

from agent.cluster.access import Access
from agent.cluster.records import GATE
from agent.settings import KubernetesSettings
from examples.lab.control_plane import ControlPlane, answer, pod_manifest, until

SERVING = {"port": 0, "queue_seconds": 0.1}


@contextmanager
def reaching(kubeconfig: Path, **settings: Any) -> Iterator[Access]:
    """A connection by a kubeconfig."""
    access = Access(KubernetesSettings(kubeconfig=kubeconfig, **settings))
    try:
        yield access
    finally:
        access.close()


def gated_pods(lab: ControlPlane, namespace: str, names: list[str], **changes: Any) -> None:
    """Create pods behind our gate, and behind those in ``gates`` before it."""
    others = changes.pop("gates", ())
    pods = []
    for name in names:
        pod = pod_manifest(name, namespace=namespace, gated=True, **changes)
        pod["spec"]["schedulingGates"] = [{"name": gate} for gate in (*others, GATE)]
        pods.append(pod)
    lab.kubectl("create", "-f", "-", stdin=json.dumps({"kind": "List", "apiVersion": "v1",
                                                       "items": pods}))  # fmt: skip


def gates(lab: ControlPlane, namespace: str) -> dict[str, list[str]]:
    """The scheduling gates of each pod of a namespace."""
    found = json.loads(lab.kubectl("get", "pods", f"--namespace={namespace}", "-o", "json"))
    return {
        pod["metadata"]["name"]: [gate["name"] for gate in pod["spec"].get("schedulingGates", ())]
        for pod in found["items"]
    }


def grant(lab: ControlPlane, user: str, *rules: dict[str, list[str]]) -> None:
    """Give a user (or a service account, as ``namespace:name``) exactly these rules everywhere."""
    name = f"test-{user.replace(':', '-')}"
    who, subject = user, {"kind": "User", "name": user, "apiGroup": "rbac.authorization.k8s.io"}
    if ":" in user:
        namespace, _, account = user.partition(":")
        who = f"system:serviceaccount:{user}"
        subject = {"kind": "ServiceAccount", "name": account, "namespace": namespace}
    role = {"kind": "ClusterRole", "metadata": {"name": name}, "rules": list(rules)}
    binding = {
        "kind": "ClusterRoleBinding",
        "metadata": {"name": name},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name},
        "subjects": [subject],
    }
    items = [{"apiVersion": "rbac.authorization.k8s.io/v1", **item} for item in (role, binding)]
    lab.kubectl("apply", "-f", "-", stdin=json.dumps({"kind": "List", "apiVersion": "v1",
                                                      "items": items}))  # fmt: skip
    # The authorizer hears of it by a watch of its own.
    until(lambda: all(may(lab, who, rule) for rule in rules), f"{user} may do what is granted")


def may(lab: ControlPlane, user: str, rule: dict[str, list[str]]) -> bool:
    """Whether the API server lets ``user`` do all of a rule, in every namespace."""
    reviews: Any = kubernetes.client.AuthorizationV1Api(lab.api())
    for group, resource, verb in itertools.product(
        rule["apiGroups"], rule["resources"], rule["verbs"]
    ):
        about = {"group": group, "resource": resource, "verb": verb}
        review = {"spec": {"user": user, "resourceAttributes": about}}
        if not reviews.create_subject_access_review(review).status.allowed:
            return False
    return True


class Agent:
    """One ``agent serve`` (or ``learn``) as a process, with a state directory of its own."""

    def __init__(self, folder: Path, kubeconfig: Path, **sections: dict[str, Any]) -> None:
        self.folder, self.state = folder, folder / "state"
        folder.mkdir(parents=True, exist_ok=True)
        serve = SERVING | sections.pop("serve", {})
        access = {"kubeconfig": str(kubeconfig)} | sections.pop("kubernetes", {})
        self.config, self.ready = folder / "member.yaml", folder / "ready.json"
        self.config.write_text(
            yaml.safe_dump(
                {"state": str(self.state), "kubernetes": access, "serve": serve, **sections}
            )
        )
        self.process: subprocess.Popen[bytes] | None = None
        self.port = 0

    def start(self, command: str = "serve", *, wait: bool = True) -> None:
        """Start it and wait until it is up."""
        self.ready.unlink(missing_ok=True)
        with (self.folder / f"{command}.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "common", "agent", command, "--config", str(self.config),
                 "--ready-file", str(self.ready)],
                stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        if wait:
            self.wait()

    def wait(self) -> None:
        """Until the process has said that it is up."""
        process = self.process
        assert process is not None
        until(lambda: self.ready.exists() or process.poll() is not None, "the agent is up")
        assert process.poll() is None, self.log()
        self.port = json.loads(self.ready.read_text()).get("port", 0)

    def log(self, command: str = "serve") -> str:
        """What it wrote."""
        return (self.folder / f"{command}.log").read_text()

    def metric(self, name: str) -> float:
        """A figure of ``/metrics``, by its name with labels."""
        for line in answer(f"http://127.0.0.1:{self.port}/metrics").splitlines():
            if line.rpartition(" ")[0] == f"fedsched_{name}":
                return float(line.rpartition(" ")[2])
        raise AssertionError(f"no metric {name}")

    def kill(self) -> None:
        """SIGKILL, by pid."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def stop(self) -> int:
        """SIGTERM, by pid; the exit status."""
        assert self.process is not None
        self.process.terminate()
        return self.process.wait()


@contextmanager
def ending(*agents: Agent) -> Iterator[None]:
    """Whatever happens, none of the agents is left running."""
    try:
        yield
    finally:
        for agent in agents:
            agent.kill()
