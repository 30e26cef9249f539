"""Named weight arrays: arithmetic, INT8 deltas and files; used by learner, member link and hub.

A policy is a dictionary of named float32 arrays. What a member uploads is the difference between
its own arrays and those that the hub sent, quantised to one byte per entry with one scale per
tensor. What quantising (and leaving out small entries) loses is kept as a residual and added to
the next upload, so that over many uploads nothing is lost: error feedback, as in
https://arxiv.org/abs/1901.09847.
"""

import hashlib
import json
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load as load_safetensors
from safetensors.numpy import save as save_safetensors

Arrays = dict[str, npt.NDArray[np.float32]]
"""A policy's weights by name."""

QUANTUM = 127
"""Levels on either side of zero; -128 is never used, so that the code is symmetric."""


class WeightsFileError(ValueError):
    """A weights file is missing, truncated or not a weights file; the message says which."""


class QuantisedTensor(NamedTuple):
    """One tensor of a delta: ``values * scale`` at the flat ``positions``."""

    shape: tuple[int, ...]
    scale: float
    values: npt.NDArray[np.int8]
    """[K] levels in -127..127."""
    positions: npt.NDArray[np.int64] | None
    """[K] ascending flat positions (C order), or None when every entry is present."""


QuantisedDelta = dict[str, QuantisedTensor]


def like(arrays: Arrays, value: float = 0.0) -> Arrays:
    """Arrays of the same names and shapes, filled with ``value``."""
    return {name: np.full(a.shape, value, np.float32) for name, a in arrays.items()}


def copy(arrays: Mapping[str, npt.NDArray[np.float32]]) -> Arrays:
    """A deep copy in float32, C order."""
    return {name: np.array(a, dtype=np.float32, order="C") for name, a in arrays.items()}


def check_same_form(left: Arrays, right: Arrays) -> None:
    """Raise ValueError, naming the array, unless both have the same names and shapes."""
    if odd := sorted(left.keys() ^ right.keys()):
        raise ValueError(f"only one side has the array {odd[0]}; both must be one architecture")
    for name, array in left.items():
        if array.shape != right[name].shape:
            raise ValueError(f"{name} has shape {array.shape} here and {right[name].shape} there")


def flatten(arrays: Arrays) -> npt.NDArray[np.float32]:
    """All entries as one vector [P], tensors in the order of their names."""
    if not arrays:
        return np.zeros(0, np.float32)
    return np.concatenate([np.ravel(arrays[name]) for name in sorted(arrays)])


def delta(arrays: Arrays, base: Arrays) -> Arrays:
    """``arrays - base``, name by name."""
    check_same_form(arrays, base)
    return {name: (array - base[name]).astype(np.float32) for name, array in arrays.items()}


def apply(base: Arrays, change: Arrays) -> Arrays:
    """``base + change``, name by name."""
    check_same_form(base, change)
    return {name: (array + change[name]).astype(np.float32) for name, array in base.items()}


def interpolate(local: Arrays, shared: Arrays, eta: float) -> Arrays:
    """A member's own policy: ``eta * local + (1 - eta) * shared``.

    ``eta`` 0 gives the shared policy and 1 the local one (model interpolation,
    https://arxiv.org/abs/2002.10619).
    """
    if not 0.0 <= eta <= 1.0:
        raise ValueError(f"eta is {eta}; it must lie between 0 (all shared) and 1 (all local)")
    check_same_form(local, shared)
    weight = np.float32(eta)
    return {n: weight * a + (np.float32(1.0) - weight) * shared[n] for n, a in local.items()}


def carry_progress(pushed: Arrays, now: Arrays, at_upload: Arrays) -> Arrays:
    """A pushed policy plus what was learned since the upload: ``pushed + (now - at_upload)``.

    A member goes on learning while the hub aggregates; taking the push as it is would throw that
    work away.
    """
    return apply(pushed, delta(now, at_upload))


def norm(arrays: Arrays) -> float:
    """Euclidean norm over all entries, summed in float64."""
    return math.sqrt(sum(float(np.sum(np.square(a, dtype=np.float64))) for a in arrays.values()))


