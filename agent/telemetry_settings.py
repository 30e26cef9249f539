"""Settings of telemetry: where Prometheus is and what it is asked; a section of ``agent.settings``.

The queries fit node_exporter and dcgm-exporter as they come, and ``agent.cluster.telemetry`` says
what it makes of the answers.
"""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field


class TelemetrySettings(BaseModel):
    """Measured use of nodes: Prometheus where ``prometheus_url`` is set, and the Metrics API for
    CPU and memory that it does not tell. ``$labels`` in a query stands for ``node_labels`` and
    ``$window`` for ``window``; an empty query leaves its figure unknown."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    seconds: float = Field(default=15.0, gt=0.0)
    """Time between two readings."""
    stale_seconds: float = Field(default=60.0, gt=0.0)
    """Age beyond which a value counts as unknown."""
    prometheus_url: str = Field(default="", pattern=r"^(https?://\S+)?$")
    """Prometheus, or what answers like it, such as ``http://prometheus.monitoring:9090``."""
    timeout_seconds: float = Field(default=5.0, gt=0.0)
    """Longest time for one query; decisions wait for none."""
    token_file: Path | None = None
    """File with a bearer token, read anew at each reading."""
    username: str = ""
    """User of HTTP basic authentication."""
    password_file: Path | None = None
    """File with that user's password, read anew at each reading."""
    ca_file: Path | None = None
    """CA certificates that Prometheus is trusted by, in PEM; the system's otherwise."""
    headers: dict[str, str] = {}
    """Further HTTP headers, such as ``{X-Scope-OrgID: tenant}``."""
    node_labels: tuple[str, ...] = (
        "node",
        "nodename",
        "kubernetes_node",
        "Hostname",
        "hostname",
        "instance",
    )
    """Labels that may name a series' node, the first that does counts: by name, or by an address of
    the node with or without a port."""
    window: str = Field(default="2m", pattern=r"^(\d+(ms|[smhd]))+$")
    """Time over which rates are taken; at least four times Prometheus' scrape interval."""
    cpu: str = '1 - avg by ($labels) (rate(node_cpu_seconds_total{mode="idle"}[$window]))'
    """Query: share of the node's CPU in use, 0 to 1."""
    memory: str = (
        "1 - max by ($labels) (node_memory_MemAvailable_bytes)"
        " / max by ($labels) (node_memory_MemTotal_bytes)"
    )
    """Query: share of the node's memory in use, 0 to 1."""
    disk: str = "max by ($labels) (rate(node_disk_io_time_seconds_total[$window]))"
    """Query: share of time in which the node's busiest disk works, 0 to 1."""
    network: str = (
        "sum by ($labels) ((rate(node_network_receive_bytes_total[$window])"
        " + rate(node_network_transmit_bytes_total[$window]))"
        ' and (node_network_speed_bytes{device!~"(lo|veth|cali|cilium|lxc|docker|br-|cni|tun).*"}'
        " > 0)) / sum by ($labels)"
        ' (node_network_speed_bytes{device!~"(lo|veth|cali|cilium|lxc|docker|br-|cni|tun).*"} > 0)'
    )
    """Query: what the node receives and sends as a share of its links' speed, 0 to 1."""
    gpu: str = "avg by ($labels) (DCGM_FI_DEV_GPU_UTIL) / 100"
    """Query: mean use of the node's GPUs, 0 to 1."""
    gpu_memory: str = "max by ($labels) (DCGM_FI_DEV_FB_FREE)"
    """Query: free memory of the GPU that has most of it free, MiB."""
    steps: str = ""
    """Query: progress of pods in steps per second, by ``namespace`` and ``pod``; it goes before the
    annotation ``fedsched.io/steps-per-second``."""
    pod_memory: str = ""
    """Query: memory in use by pods, bytes, by ``namespace`` and ``pod``; of each pod the highest is
    kept. It can be ``sum by (namespace, pod) (container_memory_working_set_bytes{container!=""})``,
    a large answer in a large cluster."""
