"""``agent serve`` as a process: start, the wiring, its files, and a clean end."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from agent.cluster import nodes_file
from agent.cluster.records import GATE
from agent.journal import Decision, PodEvent, read
from agent.lock import LockedError, sole
from agent.settings import SettingsError, load
from common.features import FEATURES_VERSION
from common.policy import initial_arrays
from common.weights import save
from tests.unit.api_server import ApiServer, event, node_json, pod_json, until

GOOD = {"version": "v7", "features_version": str(FEATURES_VERSION)}


@asynccontextmanager
async def serving(folder: Path, url: str, **settings: Any) -> AsyncIterator[tuple[int, int]]:
    """A real process on that API server; gives its pid and port, and ends it by its pid."""
    config, ready = folder / "member.yaml", folder / "ready.json"
    # A busy machine must neither cost an answer nor make a pod that was let go seem lost.
    patient = {"budget_seconds": 60.0, "assume_seconds": 600.0}
    serve = {"port": 0, "queue_seconds": 0.05, **patient, **settings}
    config.write_text(
        yaml.safe_dump(
            {"state": str(folder / "state"), "kubernetes": {"api_url": url}, "serve": serve}
        )
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "common", "agent", "serve", "--config", str(config),
        "--ready-file", str(ready), env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        await until(lambda: ready.exists() or process.returncode is not None)
        told = json.loads(ready.read_text())
        assert told["pid"] == process.pid
        yield told["pid"], told["port"]
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_process_watches_decides_picks_up_policies_and_lifts_all_gates_at_the_end(
    tmp_path: Path,
) -> None:
    server = ApiServer()
    server.objects["nodes"] = [node_json("n1")]
    full = pod_json("full", node="n1")
    full["spec"]["containers"][0]["resources"]["requests"]["nvidia.com/gpu"] = "3"
    server.objects["pods"] = [full, *(pod_json(f"g{i}", gates=(GATE,)) for i in range(3))]
    state = tmp_path / "state"
    async with server.serving(), aiohttp.ClientSession() as session:
        async with serving(tmp_path, server.url) as (_, port):
            base = f"http://127.0.0.1:{port}"
            await until(lambda: len(server.patches) == 1)  # one GPU is free: one pod goes
            async with session.get(f"{base}/readyz") as answer:
                assert answer.status == 200
            save(state / "policy" / "current.safetensors", initial_arrays(), GOOD)
            text = ""
            while "fedsched_policy_learned 1.0" not in text:
                async with session.get(f"{base}/metrics") as answer:
                    text = await answer.text()
                await asyncio.sleep(0.02)
            body = json.dumps({"Pod": pod_json("new"), "NodeNames": ["n1", "n2"]}).encode()
            async with session.post(f"{base}/prioritize", data=body) as answer:
                scores = await answer.json()
            assert scores == [{"Host": "n1", "Score": 5}]  # above n2, which it does not know
            await until(lambda: (state / "nodes.json").exists())
            assert len(server.patches) == 1
        assert len(server.patches) == 3  # SIGTERM lifted the two that waited
    assert [node.name for node in nodes_file.read(state / "nodes.json")] == ["n1"]
    records = [record for record, _, _ in read(state / "journal")]
    decisions = [record for record in records if isinstance(record, Decision)]
    assert [(d.verb, d.policy) for d in decisions] == [("queue", ""), ("prioritize", "v7")]
    created = [r.uid for r in records if isinstance(r, PodEvent) and r.kind == "created"]
    assert len(created) == len(set(created)) == 5


async def test_a_pod_that_comes_by_the_watch_is_released(tmp_path: Path) -> None:
    server = ApiServer()
    server.objects["nodes"] = [node_json("n1")]
    # Two watches are opened, of nodes and of pods, in either order; both may see the pod.
    line = event("ADDED", pod_json("x", gates=(GATE,)), 11)
    server.watches = [[line], [line]]
    async with server.serving(), serving(tmp_path, server.url):
        await until(lambda: len(server.patches) == 1)
        assert server.patches[0][0].endswith("/pods/x")


def test_serving_imports_no_torch_and_no_flwr() -> None:
    code = (
        "import sys, agent.scheduling.serve as s; s.warm_up('hrrn-eft');"
        "print(sorted({'torch', 'flwr', 'sqlalchemy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"


def test_two_processes_cannot_use_one_state_directory(tmp_path: Path) -> None:
    with (
        sole(tmp_path, "serve"),
        pytest.raises(LockedError, match="state directory of its own"),
        sole(tmp_path, "serve"),
    ):
        pass
    with sole(tmp_path, "serve"):
        pass


def test_the_environment_wins_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "member.yaml"
    path.write_text("clock_scale: 60\nserve: {port: 1, rule: sjf}\n")
    monkeypatch.setenv("FEDSCHED_AGENT_SERVE__PORT", "2")
    settings = load(path)
    assert (settings.clock_scale, settings.serve.port, settings.serve.rule) == (60.0, 2, "sjf")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("serve: {prot: 1}", "serve.prot: no such setting; did you mean 'port'"),
        ("clock_scales: 1", "clock_scales: no such setting; did you mean 'clock_scale'"),
        ("serve: {port: many}", "serve.port: Input should be a valid integer"),
        ("serve: {cpu_limit: 1.5}", "serve.cpu_limit"),
        ("- a list", "must hold settings as 'name: value' lines"),
        ("a: [", "is not a readable YAML file"),
    ],
)
def test_a_wrong_setting_is_named_with_its_cure(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "member.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=r"member\.yaml") as caught:
        load(path)
    assert says in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_misspelt_environment_variable_is_named() -> None:
    with pytest.raises(SettingsError, match=r"FEDSCHED_AGENT_CLOCK_SCALES.*clock_scale"):
        load(environ={"FEDSCHED_AGENT_CLOCK_SCALES": "2"})