def version_id(arrays: Arrays) -> str:
    """SHA-256 (64 hex digits) over names, shapes and little-endian float32 values."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name], dtype="<f4")
        digest.update(f"{name}:{array.shape}:".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _quantise_tensor(x: npt.NDArray[np.float64], keep: float) -> QuantisedTensor:
    flat = x.ravel()
    index: npt.NDArray[np.int64] | None = None
    kept = flat
    if keep < 1.0 and flat.size:
        count = math.ceil(keep * flat.size)
        index = np.sort(np.argpartition(np.abs(flat), flat.size - count)[flat.size - count :])
        index = index.astype(np.int64)
        kept = flat[index]
    peak = float(np.max(np.abs(kept))) if kept.size else 0.0
    # The scale travels as float32; the levels are computed with the rounded value, so that both
    # ends agree on the result to the last bit.
    scale = float(np.float32(peak / QUANTUM))
    if scale == 0.0:
        return QuantisedTensor(x.shape, 0.0, np.zeros(kept.size, np.int8), index)
    levels = np.clip(np.rint(kept / scale), -QUANTUM, QUANTUM).astype(np.int8)
    return QuantisedTensor(x.shape, scale, levels, index)


def quantise(
    change: Arrays, residual: Arrays | None = None, keep: float = 1.0
) -> tuple[QuantisedDelta, Arrays]:
    """Quantise ``change + residual`` to INT8; return the code and the new residual.

    Args:
        change: the delta to send.
        residual: what earlier calls lost, same form; None at first.
        keep: fraction of entries sent per tensor, the largest by magnitude, in (0, 1].

    Raises:
        ValueError: ``keep`` is out of range, the forms differ, or an entry is not finite.
    """
    if not 0.0 < keep <= 1.0:
        raise ValueError(f"keep is {keep}; it must be above 0 and at most 1 (1 sends every entry)")
    if residual is not None:
        check_same_form(change, residual)
    code: QuantisedDelta = {}
    left: Arrays = {}
    for name, array in change.items():
        wanted = array.astype(np.float64)
        if residual is not None:
            wanted = wanted + residual[name]
        if not np.isfinite(wanted).all():
            raise ValueError(f"{name} holds NaN or infinite entries and cannot be quantised")
        tensor = _quantise_tensor(wanted, keep)
        code[name] = tensor
        left[name] = (wanted - _dequantise_tensor(tensor)).astype(np.float32)
    return code, left


def _dequantise_tensor(tensor: QuantisedTensor) -> npt.NDArray[np.float64]:
    out = np.zeros(math.prod(tensor.shape), np.float64)
    values = tensor.values.astype(np.float64) * tensor.scale
    if tensor.positions is None:
        out[:] = values
    else:
        out[tensor.positions] = values
    return out.reshape(tensor.shape)


def dequantise(code: QuantisedDelta) -> Arrays:
    """The delta that a code stands for; entries that were not sent are zero."""
    return {name: _dequantise_tensor(t).astype(np.float32) for name, t in code.items()}


def write_atomic(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Replace the file ``path`` by ``content``: a reader sees the old file or the new one, whole.

    Written beside it, synced, renamed, and the directory synced; a crash at any point leaves the
    old file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def save(path: Path, arrays: Arrays, metadata: Mapping[str, str] | None = None) -> None:
    """Write arrays and string metadata as a safetensors file, replacing ``path`` atomically."""
    contiguous = {n: np.ascontiguousarray(a, dtype=np.float32) for n, a in arrays.items()}
    write_atomic(path, save_safetensors(contiguous, metadata=dict(metadata or {})))


def load(path: Path) -> tuple[Arrays, dict[str, str]]:
    """Read what :func:`save` wrote.

    Raises:
        WeightsFileError: the file is missing, truncated or of another kind.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise WeightsFileError(f"cannot read the weights file {path}: {error.strerror}") from error
    try:
        loaded = load_safetensors(content)
        (length,) = struct.unpack_from("<Q", content)
        metadata = json.loads(content[8 : 8 + length]).get("__metadata__", {})
    except (SafetensorError, struct.error, ValueError, KeyError) as error:
        raise WeightsFileError(
            f"{path} is truncated or no safetensors file ({error}); "
            "delete it to start anew or restore it from a copy"
        ) from error
    for name, array in loaded.items():
        if array.dtype != np.float32:
            raise WeightsFileError(f"{path}: {name} is {array.dtype}, expected float32")
    return dict(loaded), {str(key): str(value) for key, value in metadata.items()}
