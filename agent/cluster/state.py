"""The live cluster: applies node and pod records to one view and says what happened to pods.

``agent.scheduling.serve`` feeds it from the watches; extender, guard and queue read ``view``. It
keeps the *assumed* placements too: the watch lags behind kube-scheduler's serial decisions, so a
pod that was sent somewhere occupies its place until the watch shows where it is, or for a while.
"""

import heapq
import logging
import math
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from agent.cluster.growth import (
    Catalogue,
    SpecLookup,
    clear_node,
    fill_speeds,
    sort_pending,
)
from agent.cluster.lifecycle import Emit, Lifecycle, end_of
from agent.cluster.records import Node, Pod
from agent.cluster.speeds_file import SpeedsFile
from agent.cluster.view import (
    GPUS_PER_NODE,
    PENDING,
    RUNNING,
    USAGE_CPU,
    USAGE_MEMORY,
    bind,
    empty_view,
    enqueue,
    imbalance,
    record_run_time,
    remove,
    set_node,
    unbind,
)

log = logging.getLogger(__name__)
_NOWHERE, _QUEUED = -2, -1


class ClusterState:
    """One cluster. Not thread-safe; every method but :meth:`tick` works at the last tick's time.

    ``view`` is another object after it had to grow: read it anew after each change.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        emit: Emit,
        spec: SpecLookup,
        scale: float = 1.0,
        assume_seconds: float = 30.0,
        changed: Callable[[], None] = lambda: None,
        nodes: int = 8,
        pods: int = 64,
    ) -> None:
        """``clock`` gives Unix seconds; the view runs at ``scale`` times that.

        ``assume_seconds`` is wall time; ``changed`` is called with each step of :attr:`version`;
        ``nodes`` and ``pods`` are the first sizes.
        """
        self._clock, self._scale, self._changed = clock, scale, changed
        self._assume = assume_seconds * scale
        none = np.zeros(0, np.int64)
        self.view = empty_view(
            nodes=nodes, pods=pods, gpu_spec=np.zeros((0, 3)), kind_type=none, kind_gpus=none
        )
        self.view.clock[0] = clock() * scale
        self.rows: dict[str, int] = {}
        """View row by node name."""
        self.slots: dict[str, int] = {}
        """View slot by pod UID, of all pods that are not done."""
        self.pods: dict[str, Pod] = {}
        """Record by UID, of the same pods."""
        self.life = Lifecycle(emit)
        self.names = Catalogue(spec)
        self.version = 0
        """Goes up with every change that a decision may depend on; readings of use do not count."""
        self.job_seconds = 0.0
        """∫ jobs in the system dt since the start, cluster seconds."""
        self.imbalance_seconds = 0.0
        """∫ Σ (U_i − Ū)² dt over ready nodes; U_i is GPUs given out, CPU where it has no GPU."""
        self.problems = 0
        """Annotations that could not be read and were passed over."""
        self.nodes: dict[str, Node] = {}
        """Record by name."""
        self._free_rows, self._free_slots = list(range(nodes)), list(range(pods))
        self._uids: dict[int, str] = {}
        self._row_names: dict[int, str] = {}
        self._at: dict[str, int] = {}  # by UID: a row, _QUEUED or _NOWHERE
        self._assumed: dict[str, tuple[str, float]] = {}
        self._unseen: set[str] = set()  # known from kube-scheduler's calls alone
        self._speeds: SpeedsFile | None = None

    # Time -----------------------------------------------------------------------------------

    def tick(self) -> float:
        """Move the view's clock to now, adding to the integrals; lapse old assumptions.

        Returns the cluster's time, s. A wall clock that steps back holds the view's clock.
        """
        view = self.view
        now = max(self._clock() * self._scale, float(view.clock[0]))
        passed = now - float(view.clock[0])
        if passed > 0.0:
            self.job_seconds += passed * float(view.counts[PENDING] + view.counts[RUNNING])
            self.imbalance_seconds += passed * imbalance(view)
            view.clock[0] = now
        for uid in [uid for uid, (_, until) in self._assumed.items() if until <= now]:
            log.info("pod %s was sent to %s and not seen bound", uid, self._assumed[uid][0])
            self.forget(uid)
        return now

    def _step(self) -> None:
        self.version += 1
        self._changed()

    # Nodes ----------------------------------------------------------------------------------

    def replace_nodes(self, nodes: Iterable[Node]) -> None:
        """Make these the nodes that there are."""
        found = {node.name: node for node in nodes}
        for name in self.nodes.keys() - found.keys():
            self.apply_node(self.nodes[name], deleted=True)
        for node in found.values():
            self.apply_node(node)

    def apply_node(self, node: Node, deleted: bool = False) -> None:
        """Add, change or take away one node; pods on it are settled anew."""
        old = self.nodes.get(node.name)
        if node == old and not deleted:
            return
        self.tick()
        self._step()
        if deleted:
            if old is not None:
                del self.nodes[node.name]
                self._drop_row(node.name)
            return
        self.nodes[node.name] = node
        row = self.rows.get(node.name)
        if row is None:
            row = self._new_row(node.name)
            residents = [u for u, p in self.pods.items() if node.name in (p.node, self.assumed(u))]
        elif old is not None and old.hardware == node.hardware:
            self.view.ready[row] = node.ready
            return
        else:
            residents = [self._uids[slot] for slot in self._on(row)]
            for uid in residents:
                self._lift(uid)
        if node.gpus > GPUS_PER_NODE:
            log.warning("node %s has %d GPUs, 8 are used", node.name, node.gpus)
        model, memory = -1, node.gpu_memory
        if node.gpus:
            if self.names.model(node.gpu_model, memory):
                self._resize()
            model = self.names.models[node.gpu_model]
            memory = memory or float(self.view.gpu_spec[model, 2])
        size = np.array([node.cpu, node.memory, min(node.gpus, GPUS_PER_NODE)], np.float64)
        set_node(self.view, row, size, model, memory)
        self.view.ready[row] = node.ready
        for uid in residents:
            self._settle(uid)

    def set_usage(self, usage: Mapping[str, tuple[float, float]]) -> None:
        """Write measured use by node name, CPU cores and memory GiB; absent nodes are unknown."""
        self.tick()
        for name, row in self.rows.items():
            cpu, memory = usage.get(name, (math.nan, math.nan))
            node = self.nodes[name]
            self.view.usage[row, USAGE_CPU] = cpu / node.cpu if node.cpu else math.nan
            self.view.usage[row, USAGE_MEMORY] = memory / node.memory if node.memory else math.nan

    def _new_row(self, name: str) -> int:
        if not self._free_rows:
            size = len(self.view.ready)
            self._resize(nodes=2 * size)
            self._free_rows = list(range(size, 2 * size))
        row = heapq.heappop(self._free_rows)
        self.rows[name], self._row_names[row] = row, name
        return row

    def _drop_row(self, name: str) -> None:
        row = self.rows.pop(name)
        for slot in self._on(row):
            self._lift(self._uids[slot])  # without a place until the API server deletes the pod too
        clear_node(self.view, row)
        del self._row_names[row]
        heapq.heappush(self._free_rows, row)

    def _on(self, row: int) -> list[int]:
        running = self.view.queue[RUNNING, : self.view.counts[RUNNING]]
        return [int(slot) for slot in running if self.view.node[slot] == row]

    # Pods -----------------------------------------------------------------------------------

    def replace_pods(self, pods: Iterable[Pod]) -> None:
        """Make these the pods that there are."""
        found = {pod.uid: pod for pod in pods}
        for uid in self.pods.keys() - found.keys() - self._unseen:
            self.apply_pod(self.pods[uid], deleted=True)
        for uid in self.life.known() - found.keys() - self._unseen:
            self.life.drop(uid)
        for pod in sorted(found.values(), key=lambda pod: (pod.created, pod.name)):
            self.apply_pod(pod, listed=True)

    def apply_pod(self, pod: Pod, deleted: bool = False, listed: bool = False) -> None:
        """Take in one pod as the API server has it now.

        From a list, its times are the API server's; from a watch, the agent's own clock, which
        is finer. A pod that is done leaves the view.
        """
        now, uid = self.tick(), pod.uid
        old = self.pods.get(uid)
        if old is None and deleted:
            self.life.drop(uid)
            return
        if self.life.over(uid) or (pod == old and not deleted and uid not in self._unseen):
            return
        self._unseen.discard(uid)
        if pod.problem and (old is None or old.problem != pod.problem):
            self.problems += 1
            log.warning("pod %s/%s: %s", pod.namespace, pod.name, pod.problem)
        if deleted or old is None or old.standing != pod.standing:
            self._step()
        if old is None:
            self._new_slot(pod, listed)
        elif old.asks != pod.asks:
            self._lift(uid)
        self.pods[uid], slot = pod, self.slots[uid]
        self._write_request(slot, pod)
        self.life.created(pod, float(self.view.arrival[slot]))
        started = pod.started * self._scale if listed and pod.started else None
        self.life.lives(pod, self._model_of(pod), now, started)
        self._settle(uid)
        if pod.done or deleted:
            self._end(pod, now, deleted, listed)
        elif pod.node:
            self.life.progress(pod, self._model_of(pod), now, self._neighbours(slot))

    def introduce(self, pod: Pod) -> bool:
        """Take in a pod that kube-scheduler asks about before the watch shows it.

        It lasts as long as an assumption unless the watch confirms it. False for a pod that is
        bound, done or gone: there is nothing to decide.
        """
        known = self.pods.get(pod.uid)
        if known is not None:
            return not known.node
        if pod.done or pod.node or self.life.over(pod.uid):
            return False
        self.apply_pod(pod, listed=True)
        self._unseen.add(pod.uid)
        self._assumed[pod.uid] = ("", float(self.view.clock[0]) + self._assume)
        return True

    def assume(self, uid: str, node: str) -> None:
        """Count the pending pod as running on ``node`` until the watch shows where it is."""
        if uid not in self.pods or self.pods[uid].node:
            return
        self._assumed[uid] = (node, float(self.view.clock[0]) + self._assume)
        self._settle(uid)

    def assumed(self, uid: str) -> str:
        """The node that the pod is assumed on; empty where on none."""
        return self._assumed.get(uid, ("", 0.0))[0]

    def suspend(self, uid: str) -> str:
        """Count the pod as pending for one look, wherever it is assumed; the node to go back to."""
        node = self.assumed(uid)
        if node:
            self._assumed[uid] = ("", self._assumed[uid][1])
            self._settle(uid)
        return node

    def forget(self, uid: str) -> None:
        """Drop what was assumed of the pod, and the pod where no watch ever showed it."""
        if self._assumed.pop(uid, None) is None:
            return
        self._step()
        if uid in self._unseen:
            self.life.drop(uid)
            self._free(uid)
        else:
            self._settle(uid)

    def set_speeds(self, speeds: SpeedsFile | None) -> None:
        """Take over what the learner knows about speeds."""
        self._speeds = speeds
        self._step()
        fill_speeds(self.view, speeds, self.names)

    def pod_name(self, slot: int) -> str:
        """UID of the pod in a slot; empty for −1 (waiting)."""
        return self._uids[slot] if slot >= 0 else ""

    def node_name(self, row: int) -> str:
        """Name of a view row's node; empty for −1 (waiting)."""
        return self._row_names[row] if row >= 0 else ""

    def _settle(self, uid: str) -> None:
        """Bring the view in line with where the pod is, or is assumed to be."""
        pod, slot = self.pods[uid], self.slots[uid]
        if pod.node:
            self._assumed.pop(uid, None)
        place = pod.node or self.assumed(uid)
        wanted = self.rows.get(place, _NOWHERE) if place else _QUEUED
        if wanted == self._at[uid]:
            bound = self.life.bound_at(uid)
            if wanted >= 0 and bound is not None:
                self.view.start[slot] = bound
            return
        self._lift(uid)
        self._at[uid] = wanted
        if wanted >= 0:
            bind(self.view, slot, wanted)
            bound = self.life.bound_at(uid)
            self.view.start[slot] = self.view.clock[0] if bound is None else bound
        elif wanted == _QUEUED:
            enqueue(self.view, slot)
            sort_pending(self.view)

    def _lift(self, uid: str) -> None:
        if self._at[uid] >= 0:
            unbind(self.view, self.slots[uid])
        elif self._at[uid] == _QUEUED:
            remove(self.view, PENDING, self.slots[uid])
        self._at[uid] = _NOWHERE

    def _end(self, pod: Pod, now: float, deleted: bool, listed: bool) -> None:
        time = min(pod.finished * self._scale, now) if listed and pod.finished else now
        ran = self.life.ends(pod, self._model_of(pod), time)
        slot, row = self.slots[pod.uid], self._at[pod.uid]
        if ran > 0.0 and row >= 0 and end_of(pod) == "finished":
            kind, model = self.view.kind[slot], self.view.gpu_type[row]
            slower = self.view.slowdown[kind, model] if model >= 0 and pod.gang else 0.0
            record_run_time(self.view, slot, math.log(ran) - float(slower))
        self._free(pod.uid)
        if deleted:
            self.life.drop(pod.uid)

    def _new_slot(self, pod: Pod, listed: bool) -> None:
        if self.names.kind(pod.job_type, pod.gang):
            self._resize()
        if not self._free_slots:
            size = len(self.view.kind)
            self._resize(pods=2 * size)
            self._free_slots = list(range(size, 2 * size))
        slot, view = heapq.heappop(self._free_slots), self.view
        self.slots[pod.uid], self._uids[slot] = slot, pod.uid
        self._at[pod.uid] = _NOWHERE
        view.kind[slot], view.size[slot] = self.names.kinds[pod.job_type, pod.gang], np.nan
        view.node[slot], view.gpu_mask[slot], view.start[slot] = -1, 0, np.nan
        now = float(view.clock[0])
        view.arrival[slot] = min(pod.created * self._scale, now) if listed and pod.created else now

    def _write_request(self, slot: int, pod: Pod) -> None:
        view = self.view
        view.request[slot] = pod.cpu, pod.memory, pod.gpus, pod.gpu_share, pod.gpu_memory
        view.deadline[slot] = pod.deadline * self._scale
        view.allowed[slot] = self.names.allowed(pod.gpu_models)

    def _free(self, uid: str) -> None:
        self._lift(uid)
        slot = self.slots.pop(uid)
        del self.pods[uid], self._at[uid], self._uids[slot]
        self._assumed.pop(uid, None)
        self._unseen.discard(uid)
        heapq.heappush(self._free_slots, slot)

    def _model_of(self, pod: Pod) -> str:
        node = self.nodes.get(pod.node)
        return node.gpu_model if node is not None and pod.gang else ""

    def _neighbours(self, slot: int) -> list[str]:
        """Job types on the same GPUs, sorted."""
        view, mask = self.view, self.view.gpu_mask[slot]
        if view.node[slot] < 0 or not mask:
            return []
        there = (other for other in self._on(int(view.node[slot])) if other != slot)
        uids = (self._uids[other] for other in there if view.gpu_mask[other] & mask)
        return sorted(self.pods[uid].job_type for uid in uids)

    def _resize(self, nodes: int = 0, pods: int = 0) -> None:
        view = self.view
        self.view = self.names.resize(
            view, nodes=nodes or len(view.ready), pods=pods or len(view.kind)
        )
        fill_speeds(self.view, self._speeds, self.names)
        for uid, pod in self.pods.items():  # a mask names only models that were known
            self.view.allowed[self.slots[uid]] = self.names.allowed(pod.gpu_models)
