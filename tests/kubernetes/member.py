"""A real member beside a lab's cluster: its two processes, one address, one settings file.

Called by the tests of safety and of crashes, which end the processes in all sorts of ways.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import httpx
import yaml

from agent.scheduling.serve import warm_up
from examples.lab.figures import Figures
from examples.processes import Process, fedsched, free_ports

WAIT = 240.0
"""Longest wait for something that must happen, seconds; it only bounds a failing test."""
PATIENCE = 60.0
"""How long an answer of the agent's may take on a machine that is busy with other things."""
Value = TypeVar("Value")


def until(condition: Callable[[], Value], what: str) -> Value:
    """Wait for a true value, and return it."""
    end = time.monotonic() + WAIT
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.05)
    raise AssertionError(f"waited in vain until {what}")


class Agent:
    """``agent serve`` and ``agent learn`` of one member; port and settings outlive them."""

    def __init__(self, folder: Path, kubeconfig: Path, settings: dict[str, Any]) -> None:
        """``settings`` are sections of the settings file; state, port and access are filled in."""
        warm_up("hrrn-eft")  # so that no test waits for a compiler
        folder.mkdir(parents=True, exist_ok=True)
        self.state = folder / "state"
        self.port = free_ports(1)[0]
        self.url = f"http://127.0.0.1:{self.port}"
        self.config = folder / "agent.yaml"
        access = {"kubeconfig": str(kubeconfig), "in_cluster": "never"}
        whole = {
            **settings,
            "state": str(self.state),
            "kubernetes": {**access, **settings.get("kubernetes", {})},
            "serve": {"port": self.port, **settings.get("serve", {})},
        }
        self.config.write_text(yaml.safe_dump(whole))
        self.serve = Process("serve", self._command("serve"), folder / "serve.log")
        self.learn = Process("learn", self._command("learn"), folder / "learn.log")

    def _command(self, name: str) -> list[str]:
        return fedsched("agent", name, "--config", str(self.config))

    def ready(self) -> bool:
        """Whether it serves, with both watches in; fails the test where it has died."""
        assert self.serve.alive, f"agent serve ended:\n{self.serve.last_words()}"
        try:
            return self.get("/readyz").status_code == 200
        except httpx.TransportError:
            return False

    def get(self, path: str) -> httpx.Response:
        """What it answers. Raises httpx.TransportError where it does not."""
        return httpx.get(f"{self.url}{path}", timeout=PATIENCE)

    def figures(self) -> Figures:
        """All that it counts, at one moment; nothing where it does not answer."""
        try:
            return Figures(self.get("/metrics").text)
        except httpx.TransportError:
            return Figures("")

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the series of a metric that have these labels; 0 where it does not answer."""
        return self.figures().total(name, **labels)

    def opinions(self) -> float:
        """Prioritize answers that held scores."""
        said = self.figures()
        answers = said.total("fedsched_extender_answers_total", verb="prioritize")
        return answers - said.total("fedsched_extender_no_opinion_total")

    def silent(self, reason: str) -> float:
        """Answers without an opinion for this reason."""
        return self.metric("fedsched_extender_no_opinion_total", reason=reason)

    def stop(self) -> None:
        """End both processes at once."""
        self.serve.kill()
        self.learn.kill()
