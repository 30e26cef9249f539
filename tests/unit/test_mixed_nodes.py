"""The suites ``mixed-nodes`` and ``scale`` on a few windows of the shipped slices."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from agent.arrays import Floats
from agent.benchmark.knowledge import (
    Knowledge,
    Learning,
    by_tenant,
    learn_all,
    measured,
    predict,
    predicted,
    read,
)
from agent.benchmark.mixed_nodes import KNOWLEDGE, MixedNodes
from agent.benchmark.report import compare
from agent.benchmark.scale import TIMED, Scale
from agent.benchmark.suite import Cell, Figures
from agent.benchmark.suites import HELP, SUITES, data_file, load_suite, reference
from agent.data_files import DataFileError
from agent.simulator.nodes import node_mix
from agent.simulator.splits import training, windows
from agent.simulator.workloads import fastest_s

MIXED = """\
nodes: {v100: 3, p100: 3, k80: 3}
loads: [0.8, 0.9]
windows: {reduced: 2, full: 3}
part: validation
learning: {load: 0.8, noise: 0.1}
speeds: alone
modes:
  queue:
    least-allocated: {rule: least-allocated}
    hrrn-eft: {rule: hrrn-eft}
    oracle: {rule: hrrn-eft-oracle, speeds: known}
    lower bound: {bound: true}
comparisons:
  - {mode: queue, metric: mean_completion, baseline: least-allocated}
  - {mode: queue, metric: p99, baseline: oracle, arms: [hrrn-eft], each: true, loads: [0.9]}
"""


@pytest.fixture(autouse=True)
def _shipped_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDSCHED_TRACES", raising=False)


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the agents of the shipped slices have learned."""
    folder = tmp_path_factory.mktemp("learned")
    nodes = node_mix({"v100": 3, "p100": 3, "k80": 3})
    told: list[str] = []
    with training(), pytest.MonkeyPatch.context() as patch:
        patch.delenv("FEDSCHED_TRACES", raising=False)
        learn_all(folder / KNOWLEDGE, nodes, Learning(0.8, 0.1), told.append)
        learn_all(folder / KNOWLEDGE, nodes, Learning(0.8, 0.1), told.append)
    assert told == [
        "4 of 8 traces are here, some of them slices; set FEDSCHED_TRACES to a folder of the full "
        "ones for all windows",
        "agents of 4 clusters live through their train windows",
    ]
    return folder


@pytest.fixture
def mixed(tmp_path: Path) -> MixedNodes:
    path = tmp_path / "mixed-nodes.yaml"
    path.write_text(MIXED)
    return MixedNodes(path)


def test_cells_are_all_arms_on_all_windows_at_all_loads(mixed: MixedNodes) -> None:
    cells = mixed.cells("reduced")
    windows = {cell.window for cell in cells}
    assert len(cells) == len(windows) * 2 * 4
    assert {cell.trace for cell in cells} == {"103959", "7f04ca", "ed69ec"}
    assert {cell.setting for cell in cells} == {"queue, load 0.8", "queue, load 0.9"}
    assert [cell.arm for cell in cells[:4]] == [
        "least-allocated", "hrrn-eft", "oracle", "lower bound",
    ]  # fmt: skip
    assert len({(cell.trace, cell.seed) for cell in cells}) == len(windows)
    assert mixed.comparisons[1].settings == ("queue, load 0.9",)
    assert not mixed.comparisons[1].pooled


def test_a_window_has_the_same_figures_each_time_and_the_rule_beats_the_default(
    mixed: MixedNodes, learned: Path
) -> None:
    cells = [cell for cell in mixed.cells("reduced") if cell.trace == "ed69ec"][:4]
    figures = {cell.arm: mixed.run(cell, learned) for cell in cells}
    assert figures == {cell.arm: mixed.run(cell, learned) for cell in cells}
    mean = {arm: found["mean_completion"] for arm, found in figures.items()}
    assert mean["lower bound"] < min(mean["oracle"], mean["hrrn-eft"])
    assert mean["hrrn-eft"] < 0.9 * mean["least-allocated"]
    assert figures["lower bound"]["makespan"] <= figures["hrrn-eft"]["makespan"]
    assert figures["hrrn-eft"]["p99"] > mean["hrrn-eft"]
    assert figures["hrrn-eft"]["worst_tenant"] >= 1.0
    assert figures["hrrn-eft"]["unfinished"] == 0.0


def test_findings_say_who_is_best_and_what_is_left(mixed: MixedNodes) -> None:
    factor = {"least-allocated": 10.0, "hrrn-eft": 6.0, "oracle": 5.0, "lower bound": 3.0}
    figures: dict[Cell, Figures] = {
        cell: {"mean_completion": factor[cell.arm] * (1 + cell.seed), "p99": 1.0}
        for cell in mixed.cells("reduced")
    }
    results = [compare(comparison, figures) for comparison in mixed.comparisons]
    (text,) = mixed.findings({}, results)
    assert text == (
        "queue: hrrn-eft is best, with mean completion -40.0 % (-40.0 … -40.0) to least-allocated "
        "(better). No policy could take more than 50.0 % off its time."
    )


