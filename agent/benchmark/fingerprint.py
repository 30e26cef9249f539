"""A fingerprint of all that a suite's figures depend on, so that ``runner`` knows what still holds.

That is: the suite's data, the source of every module of ours that its module imports, directly or
not, the files that it names as inputs, and the versions of the libraries that calculate.
"""

import ast
import hashlib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from agent.benchmark.suite import Size, Suite
from agent.benchmark.suites import data_file

OURS = ("agent", "common", "coordinator", "examples")
LIBRARIES = ("numpy", "numba", "scipy", "torch")


def _imported(source: Path, package: str) -> Iterator[str]:
    """Names of our modules that a source mentions in an import, wherever that stands."""
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parts, base] if base else parts)
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def modules(start: str) -> list[Path]:
    """Sources of the module ``start`` and of all of ours that it imports, directly or not."""
    todo, found = [start], {}
    while todo:
        name = todo.pop()
        if name in found or name.split(".")[0] not in OURS:
            continue
        try:
            spec = find_spec(name)
        except ModuleNotFoundError:  # the parent is no package: the name is a function's or so
            spec = None
        if spec is None or spec.origin is None:
            continue
        source = Path(spec.origin)
        found[name] = source
        if source.suffix == ".py":
            package = name if source.name == "__init__.py" else name.rpartition(".")[0]
            todo += _imported(source, package)
    return sorted(set(found.values()))


def libraries() -> dict[str, str]:
    """Versions of the libraries that calculate, those that are installed."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def fingerprint(suite: Suite, size: Size) -> str:
    """Sixteen hexadecimal digits; others where any figure of the suite could be another."""
    digest = hashlib.sha256(f"{suite.name} {size} {libraries()}".encode())
    root = Path(__file__).resolve().parents[2]
    data = [path for path in [data_file(suite.name)] if path.exists()]
    for path in [*modules(type(suite).__module__), *data, *suite.inputs(size)]:
        # Named by where it lies in the tree: a checkout elsewhere has the same figures.
        name = path.relative_to(root) if path.is_relative_to(root) else path.name
        digest.update(f"{name}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]
