"""Fills a fleet with pods in the order of their arrival, by one of several placement rules.

Called by ``agent.benchmark.fragmentation``. Pods stay; one that fits nowhere is turned away. A
rule's score of a node depends on the pod's request and on that node alone, so that after each
placement only the touched node is scored anew.

Baselines score as the artifact of Weng et al. (ATC 2023) does, whole numbers from 0 to 100 with
ties settled by a fixed random order of the nodes: a coarse score packs nodes one after the other.
"""

import math
from typing import NamedTuple

import numpy as np

from agent.arrays import Floats, Ints, kernel, lean
from agent.cluster.fragments import (
    COUNT,
    CPU,
    EACH,
    GPU,
    MEMORY,
    SLOTS,
    Mix,
    fragment,
    unevenness,
)
from agent.scheduling.rules import LEVEL as LEVEL_WEIGHTS
from agent.simulator.fragmentation import (
    Fleet,
    Requests,
    copy_fleet,
    fits,
    occupy,
    tightest,
)

RANDOM, LEAST_ALLOCATED, BEST_FIT, DOT_PRODUCT, PACKING, CLUSTERING = range(6)
FGD, FGD_EXACT, LEVEL = range(6, 9)
RULES = {
    "random": RANDOM,
    "least-allocated": LEAST_ALLOCATED,
    "best-fit": BEST_FIT,
    "dot-product": DOT_PRODUCT,
    "gpu-packing": PACKING,
    "gpu-clustering": CLUSTERING,
    "fgd": FGD,
    "fgd-exact": FGD_EXACT,
    "level": LEVEL,
}
RULE_HELP = {
    "random": "any node with room, any GPU of it with room",
    "least-allocated": "kube-scheduler's default: the largest share of CPU and memory left",
    "best-fit": "least CPU and GPU left on the node",
    "dot-product": "the node whose free amounts are least like the request (Tetris, as in FGD's"
    " artifact)",
    "gpu-packing": "GPUs in use before free ones, nodes in use before free ones",
    "gpu-clustering": "nodes that have pods of the same number of GPUs",
    "fgd": "least growth of expected fragmentation (Fragmentation Gradient Descent)",
    "fgd-exact": "the same, told apart by a millionth of a GPU instead of some hundredths",
    "level": "ours: the same, and growth of what a node has of CPU without GPU or GPU without CPU,"
    " and nodes whose GPUs are all idle last; the GPU is left to the device plugin, which takes the"
    " fullest",
}

LARGEST_CPU, LARGEST_GPU = 128_000.0, 8_000.0
"""The largest node, by which FGD's artifact measures."""
PRECISION = 1e6
"""Steps of a GPU in which scores are told apart: what ties must not be settled by how sums were
rounded."""
NOT = -1e30
"""Score of a node without room."""
PERCENTS = 130
FRAGMENTED, ALLOCATED, REFUSED, REFUSED_GPU = range(4)
"""Columns of a course: percent of all GPUs, percent, pods, percent of all GPUs."""


class Course(NamedTuple):
    """What became of a fleet while pods arrived."""

    track: Floats
    """[PERCENTS + 1, 4] state when so many percent of all GPUs had been asked for; row 0 unused,
    NaN where arrivals ended before."""
    fleet: Fleet
    """As it was in the end."""


@lean
def _use_first(free: Ints, gpus: int) -> int:
    """Whole GPUs free of a node's."""
    whole = 0
    for i in range(gpus):
        if free[i] == GPU:
            whole += 1
    return whole


