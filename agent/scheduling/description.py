"""Fills the columns of ``common.features`` for one candidate, as array kernels.

``agent.scheduling.candidates`` calls these for each candidate of a decision.
"""

import math
from typing import NamedTuple

from agent.arrays import Features, Ints, inlined, lean
from agent.cluster.view import (
    CPU,
    GPU_GROUPS,
    GPU_MEMORY,
    GPUS,
    MEMORY,
    PENDING,
    RUNNING,
    SHARE,
    USAGE_CPU,
    USAGE_MEMORY,
    View,
    gpu_group,
)
from agent.scheduling.outlook import Context, Effects, idle_gpus, pod_log_run_time, pod_run_time

# Column numbers as constants of the kernels; a test holds them equal to common.features.
POD_SIZE, POD_GPUS, POD_SHARE, POD_WAITED, POD_SLACK, POD_SAME_KIND, POD_ORDER = range(7)
WAIT, TFLOPS, BANDWIDTH, NODE_GPU_MEMORY, CPU_LEFT, MEMORY_LEFT, GPUS_LEFT = range(7, 14)
GPU_MEMORY_LEFT, CPU_USED, MEMORY_USED, EXACT_FIT = range(14, 18)
SLOWDOWN, AGAINST_BEST, ON_POD, ON_NEIGHBOURS, FRAGMENTS, BEST_IN, WHOLE_NODE_IN = range(18, 25)
QUEUE_LENGTH, QUEUE_GPUS, QUEUE_WORK, QUEUE_AHEAD, TYPE_FREE, FREE, RUNNING_PODS = range(25, 32)


class Queue(NamedTuple):
    """What is true of the whole queue at one moment."""

    gpus: float
    """GPUs asked for."""
    work: float
    """Expected GPU-seconds on the fastest type."""
    same_kind: Ints
    """[K] pending pods by kind."""
    gangs: Ints
    """[4] pending pods by gang size."""


@inlined
def gpus_asked(view: View, pod: int) -> float:
    """GPUs that the pod asks for, a share counted as its part."""
    share = view.request[pod, SHARE]
    return share if share > 0.0 else view.request[pod, GPUS]


@lean
def clip(x: float, low: float, high: float) -> float:
    return low if x < low else (high if x > high else x)


@lean
def describe_cluster(view: View, context: Context, queue: Queue, row: Features) -> None:
    """Fill the columns that are the same for every candidate of a decision."""
    total = idle = 0.0
    for t in range(len(context.total)):
        total += context.total[t]
        idle += context.idle[t]
    total = max(total, 1.0)
    mean = math.exp(context.mean_size)
    row[QUEUE_LENGTH] = math.log1p(view.counts[PENDING]) / 4.0
    row[QUEUE_GPUS] = math.log1p(queue.gpus / total)
    row[QUEUE_WORK] = math.log1p(queue.work / context.speed / mean) / 2.0
    row[FREE] = idle / total
    row[RUNNING_PODS] = min(view.counts[RUNNING] / total, 3.0)


@lean
def describe_pod(
    view: View,
    context: Context,
    queue: Queue,
    pod: int,
    distance: float,
    ahead: float,
    row: Features,
) -> None:
    """Fill the pod's columns and the cluster's as seen from the pod."""
    log_time, time = pod_log_run_time(view, context, pod), pod_run_time(view, context, pod)
    kind, now = view.kind[pod], view.clock[0]
    row[POD_SIZE] = clip((log_time - context.mean_size) / 2.0, -3.0, 3.0)
    row[POD_GPUS] = (
        math.log2(view.request[pod, GPUS]) / 3.0
        if view.request[pod, GPUS] > 0
        else (0.0 if view.request[pod, SHARE] > 0.0 else -1.0 / 3.0)
    )
    row[POD_SHARE] = view.request[pod, SHARE]
    row[POD_WAITED] = math.log1p(max(now - view.arrival[pod], 0.0) / time) / 2.0
    row[POD_SLACK] = clip((view.deadline[pod] - now) / time, -2.0, 2.0)
    row[POD_SAME_KIND] = math.log1p(queue.same_kind[kind]) / 2.0
    row[POD_ORDER] = clip(distance, 0.0, 3.0)
    row[QUEUE_AHEAD] = min(math.log1p(ahead / context.speed / time) / 2.0, 3.0)
    group, best = gpu_group(view.kind_gpus[kind]), -1
    for t in range(len(context.total)):
        if (
            context.total[t] > 0.0
            and (view.allowed[pod] >> t) & 1
            and (best < 0 or view.slowdown[kind, t] < view.slowdown[kind, best])
        ):
            best = t
    if best >= 0:
        row[BEST_IN] = min(math.log1p(context.free_in[best, group] / time) / 2.0, 3.0)


