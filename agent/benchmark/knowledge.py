"""What an agent has learned of its cluster before it is judged; called by the suites.

It lives through the train windows of its cluster, in order: every job that starts tells its steps a
second, with noise, and every one that ends how long it ran. From the first its speed model learns,
from the second the expected run times. Nothing else is known of the true speeds.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from agent.arrays import Floats
from agent.benchmark.suite import Say
from agent.cluster.view import PENDING, gpu_group
from agent.learning.speeds import SpeedModel, Speeds, speed_text
from agent.scheduling.candidates import MAX_QUEUE_CANDIDATES, new_candidates
from agent.scheduling.decision import make_policy, next_placement, seed_kernels
from agent.simulator import splits
from agent.simulator.engine import advance, place
from agent.simulator.hardware import SPEED_FILES, SpeedTable, load_speeds
from agent.simulator.nodes import NodeMix
from agent.simulator.simulation import Simulation, new_simulation
from agent.simulator.tables import ENVIRONMENT
from agent.simulator.traces import trace_file
from agent.simulator.workloads import Workload
from common.speeds import Peers, SpeedRow
from common.weights import write_atomic

SpeedSource = Literal["alone", "shared", "known"]
"""Where an agent's speeds are from: its own jobs, a federation's too, or the truth."""
measured = cache(load_speeds)
"""The true speeds."""
Sums = tuple[float, float, float]


class Learning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How agents come to know their cluster, as data files say it."""

    load: float
    noise: float
    """Standard deviation of a reading of log steps/s."""


class Knowledge(msgspec.Struct):
    """What one cluster's own jobs have taught."""

    sums: dict[str, Sums] = {}
    """(n, Σx, Σx²) of log steps/s by the speed model's keys."""
    history: list[tuple[float, float]] = []
    """[K + 1] count and sum of finished log run times by kind, work without GPUs last."""
    jobs: int = 0
    """That were lived through."""

    def hear(self, key: str, log_speed: float) -> None:
        """Add one reading."""
        n, x, squares = self.sums.get(key, (0.0, 0.0, 0.0))
        self.sums[key] = (n + 1.0, x + log_speed, squares + log_speed**2)


def predict(speeds: SpeedTable, own: Knowledge, peers: Sequence[Knowledge] = ()) -> Speeds:
    """Speeds of all kinds as a member's model predicts them from its own and others' readings."""
    model = SpeedModel()
    model.update(own.sums)
    if peers:
        total: dict[int, SpeedRow] = {}
        for peer in peers:
            theirs = SpeedModel()
            theirs.update(peer.sums)
            for key, row in theirs.rows().items():
                before = total.get(key, SpeedRow(0.0, 0.0, 0.0))
                total[key] = SpeedRow(
                    before.n + row.n, before.sum_x + row.sum_x, before.sum_x2 + row.sum_x2
                )
        model.absorb(Peers(len(peers), total, {}))
    names = [speeds.job_types[number] for number in speeds.kind_type]
    kinds = [(name, int(gpus)) for name, gpus in zip(names, speeds.kind_gpus, strict=True)]
    return model.predict(kinds, speeds.gpu_types)


def fill(sim: Simulation, predicted: Speeds | None, history: Sequence[tuple[float, float]]) -> None:
    """Put predictions (None: leave what the view has) and remembered run times into the view."""
    view = sim.cluster
    if predicted is not None:
        kinds, jobs = len(predicted.slowdown), len(predicted.interference)
        view.slowdown[:kinds] = predicted.slowdown
        view.slowdown[kinds:] = 0.0  # work without GPUs runs alike everywhere
        view.interference[:jobs, :jobs] = predicted.interference
    for k, row in enumerate(history):
        view.history_kind[k] += row
        view.history_type[view.kind_type[k]] += row
        view.history_gpus[gpu_group(int(view.kind_gpus[k]))] += row


