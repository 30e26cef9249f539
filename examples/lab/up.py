"""``make lab``: real clusters to look at and work with, until Ctrl-C ends them."""

import contextlib
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from examples.lab import prometheus
from examples.lab.control_plane import ControlPlane
from examples.lab.manifests import sample_nodes
from examples.processes import ExampleError, StoppedError, Supervisor, free_ports, stoppable

console = Console()
if not console.is_terminal:
    console = Console(width=110)  # tables in a log keep their columns


def up(
    clusters: Annotated[
        int, typer.Option(min=1, max=3, help="Clusters, about 0.5 GB of memory each.")
    ] = 1,
    nodes: Annotated[
        int, typer.Option(min=0, max=5000, help="Nodes of each, every other one with GPUs.")
    ] = 4,
    output: Annotated[Path, typer.Option("--out", help="Folder for data and logs.")] = Path(
        "lab-out"
    ),
) -> None:
    """Real Kubernetes clusters as plain processes on this machine, until Ctrl-C.

    Each has etcd, kube-apiserver, kube-controller-manager, kube-scheduler, and kwok in place of
    kubelets: pods are scheduled for real and run by name only. The programs are built once, from
    Go modules, into ~/.cache/fedsched/lab. A process that is killed comes back.
    """
    supervisor = Supervisor(say=lambda line: console.print(escape(line), highlight=False))
    status = 0
    try:
        output.mkdir(parents=True, exist_ok=True)
        run = Path(tempfile.mkdtemp(prefix="run-", dir=output)).resolve()
        with stoppable(supervisor), contextlib.ExitStack() as stack:
            planes = [ControlPlane(run / f"lab-{n}", name=f"lab-{n}") for n in range(clusters)]
            for plane in planes:
                console.print(f"Starting {plane.name} …")
                stack.enter_context(plane)
                plane.start_scheduler({})
                monitor(plane)
                plane.create_nodes(sample_nodes(nodes))
            for plane in planes:
                console.print(shown(plane))
            console.print(instructions(planes), highlight=False, soft_wrap=True)
            while True:
                for plane in planes:
                    supervisor.check()
                    plane.revive(supervisor.say)
                time.sleep(0.5)
    except StoppedError as signalled:
        console.print(f"Stopped by {signalled}; everything that was started has ended.")
    except (ExampleError, OSError) as error:
        console.print(f"[red]error:[/red] {escape(str(error))}", highlight=False)
        status = 1
    raise typer.Exit(status)


def monitor(plane: ControlPlane) -> None:
    """Start a Prometheus that scrapes the API server and the scheduler."""
    plane.kubectl("create", "serviceaccount", "prometheus")
    plane.kubectl(
        "create", "clusterrole", "metrics", "--verb=get", "--non-resource-url=/metrics"
    )  # fmt: skip
    plane.kubectl(
        "create", "clusterrolebinding", "metrics", "--clusterrole=metrics",
        "--serviceaccount=default:prometheus",
    )  # fmt: skip
    token = plane.kubectl("create", "token", "prometheus", "--duration=24h").strip()
    scheme = {"scheme": "https", "tls_config": {"insecure_skip_verify": True}}
    config = {
        "global": {"scrape_interval": "5s"},
        "scrape_configs": [
            {
                "job_name": name,
                "static_configs": [{"targets": [plane.address(name)]}],
                "authorization": {"credentials": token},
                **scheme,
            }
            for name in ("kube-apiserver", "kube-scheduler")
        ],
    }
    port = free_ports(1)[0]
    plane.run(
        "prometheus",
        prometheus.command(
            plane.binaries / "prometheus", plane.folder / "prometheus", config, port
        ),
        ready=prometheus.ready_url(port),
    )


def shown(plane: ControlPlane) -> Table:
    """A cluster's processes."""
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        title=f"{plane.name}: {plane.url}",
        title_justify="left",
    )
    table.add_column("process")
    table.add_column("pid", justify="right")
    table.add_column("at", no_wrap=True)
    table.add_column("log", overflow="fold")
    for name, process in plane.processes.items():
        pid = process.popen.pid if process.popen is not None else ""
        table.add_row(name, str(pid), plane.address(name), str(process.log))
    return table


def instructions(planes: list[ControlPlane]) -> str:
    """What to type to work with the clusters."""
    first = planes[0]
    lines = [
        "In another terminal:",
        f"  export PATH={first.binaries}:$PATH",
        *(f"  export KUBECONFIG={plane.kubeconfig}  # {plane.name}" for plane in planes),
        "  kubectl get nodes",
        "  kubectl create deployment web --image=web --replicas=3 && kubectl get pods -o wide",
        "Ctrl-C ends everything.",
    ]
    return "\n".join(lines)
