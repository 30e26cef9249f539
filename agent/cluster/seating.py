"""Gives every node a row and every pod a slot of the view, and puts pods where they are.

Used by ``agent.cluster.state`` alone, which says where each pod is; nothing here takes time that
grows with the number of running pods, but for a node that comes, changes or goes.
"""

import heapq
import logging
import math

import numpy as np

from agent.arrays import Bools, Ints
from agent.cluster.fragments import record_request, recount_requests
from agent.cluster.growth import Catalogue, SpecLookup, clear_node, fill_history, fill_speeds, grown
from agent.cluster.records import Node, Pod
from agent.cluster.scopes import Scopes
from agent.cluster.speeds_file import SpeedsFile, WorkRuns
from agent.cluster.view import (
    CPU,
    GPUS_PER_NODE,
    PENDING,
    bind,
    empty_view,
    enqueue,
    imbalance,
    remove,
    set_node,
    unbind,
)

log = logging.getLogger(__name__)
_NOWHERE, _QUEUED = -2, -1
MOST_CORES = 1024.0
"""What a pod may ask for at most to be counted while no node is known."""


class Numbers(dict[str, int]):
    """Numbers by name, from 0 on; one that was given back is given out again, the lowest first."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.names = [""] * size
        """Name by number; empty where it is free."""
        self._free = list(range(size))

    def take(self, name: str) -> int:
        """A number for a name that has none; there are twice as many where all were given out."""
        if not self._free:
            size = len(self.names)
            self._free = list(range(size, 2 * size))
            self.names += [""] * size
        number = heapq.heappop(self._free)
        self[name], self.names[number] = number, name
        return number

    def give_back(self, name: str) -> int:
        """Free the name's number, which is returned."""
        number = self.pop(name)
        self.names[number] = ""
        heapq.heappush(self._free, number)
        return number


