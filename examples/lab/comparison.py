"""Simulator against lab: the same policy on the same jobs, in the simulator and on a real cluster.

parity.py shows it, the tests hold the lab to it. In the lab a real API server and a real
kube-scheduler place the pods, ``agent serve`` is extender and gate controller, and the node
emulator lets them run. Both sides know the true speeds; nothing is learned.
"""

import contextlib
import heapq
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from agent.arrays import Floats
from agent.cluster import speeds_file
from agent.cluster.view import bind
from agent.scheduling.candidates import MAX_QUEUE_CANDIDATES, new_candidates
from agent.scheduling.decision import make_policy, next_placement
from agent.simulator.cluster_settings import NodeSettings, WorkloadSettings
from agent.simulator.engine import advance, next_event, start
from agent.simulator.hardware import load_speeds
from agent.simulator.job_objects import true_speeds
from agent.simulator.runs import Result, result, simulate
from agent.simulator.simulation import DONE, Simulation, new_simulation
from examples.lab.control_plane import ControlPlane, answer
from examples.lab.emulator import PROGRESS
from examples.processes import ExampleError, fedsched, free_ports

TOLERANCE = 0.10
"""How far the mean completion times may lie apart, as a share of the simulator's."""
BASELINE = "least-allocated"
"""Another policy on the same jobs: a comparison that could not tell the two apart would be idle."""
HOUR = 3600.0
SCHEDULER = "fedsched-scheduler"
_GRACE_SECONDS = 120.0
_TOLD_EVERY, _TOLD = 15.0, ("arrived", "pending", "running", "finished")
Json = dict[str, Any]


@dataclass(frozen=True)
class Trial:
    """Jobs, nodes and policy of one comparison."""

    rule: str = "hrrn-eft"
    nodes: NodeSettings = field(default_factory=NodeSettings)
    workload: WorkloadSettings = field(default_factory=WorkloadSettings)
    seconds: float = 150.0
    """Wall seconds that the lab's run should take; the scale of its clock follows."""


@dataclass(frozen=True)
class Comparison:
    """Both runs of one trial. Times are cluster seconds, [P] in the jobs' order of arrival."""

    trial: Trial
    scale: float
    """Cluster seconds per wall second in the lab."""
    simulated: Result
    baseline: Result
    """The simulator's, by another policy."""
    delayed: Result
    """The simulator's, each job starting as long after its decision as in the lab."""
    completion: Floats
    """[P] in the lab; NaN for a job that did not succeed."""
    overhead: Floats
    """[P] part of it from the event at which a job's pod was released to its being seen bound."""
    rows: list[Json]
    """What became of each job in the lab."""
    counts: Json
    """What the emulator counted: bound, refused and deleted pods."""

    @property
    def difference(self) -> float:
        """The lab's mean completion time relative to the simulator's, minus 1."""
        return float(self.completion.mean() / self.simulated.mean - 1.0)

    @property
    def overhead_share(self) -> float:
        """Part of the lab's completion times that was spent on scheduling."""
        return float(np.nansum(self.overhead) / np.nansum(self.completion))

    @property
    def agrees(self) -> bool:
        """The verdict."""
        return bool(np.isfinite(self.difference)) and abs(self.difference) <= TOLERANCE

    def as_json(self) -> Json:
        """All figures."""
        return {
            "rule": self.trial.rule,
            "jobs": len(self.completion),
            "scale": self.scale,
            "simulator_mean_seconds": self.simulated.mean,
            "lab_mean_seconds": float(self.completion.mean()),
            "difference": self.difference,
            "tolerance": TOLERANCE,
            "agrees": self.agrees,
            "overhead_share": self.overhead_share,
            "overhead_wall_seconds": _percentiles(self.overhead / self.scale),
            "job_difference": _percentiles(self.completion / self.simulated.completion - 1.0),
            "simulator_with_the_labs_delays_mean_seconds": self.delayed.mean,
            "baseline": {"rule": BASELINE, "simulator_mean_seconds": self.baseline.mean},
            "pods": self.counts,
            "rows": [
                {
                    "job": job,
                    "simulator_seconds": float(simulated),
                    "lab_seconds": float(lab),
                    "overhead_seconds": float(overhead),
                }
                for job, (simulated, lab, overhead) in enumerate(
                    zip(self.simulated.completion, self.completion, self.overhead, strict=True)
                )
            ],
        }


def _percentiles(values: Floats) -> Json:
    return {f"p{p}": float(np.nanpercentile(values, p)) for p in (10, 50, 90, 99)}


