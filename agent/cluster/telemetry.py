"""What nodes and pods really use, read every few seconds into the cluster state.

Run by ``agent.scheduling.member``. Prometheus is asked in a thread, the Metrics API for the CPU and
memory that Prometheus does not tell. No decision waits for any of it: what cannot be had is
unknown, under a name for why that is counted in ``/metrics`` and logged when it changes.
"""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Protocol

from agent.cluster.kubernetes import FAILURES, ApiError, GoneError
from agent.cluster.prometheus import Prometheus, PrometheusError, Sample
from agent.cluster.records import Node, Pod
from agent.cluster.view import USAGE_CPU, USAGE_DISK, USAGE_MEMORY, USAGE_NETWORK
from agent.telemetry_settings import TelemetrySettings

log = logging.getLogger(__name__)

METRICS_API = "metrics_api"
COLUMNS = {
    "cpu": USAGE_CPU,
    "memory": USAGE_MEMORY,
    "disk": USAGE_DISK,
    "network": USAGE_NETWORK,
}
"""Column of ``View.usage`` by source."""
BY_NODE = (*COLUMNS, "gpu", "gpu_memory")
BY_POD = ("steps", "pod_memory")
SOURCES = (*BY_NODE, *BY_POD, METRICS_API)
STATES = {
    "ok": "values come in",
    "off": "not asked for",
    "prometheus_unreachable": "no answer from Prometheus, or an error of its own",
    "prometheus_refused": "Prometheus wants another token or password",
    "not_prometheus": "what answers is not Prometheus",
    "query_failed": "Prometheus cannot evaluate the query",
    "no_series": "the query is answered, with nothing in it: no such exporter",
    "unknown_nodes": "there are values, and of no node or pod that is known here",
    "metrics_api_absent": "the cluster has no Metrics API",
    "metrics_api_refused": "the agent has no right to read the Metrics API",
    "metrics_api_unreachable": "no answer from the Metrics API",
    "internal_error": "an error of the agent's own, which its log has in full",
}
"""What may be said of a source, with what it means."""
_FOR_ALL = ("prometheus_unreachable", "prometheus_refused", "not_prometheus")
PODS_AT_ONCE = 2000
"""Pods that are looked through before the event loop goes on with other things."""
MIB = 1024.0


class Cluster(Protocol):
    """What is needed of ``agent.cluster.state.ClusterState``."""

    nodes: dict[str, Node]
    pods: dict[str, Pod]

    def set_use(self, column: int, shares: Mapping[str, float]) -> None:
        """Write a column of measured use."""

    def set_gpu_memory_free(self, free: Mapping[str, float]) -> None:
        """Write the free memory of each node's emptiest GPU, GiB."""

    def report(self, uid: str, *, steps_per_second: float = 0.0, memory: float = 0.0) -> None:
        """Take in what was measured of a pod."""


def node_names(nodes: Iterable[Node]) -> dict[str, str]:
    """Node name by all that a label may call it: name, addresses, first part of its host name."""
    names: dict[str, str] = {}
    for node in nodes:
        for alias in (*node.addresses, node.name.partition(".")[0]):
            names.setdefault(alias, node.name)
    names.update({node.name: node.name for node in nodes})
    return names


def node_of(labels: Mapping[str, str], keys: Iterable[str], names: Mapping[str, str]) -> str:
    """The node that a series is of, by the first of ``keys`` that names one; empty for none."""
    for key in keys:
        value = labels.get(key, "")
        host = value.rpartition(":")[0].strip("[]") or value
        for alias in (value, host, host.partition(".")[0]):
            if alias in names:
                return names[alias]
    return ""


