"""Metrics of the emulated nodes and GPUs, as node_exporter and dcgm-exporter show real ones.

emulator.py serves them; prometheus.py has them scraped. What a node uses follows from its jobs
(agent/simulator/utilisation.py); counters add it up over wall time, so that ``rate`` over wall
seconds gives the true share, however fast the cluster's own clock runs. Windows are short then, so
counters say when they were read: a scrape that was held up would pass for another rate.
"""

import asyncio
import time
import uuid
from collections.abc import Callable, Iterator

import numpy as np
from aiohttp import web

from agent.arrays import Floats
from agent.cluster.view import (
    CPU,
    GPUS,
    MEMORY,
    RUNNING,
    SHARE,
    USAGE_CPU,
    USAGE_DISK,
    USAGE_MEMORY,
    USAGE_NETWORK,
)
from agent.simulator.engine import measure
from agent.simulator.manifest import GPU_PRODUCTS
from agent.simulator.utilisation import NETWORK_MBPS
from examples.lab.emulated_cluster import EmulatedCluster

SAMPLE_SECONDS = 0.25
GPU_BUSY = 0.9
"""Share of the time in which a training job keeps a GPU of its own busy: nobody measured it for
these jobs, and the simulator's speeds do not depend on it."""
_GIB, _MIB = float(1 << 30), float(1 << 20)
_MODES = {"idle": 0.0, "user": 0.85, "system": 0.13, "iowait": 0.02}
"""Shares of the busy time; idle is the rest of all time."""
_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_POWER_IDLE, _POWER_BUSY, _COOL, _WARM = 30.0, 220.0, 30.0, 45.0
_GPU_IDS = uuid.UUID("0c5b7f0e-1f42-5c06-8f4e-6c8f0a1d9c55")