def compare(
    trial: Trial, cluster: ControlPlane, folder: Path, say: Callable[[str], None] = print
) -> Comparison:
    """Run both sides. The cluster must be without nodes of its own; its agent and scheduler stay.

    Raises ExampleError where something of the lab does not come up or a job is lost.
    """
    speeds, mix = load_speeds(), trial.nodes.build()
    workload = trial.workload.build(speeds, mix)
    runs = {
        rule: simulate(new_simulation(workload, mix, speeds), make_policy(rule))
        for rule in (trial.rule, BASELINE)
    }
    simulated = runs[trial.rule]
    scale = max(simulated.makespan / trial.seconds, 1.0)
    say(
        f"{len(workload)} jobs on {len(mix)} nodes take {simulated.makespan / HOUR:.0f} h in the "
        f"simulator; the lab's clock runs {scale:.0f} times as fast as the wall's."
    )
    member = folder / "member"
    member.mkdir(parents=True, exist_ok=True)
    speeds_file.write(member / "speeds.json", true_speeds(speeds))
    _start_agent(trial, cluster, folder, scale)
    lived = _run_lab(trial, cluster, folder, scale, say)
    rows = lived["job_rows"]
    overhead = _column(rows, "overhead_seconds")
    return Comparison(
        trial=trial,
        scale=scale,
        simulated=simulated,
        baseline=runs[BASELINE],
        delayed=simulate_delayed(
            new_simulation(workload, mix, speeds), trial.rule, np.nan_to_num(overhead)
        ),
        completion=_column(rows, "completion_seconds"),
        overhead=overhead,
        rows=rows,
        counts=lived["scheduler"],
    )


def simulate_delayed(sim: Simulation, rule: str, delays: Floats) -> Result:
    """Run a policy on a fresh simulation in which a decision takes time to be carried out.

    A job holds its place from the decision on and starts ``delays`` [P], seconds, later.
    """
    policy, pods = make_policy(rule), len(sim.state)
    eligible, out = np.ones(pods, np.bool_), new_candidates(MAX_QUEUE_CANDIDATES)
    starting: list[tuple[float, int]] = []
    view = sim.cluster
    while sim.counters[DONE] < pods:
        if starting and starting[0][0] <= next_event(sim):
            at, pod = heapq.heappop(starting)
            advance(sim, at)
            view.start[pod] = at
            start(sim, pod)
            continue
        if not advance(sim, math.inf):
            break
        while (chosen := next_placement(view, policy, eligible, out, False))[0] >= 0:
            bind(view, chosen[0], chosen[1])
            heapq.heappush(starting, (float(view.clock[0] + delays[chosen[0]]), chosen[0]))
    return result(sim)


def _column(rows: list[Json], name: str) -> Floats:
    lived = [row[name] if row["state"] == "succeeded" else None for row in rows]
    return np.array([np.nan if value is None else value for value in lived])


def _start_agent(trial: Trial, cluster: ControlPlane, folder: Path, scale: float) -> None:
    """``agent serve`` with the rule alone, and kube-scheduler that asks it."""
    port = free_ports(1)[0]
    settings = {
        "state": str(folder / "member"),
        "clock_scale": scale,
        "kubernetes": {"kubeconfig": str(cluster.kubeconfig), "in_cluster": "never"},
        "serve": {
            "port": port,
            "rule": trial.rule,
            "queue_seconds": 0.25,
            "max_extra_wait_seconds": 365 * 24 * HOUR,
        },
    }
    config = folder / "agent.yaml"
    config.write_text(yaml.safe_dump(settings))
    url = f"http://127.0.0.1:{port}"
    cluster.run("agent", fedsched("agent", "serve", "--config", str(config)), ready=f"{url}/readyz")
    extender = {
        "urlPrefix": url,
        "prioritizeVerb": "prioritize",
        "weight": 121,  # the policy's choice is what is compared, so it outweighs all other scores
        "httpTimeout": "500ms",
        "nodeCacheCapable": True,
        "ignorable": True,
    }
    profiles = [{"schedulerName": SCHEDULER}]
    cluster.start_scheduler({"profiles": profiles, "extenders": [extender]}, name=SCHEDULER)


def _run_lab(
    trial: Trial, cluster: ControlPlane, folder: Path, scale: float, say: Callable[[str], None]
) -> Json:
    ready, result = folder / "emulator-ready.json", folder / "emulator-result.json"
    config = folder / "emulator.yaml"
    settings = {
        "kubeconfig": str(cluster.kubeconfig),
        "namespace": "parity",
        "scheduler_name": SCHEDULER,
        "clock_scale": scale,
        "gated": True,
        "nodes": trial.nodes.model_dump(mode="json"),
        "workload": trial.workload.model_dump(mode="json"),
    }
    config.write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "examples.lab.emulator", "--config", str(config)]
    command += ["--result", str(result), "--ready-file", str(ready)]
    emulator = cluster.run("emulator", command)
    limit = time.monotonic() + 3.0 * trial.seconds + _GRACE_SECONDS
    told = time.monotonic()
    while emulator.alive and time.monotonic() < limit:
        time.sleep(0.1)
        if time.monotonic() - told > _TOLD_EVERY and ready.exists():
            told = time.monotonic()
            with contextlib.suppress(OSError):  # it may end in between
                progress = json.loads(answer(json.loads(ready.read_text())["url"] + PROGRESS))
                say("  " + " · ".join(f"{progress[key]} {key}" for key in _TOLD))
    if emulator.alive or not result.exists():
        raise ExampleError(
            f"the emulator did not come to its end. The end of {emulator.log}:\n"
            f"{emulator.last_words()}"
        )
    found: Json = json.loads(result.read_text())
    return found
