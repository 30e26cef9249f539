"""The cluster as arrays: what every rule, feature and policy reads.

The simulator's engine and the live cluster state both keep one :class:`View` up to date, through
the same :func:`enqueue`, :func:`bind` and :func:`unbind`, so that what is measured in the simulator
is the code that decides in production.
"""

from typing import NamedTuple

import numpy as np

from agent.arrays import Bools, Floats, Ints, inlined, kernel

GPUS_PER_NODE = 8
RESOURCES = 3
CPU, MEMORY, GPUS = 0, 1, 2
SHARE, GPU_MEMORY = 3, 4  # further columns of View.request
USAGE_CPU, USAGE_MEMORY, USAGE_DISK, USAGE_NETWORK = 0, 1, 2, 3
PENDING, RUNNING = 0, 1
GPU_GROUPS = 4  # gangs of 1, 2, 4 and 8 GPUs share their statistics
REQUESTS_KEPT = 32
"""Requests whose frequency is known, at most."""
_EPSILON = 1e-6


class View(NamedTuple):
    """One cluster: ``N`` nodes, ``P`` pod slots, ``K`` workload kinds, ``T`` GPU types.

    A *kind* is a job type with a number of GPUs, one row of the speed table. Times are seconds of
    the cluster's clock, memory is GiB, CPU is cores.
    """

    clock: Floats
    """[1] now."""
    capacity: Floats
    """[N, 3] allocatable CPU, memory and GPUs."""
    requested: Floats
    """[N, 3] what the bound pods ask for; GPUs count whole and shared ones alike."""
    usage: Floats
    """[N, 4] measured CPU, memory, disk and network use as shares of capacity; NaN is unknown."""
    ready: Bools
    """[N] whether the node takes new pods."""
    gpu_type: Ints
    """[N] row of ``gpu_spec``; −1 for a node with no GPU."""
    gpu_memory: Floats
    """[N] memory of each of the node's GPUs."""
    gpu_share: Floats
    """[N, 8] the part of each GPU that is given out, 0 to 1; a GPU that is not there is at 1."""
    gpu_memory_requested: Floats
    """[N, 8] memory asked for on each GPU."""
    scopes: Bools
    """[S, N] sets of nodes that pods may go to by their selectors and tolerations; row 0 is all."""

    request: Floats
    """[P, 5] CPU, memory, whole GPUs, share of one GPU (0 where whole), memory on each GPU."""
    kind: Ints
    """[P] row of ``slowdown``."""
    allowed: Ints
    """[P] bit mask of the GPU types that the pod accepts; −1 for any."""
    scope: Ints
    """[P] row of ``scopes`` that the pod is held to."""
    arrival: Floats
    """[P] when the pod was created."""
    start: Floats
    """[P] when it was bound; NaN while pending."""
    deadline: Floats
    """[P] when it should be done; infinite where it has none."""
    size: Floats
    """[P] log run time in log seconds on the fastest type, of earlier runs of the same work or as
    known; NaN: estimate by kind."""
    trust: Floats
    """[P] what ``size`` counts against the kind's estimate, 0 to 1; 1 where it is known."""
    node: Ints
    """[P] where it runs; −1 while pending or gone."""
    gpu_mask: Ints
    """[P] bit mask of its GPUs on that node."""
    queue: Ints
    """[2, P] slots of the pending pods in order of arrival, and of the running pods."""
    counts: Ints
    """[2] how many of them."""

    gpu_spec: Floats
    """[T, 3] FP32 TFLOP/s, memory GB/s, memory GiB."""
    slowdown: Floats
    """[K, T] predicted log slow-down against the kind's fastest type, ≥ 0."""
    interference: Floats
    """[J, J] predicted log slow-down of a row's job type beside a column's on one GPU, ≥ 0."""
    kind_type: Ints
    """[K] job type of each kind."""
    kind_gpus: Ints
    """[K] number of GPUs of each kind."""
    history_kind: Floats
    """[K, 2] count and sum of finished log run times on the fastest type, by kind."""
    history_type: Floats
    """[J, 2] the same by job type."""
    history_gpus: Floats
    """[4, 2] the same by number of GPUs (1, 2, 4, 8)."""
    asked: Ints
    """[R, 4] requests of pods that have come: columns of ``agent.cluster.fragments``."""
    asked_models: Ints
    """[R] bit mask of the GPU types that each accepts; −1 for any."""
    asked_count: Floats
    """[R] how many pods made each, older ones counting less; 0 for a row that is not in use."""
    asked_total: Floats
    """[3] such counts of all pods, of their CPU and of their GPUs, in thousandths."""


