"""Command lines of a control plane's processes, and where each tells that it is ready.

``ControlPlane`` starts them. Nothing here waits or runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

STAGES = Path(__file__).with_name("kwok-stages.yaml")


@dataclass(frozen=True)
class Component:
    """A program of the control plane."""

    arguments: list[str]
    """What follows the program's path."""
    ready: str = ""
    """URL that answers 200 once it is ready; empty where running is enough."""


def etcd(folder: Path, client: int, peer: int) -> Component:
    """The store, without waiting for the disk: a lab's data lives as long as the lab."""
    url, peer_url = f"http://127.0.0.1:{client}", f"http://127.0.0.1:{peer}"
    return Component(
        [
            f"--data-dir={folder / 'etcd'}",
            f"--listen-client-urls={url}",
            f"--advertise-client-urls={url}",
            f"--listen-peer-urls={peer_url}",
            f"--initial-advertise-peer-urls={peer_url}",
            f"--initial-cluster=default={peer_url}",
            "--unsafe-no-fsync",
            "--quota-backend-bytes=4294967296",
            "--log-level=warn",
        ],
        f"{url}/readyz",
    )


def kube_apiserver(
    certificates: Path, port: int, etcd_client: int, disabled_plugins: Sequence[str]
) -> Component:
    """The API server with RBAC."""
    return Component(
        [
            f"--etcd-servers=http://127.0.0.1:{etcd_client}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            f"--secure-port={port}",
            f"--tls-cert-file={certificates / 'apiserver.crt'}",
            f"--tls-private-key-file={certificates / 'apiserver.key'}",
            f"--client-ca-file={certificates / 'ca.crt'}",
            "--authorization-mode=RBAC",
            f"--disable-admission-plugins={','.join(disabled_plugins)}",
            "--allow-privileged=true",
            "--service-cluster-ip-range=10.0.0.0/24",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={certificates / 'sa.pub'}",
            f"--service-account-signing-key-file={certificates / 'sa.key'}",
            # Its own address among the endpoints must not be a loopback one.
            "--endpoint-reconciler-type=none",
        ],
        f"https://127.0.0.1:{port}/readyz",
    )


def kube_controller_manager(certificates: Path, kubeconfig: Path, port: int) -> Component:
    """All controllers, each under its own service account as in a real cluster."""
    return Component(
        [
            f"--kubeconfig={kubeconfig}",
            "--leader-elect=false",
            "--bind-address=127.0.0.1",
            f"--secure-port={port}",
            f"--service-account-private-key-file={certificates / 'sa.key'}",
            f"--root-ca-file={certificates / 'ca.crt'}",
            "--use-service-account-credentials=true",
            "--kube-api-qps=500",
            "--kube-api-burst=1000",
        ],
        f"https://127.0.0.1:{port}/healthz",
    )


def kube_scheduler(config: Path, port: int, further: Sequence[str] = ()) -> Component:
    """The scheduler with its configuration file; ``/metrics`` needs no credentials."""
    return Component(
        [
            f"--config={config}",
            "--bind-address=127.0.0.1",
            f"--secure-port={port}",
            "--authorization-always-allow-paths=/healthz,/readyz,/livez,/metrics",
            *further,
        ],
        f"https://127.0.0.1:{port}/readyz",
    )


def kwok(kubeconfig: Path, port: int) -> Component:
    """Stand-in kubelets of all nodes: Ready at once, and pods as :data:`STAGES` says."""
    return Component(
        [
            f"--kubeconfig={kubeconfig}",
            "--manage-all-nodes=true",
            "--node-lease-duration-seconds=40",
            f"--server-address=127.0.0.1:{port}",
            f"--config={STAGES}",
        ],
        f"http://127.0.0.1:{port}/healthz",
    )
