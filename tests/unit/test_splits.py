"""Train, validation and sealed jobs: fixed, apart from each other, and sealed means sealed."""

import ast
from pathlib import Path

import numpy as np
import pytest

from agent.data_files import DataFileError
from agent.simulator.hardware import load_speeds
from agent.simulator.nodes import node_mix
from agent.simulator.splits import (
    Part,
    SealedError,
    available,
    part_jobs,
    splits,
    training,
    windows,
)

AGENT = Path(__file__).resolve().parents[2] / "agent"
PARTS: tuple[Part, ...] = ("train", "validation", "sealed")
NODES = node_mix({"v100": 3, "p100": 3, "k80": 3})


@pytest.fixture(autouse=True)
def _shipped_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDSCHED_TRACES", raising=False)


def test_every_trace_is_split_by_time_into_half_a_fifth_and_the_rest() -> None:
    for name, split in splits().items():
        edges = (split.train[1], split.validation[1], split.sealed[1])
        assert split.train[0] == 0, name
        assert (split.validation[0], split.sealed[0]) == edges[:2]
        assert edges == (split.jobs // 2, 7 * split.jobs // 10, split.jobs)


def test_parts_share_no_job_and_follow_each_other() -> None:
    parts = [part_jobs("ed69ec", part, evaluation=True).arrival_s for part in PARTS]
    assert [len(part) for part in parts] == [475, 190, 286]
    assert parts[0].max() <= parts[1].min() <= parts[1].max() <= parts[2].min()
    assert np.array_equal(np.concatenate(parts), np.sort(np.concatenate(parts)))


def test_sealed_jobs_are_refused_to_whoever_does_not_judge() -> None:
    speeds = load_speeds()
    with pytest.raises(SealedError, match="train on 'train', tune on 'validation'"):
        windows("ed69ec", "sealed", speeds, NODES)
    with training():
        assert len(windows("ed69ec", "train", speeds, NODES)) == 5
        with pytest.raises(SealedError):
            windows("ed69ec", "sealed", speeds, NODES, evaluation=True)
    assert windows("ed69ec", "sealed", speeds, NODES, evaluation=True)


def test_nothing_that_learns_or_schedules_claims_to_judge() -> None:
    claims = set()
    for path in AGENT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "evaluation":
                claims.add(path.relative_to(AGENT).parts[0])
    claims.discard("simulator") if _passes_on_only() else None
    assert claims == {"benchmark"}


def _passes_on_only() -> bool:
    """Whether the simulator hands the claim on from its own caller and never makes it."""
    calls = [
        keyword.value
        for path in (AGENT / "simulator").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == "evaluation"
    ]
    return all(isinstance(value, ast.Name) and value.id == "evaluation" for value in calls)


def test_windows_are_consecutive_jobs_at_the_load_asked_for() -> None:
    speeds = load_speeds()
    found = windows("ed69ec", "train", speeds, NODES)
    assert [(w.start, w.stop) for w in found] == [(s, s + 150) for s in range(0, 301, 75)]
    spread = windows("ed69ec", "train", speeds, NODES, count=3)
    assert [w.start for w in spread] == [0, 162, 325]
    assert spread[0].name == "train 0–150"
    workload = found[1].workload(speeds, NODES, load=0.8, seed=0)
    shared = found[0].workload(speeds, NODES, load=0.8, seed=0)
    assert len(workload) == 150
    assert np.array_equal(workload.steps[:75], shared.steps[75:])  # the same jobs


def test_a_slice_has_what_there_is_of_a_part() -> None:
    assert set(available()) == {"103959", "11cb48", "7f04ca", "ed69ec"}
    assert len(part_jobs("11cb48", "train")) == 1000  # the first half of 2,000
    assert len(part_jobs("11cb48", "sealed", evaluation=True)) == 0
    assert windows("11cb48", "validation", load_speeds(), NODES) == []


def test_a_trace_of_another_length_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = (AGENT.parent / "examples/traces/gavel/msr_seed0_ed69ec.csv").read_text().splitlines()
    (tmp_path / "gavel").mkdir()
    (tmp_path / "gavel" / "msr_seed0_ed69ec.csv").write_text("\n".join(lines[:101]) + "\n")
    monkeypatch.setenv("FEDSCHED_TRACES", str(tmp_path))
    with pytest.raises(DataFileError, match=r"traces.ed69ec.jobs: .* of 951 jobs and .* has 100"):
        part_jobs("ed69ec", "train")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("traces: {a: {file: x, jobs: 9, train: [0, 5], validation: [4, 6], sealed: [6, 9]}}",
         r"key traces\[...\]: train \(0, 5\).*without overlap"),
        ("traces: {a: {file: x, jobs: 9, train: [0, 5], validation: [5, 6]}}", "sealed"),
        ("traces: {a: {file: x, jobs: nine}}", "Expected `int`"),
        ("traces: {a: {fail: x}}", "unknown field `fail`"),
        ("traces: [", "no YAML"),
    ],
    ids=["overlap", "part missing", "no number", "misspelt", "no YAML"],
)  # fmt: skip
def test_a_file_that_cannot_be_is_refused_with_its_key(
    text: str, problem: str, tmp_path: Path
) -> None:
    path = tmp_path / "splits.yaml"
    path.write_text(text)
    with pytest.raises(DataFileError, match=problem) as raised:
        splits(path)
    assert str(raised.value).startswith(str(path))


def test_unknown_traces_and_parts_are_named() -> None:
    with pytest.raises(KeyError, match="no split for a trace 'zebra'"):
        part_jobs("zebra", "train")
    with pytest.raises(ValueError, match="no part 'test'; there are train, validation, sealed"):
        part_jobs("ed69ec", "test")  # type: ignore[arg-type]  # what a data file could say
    with pytest.raises(DataFileError, match="cannot be read"):
        splits(Path("nowhere.yaml"))