def empty_view(
    *, nodes: int, pods: int, gpu_spec: Floats, kind_type: Ints, kind_gpus: Ints
) -> View:
    """A view of unready nodes and empty pod slots; no speeds are known, all types look alike."""
    kinds, types = len(kind_type), len(gpu_spec)
    jobs = int(kind_type.max()) + 1 if kinds else 0
    return View(
        clock=np.zeros(1),
        capacity=np.zeros((nodes, RESOURCES)),
        requested=np.zeros((nodes, RESOURCES)),
        usage=np.full((nodes, 4), np.nan),
        ready=np.zeros(nodes, np.bool_),
        gpu_type=np.full(nodes, -1, np.int64),
        gpu_memory=np.zeros(nodes),
        gpu_share=np.ones((nodes, GPUS_PER_NODE)),
        gpu_memory_requested=np.zeros((nodes, GPUS_PER_NODE)),
        scopes=np.ones((1, nodes), np.bool_),
        request=np.zeros((pods, 5)),
        kind=np.zeros(pods, np.int64),
        allowed=np.full(pods, -1, np.int64),
        scope=np.zeros(pods, np.int64),
        arrival=np.zeros(pods),
        start=np.full(pods, np.nan),
        deadline=np.full(pods, np.inf),
        size=np.full(pods, np.nan),
        trust=np.ones(pods),
        node=np.full(pods, -1, np.int64),
        gpu_mask=np.zeros(pods, np.int64),
        queue=np.zeros((2, pods), np.int64),
        counts=np.zeros(2, np.int64),
        gpu_spec=np.array(gpu_spec, np.float64),
        slowdown=np.zeros((kinds, types)),
        interference=np.zeros((jobs, jobs)),
        kind_type=np.array(kind_type, np.int64),
        kind_gpus=np.array(kind_gpus, np.int64),
        history_kind=np.zeros((kinds, 2)),
        history_type=np.zeros((jobs, 2)),
        history_gpus=np.zeros((GPU_GROUPS, 2)),
        asked=np.zeros((REQUESTS_KEPT, 4), np.int64),
        asked_models=np.full(REQUESTS_KEPT, -1, np.int64),
        asked_count=np.zeros(REQUESTS_KEPT),
        asked_total=np.zeros(3),
    )


def set_node(view: View, node: int, capacity: Floats, gpu_type: int, gpu_memory: float) -> None:
    """Write one node's hardware: ``capacity`` is [CPU cores, memory GiB, GPUs (at most 8)]."""
    gpus = int(capacity[GPUS])
    if gpus > GPUS_PER_NODE:
        raise ValueError(f"a node with {gpus} GPUs: at most {GPUS_PER_NODE} are supported")
    view.capacity[node] = capacity
    view.gpu_type[node] = gpu_type if gpus else -1
    view.gpu_memory[node] = gpu_memory
    view.gpu_share[node, :gpus] = 0.0
    view.gpu_share[node, gpus:] = 1.0
    view.ready[node] = True


def copy_view(view: View) -> View:
    """A copy whose arrays are its own, to try things on."""
    return View._make(array.copy() for array in view)


@kernel
def gpu_group(gpus: int) -> int:
    """The statistics group of a gang: 0 for at most one GPU, then 2, 4 and 8."""
    return 0 if gpus <= 1 else (1 if gpus <= 2 else (2 if gpus <= 4 else 3))


@inlined
def pick_gpus(view: View, pod: int, node: int) -> int:
    """Bit mask of the GPUs that the pod would get on the node, 0 where they do not suffice.

    A shared pod goes to the fullest GPU that still has room (best fit); a gang takes idle GPUs.
    """
    share, memory = view.request[pod, SHARE], view.request[pod, GPU_MEMORY]
    size = view.gpu_memory[node] + _EPSILON
    if share > 0.0:
        best, fullest = -1, -1.0
        for g in range(GPUS_PER_NODE):
            given = view.gpu_share[node, g]
            if (
                given + share <= 1.0 + _EPSILON
                and view.gpu_memory_requested[node, g] + memory <= size
                and given > fullest
            ):
                best, fullest = g, given
        return 0 if best < 0 else 1 << best
    wanted, mask = int(view.request[pod, GPUS]), 0
    if memory > size:
        return 0
    for g in range(GPUS_PER_NODE):
        if wanted > 0 and view.gpu_share[node, g] <= _EPSILON:
            mask |= 1 << g
            wanted -= 1
    return mask if wanted == 0 else 0


