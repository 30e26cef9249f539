"""The demo as a process of its own: its children, what they tell, and how to do them harm."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil

from agent.cluster.records import GATE
from examples.laptop.federation import CURVE

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("north", "west", "south")
WAIT = 150.0
"""Longest wait for something that must happen, seconds; it only bounds a failing test."""


class Demo:
    """One run of a demo's command. A context manager that leaves no process behind."""

    def __init__(
        self, out: Path, *arguments: str, command: tuple[str, ...] = ("examples.laptop",)
    ) -> None:
        self.out = out
        out.mkdir(parents=True)
        self.log = out / "demo.log"
        with self.log.open("wb") as log:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", *command, "--out", str(out), *arguments],
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "120"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.learning: dict[str, list[tuple[int, int, int]]] = {name: [] for name in NAMES}
        """(learning rounds, decisions learned from, pods counted) of each learner over time."""
        self.finished: list[int] = []
        """Number of the newest finished round over time."""

    def __enter__(self) -> "Demo":
        return self

    def __exit__(self, *_: object) -> None:
        for process in [self.popen, *self.processes()]:
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                process.kill()
        self.popen.wait()

    # ---- what it says ----

    def said(self) -> str:
        """All that it printed so far."""
        return self.log.read_text(errors="replace")

    @property
    def run(self) -> Path:
        """The folder of the run."""
        (found,) = self.out.glob("run-*")
        return found

    def until(self, condition: Callable[[], Any], what: str, seconds: float = WAIT) -> Any:
        """Wait for a condition, taking note of how everybody stands meanwhile."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if value := condition():
                return value
            self.note()
            time.sleep(0.1)
        raise AssertionError(f"waited in vain until {what}; the demo said:\n{self.said()}")

    def note(self) -> None:
        """Write down the counts that must never fall."""
        if not list(self.out.glob("run-*")):
            return
        for name in NAMES:
            if status := self.status(name):
                counts = status["learning_rounds"], status["fates"]["learned"]
                self.learning[name].append((*counts, status["scheduled_pods"]))
        if numbers := [r["number"] for r in self.rounds() if r["state"] == "finished"]:
            self.finished.append(max(numbers))

    def status(self, name: str) -> dict[str, Any] | None:
        """What a member's learner wrote down last."""
        path = self.run / name / "learn-status.json"
        return json.loads(path.read_text()) if path.exists() else None

    def progress(self, name: str) -> dict[str, Any]:
        """How far a member's cluster is."""
        url = f"{self.cluster(name)}/fedsched/progress"
        found: dict[str, Any] = httpx.get(url, timeout=WAIT).json()
        return found

    def placed(self) -> int:
        """Pods on nodes, over all members."""
        return sum(self.progress(name)["placed"] for name in NAMES)

    def learned(self) -> int:
        """Learning rounds so far, over all members."""
        return sum(
            (self.status(name) or {"learning_rounds": 0})["learning_rounds"] for name in NAMES
        )

    def ended(self) -> bool:
        """Whether the command has come to its end."""
        return self.popen.poll() is not None

    def over(self) -> bool:
        """Whether every cluster has come to its end."""
        return all(self.progress(name)["over"] for name in NAMES)

    def cluster(self, name: str) -> str:
        """URL of a member's cluster."""
        ready = json.loads((self.run / f"{name}-cluster.ready").read_text())
        return str(ready["url"])

    def rounds(self) -> list[dict[str, Any]]:
        """The hub's rounds, newest first; none where it does not answer."""
        return list(self._hub("rounds?limit=1000").get("rounds", []))

    def members(self) -> dict[str, dict[str, Any]]:
        """The hub's members by name; none where it does not answer."""
        return {member["name"]: member for member in self._hub("members").get("members", [])}

    def all_connected(self) -> dict[str, dict[str, Any]]:
        """The hub's members, once it has a session with every one of them; none before that."""
        members = self.members()
        gone = [name for name, member in members.items() if member["state"] != "connected"]
        return {} if gone else members

    def curve(self, name: str) -> list[list[float]]:
        """A member's rewards over time, as the hub knows them."""
        return list(self._hub(f"members/{name}/metrics?name={CURVE}").get("points", []))

    def _hub(self, path: str) -> dict[str, Any]:
        ready = self.run / "hub.ready"
        if not ready.exists():
            return {}
        port = json.loads(ready.read_text())["dashboard_port"]
        try:
            url = f"http://127.0.0.1:{port}/api/v1/{path}"
            found: dict[str, Any] = httpx.get(url, timeout=WAIT).json()
        except httpx.HTTPError:
            return {}
        return found

    # ---- its processes ----

    def processes(self, pattern: str = "") -> list[psutil.Process]:
        """Living processes of this run whose command line matches."""
        found = []
        for process in psutil.process_iter(["cmdline", "status"]):
            line = " ".join(process.info["cmdline"] or ())
            ours = str(self.out) in line and process.pid != self.popen.pid
            if ours and re.search(pattern, line) and process.info["status"] != "zombie":
                found.append(process)
        return found

    @contextlib.contextmanager
    def outage(self, *patterns: str) -> Any:
        """Kill what matches each pattern; it stays away until the block ends."""
        self.popen.send_signal(signal.SIGSTOP)  # so that nobody brings it back
        try:
            for pattern in patterns:
                (victim,) = self.processes(pattern)
                victim.kill()
                self.until(lambda pid=victim.pid: pid not in alive(self), f"{pattern} is dead")
            yield
        finally:
            self.popen.send_signal(signal.SIGCONT)

    def lift_gates(self, name: str) -> int:
        """Take the gates off a member's pods, as an operator whose agent is gone would."""
        lifted = 0
        pods = httpx.get(f"{self.cluster(name)}/api/v1/pods", timeout=WAIT).json()["items"]
        for pod in pods:
            gates = [gate["name"] for gate in pod["spec"].get("schedulingGates") or []]
            if GATE in gates:
                meta = pod["metadata"]
                place = f"/spec/schedulingGates/{gates.index(GATE)}"
                answer = httpx.patch(
                    f"{self.cluster(name)}/api/v1/namespaces/{meta['namespace']}/pods/"
                    f"{meta['name']}",
                    content=json.dumps([{"op": "remove", "path": place}]),
                    headers={"Content-Type": "application/json-patch+json"},
                    timeout=WAIT,
                )
                lifted += answer.status_code == 200
        return lifted


def alive(demo: Demo) -> set[int]:
    """Process ids of the demo's living children."""
    return {process.pid for process in demo.processes()}


def failures(progress: dict[str, Any]) -> int:
    """Calls of a member's scheduler that its agent did not answer."""
    return sum(progress["extender"]["failures"].values())
