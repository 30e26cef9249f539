"""``fedsched benchmark tune-rule``: learns what scarce fast GPUs should cost, for a rule to use.

The weights in ``agent.scheduling.rules`` are what this prints. It searches on train windows, each
iteration on others, and says at the end what the weights bring on validation windows; it never
opens the sealed ones.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, cast, get_args

import numpy as np
import typer
from rich.console import Console

from agent.arrays import Floats
from agent.benchmark.cross_entropy import Cost, cross_entropy
from agent.benchmark.knowledge import (
    Learning,
    SpeedSource,
    fill,
    learn_all,
    measured,
    predicted,
    read,
    split_files,
)
from agent.scheduling.decision import make_policy
from agent.scheduling.rules import RULES, Rule
from agent.simulator import splits
from agent.simulator.nodes import node_mix
from agent.simulator.runs import simulate
from agent.simulator.simulation import new_simulation
from agent.simulator.workloads import Workload
from agent.statistics import paired_ratio

WEIGHTS = ("price", "busy", "gang", "wait_bias")
"""Fields of a rule that are searched."""
LOWEST, HIGHEST = np.array([0.0, 0.0, 0.0, -1.0]), np.array([6.0, 6.0, 1.5, 1.0])
SPREAD = (0.5, 0.7, 0.3, 0.1)
LOADS = (0.6, 0.7, 0.8, 0.9)
SAMPLES, ELITE = 15, 5
_WINSOR = 0.5  # log ratio beyond which a window counts no more: a few must not decide
console = Console()


@dataclass(frozen=True)
class Item:
    """One window at one load."""

    trace: str
    load: float
    workload: Workload
    seed: int


class Search:
    """Windows of one part of all traces, on the nodes of the suite ``mixed-nodes``."""

    def __init__(
        self, part: splits.Part, known: Path, source: SpeedSource, *, stride: int, seed: int
    ) -> None:
        self._known, self._source = known, source
        self._nodes = node_mix({"v100": 3, "p100": 3, "k80": 3})
        self._rng = np.random.default_rng(seed)
        self.items: list[Item] = []
        for trace in splits.available():
            found = splits.windows(trace, part, measured(), self._nodes, stride=stride)
            for number, window in enumerate(found):
                for load in LOADS:
                    workload = window.workload(measured(), self._nodes, load=load, seed=number)
                    self.items.append(Item(trace, load, workload, number))
        if not self.items:
            raise ValueError(f"no {part} windows of 150 jobs: set FEDSCHED_TRACES to whole traces")

    def mean_completion(self, rule: Rule, item: Item) -> float:
        """Seconds, of a cluster that knows what its train windows taught it."""
        sim = new_simulation(
            item.workload, self._nodes, measured(), seed=item.seed,
            known_speeds=self._source == "known",
        )  # fmt: skip
        speeds = predicted(self._known, item.trace, self._source)
        fill(sim, speeds, read(self._known)[item.trace].history)
        return simulate(sim, make_policy(rule), seed=item.seed).mean

    def costs(self, base: Rule, windows: int) -> Iterator[Cost]:
        """Mean log ratio to ``base`` over ``windows`` windows of each trace, others each time."""
        by_trace: dict[str, list[Item]] = {}
        for item in self.items:
            by_trace.setdefault(item.trace, []).append(item)
        while True:
            drawn = [
                items[i]
                for items in by_trace.values()
                for i in self._rng.choice(len(items), min(windows, len(items)), replace=False)
            ]
            before = np.log([self.mean_completion(base, item) for item in drawn])

            def cost(point: Floats, drawn: list[Item] = drawn, before: Floats = before) -> float:
                rule = weighted(base, point)
                ratio = np.log([self.mean_completion(rule, item) for item in drawn]) - before
                return float(np.clip(ratio, -_WINSOR, _WINSOR).mean())

            yield cost


def weighted(base: Rule, point: Floats) -> Rule:
    """The rule with these weights, in the order of :data:`WEIGHTS`, held within bounds."""
    price, busy, gang, wait_bias = map(float, np.clip(point, LOWEST, HIGHEST))
    return base._replace(price=price, busy=busy, gang=gang, wait_bias=wait_bias)


def tune_rule(
    rule: Annotated[str, typer.Option(help="An EFT rule, whose weights are learned.")] = "hrrn-eft",
    iterations: Annotated[int, typer.Option(min=1, help="Of the search.")] = 14,
    windows: Annotated[int, typer.Option(min=2, help="Of each trace, in an iteration.")] = 40,
    speeds: Annotated[
        str, typer.Option(help="Whose readings: alone, shared, or known.")
    ] = "shared",
    seed: Annotated[int, typer.Option(min=0, help="Of the search.")] = 0,
    output: Annotated[Path, typer.Option(help="Where what agents know of clusters is kept.")] = (
        Path("benchmark-results")
    ),
) -> None:
    """Learn the prices of a rule on train windows, and judge them on validation windows."""
    if rule not in RULES:
        raise typer.BadParameter(f"no rule {rule!r}; there are {', '.join(RULES)}")
    if speeds not in get_args(SpeedSource):
        raise typer.BadParameter(f"speeds are {', '.join(get_args(SpeedSource))}, not {speeds!r}")
    source = cast(SpeedSource, speeds)
    base, known = RULES[rule], output / "tune-rule.json"
    output.mkdir(parents=True, exist_ok=True)
    newest = max(file.stat().st_mtime for file in split_files())
    if known.exists() and known.stat().st_mtime < newest:
        known.unlink()
    nodes = node_mix({"v100": 3, "p100": 3, "k80": 3})
    learn_all(known, nodes, Learning(load=0.8, noise=0.1), console.print)
    search = Search("train", known, source, stride=25, seed=seed)
    done = 0

    def told() -> Iterator[Cost]:
        nonlocal done
        for cost in search.costs(base, windows):
            done += 1
            console.print(f"iteration {done} of {iterations}", highlight=False)
            yield cost

    start = [
        getattr(base, name) or first for name, first in zip(WEIGHTS, (1, 1, 1, 0), strict=True)
    ]
    found = cross_entropy(
        told(), start, SPREAD, iterations=iterations, samples=SAMPLES, elite=ELITE, seed=seed
    )
    learned = weighted(base, np.round(found, 2))
    for name in WEIGHTS:
        console.print(f"{name}: {getattr(learned, name):g}", highlight=False)
    judged = Search("validation", known, source, stride=15, seed=seed)
    for load in (None, *LOADS):
        items = [item for item in judged.items if load in (None, item.load)]
        ratio = paired_ratio(
            [judged.mean_completion(learned, item) for item in items],
            [judged.mean_completion(base, item) for item in items],
            [item.trace for item in items],
        )
        at = "all loads" if load is None else f"load {load}"
        console.print(f"validation, {at}: {ratio} against {rule}, {len(items)} windows")