class Telemetry:
    """The sources of one cluster, what they said last, and how they do."""

    def __init__(
        self,
        settings: TelemetrySettings,
        cluster: Cluster,
        *,
        node_usage: Callable[[], Awaitable[dict[str, tuple[float, float]]]],
        monotonic: Callable[[], float],
    ) -> None:
        """``node_usage`` reads the Metrics API: CPU cores and memory GiB by node name."""
        self._settings, self._cluster = settings, cluster
        self._node_usage, self._monotonic = node_usage, monotonic
        self._prometheus = Prometheus(settings) if settings.prometheus_url else None
        by = ", ".join(settings.node_labels)
        self._queries: dict[str, str] = {}
        for source in (*BY_NODE, *BY_POD):
            text: str = getattr(settings, source)
            if text and self._prometheus is not None:
                text = text.replace("$labels", by).replace("$window", settings.window)
                self._queries[source] = text
        self.states = dict.fromkeys(SOURCES, "off")
        """How each source does, one of :data:`STATES`."""
        self.counts: Counter[tuple[str, str]] = Counter()
        """Readings by source and state."""
        self.values: dict[str, dict[str, float]] = {source: {} for source in BY_NODE}
        """What is known of nodes by source: shares, and GiB for ``gpu_memory``."""
        self._read_at: dict[str, float] = {}

    async def run(self) -> None:
        """Read for ever; end it by cancelling its task."""
        reading: asyncio.Task[None] | None = None
        try:
            while True:
                if reading is None or reading.done():
                    reading = asyncio.create_task(self._try())
                await asyncio.sleep(self._settings.seconds)
                self.expire()
        finally:
            if reading is not None:
                reading.cancel()

    async def _try(self) -> None:
        """An error of ours costs a reading, and not the process."""
        try:
            await self.read()
        except Exception:
            log.exception("a reading of telemetry failed")
            for source, state in self.states.items():
                if state != "off":
                    self._say(source, "internal_error", "see above")

    async def read(self) -> None:
        """One reading of all sources."""
        if self._queries:
            found = await asyncio.to_thread(self._ask)
            for source in BY_NODE:
                if source in found:
                    self._take_nodes(source, found[source])
            await self._take_pods({s: found[s] for s in BY_POD if s in found})
        if any(self.states[source] != "ok" for source in ("cpu", "memory")):
            await self._read_metrics_api()
        else:
            self._say(METRICS_API, "off", "Prometheus tells CPU and memory")
        self.expire()

    def expire(self) -> None:
        """Make unknown what is too old, and write what there is into the cluster."""
        for source in BY_NODE:
            age = self._monotonic() - self._read_at.get(source, -math.inf)
            if age > self._settings.stale_seconds:
                self.values[source] = {}
            if source in COLUMNS:
                self._cluster.set_use(COLUMNS[source], self.values[source])
        self._cluster.set_gpu_memory_free(self.values["gpu_memory"])

    def mean(self, source: str) -> float:
        """Mean share over the nodes that are measured; nan for none."""
        values = self.values[source].values()
        return sum(values) / len(values) if values else math.nan

    # Prometheus -----------------------------------------------------------------------------

    def _ask(self) -> dict[str, list[Sample] | PrometheusError]:
        """In a thread: all queries, one after the other."""
        assert self._prometheus is not None
        found: dict[str, list[Sample] | PrometheusError] = {}
        lost: PrometheusError | None = None
        for source, text in self._queries.items():
            try:
                if lost is not None:  # the others would only wait for the same
                    raise lost
                if not found:
                    self._prometheus.sign_in()
                found[source] = self._prometheus.query(text)
            except PrometheusError as error:
                found[source] = error
                if error.state in _FOR_ALL:
                    lost = error
        return found

    def _take_nodes(self, source: str, found: list[Sample] | PrometheusError) -> None:
        if isinstance(found, PrometheusError):
            self._say(source, found.state, str(found))
            return
        names = node_names(self._cluster.nodes.values())
        groups: dict[str, list[float]] = {}
        for sample in found:
            name = node_of(sample.labels, self._settings.node_labels, names)
            if name:
                groups.setdefault(name, []).append(sample.value)
        if not groups:
            self._say_none(source, found)
            return
        if source == "gpu_memory":
            values = {name: max(group) / MIB for name, group in groups.items()}
        elif source == "gpu":
            values = {name: sum(group) / len(group) for name, group in groups.items()}
        else:
            values = {name: max(group) for name, group in groups.items()}
        if source != "gpu_memory":
            values = {name: min(max(value, 0.0), 1.0) for name, value in values.items()}
        self._keep(source, values)
        self._say(source, "ok", f"{len(values)} nodes")

    def _say_none(self, source: str, found: list[Sample]) -> None:
        if not found:
            self._say(source, "no_series", f"no series for {self._queries[source]!r}")
            return
        wanted = "pod" if source in BY_POD else "node"
        self._say(
            source, "unknown_nodes", f"no {wanted} here is called as in {found[0].labels}, say"
        )

    async def _take_pods(self, found: dict[str, list[Sample] | PrometheusError]) -> None:
        readings: dict[str, dict[tuple[str, str], float]] = {}
        for source, samples in found.items():
            if isinstance(samples, PrometheusError):
                self._say(source, samples.state, str(samples))
            else:
                readings[source] = {
                    (s.labels.get("namespace", ""), s.labels.get("pod", "")): s.value
                    for s in samples
                    if s.value > 0.0
                }
        steps, memory = readings.get("steps", {}), readings.get("pod_memory", {})
        met: Counter[str] = Counter()
        if steps or memory:
            for number, pod in enumerate(list(self._cluster.pods.values())):
                if number % PODS_AT_ONCE == 0:
                    await asyncio.sleep(0)
                key = pod.namespace, pod.name
                met["steps"] += key in steps
                met["pod_memory"] += key in memory
                if key in steps or key in memory:
                    self._cluster.report(
                        pod.uid,
                        steps_per_second=steps.get(key, 0.0),
                        memory=memory.get(key, 0.0) / (1 << 30),
                    )
        for source in readings:
            if met[source]:
                self._say(source, "ok", f"{met[source]} pods")
            else:
                samples = found[source]
                assert not isinstance(samples, PrometheusError)
                self._say_none(source, samples)

    # Metrics API ----------------------------------------------------------------------------

    async def _read_metrics_api(self) -> None:
        try:
            usage = await self._node_usage()
        except GoneError:
            self._say(METRICS_API, "metrics_api_unreachable", "the list ended half way")
            return
        except ApiError as error:
            known = {404: "metrics_api_absent", 401: "metrics_api_refused"}
            known[403] = "metrics_api_refused"
            state = known.get(error.status, "metrics_api_unreachable")
            self._say(METRICS_API, state, str(error))
            return
        except FAILURES as error:
            self._say(METRICS_API, "metrics_api_unreachable", str(error) or repr(error))
            return
        nodes = self._cluster.nodes
        for source, which in (("cpu", 0), ("memory", 1)):
            if self.states[source] != "ok":
                sizes = {name: (node.cpu, node.memory)[which] for name, node in nodes.items()}
                self._keep(
                    source,
                    {n: used[which] / sizes[n] for n, used in usage.items() if sizes.get(n)},
                )
        self._say(METRICS_API, "ok" if usage else "no_series", f"{len(usage)} nodes")

    def _keep(self, source: str, values: dict[str, float]) -> None:
        self.values[source], self._read_at[source] = values, self._monotonic()

    def _say(self, source: str, state: str, detail: str) -> None:
        self.counts[source, state] += 1
        if self.states[source] != state:
            self.states[source] = state
            level = logging.INFO if state in ("ok", "off") else logging.WARNING
            log.log(level, "telemetry %s: %s (%s)", source, state, detail)
