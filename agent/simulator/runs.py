"""Whole runs of a policy on the embedded cluster: results to compare, decisions to learn from.

The benchmark and the gate call :func:`simulate`, the learner's rollouts call :func:`record`. Both
drive the same decision as the live agent, in process.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from agent.arrays import Bools, Features, Floats, Ints, kernel
from agent.cluster.view import PENDING, RUNNING, imbalance
from agent.scheduling.candidates import MAX_QUEUE_CANDIDATES, Candidates, new_candidates
from agent.scheduling.decision import Policy, next_placement, seed_kernels
from agent.simulator.engine import advance, completion_times, place
from agent.simulator.simulation import DONE, FAILED, OOM_KILLS, SUCCEEDED, Simulation
from common.features import FEATURE_COUNT

_FOREVER = math.inf


@dataclass(frozen=True)
class Result:
    """What became of a workload under one policy."""

    completion: Floats
    """[P] completion times in seconds; an unfinished or failed job counts elapsed plus what is
    left of it."""
    makespan: float
    """Seconds from the first arrival to the end of the last job (or of the run)."""
    unfinished: int
    """Jobs that did not succeed."""
    oom_kills: int
    decisions: int

    @property
    def mean(self) -> float:
        """Mean completion time, s."""
        return float(self.completion.mean())

    @property
    def p99(self) -> float:
        """99th percentile of completion times, s."""
        return float(np.quantile(self.completion, 0.99))


class Tape(NamedTuple):
    """Room for the record of at most ``M`` decisions of a run with ``C`` candidates each."""

    features: Features
    """[M, C, FEATURE_COUNT]"""
    rule_scores: Floats
    """[M, C]"""
    counts: Ints
    """[M] candidates."""
    action: Ints
    """[M]"""
    log_prob: Floats
    """[M]"""
    time: Floats
    """[M + 1] when it was decided; the last one is the end of the run."""
    integrals: Floats
    """[M + 1, 3] ∫ pending dt, ∫ jobs dt, ∫ Σ (U_i − Ū)² dt up to then."""


def new_tape(decisions: int) -> Tape:
    """Room for so many decisions, with as many candidates as the queue can have."""
    width = MAX_QUEUE_CANDIDATES
    return Tape(
        features=np.zeros((decisions, width, FEATURE_COUNT), np.float32),
        rule_scores=np.zeros((decisions, width)),
        counts=np.zeros(decisions, np.int64),
        action=np.zeros(decisions, np.int64),
        log_prob=np.zeros(decisions),
        time=np.zeros(decisions + 1),
        integrals=np.zeros((decisions + 1, 3)),
    )


@kernel
def write(tape: Tape, m: int, out: Candidates, count: int, row: int, log_prob: float) -> None:
    """Decision ``m`` was for ``row`` of the first ``count`` of ``out``."""
    tape.features[m, :count] = out.features[:count]
    tape.rule_scores[m, :count] = out.rule_scores[:count]
    tape.counts[m], tape.action[m], tape.log_prob[m] = count, row, log_prob


@kernel
def integrate(sim: Simulation, sums: Floats, before: float, rates: Floats) -> None:
    """Add the time since ``before`` at ``rates``, then take the present rates."""
    elapsed = sim.cluster.clock[0] - before
    sums += rates * elapsed
    pending, running = sim.cluster.counts[PENDING], sim.cluster.counts[RUNNING]
    rates[0], rates[1], rates[2] = pending, pending + running, imbalance(sim.cluster)


@kernel
def _run(
    sim: Simulation, policy: Policy, eligible: Bools, out: Candidates, until: float, done: int
) -> int:
    """Run to ``until`` or until ``done`` jobs are done; returns the number of decisions."""
    decisions = 0
    while sim.counters[DONE] < done and advance(sim, until):
        while True:
            pod, node, _, _, _ = next_placement(sim.cluster, policy, eligible, out, False)
            if pod >= 0 or sim.cluster.counts[PENDING] > 0:
                decisions += 1
            if pod < 0:
                break
            place(sim, pod, node)
    return decisions


@kernel
def _record(
    sim: Simulation,
    policy: Policy,
    eligible: Bools,
    out: Candidates,
    until: float,
    tape: Tape,
    oom_kills: Floats,
) -> int:
    """Run like :func:`_run` while the tape has room, writing every decision to it.

    oom_kills: [M] is counted up by kills of the pod that each decision placed.
    """
    m, room = 0, len(tape.counts)
    sums, rates, before = np.zeros(3), np.zeros(3), sim.cluster.clock[0]
    killed = sim.counters[OOM_KILLS]
    attempts = sim.attempts.copy()
    placed_by = np.full(len(attempts), -1, np.int64)  # the decision that placed each pod last
    while m < room and sim.counters[DONE] < len(sim.state) and advance(sim, until):
        integrate(sim, sums, before, rates)
        before = sim.cluster.clock[0]
        if sim.counters[OOM_KILLS] > killed:
            killed = sim.counters[OOM_KILLS]
            for pod in range(len(attempts)):  # not running though once started: it was killed
                if (
                    attempts[pod] > 0
                    and sim.cluster.node[pod] < 0
                    and sim.state[pod] != SUCCEEDED
                    and placed_by[pod] >= 0
                ):
                    oom_kills[placed_by[pod]] += 1.0
                    placed_by[pod] = -1
        while m < room:
            pod, node, count, row, log_prob = next_placement(
                sim.cluster, policy, eligible, out, True
            )
            if count == 0:
                break
            write(tape, m, out, count, row, log_prob)
            tape.time[m], tape.integrals[m] = sim.cluster.clock[0], sums
            if pod >= 0:
                place(sim, pod, node)
                attempts[pod] = sim.attempts[pod]
                placed_by[pod] = m
            rates[2] = imbalance(sim.cluster)
            rates[0], rates[1] = (
                sim.cluster.counts[PENDING],
                sim.cluster.counts[PENDING] + sim.cluster.counts[RUNNING],
            )
            m += 1
            if pod < 0:
                break
    integrate(sim, sums, before, rates)
    tape.time[m], tape.integrals[m] = sim.cluster.clock[0], sums
    return m


def simulate(
    sim: Simulation, policy: Policy, *, seed: int = 0, until: float = _FOREVER, jobs: int = 0
) -> Result:
    """Run a policy on a fresh simulation until every job (or ``jobs`` of them) is done.

    ``seed`` draws ties and exploration; the workload's and hardware's seeds are the simulation's.
    ``until`` bounds the clock: jobs unfinished by then are counted as such.
    """
    seed_kernels(seed)
    pods = len(sim.state)
    eligible, out = np.ones(pods, np.bool_), new_candidates(MAX_QUEUE_CANDIDATES)
    decisions = _run(sim, policy, eligible, out, until, jobs or pods)
    return result(sim, decisions)


def result(sim: Simulation, decisions: int = 0) -> Result:
    """What became of the jobs so far."""
    succeeded = sim.state == SUCCEEDED
    ended = succeeded | (sim.state == FAILED)
    last = float(np.max(sim.finished[ended], initial=0.0))
    if not ended.all():
        last = max(last, float(sim.cluster.clock[0]))
    first = float(sim.cluster.arrival.min()) if len(succeeded) else 0.0
    return Result(
        completion=completion_times(sim),
        makespan=last - first,
        unfinished=int((~succeeded).sum()),
        oom_kills=int(sim.counters[OOM_KILLS]),
        decisions=decisions,
    )


@dataclass(frozen=True)
class Trajectory:
    """Consecutive decisions of one run, ``B`` of them with at most ``C`` candidates each."""

    features: npt.NDArray[np.float32]
    """[B, C, FEATURE_COUNT]"""
    mask: Bools
    """[B, C] true for candidates."""
    rule_scores: npt.NDArray[np.float32]
    """[B, C]"""
    action: Ints
    """[B]"""
    log_prob: npt.NDArray[np.float32]
    """[B]"""
    elapsed: Floats
    """[B] seconds to the next decision, or to the end of the run."""
    integrals: Floats
    """[B, 3] ∫ pending dt, ∫ jobs dt and ∫ Σ (U_i − Ū)² dt from each decision to the next."""
    oom_kills: Floats
    """[B] kills of the pod that the decision placed."""


def record(
    sim: Simulation, policy: Policy, *, seed: int, decisions: int, until: float = _FOREVER
) -> Trajectory | None:
    """Run a fresh simulation for up to ``decisions`` decisions and keep each; None if none arose.

    The simulation is used up.
    """
    seed_kernels(seed)
    eligible, out = np.ones(len(sim.state), np.bool_), new_candidates(MAX_QUEUE_CANDIDATES)
    tape, oom_kills = new_tape(decisions), np.zeros(decisions)
    m = _record(sim, policy, eligible, out, until, tape, oom_kills)
    if m == 0:
        return None
    columns = int(tape.counts[:m].max())
    return Trajectory(
        features=tape.features[:m, :columns].copy(),  # the tape may be far longer
        mask=np.arange(columns)[None, :] < tape.counts[:m, None],
        rule_scores=tape.rule_scores[:m, :columns].astype(np.float32),
        action=tape.action[:m],
        log_prob=tape.log_prob[:m].astype(np.float32),
        elapsed=np.diff(tape.time[: m + 1]),
        integrals=np.diff(tape.integrals[: m + 1], axis=0),
        oom_kills=oom_kills[:m],
    )
