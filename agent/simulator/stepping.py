"""The embedded cluster one decision at a time, for learners that choose by themselves.

``agent.learning.environment`` offers it to algorithms of other libraries, the benchmark trains its
baselines and ablations on it. Candidates are those of the live agent, from the same kernels.
"""

import math
from typing import NamedTuple

import numpy as np

from agent.arrays import Bools, Floats, Ints, kernel
from agent.cluster.view import PENDING, RUNNING, imbalance, placement
from agent.scheduling.candidates import NOT_CHOSEN, Candidates, survey_nodes, survey_queue
from agent.scheduling.description import (
    AGAINST_BEST,
    FRAGMENTS,
    SLOWDOWN,
    Queue,
    describe_node,
)
from agent.scheduling.outlook import new_effects, node_slowdown, observe, pod_run_time
from agent.scheduling.rules import Rule
from agent.simulator.engine import advance, place
from agent.simulator.runs import integrate
from agent.simulator.simulation import DONE, OOM_KILLS, SUCCEEDED, Simulation


class Semantics(NamedTuple):
    """What is decided; plain values, so that kernels take it as it is."""

    rule: Rule
    """Orders the pods and scores the candidates."""
    place_only: bool
    """The pod is the first in the rule's order that fits somewhere, and its candidates are the
    nodes with room. Otherwise candidates are pods on nodes, and waiting."""
    unmasked: bool
    """Also offer nodes without room. Choosing one is a bind that fails: it counts as a kill of the
    decision, and nothing more is decided until something happens."""


class Ledger(NamedTuple):
    """What has happened so far."""

    sums: Floats
    """[3] ∫ pending dt, ∫ jobs dt, ∫ Σ (U_i − Ū)² dt."""
    rates: Floats
    """[3] what is integrated, since the last event."""
    moment: Ints
    """[1] 1 while more may be decided at the present time."""
    killed: Ints
    """[1] OOM kills that were told."""
    placed_by: Ints
    """[P] the decision that placed each pod last; −1 for none, and once its kill was charged."""
    failures: Floats
    """[M] kills of the pod that each decision placed, and binds that failed."""


def new_ledger(pods: int, decisions: int) -> Ledger:
    """A ledger for a fresh simulation of ``pods`` jobs and at most ``decisions`` decisions."""
    return Ledger(
        sums=np.zeros(3),
        rates=np.zeros(3),
        moment=np.zeros(1, np.int64),
        killed=np.zeros(1, np.int64),
        placed_by=np.full(pods, -1, np.int64),
        failures=np.zeros(decisions),
    )


def semantics(rule: Rule, *, place_only: bool = False, unmasked: bool = False) -> Semantics:
    """Raises ValueError for a rule that waits where only places are chosen."""
    if place_only and rule.wait:
        raise ValueError(
            "a policy that only places cannot wait; take a rule that never waits, such as djct"
        )
    return Semantics(rule, place_only, unmasked)


@kernel
def _charge_kills(sim: Simulation, ledger: Ledger) -> None:
    """Charge new OOM kills to the decisions that placed the pods."""
    if sim.counters[OOM_KILLS] == ledger.killed[0]:
        return
    ledger.killed[0] = sim.counters[OOM_KILLS]
    for pod in range(len(ledger.placed_by)):  # not running though once placed: it was killed
        by = ledger.placed_by[pod]
        if by >= 0 and sim.cluster.node[pod] < 0:
            if sim.state[pod] != SUCCEEDED:
                ledger.failures[by] += 1.0
            ledger.placed_by[pod] = -1


