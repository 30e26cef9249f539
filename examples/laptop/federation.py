"""The demo's processes and what they tell: a hub, and of each member a cluster and three agents.

Of each member run ``simulate-cluster``, ``serve``, ``learn``, and a second ``learn`` that reads the
same journal and knows no hub: the agent alone, to compare with. ``__main__`` drives it.
"""

import json
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from agent.scheduling.decision import make_policy
from agent.simulator.hardware import SpeedTable
from agent.simulator.runs import Result, simulate
from agent.simulator.simulation import new_simulation
from agent.simulator.workloads import Workload
from examples.laptop.members import MEMBERS, Member, clock_scale, horizon
from examples.processes import (
    START_SECONDS,
    ExampleError,
    Process,
    Supervisor,
    check_free,
    fedsched,
    free_ports,
)

LEAST_ROUNDS = 10
LAST_WORD_SECONDS = 60.0
"""How long the end waits for the last word of a hub that is away or busy."""
CURVE = "reward"


def fetch(url: str, *, post: bool = False) -> Any:
    """JSON from a loopback address; None where nobody answers (a process that is coming back)."""
    request = urllib.request.Request(url, method="POST" if post else "GET")
    try:
        with urllib.request.urlopen(request, timeout=2.0) as answer:
            return json.loads(answer.read() or b"null")
    except (OSError, urllib.error.URLError, json.JSONDecodeError):
        return None


@dataclass(frozen=True)
class Options:
    """What a demo was asked for, by the names and meanings of its command line."""

    seconds: float
    jobs: int
    algorithm: str
    output: Path
    json_file: Path | None
    dashboard_port: int
    rounds: int
    windows: int


