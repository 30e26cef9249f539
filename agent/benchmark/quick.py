"""``fedsched benchmark rules`` and ``engine``: quick looks at the rules and at decisions a second.

Mounted by ``agent.benchmark.commands``. Every comparison is paired: all policies see the same jobs,
on the same nodes, with the same random numbers. Performance is printed as ratios, never judged.
"""

import json
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from agent.scheduling.decision import make_policy
from agent.scheduling.rules import RULE_HELP, RULES
from agent.simulator import splits
from agent.simulator.hardware import SpeedTable, load_speeds
from agent.simulator.nodes import NodeMix, node_mix
from agent.simulator.runs import Result, simulate
from agent.simulator.simulation import new_simulation
from agent.simulator.workloads import Options, Workload
from agent.statistics import paired_ratio
from common.policy import initial_arrays

console = Console()

BASELINE = "least-allocated"


def windows(load: float, count: int) -> list[tuple[Workload, NodeMix, SpeedTable]]:
    """``count`` train windows of 150 jobs of all traces in turn, on nine mixed nodes.

    Windows of one trace follow each other; further ones start again, with other random draws.
    """
    speeds = load_speeds()
    nodes = node_mix({"v100": 3, "p100": 3, "k80": 3})
    parts = [splits.windows(trace, "train", speeds, nodes) for trace in splits.available()]
    made = []
    for i in range(count):
        of_trace, turn = parts[i % len(parts)], i // len(parts)
        options = Options(shared=0.3 if i % 2 else 0.0)
        workload = of_trace[turn % len(of_trace)].workload(
            speeds, nodes, load=load, seed=turn // len(of_trace), options=options
        )
        made.append((workload, nodes, speeds))
    return made


def run(name: str, part: tuple[Workload, NodeMix, SpeedTable], seed: int) -> Result:
    """Run one rule over one window; it knows the true speeds."""
    workload, nodes, speeds = part
    sim = new_simulation(workload, nodes, speeds, seed=seed, known_run_times=RULES[name].known)
    return simulate(sim, make_policy(name), seed=seed)


def rules(
    load: Annotated[float, typer.Option(help="Offered load, 1 keeps every GPU busy.")] = 0.8,
    count: Annotated[int, typer.Option("--windows", min=2, help="Windows of 150 jobs.")] = 16,
    output: Annotated[Path | None, typer.Option("--json", help="Also write figures here.")] = None,
) -> None:
    """Every rule against kube-scheduler's LeastAllocated on nine mixed nodes, speeds known."""
    parts = windows(load, count)
    results: dict[str, list[Result]] = {}
    for name in track(RULES, description="rules", console=console):
        results[name] = [run(name, part, seed) for seed, part in enumerate(parts)]
    base = [result.mean for result in results[BASELINE]]
    table = Table(
        title=f"{count} windows of {splits.WINDOW} jobs at load {load}, seeds 0 to {count - 1}"
    )
    for column in ("rule", "mean completion", "p99", "unfinished", "OOM kills"):
        table.add_column(column, justify="left" if column == "rule" else "right", no_wrap=True)
    figures = {}
    for name, found in results.items():
        ratio = paired_ratio([result.mean for result in found], base)
        tail = paired_ratio(
            [result.p99 for result in found], [result.p99 for result in results[BASELINE]]
        )
        unfinished, kills = sum(r.unfinished for r in found), sum(r.oom_kills for r in found)
        table.add_row(
            name,
            "baseline" if name == BASELINE else str(ratio),
            "baseline" if name == BASELINE else str(tail),
            str(unfinished),
            str(kills),
        )
        figures[name] = {
            "mean_ratio": ratio.mean, "low": ratio.low, "high": ratio.high,
            "p99_ratio": tail.mean, "unfinished": unfinished, "oom_kills": kills,
        }  # fmt: skip
    console.print(table)
    for name, text in RULE_HELP.items():
        console.print(f"[bold]{name}[/bold]: {text}")
    if output:
        output.write_text(json.dumps({"load": load, "windows": count, "rules": figures}, indent=1))


def engine(
    rule: Annotated[str, typer.Option(help="Rule policy that decides.")] = "hrrn-eft",
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each kind.")] = 5,
) -> None:
    """Decisions per second on one core: the rule alone, and with the network on top."""
    if rule not in RULES:
        raise typer.BadParameter(f"no rule {rule!r}; there are {', '.join(RULES)}")
    parts = windows(0.8, 4)
    policies = {
        "rule": make_policy(rule),
        "rule and network": make_policy(rule, initial_arrays()),
    }
    rates: dict[str, list[float]] = {name: [] for name in policies}
    for repeat in range(repeats + 1):  # the first compiles and warms up
        for name, policy in policies.items():  # interleaved: a drift of the machine meets both
            decisions, seconds = 0, 0.0
            for seed, (workload, nodes, speeds) in enumerate(parts):
                sim = new_simulation(workload, nodes, speeds, seed=seed)
                begun = time.process_time()
                decisions += simulate(sim, policy, seed=seed).decisions
                seconds += time.process_time() - begun
            if repeat:
                rates[name].append(decisions / seconds)
    table = Table(title=f"{rule}, {repeats} runs over {len(parts)} windows of {splits.WINDOW} jobs")
    for column in ("policy", "decisions/s (median)", "min", "max", "to the rule alone"):
        table.add_column(column, justify="right" if column != "policy" else "left")
    alone = float(np.median(rates["rule"]))
    for name, found in rates.items():
        median = float(np.median(found))
        table.add_row(
            name, f"{median:,.0f}", f"{min(found):,.0f}", f"{max(found):,.0f}",
            f"{median / alone:.2f} ×",
        )  # fmt: skip
    console.print(table)
