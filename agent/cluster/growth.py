"""Gives new nodes, pods, job types and GPU models their place in a view, which grows with them.

Called by ``agent.cluster.state`` alone; the simulator knows its sizes beforehand.
"""

import math
from collections.abc import Callable

import numpy as np

from agent.arrays import Floats, Ints
from agent.cluster.speeds_file import SpeedsFile
from agent.cluster.view import PENDING, View, empty_view

Spec = tuple[float, float, float]
"""FP32 TFLOP/s, memory GB/s and memory GiB of one GPU."""
SpecLookup = Callable[[str], Spec | None]
"""Data sheet of a GPU model by its product name; None where it is unknown."""
UNKNOWN_SPEC: Spec = (15.7, 900.0, 16.0)
"""A middling GPU (a V100), for models whose data sheet is unknown."""


def grown(
    view: View, *, nodes: int, pods: int, gpu_spec: Floats, kind_type: Ints, kind_gpus: Ints
) -> View:
    """A view of at least the old sizes that holds all that ``view`` held, at the same places."""
    new = empty_view(
        nodes=nodes, pods=pods, gpu_spec=gpu_spec, kind_type=kind_type, kind_gpus=kind_gpus
    )
    given = {"gpu_spec", "kind_type", "kind_gpus"}
    for name, old, array in zip(View._fields, view, new, strict=True):
        if name not in given:
            array[tuple(slice(size) for size in old.shape)] = old
    return new


class Catalogue:
    """Names of GPU models, job types and kinds, and the rows of a view that stand for them."""

    def __init__(self, spec: SpecLookup) -> None:
        self._lookup = spec
        self._specs: list[Spec] = []
        self.models: dict[str, int] = {}
        """Column of ``slowdown`` by GPU model."""
        self.job_types: dict[str, int] = {}
        """Row of ``interference`` by job type."""
        self.kinds: dict[tuple[str, int], int] = {}
        """Row of ``slowdown`` by (job type, GPUs)."""

    def model(self, name: str, memory: float) -> bool:
        """Know the GPU model; True where it was new. ``memory`` (GiB) serves an unknown one."""
        if name in self.models:
            return False
        spec = self._lookup(name)
        if spec is None:
            spec = (UNKNOWN_SPEC[0], UNKNOWN_SPEC[1], memory or UNKNOWN_SPEC[2])
        self.models[name] = len(self.models)
        self._specs.append(spec)
        return True

    def kind(self, job_type: str, gpus: int) -> bool:
        """Know the kind of work; True where it was new."""
        if (job_type, gpus) in self.kinds:
            return False
        self.job_types.setdefault(job_type, len(self.job_types))
        self.kinds[job_type, gpus] = len(self.kinds)
        return True

    def allowed(self, models: tuple[str, ...]) -> int:
        """Bit mask of the GPU models that a pod accepts; −1 for any."""
        if not models:
            return -1
        return sum(1 << self.models[name] for name in set(models) if name in self.models)

    def resize(self, view: View, *, nodes: int, pods: int) -> View:
        """The view with these sizes and a row for all that is known."""
        return grown(
            view,
            nodes=nodes,
            pods=pods,
            gpu_spec=np.array(self._specs, np.float64).reshape(-1, 3),
            kind_type=np.array([self.job_types[job] for job, _ in self.kinds], np.int64),
            kind_gpus=np.array([gpus for _, gpus in self.kinds], np.int64),
        )


def clear_node(view: View, row: int) -> None:
    """Make a row that of no node: nothing on it, nothing fits it."""
    view.capacity[row] = view.requested[row] = view.gpu_memory[row] = 0.0
    view.gpu_share[row], view.gpu_memory_requested[row] = 1.0, 0.0
    view.usage[row], view.ready[row], view.gpu_type[row] = np.nan, False, -1


def sort_pending(view: View) -> None:
    """Put the pod that was enqueued last where its arrival belongs."""
    queue = view.queue[PENDING, : view.counts[PENDING]]
    arrival = view.arrival[queue]
    if len(queue) > 1 and arrival[-1] < arrival[-2]:
        queue[:] = queue[np.argsort(arrival, kind="stable")]


def spec_prior(gpu_spec: Floats) -> Floats:
    """[T] log slow-down against the cluster's best model, from data sheets alone.

    Speed is taken as the geometric mean of arithmetic and memory rate, which bound a training
    step from either side.
    """
    if not len(gpu_spec):
        return np.zeros(0)
    speed = 0.5 * (np.log(gpu_spec[:, 0]) + np.log(gpu_spec[:, 1]))
    return np.asarray(speed.max() - speed, np.float64)


def fill_speeds(view: View, speeds: SpeedsFile | None, names: Catalogue) -> None:
    """Write ``slowdown`` and ``interference`` from the learner's file, by name.

    What the file does not cover gets its prior, and a model that it does not know the data
    sheet's. The rows are shifted so that the fastest model *of this cluster* is at 0.
    """
    sheet = spec_prior(view.gpu_spec)
    view.interference[:] = 0.0 if speeds is None else speeds.prior_interference
    if speeds is None:
        view.slowdown[:] = sheet
        return
    column = {model: at for at, model in enumerate(speeds.gpu_models)}
    known = [(at, column[model]) for model, at in names.models.items() if model in column]
    rows = {(kind.job_type, kind.gpus): kind.slowdown for kind in speeds.kinds}
    for kind, k in names.kinds.items():
        row = rows.get(kind, speeds.prior)
        values = sheet.copy()
        if row and known:
            # Models outside the file keep their data-sheet distance from those inside.
            shift = math.fsum(row[there] - sheet[here] for here, there in known) / len(known)
            values += shift
            for here, there in known:
                values[here] = row[there]
            values -= values.min()
        view.slowdown[k] = values
    place = {job: at for at, job in enumerate(speeds.job_types)}
    for first, a in names.job_types.items():
        for second, b in names.job_types.items():
            if first in place and second in place:
                view.interference[a, b] = speeds.interference[place[first]][place[second]]
