"""A hub process that is killed at the worst moment comes back with what it had."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest

from agent.uploads import read_state
from common import link_pb2 as pb
from common.codec import decode_arrays
from common.features import FEATURES_VERSION
from common.identity import read_bundle
from common.policy import ARCHITECTURE, initial_arrays
from common.weights import load, version_id
from coordinator.registry import Registry
from examples.processes import free_ports
from tests.federation.support import WAIT, DummyLearner, RawMember, member, until, update

pytestmark = pytest.mark.timeout(600)  # only bounds a hanging run: five processes are started

MAIN = "from coordinator.cli import app; app()"
ROOT = Path(__file__).resolve().parents[2]


def environment(port: int) -> dict[str, str]:
    return {
        **os.environ,
        "FEDSCHED_COORDINATOR_LISTEN": f"127.0.0.1:{port}",
        "FEDSCHED_COORDINATOR_DASHBOARD_LISTEN": "127.0.0.1:0",
        "FEDSCHED_COORDINATOR_MIN_MEMBERS": "2",
        "FEDSCHED_COORDINATOR_SERVER_NAMES": '["localhost"]',
        "FEDSCHED_COORDINATOR_STRATEGY": "fedavg",
    }


@pytest.fixture
def hub_process(tmp_path):
    """Start ``coordinator serve`` in the test's state directory; killed by its pid at the end."""
    running: list[subprocess.Popen[bytes]] = []

    def start(port: int = 0) -> tuple[subprocess.Popen[bytes], dict[str, int]]:
        ready = tmp_path / "ready.json"
        ready.unlink(missing_ok=True)
        log = (tmp_path / "hub.log").open("ab")
        process = subprocess.Popen(
            [
                *(sys.executable, "-c", MAIN, "serve"),
                *("--state-dir", str(tmp_path / "hub"), "--ready-file", str(ready)),
            ],
            cwd=ROOT,
            env=environment(port),
            stdout=log,
            stderr=log,
        )
        log.close()
        running.append(process)
        until(lambda: ready.exists() or process.poll() is not None, "the hub listens")
        assert process.poll() is None, (tmp_path / "hub.log").read_text()
        return process, json.loads(ready.read_text())

    yield start
    for process in running:
        if process.poll() is None:
            process.kill()
        process.wait()


def enroll(tmp_path, name, port):
    out = tmp_path / f"{name}.tar"
    done = subprocess.run(
        [
            *(sys.executable, "-c", MAIN, "enroll", name),
            *("--state-dir", str(tmp_path / "hub"), "--out", str(out)),
        ],
        cwd=ROOT,
        env=environment(port),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return read_bundle(out)


class PolicyLearner(DummyLearner):
    """Learns with the arrays of the real policy."""

    def __init__(self):
        super().__init__()
        self.arrays = initial_arrays()

    def step(self, pods=1):
        with self._lock:
            self.arrays = {n: a + np.float32(0.01) for n, a in self.arrays.items()}
            self.rounds += 1
            self.pods += pods


def test_killed_hub_resumes_at_the_next_round_from_its_checkpoint(tmp_path, hub_process, closing):
    (port,) = free_ports(1)  # the kernel gives it to no outgoing connection while the hub is away
    process, _ = hub_process(port)
    learner = PolicyLearner()
    terms = {"features_version": FEATURES_VERSION, "architecture": ARCHITECTURE}
    closing(member(enroll(tmp_path, "alpha", port), learner, tmp_path / "alpha", **terms)).start()
    bundle = enroll(tmp_path, "beta", port)
    hello = pb.Hello(member="beta", **terms)
    raw = closing(RawMember(bundle, hello))
    until(lambda: ("global", 1) in learner.kinds, "the learner was asked")
    learner.step(pods=5)
    raw.send(update=update(raw.train(), change=0.02, pods=15))
    before = raw.train()
    assert before.round == 2
    until(lambda: ("global", 2) in learner.kinds, "the learner was asked again")
    learner.step(pods=7)
    until(lambda: read_state(tmp_path / "alpha", 0).round == 2, "it uploads")
    # Round 2 is open and one of its two updates is on the way: now the hub dies.
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert raw.ended.wait(WAIT)

    _, again = hub_process(port)
    assert again["link_port"] == port
    reborn = closing(RawMember(bundle, hello))
    train = reborn.train()
    assert train.round == 3
    assert train.version == before.version
    registry = closing(Registry(f"sqlite:///{tmp_path / 'hub' / 'registry.db'}"))
    saved = registry.checkpoint()
    assert saved.round == 1
    arrays, _ = load(tmp_path / "hub" / "policies" / saved.policy_file)
    assert version_id(arrays) == version_id(decode_arrays(train.arrays)) == saved.version
    # The learner that went on meanwhile reconnects by itself, and each of its pods counts once.
    until(lambda: ("global", 3) in learner.kinds, "the learner was asked by the new hub")
    learner.step(pods=2)
    reborn.send(update=update(train, pods=30))
    until(lambda: registry.checkpoint().round == 3, "round 3 is finished")
    counted = sum(u.num_examples for u in registry.updates(member="alpha") if u.accepted)
    assert counted == learner.pods == 24
    assert [r.number for r in registry.rounds()][-3:] == [3, 2, 1]


def test_terminated_hub_stops_cleanly_and_serves_its_page_until_then(tmp_path, hub_process):
    process, ready = hub_process()
    address = f"http://127.0.0.1:{ready['dashboard_port']}"
    assert ready["pid"] == process.pid
    assert httpx.get(f"{address}/healthz", timeout=WAIT).status_code == 200
    assert "fedsched" in httpx.get(f"{address}/metrics", timeout=WAIT).text
    process.terminate()
    assert process.wait(WAIT) == 0
    assert "Traceback" not in (tmp_path / "hub.log").read_text()
