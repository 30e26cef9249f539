"""How much longer a gated pod waits than it had to: the queue lifts a gate beyond a set limit.

Used by ``agent.scheduling.queue``. A pod's extra wait begins at the first moment at which it could
have started had it been first in line: when some node has room for it beside the pods that were
placed before its own turn began. Its turn begins once no other controller's gate holds it. What
was placed later counts for nothing, so small pods that go ahead again and again cannot hide that a
large one is kept waiting; while the cluster is truly full, nobody's extra wait grows.
"""

import contextlib
from collections.abc import Iterable
from pathlib import Path

import msgspec
import numpy as np

from agent.arrays import Bools, Floats, Ints
from agent.cluster.records import GATE, Pod
from agent.cluster.state import ClusterState
from agent.cluster.view import GPUS, RUNNING, SHARE, View

MOST = 256
"""Pods that one look finds out about; the others have their turn in the next ones."""
_EPSILON = 1e-6


class _Turn(msgspec.Struct):
    began: float | None = None
    """When no other gate held the pod any more, cluster seconds; None while one does."""
    possible: float | None = None
    """When it could first have started."""
    hopeless: bool = False
    """Whether no node that is known could hold it even if it were empty."""


class ExtraWait:
    """The gated pods of one cluster, by UID."""

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        self._turns: dict[str, _Turn] = {}
        self._next = 0
        self._written = b""

    def look(self, pods: Iterable[Pod]) -> None:
        """Take in the gated pods as they are at the state's present time."""
        view, found = self._state.view, {}
        for pod in pods:
            known = self._turns.get(pod.uid)
            turn = found[pod.uid] = _Turn() if known is None or pod.gates != (GATE,) else known
            if turn.began is None and pod.gates == (GATE,):
                # Without other gates from the start, or freed of them since the last look.
                arrival = view.arrival[self._state.slots[pod.uid]]
                turn.began = float(arrival if known is None else view.clock[0])
        self._turns = found
        unknown = [
            uid for uid, turn in found.items() if turn.began is not None and turn.possible is None
        ]
        if unknown:
            first = self._next % len(unknown)
            chosen = (unknown[first:] + unknown[:first])[:MOST]
            self._next = first + len(chosen)
            self._find([(found[uid].began or 0.0, uid) for uid in chosen])

    def of(self, uid: str) -> float:
        """The pod's extra wait until the state's present time, cluster seconds; 0 where none."""
        turn = self._turns.get(uid)
        if turn is None or turn.possible is None:
            return 0.0
        return float(self._state.view.clock[0]) - turn.possible

    def hopeless(self, uid: str) -> bool:
        """Whether no node that is known could hold the pod even if it were empty."""
        return uid in self._turns and self._turns[uid].hopeless

    def _find(self, turns: list[tuple[float, str]]) -> None:
        """Which of the pods, by when their turn began, could start now had they been first?"""
        view, now = self._state.view, float(self._state.view.clock[0])
        running: Ints = view.queue[RUNNING, : view.counts[RUNNING]]
        running = running[np.argsort(view.start[running], kind="stable")]
        started: Floats = view.start[running]
        asks = view.request[running, : GPUS + 1]
        asks[:, GPUS] += view.request[running, SHARE]
        free, placed = view.capacity.copy(), 0
        for began, uid in sorted(turns):
            earlier = int(np.searchsorted(started, began, side="right"))
            np.subtract.at(free, view.node[running[placed:earlier]], asks[placed:earlier])
            placed, slot = earlier, self._state.slots[uid]
            turn, nodes = self._turns[uid], _accepts(view, slot)
            if (view.ready & nodes & _room(view, slot, free)).any():
                turn.possible = now
            turn.hopeless = not (nodes & _room(view, slot, view.capacity)).any()

    # Over a restart -------------------------------------------------------------------------

    def read(self, path: Path) -> None:
        """Go on from what was written of :meth:`content`; what cannot be read begins anew."""
        with contextlib.suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
            self._turns = msgspec.json.decode(path.read_bytes(), type=dict[str, _Turn])

    def content(self) -> bytes | None:
        """What :meth:`read` needs of a file; None where nothing has changed since the last call."""
        content = msgspec.json.encode({u: t for u, t in self._turns.items() if t.possible})
        if content == self._written:
            return None
        self._written = content
        return content


def _accepts(view: View, slot: int) -> Bools:
    """[N] nodes that the pod may go to by its selectors, tolerations and GPU models."""
    nodes: Bools = view.scopes[view.scope[slot]].copy()
    if view.request[slot, GPUS] > 0.0 or view.request[slot, SHARE] > 0.0:
        models = np.maximum(view.gpu_type, 0)
        nodes &= (view.gpu_type >= 0) & ((view.allowed[slot] >> models) & 1 == 1)
        nodes &= view.gpu_memory + _EPSILON >= view.request[slot, 4]
    return nodes


def _room(view: View, slot: int, free: Floats) -> Bools:
    """[N] nodes where ``free`` [N, 3] holds what the pod asks for.

    GPUs are counted in sum: where only parts of several are free this finds room too early, which
    can only shorten a wait.
    """
    ask = view.request[slot, : GPUS + 1].copy()
    ask[GPUS] += view.request[slot, SHARE]
    return np.asarray((free + _EPSILON >= ask).all(axis=1))
