"""What one look at the cluster tells: expected run times, what becomes free when, effects of a pod.

``agent.scheduling.rules`` decides by it, ``agent.scheduling.description`` describes by it; both go
through ``agent.scheduling.candidates``, which looks once for all decisions of a moment.
"""

import math
from typing import NamedTuple

import numpy as np

from agent.arrays import Floats, Ints, inlined, kernel, lean
from agent.cluster.view import (
    GPU_GROUPS,
    GPUS,
    GPUS_PER_NODE,
    RUNNING,
    SHARE,
    View,
    gpu_group,
    placement,
)

PRIOR_LOG_RUN_TIME = 8.0
"""Expected log run time (log s) while nothing is known: about 50 minutes."""
PRIOR_WEIGHT = 2.0
NEVER = 1e18


class Context(NamedTuple):
    """What one look at the cluster tells about all decisions of that moment."""

    expected: Floats
    """[K] expected log run time on the kind's fastest type."""
    run_time: Floats
    """[K] the same in seconds."""
    slower: Floats
    """[K, T] how many times slower than its fastest type a kind is predicted to be on each type."""
    free_in: Floats
    """[T, 4] predicted seconds until a node of the type has 1, 2, 4 or 8 idle GPUs; 0 is now."""
    idle: Floats
    """[T] idle GPUs."""
    total: Floats
    """[T] GPUs."""
    worth: Floats
    """[T] how much more of its work a GPU of the type does a second than one of the slowest type,
    averaged over the kinds seen, in units of the fastest type."""
    busy: Floats
    """[T] share of the GPUs at least as good as the type's that are not idle."""
    mean_size: float
    """Mean expected log run time over the kinds seen, weighted by their counts."""
    speed: float
    """The cluster's GPUs in units of fastest-type GPUs, at least one."""


class Effects(NamedTuple):
    """Predicted effect of one pod on each node."""

    mask: Ints
    """[N] GPUs that it would get; 0 with none asked for; −1 where it does not fit."""
    slowdown: Floats
    """[N] log slow-down of the node's type."""
    on_pod: Floats
    """[N] log slow-down by neighbours on the same GPU."""
    log_time: Floats
    """[N] log of the expected run time there, log s."""
    delay: Floats
    """[N] delay caused to the neighbours, s summed."""
    free: Ints
    """[8] room for what is free of each of a node's GPUs."""


@inlined
def expected_log_run_time(view: View, kind: int) -> float:
    """Log run time on the fastest type, shrunk from the kind to its job type and gang size."""
    n = total = 0.0
    for g in range(GPU_GROUPS):
        n += view.history_gpus[g, 0]
        total += view.history_gpus[g, 1]
    mean = (total + PRIOR_WEIGHT * PRIOR_LOG_RUN_TIME) / (n + PRIOR_WEIGHT)
    group, job = gpu_group(view.kind_gpus[kind]), view.kind_type[kind]
    by_gpus = (view.history_gpus[group, 1] + 10.0 * mean) / (view.history_gpus[group, 0] + 10.0)
    by_type = (view.history_type[job, 1] + 10.0 * mean) / (view.history_type[job, 0] + 10.0)
    count, own = view.history_kind[kind, 0], view.history_kind[kind, 1]
    return (own + 4.0 * (by_gpus + by_type - mean)) / (count + 4.0)


@inlined
def pod_log_run_time(view: View, context: Context, pod: int) -> float:
    """The kind's expectation, moved towards the pod's own size as far as that is trusted."""
    size, expected = view.size[pod], context.expected[view.kind[pod]]
    return expected if math.isnan(size) else expected + view.trust[pod] * (size - expected)


@inlined
def pod_run_time(view: View, context: Context, pod: int) -> float:
    """The exponential of :func:`pod_log_run_time`, s."""
    if math.isnan(view.size[pod]):
        return context.run_time[view.kind[pod]]
    return math.exp(pod_log_run_time(view, context, pod))


@inlined
def node_slowdown(view: View, pod: int, node: int) -> float:
    """Predicted log slow-down of the node's GPU type; 0 for a pod that asks for no GPU."""
    gpu_type = view.gpu_type[node]
    if gpu_type < 0 or view.kind_gpus[view.kind[pod]] == 0:
        return 0.0
    return view.slowdown[view.kind[pod], gpu_type]


@inlined
def idle_gpus(view: View, node: int) -> int:
    """How many of the node's GPUs nobody uses."""
    idle = 0
    for g in range(GPUS_PER_NODE):
        if view.gpu_share[node, g] <= 1e-6:
            idle += 1
    return idle


@kernel
def remaining_time(mean: float, age: float) -> float:
    """Expected seconds left of a job of ``mean`` expected length that ran for ``age``.

    Run times are heavy-tailed: one that outlives its mean goes on for a share of its age.
    """
    return max(mean - age, 0.6 * age)


