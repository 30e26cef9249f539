"""The suite ``drl-mls``: batches of jobs on nine mixed nodes with shared GPUs, and ablations.

Called by ``agent.benchmark.suites``. Twelve settings, three arrival processes at four rates; mean
completion time and makespan against the usual rules and against learners without our parts.
"""

import multiprocessing
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from agent.benchmark.arms import figures
from agent.benchmark.bounds import completion_bound, makespan_bound
from agent.benchmark.drl_learners import train, trained, weights_file
from agent.benchmark.drl_world import KNOWLEDGE, OPENB, TOLD_NOTHING, Data, World
from agent.benchmark.knowledge import learn_all, split_files
from agent.benchmark.suite import Cell, Comparison, Figures, Means, Result, Row, Say, Size, Suite
from agent.benchmark.suites import data_file
from agent.data_files import read_data
from agent.learning.ablated import simulate_ablated
from agent.simulator import splits
from agent.simulator.runs import simulate
from agent.simulator.traces import trace_file
from common.weights import save

GOALS = {"mean_completion": -22.22, "makespan": -5.91}
"""Published gains (DRL-MLS) over its best baseline, per cent."""
TRAINERS = 2


class DrlMls(Suite):
    """Ours against rules and plain learners, and ours without each of its parts."""

    name = "drl-mls"
    title = (
        "Batches of jobs on nine nodes of eight GPUs, three each of V100, P100 and K80, GPUs and "
        "their memory shared: mean completion time and makespan at twelve arrival patterns."
    )

    def __init__(self, path: Path | None = None) -> None:
        self.data = read_data(path or data_file(self.name), Data)
        data, self._worlds = self.data, dict[Path, World]()
        ablated = tuple(arm for arm in data.ablations if arm != data.whole)
        named = (("mean_completion", "mean completion time"), ("makespan", "makespan"))
        self.comparisons = [
            *(
                Comparison(
                    metric, data.ours, (*data.baselines, *self._others()),
                    title=f"{name} of every policy to that of ours ({data.ours}), all 12 settings",
                )
                for metric, name in named
            ),
            *(
                Comparison(
                    metric, data.baselines[0], (data.ours,), pooled=False,
                    title=f"{name} of ours to {data.baselines[0]}, setting by setting",
                )
                for metric, name in named
            ),
            *(
                Comparison(
                    metric, data.whole, ablated,
                    title=f"{name} without one part to the learner with every part",
                )
                for metric, name in named
            ),
        ]  # fmt: skip
        self.units = dict.fromkeys(("mean_completion", "p99", "makespan"), ("h", 3600.0))
        training = data.training
        self.notes = [
            f"A batch is {data.jobs} jobs drawn from a virtual cluster's sealed ones. Arrival "
            "processes and rates see the same jobs. Alibaba's bursts are those of openb; the "
            "shipped slice has every twentieth of them, whose arrivals are smoother.",
            "Rules and learners know what train windows taught: speeds from noisy readings, run "
            "times by kind. Oracle and bound are told the truth.",
            f"Learners: {training.seeds} of each kind from {training.seeds} seeds, "
            f"{training.rounds.reduced} rounds of {training.batches} batches of {training.jobs} "
            f"train jobs ({training.rounds.full} rounds at full size); a figure is the mean of "
            "theirs. They are compared without the guard margin that a live agent has.",
            "Without mask: nodes without room are offered too, scored as if they had it. Choosing "
            "one costs a kill, and the pod waits for the next event.",
            "Without delayed reward: a decision is credited with what happens until the next one.",
        ]

    def _others(self) -> tuple[str, ...]:
        data = self.data
        return tuple(
            arm for arm, policy in data.policies.items()
            if arm != data.ours and arm not in data.baselines and not policy.bound
        )  # fmt: skip

    def cells(self, size: Size) -> list[Cell]:
        """Batch by batch, so that arms find its jobs made."""
        data, found = self.data, []
        for trace in self._traces():
            for seed in range(data.batches.of(size)):
                for arrivals in data.arrivals:
                    for load in data.loads:
                        setting = f"{arrivals} {load:g}"
                        found += [
                            Cell(self.name, setting, arm, f"{trace} #{seed}", trace, seed)
                            for arm in (*data.policies, *data.trained)
                        ]
        return found

    def _world(self, folder: Path) -> World:
        """One for each folder; what is in it never changes."""
        if folder not in self._worlds:
            self._worlds[folder] = World(self.data, folder)
        return self._worlds[folder]

    def _traces(self) -> list[str]:
        """Those that are there with jobs to judge by."""
        return [
            trace for trace in splits.available()
            if len(splits.part_jobs(trace, self.data.part, evaluation=True)) >= self.data.jobs
        ]  # fmt: skip

    def prepare(self, size: Size, folder: Path, say: Say) -> None:
        """Live through the train windows, then train every learner that is not there yet."""
        world = self._world(folder)
        learn_all(folder / KNOWLEDGE, world.nodes, self.data.learning, say)
        todo = [
            (arm, seed) for seed in range(self.data.training.seeds) for arm in self.data.trained
            if not weights_file(folder, arm, seed).exists()
        ]  # fmt: skip
        if not todo:
            return
        say(f"{len(todo)} learners to train")
        rounds = self.data.training.rounds.of(size)
        context = multiprocessing.get_context("spawn")
        crew = [
            context.Process(target=_train_some, args=(self.data, folder, rounds, todo[i::TRAINERS]))
            for i in range(min(TRAINERS, len(todo)))
        ]
        for process in crew:
            process.start()
        for process in crew:
            process.join()
        if failed := [process.exitcode for process in crew if process.exitcode]:
            raise RuntimeError(f"a process that trains learners ended with exit code {failed[0]}")

    def inputs(self, size: Size) -> list[Path]:
        """Traces and splits."""
        del size
        return [*split_files(), trace_file(OPENB)]

    def run(self, cell: Cell, folder: Path) -> Figures:
        """One arm on one batch; a learner's figures are the means of its seeds'."""
        data, world = self.data, self._world(folder)
        arrivals, _, load = cell.setting.rpartition(" ")
        workload = world.batch(cell.trace, data.part, arrivals, float(load), cell.seed, data.jobs)
        policy = data.policies.get(cell.arm, TOLD_NOTHING)
        if policy.bound:
            return {
                "mean_completion": completion_bound(workload, world.speeds, world.nodes),
                "makespan": makespan_bound(workload, world.speeds, world.nodes),
            }
        seeds = range(data.training.seeds if cell.arm in data.trained else 1)
        every = []
        for seed in seeds:
            sim = world.simulation(policy, workload, cell.trace, cell.seed)
            if cell.arm in data.trained:
                arrays = trained(weights_file(folder, cell.arm, seed))
                made = data.trained[cell.arm].policy(arrays)
                run = simulate_ablated(sim, made, seed=cell.seed)
            else:
                run = simulate(sim, policy.make(), seed=cell.seed)
            every.append(figures(run, workload, world.speeds))
        return {name: float(np.mean([one[name] for one in every])) for name in every[0]}

    def findings(self, means: Means, results: Sequence[Result]) -> list[str]:
        """The goals, and what each part of ours is worth."""
        del means
        said = []
        for result in results:
            metric, base = result.comparison.metric, result.comparison.baseline
            name = metric.replace("_", " ")
            if base == self.data.ours:
                listed = [row for row in result.rows if row.arm in self.data.baselines]
                said.append(_goal(min(listed, key=lambda row: row.mean), name, GOALS[metric]))
            elif base == self.data.whole:
                said += [_part(row, name) for row in result.rows]
        return said


