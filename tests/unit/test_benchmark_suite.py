"""Suites' data: what differs by size is one thing in all of them, and refused alike."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.benchmark.suite import BySize
from agent.benchmark.suites import SUITES, data_file, load_suite
from agent.data_files import DataFileError


def by_size(data: dict[str, Any], above: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """All that data says by size, with their keys."""
    for key, value in data.items():
        if isinstance(value, dict):
            if value.keys() == {"reduced", "full"}:
                yield above + key, value
            else:
                yield from by_size(value, f"{above}{key}.")


def shipped(suite: str) -> dict[str, Any]:
    data: dict[str, Any] = yaml.safe_load(data_file(suite).read_text())
    return data


KEYS = [(suite, key) for suite in SUITES for key, _ in by_size(shipped(suite))]


def refusal(suite: str, data: dict[str, Any], path: Path) -> str:
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(DataFileError) as raised:
        type(load_suite(suite))(path)
    return str(raised.value)


def test_every_suite_says_something_by_size() -> None:
    assert {suite for suite, _ in KEYS} == set(SUITES)


@pytest.mark.parametrize(("suite", "key"), KEYS)
def test_what_differs_by_size_is_refused_by_file_key_and_what_is_expected(
    suite: str, key: str, tmp_path: Path
) -> None:
    path = tmp_path / f"{suite}.yaml"
    for change, wanted in (
        ({"full": 0}, f"key {key}.full: Expected `"),
        ({"reduced": "many"}, f"key {key}.reduced: Expected `"),
        ({"reduce": 3}, f"key {key}: Object contains unknown field `reduce`"),
    ):
        data = shipped(suite)
        dict(by_size(data))[key].update(change)
        told = refusal(suite, data, path)
        assert told.startswith(f"{path}, {wanted}")
        assert told.endswith("; correct it there")


def test_each_size_has_its_own() -> None:
    traces = BySize(reduced=("default",), full=("default", "cpu050"))
    assert traces.of("reduced") == ("default",)
    assert traces.of("full") == ("default", "cpu050")
