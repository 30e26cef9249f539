"""The demo on real clusters: three of them federate, lose processes, and are reported on."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.laptop.support import NAMES, Demo, alive

pytestmark = pytest.mark.timeout(900)  # only bounds a hanging run; one takes about two minutes
WAIT = 400.0
JOBS = 20
VICTIMS = {
    r"/kube-apiserver .*/north-cluster/": "kube-apiserver of north has ended; starting it again",
    r"agent serve .*/west\.yaml": "west serve ended with signal 9; starting it again",
}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    """A short run in which an API server and an agent were killed, to its end."""
    out = tmp_path_factory.mktemp("demo") / "out"
    arguments = ["--seconds", "20", "--jobs", str(JOBS), "--rounds", "1", "--windows", "2"]
    figures = ["--json", str(out / "figures.json")]
    with Demo(out, *arguments, *figures, command=("examples.lab", "demo")) as demo:
        demo.until(
            lambda: "the clusters' clocks start" in demo.said(), "all processes are up", WAIT
        )
        demo.until(lambda: demo.placed() >= 3, "pods are placed")
        for pattern, message in VICTIMS.items():
            (victim,) = demo.processes(pattern)
            victim.kill()
            demo.until(lambda message=message: message in demo.said(), f"{pattern} is back")
        demo.until(demo.ended, "the demo ends", WAIT)
        yield demo


def figures(demo: Demo) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((demo.out / "figures.json").read_text())
    return found


def test_it_ends_well_though_processes_were_killed_and_leaves_none(demo: Demo) -> None:
    assert demo.popen.returncode == 0, demo.said()
    assert "Traceback" not in demo.said()
    assert not alive(demo)


def test_table_has_pods_a_second_and_latency_beside_what_was_learned(demo: Demo) -> None:
    live, _, unseen = demo.said().partition("Jobs that no agent has seen")
    table = live.partition("The live clusters")[2]
    for column in ("prioritize", "attempt", "pods/s", "p99 ms"):
        assert column in table
    for name in NAMES:
        assert name in table
        assert name in unseen


def test_members_learned_from_real_clusters_and_federated(demo: Demo) -> None:
    found = figures(demo)
    finished = [round for round in found["rounds"] if round["finished"]]
    assert any(round["accepted"] >= 2 for round in finished)
    for name in NAMES:
        assert found["curves"][name], f"no point of {name}'s learning curve reached the hub"


def test_every_job_is_accounted_for_and_the_agents_were_asked(demo: Demo) -> None:
    for name, live in figures(demo)["live"].items():
        ended = live["finished"] + live["failed"]
        assert ended + live["unfinished"] + live["not_arrived"] == live["jobs"] == JOBS, name
        assert live["extender"]["calls"]["prioritize"] > 0
        assert live["extender"]["prioritize_p50_ms"] <= live["extender"]["prioritize_p99_ms"]
        assert live["kube_scheduler"]["pods_per_second"] > 0
        assert live["kube_scheduler"]["attempt_p50_ms"] > 0


def test_agents_saw_nodes_through_their_prometheus(demo: Demo) -> None:
    for name in NAMES:
        log = (demo.run / f"{name}-serve.log").read_text()
        assert "token-fedsched" in log, "the agent has its chart's rights"
        for source in ("cpu", "memory", "disk", "network", "gpu", "gpu_memory"):
            assert f"telemetry {source}: ok" in log, name


def test_nothing_that_ran_met_an_error_of_its_own(demo: Demo) -> None:
    for log in [*demo.run.glob("*.log"), *demo.run.glob("*-cluster/emulator.log")]:
        assert "Traceback" not in log.read_text(), log
