"""A cluster small enough to work out by hand; the tests of rules, decisions and engine use it.

Two GPU types (0 fast, 1 slow), two job types: ``a`` runs 4 times slower on type 1, ``b`` alike on
both. Kinds: 0 = a x1, 1 = b x1, 2 = a x2, 3 = CPU only.
"""

import math

import numpy as np

from agent.cluster.view import View, empty_view, enqueue, set_node

KIND_TYPE = np.array([0, 1, 0, 2])
KIND_GPUS = np.array([1, 1, 2, 0])


def small_view(nodes: list[tuple[int, int]], pods: int = 8) -> View:
    """A view with nodes given as (GPU type, GPUs); 8 cores and 32 GiB a GPU, 16 GiB GPU memory."""
    view = empty_view(
        nodes=len(nodes),
        pods=pods,
        gpu_spec=np.array([[15.7, 900.0, 16.0], [4.4, 240.0, 12.0]]),
        kind_type=KIND_TYPE,
        kind_gpus=KIND_GPUS,
    )
    for n, (gpu_type, gpus) in enumerate(nodes):
        capacity = np.array([8.0 * max(gpus, 1), 32.0 * max(gpus, 1), float(gpus)])
        set_node(view, n, capacity, gpu_type, 16.0)
    view.slowdown[0] = view.slowdown[2] = [0.0, math.log(4.0)]
    return view


def add_pod(
    view: View,
    pod: int,
    *,
    kind: int = 0,
    gpus: float = 1.0,
    share: float = 0.0,
    cpu: float = 1.0,
    memory: float = 1.0,
    gpu_memory: float = 1.0,
    arrival: float = 0.0,
    run_time: float | None = None,
) -> None:
    """Put one pending pod into the view; ``run_time`` is its known time on the fastest type."""
    view.request[pod] = [cpu, memory, gpus, share, gpu_memory]
    view.kind[pod] = kind
    view.arrival[pod] = arrival
    view.size[pod] = math.nan if run_time is None else math.log(run_time)
    enqueue(view, pod)
