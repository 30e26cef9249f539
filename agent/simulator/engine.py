"""The embedded cluster's engine: what becomes of pods on nodes, event by event.

Rollouts, the gate, the benchmark and the live embedded cluster run on it. It keeps the same
:class:`View` that the agent decides on, plus the truth that an agent cannot see: true speeds,
interference, memory peaks. Deterministic by seed; everything is arrays, so the kernels compile.
"""

import math

import numpy as np

from agent.arrays import Floats, kernel
from agent.cluster.fragments import record_request
from agent.cluster.view import (
    CPU,
    GPUS,
    GPUS_PER_NODE,
    MEMORY,
    RUNNING,
    SHARE,
    bind,
    enqueue,
    record_run_time,
    unbind,
)
from agent.simulator.simulation import (
    ACTIVE,
    DONE,
    EVENTS,
    FAILED,
    NEVER,
    NEXT_ARRIVAL,
    OOM_KILLS,
    SEED,
    SUCCEEDED,
    WAITING,
    Simulation,
)
from agent.simulator.utilisation import utilisation

OOM_AFTER_S = 60.0
"""From the moment at which memory no longer suffices to the kill, unless a neighbour goes first."""
MAX_ATTEMPTS = 3
TELEMETRY_S = 30.0


@kernel
def true_rate(sim: Simulation, pod: int) -> float:
    """The pod's true steps/s where it runs, beside those that share its GPU."""
    view = sim.cluster
    node, kind = view.node[pod], view.kind[pod]
    t = view.gpu_type[node]
    if t < 0 or view.gpu_mask[pod] == 0:
        return 1.0
    rate = sim.speed[kind, t]
    if view.request[pod, SHARE] > 0.0:
        job = view.kind_type[kind]
        for i in range(view.counts[RUNNING]):
            other = view.queue[RUNNING, i]
            if (
                other != pod
                and view.node[other] == node
                and (view.gpu_mask[other] & view.gpu_mask[pod]) != 0
            ):
                rate *= sim.beside[t, job, view.kind_type[view.kind[other]]]
    return rate


@kernel
def _settle(sim: Simulation, pod: int) -> None:
    """Bring a running pod's remaining steps up to now and predict its end at its present rate."""
    now = sim.cluster.clock[0]
    sim.left[pod] -= sim.rate[pod] * (now - sim.updated[pod])
    sim.updated[pod] = now
    sim.rate[pod] = true_rate(sim, pod)
    sim.end[pod] = now + max(sim.left[pod], 0.0) / sim.rate[pod]


@kernel
def _check_memory(sim: Simulation, node: int) -> None:
    """Mark who is to be killed where a node's or a GPU's memory does not hold all peaks.

    The kernel kills the pod that is furthest above its request; on a GPU the newest fails.
    """
    view = sim.cluster
    used, worst, victim = 0.0, -NEVER, -1
    on_gpu = np.zeros(GPUS_PER_NODE)
    newest, newest_start = np.full(GPUS_PER_NODE, -1, np.int64), np.full(GPUS_PER_NODE, -1.0)
    for i in range(view.counts[RUNNING]):
        pod = view.queue[RUNNING, i]
        if view.node[pod] != node:
            continue
        sim.oom_at[pod] = min(sim.oom_at[pod], NEVER)
        used += sim.memory_peak[pod]
        over = sim.memory_peak[pod] - view.request[pod, MEMORY]
        if over > worst:
            worst, victim = over, pod
        for g in range(GPUS_PER_NODE):
            if (view.gpu_mask[pod] >> g) & 1:
                on_gpu[g] += sim.gpu_memory_peak[pod]
                if view.start[pod] >= newest_start[g]:
                    newest[g], newest_start[g] = pod, view.start[pod]
    kill = np.full(GPUS_PER_NODE + 1, -1, np.int64)
    for g in range(GPUS_PER_NODE):
        if on_gpu[g] > view.gpu_memory[node]:
            kill[g] = newest[g]
    if used > view.capacity[node, MEMORY]:
        kill[GPUS_PER_NODE] = victim
    for i in range(view.counts[RUNNING]):
        pod = view.queue[RUNNING, i]
        if view.node[pod] == node:
            marked = False
            for killed in kill:
                marked = marked or killed == pod
            if not marked:
                sim.oom_at[pod] = NEVER
            elif sim.oom_at[pod] >= NEVER:
                sim.oom_at[pod] = view.clock[0] + OOM_AFTER_S


@kernel
def _settle_neighbours(sim: Simulation, node: int, mask: int) -> None:
    """Settle the pods on these GPUs after somebody came or went, and check the node's memory."""
    view = sim.cluster
    for i in range(view.counts[RUNNING]):
        pod = view.queue[RUNNING, i]
        if view.node[pod] == node and (view.gpu_mask[pod] & mask) != 0:
            _settle(sim, pod)
    _check_memory(sim, node)


@kernel
def start(sim: Simulation, pod: int) -> None:
    """Let a pod that was just bound in the view begin to run."""
    view = sim.cluster
    sim.state[pod] = ACTIVE
    sim.attempts[pod] += 1
    sim.left[pod], sim.updated[pod] = sim.steps[pod], view.clock[0]
    sim.rate[pod] = 0.0
    _settle(sim, pod)
    _settle_neighbours(sim, view.node[pod], view.gpu_mask[pod])


@kernel
def place(sim: Simulation, pod: int, node: int) -> None:
    """Bind a waiting pod to a node and let it run."""
    bind(sim.cluster, pod, node)
    start(sim, pod)


