"""A suite of a few cells for the tests of the benchmark's runner, which loads it by its name."""

import json
import os
import subprocess
import sys
from pathlib import Path

from agent.benchmark.suite import Cell, Comparison, Figures, Say, Size, Suite
from agent.simulator import splits

FOLDER = "TINY_SUITE_FOLDER"
"""Environment variable: a folder with ``orders.json``, and where runs of cells leave a trace."""

TOIL_SECONDS = 0.5
_TOIL = f"import time\nwhile time.process_time() < {TOIL_SECONDS}: pass"


def orders() -> dict[str, str]:
    """What the test wants to happen, by arm; ``prepare`` is one of them."""
    found: dict[str, str] = json.loads((Path(os.environ[FOLDER]) / "orders.json").read_text())
    return found


class TinySuite(Suite):
    """Two arms on six windows of two traces; ``fast`` takes nine tenths of ``slow``'s time."""

    name = "tiny"
    title = "A test."
    comparisons = (Comparison("mean_completion", "slow"),)
    timed = frozenset({"cost_us"})

    def cells(self, size: Size) -> list[Cell]:
        windows = 6 if size == "reduced" else 12
        return [
            Cell("tiny", "load 0.8", arm, f"{trace} {number}", trace, number)
            for trace in ("a", "b")
            for number in range(windows // 2)
            for arm in ("slow", "fast")
        ]

    def prepare(self, size: Size, folder: Path, say: Say) -> None:
        if orders().get("prepare") == "peek":
            splits.part_jobs("ed69ec", "sealed", evaluation=True)
        if orders().get("prepare") == "toil":
            subprocess.run([sys.executable, "-c", _TOIL], check=True)
        say(f"prepared for {size}")
        (folder / "fitted").write_text("2.0")

    def inputs(self, size: Size) -> list[Path]:
        del size
        return [Path(os.environ[FOLDER]) / "input"]

    def run(self, cell: Cell, folder: Path) -> Figures:
        with (Path(os.environ[FOLDER]) / "ran").open("a") as file:
            file.write(f"{cell.arm} {cell.window}\n")
        order = orders().get(f"{cell.arm} {cell.window}", "")
        if order == "raise":
            raise ValueError("no such luck")
        if order == "die":
            os._exit(3)
        if order == "stop":
            os.kill(os.getppid(), 2)  # as Ctrl-C does
        factor = float((folder / "fitted").read_text()) * (0.9 if cell.arm == "fast" else 1.0)
        value = float("nan") if order == "nan" else factor * (10.0 + cell.seed)
        return {"mean_completion": value, "cost_us": float(os.getpid())}
