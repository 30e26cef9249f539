"""Candidates of one decision: what may be chosen, what the rule says of it, what a policy sees.

``agent.scheduling.decision`` calls :func:`survey_queue` (which pod goes now, or wait) and
:func:`survey_nodes` (which node for one pod); both describe candidates by the same columns.
"""

import math
from typing import NamedTuple

import numpy as np

from agent.arrays import Bools, Features, Floats, Ints, inlined, kernel, lean
from agent.cluster.view import (
    GPU_GROUPS,
    GPUS,
    PENDING,
    RUNNING,
    SHARE,
    View,
    gpu_group,
)
from agent.scheduling.description import (
    AGAINST_BEST,
    WAIT,
    Queue,
    clip,
    describe_cluster,
    describe_node,
    describe_pod,
    gpus_asked,
)
from agent.scheduling.outlook import (
    NEVER,
    Context,
    Effects,
    new_effects,
    pod_run_time,
    predict_effects,
)
from agent.scheduling.rules import Rule, node_cost, order_key, wait_cost
from common.features import FEATURE_COUNT

MAX_QUEUE_CANDIDATES = 64
NOT_CHOSEN = -0.01
"""Best score of a candidate that the rule did not choose; its own choice has 0."""
WAIT_SCORE = -0.5
"""Score of waiting where the rule would place."""
ORDER_SCORE = 0.25
"""What a unit of distance in the rule's order costs a candidate."""
LOWEST_SCORE = -3.0


class Candidates(NamedTuple):
    """Room for the candidates of one decision; ``M`` rows."""

    features: Features
    """[M, FEATURE_COUNT]"""
    pods: Ints
    """[M] pod slot; −1 for waiting."""
    nodes: Ints
    """[M] node row; −1 for waiting."""
    rule_scores: Floats
    """[M] 0 for the rule's choice, ≤ NOT_CHOSEN for the others."""
    corrections: Floats
    """[M] the network's; filled by the decision."""


def new_candidates(rows: int) -> Candidates:
    """Room for ``rows`` candidates."""
    return Candidates(
        np.zeros((rows, FEATURE_COUNT), np.float32),
        np.zeros(rows, np.int64),
        np.zeros(rows, np.int64),
        np.zeros(rows),
        np.zeros(rows),
    )


@kernel
def _sum_up(view: View, context: Context) -> Queue:
    """What the pending pods ask for together."""
    same_kind, gangs = np.zeros(len(view.kind_gpus), np.int64), np.zeros(GPU_GROUPS, np.int64)
    gpus, work = _add_up(view, context, same_kind, gangs)
    return Queue(gpus, work, same_kind, gangs)


@lean
def _add_up(view: View, context: Context, same_kind: Ints, gangs: Ints) -> tuple[float, float]:
    gpus = work = 0.0
    for i in range(view.counts[PENDING]):
        pod = view.queue[PENDING, i]
        asked = gpus_asked(view, pod)
        gpus += asked
        work += pod_run_time(view, context, pod) * asked
        same_kind[view.kind[pod]] += 1
        if view.request[pod, GPUS] > 0.0:
            gangs[gpu_group(int(view.request[pod, GPUS]))] += 1
    return gpus, work


@kernel
def _in_order(view: View, context: Context, rule: Rule, eligible: Bools) -> tuple[Ints, Floats]:
    """The eligible pending pods ([P] flags) in the rule's order, and their order keys."""
    pods, keys = np.empty(view.counts[PENDING], np.int64), np.empty(view.counts[PENDING])
    n = _order_keys(view, context, rule, eligible, pods, keys)
    rank = np.argsort(keys[:n], kind="mergesort")
    return pods[:n][rank], keys[:n][rank]


@lean
def _order_keys(
    view: View, context: Context, rule: Rule, eligible: Bools, pods: Ints, keys: Floats
) -> int:
    n = 0
    for i in range(view.counts[PENDING]):
        pod = view.queue[PENDING, i]
        if eligible[pod]:
            pods[n], keys[n] = pod, order_key(view, context, rule, pod)
            n += 1
    return n


@lean
def _against(cost: float, other: float) -> float:
    """Difference of two costs in the unit of the rule's score, −3 to 3; NEVER counts as 3."""
    if other >= NEVER:
        return -3.0
    return clip(cost - other, -3.0, 3.0)


@inlined
def _best_of_type(view: View, costs: Floats, gpu_type: int, skip_type: bool) -> int:
    """Row of the cheapest node of a type (or, with ``skip_type``, of any other), −1 for none."""
    best = -1
    for n in range(len(costs)):
        if (
            (view.gpu_type[n] == gpu_type) != skip_type
            and costs[n] < NEVER
            and (best < 0 or costs[n] < costs[best])
        ):
            best = n
    return best


