"""A kubelet for tests that want a chart's containers to be real: processes of this machine.

Used by the chart tests, on pods that carry kwok's label for "leave this one alone". What a pod's
specification says is what is run: arguments, environment, mounted ConfigMaps, Secrets and volumes,
the service account's token bound to the pod, init containers first; probes decide what is ready.
There being no mount namespace, a path in the container stands for a folder of the test's, wherever
it is named. Nothing happens by itself: call :meth:`Kubelet.step`, or wait with
:meth:`Kubelet.until`.
"""

import base64
import contextlib
import json
import os
import re
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kubernetes

from examples.lab.control_plane import ControlPlane
from tests.kubernetes.image import Image

LABEL = "fedsched.io/emulated"
ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
IN_CLUSTER = "in-cluster.kubeconfig"
WAIT = 240.0
"""Longest wait for something that must happen, seconds; it only bounds a failing test."""
_UNCHECKED = ssl._create_unverified_context()  # as a kubelet's HTTPS probes


@dataclass
class Running:
    """One pod's processes."""

    pod: dict[str, Any]
    folder: Path
    paths: dict[str, str]
    """Where what the containers know by these paths is."""
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    ready: dict[str, bool] = field(default_factory=dict)
    shown: object = None
    """The status that the API server was told last."""

    def map(self, text: str) -> str:
        """Name this machine's folders in place of the container's."""
        inside = "|".join(map(re.escape, sorted(self.paths, key=len, reverse=True)))
        return re.sub(inside, lambda found: self.paths[found[0]], text)

    def log(self, container: str) -> str:
        """All that a container wrote."""
        path = self.folder / f"{container}.log"
        return path.read_text(errors="replace") if path.exists() else ""


