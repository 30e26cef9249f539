"""The search for the weights of ``level``: what it fills, what it leaves alone, and its command."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agent.benchmark import level_search
from agent.benchmark.commands import app
from agent.benchmark.fragmentation import Fragmentation, cluster
from agent.benchmark.level_search import (
    HIGHEST,
    JUDGED,
    LOWEST,
    SEARCHED,
    Filling,
    available,
    costs,
    judge,
)
from agent.scheduling.rules import LEVEL
from agent.simulator.tables import ENVIRONMENT
from agent.simulator.traces import TraceError


@pytest.fixture
def small_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The openb trace 'default' with few nodes and pods; of others what is shipped."""
    folder = tmp_path / "openb"
    folder.mkdir()
    nodes = "".join(f"n{i},{16000 + 16000 * (i % 3)},262144,4,T4\n" for i in range(9))
    data = Fragmentation().data
    (tmp_path / data.nodes).write_text("sn,cpu_milli,memory_mib,gpu,model\n" + nodes)
    kinds = ["4000,1024,1,1000", "6000,1024,1,500", "2000,1024,1,300", "9000,1024,0,0"]
    pods = "".join(f"p{i},{kinds[i % 4]},\n" for i in range(40))
    header = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec\n"
    (tmp_path / data.pods["default"]).write_text(header + pods)
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path))
    cluster.cache_clear()
    yield
    cluster.cache_clear()


def test_no_order_that_the_suite_is_judged_by_is_opened() -> None:
    sealed = set(range(*Fragmentation().data.orders))
    assert not sealed & set(range(*SEARCHED))
    assert not sealed & set(range(*JUDGED))
    assert not set(range(*SEARCHED)) & set(range(*JUDGED))


def test_the_shipped_weights_are_within_the_bounds_of_the_search() -> None:
    assert all(LOWEST < weight < HIGHEST for weight in LEVEL)


@pytest.mark.usefixtures("small_trace")
def test_each_iteration_meets_other_orders_and_weights_change_what_is_wasted() -> None:
    drawn = costs(available(), 2, 0)
    point = [0.5, 0.5]
    first = next(drawn)
    assert first(point) == first(point)
    assert len({next(drawn)(point) for _ in range(4)}) > 1
    assert len({first([0.0, weight]) for weight in (0.0, 0.5, 3.0)}) > 1


@pytest.mark.usefixtures("small_trace")
def test_weights_do_not_differ_from_themselves() -> None:
    same = judge(LEVEL, "level", LEVEL, [Filling("default", order) for order in range(2000, 2004)])
    assert (same.mean, same.low, same.high) == (0.0, 0.0, 0.0)


@pytest.mark.usefixtures("small_trace")
def test_the_command_finds_weights_and_judges_them() -> None:
    options = ["--iterations", "2", "--orders", "2", "--judged", "4"]
    found = CliRunner().invoke(app, ["tune-level", *options])
    assert found.exit_code == 0, found.output
    assert "iteration 2 of 2" in found.output
    assert "shape: " in found.output
    assert "against fgd, 4 orders" in found.output
    assert CliRunner().invoke(app, ["tune-level", *options]).output == found.output


def test_without_traces_it_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Path:
        raise TraceError(Path(name), "is not there")

    monkeypatch.setattr(level_search, "trace_file", missing)
    with pytest.raises(ValueError, match="FEDSCHED_TRACES"):
        available()
