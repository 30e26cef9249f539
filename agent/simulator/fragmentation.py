"""Nodes, requests and their typical mix of a trace, for fleets that are filled with its pods.

Called by ``agent.benchmark.fragmentation`` and ``agent.simulator.filling``, which fills nodes by a
rule; ``agent.cluster.fragments`` says what of a node is lost. Source: Weng et al., Beware of
Fragmentation, USENIX ATC 2023. All amounts are whole numbers: CPU in thousandths of a core, memory
in MiB, GPUs in thousandths of one.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from agent.arrays import Ints, lean
from agent.cluster.fragments import COUNT, CPU, EACH, GPU, MEMORY, SLOTS, Mix
from agent.simulator.traces import Jobs, OpenbNodes

POPULAR = 0.95
"""The typical mix is the most frequent requests that make up this part of all pods."""


class Fleet(NamedTuple):
    """N nodes and what is free on them; ``open_fleet`` makes one with all free."""

    cpu: Ints
    """[N] free."""
    memory: Ints
    """[N] free."""
    free: Ints
    """[N, SLOTS] free of each GPU; 0 where there is none."""
    cpu_total: Ints
    """[N]"""
    memory_total: Ints
    """[N]"""
    gpus: Ints
    """[N] GPUs of the node."""
    model: Ints
    """[N] GPU model, an index; −1 without GPUs."""


class Requests(NamedTuple):
    """K different requests, as columns ``CPU``, ``MEMORY``, ``COUNT``, ``EACH``."""

    table: Ints
    """[K, 4]"""
    allowed: Ints
    """[K] bit mask of the GPU models that it may go to; −1 for any."""


def gpu_models(nodes: OpenbNodes) -> tuple[str, ...]:
    """The GPU models of a cluster, sorted: what indices of models stand for."""
    return tuple(sorted({model for model in nodes.models if model}))


def open_fleet(nodes: OpenbNodes) -> Fleet:
    """A trace's nodes with all free.

    Raises:
        ValueError: a node has more than ``SLOTS`` GPUs.
    """
    if nodes.gpus.max() > SLOTS:
        name = nodes.names[int(nodes.gpus.argmax())]
        raise ValueError(f"node {name} has {nodes.gpus.max()} GPUs; at most {SLOTS} are kept apart")
    models = gpu_models(nodes)
    cpu = np.rint(nodes.cpu * 1000.0).astype(np.int64)
    memory = np.rint(nodes.memory * 1024.0).astype(np.int64)
    free = np.where(np.arange(SLOTS) < nodes.gpus[:, None], GPU, 0).astype(np.int64)
    index = np.array([models.index(m) if m else -1 for m in nodes.models], np.int64)
    return Fleet(cpu, memory, free, cpu.copy(), memory.copy(), nodes.gpus.copy(), index)


def copy_fleet(fleet: Fleet) -> Fleet:
    """Another fleet with the same free."""
    return fleet._replace(cpu=fleet.cpu.copy(), memory=fleet.memory.copy(), free=fleet.free.copy())


def _rows(jobs: Jobs) -> Ints:
    """[P, 5] request of each pod and the index of the GPU models that it takes."""
    shared = jobs.share > 0
    each = np.where(shared, np.rint(jobs.share * GPU), np.where(jobs.gpus > 0, GPU, 0))
    columns = [
        np.rint(jobs.cpu * 1000.0), np.rint(jobs.memory * 1024.0),
        np.where(shared, 1, jobs.gpus), each, jobs.gpu_spec,
    ]  # fmt: skip
    return np.column_stack(columns).astype(np.int64)


def _allowed(jobs: Jobs, specs: Ints, models: Sequence[str]) -> Ints:
    """[K] bit masks over ``models``; −1 for any."""
    masks = [sum(1 << i for i, m in enumerate(models) if m in spec) for spec in jobs.gpu_specs]
    return np.array([-1 if spec < 0 else masks[spec] for spec in specs], np.int64)


def requests_of(jobs: Jobs, models: Sequence[str]) -> tuple[Requests, Ints]:
    """The different requests of a trace's pods, and [P] which of them each pod makes."""
    rows, kind = np.unique(_rows(jobs), axis=0, return_inverse=True)
    table = np.ascontiguousarray(rows[:, :4])
    return Requests(table, _allowed(jobs, rows[:, 4], models)), kind.ravel().astype(np.int64)