@kernel
def _add_infeasible(sim: Simulation, what: Semantics, out: Candidates, count: int) -> int:
    """Append nodes without room for the pods on offer; returns the new count.

    Where only places are chosen they are all such nodes, else one of each GPU type that has none
    with room. The score is what the rule would give if there were room. None is offered while no
    pod runs, for then nothing would end the waiting that choosing it is.
    """
    view, rows = sim.cluster, count
    if view.counts[RUNNING] == 0:
        return count
    context = observe(view)
    nodes, types = len(view.gpu_type), len(context.total)
    effects = new_effects(nodes)
    effects.mask[:] = -1
    effects.on_pod[:] = effects.delay[:] = 0.0
    nobody = Queue(0.0, 0.0, np.zeros(len(view.kind_gpus), np.int64), np.zeros(4, np.int64))
    for row in range(count):
        pod = out.pods[row]
        if pod < 0 or (row > 0 and out.pods[row - 1] == pod):
            continue  # waiting, or a pod that was seen: its rows follow each other
        fastest = 1e9
        for n in range(nodes):
            effects.slowdown[n] = node_slowdown(view, pod, n)
            if view.gpu_type[n] >= 0:
                fastest = min(fastest, effects.slowdown[n])
        has_room, offered = np.zeros(types, np.bool_), np.zeros(types, np.bool_)
        for n in range(nodes):
            if view.gpu_type[n] >= 0 and placement(view, pod, n) >= 0:
                has_room[view.gpu_type[n]] = True
        for n in range(nodes):
            t = view.gpu_type[n]
            if t < 0 or rows == len(out.pods) or placement(view, pod, n) >= 0:
                continue
            if not what.place_only and (has_room[t] or offered[t]):
                continue
            offered[t] = True
            out.features[rows] = out.features[row]
            describe_node(
                view, context, nobody, pod, pod_run_time(view, context, pod), n, effects,
                out.features, rows,
            )  # fmt: skip
            behind = effects.slowdown[n] - fastest
            out.features[rows, FRAGMENTS] = 0.0
            out.features[rows, SLOWDOWN] = min(effects.slowdown[n], 3.5)
            out.features[rows, AGAINST_BEST] = min(behind, 3.0)
            out.pods[rows], out.nodes[rows] = pod, n
            out.rule_scores[rows] = max(-behind, -3.0) + NOT_CHOSEN
            rows += 1
    return rows


@kernel
def _candidates(
    sim: Simulation, what: Semantics, eligible: Bools, out: Candidates
) -> tuple[int, int]:
    """Fill ``out`` with what may be chosen now: the count and the row of the rule's choice."""
    view = sim.cluster
    if view.counts[PENDING] == 0:
        return 0, -1
    context = observe(view)
    if what.place_only:
        pod, _, _, _ = survey_queue(view, context, what.rule, eligible, out, False)
        if pod < 0:
            return 0, -1
        nodes, count = np.empty(len(view.gpu_type), np.int64), 0
        for n in range(len(nodes)):
            if placement(view, pod, n) >= 0:
                nodes[count] = n
                count += 1
        row = survey_nodes(view, context, what.rule, pod, nodes[:count], out)
    else:
        _, _, count, row = survey_queue(view, context, what.rule, eligible, out, True)
    if what.unmasked and count > 0:
        count = _add_infeasible(sim, what, out, count)
    return count, row


@kernel
def take_row(sim: Simulation, out: Candidates, row: int, ledger: Ledger, decision: int) -> None:
    """Do what a candidate says; ``decision`` is its number, −1 for one that nobody made."""
    pod, node = out.pods[row], out.nodes[row]
    if pod < 0 or placement(sim.cluster, pod, node) < 0:
        ledger.moment[0] = 0
        if pod >= 0 and decision >= 0:
            ledger.failures[decision] += 1.0
        return
    place(sim, pod, node)
    ledger.placed_by[pod] = decision
    ledger.rates[0] = sim.cluster.counts[PENDING]
    ledger.rates[2] = imbalance(sim.cluster)


@kernel
def next_choice(
    sim: Simulation, what: Semantics, eligible: Bools, out: Candidates, ledger: Ledger
) -> tuple[int, int]:
    """Go on to the next moment at which there is something to choose.

    Decisions with a single candidate are taken on the way. Returns the number of candidates in
    ``out`` (0: every job is done, or nothing will happen any more) and the row that the rule would
    take.
    """
    while True:
        if ledger.moment[0] == 0:
            before = sim.cluster.clock[0]
            if sim.counters[DONE] >= len(sim.state) or not advance(sim, math.inf):
                return 0, -1
            integrate(sim, ledger.sums, before, ledger.rates)
            _charge_kills(sim, ledger)
            ledger.moment[0] = 1
        count, rule_row = _candidates(sim, what, eligible, out)
        if count > 1:
            return count, rule_row
        if count == 1:
            take_row(sim, out, 0, ledger, -1)
        else:
            ledger.moment[0] = 0
