"""The speeds file: written whole, read back, and refused with its cause where it is not sound."""

from pathlib import Path
from typing import Any

import pytest

from agent.cluster.speeds_file import KindSpeeds, SpeedsFile, SpeedsFileError, read, stamp, write


def speeds(**changes: Any) -> SpeedsFile:
    values: dict[str, Any] = {
        "gpu_models": ["v", "k"],
        "job_types": ["a"],
        "kinds": [KindSpeeds(job_type="a", gpus=2, slowdown=[0.0, 1.5])],
        "interference": [[0.2]],
    }
    return SpeedsFile(**{**values, **changes})


def test_what_is_written_is_read_back_and_a_new_file_has_another_stamp(tmp_path: Path) -> None:
    path = tmp_path / "state" / "speeds.json"
    assert stamp(path) is None
    write(path, speeds())
    first = stamp(path)
    assert read(path) == speeds()
    write(path, speeds())
    assert stamp(path) != first


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"gpu_models": ["v"]}, "'a' × 2 has 2 values, expected 1"),
        ({"interference": []}, "0 rows for 1 job types"),
        ({"interference": [[-0.1]]}, "negative or not finite"),
        ({"prior": [0.0, float("nan")]}, "the prior holds"),
        ({"version": 99}, "one release"),
    ],
)
def test_an_unsound_table_is_neither_written_nor_used(
    tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(SpeedsFileError) as caught:
        write(tmp_path / "speeds.json", speeds(**changes))
    assert says in str(caught.value)
    assert not (tmp_path / "speeds.json").exists()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'{"gpu_models": 1}'])
def test_a_torn_file_is_named_with_its_cure(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "speeds.json"
    path.write_bytes(content)
    with pytest.raises(SpeedsFileError, match="delete it and the learner writes it anew"):
        read(path)
