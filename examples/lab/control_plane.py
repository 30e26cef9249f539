"""One real Kubernetes cluster as plain processes on loopback; used by ``make lab`` and the tests.

etcd, kube-apiserver, kube-controller-manager and kwok come up with :class:`ControlPlane`, a
kube-scheduler with :meth:`ControlPlane.start_scheduler`. Ports are free ones and stay for as long
as the cluster lives, so that a process that was killed comes back where its clients look for it.
"""

import datetime as dt
import http.client
import json
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import kubernetes
from urllib3.exceptions import HTTPError

from examples.lab import certificates, components
from examples.lab.build import binaries
from examples.lab.components import Component
from examples.lab.manifests import node_manifest, pod_manifest
from examples.processes import ExampleError, Process, free_ports

__all__ = ["ControlPlane", "answer", "node_manifest", "pod_manifest", "until"]

START_SECONDS = 180.0
"""How long a process may take until it is ready, on a machine that is busy with other things."""
STOP_SECONDS = 30.0
ANSWER_SECONDS = 30.0
"""How long an answer may take of a process that is up, on such a machine."""
ASK_AGAIN_SECONDS = 5.0
"""A process that comes up is asked anew after this long: it may have taken a call too early."""
_UNVERIFIED = ssl._create_unverified_context()  # for health and figures of servers on loopback
_KEPT_ALIVE = 8
"""Connections over which nodes are created side by side."""


def answer(url: str, timeout: float = ANSWER_SECONDS) -> str:
    """The body of a loopback URL, its certificate unchecked. Raises OSError where none comes."""
    try:
        with urllib.request.urlopen(url, timeout=timeout, context=_UNVERIFIED) as found:
            return str(found.read().decode())
    except http.client.HTTPException as error:  # it broke off in the middle
        raise OSError(f"{url}: {error!r}") from error


