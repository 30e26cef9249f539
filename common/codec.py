"""Between arrays in memory and messages of ``link.proto``; called by both ends of the link.

Decoding trusts nothing: whatever a peer sends either fits the expected form or raises
:class:`MalformedError` with the reason.
"""

import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from common import link_pb2 as pb
from common.speeds import Peers, SpeedRow, SpeedTable
from common.weights import QUANTUM, Arrays, QuantisedDelta, QuantisedTensor

Shapes = dict[str, tuple[int, ...]]
_MAX_VARINT = 5
"""Bytes of the longest gap: 35 bits, beyond any tensor here."""


class MalformedError(ValueError):
    """A message's payload does not have the form that it must have; the text says what is off."""


def shapes_of(arrays: Arrays) -> Shapes:
    """Name and shape of each array."""
    return {name: array.shape for name, array in arrays.items()}


def encode_arrays(arrays: Arrays) -> list[pb.FullTensor]:
    """Full-precision tensors, in the order of their names."""
    return [
        pb.FullTensor(
            name=name,
            shape=arrays[name].shape,
            values=np.ascontiguousarray(arrays[name], dtype="<f4").tobytes(),
        )
        for name in sorted(arrays)
    ]


def decode_arrays(tensors: Iterable[pb.FullTensor]) -> Arrays:
    """Inverse of :func:`encode_arrays`.

    Raises:
        MalformedError: the bytes do not fit the shape, or a name comes twice.
    """
    arrays: Arrays = {}
    for tensor in tensors:
        if tensor.name in arrays:
            raise MalformedError(f"the array {tensor.name} comes twice")
        shape = tuple(tensor.shape)
        if len(tensor.values) != 4 * math.prod(shape):
            raise MalformedError(
                f"{tensor.name} has {len(tensor.values)} bytes, its shape {shape} needs "
                f"{4 * math.prod(shape)}"
            )
        values = np.frombuffer(tensor.values, "<f4").astype(np.float32)
        arrays[tensor.name] = values.reshape(shape)
    return arrays


def encode_gaps(index: npt.NDArray[np.int64]) -> bytes:
    """Ascending positions as base-128 varints of their gaps, the first counted from -1."""
    gaps = np.diff(index, prepend=-1)
    if gaps.size and gaps.min() < 1:
        raise ValueError("positions must ascend from 0 without repeating")
    lengths = np.ones(gaps.size, np.int64)
    for power in range(1, _MAX_VARINT):
        lengths += gaps >= 1 << (7 * power)
    out = np.zeros(int(lengths.sum()), np.uint8)
    starts = np.cumsum(lengths) - lengths
    for place in range(_MAX_VARINT):
        rows = np.flatnonzero(lengths > place)
        more = np.where(lengths[rows] > place + 1, 0x80, 0)
        out[starts[rows] + place] = (gaps[rows] >> (7 * place)) & 0x7F | more
    return out.tobytes()


def decode_gaps(code: bytes, size: int) -> npt.NDArray[np.int64]:
    """Positions below ``size`` from :func:`encode_gaps`' code.

    Raises:
        MalformedError: a number is cut off or too long, a gap is zero or a position out of range.
    """
    raw = np.frombuffer(code, np.uint8)
    last = raw < 0x80
    if not raw.size or not last[-1]:
        raise MalformedError("the code of the positions is cut off")
    ends = np.flatnonzero(last)
    starts = np.concatenate([[0], ends[:-1] + 1])
    lengths = ends - starts + 1
    if lengths.max() > _MAX_VARINT:
        raise MalformedError("a position's code is longer than five bytes")
    place = np.arange(raw.size) - np.repeat(starts, lengths)
    gaps = np.zeros(ends.size, np.int64)
    np.add.at(
        gaps, np.repeat(np.arange(ends.size), lengths), (raw & 0x7F).astype(np.int64) << (7 * place)
    )
    if gaps.min() < 1:
        raise MalformedError("a position comes twice")
    index = np.cumsum(gaps) - 1
    if index[-1] >= size:
        raise MalformedError(f"position {index[-1]} lies outside a tensor of {size} entries")
    return index


def encode_delta(code: QuantisedDelta) -> list[pb.Tensor]:
    """INT8 tensors, in the order of their names."""
    return [
        pb.Tensor(
            name=name,
            shape=code[name].shape,
            scale=code[name].scale,
            values=code[name].values.tobytes(),
            gaps=b"" if (index := code[name].positions) is None else encode_gaps(index),
        )
        for name in sorted(code)
    ]


def decode_delta(tensors: Iterable[pb.Tensor], expected: Shapes) -> QuantisedDelta:
    """Inverse of :func:`encode_delta` for exactly the tensors ``expected``.

    Raises:
        MalformedError: a name is unknown, missing or twice, a shape differs, a scale is not a
            finite number of at least 0, levels are out of -127..127, or positions do not fit.
    """
    code: QuantisedDelta = {}
    for tensor in tensors:
        name, shape = tensor.name, tuple(tensor.shape)
        if name not in expected:
            # The name is a stranger's text: it is reported by its length alone.
            raise MalformedError(f"an array has an unknown name of {len(name)} characters")
        if name in code:
            raise MalformedError(f"the array {name} comes twice")
        if shape != expected[name]:
            raise MalformedError(f"{name} has shape {shape}, expected {expected[name]}")
        if not (math.isfinite(tensor.scale) and tensor.scale >= 0.0):
            raise MalformedError(f"{name} has the scale {tensor.scale}, expected a finite one >= 0")
        size = math.prod(shape)
        index = decode_gaps(tensor.gaps, size) if tensor.gaps else None
        count = size if index is None else index.size
        if len(tensor.values) != count:
            raise MalformedError(f"{name} has {len(tensor.values)} levels for {count} entries")
        values = np.frombuffer(tensor.values, np.int8)
        if values.size and values.min() < -QUANTUM:
            raise MalformedError(f"{name} has a level of -128, allowed are -127..127")
        code[name] = QuantisedTensor(shape, tensor.scale, values, index)
    if missing := sorted(expected.keys() - code.keys()):
        raise MalformedError(f"the array {missing[0]} is missing")
    return code


def encode_speeds(table: SpeedTable) -> list[pb.SpeedRow]:
    """Rows in the order of their keys."""
    return [
        pb.SpeedRow(key=key, n=r.n, sum_x=r.sum_x, sum_x2=r.sum_x2)
        for key, r in sorted(table.items())
    ]


def encode_peers(peers: Peers) -> pb.PeerSpeeds:
    """What a member is told of the others."""
    return pb.PeerSpeeds(
        members=peers.members,
        rows=encode_speeds(peers.rows),
        unconfirmed=encode_speeds(peers.unconfirmed),
    )


def decode_peers(message: pb.PeerSpeeds) -> Peers:
    """Inverse of :func:`encode_peers`. Raises MalformedError as :func:`decode_speeds` does."""
    return Peers(message.members, decode_speeds(message.rows), decode_speeds(message.unconfirmed))


def decode_speeds(rows: Iterable[pb.SpeedRow]) -> SpeedTable:
    """Inverse of :func:`encode_speeds`; the bounds are checked by :func:`common.speeds.check`.

    Raises:
        MalformedError: a key comes twice.
    """
    table: SpeedTable = {}
    for row in rows:
        if row.key in table:
            raise MalformedError(f"the speed row {row.key:016x} comes twice")
        table[row.key] = SpeedRow(row.n, row.sum_x, row.sum_x2)
    return table
