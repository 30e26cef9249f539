"""A batch machine: jobs of equal processors in a queue, an order, and when it is decided.

Called by ``agent.benchmark.batch_queue``. Run times are given by users' estimates to whoever
orders the queue, by the trace to whoever runs the jobs. Jobs hold their processors to the end.
"""

import math
from typing import NamedTuple

import numpy as np

from agent.arrays import Floats, Ints, kernel, lean

(FCFS, SJF, SAF, WFP3, UNICEP, F1, HRRN, WEIGHTED) = range(8)
ORDERS = {
    "fcfs": FCFS,
    "sjf": SJF,
    "saf": SAF,
    "wfp3": WFP3,
    "unicep": UNICEP,
    "f1": F1,
    "hrrn": HRRN,
    "weighted": WEIGHTED,
}
ORDER_HELP = {
    "fcfs": "first come, first served",
    "sjf": "shortest estimate first",
    "saf": "smallest area first: estimate times processors",
    "wfp3": "(wait / estimate)³ times processors, largest first (Tang et al., CCGrid 2009)",
    "unicep": "wait / (log2 processors times estimate), largest first (the same)",
    "f1": "log10(estimate) times processors + 870 log10(submit), least first (Carastan-Santos and"
    " de Camargo, SC 2017)",
    "hrrn": "highest response ratio next: (wait + estimate) / estimate, largest first",
    "weighted": "log estimate + w · log processors − v · log wait, least first",
}
COMMITTED, REDECIDED, SKIP_AHEAD, EASY = range(4)
DECISIONS = {
    "committed": COMMITTED,
    "re-decided": REDECIDED,
    "skip-ahead": SKIP_AHEAD,
    "easy": EASY,
}
DECISION_HELP = {
    "committed": "the first of the order is picked, and nothing starts before it, whatever comes",
    "re-decided": "nothing starts before the first of the order, but who that is is asked anew at"
    " each arrival and end",
    "skip-ahead": "in their order, all start that fit",
    "easy": "others start too where they do not delay the first by its estimate (EASY backfill)",
}

SHORTEST = 10.0
"""Seconds below which a run time counts as this for its slow-down."""
_HOUR = 3600.0


class Batch(NamedTuple):
    """J jobs, sorted by submission; times in seconds."""

    submit: Floats
    """[J] from the first."""
    estimate: Floats
    """[J] run time as its user says, above 0."""
    run: Floats
    """[J] run time as it will be, above 0."""
    processors: Ints
    """[J]"""


class Discipline(NamedTuple):
    """An order of the queue and when it is decided, by the numbers of ``ORDERS``, ``DECISIONS``."""

    order: int
    decide: int
    weights: Floats
    """[2] of ``weighted``: processors, wait."""
    reserve: Floats
    """[2] part of the machine that a job of an hour leaves free, and how much more one ten times
    as long does. It holds for ``skip-ahead``, while anything runs."""


def discipline(order: str, decide: str, learned: tuple[float, ...] = ()) -> Discipline:
    """The discipline of these names; ``learned`` are two weights and the two of the reserve.

    Raises:
        ValueError: a name that is not known, or another count of numbers.
    """
    for name, known in ((order, ORDERS), (decide, DECISIONS)):
        if name not in known:
            raise ValueError(f"no {name!r} here; there are {', '.join(known)}")
    numbers = np.array(learned or (1.0, 0.0, 0.0, 0.0))
    if len(numbers) != 4:
        raise ValueError(f"expected two weights and a reserve of two numbers, got {learned}")
    return Discipline(ORDERS[order], DECISIONS[decide], numbers[:2].copy(), numbers[2:].copy())


@lean
def _key(how: Discipline, submit: float, estimate: float, processors: int, now: float) -> float:
    """A waiting job's place in the order; the least goes first."""
    if how.order == SJF:
        return estimate
    if how.order == SAF:
        return estimate * processors
    if how.order == F1:
        return math.log10(estimate) * processors + 870.0 * math.log10(max(submit, 1.0))
    wait = now - submit
    if how.order == WFP3:
        return -((wait / estimate) ** 3) * processors
    if how.order == UNICEP:
        return -wait / (max(math.log2(processors), 0.1) * estimate)
    if how.order == HRRN:
        return -(wait + estimate) / estimate
    if how.order == WEIGHTED:
        key = math.log(estimate) + how.weights[0] * math.log(processors)
        return float(key - how.weights[1] * math.log1p(wait))
    return submit


@lean
def _must_stay_free(how: Discipline, estimate: float, machine: int) -> float:
    part = how.reserve[0] + how.reserve[1] * math.log10(estimate / _HOUR)
    return float(machine * min(max(part, 0.0), 1.0))


