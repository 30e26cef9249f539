"""What became of an embedded cluster's jobs: its progress for a display, its result for a table.

cluster.py serves the one and writes the other, and so does the lab's node emulator.
"""

from collections.abc import Sequence

import numpy as np

from agent.arrays import Ints
from agent.simulator.engine import completion_times
from agent.simulator.extender_client import FAILURES, Extender
from agent.simulator.simulation import (
    ABSENT,
    ACTIVE,
    DONE,
    FAILED,
    OOM_KILLS,
    SUCCEEDED,
    WAITING,
    Simulation,
)
from agent.simulator.store import Json

STATES = {
    ABSENT: "not arrived",
    WAITING: "pending",
    ACTIVE: "running",
    SUCCEEDED: "succeeded",
    FAILED: "failed",
}


def over(sim: Simulation, until: float) -> bool:
    """Whether all jobs have ended or the clock has come to ``until``, seconds."""
    return bool(sim.counters[DONE] == len(sim.state) or sim.cluster.clock[0] >= until)


def summary(sim: Simulation) -> Json:
    """Counts and completion times so far, seconds of the cluster's clock.

    ``mean_completion_seconds`` and ``p99_completion_seconds`` are of the jobs that succeeded, null
    with none; ``mean_completion_counted_seconds`` is of all that arrived, an unfinished or failed
    one with the time it has been there plus what it needs at least, so that starving long jobs
    never looks like a gain.
    """
    counts = {name: int((sim.state == state).sum()) for state, name in STATES.items()}
    times = completion_times(sim)
    done, arrived = sim.state == SUCCEEDED, sim.state != ABSENT
    ended = sim.finished[np.isfinite(sim.finished)]
    return {
        "clock_seconds": float(sim.cluster.clock[0]),
        "jobs": len(sim.state),
        "arrived": int(arrived.sum()),
        "placed": int((sim.attempts > 0).sum()),
        "pending": counts["pending"],
        "running": counts["running"],
        "finished": counts["succeeded"],
        "failed": counts["failed"],
        "unfinished": counts["pending"] + counts["running"],
        "not_arrived": counts["not arrived"],
        "oom_kills": int(sim.counters[OOM_KILLS]),
        "mean_completion_seconds": float(times[done].mean()) if done.any() else None,
        "p99_completion_seconds": float(np.percentile(times[done], 99)) if done.any() else None,
        "mean_completion_counted_seconds": float(times[arrived].mean()) if arrived.any() else None,
        "makespan_seconds": float(ended.max() - sim.cluster.arrival.min()) if len(ended) else None,
    }


def completions(sim: Simulation) -> list[float | None]:
    """Completion time of each job, seconds in order of arrival; null for one that has not ended."""
    return [_or_none(time) for time in sim.finished - sim.cluster.arrival]


def extender_counts(extender: Extender | None) -> Json | None:
    """Calls, failures by kind and the latency of answered prioritize calls, wall milliseconds."""
    if extender is None:
        return None
    latencies = np.array(extender.latencies) * 1e3
    return {
        "calls": dict(extender.calls),
        "failures": {kind: extender.failures[kind] for kind in FAILURES},
        "prioritize_p50_ms": float(np.percentile(latencies, 50)) if len(latencies) else None,
        "prioritize_p99_ms": float(np.percentile(latencies, 99)) if len(latencies) else None,
    }


def job_rows(
    sim: Simulation, job_names: Sequence[str], node_names: Sequence[str], bound: Ints
) -> list[Json]:
    """One row a job, in order of arrival; what has not come yet is null.

    bound: [P] row of the node that each was bound to last, −1 for none.
    """
    view = sim.cluster
    rows: list[Json] = []
    for slot, name in enumerate(job_names):
        done = sim.state[slot] in (SUCCEEDED, FAILED)
        rows.append(
            {
                "name": name,
                "state": STATES[int(sim.state[slot])],
                "arrival_seconds": float(view.arrival[slot]),
                "start_seconds": _or_none(view.start[slot]),
                "finish_seconds": _or_none(sim.finished[slot]),
                "completion_seconds": (
                    float(sim.finished[slot] - view.arrival[slot]) if done else None
                ),
                "starts": int(sim.attempts[slot]),
                "node": node_names[bound[slot]] if bound[slot] >= 0 else None,
            }
        )
    return rows


def _or_none(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
