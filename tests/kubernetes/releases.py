"""Helm as the chart tests use it: rendering, and releases whose containers a kubelet runs."""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from agent.arrays import kernel_cache
from examples.lab.build import binaries
from examples.lab.control_plane import ControlPlane
from tests.kubernetes.image import ROOT, read_image
from tests.kubernetes.kubelet import LABEL, Kubelet

CHARTS = {name: ROOT / "charts" / name for name in ("agent", "coordinator")}
IMAGES = {f"fedsched/{name}": read_image(ROOT / "docker" / f"{name}.Dockerfile") for name in CHARTS}
EMULATED = {"podLabels": {LABEL: "true"}}
"""Values that leave a release's pods to the test's kubelet."""
KUBE_VERSION = "v1.36.3"


class HelmError(Exception):
    """Helm refused; its own words."""


def helm(*arguments: str, cluster: ControlPlane | None = None) -> str:
    """What Helm prints. Raises HelmError."""
    with _helm(*arguments, cluster=cluster) as process:
        out, words = process.communicate()
        if process.returncode:
            raise HelmError(out + words)
    return out


@contextlib.contextmanager
def _helm(*arguments: str, cluster: ControlPlane | None) -> Iterator["subprocess.Popen[str]"]:
    program = binaries() / "helm"
    # No settings, plugins or caches of whoever runs the tests.
    environment = {"PATH": os.environ["PATH"], "HOME": str(binaries() / "nobody")}
    if cluster is not None:
        environment["KUBECONFIG"] = str(cluster.kubeconfig)
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [program, *arguments], stdout=pipe, stderr=pipe, text=True, env=environment
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def run_while(kubelet: Kubelet, *arguments: str) -> str:
    """Helm on the kubelet's cluster and namespace, while the kubelet works. Raises HelmError."""
    command = (*arguments, "--namespace", kubelet.namespace)
    with _helm(*command, cluster=kubelet.lab) as process:
        kubelet.until(lambda: process.poll() is not None, f"helm {arguments[0]} is done")
        out, words = process.communicate()
        if process.returncode:
            raise HelmError(f"{words}\n{kubelet.logs()}")
    return out


def render(
    chart: str, values: dict[str, Any], folder: Path, *, version: str = KUBE_VERSION
) -> list[dict[str, Any]]:
    """A chart's objects, hooks included, in Helm's order. Raises HelmError."""
    file = folder / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    text = helm(
        "template", "fedsched", str(CHARTS[chart]), "--namespace", "ml",
        "--kube-version", version, "--values", str(file),
    )  # fmt: skip
    return [found for found in yaml.safe_load_all(text) if found]


def one(objects: list[dict[str, Any]], kind: str, name: str = "") -> dict[str, Any]:
    """The only object of a kind, or the one of that name as well."""
    found = [o for o in objects if o["kind"] == kind and name in ("", o["metadata"]["name"])]
    assert len(found) == 1, [o["metadata"]["name"] for o in found]
    return found[0]


def image_content(folder: Path) -> dict[str, Path]:
    """What the agent's image holds beyond its programs: this machine's kernels, at their place."""
    kernels = kernel_cache()
    if not (complete := kernels / "complete").exists():  # else each pod would compile the rest
        subprocess.run([sys.executable, "-m", "agent.warm"], check=True)
        complete.touch()
    place = folder / "image" / kernels.parent.name / kernels.name
    if not place.exists():
        shutil.copytree(kernels, place)
    return {"/opt/kernels": folder / "image"}


def kubelet(cluster: ControlPlane, namespace: str, folder: Path) -> Kubelet:
    """A kubelet that has both images and the lab's kube-scheduler."""
    scheduler = str(binaries() / "kube-scheduler")
    return Kubelet(
        cluster,
        namespace,
        folder / "pods",
        images=IMAGES,
        content=image_content(folder),
        programs={
            "fedsched": [sys.executable, "-m", "common.cli"],
            "kube-scheduler": [scheduler, "--bind-address=127.0.0.1"],
        },
    )