@lean
def _packing(free: Ints, gpus: int, count: int, each: int) -> float:
    if each == 0:
        return 0.0
    whole = _use_first(free, gpus)
    if whole == gpus:
        return float(max(33 - whole, whole))
    if each == GPU:
        return float(max(50 - count, 33))
    left = free[tightest(free, each)]
    return 49.0 if left == GPU else float(max(100 - (left * 100 // GPU) // 10, 50))


@lean
def _clustering(held: Ints, total: int, count: int, each: int) -> float:
    """``held`` [SLOTS + 1]: pods on the node by their number of GPUs, 0 for a shared one."""
    if each == 0:
        return 0.0
    kinds = 0
    for i in range(SLOTS + 1):
        kinds += held[i] > 0
    score = float(25 * (8000 - total) // 8000)
    if held[count if each == GPU else 0] > 0:
        return score + (75 if kinds == 1 else 50)
    return score + (25 if kinds == 0 else 0)


@lean
def _simple(rule: int, fleet: Fleet, n: int, ask: Ints, held: Ints) -> float:
    """Scores that do not depend on which GPU of the node it is; higher is better."""
    total = 0
    for i in range(SLOTS):
        total += fleet.free[n, i]
    cpu, gpu = fleet.cpu[n], ask[COUNT] * ask[EACH]
    if rule == LEAST_ALLOCATED:
        left = (cpu - ask[CPU]) / fleet.cpu_total[n]
        return float(left + (fleet.memory[n] - ask[MEMORY]) / fleet.memory_total[n])
    if rule == BEST_FIT:
        left = (cpu - ask[CPU]) / LARGEST_CPU + (total - gpu) / LARGEST_GPU
        return float(math.floor(100.0 * (1.0 - left / 2.0)))
    if rule == DOT_PRODUCT:
        alike = cpu * ask[CPU] / LARGEST_CPU**2 + total * gpu / LARGEST_GPU**2
        return float(math.floor(100.0 * (1.0 - alike / 2.0)))
    if rule == PACKING:
        return _packing(fleet.free[n], fleet.gpus[n], ask[COUNT], ask[EACH])
    if rule == CLUSTERING:
        return _clustering(held, total, ask[COUNT], ask[EACH])
    return 0.0


@lean
def _gradient(
    rule: int,
    weights: tuple[float, float],
    fleet: Fleet,
    n: int,
    before: float,
    ask: Ints,
    free: Ints,
    mix: Mix,
) -> float:
    """Score by what the node would be like: ``free`` [SLOTS] with the request's GPUs taken."""
    cpu = fleet.cpu[n] - ask[CPU]
    growth = (fragment(cpu, free, fleet.model[n], mix) - before) / GPU
    if rule == FGD:
        return float(math.floor(100.0 / (1.0 + math.exp(growth))))
    if rule == FGD_EXACT:
        return float(math.floor(-growth * PRECISION + 0.5))
    had, has = 0, 0
    for i in range(SLOTS):
        had += fleet.free[n, i]
        has += free[i]
    gpus, taken = fleet.gpus[n], had - has
    cost = growth + unevenness(weights, mix, gpus, fleet.cpu[n], had, ask[CPU], taken)
    return float(math.floor(-cost * PRECISION + 0.5))


@lean
def _score(
    rule: int,
    weights: tuple[float, float],
    fleet: Fleet,
    n: int,
    before: float,
    ask: Ints,
    held: Ints,
    mix: Mix,
    free: Ints,
) -> tuple[float, int]:
    """A rule's score of a node with room, and the GPU that it would share (−1: none).

    Args:
        weights: see ``fill``. before: the node's ``fragment``. held: see ``_clustering``.
        free: [SLOTS] room to work in.
    """
    count, each = ask[COUNT], ask[EACH]
    shared = 0 < each < GPU
    if rule < FGD:
        gpu = tightest(fleet.free[n], each) if shared else -1
        return _simple(rule, fleet, n, ask, held), gpu
    best, chosen, first, last = NOT, -1, 0, (SLOTS if shared else 1)
    if shared and rule == LEVEL:
        first = tightest(fleet.free[n], each)
        last = first + 1
    for gpu in range(first, last):
        if shared and (fleet.free[n, gpu] < each or _as_another(fleet.free[n], gpu)):
            continue
        for i in range(SLOTS):
            free[i] = fleet.free[n, i]
        occupy(free, count, each, gpu)
        score = _gradient(rule, weights, fleet, n, before, ask, free, mix)
        if score > best:
            best, chosen = score, (gpu if shared else -1)
    return best, chosen


@lean
def _as_another(free: Ints, gpu: int) -> bool:
    """Whether an earlier GPU has as much free."""
    first = 0
    while free[first] != free[gpu]:
        first += 1
    return first < gpu


@lean
def _any_gpu(free: Ints, each: int) -> int:
    """A GPU with room, each as likely."""
    seen, chosen = 0, -1
    for i in range(SLOTS):
        if free[i] >= each:
            seen += 1
            if np.random.randint(seen) == 0:
                chosen = i
    return chosen


@kernel
def _fill(
    rule: int,
    weights: tuple[float, float],
    fleet: Fleet,
    requests: Requests,
    mix: Mix,
    pods: Ints,
    rank: Ints,
    seed: int,
) -> Floats:
    np.random.seed(seed)
    kinds, nodes = len(requests.table), len(fleet.cpu)
    lost, total = np.empty(nodes), 0
    for n in range(nodes):
        lost[n] = fragment(fleet.cpu[n], fleet.free[n], fleet.model[n], mix)
        total += GPU * fleet.gpus[n]
    scores, gpus = np.full((kinds, nodes), NOT), np.full((kinds, nodes), -1)
    scored, version = np.full((kinds, nodes), -1), np.zeros(nodes, np.int64)
    held, room = np.zeros((nodes, SLOTS + 1), np.int64), np.empty(SLOTS, np.int64)
    track, percent = np.full((PERCENTS + 1, 4), np.nan), 1
    arrived, allocated, refused, refused_gpu, wasted = 0, 0, 0, 0, lost.sum()
    for kind in pods:
        ask = requests.table[kind]
        best, seen = -1, 0
        for n in range(nodes):
            if scored[kind, n] != version[n]:
                scored[kind, n], scores[kind, n] = version[n], NOT
                if fits(fleet, n, requests, kind):
                    scores[kind, n], gpus[kind, n] = _score(
                        rule, weights, fleet, n, lost[n], ask, held[n], mix, room
                    )
            score = scores[kind, n]
            if score <= NOT:
                continue
            if rule == RANDOM:
                seen += 1
                if np.random.randint(seen) == 0:
                    best = n
            elif (
                best < 0
                or score > scores[kind, best]
                or (score == scores[kind, best] and rank[n] < rank[best])
            ):
                best = n
        asked = ask[COUNT] * ask[EACH]
        arrived += asked
        if best < 0:
            refused += 1
            refused_gpu += asked
        else:
            gpu = gpus[kind, best]
            if rule == RANDOM and gpu >= 0:
                gpu = _any_gpu(fleet.free[best], ask[EACH])
            fleet.cpu[best] -= ask[CPU]
            fleet.memory[best] -= ask[MEMORY]
            occupy(fleet.free[best], ask[COUNT], ask[EACH], gpu)
            allocated += asked
            version[best] += 1
            if asked > 0:
                held[best, ask[COUNT] if ask[EACH] == GPU else 0] += 1
            wasted -= lost[best]
            lost[best] = fragment(fleet.cpu[best], fleet.free[best], fleet.model[best], mix)
            wasted += lost[best]
        while percent <= PERCENTS and arrived * 100 >= percent * total:
            track[percent, FRAGMENTED] = 100.0 * wasted / total
            track[percent, ALLOCATED] = 100.0 * allocated / total
            track[percent, REFUSED] = refused
            track[percent, REFUSED_GPU] = 100.0 * refused_gpu / total
            percent += 1
    return track


def fill(
    rule: str,
    fleet: Fleet,
    requests: Requests,
    mix: Mix,
    pods: Ints,
    rank: Ints,
    seed: int,
    weights: tuple[float, float] = LEVEL_WEIGHTS,
) -> Course:
    """Place pods one after the other by a rule of ``RULES``; ``fleet`` stays as it is.

    Args:
        weights: ``shape`` and ``untouched`` of ``level``, as in ``agent.scheduling.rules.Rule``.
        pods, rank: as ``fragmentation.arrivals`` makes them. seed: of what ``random`` draws.
    """
    filled = copy_fleet(fleet)
    track = _fill(RULES[rule], weights, filled, requests, mix, pods, rank, seed)
    return Course(track, filled)
