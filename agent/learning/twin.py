"""The cluster's own simulator: its nodes, its jobs and the speeds that its speed model predicts.

``agent.learning.learner`` builds a :class:`Twin` from the experience store; the gate compares
policies on it and the learner rolls policies out on it. Windows are a block bootstrap of the
cluster's own arrivals, so that bursts, job mix and rate are its own.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from agent.arrays import Bools, Floats, Ints
from agent.cluster.gpus import gpu_spec
from agent.cluster.growth import MAX_MODELS, UNKNOWN_SPEC
from agent.cluster.records import Node
from agent.cluster.view import GPUS_PER_NODE, gpu_group
from agent.journal import PodEvent
from agent.learning.run_times import Run, fit, job_of, kind_of, runs_of
from agent.learning.speeds import Kind, SpeedModel
from agent.learning.store import Store
from agent.simulator.hardware import SpeedTable, peak_ratio
from agent.simulator.nodes import NO_GPU, NodeMix
from agent.simulator.simulation import Simulation, new_simulation
from agent.simulator.workloads import ANY_TYPE, CPU_ONLY, Workload

LEAST_JOBS = 20
"""Finished jobs from which on the cluster's mix counts as known."""
BLOCK = 20
"""Consecutive arrivals that a window takes together."""
SPEED_ERROR = 0.1
"""Standard deviation, in log steps/s, of the windows' true speeds about the predicted ones."""
_STAND_IN = "p100"  # the engine wants a data sheet; the row is overwritten where there is none