@kernel
def _reservation(needs: int, free: int, ends: Floats, held: Ints) -> tuple[float, int]:
    """When ``needs`` processors will be free by the estimates, and how many more then are.

    Args:
        ends: [R] expected ends of the running jobs. held: [R] their processors.
    """
    will_be_free, at = free, 0.0
    for i in np.argsort(ends):
        if will_be_free >= needs and ends[i] > at:
            break
        will_be_free += held[i]
        at = ends[i]
    return at, will_be_free - needs


@kernel
def _run_queue(batch: Batch, machine: int, how: Discipline) -> tuple[Floats, Floats]:
    jobs = len(batch.submit)
    start, promised = np.full(jobs, np.nan), np.full(jobs, np.nan)
    queue, queued, key = np.empty(jobs, np.int64), 0, np.empty(jobs)
    running, count, free, upcoming, picked = np.empty(jobs, np.int64), 0, machine, 0, -1
    while upcoming < jobs or queued > 0:
        now = batch.submit[upcoming] if upcoming < jobs else math.inf
        for i in range(count):
            now = min(now, start[running[i]] + batch.run[running[i]])
        i = 0
        while i < count:
            job = running[i]
            if start[job] + batch.run[job] <= now:
                count -= 1
                free += batch.processors[job]
                running[i] = running[count]
            else:
                i += 1
        while upcoming < jobs and batch.submit[upcoming] <= now:
            queue[queued] = upcoming
            queued += 1
            upcoming += 1
        for i in range(queued):
            job = queue[i]
            key[job] = _key(how, batch.submit[job], batch.estimate[job], batch.processors[job], now)
        head, shadow, spare = -1, 0.0, 0
        while queued > 0:
            best = -1
            for i in range(queued):
                job = queue[i]
                if how.decide == COMMITTED and picked >= 0 and job != picked:
                    continue
                needs = batch.processors[job]
                stays = 0.0
                if how.decide == SKIP_AHEAD and count > 0:
                    stays = _must_stay_free(how, batch.estimate[job], machine)
                if (how.decide == SKIP_AHEAD or head >= 0) and needs > free - stays:
                    continue
                if head >= 0 and needs > spare and now + batch.estimate[job] > shadow:
                    continue
                if best < 0 or key[job] < key[queue[best]]:
                    best = i
            if best < 0:
                break
            job = queue[best]
            needs = batch.processors[job]
            if needs > free:
                if how.decide != EASY:
                    if how.decide == COMMITTED:
                        picked = job
                    break
                ends, held = np.empty(count), np.empty(count, np.int64)
                for i in range(count):
                    ends[i] = max(start[running[i]] + batch.estimate[running[i]], now)
                    held[i] = batch.processors[running[i]]
                head = job
                shadow, spare = _reservation(needs, free, ends, held)
                if math.isnan(promised[job]):
                    promised[job] = shadow
                continue
            if head >= 0 and now + batch.estimate[job] > shadow:
                spare -= needs
            picked = -1
            queued -= 1
            for i in range(best, queued):
                queue[i] = queue[i + 1]
            start[job] = now
            free -= needs
            running[count] = job
            count += 1
    return start, promised


def run_queue(batch: Batch, machine: int, how: Discipline) -> tuple[Floats, Floats]:
    """Run all jobs on ``machine`` processors.

    Returns:
        [J] when each job starts, and [J] when the queue promised that it would at the latest, the
        first time that it was first in an EASY queue and did not fit (NaN: never).

    Raises:
        ValueError: a job needs more processors than there are, or no run time above 0.
    """
    if len(batch.submit) and (batch.processors.max() > machine or batch.processors.min() < 1):
        raise ValueError(
            f"jobs need {batch.processors.min()} to {batch.processors.max()} processors and the "
            f"machine has {machine}; give it as many as the trace's machine had"
        )
    if not ((batch.run > 0).all() and (batch.estimate > 0).all()):
        raise ValueError("a job's run time or estimate is not above 0")
    starts: tuple[Floats, Floats] = _run_queue(batch, machine, how)
    return starts


def bounded_slowdown(batch: Batch, start: Floats) -> Floats:
    """[J] time from submission to end over run time, with run times of at least ``SHORTEST``."""
    response = start + batch.run - batch.submit
    return np.maximum(1.0, response / np.maximum(batch.run, SHORTEST))


def makespan_bound(batch: Batch, machine: int) -> float:
    """No order ends sooner, s after the first submission: work is worked off after it has come."""
    work = batch.run * batch.processors / machine
    remaining = np.cumsum(work[::-1])[::-1]
    return float(max((batch.submit + batch.run).max(), (batch.submit + remaining).max()))