class Kubelet:
    """Runs the labelled pods of one namespace. A context manager that leaves no process behind.

    Args:
        images: the image's Dockerfile by the repository that the pods name.
        content: what the images hold: a folder of this machine by its path in the image.
        programs: what stands for a program of a container, by its name.
    """

    def __init__(
        self,
        lab: ControlPlane,
        namespace: str,
        folder: Path,
        *,
        images: Mapping[str, Image],
        content: Mapping[str, Path],
        programs: Mapping[str, list[str]],
    ) -> None:
        self.lab, self.namespace, self.folder = lab, namespace, folder
        self._images, self._content, self._programs = images, content, programs
        self._core: Any = kubernetes.client.CoreV1Api(lab.api())
        self.pods: dict[str, Running] = {}
        """By UID."""
        self.ended: dict[str, Running] = {}
        """Those that are gone, by name."""

    def __enter__(self) -> "Kubelet":
        return self

    def __exit__(self, *_: object) -> None:
        for running in self.pods.values():
            for process in running.processes.values():
                process.kill()
                process.wait()

    def named(self, name: str) -> Running:
        """The pod of this name. Raises KeyError."""
        return {running.pod["metadata"]["name"]: running for running in self.pods.values()}[name]

    def until(self, met: Callable[[], Any], what: str) -> Any:
        """Work until ``met()`` is true, and return it; a failure shows all logs."""
        end = time.monotonic() + WAIT
        while time.monotonic() < end:
            self.step()
            if value := met():
                return value
            time.sleep(0.2)
        raise AssertionError(f"waited in vain until {what}\n{self.logs()}")

    def logs(self) -> str:
        """The end of every container's log."""
        return "\n".join(
            f"--- {path}\n{path.read_text(errors='replace')[-2500:]}"
            for path in sorted(self.folder.rglob("*.log"))
        )

    def step(self) -> None:
        """Look at all pods once, and do what is due."""
        answer = self._core.list_namespaced_pod(
            self.namespace, label_selector=f"{LABEL}=true", _preload_content=False
        )
        found = {pod["metadata"]["uid"]: pod for pod in json.loads(answer.data)["items"]}
        for uid, pod in found.items():
            if "nodeName" not in pod["spec"]:
                continue
            if "deletionTimestamp" in pod["metadata"]:
                self._end(pod)
            elif pod["status"]["phase"] in ("Succeeded", "Failed"):
                continue
            elif uid not in self.pods:
                self.pods[uid] = self._start(pod)
            else:
                self._tell(self.pods[uid])

    # ---- starting ----

    def _start(self, pod: dict[str, Any]) -> Running:
        """Make its volumes, run its init containers, start the others."""
        about = pod["metadata"]
        folder = self.folder / f"{about['name']}-{about['uid'][:8]}"
        folder.mkdir(parents=True)
        paths = {"0.0.0.0": "127.0.0.1"}  # the pod's own address
        volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", [])}
        spec = pod["spec"]
        for container in (*spec.get("initContainers", []), *spec["containers"]):
            for mount in container.get("volumeMounts", []):
                paths[mount["mountPath"]] = str(folder / "volumes" / mount["name"])
        running = Running(pod, folder, paths | {k: str(v) for k, v in self._content.items()})
        for name, volume in volumes.items():
            self._volume(running, folder / "volumes" / name, volume)
        for container in spec.get("initContainers", []):
            process = self._run(running, container)
            assert process.wait(WAIT) == 0, self.logs()
        for container in spec["containers"]:
            running.processes[container["name"]] = self._run(running, container)
        return running

    def _volume(self, running: Running, place: Path, volume: dict[str, Any]) -> None:
        place.parent.mkdir(exist_ok=True)
        if claim := volume.get("persistentVolumeClaim"):
            place.symlink_to(self._claimed(claim["claimName"]))
            return
        place.mkdir()
        if about := volume.get("configMap"):
            self._config_map(running, place, about["name"])
        elif about := volume.get("secret"):
            for key, value in self._secret(about["secretName"]).items():
                (place / key).write_bytes(value)
        elif about := volume.get("projected"):
            for source in about["sources"]:
                self._project(running, place, source)
        else:
            assert "emptyDir" in volume, f"no such volume here: {volume}"

    def _claimed(self, claim: str) -> Path:
        """The folder behind a claim, which a hostPath volume of the cluster is bound to."""
        bound = self._core.read_namespaced_persistent_volume_claim(claim, self.namespace)
        volume = self._core.read_persistent_volume(bound.spec.volume_name)
        folder = Path(volume.spec.host_path.path)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _config_map(self, running: Running, place: Path, name: str) -> None:
        data = self._core.read_namespaced_config_map(name, self.namespace).data
        for key, text in data.items():
            (place / key).write_text(self._in_cluster(running, running.map(text)))

    def _in_cluster(self, running: Running, text: str) -> str:
        """client-go knows the account by a fixed path only: say where else its files are."""
        if "kind: KubeSchedulerConfiguration" not in text:
            return text
        account, path = running.paths[ACCOUNT], running.folder / IN_CLUSTER
        cluster = {"server": self.lab.url, "certificate-authority": f"{account}/ca.crt"}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "here", "cluster": cluster}],
            "users": [{"name": "account", "user": {"tokenFile": f"{account}/token"}}],
            "contexts": [{"name": "in", "context": {"cluster": "here", "user": "account"}}],
            "current-context": "in",
        }
        path.write_text(json.dumps(content))
        return text.replace("clientConnection:\n", f"clientConnection:\n  kubeconfig: {path}\n")

    def _secret(self, name: str) -> dict[str, bytes]:
        data = self._core.read_namespaced_secret(name, self.namespace).data
        return {key: base64.b64decode(value) for key, value in data.items()}

    def _project(self, running: Running, place: Path, source: dict[str, Any]) -> None:
        about = running.pod["metadata"]
        if "serviceAccountToken" in source:
            token = self.lab.kubectl(
                "create", "token", running.pod["spec"]["serviceAccountName"],
                f"--namespace={self.namespace}", "--bound-object-kind=Pod",
                f"--bound-object-name={about['name']}", f"--bound-object-uid={about['uid']}",
            )  # fmt: skip
            (place / source["serviceAccountToken"]["path"]).write_text(token.strip())
        elif "configMap" in source:
            self._config_map(running, place, source["configMap"]["name"])
        else:
            for item in source["downwardAPI"]["items"]:
                (place / item["path"]).write_text(_field(running.pod, item["fieldRef"]))

    def _run(
        self, running: Running, container: dict[str, Any], command: list[str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a container's process, or another one in the container's place."""
        log = running.folder / f"{container['name']}{'-exec' if command else ''}.log"
        with log.open("ab") as out:
            return subprocess.Popen(
                self._command(running, container, command),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=self._environment(running, container),
                cwd=self._directory(running, container),
                start_new_session=True,
            )

    def _command(
        self, running: Running, container: dict[str, Any], command: list[str] | None
    ) -> list[str]:
        if command is None:
            image = self._image(container)
            command = container.get("command") or (image.entrypoint if image else [])
            command = [*command, *container.get("args", [])]
        words = [running.map(word) for word in command]
        if words[0] == "kube-scheduler":  # see _in_cluster
            here = running.folder / IN_CLUSTER
            words += [f"--{what}-kubeconfig={here}" for what in ("authentication", "authorization")]
        return [*self._programs.get(words[0], words[:1]), *words[1:]]

    def _image(self, container: dict[str, Any]) -> Image | None:
        return self._images.get(container["image"].rpartition(":")[0])

    def _directory(self, running: Running, container: dict[str, Any]) -> str:
        """Where its processes begin: where the image says, or in the pod's own folder."""
        image = self._image(container)
        return running.map(image.folder) if image else str(running.folder)

    def _environment(self, running: Running, container: dict[str, Any]) -> dict[str, str]:
        """The image's, the container's, and what a kubelet gives; then this machine's own."""
        image = self._image(container)
        given = dict(image.environment) if image else {}
        for variable in container.get("env", []):
            given[variable["name"]] = self._value(running.pod, variable)
        host, port = self.lab.url.removeprefix("https://").split(":")
        given |= {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
        mounted = {mount["mountPath"] for mount in container.get("volumeMounts", [])}
        if ACCOUNT in mounted:
            given["FEDSCHED_AGENT_KUBERNETES__SERVICE_ACCOUNT"] = ACCOUNT
        given = {name: running.map(value) for name, value in given.items()}
        # Its own interpreter and kernels: an image's are for any processor.
        here = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
        return {k: v for k, v in given.items() if not k.startswith("NUMBA_")} | here

    def _value(self, pod: dict[str, Any], variable: dict[str, Any]) -> str:
        source = variable.get("valueFrom", {})
        if "fieldRef" in source:
            return _field(pod, source["fieldRef"])
        if "secretKeyRef" in source:
            about = source["secretKeyRef"]
            return self._secret(about["name"])[about["key"]].decode()
        return str(variable["value"])

    def exec(self, pod: str, container: str, *command: str) -> bytes:
        """What ``kubectl exec`` would print; the command must succeed."""
        running = self.named(pod)
        (spec,) = (c for c in running.pod["spec"]["containers"] if c["name"] == container)
        return subprocess.run(
            self._command(running, spec, list(command)),
            env=self._environment(running, spec),
            cwd=self._directory(running, spec),
            stdout=subprocess.PIPE,
            check=True,
        ).stdout

    # ---- telling ----

    def _tell(self, running: Running) -> None:
        """Probe, and tell the API server what changed."""
        statuses = []
        for container in running.pod["spec"]["containers"]:
            name = container["name"]
            code = running.processes[name].poll()
            running.ready[name] = code is None and _probes_answer(container)
            state = {"terminated": {"exitCode": code}} if code is not None else {"running": {}}
            statuses.append(
                {
                    "name": name,
                    "image": container["image"],
                    "imageID": "",
                    "restartCount": 0,
                    "started": running.ready[name],
                    "ready": running.ready[name],
                    "state": state,
                }
            )
        codes = [process.poll() for process in running.processes.values()]
        phase = "Running"
        if running.pod["spec"]["restartPolicy"] == "Always":
            assert codes.count(None) == len(codes), f"a container ended\n{self.logs()}"
        elif None not in codes:
            phase = "Failed" if any(codes) else "Succeeded"
        ready = str(all(running.ready.values()))
        conditions = [
            {"type": "Initialized", "status": "True"},
            {"type": "ContainersReady", "status": ready},
            {"type": "Ready", "status": ready},
        ]
        status = {"phase": phase, "conditions": conditions, "containerStatuses": statuses}
        if status != running.shown:
            about = running.pod["metadata"]
            self._core.patch_namespaced_pod_status(
                about["name"], self.namespace, {"status": status | {"podIP": "127.0.0.1"}}
            )
            running.shown = status

    def _end(self, pod: dict[str, Any]) -> None:
        """SIGTERM, the grace period, SIGKILL; then the pod is gone."""
        about = pod["metadata"]
        running = self.pods.pop(about["uid"], None)
        if running is not None:
            self.ended[about["name"]] = running
            for process in running.processes.values():
                process.terminate()
            deadline = time.monotonic() + about["deletionGracePeriodSeconds"]
            for process in running.processes.values():
                try:
                    process.wait(max(deadline - time.monotonic(), 0.1))
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        with contextlib.suppress(kubernetes.client.ApiException):  # deleted meanwhile
            self._core.delete_namespaced_pod(about["name"], self.namespace, grace_period_seconds=0)


def _field(pod: dict[str, Any], reference: dict[str, str]) -> str:
    found: Any = pod
    for step in reference["fieldPath"].split("."):
        found = found[step]
    return str(found)


def _probes_answer(container: dict[str, Any]) -> bool:
    """Whether every HTTP probe of a container is answered with success."""
    ports = {port["name"]: port["containerPort"] for port in container.get("ports", [])}
    for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
        if (probe := container.get(kind)) is None:
            continue
        about = probe["httpGet"]
        port = ports.get(about["port"], about["port"])
        url = f"{about.get('scheme', 'HTTP').lower()}://127.0.0.1:{port}{about['path']}"
        try:
            with urllib.request.urlopen(url, timeout=5.0, context=_UNCHECKED):
                pass
        except OSError:
            return False
    return True