@dataclass(frozen=True)
class Twin:
    """A cluster to try policies on. ``M`` jobs seen, ``K`` kinds, ``T`` GPU models."""

    nodes: NodeMix
    speeds: SpeedTable
    """Predicted speeds, relative within a kind."""
    gpu_spec: Floats
    """[T, 3] TFLOP/s, GB/s and GiB as the live agent describes them."""
    gap: Floats
    """[M] seconds since the arrival before."""
    kind: Ints
    """[M] −1 for work without a GPU."""
    seconds: Floats
    """[M] run time on the kind's fastest model."""
    size: Floats
    """[M] log run time of the other runs of the same work, log s; NaN where they tell nothing."""
    trust: Floats
    """[M] what ``size`` counts against the kind's estimate, 0 to 1."""
    request: Floats
    """[M, 5] CPU, memory, whole GPUs, share of one GPU, memory on each GPU."""
    slack: Floats
    """[M] seconds from arrival to deadline; infinite where there is none."""
    allowed: Ints
    """[M] bit mask of the GPU models that the job accepts; −1 for any."""
    memory_used: Floats
    """[M] the most memory that the job was measured to use, GiB; NaN where nobody measured."""
    history: Floats
    """[K + 1, 2] count and sum of finished log run times by kind, work without GPUs last."""
    oom_share: float
    """Share of jobs whose memory peak passes the request."""

    def workload(self, *, seed: int, window: int, jobs: int) -> Workload:
        """``jobs`` jobs of a window: blocks of consecutive arrivals, drawn with replacement."""
        rows, rng = self._drawn(seed, window, jobs)
        arrival = np.cumsum(self.gap[rows])
        arrival -= arrival[0]
        request, kind = self.request[rows], self.kind[rows]
        fastest = np.append(self.speeds.speed.max(axis=1), 1.0)[kind]
        # The same job is never met twice; 20 % keeps its kind's size.
        seconds = self.seconds[rows] * rng.lognormal(0.0, 0.2, jobs)
        exceed = min(max(self.oom_share, 1e-3), 0.3)
        ratio, used = peak_ratio(rng, jobs, exceed=exceed), self.memory_used[rows]
        return Workload(
            arrival=arrival,
            kind=kind,
            steps=seconds * fastest,
            cpu=request[:, 0],
            memory=request[:, 1],
            gpus=request[:, 2].astype(np.int64),
            share=request[:, 3],
            gpu_memory=request[:, 4],
            memory_peak=np.where(np.isnan(used), request[:, 1] * ratio, used),
            gpu_memory_peak=request[:, 4] * peak_ratio(rng, jobs, exceed=exceed),
            deadline=arrival + self.slack[rows],
            allowed=self.allowed[rows],
        )

    def _drawn(self, seed: int, window: int, jobs: int) -> tuple[Ints, np.random.Generator]:
        """([jobs] rows of a window, the generator that its other draws come from)."""
        rng = np.random.default_rng([seed, window, 0])
        blocks = -(-jobs // BLOCK)
        starts = rng.integers(len(self.gap), size=blocks)
        rows = ((starts[:, None] + np.arange(BLOCK)) % len(self.gap)).ravel()[:jobs]
        return rows, rng

    def simulation(self, *, seed: int, window: int, jobs: int) -> Simulation:
        """The window before its first arrival; the agent in it knows predictions, not the truth."""
        rng = np.random.default_rng([seed, window, 1])
        error = rng.normal(0.0, SPEED_ERROR, self.speeds.speed.shape)
        truth = SpeedTable(
            **{**vars(self.speeds), "speed": self.speeds.speed * np.exp(error)},
        )
        workload = self.workload(seed=seed, window=window, jobs=jobs)
        simulation = new_simulation(
            workload, self.nodes, truth, seed=seed + window, known_speeds=False
        )
        view, kinds = simulation.cluster, len(self.speeds)
        rows, _ = self._drawn(seed, window, jobs)
        view.size[:], view.trust[:] = self.size[rows], self.trust[rows]
        view.gpu_spec[:] = self.gpu_spec
        view.slowdown[:kinds] = -np.log(self.speeds.relative)
        job_types = len(self.speeds.job_types)
        if len(self.speeds.beside):
            view.interference[:job_types, :job_types] = -np.log(self.speeds.beside).mean(axis=0)
        for k in range(kinds + 1):
            view.history_kind[k] += self.history[k]
            view.history_type[view.kind_type[k]] += self.history[k]
            view.history_gpus[gpu_group(int(view.kind_gpus[k]))] += self.history[k]
        return simulation

    @property
    def mean_seconds(self) -> float:
        """Mean run time on the fastest model."""
        return float(self.seconds.mean())


def gpu_models(nodes: Sequence[Node]) -> list[str]:
    """The GPU models of the nodes, sorted; GPUs without a label are one model without a name."""
    return sorted({node.gpu_model for node in nodes if node.gpus})


def _mask(accepted: Sequence[str], models: Sequence[str]) -> int:
    """The bit mask of a pod's accepted models; ANY_TYPE for a pod that names none."""
    if not accepted:
        return ANY_TYPE
    return sum(1 << t for t, name in enumerate(models[:MAX_MODELS]) if name in accepted)


def known_kinds(store: Store, limit: int = 2000) -> list[Kind]:
    """Kinds among the newest ``limit`` pods, the most frequent first."""
    counts: dict[Kind, int] = {}
    for event in store.latest_events("created", limit):
        kind = kind_of(event)
        counts[kind] = counts.get(kind, 0) + 1
    return sorted(counts, key=lambda kind: (-counts[kind], kind))


def build(
    store: Store, model: SpeedModel, nodes: Sequence[Node], *, limit: int = 1000
) -> Twin | None:
    """The twin of a cluster by its newest ``limit`` pods; None while too little is known.

    That is: no nodes, fewer than ``LEAST_JOBS`` finished pods, or no pod that the nodes could hold.
    """
    # A pod that replaced another is its job going on, which the simulator does by itself.
    created = [event for event in store.latest_events("created", limit) if not event.attempt]
    finished = {job_of(event): event for event in store.latest_events("finished", limit)}
    if not nodes or len(finished) < LEAST_JOBS or len(created) < 2:
        return None
    models = gpu_models(nodes)
    kinds = list(dict.fromkeys(kind_of(event) for event in created if kind_of(event)[1] > 0))
    table = _table(model, kinds, models)
    row = {kind: k for k, kind in enumerate(kinds)}
    runs = runs_of(created, finished, _slower(row, table, models))
    seconds, history = _sizes(created, runs, row)
    known = fit([run for run in runs if run is not None])
    own = [
        known.own(event.work, math.nan if run is None else run.log_seconds)
        for event, run in zip(created, runs, strict=True)
    ]
    size, trust = np.array(own).T
    mix = _mix(nodes, models)
    request = np.array(
        [
            (e.cpu, e.memory, e.gpus if not e.gpu_share else 0, e.gpu_share, e.gpu_memory)
            for e in created
        ]
    )
    kind = np.array([row.get(kind_of(event), CPU_ONLY) for event in created], np.int64)
    gap = np.diff(np.array([event.time for event in created]), prepend=np.nan)
    usual = float(np.nanmedian(np.maximum(gap, 0.0)))
    gap = np.where(np.isnan(gap), usual, np.maximum(gap, 0.0))
    allowed = np.array([_mask(event.gpu_models, models) for event in created], np.int64)
    keep = _placeable(request, allowed, mix)
    if not keep.any():
        return None
    ended = len(finished) + store.counter("pods_oom")
    return Twin(
        nodes=mix,
        speeds=table,
        gpu_spec=np.array([_described(m, nodes) for m in models], np.float64).reshape(-1, 3),
        gap=gap[keep],
        kind=kind[keep],
        seconds=seconds[keep],
        size=size[keep],
        trust=trust[keep],
        request=request[keep],
        slack=np.array([event.deadline - event.time for event in created])[keep],
        allowed=allowed[keep],
        memory_used=_memory_used(created, finished)[keep],
        history=history,
        oom_share=store.counter("pods_oom") / max(ended, store.counter("pods_finished"), 1.0),
    )


def _described(model: str, nodes: Sequence[Node]) -> tuple[float, float, float]:
    """TFLOP/s, GB/s and GiB of a GPU as ``agent.cluster.growth`` describes it to the live agent."""
    spec = gpu_spec(model)
    if spec is None:
        labels = (node.gpu_memory for node in nodes if node.gpu_model == model)
        return UNKNOWN_SPEC[0], UNKNOWN_SPEC[1], next(labels, 0.0) or UNKNOWN_SPEC[2]
    return spec.tflops, spec.bandwidth, spec.memory


def _table(model: SpeedModel, kinds: Sequence[Kind], models: Sequence[str]) -> SpeedTable:
    """Predicted speeds with the fastest model of each kind at one step per second."""
    predicted = model.predict(kinds, models)
    job_types = tuple(dict.fromkeys(job_type for job_type, _ in kinds))
    names = [spec.name if (spec := gpu_spec(m)) else _STAND_IN for m in models]
    # One interference for all GPU models: the speed model does not tell them apart.
    beside = np.repeat(np.exp(-predicted.interference)[None], len(models), axis=0)
    return SpeedTable(
        gpu_types=tuple(names),
        job_types=job_types,
        kind_type=np.array([job_types.index(job_type) for job_type, _ in kinds], np.int64),
        kind_gpus=np.array([gpus for _, gpus in kinds], np.int64),
        speed=np.exp(-predicted.slowdown),
        beside=beside,
        fits=np.ones(beside.shape, np.bool_),
    )


def _slower(
    row: Mapping[Kind, int], table: SpeedTable, models: Sequence[str]
) -> Callable[[Kind, str], float]:
    """Predicted log slow-down by kind and GPU model; 0 where either is not in the table."""
    slowdown = -np.log(table.relative) if len(table) else np.zeros((0, len(models)))

    def slower(kind: Kind, model: str) -> float:
        known = kind in row and model in models
        return float(slowdown[row[kind], models.index(model)]) if known else 0.0

    return slower


def _sizes(
    created: Sequence[PodEvent], runs: Sequence[Run | None], row: Mapping[Kind, int]
) -> tuple[Floats, Floats]:
    """([M] run seconds on the fastest model, [K + 1, 2] the history of finished ones).

    A pod that has not finished gets its kind's mean, or that of all where its kind is new.
    """
    logs = np.array([np.nan if run is None else run.log_seconds for run in runs])
    known = ~np.isnan(logs)
    usual = float(logs[known].mean()) if known.any() else math.log(3600.0)
    history = np.zeros((len(row) + 1, 2))
    ks = np.array([row.get(kind_of(event), len(row)) for event in created])
    np.add.at(history[:, 0], ks[known], 1.0)
    np.add.at(history[:, 1], ks[known], logs[known])
    mean = np.where(history[:, 0] > 0, history[:, 1] / np.maximum(history[:, 0], 1.0), usual)
    return np.exp(np.where(known, logs, mean[ks])), history


def _memory_used(created: Sequence[PodEvent], finished: dict[str, PodEvent]) -> Floats:
    """[M] GiB, of jobs that finished and were measured; NaN for others."""
    ends = [finished.get(job_of(event)) for event in created]
    return np.array([end.memory_used if end and end.memory_used else np.nan for end in ends])


def _mix(nodes: Sequence[Node], models: Sequence[str]) -> NodeMix:
    ready = [node for node in nodes if node.ready] or list(nodes)
    gpus = [min(node.gpus, GPUS_PER_NODE) for node in ready]
    return NodeMix(
        capacity=np.array(
            [(n.cpu, n.memory, g) for n, g in zip(ready, gpus, strict=True)], np.float64
        ),
        gpu_type=np.array(
            [models.index(n.gpu_model) if g else NO_GPU for n, g in zip(ready, gpus, strict=True)],
            np.int64,
        ),
        # A node without the label has what its data sheet says, as in the live cluster's view.
        gpu_memory=np.array(
            [(n.gpu_memory or _described(n.gpu_model, nodes)[2]) if n.gpus else 0.0 for n in ready],
            np.float64,
        ),
        names=tuple(node.name for node in ready),
    )


def _placeable(request: Floats, allowed: Ints, nodes: NodeMix) -> Bools:
    """[M] whether some empty node can hold the job."""
    gpus = request[:, 2] + np.ceil(request[:, 3])
    fits = np.zeros(len(request), np.bool_)
    for (cpu, memory, count), model, gpu_memory in zip(
        nodes.capacity, nodes.gpu_type, nodes.gpu_memory, strict=True
    ):
        room = (request[:, 0] <= cpu) & (request[:, 1] <= memory) & (gpus <= count)
        suits = (request[:, 4] <= gpu_memory) & (allowed >> max(model, 0) & 1 == 1)
        fits |= room & ((gpus == 0) | suits)
    return fits
