"""Runs of policies that lack a part of ours, to compare or to learn from; for the benchmark.

Everything else is the live agent's: the same candidates, features, rule and network.
"""

from typing import NamedTuple

import numpy as np

from agent.arrays import Bools, Features, kernel
from agent.learning.batch import Batch
from agent.learning.reward import Interval, RewardWeights, rewards
from agent.scheduling.candidates import MAX_QUEUE_CANDIDATES, Candidates, new_candidates
from agent.scheduling.decision import Policy, seed_kernels, take
from agent.simulator.runs import Result, Tape, new_tape, result, write
from agent.simulator.simulation import Simulation
from agent.simulator.stepping import (
    Ledger,
    Semantics,
    new_ledger,
    next_choice,
    take_row,
)


class Ablated(NamedTuple):
    """A policy and what it decides, sees and starts from."""

    policy: Policy
    what: Semantics
    keep: Features
    """[FEATURE_COUNT] 1 for the columns that it sees, 0 for the others."""
    residual: bool
    """Whether the rule's scores count; without them it knows nothing before it has learned."""


@kernel
def _choose(ablated: Ablated, out: Candidates, count: int, rule_row: int) -> tuple[int, float]:
    for i in range(count):
        for column in range(len(ablated.keep)):
            out.features[i, column] *= ablated.keep[column]
    if not ablated.residual:
        out.rule_scores[:count] = 0.0
        rule_row = 0
    return take(out, count, rule_row, ablated.policy)


@kernel
def _run(
    sim: Simulation, ablated: Ablated, eligible: Bools, out: Candidates, ledger: Ledger
) -> int:
    decisions = 0
    while True:
        count, rule_row = next_choice(sim, ablated.what, eligible, out, ledger)
        if count == 0:
            return decisions
        row, _ = _choose(ablated, out, count, rule_row)
        take_row(sim, out, row, ledger, -1)
        decisions += 1


@kernel
def _record(
    sim: Simulation, ablated: Ablated, eligible: Bools, out: Candidates, ledger: Ledger, tape: Tape
) -> int:
    m = 0
    while True:
        count, rule_row = next_choice(sim, ablated.what, eligible, out, ledger)
        tape.time[m], tape.integrals[m] = sim.cluster.clock[0], ledger.sums
        if count == 0 or m == len(tape.counts):
            return m
        row, log_prob = _choose(ablated, out, count, rule_row)
        write(tape, m, out, count, row, log_prob)
        take_row(sim, out, row, ledger, m)
        m += 1


def simulate_ablated(sim: Simulation, ablated: Ablated, *, seed: int) -> Result:
    """Run the policy on a fresh simulation until every job is done; ``seed`` draws ties."""
    seed_kernels(seed)
    pods = len(sim.state)
    out = new_candidates(MAX_QUEUE_CANDIDATES)
    decisions = _run(sim, ablated, np.ones(pods, np.bool_), out, new_ledger(pods, 1))
    return result(sim, decisions)


def record_ablated(
    sim: Simulation,
    ablated: Ablated,
    *,
    seed: int,
    decisions: int,
    mean_run_seconds: float,
    weights: RewardWeights,
    delayed: bool,
) -> Batch | None:
    """Up to ``decisions`` decisions of a fresh simulation with their rewards; None if none arose.

    Args:
        delayed: a decision is credited with all that follows, discounted, and with kills whenever
            they come. Otherwise it is credited with what happens until the next decision, and no
            more: each is an episode of its own.
    """
    seed_kernels(seed)
    pods, tape = len(sim.state), new_tape(decisions)
    ledger, out = new_ledger(pods, decisions), new_candidates(MAX_QUEUE_CANDIDATES)
    m = _record(sim, ablated, np.ones(pods, np.bool_), out, ledger, tape)
    if m == 0:
        return None
    columns = int(tape.counts[:m].max())
    pending, jobs, imbalance = np.diff(tape.integrals[: m + 1], axis=0).T
    interval = Interval(pending, jobs, imbalance, ledger.failures[:m])
    elapsed = np.diff(tape.time[: m + 1]) / mean_run_seconds
    ends = np.arange(m) == m - 1
    return Batch(
        features=tape.features[:m, :columns],
        mask=np.arange(columns)[None, :] < tape.counts[:m, None],
        rule_scores=tape.rule_scores[:m, :columns].astype(np.float32),
        action=tape.action[:m],
        log_prob=tape.log_prob[:m].astype(np.float32),
        reward=rewards(interval, mean_run_seconds, weights).total,
        elapsed=(elapsed if delayed else np.full(m, np.inf)).astype(np.float32),
        ends=ends if delayed else np.ones(m, np.bool_),
    )
