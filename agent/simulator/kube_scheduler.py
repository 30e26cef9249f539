"""A scheduler that behaves like kube-scheduler, run by the embedded cluster (cluster.py).

One pod at a time: filters, then the extender's filter, then the scores of NodeResourcesFit with its
LeastAllocated strategy and of NodeResourcesBalancedAllocation (CPU and memory, 0–100, weight 1
each; the two default plugins that tell the embedded nodes apart) plus the extender's, then the
binding. Times are cluster seconds; only the extender's time-out is wall time.
"""

import heapq
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from agent.arrays import Ints, kernel
from agent.cluster.view import CPU, MEMORY, View, fits
from agent.simulator.extender_client import Extender, ExtenderError

INITIAL_BACKOFF_S = 1.0
MAX_BACKOFF_S = 10.0
UNSCHEDULABLE_FLUSH_S = 300.0
"""A pod that waits unschedulable is tried again after this time even when nothing happened."""


@dataclass
class _Waiting:
    priority: int
    timestamp: float
    attempts: int = 0
    backoff_until: float = 0.0
    events_seen: int = 0


class SchedulingQueue:
    """kube-scheduler's three queues: active, backing off, unschedulable; pods are ints.

    clock: cluster seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pods: dict[int, _Waiting] = {}
        self._active: list[tuple[int, float, int, int]] = []
        self._backoff: list[tuple[float, int, int]] = []
        self._unschedulable: dict[int, float] = {}
        self._order = count()
        self._events = 0

    def __len__(self) -> int:
        return len(self._pods)

    def add(self, pod: int, priority: int = 0) -> None:
        """A pod that may be scheduled from now on: a new one, or one whose last gate went."""
        self._pods[pod] = _Waiting(priority, self._clock())
        self._activate(pod)

    def pop(self) -> int | None:
        """The next active pod: highest priority, then longest in the queue; None with none."""
        self._flush()
        while self._active:
            pod = heapq.heappop(self._active)[-1]
            if pod in self._pods:
                self._pods[pod].attempts += 1
                self._pods[pod].events_seen = self._events
                return pod
        return None

    def bound(self, pod: int) -> None:
        """The pod has a node and leaves the queues."""
        self._pods.pop(pod, None)

    def unschedulable(self, pod: int, *, retry: bool = False) -> None:
        """The attempt failed: wait for an event, or with ``retry`` only for the backoff.

        As in kube-scheduler the pod's place in the order is that of its last failed attempt, and
        the backoff doubles from 1 s up to 10 s.
        """
        waiting, now = self._pods[pod], self._clock()
        waiting.timestamp = now
        seconds = INITIAL_BACKOFF_S * 2.0 ** min(waiting.attempts - 1, 10)
        waiting.backoff_until = now + min(seconds, MAX_BACKOFF_S)
        # An event during the attempt may be the very one that the pod would wait for.
        if retry or waiting.events_seen != self._events:
            self._back_off(pod)
        else:
            self._unschedulable[pod] = now

    def event(self) -> None:
        """Something may have made room: unschedulable pods are tried again after their backoff."""
        self._events += 1
        for pod in self._unschedulable:
            self._back_off(pod)
        self._unschedulable.clear()

    def next_timer(self) -> float:
        """When a pod becomes active by time alone; infinite where none does."""
        backoff = self._backoff[0][0] if self._backoff else math.inf
        oldest = next(iter(self._unschedulable.values()), math.inf)
        return min(backoff, oldest + UNSCHEDULABLE_FLUSH_S)

    def _activate(self, pod: int) -> None:
        waiting = self._pods[pod]
        entry = (-waiting.priority, waiting.timestamp, next(self._order), pod)
        heapq.heappush(self._active, entry)

    def _back_off(self, pod: int) -> None:
        heapq.heappush(self._backoff, (self._pods[pod].backoff_until, next(self._order), pod))

    def _flush(self) -> None:
        now = self._clock()
        for pod, since in list(self._unschedulable.items()):
            if now < since + UNSCHEDULABLE_FLUSH_S:
                break  # they stand in the order in which they came
            del self._unschedulable[pod]
            self._back_off(pod)
        while self._backoff and self._backoff[0][0] <= now:
            self._activate(heapq.heappop(self._backoff)[-1])


def nodes_to_find(nodes: int) -> int:
    """How many feasible nodes are enough to score: all of 100, fewer percent of more.

    ``numFeasibleNodesToFind`` with the default percentageOfNodesToScore: 500 of 5,000.
    """
    if nodes < 100:
        return nodes
    return max(100, int(nodes * max(50 - nodes // 125, 5) / 100))


@kernel
def feasible_nodes(view: View, pod: int, first: int, wanted: int) -> Ints:
    """Rows of up to ``wanted`` nodes that fit, from row ``first`` on and around.

    The last entry is the number of nodes that were looked at.
    """
    nodes = len(view.capacity)
    found, examined = np.empty(nodes + 1, np.int64), 0
    n = 0
    while examined < nodes and n < wanted:
        row = (first + examined) % nodes
        examined += 1
        if fits(view, pod, row):
            found[n] = row
            n += 1
    found[n] = examined
    return found[: n + 1]


@kernel
def plugin_scores(view: View, pod: int, rows: Ints) -> Ints:
    """[C] LeastAllocated plus BalancedAllocation of each node, 0–100 each, cut to integers.

    LeastAllocated: mean over CPU and memory of (capacity − requested) · 100 / capacity.
    BalancedAllocation: (1 − σ) · 100, σ the standard deviation of the two requested shares. Both
    count the pod as already there.
    """
    scores = np.zeros(len(rows), np.int64)
    share = np.empty(2)
    for i in range(len(rows)):
        node = rows[i]
        least = 0
        for r in (CPU, MEMORY):
            capacity = view.capacity[node, r]
            after = view.requested[node, r] + view.request[pod, r]
            share[r] = min(after / capacity, 1.0) if capacity > 0.0 else 1.0
            # The small part keeps a whole number whole where the floats fall just short of it.
            least += math.floor((1.0 - share[r]) * 100.0 + 1e-9)
        balance = math.floor((1.0 - abs(share[CPU] - share[MEMORY]) / 2.0) * 100.0 + 1e-9)
        scores[i] = least // 2 + balance
    return scores


class KubeScheduler:
    """The scheduling cycle over one view.

    node_names: by row. pod_json: the v1.Pod of a slot, as extenders get it. bind: binds a slot to
    a row at once, False where it no longer fits. refused: told the slot and why no node was found.
    rng: breaks ties. counts: attempts, bound, unschedulable, extender_errors, single_candidate.
    """

    def __init__(
        self,
        view: View,
        node_names: Sequence[str],
        *,
        clock: Callable[[], float],
        pod_json: Callable[[int], bytes],
        bind: Callable[[int, int], bool],
        refused: Callable[[int, str], None],
        rng: np.random.Generator,
        extender: Extender | None = None,
    ) -> None:
        self.queue = SchedulingQueue(clock)
        self.counts: Counter[str] = Counter()
        self._view, self._names = view, list(node_names)
        self._rows = {name: row for row, name in enumerate(node_names)}
        self._pod_json, self._bind, self._refused = pod_json, bind, refused
        self._rng, self._extender = rng, extender
        self._first = 0

    async def schedule_one(self) -> bool:
        """Try the next pod; False where none is active."""
        pod = self.queue.pop()
        if pod is None:
            return False
        self.counts["attempts"] += 1
        try:
            rows, why = await self._filter(pod)
        except ExtenderError as error:
            self.counts["extender_errors"] += 1
            self._refused(pod, f"extender failed: {error}")
            self.queue.unschedulable(pod, retry=True)
            return True
        if not len(rows):
            self.counts["unschedulable"] += 1
            self._refused(pod, why)
            self.queue.unschedulable(pod)
            return True
        row = int(rows[0]) if len(rows) == 1 else await self._best(pod, rows)
        if len(rows) == 1:
            self.counts["single_candidate"] += 1
        if self._bind(pod, row):
            self.counts["bound"] += 1
            self.queue.bound(pod)
        else:
            self.queue.unschedulable(pod, retry=True)
        return True

    async def _filter(self, pod: int) -> tuple[Ints, str]:
        """The rows that the filter plugins and the extender leave, and why there are none."""
        nodes = len(self._names)
        found = feasible_nodes(self._view, pod, self._first, nodes_to_find(nodes))
        rows, examined = found[:-1], int(found[-1])
        self._first = (self._first + examined) % nodes
        why = f"0/{nodes} nodes are available: insufficient resources or another GPU model."
        extender = self._extender
        if not len(rows) or extender is None or not extender.settings.filter_verb:
            return rows, why
        names = [self._names[row] for row in rows]
        try:
            left, reasons = await extender.filter(self._pod_json(pod), names)
        except ExtenderError:
            if extender.settings.ignorable:
                return rows, why
            raise
        told = "; ".join(f"{name}: {reason}" for name, reason in sorted(reasons.items()))
        why = f"0/{nodes} nodes are available: refused by the extender ({told or 'no reason'})."
        return np.array([self._rows[name] for name in left], np.int64), why

    async def _best(self, pod: int, rows: Ints) -> int:
        """The row with the highest total; one of them at random where several have it."""
        # The plugins score what the cycle's filters saw, before the extender is asked.
        totals = plugin_scores(self._view, pod, rows).tolist()
        if self._extender is not None and self._extender.settings.prioritize_verb:
            names = [self._names[row] for row in rows]
            added = await self._extender.prioritize(self._pod_json(pod), names)
            totals = [total + added.get(name, 0) for total, name in zip(totals, names, strict=True)]
        best = max(totals)
        tied = [int(row) for row, total in zip(rows, totals, strict=True) if total == best]
        return tied[int(self._rng.integers(len(tied)))] if len(tied) > 1 else tied[0]