@lean
def _same_request(view: View, a: int, b: int) -> bool:
    """Whether two pods are interchangeable to a rule but for their waiting time."""
    if view.kind[a] != view.kind[b] or view.allowed[a] != view.allowed[b]:
        return False
    if view.scope[a] != view.scope[b]:
        return False
    sizes_differ = view.size[a] != view.size[b] or view.trust[a] != view.trust[b]
    if sizes_differ and not (math.isnan(view.size[a]) and math.isnan(view.size[b])):
        return False
    for asked in range(view.request.shape[1]):
        if view.request[a, asked] != view.request[b, asked]:
            return False
    return True


@kernel
def survey_queue(
    view: View, context: Context, rule: Rule, eligible: Bools, out: Candidates, describe: bool
) -> tuple[int, int, int, int]:
    """Which pending pod goes now, and where: the rule's choice and its alternatives.

    Candidates are, of each kind of pod, the one that the rule would take first, on the cheapest
    node of each GPU type with room; and waiting, the last row, unless no pod runs: only the end
    of a running pod could make the waiting worth while.

    Args:
        eligible: [P] which pending pods may be started by this decision.
        describe: fill ``out``; without it only the rule's choice is found.

    Returns:
        (pod, node) of the rule's choice, −1 and −1 to wait; the number of candidates and the row of
        the rule's choice, 0 and −1 without ``describe``.
    """
    order, keys = _in_order(view, context, rule, eligible)
    queue = _sum_up(view, context)
    nodes, types = len(view.gpu_type), len(context.total)
    pod_choice = node_choice = rule_row = -1
    if len(order) == 0:
        return pod_choice, node_choice, 0, rule_row
    limit = len(out.pods) - 1
    seen = np.full(2 * len(view.kind_gpus), -1, np.int64)
    firsts = np.empty(len(seen), np.int64)  # the candidate pod of each group, in order
    seen_best, seen_node = np.empty(len(seen)), np.empty(len(seen), np.int64)
    room = np.zeros((len(seen), types), np.int64)
    effects, costs = new_effects(nodes), np.empty(nodes)
    cluster = np.zeros(FEATURE_COUNT, np.float32)
    if describe:
        describe_cluster(view, context, queue, cluster)
    rows, groups, ahead = 0, 0, 0.0
    has_room = np.zeros(types, np.int64)
    for i in range(len(order)):
        if pod_choice >= 0 and rows + 2 * (types + 1) > limit:
            break  # chosen, and no further row has room
        pod = order[i]
        key = 2 * view.kind[pod] + (1 if view.request[pod, SHARE] > 0.0 else 0)
        group = seen[key]
        known = group >= 0 and _same_request(view, firsts[group], pod)
        if known:
            best, best_node = seen_best[group], seen_node[group]
        else:
            predict_effects(view, context, pod, effects)
            best, best_node = _cost_nodes(view, context, rule, pod, effects, costs, has_room)
            if group < 0:
                group = groups
                groups += 1
                seen[key], firsts[group] = group, pod
                seen_best[group], seen_node[group] = best, best_node
                room[group] = has_room
        waiting = NEVER
        if rule.wait:
            waiting = wait_cost(view, context, rule, pod, ahead, room[group] if known else has_room)
        starts = pod_choice < 0 and best_node >= 0 and best <= waiting
        if starts:
            pod_choice, node_choice = pod, best_node
            if not describe:
                return pod_choice, node_choice, 0, -1
        spare = 0 if starts else types + 1  # keeps room for the rule's own choice
        if describe and not known and rows + types + 1 + spare <= limit:
            behind = keys[i] - keys[0]
            rows = _add_rows(
                view, context, queue, rule, pod, behind, ahead, waiting, effects, costs,
                cluster, out, rows,
            )  # fmt: skip
        if describe and starts:
            if known:  # a later pod of a kind takes its kind's rows over
                for c in range(rows):
                    if out.pods[c] == firsts[group]:
                        out.pods[c] = pod
            for c in range(rows):
                if out.pods[c] == pod and out.nodes[c] == node_choice:
                    rule_row = c
        if best_node >= 0 or waiting < NEVER or not rule.wait:  # else nothing will ever take it
            ahead += pod_run_time(view, context, pod) * gpus_asked(view, pod)
    if not describe:
        return -1, -1, 0, -1
    if rows == 0:
        return pod_choice, node_choice, 0, -1
    if rule_row >= 0:
        out.rule_scores[rule_row] = 0.0
        if view.counts[RUNNING] == 0:  # nothing would end the waiting
            return pod_choice, node_choice, rows, rule_row
    first = order[0]
    out.features[rows] = cluster
    describe_pod(view, context, queue, first, 0.0, 0.0, out.features[rows])
    out.features[rows, WAIT] = 1.0
    out.pods[rows] = out.nodes[rows] = -1
    out.rule_scores[rows] = 0.0 if pod_choice < 0 else WAIT_SCORE
    if pod_choice < 0:
        rule_row = rows
    return pod_choice, node_choice, rows + 1, rule_row