def _goal(best: Row, name: str, goal: float) -> str:
    """Ours against the best baseline, from that one's row against ours."""
    gain, low, high = (100.0 * (1.0 / value - 1.0) for value in (best.mean, best.high, best.low))
    verdict = "reached" if gain <= goal else f"missed by {gain - goal:.1f} points"
    return (
        f"{name.capitalize()}: ours is {gain:+.1f} % ({low:+.1f} to {high:+.1f}) against the best "
        f"listed baseline, {best.arm}; the goal of {goal} % is {verdict}."
    )


def _part(row: Row, name: str) -> str:
    change = f"{100 * (row.mean - 1):+.1f} % {name}"
    noise = row.verdict not in ("better", "worse")
    return f"{row.arm.capitalize()}: {change}" + (", which is within noise." if noise else ".")


def _train_some(data: Data, folder: Path, rounds: int, todo: Sequence[tuple[str, int]]) -> None:
    """Train the named learners, in a process of its own; ends with the process that started it."""
    parent, world = os.getppid(), World(data, folder)
    for arm, seed in todo:
        if os.getppid() != parent:
            return
        arrays, decisions = train(
            data.trained[arm], world.lesson, rounds=rounds, batches=data.training.batches, seed=seed
        )
        save(weights_file(folder, arm, seed), arrays, {"arm": arm, "decisions": str(decisions)})