class ControlPlane:
    """A cluster; a context manager that starts it and ends whatever of it runs.

    Args:
        folder: for data, certificates, kubeconfigs and logs; made where it is missing.
        name: of the cluster in kubeconfigs and messages.
        controllers: run kube-controller-manager, and demand service accounts as it makes them.
        kwok: stand-in kubelets for all nodes: these become Ready and pods Running at once, save
            pods labelled ``fedsched.io/emulated``, which are the node emulator's.
    """

    def __init__(
        self,
        folder: Path,
        *,
        name: str = "lab",
        controllers: bool = True,
        kwok: bool = True,
    ) -> None:
        self.folder, self.name = folder, name
        self._controllers, self._kwok = controllers, kwok
        self.processes: dict[str, Process] = {}
        """By name, in the order of their start."""
        self._ready: dict[str, str] = {}
        self._port = free_ports(1)[0]
        self.url = f"https://127.0.0.1:{self._port}"
        self.kubeconfig = folder / "admin.kubeconfig"
        self._api: Any = None

    def __enter__(self) -> "ControlPlane":
        self.binaries = binaries()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._pki = self.folder / "pki"
        self._ca = certificates.create(self._pki, dt.datetime.now(dt.UTC))
        self._admin(self.kubeconfig)
        try:
            self._start_all()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End everything at once, clients before servers: what they hold is not needed again."""
        if self._api is not None:
            self._api.close()
            self._api = None
        for process in reversed(self.processes.values()):
            process.kill()

    def _start_all(self) -> None:
        client, peer, manager, kubelets = free_ports(4)
        disabled = ["TaintNodesByCondition"]
        if not self._controllers:
            disabled.append("ServiceAccount")
        self._launch("etcd", components.etcd(self.folder, client, peer))
        self._launch(
            "kube-apiserver", components.kube_apiserver(self._pki, self._port, client, disabled)
        )
        if self._controllers:
            self._launch(
                "kube-controller-manager",
                components.kube_controller_manager(self._pki, self.kubeconfig, manager),
            )
        if self._kwok:
            self._launch("kwok", components.kwok(self.kubeconfig, kubelets))
        if self._controllers:
            self.wait_for_service_account("default")

    def _admin(self, path: Path) -> None:
        now = dt.datetime.now(dt.UTC)
        pair = certificates.issue_user(self._ca, f"{self.name}-admin", ["system:masters"], now)
        self._write_kubeconfig(path, certificates.user_entry(pair))

    def _write_kubeconfig(
        self, path: Path, user: dict[str, Any], namespace: str = "default"
    ) -> Path:
        return certificates.write_kubeconfig(
            path, self.url, self._ca.certificate, self.name, user, namespace
        )

    # -- processes

    def log(self, name: str) -> Path:
        """The log file of a process."""
        return self.folder / f"{name}.log"

    def _launch(self, name: str, component: Component, program: str = "") -> Process:
        command = [str(self.binaries / (program or name)), *component.arguments]
        return self.run(name, command, ready=component.ready)

    def run(
        self, name: str, command: list[str], *, ready: str = "", restart: bool = True
    ) -> Process:
        """Start a further process of the cluster (Prometheus, an extender) under a new name.

        Args:
            ready: URL that answers 200 once it is ready; without it, that it runs is enough.
            restart: whether :meth:`revive` may bring it back.
        """
        if name in self.processes:
            raise ValueError(f"{self.name} has a process {name!r} already; choose another name")
        process = Process(name, command, self.log(name), restart)
        self.processes[name], self._ready[name] = process, ready
        self.start(name)
        return process

    def start(self, name: str) -> None:
        """Start a process that does not run, on the port that it had, and wait until it is ready.

        The calling thread must outlive the process, which the kernel ends with it.

        Raises:
            ExampleError: it ended or did not get ready in time; the message ends with its log.
        """
        process, ready = self.processes[name], self._ready[name]
        if process.alive:
            raise ValueError(f"{name} of {self.name} runs already; kill or stop it first")
        process.start()
        deadline = time.monotonic() + START_SECONDS
        why = ""
        while process.alive and time.monotonic() < deadline:
            if not ready:
                return
            try:
                answer(ready, ASK_AGAIN_SECONDS)
            except OSError as error:
                why = f"{ready}: {error}"
                time.sleep(0.05)
            else:
                return
        raise ExampleError(
            f"{name} of {self.name} did not get ready ({why or 'it ended'}). "
            f"The end of {process.log}:\n{process.last_words()}"
        )

    def revive(self, say: Callable[[str], None]) -> None:
        """Start what has ended again, and say so. Raises ExampleError for what may not."""
        for name, process in self.processes.items():
            if process.alive:
                continue
            if not process.restart:
                raise ExampleError(
                    f"{name} of {self.name} has ended. The end of {process.log}:\n"
                    f"{process.last_words()}"
                )
            say(f"{name} of {self.name} has ended; starting it again")
            self.start(name)

    def kill(self, name: str) -> None:
        """End a process by SIGKILL, as a crash would."""
        self.processes[name].kill()

    def stop(self, name: str) -> None:
        """End a process by SIGTERM, and by SIGKILL where that takes long."""
        self.processes[name].stop(STOP_SECONDS)

    def alive(self, name: str) -> bool:
        """Whether a process runs."""
        return name in self.processes and self.processes[name].alive

    def start_scheduler(
        self,
        config: dict[str, Any],
        *,
        name: str = "kube-scheduler",
        arguments: Sequence[str] = (),
    ) -> Process:
        """Start a kube-scheduler.

        Args:
            config: its KubeSchedulerConfiguration; ``apiVersion``, ``kind``, ``clientConnection``
                and ``leaderElection`` are filled in where they are missing.
            name: of the process; a second scheduler needs another one.
            arguments: further ones of its command line, such as ``-v=10``.
        """
        whole = {
            "apiVersion": "kubescheduler.config.k8s.io/v1",
            "kind": "KubeSchedulerConfiguration",
            "clientConnection": {"kubeconfig": str(self.kubeconfig), "qps": 1000, "burst": 2000},
            "leaderElection": {"leaderElect": False},
        } | config
        path = self.folder / f"{name}.yaml"
        path.write_text(json.dumps(whole, indent=1))
        port = free_ports(1)[0]
        component = components.kube_scheduler(path, port, arguments)
        return self._launch(name, component, "kube-scheduler")

    def address(self, name: str) -> str:
        """``host:port`` at which a process tells whether it is ready; empty where it does not."""
        return urlsplit(self._ready[name]).netloc

    def metrics(self, name: str = "kube-scheduler") -> str:
        """A process's figures in Prometheus' format, from beside its readiness URL."""
        return answer(self._ready[name].rpartition("/")[0] + "/metrics")

    # -- clients

    def api(self) -> Any:
        """The official client as administrator, a ``kubernetes.client.ApiClient``; one for all."""
        if self._api is None:
            load: Any = kubernetes.config.new_client_from_config  # it carries no types
            self._api = load(str(self.kubeconfig))
        return self._api

    def kubectl(self, *arguments: str, stdin: str = "") -> str:
        """What kubectl prints as administrator. Raises ExampleError, with its words, on failure."""
        done = subprocess.run(
            [str(self.binaries / "kubectl"), f"--kubeconfig={self.kubeconfig}", *arguments],
            input=stdin,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise ExampleError(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def user_kubeconfig(self, user: str, groups: Sequence[str] = ()) -> Path:
        """Credentials of a user without rights but those that its name or groups are granted."""
        pair = certificates.issue_user(self._ca, user, groups, dt.datetime.now(dt.UTC))
        path = self.folder / f"user-{user.replace(':', '-')}.kubeconfig"
        return self._write_kubeconfig(path, certificates.user_entry(pair))

    def token_kubeconfig(self, namespace: str, service_account: str) -> Path:
        """Credentials of a service account that exists: a token as a pod of it would get one."""
        token = self.kubectl(
            "create", "token", service_account, f"--namespace={namespace}", "--duration=24h"
        ).strip()
        path = self.folder / f"token-{namespace}-{service_account}.kubeconfig"
        return self._write_kubeconfig(path, {"token": token}, namespace)

    # -- objects

    def wait_for_service_account(self, namespace: str) -> None:
        """Wait for a namespace's default service account, without which no pod is admitted."""
        core = kubernetes.client.CoreV1Api(self.api())

        def there() -> bool:
            try:
                core.read_namespaced_service_account("default", namespace)
            except kubernetes.client.ApiException as error:
                if error.status != 404:
                    raise
                return False
            return True

        until(there, f"namespace {namespace} of {self.name} has its default service account")

    def create_nodes(self, manifests: Iterable[dict[str, Any]]) -> None:
        """Create nodes and, where kwok runs, wait until all of them are Ready."""
        core: Any = kubernetes.client.CoreV1Api(self.api())  # its types know no plain objects
        found = list(manifests)

        def create(manifest: dict[str, Any]) -> None:
            core.create_node(manifest, _preload_content=False).read()

        with ThreadPoolExecutor(_KEPT_ALIVE) as pool:
            list(pool.map(create, found))
        names = {str(manifest["metadata"]["name"]) for manifest in found}
        if self._kwok:
            until(lambda: names <= self.ready_nodes(), f"the nodes of {self.name} are Ready")

    def ready_nodes(self) -> set[str]:
        """Names of the nodes that are Ready and not tainted as something else."""
        core: Any = kubernetes.client.CoreV1Api(self.api())
        found = core.list_node(resource_version="0", _preload_content=False).read()
        return {
            item["metadata"]["name"]
            for item in json.loads(found)["items"]
            if any(
                condition["type"] == "Ready" and condition["status"] == "True"
                for condition in item["status"].get("conditions", [])
            )
            and not any(
                taint["key"].startswith("node.kubernetes.io/")
                for taint in item["spec"].get("taints", [])
            )
        }


def until(met: Callable[[], object], what: str, seconds: float = START_SECONDS) -> None:
    """Wait until ``met()`` is true. Raises ExampleError, naming ``what``, after so many seconds.

    An API server that is away in between, or has too much to do, is waited for as well.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            if met():
                return
        except (OSError, HTTPError):
            pass
        except kubernetes.client.ApiException as error:
            busy = int(error.status or 0)
            if busy < HTTPStatus.INTERNAL_SERVER_ERROR and busy != HTTPStatus.TOO_MANY_REQUESTS:
                raise
        if time.monotonic() > deadline:
            raise ExampleError(f"waited {seconds:.0f} s in vain until {what}")
        time.sleep(0.05)