@lean
def _cost_nodes(
    view: View,
    context: Context,
    rule: Rule,
    pod: int,
    effects: Effects,
    costs: Floats,
    has_room: Ints,
) -> tuple[float, int]:
    """Fill ``costs`` of all nodes and count those with room by type; the lowest cost and its node,
    NEVER and −1 where there is none."""
    best, best_node = NEVER, -1
    has_room[:] = 0
    for n in range(len(costs)):
        costs[n] = node_cost(view, context, rule, pod, n, effects)
        if costs[n] < NEVER:
            if view.gpu_type[n] >= 0:
                has_room[view.gpu_type[n]] += 1
            if costs[n] < best:
                best, best_node = costs[n], n
    return best, best_node


@lean
def _add_rows(
    view: View,
    context: Context,
    queue: Queue,
    rule: Rule,
    pod: int,
    behind: float,
    ahead: float,
    waiting: float,
    effects: Effects,
    costs: Floats,
    cluster: Features,
    out: Candidates,
    rows: int,
) -> int:
    """Append the pod's candidates, the cheapest node of each type; returns the new row count."""
    distance = behind if rule.order != 0 else min(behind / 3600.0, 3.0)
    time = pod_run_time(view, context, pod)
    for t in range(-1, len(context.total)):
        node = _best_of_type(view, costs, t, False)
        if node < 0:
            continue
        alternative = min(waiting, _alternative(view, costs, t))
        best = min(costs[node], alternative)
        for column in range(FEATURE_COUNT):  # a slice would need a copy, which is an array
            out.features[rows, column] = cluster[column]
        describe_pod(view, context, queue, pod, distance, ahead, out.features[rows])
        describe_node(view, context, queue, pod, time, node, effects, out.features, rows)
        out.features[rows, AGAINST_BEST] = _against(costs[node], alternative)
        out.pods[rows], out.nodes[rows] = pod, node
        score = best - costs[node]
        score -= ORDER_SCORE * min(max(distance, 0.0), 3.0)
        out.rule_scores[rows] = clip(score, LOWEST_SCORE, NOT_CHOSEN)
        rows += 1
    return rows


@lean
def _alternative(view: View, costs: Floats, gpu_type: int) -> float:
    """Cost of the best node of any other type."""
    other = _best_of_type(view, costs, gpu_type, True)
    return NEVER if other < 0 else costs[other]


@kernel
def survey_nodes(
    view: View, context: Context, rule: Rule, pod: int, nodes: Ints, out: Candidates
) -> int:
    """Describe one pod on each of ``nodes`` (rows of the view), in that order.

    kube-scheduler has filtered the nodes already; one that our own figures call full is still
    described, at the lowest score. Returns the row of the rule's choice.
    """
    queue = _sum_up(view, context)
    effects, costs = new_effects(len(view.gpu_type)), np.empty(len(nodes))
    predict_effects(view, context, pod, effects)
    cluster = np.zeros(FEATURE_COUNT, np.float32)
    describe_cluster(view, context, queue, cluster)
    describe_pod(view, context, queue, pod, 0.0, 0.0, cluster)
    return _survey(view, context, queue, rule, pod, nodes, effects, costs, cluster, out)


@lean
def _survey(
    view: View,
    context: Context,
    queue: Queue,
    rule: Rule,
    pod: int,
    nodes: Ints,
    effects: Effects,
    costs: Floats,
    cluster: Features,
    out: Candidates,
) -> int:
    best = -1
    for i in range(len(nodes)):
        costs[i] = node_cost(view, context, rule, pod, nodes[i], effects)
        if best < 0 or costs[i] < costs[best]:
            best = i
    # The best and the second best of another type, so that each node has an alternative.
    second = NEVER
    for i in range(len(nodes)):
        if view.gpu_type[nodes[i]] != view.gpu_type[nodes[best]]:
            second = min(second, costs[i])
    time = pod_run_time(view, context, pod)
    for i in range(len(nodes)):
        for column in range(FEATURE_COUNT):
            out.features[i, column] = cluster[column]
        out.pods[i], out.nodes[i] = pod, nodes[i]
        if costs[i] >= NEVER:
            out.rule_scores[i] = LOWEST_SCORE
            continue
        describe_node(view, context, queue, pod, time, nodes[i], effects, out.features, i)
        same = view.gpu_type[nodes[i]] == view.gpu_type[nodes[best]]
        out.features[i, AGAINST_BEST] = _against(costs[i], second if same else costs[best])
        out.rule_scores[i] = clip(costs[best] - costs[i], LOWEST_SCORE, NOT_CHOSEN)
    out.rule_scores[best] = 0.0
    return best
