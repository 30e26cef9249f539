"""The journal that joins serving and learning: what was decided and what became of the pods.

``agent serve`` appends, ``agent learn`` reads; they share nothing else that grows. One record is
one ``os.write`` to a file opened for appending: the data is with the kernel before the answer goes
out, so a killed process loses nothing that it answered, and no disk is waited for. Each record is
framed by its length and CRC-32; a torn last record (a machine that lost power) is passed over.

A record is msgpack, and where it is long, LZ4 of that: nodes of one kind look alike, and what was
decided among hundreds of them shrinks to a fifteenth, for writer, reader and disk.
"""

import contextlib
import errno
import math
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import lz4.block
import msgspec
import numpy as np
import numpy.typing as npt

_FRAME = struct.Struct("<II")
_SUFFIX = ".journal"
SEGMENT_BYTES = 8 << 20
_LONG_BYTES = 1 << 10
_COMPRESSED = b"\xc1"
"""First byte of what is compressed: the one with which no msgpack begins."""


class Decision(msgspec.Struct, frozen=True, kw_only=True, tag="decision", array_like=True):
    """One choice among candidates, as it was made; rows are candidates, in one order throughout."""

    id: str
    session: str
    """The serving process that decided; integrals are comparable within one session only."""
    time: float
    """Cluster seconds since the epoch."""
    verb: str
    """``queue`` (which pod goes now, or wait) or ``prioritize`` (which node for one pod)."""
    policy: str
    """Version of the policy that decided; empty for the rule alone."""
    pods: list[str]
    """[C] pod UID of each candidate; empty for waiting."""
    nodes: list[str]
    """[C] node name of each candidate; empty for waiting."""
    features: bytes
    """[C, FEATURE_COUNT] float32, C order."""
    rule_scores: bytes
    """[C] float32, the rule's score of each candidate: 0 for its own choice, below for others."""
    action: int
    """The row that was preferred."""
    log_prob: float
    """Log probability with which the behaviour policy preferred that row; 0 where it was greedy."""
    temperature: float
    """Softmax temperature of the behaviour policy; 0 for greedy."""
    pending: int
    running: int
    job_seconds: float
    """∫ jobs in the system dt since the session began, cluster seconds."""
    imbalance_seconds: float
    """∫ Σ (U_i − Ū)² dt over nodes since the session began, cluster seconds."""


class PodEvent(msgspec.Struct, frozen=True, kw_only=True, tag="pod", array_like=True):
    """Something that was seen to happen to a pod; ``(uid, kind)`` happens once.

    New fields go to the end: a journal of an earlier release is then read with their defaults.
    """

    uid: str
    time: float
    """Cluster seconds since the epoch, by the agent's own clock."""
    kind: str
    """created, bound, started, or how it ended: one of ``agent.cluster.outcomes.OUTCOMES``."""
    node: str = ""
    job_type: str = ""
    gpus: int = 0
    gpu_model: str = ""
    gpu_share: float = 0.0
    cpu: float = 0.0
    memory: float = 0.0
    gpu_memory: float = 0.0
    run_seconds: float = 0.0
    """Cluster seconds between bound and ended; 0 before."""
    reason: str = ""
    """What Kubernetes calls it: ``OOMKilled``, ``Evicted``, ``OutOfcpu``, …"""
    job: str = ""
    """What its attempts have in common: the UID of the first pod, or controller and index."""
    attempt: int = 0
    """How many pods of the job this one replaced."""
    pending_seconds: float = 0.0
    """Cluster seconds between created and bound by the agent's own clock; 0 before."""
    deadline: float = math.inf
    """Of a created pod: cluster seconds since the epoch."""
    gpu_models: list[str] = []
    """Of a created pod: GPU models that it accepts; empty for any."""
    memory_used: float = 0.0
    """The most memory that it was measured to use so far, GiB; 0 where nobody measured."""
    work: str = ""
    """Of a created pod: what earlier runs of it have too (``agent.cluster.records.Pod.work``)."""


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag="progress", array_like=True):
    """One reading of a running pod's progress, with who it shared its GPU with."""

    uid: str
    time: float
    job_type: str
    gpus: int
    gpu_model: str
    steps_per_second: float
    neighbours: list[str]
    """Job types on the same GPU, sorted."""


class Census(msgspec.Struct, frozen=True, kw_only=True, tag="census", array_like=True):
    """All pods that were there when a session had its first whole list.

    A pod that was spoken of before and is not among them ended while no session looked.
    """

    time: float
    uids: list[str]