class Federation:
    """Everything that the demo runs. ``run`` is the folder of this run's logs and states."""

    members: tuple[Member, ...] = MEMBERS
    learners_prefix: tuple[str, ...] = ()
    """What learners are started by."""

    def __init__(
        self,
        supervisor: Supervisor,
        run: Path,
        speeds: SpeedTable,
        options: Options,
    ) -> None:
        self.supervisor, self.run, self.speeds = supervisor, run, speeds
        self.least_rounds, self.algorithm = options.rounds, options.algorithm
        if options.dashboard_port:
            check_free(options.dashboard_port)
        ports = free_ports(2 + len(self.members))
        self.link_port = ports[0]
        self.dashboard_port = options.dashboard_port or ports[1]
        self.serve_ports = dict(zip((m.name for m in self.members), ports[2:], strict=True))
        self.dashboard = f"http://127.0.0.1:{self.dashboard_port}"
        self.clusters: dict[str, str] = {}
        """URL of each member's cluster."""
        self.played: dict[str, Workload] = {}
        self.baseline: dict[str, Result] = {}
        """LeastAllocated on the same jobs, run beforehand."""
        self.scales: dict[str, float] = {}
        self._last: dict[str, Any] = {}
        for member in self.members:
            workload = member.played(options.jobs, speeds)
            self.played[member.name] = workload
            self.baseline[member.name] = simulate(
                new_simulation(workload, member.mix(), speeds),
                make_policy("least-allocated"),
                until=horizon(workload),
            )
            self.scales[member.name] = clock_scale(workload, options.seconds)

    def write(self, name: str, content: dict[str, Any]) -> str:
        """Write a settings file of this run; its path."""
        path = self.run / name
        path.write_text(yaml.safe_dump(content))
        return str(path)

    def _log(self, name: str) -> Path:
        return self.run / f"{name}.log"

    def start(self, say: Callable[[str], None]) -> None:
        """Start everything and set the clusters' clocks going."""
        hub = self.write(
            "hub.yaml",
            {
                "state_dir": str(self.run / "hub"),
                "listen": f"127.0.0.1:{self.link_port}",
                "dashboard_listen": f"127.0.0.1:{self.dashboard_port}",
                "min_members": 2,
                "round_timeout": 20.0,
            },
        )
        self._once("init", ["coordinator", "init", "--config", hub])
        for member in self.members:
            bundle = str(self.run / f"{member.name}-bundle")
            self._once(
                f"enroll {member.name}",
                ["coordinator", "enroll", member.name, "--out", bundle, "--config", hub],
            )
        ready = self.run / "hub.ready"
        command = fedsched("coordinator", "serve", "--config", hub, "--ready-file", str(ready))
        waiting = [(self.supervisor.start("hub", command, self._log("hub")), ready)]
        found = {}
        for member in self.members:
            self.clusters[member.name], found[member.name] = self.start_cluster(member)
        for member in self.members:
            waiting += self._start_agents(member, found[member.name])
        for process, ready in waiting:
            self.supervisor.wait_for(process, ready)
        say("All processes are up; the clusters' clocks start.")
        for url in self.clusters.values():
            while fetch(f"{url}/fedsched/start", post=True) is None:
                self.watch()  # it is busy, or has ended and the demo with it
                time.sleep(0.1)

    def _once(self, name: str, arguments: list[str]) -> None:
        process = self.supervisor.start(
            name, fedsched(*arguments), self._log("setup"), restart=False
        )
        assert process.popen is not None
        try:
            failed = process.popen.wait(START_SECONDS) != 0
        except subprocess.TimeoutExpired:
            failed = True
        if failed:
            raise ExampleError(f"{name} failed:\n{process.last_words()}")
        self.supervisor.processes.remove(process)

    def start_cluster(self, member: Member) -> tuple[str, dict[str, Any]]:
        """Start a member's cluster, its clock still standing.

        Returns the URL at which it tells its progress, and the agent's settings that lead to it.
        """
        name, port = member.name, self.serve_ports[member.name]
        config = self.write(
            f"{name}-cluster.yaml",
            member.cluster_settings(
                self.played[name], self.scales[name], f"http://127.0.0.1:{port}"
            ),
        )
        ready = self.run / f"{name}-cluster.ready"
        cluster = self.supervisor.start(
            f"{name} cluster",
            fedsched("agent", "simulate-cluster", "--config", config, "--ready-file", str(ready),
                     "--result", str(self.run / f"{name}-result.json")),
            self._log(f"{name}-cluster"),
            restart=False,
        )  # fmt: skip
        url = str(self.supervisor.wait_for(cluster, ready)["url"])
        return url, {
            "kubernetes": {"api_url": url},
            "serve": {"stale_seconds": 30.0},
            "telemetry": {"seconds": 2.0},
        }

    def _start_agents(self, member: Member, cluster: dict[str, Any]) -> list[tuple[Process, Path]]:
        name, port, scale = member.name, self.serve_ports[member.name], self.scales[member.name]
        started = []
        state = self.run / name
        alone = self.run / f"{name}-alone"
        alone.mkdir()
        (alone / "nodes.json").symlink_to(Path("..") / name / "nodes.json")
        common: dict[str, Any] = {"port": port, "algorithm": self.algorithm, "cluster": cluster}
        bundle = self.run / f"{name}-bundle"
        configs = {
            "": self.write(
                f"{name}.yaml", member.agent_settings(state, scale, bundle=bundle, **common)
            ),
            "-alone": self.write(
                f"{name}-alone.yaml", member.agent_settings(alone, scale, bundle=None, **common)
            ),
        }
        commands = {
            "serve": ["serve", "--config", configs[""]],
            "learn": ["learn", "--config", configs[""]],
            "learn-alone": [
                "learn", "--config", configs["-alone"], "--journal", str(state / "journal"),
            ],
        }  # fmt: skip
        for role, arguments in commands.items():
            ready = self.run / f"{name}-{role}.ready"
            process = self.supervisor.start(
                f"{name} {role}",
                [
                    *(self.learners_prefix if role.startswith("learn") else ()),
                    *fedsched("agent", *arguments, "--ready-file", str(ready)),
                ],
                self._log(f"{name}-{role}"),
            )
            started.append((process, ready))
        return started

    def watch(self) -> None:
        """Bring back what died."""
        self.supervisor.watch()

    def poll(self) -> dict[str, Any]:
        """What everybody tells now; a process that is away keeps its last word."""
        found: dict[str, Any] = {
            "overview": fetch(f"{self.dashboard}/api/v1/overview"),
            "rounds": (fetch(f"{self.dashboard}/api/v1/rounds?limit=2000") or {}).get("rounds"),
        }
        for name, url in self.clusters.items():
            found[name] = fetch(f"{url}/fedsched/progress")
            status = self.run / name / "learn-status.json"
            found[f"{name} learner"] = json.loads(status.read_text()) if status.exists() else None
        self._last |= {key: value for key, value in found.items() if value is not None}
        return self._last

    @property
    def over(self) -> bool:
        """Whether all clusters are done and the federation had its rounds (or two minutes more)."""
        if not all(self._last.get(m.name, {}).get("over") for m in self.members):
            return False
        if self.shared_rounds() >= self.least_rounds:
            return True
        self._last.setdefault("waiting since", time.monotonic())
        return bool(time.monotonic() - self._last["waiting since"] > 120.0)

    def shared_rounds(self) -> int:
        """Finished rounds in which members learned from each other: two and more took part."""
        return sum(1 for r in self._rounds() if r.get("finished") and r.get("accepted", 0) >= 2)

    def _rounds(self) -> list[dict[str, Any]]:
        return list(self._last.get("rounds") or [])

    def so_far(self, name: str) -> tuple[float, float] | None:
        """Mean completion time of the jobs that ended: (live, LeastAllocated on the same jobs), s.

        None while no job has ended.
        """
        times = self._last.get(name, {}).get("completion_seconds") or []
        ended = [at for at, seconds in enumerate(times) if seconds is not None]
        if not ended:
            return None
        live = float(np.mean([times[at] for at in ended]))
        return live, float(np.mean(self.baseline[name].completion[ended]))

    def finish(
        self,
    ) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, list[list[float]]]]:
        """Take the last word of everybody and end all processes.

        Returns the live figures by member, the rounds oldest first, and the learning curves.
        """
        end = time.monotonic() + LAST_WORD_SECONDS
        while True:
            self.watch()  # what died in the last moment comes back to tell
            curves = {member.name: self._curve(member.name) for member in self.members}
            if None not in curves.values() or time.monotonic() > end:
                break
            time.sleep(0.5)
        last = self.poll()
        rounds = sorted(self._rounds(), key=lambda r: int(r["number"]))
        live = {
            m.name: last[m.name]
            | {
                "baseline_mean_seconds": float(np.mean(self.baseline[m.name].completion)),
                "clock_scale": self.scales[m.name],
            }
            for m in self.members
        }
        self.close()
        return live, rounds, {name: points or [] for name, points in curves.items()}

    def _curve(self, name: str) -> list[list[float]] | None:
        """A member's learning curve; None where the hub does not answer."""
        url = f"{self.dashboard}/api/v1/members/{name}/metrics?name={CURVE}&limit=2000"
        answer = fetch(url)
        return None if answer is None else answer.get("points", [])

    def close(self) -> None:
        """End all processes."""
        self.supervisor.stop()