def typical_mix(jobs: Jobs, models: Sequence[str]) -> Mix:
    """The most frequent requests of a trace, until they make up ``POPULAR`` of its pods."""
    rows = _rows(jobs)
    demand = float((rows[:, COUNT] * rows[:, EACH]).sum())
    if demand == 0.0:
        raise ValueError("no pod asks for a GPU: there is nothing that could be fragmented")
    cores_per_gpu = float(rows[:, CPU].sum()) / demand
    rows[:, MEMORY] = 0
    counts = Counter(map(tuple, rows.tolist()))
    chosen, covered = [], 0
    for row, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        chosen.append((row, count))
        covered += count
        if covered >= POPULAR * len(rows):
            break
    table = np.array([row for row, _ in chosen], np.int64)
    share = np.array([count for _, count in chosen], np.float64) / covered
    allowed = _allowed(jobs, table[:, 4], models)
    return Mix(np.ascontiguousarray(table[:, :4]), share, allowed, 1.0, cores_per_gpu)


def arrivals(
    requests: Requests, kind: Ints, fleet: Fleet, ratio: float, seed: int
) -> tuple[Ints, Ints]:
    """Pods in the order in which they arrive: the trace's, shuffled, then drawn from it again.

    The last pod is the one with which they ask for ``ratio`` times the fleet's GPUs; a trace that
    asks for more is cut there.

    Returns:
        [A] index into ``requests`` of each pod, and [N] an order of the nodes that settles ties.
    """
    rng = np.random.default_rng(seed)
    order = rng.permutation(kind)
    asked = requests.table[:, COUNT] * requests.table[:, EACH]
    target = ratio * float(fleet.gpus.sum() * GPU)
    mean = float(asked[kind].mean())
    if mean == 0.0:
        raise ValueError("no pod asks for a GPU: there is nothing that could be fragmented")
    more = rng.choice(kind, int(2.0 * target / mean) + 1000)
    pods = np.concatenate([order, more])
    count = int(np.searchsorted(np.cumsum(asked[pods]), target))
    return pods[: count + 1], rng.permutation(len(fleet.cpu)).astype(np.int64)


@lean
def fits(fleet: Fleet, node: int, requests: Requests, kind: int) -> bool:
    """Whether a node has the CPU, memory and GPUs of a request, and of a model that will do."""
    ask = requests.table[kind]
    if fleet.cpu[node] < ask[CPU] or fleet.memory[node] < ask[MEMORY]:
        return False
    if ask[EACH] == 0:
        return True
    if fleet.model[node] < 0 or (requests.allowed[kind] >> fleet.model[node]) & 1 == 0:
        return False
    enough = 0
    for i in range(SLOTS):
        if fleet.free[node, i] >= ask[EACH]:
            enough += 1
    return bool(enough >= ask[COUNT])


@lean
def tightest(free: Ints, each: int) -> int:
    """The GPU with the least free that has ``each`` free, −1 for none."""
    best = -1
    for i in range(SLOTS):
        if free[i] >= each and (best < 0 or free[i] < free[best]):
            best = i
    return best


@lean
def occupy(free: Ints, count: int, each: int, gpu: int) -> None:
    """Take a request's GPUs out of ``free``: part of ``gpu``, or the first whole ones."""
    if each < GPU:
        if count > 0:
            free[gpu] -= each
        return
    for i in range(SLOTS):
        if count > 0 and free[i] == GPU:
            free[i] = 0
            count -= 1
