"""A workload's nodes, pods and progress as Kubernetes shows them, by row and slot.

Called by embedded.py, whose API is its own, and by the lab's node emulator, whose API server is a
real one.
"""

import math
from collections.abc import Callable

import numpy as np

from agent.cluster.speeds_file import KindSpeeds, SpeedsFile
from agent.simulator import manifest
from agent.simulator.hardware import SpeedTable
from agent.simulator.nodes import NodeMix
from agent.simulator.simulation import ACTIVE, Simulation
from agent.simulator.store import Json
from agent.simulator.workloads import Workload


class JobObjects:
    """Objects of one workload on one mix of nodes, of which nothing is kept."""

    def __init__(
        self,
        workload: Workload,
        nodes: NodeMix,
        speeds: SpeedTable,
        stamp: Callable[[float], str],
        *,
        scheduler: str,
        gated: bool,
        seed: int,
    ) -> None:
        """``stamp`` gives the API server's time at a cluster second; ``seed`` makes UIDs."""
        self._workload, self._nodes, self._speeds = workload, nodes, speeds
        self._stamp, self._scheduler, self._gated, self._seed = stamp, scheduler, gated, seed
        self._labels = manifest.label_values(speeds.job_types)
        self.jobs = [f"job-{slot:05d}" for slot in range(len(workload))]
        """[P] names."""

    def node(self, row: int) -> Json:
        """The node of a row of the view, created at the start."""
        mix = self._nodes
        return manifest.node(
            mix.names[row],
            capacity=mix.capacity[row],
            gpu_type=self.gpu_type(row),
            gpu_memory=float(mix.gpu_memory[row]),
            seed=self._seed,
            created=self._stamp(0.0),
        )

    def gpu_type(self, row: int) -> str:
        """The measured GPU type of a row's node; empty where it has no GPU."""
        number = int(self._nodes.gpu_type[row])
        return self._speeds.gpu_types[number] if number >= 0 else ""

    def pod(self, slot: int, attempt: int, created: float) -> Json:
        """The pod of a job's attempt, from 0, created at this cluster second."""
        w = self._workload
        job = int(self._speeds.kind_type[w.kind[slot]]) if w.kind[slot] >= 0 else -1
        mask, types = int(w.allowed[slot]), self._speeds.gpu_types
        products = [manifest.GPU_PRODUCTS[t] for i, t in enumerate(types) if mask >> i & 1]
        deadline = float(w.deadline[slot])
        return manifest.pod(
            f"{self.jobs[slot]}-{attempt}" if attempt else self.jobs[slot],
            job=self.jobs[slot],
            job_type=self._speeds.job_types[job] if job >= 0 else "",
            job_label=self._labels[job] if job >= 0 else "",
            cpu=float(w.cpu[slot]),
            memory=float(w.memory[slot]),
            gpus=int(w.gpus[slot]),
            share=float(w.share[slot]),
            gpu_memory=float(w.gpu_memory[slot]),
            models=products if len(products) < len(types) else (),
            deadline=self._stamp(deadline) if math.isfinite(deadline) else "",
            scheduler=self._scheduler,
            gated=self._gated,
            seed=self._seed,
            created=self._stamp(created),
        )


def true_speeds(table: SpeedTable) -> SpeedsFile:
    """What a learner that knew everything would tell the decision path."""
    labels = manifest.label_values(table.job_types)
    slower = np.log(table.speed.max(axis=1, keepdims=True) / table.speed)
    return SpeedsFile(
        gpu_models=[manifest.GPU_PRODUCTS[name] for name in table.gpu_types],
        job_types=labels,
        kinds=[
            KindSpeeds(job_type=labels[job], gpus=int(gpus), slowdown=row.tolist())
            for job, gpus, row in zip(table.kind_type, table.kind_gpus, slower, strict=True)
        ],
        interference=(-np.log(table.beside).mean(axis=0)).tolist(),
    )


class ProgressReports:
    """When each running job reports its steps/s, and what it says: the truth with some noise."""

    def __init__(
        self, sim: Simulation, *, seconds: float, noise: float, rng: np.random.Generator
    ) -> None:
        """``seconds`` between two reports at one rate, by the cluster's clock; ``noise`` is the
        standard deviation relative to the true rate."""
        self._seconds, self._noise, self._rng = seconds, noise, rng
        self._rate = sim.rate.copy()
        self._reported = np.zeros(len(sim.rate))

    def due(self, sim: Simulation) -> list[tuple[int, float]]:
        """Slots and steps/s of the jobs that report now: a changed rate is reported at once."""
        now = float(sim.cluster.clock[0])
        due = (sim.rate != self._rate) | (now - self._reported >= self._seconds)
        found = []
        for slot in np.flatnonzero(due & (sim.state == ACTIVE)).tolist():
            noise = 1.0 + self._noise * float(self._rng.standard_normal())
            found.append((slot, float(sim.rate[slot]) * max(noise, 0.01)))
            self._reported[slot] = now
        self._rate = sim.rate.copy()
        return found
