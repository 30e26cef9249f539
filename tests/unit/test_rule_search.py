"""The search for a rule's weights: what it compares, what it may look at, and its command."""

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from agent.benchmark.commands import app
from agent.benchmark.knowledge import Learning, learn_all
from agent.benchmark.rule_search import HIGHEST, LOWEST, WEIGHTS, Search, weighted
from agent.scheduling.rules import PRICES, RULES
from agent.simulator import splits
from agent.simulator.nodes import node_mix

BASE = RULES["hrrn-eft"]


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("search") / "known.json"
    learn_all(path, node_mix({"v100": 3, "p100": 3, "k80": 3}), Learning(0.8, 0.1), lambda _: None)
    return path


@pytest.fixture(scope="module")
def search(known: Path) -> Search:
    return Search("train", known, "shared", stride=400, seed=0)


def test_weights_are_held_within_bounds_and_nothing_else_of_the_rule_changes() -> None:
    far = weighted(BASE, np.full(len(WEIGHTS), 100.0))
    assert [getattr(far, name) for name in WEIGHTS] == HIGHEST.tolist()
    near = weighted(BASE, np.full(len(WEIGHTS), -100.0))
    assert [getattr(near, name) for name in WEIGHTS] == LOWEST.tolist()
    assert far._replace(**{name: getattr(BASE, name) for name in WEIGHTS}) == BASE


def test_the_shipped_weights_are_within_the_bounds_of_the_search() -> None:
    rule = RULES["priced-eft"]
    assert tuple(getattr(rule, name) for name in WEIGHTS) == PRICES
    assert weighted(BASE, np.array(PRICES)) == rule


def test_a_rule_costs_nothing_against_itself_and_a_bad_one_much(search: Search) -> None:
    cost = next(search.costs(BASE, 1))
    assert cost(np.array([getattr(BASE, name) for name in WEIGHTS])) == 0.0
    assert cost(np.array([6.0, 0.0, 1.5, 1.0])) > 0.02


def test_each_iteration_meets_other_windows(search: Search) -> None:
    costs = search.costs(BASE, 1)
    point = np.array([6.0, 0.0, 1.5, 1.0])
    assert len({next(costs)(point) for _ in range(4)}) > 1


def test_the_sealed_part_is_shut(known: Path) -> None:
    with pytest.raises(splits.SealedError):
        Search("sealed", known, "shared", stride=400, seed=0)


def test_the_command_learns_and_judges(tmp_path: Path) -> None:
    runner = CliRunner()
    options = ["--iterations", "1", "--windows", "2", "--seed", "3", "--output", str(tmp_path)]
    found = runner.invoke(app, ["tune-rule", *options])
    assert found.exit_code == 0, found.output
    assert "iteration 1 of 1" in found.output
    assert "validation, all loads" in found.output
    again = runner.invoke(app, ["tune-rule", *options])
    assert found.output.split("iteration")[1] == again.output.split("iteration")[1]
    assert runner.invoke(app, ["tune-rule", "--rule", "no-such"]).exit_code == 2
    assert runner.invoke(app, ["tune-rule", "--speeds", "guessed"]).exit_code == 2