def test_speeds_are_learned_from_the_clusters_own_jobs_and_better_with_others(
    learned: Path,
) -> None:
    truth = np.log(measured().speed.max(axis=1, keepdims=True) / measured().speed)

    def error(slowdown: Floats) -> float:
        return float(np.sqrt(np.mean((slowdown - truth) ** 2)))

    nothing = error(predict(measured(), Knowledge()).slowdown)
    alone, shared = (predicted(learned / KNOWLEDGE, "7f04ca", kind) for kind in ("alone", "shared"))
    assert alone is not None
    assert shared is not None
    assert error(shared.slowdown) < error(alone.slowdown) < nothing
    assert predicted(learned / KNOWLEDGE, "7f04ca", "known") is None
    known = read(learned / KNOWLEDGE)["7f04ca"]
    assert known.jobs == 300
    assert sum(count for count, _ in known.history) == pytest.approx(known.jobs, abs=10)
    assert sum(n for n, _, _ in known.sums.values()) >= known.jobs  # killed ones start again


def test_the_worst_tenant_is_the_gang_size_that_waits_most() -> None:
    nodes = node_mix({"v100": 3})
    workload = windows("7f04ca", "train", measured(), nodes)[0].workload(
        measured(), nodes, load=0.8, seed=0
    )
    fastest = fastest_s(workload, measured())
    waits = np.where(workload.gpus == 8, 3.0, 2.0) * fastest
    assert by_tenant(workload, waits, fastest) == pytest.approx(3.0)
    few = np.flatnonzero(workload.gpus == 8)[:2]
    rare = workload.take(np.append(np.flatnonzero(workload.gpus == 1), few))
    waits = np.where(rare.gpus == 8, 3.0, 2.0) * fastest_s(rare, measured())
    assert by_tenant(rare, waits, fastest_s(rare, measured())) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda s: s.replace("hrrn-eft-oracle", "hrrn"), "no rule 'hrrn'"),
        (lambda s: s.replace("[hrrn-eft]", "[sjf]"), "names arm 'sjf'"),
        (lambda s: s.replace("{mode: queue", "{mode: place", 1), "names mode 'place'"),
        (lambda s: s.replace("p100", "p101"), "'p101'"),
        (lambda s: s.replace("[0.8, 0.9]", "[0]"), "loads are numbers above 0"),
        (
            lambda s: s.replace("reduced: 2", "reduced: 1"),
            r"key windows.reduced: Expected `int` >= 2",
        ),
        (lambda s: s.replace("{bound: true}", "{}"), "a rule or is a bound"),
        (lambda s: s.replace("speeds: alone", "speed: alone"), "speed"),
        (lambda s: s.replace("noise: 0.1", "noise: much"), r"key learning.noise: Expected `float`"),
    ],
)
def test_data_that_cannot_be_is_refused_with_file_and_key(
    change: Callable[[str], str], problem: str, tmp_path: Path
) -> None:
    path = tmp_path / "mixed-nodes.yaml"
    path.write_text(change(MIXED))
    with pytest.raises(DataFileError, match=problem) as raised:
        MixedNodes(path)
    assert str(raised.value).startswith(str(path))


def test_scale_measures_quality_and_cost_on_clusters_of_any_size(
    tmp_path: Path, learned: Path
) -> None:
    text = data_file("scale").read_text().replace("[9, 30, 100, 300, 1200]", "[9, 100]")
    path = tmp_path / "scale.yaml"
    path.write_text(text.replace("jobs_per_node: 12", "jobs_per_node: 4"))
    suite = Scale(path)
    cells = suite.cells("reduced")
    assert {cell.setting for cell in cells} == {"9 nodes", "100 nodes"}
    found: dict[str, Figures] = {}
    means: dict[str, dict[str, Figures]] = {}
    for cell in cells:
        if cell.trace == "ed69ec" and cell.arm in ("least-allocated", "hrrn-eft"):
            found[f"{cell.setting} {cell.arm}"] = suite.run(cell, learned)
            means.setdefault(cell.setting, {})[cell.arm] = found[f"{cell.setting} {cell.arm}"]
    for figures in found.values():
        assert set(figures) > TIMED
        assert all(figures[metric] > 0.0 for metric in TIMED)
    for nodes in ("9", "100"):
        rule, default = found[f"{nodes} nodes hrrn-eft"], found[f"{nodes} nodes least-allocated"]
        assert rule["mean_completion"] < default["mean_completion"]
    per_candidate, per_decision = suite.curves(means)
    assert [x for x, _ in per_candidate.lines["hrrn-eft"]] == [9.0, 100.0]
    assert per_decision.y == "µs"


def test_scale_refuses_clusters_that_are_too_small(tmp_path: Path) -> None:
    path = tmp_path / "scale.yaml"
    path.write_text(data_file("scale").read_text().replace("[9,", "[2,"))
    with pytest.raises(DataFileError, match="2 nodes are too few for 3 GPU types"):
        Scale(path)


@pytest.mark.parametrize("name", SUITES)
def test_every_suite_loads_with_the_data_that_it_ships_with(name: str) -> None:
    suite = load_suite(name)
    assert suite.name == name
    assert type(load_suite(reference(suite))) is type(suite)
    assert data_file(name).exists()
    assert HELP[name]
