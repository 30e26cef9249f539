"""Gives new nodes, pods, job types and GPU models their place in a view, which grows with them.

Called by ``agent.cluster.seating`` alone; the simulator knows its sizes beforehand.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable

import numpy as np

from agent.arrays import Floats
from agent.cluster.speeds_file import SpeedsFile
from agent.cluster.view import GPUS_PER_NODE, View, empty_view, gpu_group

log = logging.getLogger(__name__)

Spec = tuple[float, float, float]
"""FP32 TFLOP/s, memory GB/s and memory GiB of one GPU."""
SpecLookup = Callable[[str], Spec | None]
"""Data sheet of a GPU model by its product name; None where it is unknown."""
UNKNOWN_SPEC: Spec = (15.7, 900.0, 16.0)
"""A middling GPU (a V100), for models whose data sheet is unknown."""


def grown(view: View, *, nodes: int, pods: int) -> View:
    """A view of at least the old sizes that holds all that ``view`` held, at the same places."""
    new = empty_view(
        nodes=nodes,
        pods=pods,
        gpu_spec=view.gpu_spec,
        kind_type=view.kind_type,
        kind_gpus=view.kind_gpus,
    )._replace(scopes=np.ones((len(view.scopes), nodes), np.bool_))
    for old, array in zip(view, new, strict=True):
        array[tuple(slice(size) for size in old.shape)] = old
    return new


MAX_MODELS = 30
"""GPU models that are told apart, as many as a decision has room for candidates of
(``agent.scheduling.candidates.MAX_QUEUE_CANDIDATES``); further ones share the last."""
OTHER = "other"
"""Job type of pods whose own is one too many."""


class Catalogue:
    """Names of GPU models, job types and kinds, and the rows of a view that stand for them.

    Whoever may create pods chooses job types, and each costs a row and a column, so there is a
    limit; what comes beyond it is counted in :attr:`crowded` and shares one place.
    """

    def __init__(self, spec: SpecLookup, max_job_types: int = 256) -> None:
        self._lookup, self._limit = spec, max_job_types
        self._specs: list[Spec] = []
        self.crowded: Counter[str] = Counter()
        """Pods whose job type is called OTHER, and GPU models that share the last column."""
        self.models: dict[str, int] = {}
        """Column of ``slowdown`` by GPU model."""
        self.job_types: dict[str, int] = {}
        """Row of ``interference`` by job type."""
        self.kinds: dict[tuple[str, int], int] = {}
        """Row of ``slowdown`` by (job type, GPUs)."""

    def model(self, name: str, memory: float) -> bool:
        """Know the GPU model; True where it was new, with a column of its own or not.

        ``memory`` (GiB) serves one whose data sheet is unknown.
        """
        if name in self.models:
            return False
        if len(self._specs) == MAX_MODELS:
            self.models[name] = MAX_MODELS - 1
            self.crowded["gpu_models"] += 1
            log.warning("GPU model %s is taken for an unknown one: %d are known", name, MAX_MODELS)
            return True
        spec = self._lookup(name) if len(self._specs) < MAX_MODELS - 1 else None
        if spec is None:
            spec = (UNKNOWN_SPEC[0], UNKNOWN_SPEC[1], memory or UNKNOWN_SPEC[2])
        self.models[name] = len(self._specs)
        self._specs.append(spec)
        return True

    def job_type(self, name: str) -> str:
        """What the job type of a new pod is called here: its name, or OTHER past the limit."""
        if name in self.job_types or name == OTHER or len(self.job_types) < self._limit:
            return name
        if not self.crowded["job_types"]:
            log.warning("more than %d job types: %s and others count as one", self._limit, name)
        self.crowded["job_types"] += 1
        return OTHER

    def kind(self, job_type: str, gpus: int) -> bool:
        """Know the kind of work; True where it was new."""
        key = job_type, _gang(gpus)
        if key in self.kinds:
            return False
        self.job_types.setdefault(job_type, len(self.job_types))
        self.kinds[key] = len(self.kinds)
        return True

    def row(self, job_type: str, gpus: int) -> int:
        """Row of a kind that is known."""
        return self.kinds[job_type, _gang(gpus)]

    def allowed(self, models: tuple[str, ...]) -> int:
        """Bit mask of the GPU models that a pod accepts; −1 for any."""
        if not models:
            return -1
        columns = {self.models[name] for name in models if name in self.models}
        return sum(1 << column for column in columns)

    def widen(self, view: View, speeds: SpeedsFile | None) -> View:
        """The view with a row or column for every kind, job type and model that is known.

        The arrays of nodes and pods are the same ones: new kinds of work come often, and a view
        of many pods is large.
        """
        before = view
        kinds, models, jobs = len(self.kinds), len(self._specs), len(self.job_types)
        view = before._replace(
            gpu_spec=np.array(self._specs, np.float64).reshape(-1, 3),
            kind_type=np.array([self.job_types[job] for job, _ in self.kinds], np.int64),
            kind_gpus=np.array([gpus for _, gpus in self.kinds], np.int64),
            slowdown=np.zeros((kinds, models)),
            interference=np.zeros((jobs, jobs)),
            history_kind=np.zeros((kinds, 2)),
            history_type=np.zeros((jobs, 2)),
        )
        view.history_kind[: len(before.history_kind)] = before.history_kind
        view.history_type[: len(before.history_type)] = before.history_type
        first = 0
        if before.slowdown.shape[1] == models:  # else the data sheets' distances are other ones
            first = len(before.slowdown)
            view.slowdown[:first] = before.slowdown
        fill_speeds(view, speeds, self, first)
        fill_history(view, speeds, self, len(before.history_kind))
        return view


def _gang(gpus: int) -> int:
    """Gangs that no node holds are told apart by powers of two, so that there are few of them."""
    return gpus if gpus <= GPUS_PER_NODE else 1 << (gpus - 1).bit_length()


def clear_node(view: View, row: int) -> None:
    """Make a row that of no node: nothing on it, nothing fits it."""
    view.capacity[row] = view.requested[row] = view.gpu_memory[row] = 0.0
    view.gpu_share[row], view.gpu_memory_requested[row] = 1.0, 0.0
    view.usage[row], view.ready[row], view.gpu_type[row] = np.nan, False, -1


def spec_prior(gpu_spec: Floats) -> Floats:
    """[T] log slow-down against the cluster's best model, from data sheets alone.

    Speed is taken as the geometric mean of arithmetic and memory rate, which bound a training
    step from either side.
    """
    if not len(gpu_spec):
        return np.zeros(0)
    speed = 0.5 * (np.log(gpu_spec[:, 0]) + np.log(gpu_spec[:, 1]))
    return np.asarray(speed.max() - speed, np.float64)


def fill_speeds(view: View, speeds: SpeedsFile | None, names: Catalogue, first: int = 0) -> None:
    """Write ``interference`` and ``slowdown`` from row ``first`` on, from the learner's file.

    What the file does not cover gets its prior, and a model that it does not know the data
    sheet's. The rows are shifted so that the fastest model *of this cluster* is at 0.
    """
    sheet = spec_prior(view.gpu_spec)
    view.interference[:] = 0.0 if speeds is None else speeds.prior_interference
    if speeds is None:
        view.slowdown[first:] = sheet
        return
    column = {model: at for at, model in enumerate(speeds.gpu_models)}
    known = [(at, column[model]) for model, at in names.models.items() if model in column]
    rows = {(kind.job_type, kind.gpus): kind.slowdown for kind in speeds.kinds}
    for kind, k in names.kinds.items():
        if k < first:
            continue
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
    both = [(here, place[job]) for job, here in names.job_types.items() if job in place]
    if both:
        here, there = np.array(both, np.int64).T
        view.interference[np.ix_(here, here)] = np.array(speeds.interference)[np.ix_(there, there)]


def fill_history(view: View, speeds: SpeedsFile | None, names: Catalogue, first: int = 0) -> None:
    """Write what the learner's file knows of run times into the history, from kind ``first`` on.

    The learner has seen every run that its agent ever told of, this process those since its start:
    where the file knows a kind, its count replaces the one here.
    """
    for kind in speeds.kinds if speeds is not None else ():
        k = names.kinds.get((kind.job_type, kind.gpus), -1)
        if k >= first and kind.runs:
            view.history_kind[k] = kind.runs, kind.runs * kind.log_seconds
    view.history_type[:] = view.history_gpus[:] = 0.0
    np.add.at(view.history_type, view.kind_type, view.history_kind)
    groups = [gpu_group(int(gpus)) for gpus in view.kind_gpus]
    np.add.at(view.history_gpus, np.array(groups, np.int64), view.history_kind)
