"""One process of a kind for each state directory; taken by ``agent serve`` and ``agent learn``."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


class LockedError(RuntimeError):
    """Another process of the kind works on the state directory."""


@contextlib.contextmanager
def sole(folder: Path, name: str) -> Iterator[None]:
    """Hold ``folder`` for one ``agent NAME``; the kernel frees it even when the process is killed.

    Raises LockedError with the holder's pid.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            raise LockedError(
                f"another 'agent {name}' (pid {holder}) uses {folder}; stop it first, or give this "
                "one a state directory of its own (setting 'state')"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
