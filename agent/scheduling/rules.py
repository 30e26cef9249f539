"""Rule policies under the field's names: what goes first, what a node costs, whether to wait.

``agent.scheduling.candidates`` applies rules to a queue; the learned correction of
``common.policy`` sits on top of their scores.
"""

import math
from typing import NamedTuple

import numpy as np

from agent.arrays import Ints, inlined, lean
from agent.cluster.fragments import fragmentation_cost
from agent.cluster.view import CPU, GPUS, MEMORY, SHARE, View, gpu_group
from agent.scheduling.outlook import NEVER, Context, Effects, pod_log_run_time

# Order of the pending pods.
FIFO, SJF, HRRN = 0, 1, 2
# Cost of a node.
LEAST_ALLOCATED, MOST_ALLOCATED, BALANCED_ALLOCATION, RANDOM, FASTEST, EFT = 0, 1, 2, 3, 4, 5
FRAGMENTATION, FGD = 6, 7

_TIE = 1e-3


class Rule(NamedTuple):
    """One rule policy."""

    order: int
    """FIFO: as they came. SJF: shortest expected run time first. HRRN: highest response ratio."""
    cost: int
    """What makes a node dear; EFT is the earliest finish, neighbours' delay counted (dJCT);
    FRAGMENTATION is what typical pods can use less of than before, FGD the same as whole scores."""
    wait: bool
    """Whether a pod may wait for a better type than those with room (EFT only)."""
    patience: float
    """A node with a log slow-down above this is never taken; infinite for no limit."""
    aging: float
    """HRRN only: weight of log(response ratio) against log(expected run time)."""
    known: bool
    """Whether true run times are given (an oracle); the simulator fills ``View.size`` then."""
    price: float = 0.0
    """EFT only: what a second on GPUs better than the slowest type costs others, s; for one GPU
    that does all its work in no time against the slowest, while all of its like are given out."""
    busy: float = 1.0
    """Power to which the price falls with the share of such GPUs that is not idle."""
    gang: float = 1.0
    """Power to which it rises with the number of GPUs."""
    wait_bias: float = 0.0
    """Added to the cost of waiting, in log of expected time; below 0 pods wait sooner."""
    shape: float = 0.0
    """FRAGMENTATION only: what a GPU free without its CPU costs, or that CPU without it, in GPUs
    that typical pods cannot use."""
    untouched: float = 0.0
    """FRAGMENTATION only: what the first pod on a node's GPUs costs, in the same unit."""


_ANY = math.inf
PRICES = 0.96, 1.5, 0.6, -0.06
"""``price``, ``busy``, ``gang`` and ``wait_bias`` as learned by ``agent.benchmark.rule_search``."""
LEVEL = 0.6, 0.5
"""``shape`` and ``untouched``, held against what ``agent.benchmark.level_search`` finds. Where the
cost weighs more, large pods find no node before the cluster is full."""
RULES: dict[str, Rule] = {
    "least-allocated": Rule(FIFO, LEAST_ALLOCATED, False, _ANY, 0.0, False),
    "most-allocated": Rule(FIFO, MOST_ALLOCATED, False, _ANY, 0.0, False),
    "balanced-allocation": Rule(FIFO, BALANCED_ALLOCATION, False, _ANY, 0.0, False),
    "random": Rule(FIFO, RANDOM, False, _ANY, 0.0, False),
    "fastest": Rule(FIFO, FASTEST, False, _ANY, 0.0, False),
    "patient": Rule(FIFO, FASTEST, False, math.log(4.0), 0.0, False),
    "fifo-eft": Rule(FIFO, EFT, True, _ANY, 0.0, False),
    "djct": Rule(FIFO, EFT, False, _ANY, 0.0, False),
    "sjf": Rule(SJF, FASTEST, False, math.log(4.0), 0.0, False),
    "sjf-oracle": Rule(SJF, FASTEST, False, math.log(4.0), 0.0, True),
    "sjf-eft": Rule(SJF, EFT, True, _ANY, 0.0, False),
    "hrrn-eft": Rule(HRRN, EFT, True, math.log(6.0), 1.0, False),
    "priced-eft": Rule(HRRN, EFT, True, math.log(6.0), 1.0, False, *PRICES),
    "priced-djct": Rule(FIFO, EFT, False, _ANY, 0.0, False, *PRICES),
    "fgd": Rule(FIFO, FGD, False, _ANY, 0.0, False),
    "level": Rule(FIFO, FRAGMENTATION, False, _ANY, 0.0, False, shape=LEVEL[0], untouched=LEVEL[1]),
    "hrrn-eft-oracle": Rule(HRRN, EFT, True, math.log(6.0), 1.0, True),
}
"""Rules by name; ``RULE_HELP`` explains each."""

