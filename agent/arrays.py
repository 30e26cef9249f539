"""Compiles array kernels once for every process of a machine; called by all kernel modules."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Features = npt.NDArray[np.float32]
"""What a policy sees and its weights: single precision, as the learner's."""

F = TypeVar("F", bound=Callable[..., Any])


def kernel_cache() -> Path:
    """Where compiled kernels are kept: ``FEDSCHED_CACHE`` or the user's cache folder.

    numba tells by a file's own time stamp whether its compiled code is current, and would go on
    using code that inlined another module's older kernels. So the folder is named after a hash of
    all kernel sources (and numba's version): whatever changes, all is compiled anew.
    """
    base = os.environ.get("FEDSCHED_CACHE") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    digest = hashlib.sha256(numba.__version__.encode())
    for source in sorted(Path(__file__).parent.rglob("*.py")):
        text = source.read_bytes()
        if any(mark in text for mark in (b"@kernel", b"@lean", b"@inlined")):
            digest.update(text)
    return Path(base).expanduser() / "fedsched" / f"kernels-{digest.hexdigest()[:16]}"


vars(numba.config)["CACHE_DIR"] = str(kernel_cache())  # it declares its settings at run time


def kernel(function: F) -> F:
    """Compile ``function`` with numba, keeping its Python signature for the type checker.

    The machine code is cached on disk, so that only the first process on a machine pays for it;
    ``nogil`` lets a serving process go on with its event loop meanwhile.
    """
    return cast(F, numba.njit(cache=True, nogil=True)(function))


def lean(function: F) -> F:
    """Compile a kernel that makes no arrays, without counting references to those it is given.

    A view is dozens of arrays; counting them up and down at each call of a small kernel costs ten
    times what the kernel does. One that does make an array is refused when it is compiled.
    """
    uncounted: dict[str, Any] = {"_nrt": False}  # which numba's own types do not know
    return cast(F, numba.njit(cache=True, nogil=True, **uncounted)(function))


def inlined(function: F) -> F:
    """Compile a small kernel into each of its callers; called in the loops of lean kernels."""
    return cast(F, numba.njit(cache=True, nogil=True, inline="always")(function))
