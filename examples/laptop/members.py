"""The members of the demo: unlike nodes, jobs of unlike virtual clusters; read by the demo."""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from agent.simulator.hardware import SpeedTable
from agent.simulator.nodes import NodeMix, node_mix
from agent.simulator.traces import Jobs, read_gavel, trace_file
from agent.simulator.workloads import Options, Workload, synthetic, window

HELD_OUT_FROM = 550
"""Jobs of a trace from here on are never played to an agent: the end table is made on them."""
EVALUATION_JOBS = 150


@dataclass(frozen=True)
class Member:
    """One member cluster of the demo."""

    name: str
    trace: str
    """Job file of one virtual cluster, in the traces' folder."""
    nodes: dict[str, int]
    """Nodes of eight GPUs by GPU type."""
    memory_per_gpu: float
    """Host memory, GiB."""
    shared: float
    """Chance that a small one-GPU job asks for half a GPU."""
    exceed: float
    """Share of the jobs whose memory passes what they asked for."""
    first: int
    """First usable job of the trace that the live cluster plays."""
    load: float = 0.8

    def mix(self) -> NodeMix:
        """The nodes as the simulator takes them."""
        return node_mix(self.nodes, memory_per_gpu=self.memory_per_gpu)

    def jobs(self) -> Jobs:
        """All jobs of the trace. Raises ValueError where none would be left to be held out."""
        path = trace_file(self.trace)
        jobs = read_gavel(path)
        if len(jobs) <= HELD_OUT_FROM:
            raise ValueError(
                f"{path} has {len(jobs)} jobs, and those from the {HELD_OUT_FROM}th on are held "
                "out to judge by: give it a longer trace, or unset FEDSCHED_TRACES"
            )
        return jobs

    def played(self, count: int, speeds: SpeedTable) -> Workload:
        """The ``count`` jobs that the live cluster plays."""
        options = Options(shared=self.shared, exceed=self.exceed)
        return window(
            self.jobs(), speeds, self.mix(), load=self.load, start=self.first,
            stop=self.first + count, seed=0, options=options,
        )  # fmt: skip

    def held_out(self, jobs: Jobs, seed: int, speeds: SpeedTable) -> Workload:
        """150 Poisson arrivals drawn from those of the trace's ``jobs`` that were never played."""
        fields: dict[str, Any] = {
            name: value[HELD_OUT_FROM:]
            for name, value in vars(jobs).items()
            if isinstance(value, np.ndarray)
        }
        return synthetic(
            dataclasses.replace(jobs, **fields), speeds, self.mix(), arrivals="poisson",
            count=EVALUATION_JOBS, load=self.load, seed=seed,
            options=Options(shared=self.shared, exceed=self.exceed),
        )  # fmt: skip

    def cluster_settings(self, played: Workload, scale: float, extender: str) -> dict[str, Any]:
        """Settings of ``fedsched agent simulate-cluster``."""
        return {
            "name": self.name,
            "clock_scale": scale,
            "until": horizon(played),
            "wait_for_start": True,
            "gated": True,
            "linger_seconds": 600.0,
            "extender": {"url": extender, "filter_verb": "filter", "ignorable": True},
            "nodes": {"counts": self.nodes, "memory_per_gpu": self.memory_per_gpu},
            "workload": {
                "trace": self.trace,
                "first": self.first,
                "jobs": len(played),
                "load": self.load,
                "shared": self.shared,
                "exceed": self.exceed,
            },
        }

    def agent_settings(
        self,
        state: Path,
        scale: float,
        *,
        port: int,
        cluster: dict[str, Any],
        bundle: Path | None,
        algorithm: str,
    ) -> dict[str, Any]:
        """Settings of ``fedsched agent serve`` and ``learn``, paced for a run of minutes.

        cluster: sections, of ``serve`` a part, on how the agent sees its cluster.
        """
        learn: dict[str, Any] = {
            "algorithm": algorithm,
            "min_batch": 16,
            "idle_seconds": 3.0,
            "poll_seconds": 0.5,
            "rollouts": 1,
            "labels": 80,
            "gate_rounds": 5,
            "gate_windows": 24,
            "gate_jobs": 100,
            "upload_rounds": 5,
            "upload_seconds": 10.0,
            "status_seconds": 2.0,
            # Serving lags behind: keep what the second learner, without a hub, still reads.
            "keep_segments": 1000,
        }
        if bundle is not None:
            learn["bundle"] = str(bundle)
        return {
            "state": str(state),
            "clock_scale": scale,
            **cluster,
            "serve": {
                "port": port,
                "temperature": 0.03,
                "queue_seconds": 0.25,
                "max_extra_wait_seconds": 30 * 86400.0,
                **cluster.get("serve", {}),
            },
            "learn": learn,
        }


MEMBERS = (
    Member(
        "north", "gavel/msr_seed0_103959.csv", {"v100": 2, "p100": 1, "k80": 2},
        memory_per_gpu=48.0, shared=0.0, exceed=0.01, first=120,
    ),
    Member(
        "west", "gavel/msr_seed0_11cb48.csv", {"p100": 2, "k80": 2},
        memory_per_gpu=28.0, shared=0.5, exceed=0.03, first=40,
    ),
    Member(
        "south", "gavel/msr_seed0_7f04ca.csv", {"v100": 1, "p100": 2, "k80": 3},
        memory_per_gpu=36.0, shared=0.2, exceed=0.02, first=120,
    ),
)  # fmt: skip


def horizon(played: Workload) -> float:
    """When a live cluster ends, cluster seconds: a tenth after its last arrival.

    A few jobs run for weeks; waiting for them would leave nothing to see meanwhile. What has not
    ended by then counts as unfinished.
    """
    return 1.1 * float(played.arrival.max())


def clock_scale(played: Workload, seconds: float) -> float:
    """Cluster seconds per wall second that let the live cluster last ``seconds``."""
    return max(math.ceil(horizon(played) / seconds), 1.0)