RULE_HELP: dict[str, str] = {
    "least-allocated": "kube-scheduler's default: the node with the largest share left",
    "most-allocated": "best fit: the node with the smallest share left",
    "balanced-allocation": "the node whose CPU, memory and GPU shares come out most alike",
    "random": "any node with room",
    "fastest": "the GPU type predicted fastest for this kind of work",
    "patient": "fastest, but rather wait than run more than four times slower",
    "fifo-eft": "in order of arrival, earliest finish: waits where that ends sooner",
    "djct": "least own run time plus delay caused to neighbours, never waits",
    "sjf": "shortest predicted job first, on the fastest type, patient",
    "sjf-oracle": "the same with known run times: a bound, not a policy",
    "sjf-eft": "shortest predicted job first, earliest finish",
    "hrrn-eft": "short and long-waiting jobs first, earliest finish",
    "priced-djct": "djct that leaves scarce fast GPUs to those that gain most",
    "priced-eft": "hrrn-eft that leaves scarce fast GPUs to those that gain most: the default",
    "fgd": "least growth of GPUs that the pods seen so far could not use (Fragmentation Gradient"
    " Descent)",
    "level": "the same, keeps CPU and GPUs in proportion, and idle nodes for last: for shared"
    " GPUs that must not go to waste",
    "hrrn-eft-oracle": "hrrn-eft with known run times: a bound, not a policy",
}


@inlined
def _share_left(view: View, pod: int, node: int, resource: int) -> float:
    """Share of a resource not asked for once the pod is there; 1 where the node has none."""
    capacity = view.capacity[node, resource]
    if capacity <= 0.0:
        return 1.0
    asked = view.request[pod, resource]
    if resource == GPUS:
        asked += view.request[pod, SHARE]
    return (capacity - view.requested[node, resource] - asked) / capacity


@inlined
def _fit(view: View, pod: int, node: int) -> float:
    """What tells nodes apart that are otherwise alike, lower is better.

    A pod with GPUs goes where the fewest are left. One without keeps off nodes with GPUs, above all
    those with many idle ones, whose CPU and memory the pods with GPUs will need; and it spreads.
    """
    gpus = _share_left(view, pod, node, GPUS)
    if view.request[pod, GPUS] + view.request[pod, SHARE] > 0.0:
        return gpus
    if view.capacity[node, GPUS] > 0.0:
        return 1.0 + gpus
    return 1.0 - _share_left(view, pod, node, CPU)


@lean
def _price(view: View, context: Context, rule: Rule, pod: int, gpu_type: int) -> float:
    """Seconds of others' time that each second of the pod on a GPU type costs.

    The scarcer good GPUs are, the more a pod should leave them to those that gain most by them:
    each pod's own earliest finish alone does not see that.
    """
    if gpu_type < 0:
        return 0.0
    scarce = context.busy[gpu_type] ** rule.busy
    gpus = view.request[pod, GPUS] + view.request[pod, SHARE]
    return rule.price * context.worth[gpu_type] * scarce * gpus**rule.gang


