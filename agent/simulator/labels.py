"""What each candidate of a decision would have led to: labels for rollout distillation.

At sampled decisions of the rule the simulation is copied, each of a few candidates is tried, the
rule rolls the copy on, and the completion times add up to the candidate's cost. All copies of one
decision share jobs, speeds and random numbers, so their difference is the candidate's doing.
``agent.learning.distillation`` learns from the labels.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from agent.arrays import Bools, Floats, Ints, kernel
from agent.scheduling.candidates import MAX_QUEUE_CANDIDATES, Candidates, new_candidates
from agent.scheduling.decision import Policy, next_placement, seed_kernels
from agent.simulator.engine import advance, completion_times, place
from agent.simulator.simulation import Simulation, copy_simulation
from common.features import FEATURE_COUNT


class _Tape(NamedTuple):
    """Room for ``M`` tried candidates."""

    features: Floats
    rule_scores: Floats
    cost: Floats
    """[M] sum of completion times, s."""
    decision: Ints
    """[M] number of the decision; its first row is the rule's choice."""


@dataclass(frozen=True)
class Labels:
    """``M`` tried candidates of sampled decisions, those of one decision in a row."""

    features: npt.NDArray[np.float32]
    """[M, FEATURE_COUNT]"""
    rule_scores: npt.NDArray[np.float32]
    """[M] the rule's score; the rule's own choice, with 0, is the first of its decision."""
    gain: npt.NDArray[np.float32]
    """[M] seconds of completion time, over all jobs, that the candidate saves against the rule's
    choice; 0 for that itself."""
    decision: Ints
    """[M] ascending number of the decision."""


@kernel
def _settle_moment(sim: Simulation, rule: Policy, eligible: Bools, out: Candidates) -> None:
    """Let the rule place what it would place now."""
    while True:
        pod, node, _, _, _ = next_placement(sim.cluster, rule, eligible, out, False)
        if pod < 0:
            return
        place(sim, pod, node)


@kernel
def _cost(
    sim: Simulation,
    rule: Policy,
    eligible: Bools,
    out: Candidates,
    pod: int,
    node: int,
    horizon: float,
) -> float:
    """Sum of completion times if the pod (−1: nobody) goes to the node now and the rule goes on."""
    copy = copy_simulation(sim)
    if pod >= 0:
        place(copy, pod, node)
        _settle_moment(copy, rule, eligible, out)
    until = copy.cluster.clock[0] + horizon
    while advance(copy, until):
        _settle_moment(copy, rule, eligible, out)
    return float(completion_times(copy).sum())


@kernel
def _try_candidates(
    sim: Simulation,
    rule: Policy,
    eligible: Bools,
    out: Candidates,
    scratch: Candidates,
    share: float,
    others: int,
    explore: float,
    horizon: float,
    tape: _Tape,
) -> int:
    """Run the rule over the simulation, trying candidates at a ``share`` of its decisions."""
    m, decisions = 0, 0
    room = len(tape.cost) - others - 1
    while m <= room and advance(sim, math.inf):
        while m <= room:
            pod, node, count, rule_row, _ = next_placement(sim.cluster, rule, eligible, out, True)
            if count == 0:
                break
            if count > 1 and np.random.random() < share:
                order = np.random.permutation(count)
                tried = 0
                for i in range(-1, count):
                    row = rule_row if i < 0 else order[i]
                    if tried > others or (i >= 0 and row == rule_row):
                        continue
                    tape.features[m] = out.features[row]
                    tape.rule_scores[m] = out.rule_scores[row]
                    tape.cost[m] = _cost(
                        sim, rule, eligible, scratch, out.pods[row], out.nodes[row], horizon
                    )
                    tape.decision[m] = decisions
                    m += 1
                    tried += 1
                decisions += 1
            if np.random.random() < explore:  # states that the rule alone would not meet
                row = np.random.randint(count)
                pod, node = out.pods[row], out.nodes[row]
            if pod < 0:
                break
            place(sim, pod, node)
    return m


def label(
    sim: Simulation,
    rule: Policy,
    *,
    seed: int,
    rows: int,
    share: float = 0.25,
    others: int = 4,
    explore: float = 0.05,
    horizon: float = math.inf,
) -> Labels:
    """Try candidates at sampled decisions of a run of the rule; the simulation is used up.

    Args:
        rule: the greedy policy that runs and that rolls every copy on.
        rows: most candidates that are tried.
        share: chance that a decision is sampled.
        others: most candidates tried beside the rule's choice.
        explore: chance of a random step of the run, which visits further states.
        horizon: seconds that a copy is rolled on; what is unfinished then counts elapsed plus left.
    """
    seed_kernels(seed)
    tape = _Tape(
        np.zeros((rows, FEATURE_COUNT)), np.zeros(rows), np.zeros(rows), np.zeros(rows, np.int64)
    )
    m = _try_candidates(
        sim, rule, np.ones(len(sim.state), np.bool_), new_candidates(MAX_QUEUE_CANDIDATES),
        new_candidates(MAX_QUEUE_CANDIDATES), share, others, explore, horizon, tape,
    )  # fmt: skip
    decision = tape.decision[:m]
    first = np.searchsorted(decision, decision)  # the row of each decision's rule choice
    return Labels(
        features=tape.features[:m].astype(np.float32),
        rule_scores=tape.rule_scores[:m].astype(np.float32),
        gain=(tape.cost[first] - tape.cost[:m]).astype(np.float32),
        decision=decision,
    )