def live_through(
    known: Knowledge,
    workload: Workload,
    nodes: NodeMix,
    speeds: SpeedTable,
    *,
    seed: int,
    noise: float,
    rule: str = "hrrn-eft",
) -> None:
    """Schedule one window by a rule with what is known so far, and add what it teaches.

    ``noise`` is the standard deviation of a reading of log steps/s.
    """
    sim = new_simulation(workload, nodes, speeds, seed=seed, known_speeds=False)
    fill(sim, predict(speeds, known), known.history)
    view, policy = sim.cluster, make_policy(rule)
    rng = np.random.default_rng([seed, 7])
    eligible, out = np.ones(len(workload), np.bool_), new_candidates(MAX_QUEUE_CANDIDATES)
    seed_kernels(seed)
    while advance(sim, np.inf):
        while view.counts[PENDING] > 0:
            pod, node, _, _, _ = next_placement(view, policy, eligible, out, False)
            if pod < 0:
                break
            place(sim, pod, node)
            if workload.kind[pod] >= 0 and workload.share[pod] == 0.0:
                key = speed_text(
                    speeds.job_types[speeds.kind_type[workload.kind[pod]]],
                    int(speeds.kind_gpus[workload.kind[pod]]),
                    speeds.gpu_types[nodes.gpu_type[node]],
                )
                known.hear(key, float(np.log(sim.rate[pod])) + noise * rng.standard_normal())
    known.history = [(float(n), float(total)) for n, total in view.history_kind]
    known.jobs += len(workload)


def learn_clusters(
    traces: Sequence[str], speeds: SpeedTable, nodes: NodeMix, *, load: float, noise: float
) -> dict[str, Knowledge]:
    """What an agent of each trace's cluster knows after its train windows, by trace."""
    all_known = {}
    for trace in traces:
        known = Knowledge()
        windows = splits.windows(trace, "train", speeds, nodes, stride=splits.WINDOW)
        for seed, window in enumerate(windows):
            workload = window.workload(speeds, nodes, load=load, seed=seed)
            live_through(known, workload, nodes, speeds, seed=seed, noise=noise)
        all_known[trace] = known
    return all_known


def learn_all(path: Path, nodes: NodeMix, learning: Learning, say: Say) -> None:
    """Leave what the agents of all traces that are there have learned, unless it is there."""
    if path.exists():
        return
    traces, all_traces = splits.available(), splits.splits()
    if len(traces) < len(all_traces):
        say(
            f"{len(traces)} of {len(all_traces)} traces are here, some of them slices; set "
            f"{ENVIRONMENT} to a folder of the full ones for all windows"
        )
    say(f"agents of {len(traces)} clusters live through their train windows")
    known = learn_clusters(traces, measured(), nodes, load=learning.load, noise=learning.noise)
    write_atomic(path, msgspec.json.encode(known))


def split_files() -> list[Path]:
    """The files that what agents learn depends on: splits, traces, measured speeds."""
    known = splits.splits()
    traces = [trace_file(known[trace].file) for trace in splits.available()]
    return [splits.FILE, *traces, *(trace_file(f"gavel/{name}") for name in SPEED_FILES)]


@cache
def read(path: Path) -> dict[str, Knowledge]:
    """What :func:`learn_all` left, by trace."""
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Knowledge])


@cache
def predicted(path: Path, trace: str, source: SpeedSource) -> Speeds | None:
    """The speeds that an agent of the trace's cluster predicts; None where it is told the truth."""
    if source == "known":
        return None
    known = read(path)
    peers = [other for name, other in known.items() if name != trace and source == "shared"]
    return predict(measured(), known[trace], peers)


def by_tenant(workload: Workload, completion: Floats, fastest: Floats, least: int = 5) -> float:
    """Completion time over fastest run time, both summed, of the tenant that fares worst.

    The traces name no tenants. Jobs of one gang size stand for one: they want the same kind of
    room, and a policy that starves somebody starves those who want most. Tenants of fewer than
    ``least`` jobs are left out, unless there is no other.
    """
    size = workload.gpus + workload.share
    tenants = [size == value for value in np.unique(size)]
    large = [rows for rows in tenants if rows.sum() >= least] or tenants
    return max(float(completion[rows].sum() / fastest[rows].sum()) for rows in large)
