"""What is known of the cluster beyond its pods, as gauges of ``/metrics``.

Made by ``agent.scheduling.member``; before each scrape it looks at telemetry, devices and the names
that the cluster state had to put together.
"""

from collections import Counter as Tally

from prometheus_client import CollectorRegistry, Gauge

from agent.cluster.devices import Devices
from agent.cluster.state import ClusterState
from agent.cluster.telemetry import BY_NODE, Telemetry


class Observed:
    """Gauges of one process."""

    def __init__(
        self,
        registry: CollectorRegistry,
        state: ClusterState,
        telemetry: Telemetry,
        devices: Devices,
    ) -> None:
        self._state, self._telemetry, self._devices = state, telemetry, devices

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"fedsched_{name}", text, labels, registry=registry)

        self._states = gauge(
            "telemetry", "1 for the state that a source of measurements is in", "source", "state"
        )
        self._readings = gauge(
            "telemetry_readings", "Readings of a source by how they went", "source", "state"
        )
        self._nodes = gauge("telemetry_nodes", "Nodes of which a figure is known", "source")
        self._use = gauge("node_use", "Mean share in use over the measured nodes", "source")
        self._gpu_nodes = gauge(
            "gpu_nodes", "Nodes with GPUs by how these are handed out", "sharing"
        )
        self._dra = gauge("dra", "1 for the state of the ResourceSlice API", "state")
        self._crowded = gauge("names_beyond_limit", "Names that share one place", "kind")

    def update(self) -> None:
        """Set all of them."""
        telemetry = self._telemetry
        for (source, state), count in telemetry.counts.items():
            self._readings.labels(source, state).set(count)
            self._states.labels(source, state).set(telemetry.states[source] == state)
        for source in BY_NODE:
            self._nodes.labels(source).set(len(telemetry.values[source]))
            if source != "gpu_memory":
                self._use.labels(source).set(telemetry.mean(source))
        found = Tally(
            node.sharing or "whole"
            for node in self._state.nodes.values()
            if node.gpus or node.sharing
        )
        for sharing in {"whole", *found}:
            self._gpu_nodes.labels(sharing).set(found[sharing])
        for state in ("unknown", "ok", "absent", "refused"):
            self._dra.labels(state).set(self._devices.state == state)
        for kind in ("job_types", "gpu_models"):
            self._crowded.labels(kind).set(self._state.names.crowded[kind])
