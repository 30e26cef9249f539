"""The speed model: how fast each kind of work runs on each GPU model, alone and beside neighbours.

``agent.learning.learner`` feeds it the sums that the store keeps, predicts with it for the decision
path (:meth:`SpeedModel.file`) and exchanges its rows with the federation. The model is a Gaussian
over log steps/s (cluster seconds) of each cell (job type, GPUs, GPU model) whose parts are shared:
a level of the job type and of the gang's size, and effects of the GPU model (mean from its data
sheet, of which some job types gain more than others), of the job type on it and of the gang's size
on it. Few readings thus teach much about cells never seen. Observations are additive,
(n, Σx, Σx²) per key, so a federation shares them by adding.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from agent.arrays import Floats, Ints
from agent.cluster.gpus import gpu_spec
from agent.cluster.speeds_file import KindSpeeds, SpeedsFile
from agent.journal import Progress
from common.speeds import MAX_ROWS, NOBODY, Peers, SpeedRow, SpeedTable, speed_key

Kind = tuple[str, int]
"""(job type, GPUs); 1 GPU for shared pods too."""
Sums = Mapping[str, tuple[float, float, float]]
"""(n, Σx, Σx²) of log steps/s by key text."""
MAX_OBSERVATIONS = 1500
"""Cells that enter one prediction, the best observed first: it costs their third power."""


@dataclass(frozen=True)
class SpeedPrior:
    """Standard deviations, in log steps/s, of what the model is made of.

    The defaults are rounded from what makes published measurements of 26 training jobs on three GPU
    generations most likely (https://github.com/stanford-futuredata/gavel).
    """

    level: float = 20.0
    """Level of a job type; so large that only differences count."""
    scaling_mean: float = 0.3
    """Log speed gained by each doubling of a gang, in the mean of all job types; it is between 0
    (steps per batch and GPU) and 0.7 (steps of the whole gang), so the cluster has to teach it."""
    scaling: float = 0.3
    """Deviation of that mean."""
    size: float = 0.15
    """Level of a kind about what its job type and its gang's size say."""
    model: float = 0.1
    """A GPU model about what its data sheet says."""
    unknown_model: float = 0.8
    """A GPU model without a data sheet about the mean of the others."""
    response: float = 0.5
    """How much a job type gains by what the data sheets promise, as a multiple about 1: work that
    keeps a GPU busy gains all of it, work that waits for input next to nothing, on every model."""
    job_on_model: float = 0.2
    """A job type on a GPU model, beyond that."""
    size_on_model: float = 0.13
    """A gang's size on a GPU model."""
    cell: float = 0.18
    """What is left of each cell."""
    reading: float = 0.1
    """One reading of a cell."""
    peers: float = 0.1
    """A cell of four or more other members about this one's; of fewer it grows as 1/√members."""
    data_sheet: float = 1.1
    """Log speed gained by log √(TFLOP/s · GB/s)."""
    beside: float = 0.55
    """Mean log slow-down beside one neighbour; the next three are its parts' deviations."""
    beside_suffers: float = 0.12
    beside_hurts: float = 0.17
    beside_pair: float = 0.26


def speed_text(job_type: str, gpus: int, model: str) -> str:
    """Key text of work that has its GPUs for itself."""
    return "\t".join(("alone", job_type, str(gpus), model.lower()))


def beside_text(job_type: str, neighbour: str, model: str) -> str:
    """Key text of work that shares one GPU with one neighbour."""
    return "\t".join(("beside", job_type, neighbour, model.lower()))


def sample(reading: Progress) -> tuple[str, float] | None:
    """(key text, log steps/s) of a reading; None where it teaches nothing about a cell.

    Readings beside two and more neighbours are left out: the share of each is not known.
    """
    speed = reading.steps_per_second
    if not (reading.job_type and reading.gpu_model and 0.0 < speed < math.inf):
        return None
    if len(reading.neighbours) > 1:
        return None
    if reading.neighbours:
        text = beside_text(reading.job_type, reading.neighbours[0], reading.gpu_model)
    else:
        text = speed_text(reading.job_type, max(reading.gpus, 1), reading.gpu_model)
    return text, math.log(speed)


class _Observed(NamedTuple):
    """One observed mean: which cell, its value and its variance."""

    row: int
    column: int
    mean: float
    variance: float
    seen: float
    """How often."""
    trusted: bool
    """Whether it is this member's own."""


class Speeds(NamedTuple):
    """Predictions for ``K`` kinds, ``T`` GPU models and ``J`` job types."""

    log_speed: Floats
    """[K, T] log steps/s; where nothing of a kind was seen only differences mean something."""
    slowdown: Floats
    """[K, T] log slow-down against the kind's fastest model, ≥ 0."""
    interference: Floats
    """[J, J] log slow-down of the row's job type beside the column's, ≥ 0."""


def _solve(
    prior_mean: Floats, cross: Floats, joint: Floats, observed: list[_Observed], prior_at: Floats
) -> Floats:
    """Posterior means [M] of cells with ``prior_mean`` [M], robust against odd observations.

    ``cross`` is the prior covariance [M, O] of cells and observations, ``joint`` [O, O] that of
    the observations and ``prior_at`` [O] their prior means. An observation of other members that
    is more than two standard deviations from what all the rest says of it has its variance inflated
    by the fourth power of the excess, so that one that lies counts for nothing.
    """
    if not observed:
        return prior_mean.copy()
    noise = np.array([o.variance for o in observed])
    residual = np.array([o.mean for o in observed]) - prior_at
    trusted = np.array([o.trusted for o in observed])
    inflation = np.ones(len(observed))
    for _ in range(3):
        inverse = np.linalg.inv(joint + np.diag(noise * inflation))
        weighted = inverse @ residual
        # Leave-one-out residual and variance, in closed form, with the noise as first believed.
        precision = np.diag(inverse)
        spread = np.maximum(1.0 / precision - noise * (inflation - 1.0), 1e-12)
        distance = (weighted / precision) ** 2 / spread
        inflation = np.where(trusted, 1.0, np.maximum(1.0, distance / 4.0) ** 2)
    inverse = np.linalg.inv(joint + np.diag(noise * inflation))
    return np.asarray(prior_mean + cross @ (inverse @ residual), np.float64)


class SpeedModel:
    """Predictions from this member's sums and, where there is a federation, the other members'."""

    def __init__(self, prior: SpeedPrior | None = None) -> None:
        self.prior = prior or SpeedPrior()
        self.own: dict[str, tuple[float, float, float]] = {}
        self.peers = NOBODY

    def update(self, sums: Sums) -> None:
        """Take this member's own sums, all of them."""
        self.own = dict(sums)

    def absorb(self, peers: Peers) -> None:
        """Take what is told of other members in place of what was told before."""
        self.peers = peers

    def rows(self) -> SpeedTable:
        """This member's own table under hashed keys: absolute, the best observed if too many."""
        best = sorted(self.own.items(), key=lambda item: (-item[1][0], item[0]))[:MAX_ROWS]
        return {speed_key(text): SpeedRow(*sums) for text, sums in best}

    def _means(self, text: str, row: int, column: int) -> list[_Observed]:
        """What this member and the others saw of one key: none, one or two observations."""
        prior, found = self.prior, []
        reading = prior.reading**2
        own = self.own.get(text)
        if own is not None and own[0] > 0:
            count = min(own[0], 100.0)  # readings of one pod repeat each other's error
            found.append(_Observed(row, column, own[1] / own[0], reading / count, own[0], True))
        if self.peers.members > 0:
            found += self._told(self.peers.rows, text, row, column)
        return found

    def _told(self, table: SpeedTable, text: str, row: int, column: int) -> list[_Observed]:
        """What other members' table says of one key: nothing, or one observation."""
        prior, peer = self.prior, table.get(speed_key(text))
        if peer is None or peer.n <= 0:
            return []
        reading, mean = prior.reading**2, peer.sum_x / peer.n
        # Honest members of like hardware agree; where they do not, the mean is worth less.
        spread = max(peer.sum_x2 / peer.n - mean * mean - reading, 0.0)
        variance = (4.0 * prior.peers**2 + spread) / min(self.peers.members, 4)
        variance += reading / min(peer.n, 100.0)
        return [_Observed(row, column, mean, variance, peer.n, False)]

    def predict(self, kinds: Sequence[Kind], models: Sequence[str]) -> Speeds:
        """Predictions for ``kinds`` on ``models``; job types are in the order of first mention.

        Work without GPUs (0 of them) runs alike everywhere.
        """
        job_types = list(dict.fromkeys(job_type for job_type, _ in kinds))
        log_speed = self._alone(kinds, models)
        slowdown = log_speed.max(axis=1, keepdims=True, initial=-np.inf) - log_speed
        slowdown[[gpus == 0 for _, gpus in kinds]] = 0.0
        return Speeds(log_speed, slowdown, self._beside(job_types, models))

    def _alone(self, kinds: Sequence[Kind], models: Sequence[str]) -> Floats:
        """[K, T] log steps/s."""
        prior, kind_count, model_count = self.prior, len(kinds), len(models)
        if not kind_count or not model_count:
            return np.zeros((kind_count, model_count))
        known, mean = _data_sheets(models, prior.data_sheet)
        observed = [
            o
            for k, (job_type, gpus) in enumerate(kinds)
            for t, model in enumerate(models)
            for o in self._means(speed_text(job_type, gpus, model), k, t)
        ]
        observed = sorted(observed, key=lambda o: -o.seen)[:MAX_OBSERVATIONS]
        jobs = {job_type: j for j, job_type in enumerate(dict.fromkeys(j for j, _ in kinds))}
        job = np.array([jobs[job_type] for job_type, _ in kinds])
        size = np.log2([max(gpus, 1) for _, gpus in kinds])
        model_variance = np.where(known, prior.model, prior.unknown_model) ** 2

        def covariance(k1: Ints, t1: Ints, k2: Ints, t2: Ints) -> Floats:
            a, b, s, u = k1[:, None], k2[None, :], t1[:, None], t2[None, :]
            same_model, same_kind, same_job = s == u, a == b, job[a] == job[b]
            level = (
                prior.level**2 * same_job
                + prior.scaling**2 * size[a] * size[b]
                + prior.size**2 * same_kind
            )
            response = prior.response**2 * same_job * mean[s] * mean[u]
            on_model = (
                model_variance[s]
                + prior.job_on_model**2 * same_job
                + prior.size_on_model**2 * (size[a] == size[b])
                + prior.cell**2 * same_kind
            )
            return np.asarray(level + response + on_model * same_model, np.float64)

        all_k = np.repeat(np.arange(kind_count), model_count)
        all_t = np.tile(np.arange(model_count), kind_count)
        expected = mean[None, :] + prior.scaling_mean * size[:, None]

        def solve() -> Floats:
            k = np.array([o.row for o in observed], np.int64)
            t = np.array([o.column for o in observed], np.int64)
            means = _solve(
                expected.ravel(),
                covariance(all_k, all_t, k, t),
                covariance(k, t, k, t),
                observed,
                expected[k, t],
            )
            return means.reshape(kind_count, model_count)

        means, known_jobs = solve(), {job[o.row] for o in observed}
        # To take a fast place for a slow one costs a little, the other way round ten times as much:
        # so what nobody confirms is believed where it is bad news.
        bad_news = [
            o
            for k, (job_type, gpus) in enumerate(kinds)
            if job[k] in known_jobs  # else not even the level is known that it is less than
            for t, model in enumerate(models)
            for o in self._told(self.peers.unconfirmed, speed_text(job_type, gpus, model), k, t)
            if o.mean < means[k, t]
        ]
        if not bad_news:
            return means
        observed = [*observed, *bad_news][:MAX_OBSERVATIONS]
        return solve()

    def _beside(self, job_types: Sequence[str], models: Sequence[str]) -> Floats:
        """[J, J] log slow-down of the row's job type beside the column's on one GPU."""
        prior, count = self.prior, len(job_types)
        alone = self._alone([(job_type, 1) for job_type in job_types], models)
        _, sheet = _data_sheets(models, prior.data_sheet)
        observed = []
        for a, first in enumerate(job_types):
            read = [self._means(speed_text(first, 1, model), a, 0) for model in models]
            if not any(read):
                continue  # not even the level of its speed is known
            for t, model in enumerate(models):
                unread = prior.job_on_model**2 + (prior.response * sheet[t]) ** 2
                error = prior.cell**2 if read[t] else unread
                for b, second in enumerate(job_types):
                    for o in self._means(beside_text(first, second, model), a, b):
                        slower = float(alone[a, t]) - o.mean
                        variance = o.variance + error
                        observed.append(_Observed(a, b, slower, variance, o.seen, o.trusted))
        observed = sorted(observed, key=lambda o: -o.seen)[:MAX_OBSERVATIONS]

        def covariance(a1: Ints, b1: Ints, a2: Ints, b2: Ints) -> Floats:
            a, c, b, d = a1[:, None], a2[None, :], b1[:, None], b2[None, :]
            out = (
                prior.beside_suffers**2 * (a == c)
                + prior.beside_hurts**2 * (b == d)
                + prior.beside_pair**2 * ((a == c) & (b == d))
                + prior.beside_pair**2
            )
            return np.asarray(out, np.float64)

        all_a, all_b = np.repeat(np.arange(count), count), np.tile(np.arange(count), count)
        seen_a = np.array([o.row for o in observed], np.int64)
        seen_b = np.array([o.column for o in observed], np.int64)
        means = _solve(
            np.full(count * count, prior.beside),
            covariance(all_a, all_b, seen_a, seen_b),
            covariance(seen_a, seen_b, seen_a, seen_b),
            observed,
            np.full(len(observed), prior.beside),
        )
        return np.maximum(means, 0.0).reshape(count, count)

    def file(self, kinds: Sequence[Kind], models: Sequence[str]) -> SpeedsFile:
        """What the decision path reads: predictions for ``kinds`` and, as a prior, for new ones."""
        stranger: Kind = ("\0", 1)  # a job type that no pod can carry
        asked = [*dict.fromkeys(kinds), stranger]
        speeds = self.predict(asked, models)
        job_types = list(dict.fromkeys(job_type for job_type, _ in asked))[:-1]
        return SpeedsFile(
            gpu_models=list(models),
            job_types=job_types,
            kinds=[
                KindSpeeds(job_type=job_type, gpus=gpus, slowdown=row.tolist())
                for (job_type, gpus), row in zip(asked[:-1], speeds.slowdown, strict=False)
            ],
            interference=speeds.interference[:-1, :-1].tolist(),
            prior=speeds.slowdown[-1].tolist(),
            prior_interference=float(speeds.interference[-1, -1]),
        )


def _data_sheets(models: Sequence[str], slope: float) -> tuple[npt.NDArray[np.bool_], Floats]:
    """([T] whether a model has a data sheet, [T] expected log speed, 0 on average)."""
    specs = [gpu_spec(model) for model in models]
    known = np.array([spec is not None for spec in specs])
    logs = np.array(
        [0.0 if s is None else slope * 0.5 * math.log(s.tflops * s.bandwidth) for s in specs]
    )
    if known.any():
        logs = np.where(known, logs - logs[known].mean(), 0.0)
    return known, logs
