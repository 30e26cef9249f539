"""What pods ask for, how often, and how much of a node's free GPUs they cannot use: fragmentation.

``agent.scheduling.rules`` places pods by it, with the mix of requests that the cluster itself has
seen: engine and cluster state tell of each pod that comes by :func:`record_request`.
``agent.simulator.filling`` fills fleets by it, with a mix given beforehand. The measure is that of
Weng et al., Beware of Fragmentation, USENIX ATC 2023. All amounts are whole numbers: CPU in
thousandths of a core, GPUs in thousandths of one.
"""

from typing import NamedTuple

import numpy as np

from agent.arrays import Floats, Ints, inlined, kernel, lean
from agent.cluster.view import GPUS, GPUS_PER_NODE, REQUESTS_KEPT, SHARE, View

GPU = 1000
"""A whole GPU."""
SLOTS = GPUS_PER_NODE
"""GPUs that a node can have."""
CPU, MEMORY, COUNT, EACH = range(4)
"""Columns of requests: CPU, memory, GPUs, and how much of each of them."""
KEEP = 1.0 - 1.0 / 2000.0
"""What a pod of the past counts after each further one: the mix is that of the last 2,000 or so."""
_LEAST_CORES = 1e-3  # for each GPU: pods that ask for no CPU must not divide by 0


class Mix(NamedTuple):
    """T requests and how frequent each is."""

    table: Ints
    """[T, 4]; memory plays no part."""
    share: Floats
    """[T] how often each is made, ``total`` in all."""
    allowed: Ints
    """[T] bit mask of the GPU models that each may go to; −1 for any."""
    total: float
    cores_per_gpu: float
    """CPU that all pods together ask for, for each GPU that they ask for; infinite without GPUs."""


@lean
def fragment(cpu: int, free: Ints, model: int, mix: Mix) -> float:
    """How much of a node's free GPUs (thousandths) a pod of the mix is expected not to be able
    to use.

    All of it where the pod asks for no GPU, may not go there, or finds too little CPU or too few
    GPUs; else what is free on GPUs that have less than it asks of each.

    Args:
        cpu: free CPU. free: [SLOTS] free of each GPU. model: the node's GPU model.
    """
    total = 0
    for i in range(SLOTS):
        total += free[i]
    if total == 0 or mix.total <= 0.0:
        return 0.0
    lost = 0.0
    for t in range(len(mix.share)):
        each = mix.table[t, EACH]
        part = total
        if each > 0 and cpu >= mix.table[t, CPU] and (mix.allowed[t] >> model) & 1 == 1:
            enough, small = 0, 0
            for i in range(SLOTS):
                if free[i] >= each:
                    enough += 1
                else:
                    small += free[i]
            if enough >= mix.table[t, COUNT]:
                part = small
        lost += mix.share[t] * part
    return lost / mix.total


@inlined
def _mismatch(cpu: float, gpu: float, mix: Mix) -> float:
    """GPUs that are free without their CPU, or whose CPU is free without them."""
    return abs(cpu / mix.cores_per_gpu - gpu) / GPU


@lean
def unevenness(
    weights: tuple[float, float],
    mix: Mix,
    gpus: int,
    cpu: int,
    gpu: int,
    asked_cpu: int,
    asked_gpu: int,
) -> float:
    """What ``level`` adds to the growth of fragmentation on a node, in GPUs.

    Args:
        weights: of a GPU more that is free without its CPU or whose CPU is free without it; and
            what it costs to be the first on a node's GPUs.
        gpus: GPUs of the node. cpu, gpu: free on it before the pod.
    """
    shape = _mismatch(cpu - asked_cpu, gpu - asked_gpu, mix) - _mismatch(cpu, gpu, mix)
    first = asked_gpu > 0 and gpu == gpus * GPU
    return weights[0] * shape + (weights[1] if first else 0.0)


@inlined
def _request_row(view: View, pod: int) -> tuple[int, int, int]:
    """CPU, GPUs and how much of each, as in a :class:`Mix`."""
    share, gpus = view.request[pod, SHARE], int(view.request[pod, GPUS])
    cpu = int(view.request[pod, CPU] * 1000.0 + 0.5)
    if share > 0.0:
        return cpu, 1, int(share * GPU + 0.5)
    return cpu, gpus, GPU if gpus > 0 else 0


@kernel
def record_request(view: View, pod: int) -> None:
    """Count what a pod that has just come asks for, once for each pod.

    The ``REQUESTS_KEPT`` most frequent requests are kept. A new one takes the place and the count
    of the least frequent (Space-Saving: Metwally, Agrawal and El Abbadi, ICDT 2005), so that none
    that is frequent is missed for long; counts fade by ``KEEP``.
    """
    cpu, count, each = _request_row(view, pod)
    allowed, row, least = view.allowed[pod], -1, 0
    for t in range(REQUESTS_KEPT):
        view.asked_count[t] *= KEEP
        if view.asked_count[t] < view.asked_count[least]:
            least = t
        if (
            view.asked_count[t] > 0.0
            and view.asked[t, CPU] == cpu
            and view.asked[t, COUNT] == count
            and view.asked[t, EACH] == each
            and view.asked_models[t] == allowed
        ):
            row = t
    if row < 0:
        row = least
        view.asked[row, CPU], view.asked[row, COUNT], view.asked[row, EACH] = cpu, count, each
        view.asked_models[row] = allowed
    view.asked_count[row] += 1.0
    view.asked_total[:] *= KEEP
    view.asked_total[0] += 1.0
    view.asked_total[1] += cpu
    view.asked_total[2] += count * each


@kernel
def recount_requests(view: View, pods: Ints) -> None:
    """Count anew what the pods in these slots ask for, and forget those that are gone."""
    view.asked_count[:] = 0.0
    view.asked_total[:] = 0.0
    for pod in pods:
        record_request(view, pod)


@inlined
def _seen_mix(view: View) -> Mix:
    """The mix of what the cluster's pods have asked for."""
    pods, cpu, gpus = view.asked_total[0], view.asked_total[1], view.asked_total[2]
    cores = max(cpu / gpus, _LEAST_CORES) if gpus > 0.0 else np.inf
    return Mix(view.asked, view.asked_count, view.asked_models, pods, cores)


@lean
def fragmentation_cost(
    view: View, weights: tuple[float, float], pod: int, node: int, mask: int, free: Ints
) -> float:
    """What the pod takes from typical pods by going to a node, in GPUs; less is better.

    Args:
        weights: see :func:`unevenness`; 0 and 0 for the growth of fragmentation alone.
        mask: bit mask of the node's GPUs that the pod would get. free: [SLOTS] room to work in.
    """
    mix, model = _seen_mix(view), view.gpu_type[node]
    asked_cpu, count, each = _request_row(view, pod)
    cpu = int((view.capacity[node, CPU] - view.requested[node, CPU]) * 1000.0 + 0.5)
    gpu = 0
    for i in range(SLOTS):
        free[i] = int(max(1.0 - view.gpu_share[node, i], 0.0) * GPU + 0.5)
        gpu += free[i]
    before = fragment(cpu, free, model, mix)
    for i in range(SLOTS):
        if (mask >> i) & 1:
            free[i] -= each
    growth = (fragment(cpu - asked_cpu, free, model, mix) - before) / GPU
    gpus = int(view.capacity[node, GPUS])
    return growth + unevenness(weights, mix, gpus, cpu, gpu, asked_cpu, count * each)
