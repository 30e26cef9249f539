"""Keeps, for gated pods, which nodes each may go to: rows of ``View.scopes``.

Used by ``agent.cluster.seating``. Pods that say the same of nodes share a row, so a row is worked
out once for each pod template and then follows the nodes. Ungated pods are kube-scheduler's to
filter and have row 0, which is all nodes.
"""

from collections import Counter

import numpy as np

from agent.arrays import Bools, Ints
from agent.cluster.constraints import Scope
from agent.cluster.records import Node

EVERYWHERE = 0


class Scopes:
    """Rows by scope, counted by the pods that hold them."""

    def __init__(self) -> None:
        self._rows: dict[Scope, int] = {}
        self._holders: Counter[Scope] = Counter()
        self._held: dict[str, Scope] = {}
        self._free: list[int] = []
        self.size = 1
        """Rows that there must be."""
        self.reach: Ints = np.full(1, -1, np.int64)
        """[S] bit mask of the GPU models on the nodes of each row; −1 in row 0."""

    def hold(self, uid: str, scope: Scope | None) -> tuple[int, bool]:
        """The row of the pod's scope, and whether it is new and :meth:`fill` has to write it.

        None gives back what it held.
        """
        if self._held.get(uid) != scope:
            self.release(uid)
        if scope is None:
            return EVERYWHERE, False
        if uid not in self._held:
            self._held[uid] = scope
            self._holders[scope] += 1
        row = self._rows.get(scope)
        if row is not None:
            return row, False
        if self._free:
            row = self._free.pop()
        else:
            row, self.size = self.size, self.size + 1
            self.reach = np.append(self.reach, 0)
        self._rows[scope] = row
        return row, True

    def release(self, uid: str) -> None:
        """The pod is gone, or says something else now."""
        scope = self._held.pop(uid, None)
        if scope is None:
            return
        self._holders[scope] -= 1
        if not self._holders[scope]:
            del self._holders[scope]
            self._free.append(self._rows.pop(scope))

    def fill(self, scope: Scope, nodes: dict[int, Node], scopes: Bools, gpu_type: Ints) -> None:
        """Write a scope's row. ``nodes`` by row; ``scopes`` [S, N]; ``gpu_type`` [N]."""
        row = self._rows[scope]
        scopes[row] = False
        for column, node in nodes.items():
            scopes[row, column] = scope.admits(node.name, node.labels, node.taints)
        self.reach[row] = _reach(scopes[row], gpu_type)

    def follow(self, column: int, node: Node | None, scopes: Bools, gpu_type: Ints) -> bool:
        """Write a node's column, None where it is gone; True where :attr:`reach` changed."""
        before = self.reach.copy()
        for scope, row in self._rows.items():
            was = bool(scopes[row, column])
            now = node is not None and scope.admits(node.name, node.labels, node.taints)
            scopes[row, column] = now
            if was:  # another model may have been its last
                self.reach[row] = _reach(scopes[row], gpu_type)
            elif now and gpu_type[column] >= 0:
                self.reach[row] |= 1 << int(gpu_type[column])
        return not np.array_equal(before, self.reach)


def _reach(inside: Bools, gpu_type: Ints) -> int:
    types = np.unique(gpu_type[inside])
    return sum(1 << int(model) for model in types if model >= 0)