@kernel
def _leave(sim: Simulation, pod: int) -> None:
    """Take a running pod off its node."""
    view = sim.cluster
    node, mask = view.node[pod], view.gpu_mask[pod]
    unbind(view, pod)
    sim.rate[pod], sim.end[pod], sim.oom_at[pod] = 0.0, NEVER, NEVER
    _settle_neighbours(sim, node, mask)


@kernel
def _finish(sim: Simulation, pod: int) -> None:
    """End a pod that has done its work, and remember its run time as an agent would."""
    view = sim.cluster
    now, node = view.clock[0], view.node[pod]
    ran = max(now - view.start[pod], 1e-3)
    t = view.gpu_type[node]
    slower = view.slowdown[view.kind[pod], t] if t >= 0 and view.gpu_mask[pod] != 0 else 0.0
    _leave(sim, pod)
    record_run_time(view, pod, math.log(ran) - slower)
    sim.state[pod], sim.finished[pod] = SUCCEEDED, now
    sim.counters[DONE] += 1


@kernel
def _kill(sim: Simulation, pod: int) -> None:
    """Kill a pod for want of memory; it is tried again from its first step, twice at most."""
    _leave(sim, pod)
    sim.counters[OOM_KILLS] += 1
    if sim.attempts[pod] >= MAX_ATTEMPTS:
        sim.state[pod], sim.finished[pod] = FAILED, sim.cluster.clock[0]
        sim.counters[DONE] += 1
    else:
        sim.state[pod] = WAITING
        enqueue(sim.cluster, pod)


@kernel
def withdraw(sim: Simulation, pod: int) -> None:
    """Take a running pod away from outside the model: deleted, or its node gone.

    It waits again and begins anew from its first step; no OOM kill is counted.
    """
    _leave(sim, pod)
    sim.state[pod] = WAITING
    enqueue(sim.cluster, pod)


@kernel
def measure(sim: Simulation) -> None:
    """Write every node's measured use into the view, as its telemetry would show it."""
    view = sim.cluster
    running = view.counts[RUNNING]
    node, job = np.empty(running, np.int64), np.empty(running, np.int64)
    started, cpu, gpus, memory = (
        np.empty(running),
        np.empty(running),
        np.empty(running),
        np.empty(running),
    )
    for i in range(running):
        pod = view.queue[RUNNING, i]
        node[i], job[i] = view.node[pod], view.kind_type[view.kind[pod]]
        started[i], cpu[i] = view.start[pod], view.request[pod, CPU]
        gpus[i] = max(view.request[pod, GPUS], view.request[pod, SHARE])
        memory[i] = sim.memory_peak[pod]
    view.usage[:] = utilisation(
        view.clock[0], node, job, started, cpu, gpus, memory, view.capacity,
        sim.cpu_use, sim.disk, sim.network, 0.1, sim.counters[SEED],
    )  # fmt: skip
    sim.measured[0] = view.clock[0]


@kernel
def next_event(sim: Simulation) -> float:
    """When something happens next if nobody places anything; never (1e18) if nothing does."""
    view = sim.cluster
    at = NEVER
    upcoming = sim.counters[NEXT_ARRIVAL]
    if upcoming < len(view.arrival):
        at = view.arrival[upcoming]
    for i in range(view.counts[RUNNING]):
        pod = view.queue[RUNNING, i]
        at = min(at, min(sim.end[pod], sim.oom_at[pod]))
    return at


@kernel
def advance(sim: Simulation, until: float) -> bool:
    """Move the clock to the next event, but not beyond ``until``, and let it happen.

    Returns whether something happened; without it the clock stands at ``until`` (or, with nothing
    left to happen and ``until`` infinite, where it was).
    """
    view = sim.cluster
    at = next_event(sim)
    if at > until or at >= NEVER:
        if math.isfinite(until):
            view.clock[0] = max(view.clock[0], until)
        return False
    now = max(at, view.clock[0])
    view.clock[0] = now
    sim.counters[EVENTS] += 1
    i = 0
    while i < view.counts[RUNNING]:
        pod = view.queue[RUNNING, i]
        if sim.end[pod] <= now:
            _finish(sim, pod)
            i = 0  # the list changed, and neighbours may end now too
        elif sim.oom_at[pod] <= now:
            _kill(sim, pod)
            i = 0
        else:
            i += 1
    upcoming = sim.counters[NEXT_ARRIVAL]
    while upcoming < len(view.arrival) and view.arrival[upcoming] <= now:
        sim.state[upcoming] = WAITING
        enqueue(view, upcoming)
        record_request(view, upcoming)
        upcoming += 1
    sim.counters[NEXT_ARRIVAL] = upcoming
    if now - sim.measured[0] >= TELEMETRY_S:
        measure(sim)
    return True


@kernel
def true_log_run_time(sim: Simulation, pod: int) -> float:
    """Log seconds that the whole job takes alone on its fastest type."""
    best = 0.0
    for t in range(sim.speed.shape[1]):
        best = max(best, sim.speed[sim.cluster.kind[pod], t])
    return math.log(sim.steps[pod] / best)


@kernel
def completion_times(sim: Simulation) -> Floats:
    """[P] seconds from arrival to success; elapsed plus what is left for any other job.

    What is left is its whole run on its fastest type where it is not running, so that starving or
    losing long jobs never looks like a gain. A job that never arrived counts its run time.
    """
    view = sim.cluster
    times = np.empty(len(sim.state))
    for pod in range(len(times)):
        if sim.state[pod] == SUCCEEDED:
            times[pod] = sim.finished[pod] - view.arrival[pod]
            continue
        waited = max(view.clock[0] - view.arrival[pod], 0.0)
        if sim.state[pod] == ACTIVE:
            times[pod] = waited + max(sim.end[pod] - view.clock[0], 0.0)
        else:
            times[pod] = waited + math.exp(true_log_run_time(sim, pod))
    return times