@inlined
def placement(view: View, pod: int, node: int) -> int:
    """Bit mask of the GPUs that the pod would get on the node (0 for a pod that asks for none).

    −1 where it cannot go: the node is not ready, is outside the pod's scope, or lacks CPU, memory
    or GPUs of an accepted type.
    """
    if not view.ready[node] or not view.scopes[view.scope[pod], node]:
        return -1
    for r in range(2):
        if view.requested[node, r] + view.request[pod, r] > view.capacity[node, r] + _EPSILON:
            return -1
    if view.request[pod, GPUS] <= 0.0 and view.request[pod, SHARE] <= 0.0:
        return 0
    gpu_type = view.gpu_type[node]
    if gpu_type < 0 or (view.allowed[pod] >> gpu_type) & 1 == 0:
        return -1
    mask = pick_gpus(view, pod, node)
    return mask if mask != 0 else -1


@kernel
def fits(view: View, pod: int, node: int) -> bool:
    """Whether the pod can go to the node, as kube-scheduler's filters would find."""
    return placement(view, pod, node) >= 0


@kernel
def enqueue(view: View, pod: int) -> None:
    """Put the pod into the pending queue, behind all that arrived before it or with it."""
    view.node[pod] = -1
    view.start[pod] = np.nan
    low, high = 0, view.counts[PENDING]
    while low < high:
        middle = (low + high) // 2
        if view.arrival[view.queue[PENDING, middle]] > view.arrival[pod]:
            high = middle
        else:
            low = middle + 1
    for i in range(view.counts[PENDING], low, -1):
        view.queue[PENDING, i] = view.queue[PENDING, i - 1]
    view.queue[PENDING, low] = pod
    view.counts[PENDING] += 1


@kernel
def remove(view: View, which: int, pod: int) -> bool:
    """Take the pod out of the pending or running list; False where it is not in it."""
    n = view.counts[which]
    for i in range(n):
        if view.queue[which, i] == pod:
            if which == PENDING:  # keeps the order of arrival
                for k in range(i, n - 1):
                    view.queue[which, k] = view.queue[which, k + 1]
            else:
                view.queue[which, i] = view.queue[which, n - 1]
            view.counts[which] = n - 1
            return True
    return False


@kernel
def occupy(view: View, pod: int, node: int, mask: int, sign: float) -> None:
    """Add (``sign`` 1) or take back (−1) what the pod holds on the node."""
    for r in range(2):
        view.requested[node, r] += sign * view.request[pod, r]
    share = view.request[pod, SHARE]
    part = share if share > 0.0 else 1.0
    for g in range(GPUS_PER_NODE):
        if (mask >> g) & 1:
            view.gpu_share[node, g] = max(view.gpu_share[node, g] + sign * part, 0.0)
            view.gpu_memory_requested[node, g] += sign * view.request[pod, GPU_MEMORY]
            view.requested[node, GPUS] += sign * part


@kernel
def bind(view: View, pod: int, node: int) -> None:
    """Move a pending pod onto a node, taking GPUs by :func:`pick_gpus`; starts now.

    A pod that another scheduler put where it does not fit still counts as running there.
    """
    remove(view, PENDING, pod)
    mask = pick_gpus(view, pod, node)
    view.node[pod], view.gpu_mask[pod], view.start[pod] = node, mask, view.clock[0]
    occupy(view, pod, node, mask, 1.0)
    view.queue[RUNNING, view.counts[RUNNING]] = pod
    view.counts[RUNNING] += 1


@kernel
def unbind(view: View, pod: int) -> None:
    """Take a running pod off its node."""
    if remove(view, RUNNING, pod):
        occupy(view, pod, view.node[pod], view.gpu_mask[pod], -1.0)
        view.node[pod], view.gpu_mask[pod] = -1, 0


@kernel
def record_run_time(view: View, pod: int, log_run_time: float) -> None:
    """Add a finished pod's log run time (log s, on its kind's fastest type) to the history."""
    k = view.kind[pod]
    for table, row in (
        (view.history_kind, k),
        (view.history_type, view.kind_type[k]),
        (view.history_gpus, gpu_group(view.kind_gpus[k])),
    ):
        table[row, 0] += 1.0
        table[row, 1] += log_run_time


@kernel
def imbalance(view: View) -> float:
    """Σ (U_i − Ū)² over the ready nodes; U_i is GPUs given out, CPU where a node has no GPU."""
    total = squares = n = 0.0
    for i in range(len(view.gpu_type)):
        if view.ready[i]:
            r = GPUS if view.capacity[i, GPUS] > 0.0 else CPU
            used = view.requested[i, r] / max(view.capacity[i, r], 1e-9)
            total += used
            squares += used * used
            n += 1.0
    return max(squares - total * total / n, 0.0) if n > 0.0 else 0.0
