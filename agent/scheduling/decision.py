"""The decision: which candidate a policy takes; called by extender, queue, simulator and gate.

A policy is a rule plus, if there is one, the network's bounded correction of the rule's scores. It
departs from the rule's choice only where the corrected score gains more than the guard margin.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from agent.arrays import Bools, Features, Floats, Ints, kernel
from agent.cluster.view import PENDING, View
from agent.scheduling.candidates import (
    LOWEST_SCORE,
    MAX_QUEUE_CANDIDATES,
    Candidates,
    new_candidates,
    survey_nodes,
    survey_queue,
)
from agent.scheduling.outlook import observe
from agent.scheduling.rules import RULES, Rule
from agent.scheduling.scorer import Scorer, corrections, scorer
from common.policy import initial_arrays
from common.weights import Arrays

HIGHEST = 10
"""Best extender score (kube-scheduler's MaxExtenderPriority)."""


class Policy(NamedTuple):
    """How to choose among candidates; plain values, so that kernels take it as it is."""

    rule: Rule
    net: Scorer
    learned: bool
    """Whether the network's correction counts; without it the policy is the rule."""
    margin: float
    """Guard: a corrected score must beat the rule's choice by more than this to be taken."""
    temperature: float
    """Softmax temperature of exploration; 0 takes the best candidate always."""


@dataclass(frozen=True)
class Choice:
    """One decision with all that its later reward is to be credited to; rows are candidates."""

    features: Features
    """[C, FEATURE_COUNT]"""
    pods: Ints
    """[C] pod slot, −1 for waiting."""
    nodes: Ints
    """[C] node row, −1 for waiting."""
    rule_scores: Floats
    """[C] 0 for the rule's choice, below 0 for the others."""
    scores: Floats
    """[C] rule score plus correction."""
    rule_row: int
    action: int
    """Row that was taken."""
    log_prob: float
    """Log probability of the action under the policy; 0 where it was greedy."""


def make_policy(
    rule: str | Rule, arrays: Arrays | None = None, *, margin: float = 0.3, temperature: float = 0.0
) -> Policy:
    """A policy from a rule (or its name in ``RULES``) and, if any, the network's arrays.

    Raises:
        KeyError: no rule has that name.
        ValueError: the arrays are not finite weights of this architecture.
    """
    net = scorer(initial_arrays() if arrays is None else arrays)
    chosen = RULES[rule] if isinstance(rule, str) else rule
    return Policy(chosen, net, arrays is not None, margin, temperature)


@kernel
def seed_kernels(seed: int) -> None:
    """Seed the random numbers that kernels draw (ties, exploration) in this process."""
    np.random.seed(seed)


@kernel
def take(out: Candidates, count: int, rule_row: int, policy: Policy) -> tuple[int, float]:
    """Choose among the first ``count`` candidates: the row and its log probability.

    With a temperature the softmax of the scores is sampled, the margin added to the rule's choice.
    Without one the best score is taken, where it beats the rule's choice by more than the margin;
    the log probability is then 0.
    """
    if policy.learned:
        corrections(policy.net, out.features, count, out.corrections)
    else:
        out.corrections[:count] = 0.0
    if policy.temperature > 0.0:
        logits = np.empty(count)
        for i in range(count):
            lead = policy.margin if i == rule_row else 0.0
            logits[i] = (out.rule_scores[i] + out.corrections[i] + lead) / policy.temperature
        logits -= logits.max()
        weights = np.exp(logits)
        total = weights.sum()
        draw = np.random.random() * total
        row = count - 1
        for i in range(count):
            draw -= weights[i]
            if draw <= 0.0:
                row = i
                break
        return row, float(logits[row] - math.log(total))
    best = rule_row
    for i in range(count):
        score = out.rule_scores[i] + out.corrections[i]
        if score > out.rule_scores[best] + out.corrections[best]:
            best = i
    gain = (out.rule_scores[best] + out.corrections[best]) - (
        out.rule_scores[rule_row] + out.corrections[rule_row]
    )
    return (best if gain > policy.margin else rule_row), 0.0


@kernel
def next_placement(
    view: View, policy: Policy, eligible: Bools, out: Candidates, describe: bool
) -> tuple[int, int, int, int, float]:
    """The next pod to place and its node, −1 and −1 for waiting.

    Also the number of candidates (0 where none were described), the row that was taken and its log
    probability. ``describe`` fills ``out`` even where the rule alone decides.
    """
    if view.counts[PENDING] == 0:
        return -1, -1, 0, -1, 0.0
    context = observe(view)
    wants_rows = describe or policy.learned or policy.temperature > 0.0
    pod, node, count, rule_row = survey_queue(view, context, policy.rule, eligible, out, wants_rows)
    if count == 0:
        return pod, node, 0, -1, 0.0
    row, log_prob = take(out, count, rule_row, policy)
    return out.pods[row], out.nodes[row], count, row, log_prob


@kernel
def _choose_node(
    view: View, policy: Policy, pod: int, nodes: Ints, out: Candidates
) -> tuple[int, int, float]:
    rule_row = survey_nodes(view, observe(view), policy.rule, pod, nodes, out)
    row, log_prob = take(out, len(nodes), rule_row, policy)
    return rule_row, row, log_prob


def _choice(out: Candidates, count: int, rule_row: int, row: int, log_prob: float) -> Choice:
    return Choice(
        features=out.features[:count].copy(),
        pods=out.pods[:count].copy(),
        nodes=out.nodes[:count].copy(),
        rule_scores=out.rule_scores[:count].copy(),
        scores=out.rule_scores[:count] + out.corrections[:count],
        rule_row=rule_row,
        action=row,
        log_prob=log_prob,
    )


def decide_queue(view: View, policy: Policy, eligible: Bools) -> Choice | None:
    """Which of the eligible pending pods ([P] flags) goes now and where, or wait.

    Returns None where there is nothing to choose from: no eligible pod, or none fits anywhere.
    """
    out = new_candidates(MAX_QUEUE_CANDIDATES)
    _, _, count, row, log_prob = next_placement(view, policy, eligible, out, True)
    if count == 0:
        return None
    rule_row = int(np.argmax(out.rule_scores[:count]))
    return _choice(out, count, rule_row, row, log_prob)


def decide_node(view: View, policy: Policy, pod: int, nodes: Ints) -> Choice:
    """Score one pod on each of ``nodes`` ([C] rows of the view), in that order.

    Raises:
        ValueError: no nodes.
    """
    if len(nodes) == 0:
        raise ValueError("no candidate nodes to score")
    out = new_candidates(len(nodes))
    rule_row, row, log_prob = _choose_node(view, policy, pod, nodes, out)
    scores = out.rule_scores + out.corrections
    return Choice(
        out.features, out.pods, out.nodes, out.rule_scores, scores, rule_row, row, log_prob
    )


def extender_scores(choice: Choice) -> Ints:
    """[C] integer scores 0 to 10: 10 for the action alone.

    The others follow their distance from the best, one unit of score (a factor e in expected time)
    costing five points; a node at the lowest rule score gets 0.
    """
    return _points(choice.scores, choice.rule_scores, choice.action)


@kernel
def _points(scores: Floats, rule_scores: Floats, action: int) -> Ints:
    best = scores.max()
    points = np.zeros(len(scores), np.int64)
    for i in range(len(scores)):
        if rule_scores[i] > LOWEST_SCORE:
            behind = math.floor(HIGHEST - 1 - 5.0 * (best - scores[i]))
            points[i] = HIGHEST if i == action else min(max(behind, 1), HIGHEST - 1)
    return points
