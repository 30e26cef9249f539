"""Gives the agent of a lab cluster exactly the rights that its chart grants, and no more."""

import subprocess
from pathlib import Path

import yaml

from examples.lab.control_plane import ControlPlane
from examples.processes import ExampleError

CHART = Path(__file__).parents[2] / "charts" / "agent"
NAMESPACE = "fedsched"
RELEASE = "fedsched"


def grant(plane: ControlPlane) -> Path:
    """Create the chart's service account with its roles; the kubeconfig that acts as it.

    Raises ExampleError where the chart does not render or the API server refuses what it holds.
    """
    command = [
        str(plane.binaries / "helm"), "template", RELEASE, str(CHART), "--namespace", NAMESPACE,
        "--show-only", "templates/rbac.yaml",
    ]  # fmt: skip
    rendered = subprocess.run(command, capture_output=True, text=True)
    if rendered.returncode:
        raise ExampleError(f"{CHART} does not render: {rendered.stderr.strip()}")
    items = [item for item in yaml.safe_load_all(rendered.stdout) if item]
    (account,) = (i["metadata"]["name"] for i in items if i["kind"] == "ServiceAccount")
    for item in items:
        if not item["kind"].startswith("Cluster"):  # as `helm install` would
            item["metadata"].setdefault("namespace", NAMESPACE)
    plane.kubectl("create", "namespace", NAMESPACE)
    plane.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(items))
    return plane.token_kubeconfig(NAMESPACE, account)