@kernel
def _predict_free(view: View, context: Context) -> None:
    """Fill ``free_in`` from the running pods' expected ends."""
    running, now = view.counts[RUNNING], view.clock[0]
    free_in = context.free_in
    free_in[:] = NEVER
    # Each node's pods with GPUs as a list by time left; a global sort would cost more.
    nodes = len(view.gpu_type)
    first, after = np.full(nodes, -1, np.int64), np.empty(running, np.int64)
    left = np.empty(running)
    for i in range(running):
        pod = view.queue[RUNNING, i]
        n, kind = view.node[pod], view.kind[pod]
        t = view.gpu_type[n]
        if t < 0 or view.request[pod, GPUS] + view.request[pod, SHARE] <= 0.0:
            continue
        mean = pod_run_time(view, context, pod) * context.slower[kind, t]
        left[i] = remaining_time(mean, now - view.start[pod])
        before, behind = -1, first[n]
        while behind >= 0 and left[behind] <= left[i]:
            before, behind = behind, after[behind]
        after[i] = behind
        if before < 0:
            first[n] = i
        else:
            after[before] = i
    for n in range(nodes):
        t = view.gpu_type[n]
        if t < 0 or not view.ready[n]:
            continue
        free, until, i, group = float(idle_gpus(view, n)), 0.0, first[n], 0
        while True:
            while group < GPU_GROUPS and free >= (1 << group) - 1e-6:
                free_in[t, group] = min(free_in[t, group], until)
                group += 1
            if i < 0 or group == GPU_GROUPS:
                break
            pod = view.queue[RUNNING, i]
            share = view.request[pod, SHARE]
            free += share if share > 0.0 else view.request[pod, GPUS]
            until, i = left[i], after[i]


@lean
def _weigh_types(context: Context, pace: Floats) -> None:
    """Fill ``worth`` and ``busy``; ``pace`` [T] is a type's mean speed relative to the fastest."""
    slowest = 1.0
    for t in range(len(pace)):
        if context.total[t] > 0.0:
            slowest = min(slowest, pace[t])
    for t in range(len(pace)):
        context.worth[t] = max(pace[t] - slowest, 0.0)
        idle = total = 0.0
        for other in range(len(pace)):
            if pace[other] >= pace[t] - 1e-9:
                idle += context.idle[other]
                total += context.total[other]
        context.busy[t] = 1.0 - idle / max(total, 1.0)


@kernel
def observe(view: View) -> Context:
    """Look at the cluster once, before the decisions of one moment."""
    kinds, types = view.slowdown.shape
    context = Context(
        np.empty(kinds),
        np.empty(kinds),
        np.empty((kinds, types)),
        np.empty((types, GPU_GROUPS)),
        np.zeros(types),
        np.zeros(types),
        np.zeros(types),
        np.zeros(types),
        0.0,
        0.0,
    )
    weight = mean = on_gpus = 0.0
    pace = np.zeros(types)
    for k in range(kinds):
        context.expected[k] = expected_log_run_time(view, k)
        context.run_time[k] = math.exp(context.expected[k])
        w = view.history_kind[k, 0] + 0.01
        weight += w
        mean += w * context.expected[k]
        on_gpus += w if view.kind_gpus[k] > 0 else 0.0
        for t in range(types):
            context.slower[k, t] = math.exp(view.slowdown[k, t])
            pace[t] += w / context.slower[k, t] if view.kind_gpus[k] > 0 else 0.0
    for n in range(len(view.gpu_type)):
        t = view.gpu_type[n]
        if t >= 0 and view.ready[n]:
            context.total[t] += int(view.capacity[n, GPUS])
            context.idle[t] += idle_gpus(view, n)
    pace /= max(on_gpus, 1e-9)
    speed = 0.0
    for t in range(types):
        speed += context.total[t] * pace[t]
    _weigh_types(context, pace)
    full = Context(
        context.expected,
        context.run_time,
        context.slower,
        context.free_in,
        context.idle,
        context.total,
        context.worth,
        context.busy,
        mean / weight if weight > 0.0 else PRIOR_LOG_RUN_TIME,
        max(speed, 1.0),
    )
    _predict_free(view, full)
    return full


@kernel
def new_effects(nodes: int) -> Effects:
    """Room for the effects of one pod on each of ``nodes`` nodes."""
    return Effects(
        np.empty(nodes, np.int64),
        np.empty(nodes),
        np.empty(nodes),
        np.empty(nodes),
        np.empty(nodes),
        np.empty(GPUS_PER_NODE, np.int64),
    )


@lean
def predict_effects(view: View, context: Context, pod: int, effects: Effects) -> None:
    """Fill ``effects`` for one pod; neighbours matter to pods that share a GPU."""
    base = pod_log_run_time(view, context, pod)
    for n in range(len(view.gpu_type)):
        effects.delay[n] = effects.on_pod[n] = 0.0
        effects.mask[n] = placement(view, pod, n)
        if effects.mask[n] >= 0:
            effects.slowdown[n] = node_slowdown(view, pod, n)
            effects.log_time[n] = base + effects.slowdown[n]
    if view.request[pod, SHARE] <= 0.0:
        return
    job = view.kind_type[view.kind[pod]]
    for i in range(view.counts[RUNNING]):
        other = view.queue[RUNNING, i]
        n = view.node[other]
        if effects.mask[n] > 0 and (effects.mask[n] & view.gpu_mask[other]) != 0:
            slower = view.interference[job, view.kind_type[view.kind[other]]]
            effects.on_pod[n] += slower
            effects.log_time[n] += slower
    for i in range(view.counts[RUNNING]):
        other = view.queue[RUNNING, i]
        n = view.node[other]
        if effects.mask[n] > 0 and (effects.mask[n] & view.gpu_mask[other]) != 0:
            slower = view.interference[view.kind_type[view.kind[other]], job]
            mean = math.exp(pod_log_run_time(view, context, other) + node_slowdown(view, other, n))
            left = remaining_time(mean, view.clock[0] - view.start[other])
            together = min(left, math.exp(effects.log_time[n]))
            effects.delay[n] += together * (1.0 - math.exp(-slower))