Record = Decision | PodEvent | Progress | Census
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


def pack(record: Record) -> bytes:
    """The record as journal and experience keep it."""
    body = _encoder.encode(record)
    return body if len(body) < _LONG_BYTES else _COMPRESSED + lz4.block.compress(body)


def unpack(body: bytes) -> Record:
    """What :func:`pack` made a record into. Raises msgspec.DecodeError for anything else."""
    if body[:1] != _COMPRESSED:
        return _decoder.decode(body)
    try:
        plain = lz4.block.decompress(memoryview(body)[1:])
    except (lz4.block.LZ4BlockError, ValueError) as error:
        raise msgspec.DecodeError(f"a compressed record is damaged: {error}") from error
    return _decoder.decode(plain)


def floats(data: bytes, columns: int = 0) -> npt.NDArray[np.float32]:
    """The float32 array in ``data``, [C] or, with ``columns``, [C, columns]."""
    array = np.frombuffer(data, np.float32)
    return array.reshape(-1, columns) if columns else array


class Journal:
    """The writing end: a folder of numbered segments, a new one for each process and 8 MiB.

    ``limit_bytes`` bounds what an absent learner can let pile up: the oldest segments go first,
    counted in :attr:`dropped_segments`.
    """

    def __init__(self, folder: Path, *, limit_bytes: int = 256 << 20) -> None:
        self.folder = folder
        self.limit_bytes = limit_bytes
        self.dropped_segments = 0
        folder.mkdir(parents=True, exist_ok=True)
        self._number = max((number for number, _ in segments(folder)), default=0)
        self._file = -1
        self._size = 0
        self._rotate()

    def _rotate(self) -> None:
        number = self._number + 1
        path = self.folder / f"{number:08d}{_SUFFIX}"
        # First the new one: where it cannot be had, a closed descriptor would soon be the number of
        # another file or connection, and get the records.
        opened = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o600)
        self.close()
        self._file, self._number, self._size = opened, number, 0
        kept = []
        for _, path in segments(self.folder):
            with contextlib.suppress(FileNotFoundError):  # the learner deletes what it has read
                kept.append((path, path.stat().st_size))
        total = sum(size for _, size in kept)
        for old, size in kept[:-1]:
            if total <= self.limit_bytes:
                break
            old.unlink(missing_ok=True)
            total -= size
            self.dropped_segments += 1

    def append(self, record: Record) -> None:
        """Hand one record to the kernel. Raises OSError where the disk is full or gone."""
        body = pack(record)
        frame = _FRAME.pack(len(body), zlib.crc32(body)) + body
        if os.write(self._file, frame) < len(frame):
            # A disk that fills up takes a part; left there, it would hide all records behind it.
            os.ftruncate(self._file, self._size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.folder))
        self._size += len(body) + _FRAME.size
        if self._size >= SEGMENT_BYTES:
            self._rotate()

    def close(self) -> None:
        """Close the open segment."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def segments(folder: Path) -> list[tuple[int, Path]]:
    """The folder's segments as (number, path), oldest first."""
    found = [(int(p.stem), p) for p in folder.glob(f"*{_SUFFIX}") if p.stem.isdigit()]
    return sorted(found)


def read(folder: Path, after: tuple[int, int] = (0, 0)) -> Iterator[tuple[Record | None, int, int]]:
    """Yield ``(record, segment, offset behind it)`` of all that lies behind position ``after``.

    A sound record of a form that this release does not know is None. Each segment is read up to
    its first incomplete or damaged record: that is being written, or was torn. A segment number
    below ``after`` is passed over.
    """
    for number, path in segments(folder):
        if number < after[0]:
            continue
        begin = after[1] if number == after[0] else 0
        try:
            with path.open("rb") as file:
                file.seek(begin)
                data = file.read()
        except FileNotFoundError:  # dropped meanwhile
            continue
        offset = 0
        while offset + _FRAME.size <= len(data):
            size, crc = _FRAME.unpack_from(data, offset)
            body = data[offset + _FRAME.size : offset + _FRAME.size + size]
            if len(body) < size or zlib.crc32(body) != crc:
                break
            offset += _FRAME.size + size
            try:
                record = unpack(body)
            except msgspec.DecodeError:
                yield None, number, begin + offset
            else:
                yield record, number, begin + offset