class Exporter:
    """The metrics of one emulated cluster."""

    def __init__(
        self,
        cluster: EmulatedCluster,
        *,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster, self._monotonic = cluster, monotonic
        nodes = len(cluster.mix)
        self._rows = {name: row for row, name in enumerate(cluster.mix.names)}
        self._began = self._sampled = monotonic()
        self._boot = wall()
        self._use = np.zeros((nodes, 4))
        self._sums = np.zeros((nodes, 4))
        """∫ use dt, wall seconds."""
        measure(cluster.sim)
        self._use[:] = cluster.sim.cluster.usage

    async def run(self) -> None:
        """Take samples for ever; end it by cancelling its task."""
        while True:
            await asyncio.sleep(SAMPLE_SECONDS)
            self.sample()

    def sample(self) -> None:
        """Add what was used since the last sample to the counters."""
        now = self._monotonic()
        measure(self._cluster.sim)
        use = self._cluster.sim.cluster.usage
        self._sums += (now - self._sampled) * (self._use + use) / 2.0
        self._use[:], self._sampled = use, now

    def add_routes(self, router: web.UrlDispatcher) -> None:
        """The paths that Prometheus scrapes."""
        router.add_get("/metrics", self._own)
        router.add_get("/metrics/nodes/{node}", self._node)
        router.add_get("/metrics/gpus/{node}", self._gpus)
        router.add_get("/metrics/workload", self._workload)

    # Node exporter --------------------------------------------------------------------------

    async def _node(self, request: web.Request) -> web.Response:
        self.sample()
        return _text(self.node(self._row(request)))

    def node(self, row: int) -> Iterator[str]:
        """The lines of a node's exporter."""
        view = self._cluster.sim.cluster
        elapsed = self._sampled - self._began
        at = round((self._boot + elapsed) * 1e3)  # ms
        busy = float(self._sums[row, USAGE_CPU])
        yield "# TYPE node_cpu_seconds_total counter"
        for mode, share in _MODES.items():
            seconds = elapsed - busy if mode == "idle" else busy * share
            for cpu in range(int(np.ceil(view.capacity[row, CPU]))):
                yield f'node_cpu_seconds_total{{cpu="{cpu}",mode="{mode}"}} {seconds:.6f} {at}'
        total = float(view.capacity[row, MEMORY]) * _GIB
        free = total * (1.0 - float(self._use[row, USAGE_MEMORY]))
        yield "# TYPE node_memory_MemTotal_bytes gauge"
        yield f"node_memory_MemTotal_bytes {total:.0f}"
        yield "# TYPE node_memory_MemAvailable_bytes gauge"
        yield f"node_memory_MemAvailable_bytes {free:.0f}"
        yield "# TYPE node_disk_io_time_seconds_total counter"
        seconds = float(self._sums[row, USAGE_DISK])
        yield f'node_disk_io_time_seconds_total{{device="nvme0n1"}} {seconds:.6f} {at}'
        moved = float(self._sums[row, USAGE_NETWORK]) * NETWORK_MBPS * 1e6 / 2.0
        for way in ("receive", "transmit"):
            yield f"# TYPE node_network_{way}_bytes_total counter"
            yield f'node_network_{way}_bytes_total{{device="eth0"}} {moved:.0f} {at}'
            yield f'node_network_{way}_bytes_total{{device="lo"}} {elapsed * 1e4:.0f} {at}'
        yield "# TYPE node_network_speed_bytes gauge"
        yield f'node_network_speed_bytes{{device="eth0"}} {NETWORK_MBPS * 1e6:.0f}'
        yield "# TYPE node_uname_info gauge"
        yield f'node_uname_info{{nodename="{self._cluster.mix.names[row]}"}} 1'
        yield "# TYPE node_boot_time_seconds gauge"
        yield f"node_boot_time_seconds {self._boot:.3f}"

    # DCGM exporter --------------------------------------------------------------------------

    async def _gpus(self, request: web.Request) -> web.Response:
        row = self._row(request)
        if not self._cluster.sim.cluster.capacity[row, GPUS]:
            raise web.HTTPNotFound(text="this node has no GPU\n")
        return _text(self.gpus(row))

    def gpus(self, row: int) -> Iterator[str]:
        """The lines of the exporter of a node's GPUs."""
        cluster = self._cluster
        view, name = cluster.sim.cluster, cluster.mix.names[row]
        busy, used = self._gpu_use(row)
        total = float(view.gpu_memory[row]) * _GIB / _MIB
        used = np.minimum(used * _GIB / _MIB, total)
        model = GPU_PRODUCTS[cluster.objects.gpu_type(row)]
        series: dict[str, Floats] = {
            "DCGM_FI_DEV_GPU_UTIL": np.round(100.0 * busy),
            "DCGM_FI_DEV_MEM_COPY_UTIL": np.round(60.0 * busy),
            "DCGM_FI_DEV_FB_USED": np.round(used),
            "DCGM_FI_DEV_FB_FREE": np.round(total) - np.round(used),
            "DCGM_FI_DEV_GPU_TEMP": np.round(_COOL + _WARM * busy),
            "DCGM_FI_DEV_POWER_USAGE": _POWER_IDLE + _POWER_BUSY * busy,
        }
        for metric, values in series.items():
            yield f"# TYPE {metric} gauge"
            for gpu, value in enumerate(values):
                identity = uuid.uuid5(_GPU_IDS, f"{cluster.settings.name}/{name}/{gpu}")
                labels = (
                    f'gpu="{gpu}",UUID="GPU-{identity}",device="nvidia{gpu}",'
                    f'modelName="{model}",{cluster.settings.hostname_label}="{name}"'
                )
                yield f"{metric}{{{labels}}} {value:g}"

    def _gpu_use(self, row: int) -> tuple[Floats, Floats]:
        """[G] busy share and [G] GiB in use of each GPU of a node."""
        sim = self._cluster.sim
        view, count = sim.cluster, int(sim.cluster.capacity[row, GPUS])
        busy, used = np.zeros(count), np.zeros(count)
        for pod in view.queue[RUNNING, : view.counts[RUNNING]].tolist():
            if view.node[pod] != row:
                continue
            share = float(view.request[pod, SHARE]) or 1.0
            for gpu in range(count):
                if int(view.gpu_mask[pod]) >> gpu & 1:
                    busy[gpu] += GPU_BUSY * share
                    used[gpu] += sim.gpu_memory_peak[pod]
        return np.minimum(busy, 1.0), used

    # Jobs and this process ------------------------------------------------------------------

    async def _workload(self, _: web.Request) -> web.Response:
        return _text(self.workload())

    def workload(self) -> Iterator[str]:
        """What the running jobs report of themselves, steps per cluster second."""
        cluster = self._cluster
        view = cluster.sim.cluster
        yield "# TYPE training_steps_per_second gauge"
        for slot in view.queue[RUNNING, : view.counts[RUNNING]].tolist():
            labels = f'namespace="{cluster.settings.namespace}",pod="{cluster.jobs.names[slot]}"'
            yield f"training_steps_per_second{{{labels}}} {cluster.sim.rate[slot]:.6g}"

    async def _own(self, _: web.Request) -> web.Response:
        return _text(self.own())

    def own(self) -> Iterator[str]:
        """How the emulator itself does."""
        cluster = self._cluster
        for name, counts in (
            ("pods", cluster.counts),
            ("writes", cluster.writes.counts),
            ("watch", cluster.reflector.counts),
        ):
            yield f"# TYPE emulator_{name}_total counter"
            for what, count in sorted(counts.items()):
                yield f'emulator_{name}_total{{what="{what}"}} {count}'
        yield "# TYPE emulator_writes_waiting gauge"
        yield f"emulator_writes_waiting {cluster.writes.waiting}"

    def _row(self, request: web.Request) -> int:
        row = self._rows.get(request.match_info["node"])
        if row is None:
            raise web.HTTPNotFound(text="no such node\n")
        return row


def _text(lines: Iterator[str]) -> web.Response:
    body = "\n".join(lines) + "\n"
    return web.Response(body=body.encode(), headers={"Content-Type": _TYPE})