class Seating:
    """One view and who is where in it. ``view`` is another object after it had to grow."""

    def __init__(
        self, spec: SpecLookup, *, nodes: int, pods: int, max_job_types: int, burst: float
    ) -> None:
        """``nodes`` and ``pods`` are the first sizes; ``burst`` is how old, in cluster seconds, an
        :meth:`imbalance` may be."""
        none = np.zeros(0, np.int64)
        self.view = empty_view(
            nodes=nodes, pods=pods, gpu_spec=np.zeros((0, 3)), kind_type=none, kind_gpus=none
        )
        self.rows, self.slots = Numbers(nodes), Numbers(pods)
        self.names = Catalogue(spec, max_job_types)
        self._scopes = Scopes()
        self._nodes: dict[int, Node] = {}
        self.speeds: SpeedsFile | None = None
        self._works: dict[str, WorkRuns] = {}
        self._at: list[int] = [_NOWHERE] * pods  # by slot: a row, _QUEUED or _NOWHERE
        # Pods that are on a node which nobody knows, or knows yet: by node, and the node by pod.
        self._strays: dict[str, dict[str, None]] = {}
        self._astray: dict[str, str] = {}
        self._choosy: dict[str, tuple[str, ...]] = {}  # accepted models of pods that name some
        self._accepted = np.full(pods, -1, np.int64)  # by slot: their bit masks
        self._imbalance, self._reckoned, self._moved = 0.0, -math.inf, True
        self._burst = burst

    def imbalance(self, now: float) -> float:
        """Σ (U_i − Ū)² as it stands (see ``agent.cluster.view.imbalance``).

        It goes through all nodes, so in a burst of changes it may be the value of a moment ago.
        """
        if self._moved and now - self._reckoned >= self._burst:
            self._imbalance, self._reckoned, self._moved = imbalance(self.view), now, False
        return self._imbalance

    # Nodes ----------------------------------------------------------------------------------

    def set_node(self, node: Node) -> list[str]:
        """Write a new or changed node; its pods lose their places, are returned and to be settled.

        UIDs are in the order in which they are to be settled, as they were.
        """
        self._moved = True
        row = self.rows.get(node.name)
        if row is None:
            row = self.rows.take(node.name)
            if row >= len(self.view.ready):
                self._resize(nodes=len(self.rows.names))
            residents = list(self._strays.get(node.name, ()))
        else:
            residents = self.on(row)
        for uid in residents:
            self.lift(uid)
        if node.gpus > GPUS_PER_NODE:
            log.warning("node %s has %d GPUs, 8 are used", node.name, node.gpus)
        model, memory = -1, node.gpu_memory
        if node.gpus:
            if self.names.model(node.gpu_model, memory):
                self._widen()
                for uid, models in self._choosy.items():  # a mask names only what was known
                    self._accepted[self.slots[uid]] = self.names.allowed(models)
                self._narrow()
                self.recount_requests()
            model = self.names.models[node.gpu_model]
            memory = memory or float(self.view.gpu_spec[model, 2])
        size = np.array([node.cpu, node.memory, min(node.gpus, GPUS_PER_NODE)], np.float64)
        set_node(self.view, row, size, model, memory)
        self.view.ready[row] = node.ready
        self._follow(row, node)
        return residents

    def update_node(self, node: Node) -> None:
        """Write what may change about a node while its pods keep their places."""
        self._moved = True
        row = self.rows[node.name]
        self.view.ready[row] = node.ready
        self._follow(row, node)

    def _follow(self, row: int, node: Node | None) -> None:
        """Bring the scopes of gated pods in line with a node, None where it is gone."""
        if node is None:
            del self._nodes[row]
        else:
            self._nodes[row] = node
        if self._scopes.follow(row, node, self.view.scopes, self.view.gpu_type):
            self._narrow()

    def _narrow(self) -> None:
        """A pod is held to the models that it accepts and that its scope has: it must not wait for
        a node that it may not go to."""
        self.view.allowed[:] = self._accepted & self._scopes.reach[self.view.scope]

    def drop_node(self, name: str) -> list[str]:
        """Take a node away; its pods lose their places, are returned and to be settled."""
        self._moved = True
        residents = self.on(self.rows[name])
        for uid in residents:
            self.lift(uid)
        row = self.rows.give_back(name)
        clear_node(self.view, row)
        self._follow(row, None)
        return residents

    def on(self, row: int) -> list[str]:
        """UIDs of the pods that are on a node, in the order of their slots."""
        return [self.slots.names[slot] for slot in np.flatnonzero(self.view.node == row)]

    # Pods -----------------------------------------------------------------------------------

    def add_pod(self, pod: Pod, arrival: float) -> None:
        """Give a new pod a slot; it is nowhere yet. ``arrival`` is cluster seconds."""
        if self.names.kind(pod.job_type, pod.gang):
            self._widen()
        slot = self.slots.take(pod.uid)
        if slot >= len(self._at):
            size = len(self.slots.names)
            self._at += [_NOWHERE] * (size - len(self._at))
            self._accepted = np.append(
                self._accepted, np.full(size - len(self._accepted), -1, np.int64)
            )
            self._resize(pods=size)
        view = self.view
        view.kind[slot] = self.names.row(pod.job_type, pod.gang)
        self.write_size(pod)
        view.node[slot], view.gpu_mask[slot], view.start[slot] = -1, 0, np.nan
        view.arrival[slot] = arrival

    def write_request(self, pod: Pod, deadline: float) -> None:
        """What the pod asks for; ``deadline`` is cluster seconds."""
        slot, scope = self.slots[pod.uid], self._scope(pod)
        view = self.view
        view.request[slot] = pod.cpu, pod.memory, pod.gpus, pod.gpu_share, pod.gpu_memory
        view.deadline[slot] = deadline
        self._accepted[slot] = self.names.allowed(pod.gpu_models)
        view.scope[slot] = scope
        view.allowed[slot] = self._accepted[slot] & self._scopes.reach[scope]
        if pod.gpu_models:
            self._choosy[pod.uid] = pod.gpu_models
        else:
            self._choosy.pop(pod.uid, None)

    def count_request(self, uid: str) -> None:
        """Count what a new pod asks for among what pods of this cluster ask for."""
        slot = self.slots[uid]
        if self._possible(np.array([slot], np.int64))[0]:
            record_request(self.view, slot)

    def recount_requests(self) -> None:
        """Count anew what the pods that there are ask for, in the order in which they came."""
        slots = np.array(list(self.slots.values()), np.int64)
        slots = slots[self._possible(slots)]
        recount_requests(self.view, slots[np.argsort(self.view.arrival[slots], kind="stable")])

    def _possible(self, slots: Ints) -> Bools:
        """[P] whether any node has the CPU that each asks for: one absurd number must not count."""
        most = self.view.capacity[:, CPU].max(initial=0.0) or MOST_CORES
        return np.asarray(self.view.request[slots, CPU] <= most, np.bool_)

    def _scope(self, pod: Pod) -> int:
        """The row of ``View.scopes`` for the pod, written where it is new."""
        row, new = self._scopes.hold(pod.uid, pod.scope)
        if pod.scope is not None and new:
            view = self.view
            if row >= len(view.scopes):
                more = np.ones((2 * row, view.scopes.shape[1]), np.bool_)
                more[: len(view.scopes)] = view.scopes
                self.view = view = view._replace(scopes=more)
            self._scopes.fill(pod.scope, self._nodes, view.scopes, view.gpu_type)
        return row

    def settle(self, uid: str, place: str, bound: float | None) -> None:
        """Put the pod on the node ``place``, or into the queue where that is empty.

        ``bound`` is when it came there, None for now. On a node that nobody knows it holds nothing.
        """
        slot = self.slots[uid]
        wanted = self.rows.get(place, _NOWHERE) if place else _QUEUED
        if wanted != self._at[slot]:
            self.lift(uid)
            self._at[slot] = wanted
            if wanted == _QUEUED:
                enqueue(self.view, slot)
            elif wanted >= 0:
                bind(self.view, slot, wanted)
                self._moved = True
        if wanted == _NOWHERE and self._astray.get(uid) != place:
            self._find(uid)
            self._astray[uid] = place
            self._strays.setdefault(place, {})[uid] = None
        elif wanted >= 0 and bound is not None:
            self.view.start[slot] = bound

    def lift(self, uid: str) -> None:
        """Take the pod from where it is; it is nowhere then."""
        slot = self.slots[uid]
        if self._at[slot] >= 0:
            unbind(self.view, slot)
            self._moved = True
        elif self._at[slot] == _QUEUED:
            remove(self.view, PENDING, slot)
        self._at[slot] = _NOWHERE
        self._find(uid)

    def _find(self, uid: str) -> None:
        place = self._astray.pop(uid, None)
        if place is not None:
            del self._strays[place][uid]
            if not self._strays[place]:
                del self._strays[place]

    def row_of(self, uid: str) -> int:
        """Row of the node that the pod is on; below 0 where it is on none."""
        return self._at[self.slots[uid]]

    def neighbours(self, uid: str) -> list[str]:
        """UIDs of the other pods on the same GPUs."""
        view, slot = self.view, self.slots[uid]
        row, mask = self._at[slot], int(view.gpu_mask[slot])
        if row < 0 or not mask:
            return []
        there = np.flatnonzero(view.node == row)
        there = there[(view.gpu_mask[there] & mask) != 0]
        return [self.slots.names[other] for other in there if other != slot]

    def drop_pod(self, uid: str) -> None:
        """Free the pod's slot."""
        self.lift(uid)
        self.slots.give_back(uid)
        self._choosy.pop(uid, None)
        self._scopes.release(uid)

    # Growth ---------------------------------------------------------------------------------

    def set_speeds(self, speeds: SpeedsFile | None) -> None:
        """Take over what the learner knows about speeds."""
        self.speeds = speeds
        fill_speeds(self.view, speeds, self.names)
        fill_history(self.view, speeds, self.names)
        self._works = {} if speeds is None else {runs.work: runs for runs in speeds.works}

    def write_size(self, pod: Pod) -> None:
        """How long the pod's work has taken before, where that is known."""
        runs, slot = self._works.get(pod.work), self.slots[pod.uid]
        self.view.size[slot] = np.nan if runs is None else runs.log_seconds
        self.view.trust[slot] = 1.0 if runs is None else runs.trust

    def _resize(self, *, nodes: int = 0, pods: int = 0) -> None:
        view = self.view
        self.view = grown(view, nodes=nodes or len(view.ready), pods=pods or len(view.kind))

    def _widen(self) -> None:
        self.view = self.names.widen(self.view, self.speeds)
