"""Generates the Python stubs of ``link.proto``; run as ``python -m common.stubs`` after a change.

The stubs are committed, so that installing needs no compiler; a test holds them to the contract.
Both ends name the one method of the service themselves, so no service stubs are needed.
"""

import importlib.resources
import subprocess
import sys
from pathlib import Path

STUBS = ("link_pb2.py", "link_pb2.pyi")


def generate(out: Path) -> None:
    """Write the stubs of ``common/link.proto`` below ``out``/common.

    Raises:
        RuntimeError: the protocol compiler is missing or rejects the contract.
    """
    root = Path(__file__).resolve().parent.parent
    try:
        included = importlib.resources.files("grpc_tools") / "_proto"
    except ModuleNotFoundError as error:
        raise RuntimeError(
            "grpcio-tools is not installed; install the extra fedsched[dev]"
        ) from error
    command = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        f"-I{root}",
        f"-I{included}",
        f"--python_out={out}",
        f"--pyi_out={out}",
        "common/link.proto",
    ]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the protocol compiler failed: {done.stderr.strip()}")


if __name__ == "__main__":
    generate(Path(__file__).resolve().parent.parent)
