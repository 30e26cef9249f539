"""The journal: what was appended is read back, whatever was torn, rotated or refused."""

import contextlib
import errno
import resource
import shutil
import signal
import struct
import zlib
from pathlib import Path

import msgspec
import numpy as np
import pytest

from agent import journal as journal_module
from agent.journal import Decision, Journal, PodEvent, Progress, pack, read, segments
from common.features import FEATURE_COUNT


def event(uid: str) -> PodEvent:
    return PodEvent(uid=uid, time=1.5, kind="bound", node="n1", gpus=2)


def uids(folder: Path, after: tuple[int, int] = (0, 0)) -> list[str]:
    return [record.uid for record, _, _ in read(folder, after) if isinstance(record, PodEvent)]


def test_records_of_every_kind_come_back_as_they_were(tmp_path: Path) -> None:
    decision = Decision(
        id="d", session="s", time=2.0, verb="queue", policy="", pods=["u", ""], nodes=["n", ""],
        features=b"\0" * 8, rule_scores=b"\0" * 8, action=1, log_prob=-0.5, temperature=0.1,
        pending=3, running=4, job_seconds=5.0, imbalance_seconds=6.0,
    )  # fmt: skip
    progress = Progress(
        uid="u", time=3.0, job_type="a", gpus=1, gpu_model="v100", steps_per_second=2.5,
        neighbours=["b"],
    )  # fmt: skip
    journal = Journal(tmp_path)
    for record in (decision, event("u"), progress):
        journal.append(record)
    assert [record for record, _, _ in read(tmp_path)] == [decision, event("u"), progress]


def among(nodes: int) -> Decision:
    """A decision among nodes of which many are alike, as they are in a cluster."""
    kinds = np.random.default_rng(0).normal(size=(5, FEATURE_COUNT)).astype(np.float32)
    return Decision(
        id="d", session="s", time=2.0, verb="prioritize", policy="", pods=["uid-of-a-pod"] * nodes,
        nodes=[f"node-{n}" for n in range(nodes)],
        features=kinds[np.arange(nodes) % len(kinds)].tobytes(),
        rule_scores=b"\0" * 4 * nodes, action=1, log_prob=0.0, temperature=0.0,
        pending=3, running=4, job_seconds=5.0, imbalance_seconds=6.0,
    )  # fmt: skip


def test_a_decision_among_hundreds_of_nodes_takes_little_room_and_comes_back_whole(
    tmp_path: Path,
) -> None:
    journal = Journal(tmp_path)
    journal.append(among(400))
    [(_, path)] = segments(tmp_path)
    assert path.stat().st_size < len(among(400).features) / 5
    assert [record for record, _, _ in read(tmp_path)] == [among(400)]


def test_a_journal_of_a_release_that_did_not_compress_is_read(tmp_path: Path) -> None:
    body = msgspec.msgpack.encode(among(400))
    frame = struct.pack("<II", len(body), zlib.crc32(body)) + body
    (tmp_path / "00000001.journal").write_bytes(frame)
    Journal(tmp_path).append(event("b"))
    assert [record for record, _, _ in read(tmp_path)] == [among(400), event("b")]


@pytest.mark.parametrize("body", [b"\xc1", b"\xc1\xff\xff\xff\xff", pack(among(400))[:-9]])
def test_a_sound_frame_with_a_compressed_record_that_is_none_is_passed_over(
    tmp_path: Path, body: bytes
) -> None:
    frame = struct.pack("<II", len(body), zlib.crc32(body)) + body
    (tmp_path / "00000001.journal").write_bytes(frame)
    Journal(tmp_path).append(event("b"))
    assert [record for record, _, _ in read(tmp_path)] == [None, event("b")]


def test_reading_goes_on_behind_a_position(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append(event("a"))
    [(_, segment, offset)] = read(tmp_path)
    journal.append(event("b"))
    journal.append(event("c"))
    [(_, _, behind_b), (_, _, behind_c)] = read(tmp_path, (segment, offset))
    assert uids(tmp_path, (segment, offset)) == ["b", "c"]
    assert uids(tmp_path, (segment, behind_b)) == ["c"]
    assert uids(tmp_path, (segment, behind_c)) == []


def test_a_torn_last_record_is_passed_over_and_the_next_process_is_read(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append(event("a"))
    journal.append(event("torn"))
    journal.close()
    [(_, path)] = segments(tmp_path)
    path.write_bytes(path.read_bytes()[:-1])
    Journal(tmp_path).append(event("b"))
    assert uids(tmp_path) == ["a", "b"]


def test_a_damaged_record_ends_its_segment_only(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append(event("a"))
    journal.close()
    [(_, path)] = segments(tmp_path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 0xFF
    path.write_bytes(data)
    Journal(tmp_path).append(event("b"))
    assert uids(tmp_path) == ["b"]


def test_an_absent_learner_costs_the_oldest_segments_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "SEGMENT_BYTES", 200)
    journal = Journal(tmp_path, limit_bytes=600)
    for number in range(60):
        journal.append(event(f"u{number}"))
    kept = uids(tmp_path)
    assert kept == [f"u{number}" for number in range(60)][-len(kept) :]
    assert 0 < len(kept) < 60
    assert journal.dropped_segments > 0


def test_a_disk_that_fills_up_loses_the_record_and_none_behind_it(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append(event("a"))
    [(_, path)] = segments(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, hard))
    try:
        with pytest.raises(OSError, match=r"full|large|space") as caught:
            journal.append(event("lost"))
        assert caught.value.errno in (errno.ENOSPC, errno.EFBIG)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    journal.append(event("b"))
    assert uids(tmp_path) == ["a", "b"]


def test_a_segment_that_cannot_be_begun_costs_records_and_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "SEGMENT_BYTES", 200)
    journal = Journal(tmp_path / "journal")
    shutil.rmtree(tmp_path / "journal")
    with contextlib.suppress(FileNotFoundError):
        for number in range(10):
            journal.append(event(f"u{number}"))
        pytest.fail("a segment was begun in a folder that is gone")
    other = tmp_path / "other"
    with other.open("wb"), pytest.raises(FileNotFoundError):  # it gets the lowest free descriptor
        journal.append(event("late"))
    assert other.read_bytes() == b""
    (tmp_path / "journal").mkdir()
    journal.append(event("begins a segment"))
    journal.append(event("b"))
    assert uids(tmp_path / "journal") == ["b"]
