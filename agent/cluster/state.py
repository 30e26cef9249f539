"""The live cluster: applies node and pod records to one view and says what happened to pods.

``agent.scheduling.serve`` feeds it from the watches; extender, guard and queue read ``view``. It
keeps the *assumed* placements too: the watch lags behind kube-scheduler's serial decisions, so a
pod that was sent somewhere occupies its place until the watch shows where it is, or for a while.
"""

import logging
import math
from collections.abc import Callable, Iterable, Mapping

import msgspec
import numpy as np

from agent.arrays import Floats
from agent.cluster.growth import SpecLookup
from agent.cluster.lifecycle import Emit, Lifecycle
from agent.cluster.listing import Listing
from agent.cluster.outcomes import end_of
from agent.cluster.records import Node, Pod
from agent.cluster.seating import Seating
from agent.cluster.speeds_file import SpeedsFile
from agent.cluster.view import (
    PENDING,
    RUNNING,
    View,
    record_run_time,
)

log = logging.getLogger(__name__)
BURST_SECONDS = 0.001
"""Wall time; changes within it count for the integrals as if they came together."""
REPLACED_SECONDS = 3600.0
"""Wall time that a controller may take to replace a pod which did not finish."""


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
        ahead: Callable[[], float] = lambda: 0.0,
        scale: float = 1.0,
        assume_seconds: float = 30.0,
        changed: Callable[[], None] = lambda: None,
        max_job_types: int = 256,
        nodes: int = 8,
        pods: int = 64,
    ) -> None:
        """``clock`` gives Unix seconds that never step (``agent.cluster.clock``); the view runs at
        ``scale`` times that.

        ``ahead`` is how far the API server's clock is ahead of it, s; ``assume_seconds`` is wall
        time; ``changed`` is called with each step of :attr:`version`; ``nodes`` and ``pods`` are
        the first sizes.
        """
        self._clock, self._ahead, self._scale, self._changed = clock, ahead, scale, changed
        self._assume = assume_seconds * scale
        self._seating = Seating(
            spec,
            nodes=nodes,
            pods=pods,
            max_job_types=max_job_types,
            burst=BURST_SECONDS * scale,
        )
        self.rows = self._seating.rows
        """View row by node name."""
        self.slots = self._seating.slots
        """View slot by pod UID, of all pods that are not done."""
        self.names = self._seating.names
        self.pods: dict[str, Pod] = {}
        """Record by UID, of the same pods."""
        self.nodes: dict[str, Node] = {}
        """Record by name."""
        self.gated: dict[str, None] = {}
        """UIDs of the pods that are behind fedsched's gate."""
        self.life = Lifecycle(emit, replaced_within=REPLACED_SECONDS * scale)
        self.version = 0
        """Goes up with every change that a decision may depend on; readings of use do not count."""
        self.job_seconds = 0.0
        """∫ jobs in the system dt since the start, cluster seconds."""
        self.imbalance_seconds = 0.0
        """∫ Σ (U_i − Ū)² dt over ready nodes; U_i is GPUs given out, CPU where it has no GPU."""
        self.problems = 0
        """Annotations that could not be read and were passed over."""
        self.gpu_memory_free: Floats = np.zeros(0)
        """[≤ N] GiB measured to be free on the emptiest GPU of each row's node; NaN is unknown."""
        self._assumed: dict[str, tuple[str, float]] = {}  # in the order in which they lapse
        self._listed_once = False
        self._unseen: set[str] = set()  # known from kube-scheduler's calls alone
        self.view.clock[0] = clock() * scale

    @property
    def view(self) -> View:
        """The cluster as arrays."""
        return self._seating.view

    # Time -----------------------------------------------------------------------------------

    def tick(self) -> float:
        """Move the view's clock to now, adding to the integrals; lapse old assumptions.

        Returns the cluster's time, s.
        """
        view = self.view
        now = max(self._clock() * self._scale, float(view.clock[0]))
        passed = now - float(view.clock[0])
        if passed > 0.0:
            self.job_seconds += passed * float(view.counts[PENDING] + view.counts[RUNNING])
            self.imbalance_seconds += passed * self._seating.imbalance(now)
            view.clock[0] = now
        while self._assumed:
            uid, (node, until) = next(iter(self._assumed.items()))
            if until > now:
                break
            log.info("pod %s was sent to %s and not seen bound", uid, node)
            self.forget(uid)
        return now

    def _step(self) -> None:
        self.version += 1
        self._changed()

    def _time_of(self, stamp: float) -> float:
        """Cluster seconds of a time that the API server wrote, by its own clock."""
        return (stamp - self._ahead()) * self._scale

    # Nodes ----------------------------------------------------------------------------------

    def list_nodes(self) -> Listing[Node]:
        """Begin to take in a list of all nodes."""
        return Listing(self.nodes, lambda node: node.name, self.apply_node, self._miss_node)

    def replace_nodes(self, nodes: Iterable[Node]) -> None:
        """Make these the nodes that there are."""
        self.list_nodes().take(nodes)

    def _miss_node(self, name: str) -> None:
        if name in self.nodes:
            self.apply_node(self.nodes[name], deleted=True)

    def apply_node(self, node: Node, deleted: bool = False) -> None:
        """Add, change or take away one node; pods on it are settled anew."""
        old = self.nodes.get(node.name)
        if old is None if deleted else node == old:
            return
        self.tick()
        self._step()
        if deleted:
            del self.nodes[node.name]
            residents = self._seating.drop_node(node.name)
        else:
            self.nodes[node.name] = node
            if old is not None and old.hardware == node.hardware:
                self._seating.update_node(node)
                return
            residents = self._seating.set_node(node)
        for uid in residents:
            self._settle(uid)

    def set_use(self, column: int, shares: Mapping[str, float]) -> None:
        """Write a column of measured use, shares by node name; absent nodes are unknown."""
        self.view.usage[:, column] = self._by_row(shares)

    def set_gpu_memory_free(self, free: Mapping[str, float]) -> None:
        """Write what is measured to be free on each node's emptiest GPU, GiB by node name."""
        self.gpu_memory_free = self._by_row(free)

    def _by_row(self, values: Mapping[str, float]) -> Floats:
        column = np.full(len(self.view.ready), np.nan)
        for name, value in values.items():
            if name in self.rows:
                column[self.rows[name]] = value
        return column

    def report(self, uid: str, *, steps_per_second: float = 0.0, memory: float = 0.0) -> None:
        """Take in what was measured of a pod: its progress, and the memory that it uses, GiB.

        0 is nothing measured. Only a pod that runs makes progress.
        """
        pod = self.pods.get(uid)
        if pod is None or not pod.node:
            return
        self.life.used(uid, memory)
        if steps_per_second > 0.0:
            pod = msgspec.structs.replace(pod, steps_per_second=steps_per_second)
            now, model = float(self.view.clock[0]), self._model_of(pod)
            self.life.progress(pod, model, now, self._neighbours(pod), measured=True)

    # Pods -----------------------------------------------------------------------------------

    def list_pods(self) -> Listing[Pod]:
        """Begin to take in a list of all pods; they come in any order."""
        known = self.pods.keys() | self.life.known()
        return Listing(known, lambda pod: pod.uid, self._listed, self._miss_pod, self._list_over)

    def replace_pods(self, pods: Iterable[Pod]) -> None:
        """Make these the pods that there are."""
        self.list_pods().take(pods)

    def _list_over(self) -> None:
        if not self._listed_once:  # the first list is by name, and the mix is of the latest pods
            self._listed_once = True
            self._seating.recount_requests()

    def _listed(self, pod: Pod) -> None:
        self.apply_pod(pod, listed=True)

    def _miss_pod(self, uid: str) -> None:
        if uid in self._unseen:  # kube-scheduler asked about it since the list was made
            return
        if uid in self.pods:
            self.apply_pod(self.pods[uid], deleted=True)
        else:
            self.life.drop(uid)

    def apply_pod(
        self, pod: Pod, deleted: bool = False, listed: bool = False, seen: bool = True
    ) -> None:
        """Take in one pod as the API server has it now.

        From a list, its times are the API server's; from a watch, the agent's own clock, which
        is finer. A pod that is done leaves the view. One that was not ``seen``, but asked about,
        has yet to come: what it asks for counts then.
        """
        now, uid = self.tick(), pod.uid
        old = self.pods.get(uid)
        if old is None and deleted:
            self.life.drop(uid)
            return
        if self.life.over(uid):
            return
        job_type = self.names.job_type(pod.job_type) if old is None else old.job_type
        if job_type != pod.job_type:
            pod = msgspec.structs.replace(pod, job_type=job_type)
        if pod == old and not deleted and uid not in self._unseen:
            return
        comes = seen and (old is None or uid in self._unseen)
        self._unseen.discard(uid)
        if pod.problem and (old is None or old.problem != pod.problem):
            self.problems += 1
            log.warning("pod %s/%s: %s", pod.namespace, pod.name, pod.problem)
        if deleted or old is None or old.standing != pod.standing:
            self._step()
        if old is None:
            told = self._time_of(pod.created) if listed and pod.created else now
            since = self.life.created(pod, min(told, now), self._time_of(pod.deadline))
            self._seating.add_pod(pod, since)
        elif old.asks != pod.asks:
            self._seating.lift(uid)
        if old is None or old.asks != pod.asks or old.deadline != pod.deadline:
            self._seating.write_request(pod, self._time_of(pod.deadline))
        if comes:
            self._seating.count_request(uid)
        self.pods[uid] = pod
        if pod.gated:
            self.gated[uid] = None
        else:
            self.gated.pop(uid, None)
        started = self._time_of(pod.started) if listed and pod.started else None
        self.life.lives(pod, self._model_of(pod), now, started)
        self._settle(uid)
        if pod.done or deleted:
            self._end(pod, now, deleted, listed)
        elif pod.node:
            self.life.progress(pod, self._model_of(pod), now, self._neighbours(pod))

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
        self.apply_pod(pod, listed=True, seen=False)
        self._unseen.add(pod.uid)
        self._assumed[pod.uid] = "", float(self.view.clock[0]) + self._assume
        return True

    def assume(self, uid: str, node: str) -> None:
        """Count the pending pod as running on ``node`` until the watch shows where it is."""
        if uid not in self.pods or self.pods[uid].node:
            return
        self._assumed.pop(uid, None)  # to the end: it lapses last
        self._assumed[uid] = node, float(self.view.clock[0]) + self._assume
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
        """Take over what the learner knows about speeds and run times."""
        self._step()
        self._seating.set_speeds(speeds)
        for pod in self.pods.values():
            self._seating.write_size(pod)

    def pod_name(self, slot: int) -> str:
        """UID of the pod in a slot; empty for −1 (waiting)."""
        return self.slots.names[slot] if slot >= 0 else ""

    def node_name(self, row: int) -> str:
        """Name of a view row's node; empty for −1 (waiting)."""
        return self.rows.names[row] if row >= 0 else ""

    def _settle(self, uid: str) -> None:
        """Bring the view in line with where the pod is, or is assumed to be."""
        pod = self.pods[uid]
        if pod.node:
            self._assumed.pop(uid, None)
        self._seating.settle(uid, pod.node or self.assumed(uid), self.life.bound_at(uid))

    def _end(self, pod: Pod, now: float, deleted: bool, listed: bool) -> None:
        time = min(self._time_of(pod.finished), now) if listed and pod.finished else now
        ran = self.life.ends(pod, self._model_of(pod), time)
        view, slot, row = self.view, self.slots[pod.uid], self._seating.row_of(pod.uid)
        if ran > 0.0 and row >= 0 and end_of(pod) == "finished":
            kind, model = view.kind[slot], view.gpu_type[row]
            slower = view.slowdown[kind, model] if model >= 0 and pod.gang else 0.0
            record_run_time(view, slot, math.log(ran) - float(slower))
        self._free(pod.uid)
        if deleted:
            self.life.drop(pod.uid)

    def _free(self, uid: str) -> None:
        self._seating.drop_pod(uid)
        del self.pods[uid]
        self._assumed.pop(uid, None)
        self._unseen.discard(uid)
        self.gated.pop(uid, None)

    def _model_of(self, pod: Pod) -> str:
        node = self.nodes.get(pod.node)
        return node.gpu_model if node is not None and pod.gang else ""

    def _neighbours(self, pod: Pod) -> list[str]:
        """Job types on the same GPUs, sorted."""
        if not pod.steps_per_second:
            return []
        return sorted(self.pods[uid].job_type for uid in self._seating.neighbours(pod.uid))