@inlined
def describe_node(
    view: View,
    context: Context,
    queue: Queue,
    pod: int,
    time: float,
    node: int,
    effects: Effects,
    rows: Features,
    at: int,
) -> None:
    """Fill row ``at`` with the node's columns and the predicted effect of the placement.

    ``time`` is the pod's expected run time on its fastest type, s. Scalars only: a slice of an
    array costs more here than all the arithmetic.
    """
    t = view.gpu_type[node]
    cpu = max(view.capacity[node, CPU], 1e-9)
    memory = max(view.capacity[node, MEMORY], 1e-9)
    cpu_asked, memory_asked = view.requested[node, CPU], view.requested[node, MEMORY]
    rows[at, CPU_LEFT] = (view.capacity[node, CPU] - cpu_asked - view.request[pod, CPU]) / cpu
    rows[at, MEMORY_LEFT] = (
        view.capacity[node, MEMORY] - memory_asked - view.request[pod, MEMORY]
    ) / memory
    cpu_used, memory_used = view.usage[node, USAGE_CPU], view.usage[node, USAGE_MEMORY]
    rows[at, CPU_USED] = cpu_asked / cpu if math.isnan(cpu_used) else cpu_used
    rows[at, MEMORY_USED] = memory_asked / memory if math.isnan(memory_used) else memory_used
    rows[at, SLOWDOWN] = min(effects.slowdown[node], 3.5)
    rows[at, ON_POD] = min(effects.on_pod[node], 3.0)
    delay = effects.delay[node]
    rows[at, ON_NEIGHBOURS] = math.log1p(delay / time) / 2.0 if delay > 0.0 else 0.0
    if t < 0:
        return
    rows[at, TFLOPS] = view.gpu_spec[t, 0] / 50.0
    rows[at, BANDWIDTH] = view.gpu_spec[t, 1] / 2000.0
    rows[at, NODE_GPU_MEMORY] = view.gpu_spec[t, 2] / 80.0
    mask, gpus = effects.mask[node], view.capacity[node, GPUS]
    takes, on_gpus, wanted = 0, 0.0, 0
    for g in range(int(gpus)):
        on_gpus += view.gpu_memory_requested[node, g]
        if mask > 0 and (mask >> g) & 1:
            wanted += 1
            if view.gpu_share[node, g] <= 1e-6:
                takes += 1
    left = idle_gpus(view, node) - takes
    rows[at, GPUS_LEFT] = left / 8.0
    rows[at, EXACT_FIT] = 1.0 if takes > 0 and left == 0 else 0.0
    on_gpus += wanted * view.request[pod, GPU_MEMORY]
    rows[at, GPU_MEMORY_LEFT] = 1.0 - on_gpus / max(view.gpu_memory[node] * gpus, 1e-9)
    usable = 0
    for group in range(GPU_GROUPS):
        if queue.gangs[group] > 0 and (1 << group) <= left:
            usable = left // (1 << group) * (1 << group)
            break
    rows[at, FRAGMENTS] = (left - usable) / 8.0
    empty_in = context.free_in[t, 3]
    rows[at, WHOLE_NODE_IN] = min(math.log1p(empty_in / time) / 2.0, 3.0) if empty_in > 0.0 else 0.0
    rows[at, TYPE_FREE] = context.idle[t] / max(context.total[t], 1.0)
