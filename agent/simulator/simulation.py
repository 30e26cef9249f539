"""The state of one embedded cluster with its workload; ``agent.simulator.engine`` moves it on."""

from typing import NamedTuple

import numpy as np

from agent.arrays import Floats, Ints, kernel
from agent.cluster.gpus import GPU_SPECS
from agent.cluster.view import CPU, GPU_MEMORY, GPUS, MEMORY, SHARE, View, empty_view, set_node
from agent.simulator.hardware import SpeedTable, needs
from agent.simulator.nodes import NodeMix
from agent.simulator.workloads import Workload

ABSENT, WAITING, ACTIVE, SUCCEEDED, FAILED = 0, 1, 2, 3, 4
NEXT_ARRIVAL, DONE, OOM_KILLS, EVENTS, SEED = 0, 1, 2, 3, 4
NEVER = 1e18


class Simulation(NamedTuple):
    """One cluster with one workload. ``P`` jobs are the view's pod slots, in order of arrival."""

    cluster: View
    state: Ints
    """[P] ABSENT, WAITING, ACTIVE, SUCCEEDED or FAILED."""
    attempts: Ints
    """[P] starts so far; an OOM kill costs all progress, and the third is final."""
    steps: Floats
    """[P] work of each job."""
    left: Floats
    """[P] steps still to do at ``updated``."""
    rate: Floats
    """[P] true steps per second now; 0 while not running."""
    updated: Floats
    """[P] when ``left`` was true."""
    end: Floats
    """[P] when it ends at the present rate; never while not running."""
    oom_at: Floats
    """[P] when it is killed unless memory suffices again; never otherwise."""
    finished: Floats
    """[P] when it succeeded or failed; NaN before."""
    memory_peak: Floats
    """[P] host memory that it really uses, GiB."""
    gpu_memory_peak: Floats
    """[P] memory that it really uses on each GPU, GiB."""
    speed: Floats
    """[K, T] true steps/s."""
    beside: Floats
    """[T, J, J] true relative speed of a row's job type beside a column's on one GPU."""
    cpu_use: Floats
    """[J] share of the CPU asked for that is used."""
    disk: Floats
    network: Floats
    """[J] MB/s of one GPU's worth."""
    counters: Ints
    """[5] next arrival, jobs done, OOM kills, events, seed."""
    measured: Floats
    """[1] when node use was last measured."""


def new_simulation(
    workload: Workload,
    nodes: NodeMix,
    speeds: SpeedTable,
    *,
    seed: int = 0,
    known_speeds: bool = True,
    known_run_times: bool = False,
) -> Simulation:
    """A cluster of ``nodes`` before the first job of ``workload`` arrives.

    Work with no GPU becomes one more kind, which runs alike on every node.

    Args:
        known_speeds: the view predicts the true speeds and interference; otherwise it knows none,
            and the caller fills ``view.slowdown`` and ``view.interference``.
        known_run_times: the view knows each job's run time (an oracle).
    """
    kinds, jobs, types = len(speeds), len(speeds.job_types), len(speeds.gpu_types)
    sheets = [GPU_SPECS[name] for name in speeds.gpu_types]
    spec = np.array([(sheet.tflops, sheet.bandwidth, sheet.memory) for sheet in sheets])
    view = empty_view(
        nodes=len(nodes.names),
        pods=len(workload),
        gpu_spec=spec,
        kind_type=np.append(speeds.kind_type, jobs),
        kind_gpus=np.append(speeds.kind_gpus, 0),
    )
    for n in range(len(nodes.names)):
        set_node(view, n, nodes.capacity[n], int(nodes.gpu_type[n]), float(nodes.gpu_memory[n]))
    kind = np.where(workload.kind < 0, kinds, workload.kind)
    speed = np.vstack([speeds.speed, np.ones((1, types))])
    beside = np.ones((types, jobs + 1, jobs + 1))
    beside[:, :jobs, :jobs] = speeds.beside
    view.request[:, CPU], view.request[:, MEMORY] = workload.cpu, workload.memory
    view.request[:, GPUS], view.request[:, SHARE] = workload.gpus, workload.share
    view.request[:, GPU_MEMORY] = workload.gpu_memory
    view.kind[:], view.allowed[:] = kind, workload.allowed
    view.arrival[:], view.deadline[:] = workload.arrival, workload.deadline
    if known_speeds:
        view.slowdown[:] = np.log(speed.max(axis=1, keepdims=True) / speed)
        view.interference[:] = -np.log(beside).mean(axis=0)
    if known_run_times:
        view.size[:] = np.log(workload.steps / speed[kind].max(axis=1))
    table = needs(speeds.job_types)
    pods = len(workload)
    return Simulation(
        cluster=view,
        state=np.zeros(pods, np.int64),
        attempts=np.zeros(pods, np.int64),
        steps=np.array(workload.steps, np.float64),
        left=np.zeros(pods),
        rate=np.zeros(pods),
        updated=np.zeros(pods),
        end=np.full(pods, NEVER),
        oom_at=np.full(pods, NEVER),
        finished=np.full(pods, np.nan),
        memory_peak=np.array(workload.memory_peak, np.float64),
        gpu_memory_peak=np.array(workload.gpu_memory_peak, np.float64),
        speed=np.ascontiguousarray(speed),
        beside=beside,
        cpu_use=np.append(table.cpu_use, 0.5),
        disk=np.append(table.disk, 1.0),
        network=np.append(table.network, 1.0),
        counters=np.array([0, 0, 0, 0, seed], np.int64),
        measured=np.full(1, -NEVER),
    )


@kernel
def copy_simulation(sim: Simulation) -> Simulation:
    """An independent copy; what never changes is shared."""
    v = sim.cluster
    view = View(
        v.clock.copy(), v.capacity, v.requested.copy(), v.usage.copy(), v.ready.copy(),
        v.gpu_type, v.gpu_memory, v.gpu_share.copy(), v.gpu_memory_requested.copy(),
        v.scopes, v.request, v.kind, v.allowed, v.scope, v.arrival, v.start.copy(), v.deadline,
        v.size, v.trust,
        v.node.copy(), v.gpu_mask.copy(), v.queue.copy(), v.counts.copy(), v.gpu_spec,
        v.slowdown, v.interference, v.kind_type, v.kind_gpus, v.history_kind.copy(),
        v.history_type.copy(), v.history_gpus.copy(), v.asked.copy(), v.asked_models.copy(),
        v.asked_count.copy(), v.asked_total.copy(),
    )  # fmt: skip
    return Simulation(
        view, sim.state.copy(), sim.attempts.copy(), sim.steps, sim.left.copy(),
        sim.rate.copy(), sim.updated.copy(), sim.end.copy(), sim.oom_at.copy(),
        sim.finished.copy(), sim.memory_peak, sim.gpu_memory_peak, sim.speed, sim.beside,
        sim.cpu_use, sim.disk, sim.network, sim.counters.copy(), sim.measured.copy(),
    )  # fmt: skip
