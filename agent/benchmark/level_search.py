"""``fedsched benchmark tune-level``: finds the weights of the placement rule ``level``.

``agent.scheduling.rules`` has the weights, and this is how to find them again. It fills the openb
nodes in orders of arrival of its own, and judges the weights in further ones; those that the suite
``fragmentation`` is judged by are neither.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Annotated, NamedTuple

import numpy as np
import typer
from rich.console import Console

from agent.arrays import Floats
from agent.benchmark.cross_entropy import Cost, cross_entropy
from agent.benchmark.fragmentation import Data, Fragmentation, cluster
from agent.scheduling.rules import LEVEL
from agent.simulator.filling import FRAGMENTED, REFUSED_GPU, fill
from agent.simulator.fragmentation import arrivals
from agent.simulator.traces import TraceError, trace_file
from agent.statistics import Mean, paired_difference

SEARCHED = 1000, 2000
"""Orders of arrival that are searched on, [from, to)."""
JUDGED = 2000, 3000
"""Orders that the weights are judged by."""
START, SPREAD = (0.5, 0.5), (0.4, 0.4)
LOWEST, HIGHEST = 0.0, 3.0
SAMPLES, ELITE = 12, 4
FULL, BEFORE = 100, 90
"""Percent of all GPUs asked for: when fragmentation counts, and when none should be refused yet."""
console = Console()


class Filling(NamedTuple):
    """One order of arrival of one trace's pods."""

    trace: str
    order: int


@cache
def _data() -> Data:
    return Fragmentation().data


def available() -> list[str]:
    """Names of the traces of ``fragmentation.yaml`` that are there. Raises ValueError for none."""
    found = []
    for trace, file in _data().pods.items():
        try:
            trace_file(_data().nodes), trace_file(file)
        except TraceError:
            continue
        found.append(trace)
    if not found:
        raise ValueError("no openb traces: set FEDSCHED_TRACES to a folder that has them")
    return found


def wasted(rule: str, weights: Sequence[float], filling: Filling) -> Floats:
    """[2] percent of all GPUs that are fragmented at ``FULL``, and refused by ``BEFORE``."""
    fleet, requests, kind, mix = cluster(_data().nodes, _data().pods[filling.trace])
    pods, rank = arrivals(requests, kind, fleet, FULL / 100.0, filling.order)
    pair = float(weights[0]), float(weights[1])
    track = fill(rule, fleet, requests, mix, pods, rank, filling.order, pair).track
    return np.array([track[FULL, FRAGMENTED], track[BEFORE, REFUSED_GPU]])


def held(point: Floats) -> list[float]:
    """The weights of a point of the search, within bounds."""
    return [float(weight) for weight in np.clip(point, LOWEST, HIGHEST)]


def costs(traces: Sequence[str], orders: int, seed: int) -> Iterator[Cost]:
    """Mean waste of weights over ``orders`` orders of each trace, others each time.

    A GPU that was refused to pods while there should be room counts like one that is fragmented:
    what is refused leaves GPUs whole that others then take.
    """
    rng = np.random.default_rng(seed)
    while True:
        drawn = [
            Filling(trace, int(order))
            for trace in traces
            for order in rng.choice(np.arange(*SEARCHED), orders, replace=False)
        ]

        def cost(point: Floats, drawn: list[Filling] = drawn) -> float:
            return float(np.mean([wasted("level", held(point), one).sum() for one in drawn]))

        yield cost


def judge(
    weights: Sequence[float], rule: str, other: Sequence[float], fillings: Sequence[Filling]
) -> Mean:
    """Points of all GPUs that are fragmented under ``level`` with these weights, less ``rule``."""
    ours = [float(wasted("level", weights, filling)[0]) for filling in fillings]
    theirs = [float(wasted(rule, other, filling)[0]) for filling in fillings]
    return paired_difference(ours, theirs, [filling.trace for filling in fillings])


def tune_level(
    iterations: Annotated[int, typer.Option(min=1, help="Of the search.")] = 10,
    orders: Annotated[int, typer.Option(min=1, max=1000, help="Of a trace, in an iteration.")] = 4,
    judged: Annotated[int, typer.Option(min=2, help="Of each trace, at the end.")] = 40,
    seed: Annotated[int, typer.Option(min=0, help="Of the search.")] = 0,
) -> None:
    """Find the weights of the rule 'level', and judge them on other orders of arrival."""
    traces, done = available(), 0

    def told() -> Iterator[Cost]:
        nonlocal done
        for cost in costs(traces, orders, seed):
            done += 1
            console.print(f"iteration {done} of {iterations}", highlight=False)
            yield cost

    point = cross_entropy(
        told(), START, SPREAD, iterations=iterations, samples=SAMPLES, elite=ELITE, seed=seed
    )
    found = [round(weight, 2) for weight in held(point)]
    console.print(f"shape: {found[0]:g}, untouched: {found[1]:g}", highlight=False)
    for trace in [*traces, None] if len(traces) > 1 else traces:
        fillings = [
            Filling(name, order)
            for name in traces
            if trace in (None, name)
            for order in range(JUDGED[0], JUDGED[0] + judged)
        ]
        for other, weights in (("fgd", LEVEL), ("level", LEVEL)):
            points = judge(found, other, weights, fillings)
            against = "fgd" if other == "fgd" else f"level with {LEVEL[0]:g}, {LEVEL[1]:g}"
            console.print(
                f"{trace or 'all traces'}, fragmented at {FULL} %: {points.mean:+.3f} points (95 % "
                f"interval {points.low:+.3f} to {points.high:+.3f}) against {against}, "
                f"{len(fillings)} orders",
                highlight=False, soft_wrap=True,
            )  # fmt: skip
