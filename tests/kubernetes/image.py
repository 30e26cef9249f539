"""What an image's Dockerfile says of the processes started from it; read by the chart tests."""

import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Image:
    """The last stage of a Dockerfile."""

    entrypoint: list[str]
    environment: dict[str, str]
    user: str
    folder: str
    """Where its processes begin."""
    copied: list[str]
    """What all stages take from the checkout."""


def instructions(path: Path) -> list[tuple[str, str]]:
    """(instruction, the rest) of each logical line, without comments."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(line.split()[0], line.partition(" ")[2]) for line in joined.splitlines() if line]


def read_image(path: Path) -> Image:
    """Read a Dockerfile."""
    entrypoint: list[str] = []
    environment: dict[str, str] = {}
    user, folder, copied = "", "/", []
    for name, rest in instructions(path):
        if name == "FROM":
            entrypoint, environment, user, folder = [], {}, "", "/"
        elif name == "ENTRYPOINT":
            entrypoint = shlex.split(rest.strip("[]").replace(",", " "))
        elif name == "ENV":
            environment |= dict(word.split("=", 1) for word in shlex.split(rest))
        elif name == "USER":
            user = rest
        elif name == "WORKDIR":
            folder = rest
        elif name == "COPY" and not rest.startswith("--from"):
            copied += shlex.split(rest)[:-1]
    return Image(entrypoint, environment, user, folder, copied)
