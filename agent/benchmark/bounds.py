"""What no policy can beat on a workload: lower bounds, for the suites to show beside baselines.

Every job is given its fastest run time and as much preemption and migration as it likes. GPUs of a
type have a price a second; a job then needs at least its cheapest way through, and the cluster has
a fixed sum to spend each second. That is a single machine, whose best order is known. Prices that
favour no type too much give the tightest bound; each choice of prices is a bound, and so is the
best of them. The bounds are of runs in which every job succeeds.
"""

import heapq
import itertools
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from agent.simulator.hardware import SpeedTable
from agent.simulator.nodes import NodeMix
from agent.simulator.workloads import Workload, fastest_s

Floats = npt.NDArray[np.float64]
PRICES = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Prices of the other types that are tried, relative to the fastest."""


def shortest_remaining(arrival: Floats, need: Floats) -> float:
    """Least sum of completion less arrival times on one machine that may preempt (SRPT), s."""
    queue: list[tuple[float, float]] = []
    now, i, total, count = 0.0, 0, 0.0, len(arrival)
    while i < count or queue:
        if not queue:
            now = max(now, float(arrival[i]))
        while i < count and arrival[i] <= now:
            heapq.heappush(queue, (float(need[i]), float(arrival[i])))
            i += 1
        left, came = queue[0]
        upcoming = float(arrival[i]) if i < count else np.inf
        if now + left <= upcoming:
            now += left
            heapq.heappop(queue)
            total += now - came
        else:
            heapq.heapreplace(queue, (left - (upcoming - now), came))
            now = upcoming
    return total


def mean_busy(arrival: Floats, need: Floats) -> float:
    """Least sum of mean busy less arrival times on one machine that may preempt, s.

    The mean busy time of a job is the mean of the moments at which it is worked on. Shortest whole
    need first is best (Goemans et al., Single machine scheduling with release dates, SIAM J.
    Discrete Mathematics 15(2), 2002).
    """
    queue: list[tuple[float, int]] = []
    left = need.astype(np.float64).copy()
    now, i, count = 0.0, 0, len(arrival)
    moments = np.zeros(count)
    while i < count or queue:
        if not queue:
            now = max(now, float(arrival[i]))
        while i < count and arrival[i] <= now:
            heapq.heappush(queue, (float(need[i]), i))
            i += 1
        job = queue[0][1]
        upcoming = float(arrival[i]) if i < count else np.inf
        worked = min(float(left[job]), upcoming - now)
        moments[job] += worked * (now + worked / 2.0)
        now += worked
        left[job] -= worked
        if left[job] <= 1e-9 * need[job]:
            heapq.heappop(queue)
        else:
            now = upcoming
    return float((moments / need - arrival).sum())


def _needs(workload: Workload, speeds: SpeedTable, nodes: NodeMix) -> Iterator[Floats]:
    """[P] seconds that each job needs of the whole cluster, for each choice of prices."""
    types = len(speeds.gpu_types)
    held = nodes.gpu_type >= 0
    counts = np.bincount(nodes.gpu_type[held], weights=nodes.capacity[held, 2], minlength=types)
    relative = speeds.relative[workload.kind]
    work = fastest_s(workload, speeds) * (workload.gpus + workload.share)
    present = np.flatnonzero(counts)
    fastest = present[int(np.argmax(speeds.relative.mean(axis=0)[present]))]
    others = [int(t) for t in present if t != fastest]
    for chosen in itertools.product(PRICES, repeat=len(others)):
        price = np.full(types, np.inf)
        price[fastest] = 1.0
        price[others] = chosen
        cheapest = (price / relative).min(axis=1)
        yield cheapest * work / float((counts[present] * price[present]).sum())


def completion_bound(workload: Workload, speeds: SpeedTable, nodes: NodeMix) -> float:
    """No policy has a lower mean completion time on this workload, s.

    The best of: mean fastest run time; shortest remaining need first; mean busy time plus half the
    run, for a job that runs at one speed is half way through at its mean busy time.

    Raises:
        ValueError: a job holds no GPU; such work is not bound by them.
    """
    if len(workload) == 0 or (workload.kind < 0).any():
        raise ValueError("the bound is of jobs that hold GPUs, and here is one that holds none")
    fastest = fastest_s(workload, speeds)
    best = float(fastest.sum())
    for need in _needs(workload, speeds, nodes):
        best = max(
            best,
            shortest_remaining(workload.arrival, need),
            mean_busy(workload.arrival, need) + float(fastest.sum()) / 2.0,
        )
    return best / len(workload)


def makespan_bound(workload: Workload, speeds: SpeedTable, nodes: NodeMix) -> float:
    """No policy ends sooner, counted from the first arrival, s; raises as the other bound does.

    What arrives from some moment on must be worked off after it, and every job runs its fastest
    time after it arrived.
    """
    if len(workload) == 0 or (workload.kind < 0).any():
        raise ValueError("the bound is of jobs that hold GPUs, and here is one that holds none")
    best = float((workload.arrival + fastest_s(workload, speeds)).max())
    for need in _needs(workload, speeds, nodes):
        remaining = np.cumsum(need[::-1])[::-1]
        best = max(best, float((workload.arrival + remaining).max()))
    return best - float(workload.arrival.min())
