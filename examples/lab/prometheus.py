"""A real Prometheus over the emulated nodes: its configuration and its command line.

The lab's demo and tests run it through ``ControlPlane.run``, one for each cluster.
"""

import json
from pathlib import Path
from typing import Any, Literal

from agent.simulator.nodes import NodeMix
from examples.lab.emulated_cluster import node_address

Instances = Literal["name", "address"]


def scrape_config(
    exporter: str,
    nodes: NodeMix,
    *,
    seconds: float = 1.0,
    instances: Instances = "name",
) -> dict[str, Any]:
    """Prometheus' configuration for one emulator.

    Args:
        exporter: ``host:port`` of the emulator.
        nodes: those that it emulates; each is a target of its own, its GPUs another.
        seconds: between two scrapes.
        instances: ``name`` labels the series with the node's name, as kube-prometheus does
            (``instance`` and ``node``); ``address`` leaves the exporters' own addresses.
    """

    def target(row: int, path: str, port: int) -> dict[str, Any]:
        name = nodes.names[row]
        labels = {"__metrics_path__": f"/metrics/{path}/{name}"}
        if instances == "name":
            labels |= {"instance": name, "node": name}
        else:
            labels |= {"instance": f"{node_address(row)}:{port}"}
        return {"targets": [exporter], "labels": labels}

    rows = range(len(nodes))
    return {
        "global": {
            "scrape_interval": f"{round(seconds * 1000)}ms",
            "scrape_timeout": f"{round(seconds * 1000)}ms",
        },
        "scrape_configs": [
            {
                "job_name": "node-exporter",
                "static_configs": [target(row, "nodes", 9100) for row in rows],
            },
            {
                "job_name": "dcgm-exporter",
                "static_configs": [
                    target(row, "gpus", 9400) for row in rows if nodes.gpu_type[row] >= 0
                ],
            },
            {
                "job_name": "workload",
                "honor_labels": True,
                "metrics_path": "/metrics/workload",
                "static_configs": [{"targets": [exporter]}],
            },
            {"job_name": "emulator", "static_configs": [{"targets": [exporter]}]},
        ],
    }


def command(program: Path, folder: Path, config: dict[str, Any], port: int) -> list[str]:
    """Write the configuration into ``folder``, and the command line that serves it at ``port``."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "prometheus.yml"
    path.write_text(json.dumps(config, indent=1))  # JSON is YAML
    return [
        str(program),
        f"--config.file={path}",
        f"--storage.tsdb.path={folder / 'data'}",
        "--storage.tsdb.retention.time=6h",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]


def ready_url(port: int) -> str:
    """Answers 200 once it serves."""
    return f"http://127.0.0.1:{port}/-/ready"