@inlined
def node_cost(
    view: View, context: Context, rule: Rule, pod: int, node: int, effects: Effects
) -> float:
    """The rule's cost of a node for the pod, lower is better; :data:`NEVER` where it cannot go.

    EFT costs are log seconds, FRAGMENTATION's GPUs; the others are shares or log slow-downs. Nodes
    that cost the same are told apart by :func:`_fit` (FASTEST, EFT), by their rows (FGD) or at
    random (the others).
    """
    if effects.mask[node] < 0 or effects.slowdown[node] > rule.patience:
        return NEVER
    if rule.cost == RANDOM:
        return float(np.random.random())
    if rule.cost == FASTEST:
        return effects.slowdown[node] + effects.on_pod[node] + _TIE * _fit(view, pod, node)
    if rule.cost == EFT:
        finish, others = effects.log_time[node], effects.delay[node]
        if rule.price > 0.0:
            others += math.exp(finish) * _price(view, context, rule, pod, view.gpu_type[node])
        if others > 0.0:
            finish = math.log(math.exp(finish) + others)
        return finish + _TIE * _fit(view, pod, node)
    if rule.cost == FRAGMENTATION or rule.cost == FGD:
        weights = rule.shape, rule.untouched
        cost = fragmentation_cost(view, weights, pod, node, effects.mask[node], effects.free)
        if rule.cost == FGD:  # whole scores from 0 to 100, and ties in a fixed order: nodes fill up
            return 1e-9 * node - 0.01 * math.floor(100.0 / (1.0 + math.exp(cost)))
        return cost + 1e-6 * float(np.random.random())
    gpus = _share_left(view, pod, node, GPUS)
    cpu, memory = _share_left(view, pod, node, CPU), _share_left(view, pod, node, MEMORY)
    parts = 3.0 if view.capacity[node, GPUS] > 0.0 else 2.0
    left = (cpu + memory + (gpus if parts > 2.0 else 0.0)) / parts
    tie = 1e-6 * float(np.random.random())
    if rule.cost == LEAST_ALLOCATED:
        return tie - left
    if rule.cost == MOST_ALLOCATED:
        return tie + left
    spread = (cpu - left) ** 2 + (memory - left) ** 2
    if parts > 2.0:
        spread += (gpus - left) ** 2
    return math.sqrt(spread / parts) + tie


@lean
def wait_cost(
    view: View, context: Context, rule: Rule, pod: int, ahead: float, has_room: Ints
) -> float:
    """Log seconds to finish on the best type that has no room now; NEVER where none would do.

    ``ahead`` is the work queued before the pod, in GPU-seconds on the fastest type; ``has_room``
    [T] counts the nodes with room by type.
    """
    best = NEVER
    kind = view.kind[pod]
    group, base = gpu_group(view.kind_gpus[kind]), pod_log_run_time(view, context, pod)
    for t in range(len(context.total)):
        if context.total[t] <= 0.0 or has_room[t] > 0 or (view.allowed[pod] >> t) & 1 == 0:
            continue
        slower = view.slowdown[kind, t]
        if slower > rule.patience or context.free_in[t, group] >= NEVER:
            continue
        until = context.free_in[t, group] + ahead / context.speed
        run = math.exp(base + slower)
        if rule.price > 0.0:
            run *= 1.0 + _price(view, context, rule, pod, t)
        best = min(best, rule.wait_bias + math.log(until + run))
    return best


@inlined
def order_key(view: View, context: Context, rule: Rule, pod: int) -> float:
    """Sort key of a pending pod under the rule's order: lowest goes first.

    HRRN here is log(expected run time) − aging · log(response ratio), where the response ratio is
    (waited + expected) / expected: short pods first, but every pod's turn comes.
    """
    if rule.order == FIFO:
        return view.arrival[pod]
    size = pod_log_run_time(view, context, pod)
    if rule.order == SJF:
        return size
    waited = view.clock[0] - view.arrival[pod]
    return size - rule.aging * math.log1p(max(waited, 0.0) / math.exp(size))
