"""``make lab`` gives clusters that kubectl works with, brings back what dies, and ends whole."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
WAIT = 240.0
"""Longest wait, seconds; it only bounds a failing test."""


class Lab:
    """The command as a process of its own, with one cluster of two nodes."""

    def __init__(self, out: Path) -> None:
        self.out, self.log = out, out.with_suffix(".log")
        with self.log.open("wb") as log:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "examples.lab", "up", "--nodes", "2", "--out", str(out)],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def said(self) -> str:
        return self.log.read_text()

    def children(self) -> list[psutil.Process]:
        """Its living processes, found by their command lines, whoever their parent is."""
        return [
            process
            for process in psutil.process_iter(["cmdline", "status"])
            if process.pid != self.popen.pid
            and str(self.out) in " ".join(process.info["cmdline"] or ())
            and process.info["status"] != "zombie"
        ]

    def until(self, met: Callable[[], object], what: str) -> None:
        end = time.monotonic() + WAIT
        while not met():
            assert time.monotonic() < end, f"waited in vain until {what}:\n{self.said()}"
            assert self.popen.poll() is None, self.said()
            time.sleep(0.1)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    lab = Lab(tmp_path / "out")
    yield lab
    for process in [lab.popen, *lab.children()]:
        process.kill()
    lab.popen.wait()


def test_lab_works_as_it_says_and_ends_at_ctrl_c(lab: Lab) -> None:
    lab.until(lambda: "Ctrl-C ends everything." in lab.said(), "the lab is up")
    said = lab.said()
    exports = dict(re.findall(r"^  export (\w+)=(\S+)", said, re.MULTILINE))
    path = exports["PATH"].removesuffix(":$PATH")
    environment = os.environ | {"KUBECONFIG": exports["KUBECONFIG"]}
    nodes = subprocess.run(
        [f"{path}/kubectl", "get", "nodes", "--output=name"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert nodes.stdout.split() == ["node/cpu-0", "node/gpu-0"]
    pids = dict(re.findall(r"^ *([\w-]+) +(\d+) +127", said, re.MULTILINE))
    assert {p.pid for p in lab.children()} == {int(pid) for pid in pids.values()}
    psutil.Process(int(pids["kube-scheduler"])).kill()
    lab.until(lambda: "kube-scheduler of lab-0 has ended; starting it again" in lab.said(), "so")
    lab.until(lambda: len(lab.children()) == len(pids), "it is back")
    lab.popen.send_signal(signal.SIGINT)
    assert lab.popen.wait(WAIT) == 0
    assert "Stopped by SIGINT" in lab.said()
    # The kernel ends the one that was just being started, when its parent has gone.
    gone = time.monotonic() + WAIT
    while lab.children():
        assert time.monotonic() < gone, lab.children()
        time.sleep(0.1)
