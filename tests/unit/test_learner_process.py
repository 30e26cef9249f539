"""`agent learn` as a process: killed, stopped, beside another, and what it reads."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent.cluster import leader_file
from agent.journal import Journal, segments
from agent.learning.learn import run
from agent.learning.learner import OnlineLearner
from agent.learning.store import Store
from agent.lock import LockedError, sole
from agent.settings import ElectionSettings, LearnSettings, Settings
from tests.unit.journals import decision, placed
from tests.unit.learners import FAST, varied

# Importing torch, all of it, takes seconds. So one process imports, and forks a learner for every
# line that it reads: the state directory to run on. It answers with the pid and, later, exit code.
NURSERY = """
import os, sys
from pathlib import Path
from agent.learning.algorithms import make_algorithm
from agent.learning.learn import run
from agent.settings import LearnSettings, load
make_algorithm(LearnSettings())
print("ready", flush=True)
for line in sys.stdin:
    folder = Path(line.strip())
    pid = os.fork()
    if pid == 0:
        sys.stdin.close()
        run(load(folder / "agent.yaml"), ready_file=folder / "ready.json")
        os._exit(0)
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class Process:
    """``agent learn`` in a process of its own, one at a time."""

    def __init__(self, nursery: "subprocess.Popen[str]", folder: Path) -> None:
        self.nursery, self.folder = nursery, folder
        config = {"state": str(folder / "state"), "learn": FAST}
        (folder / "agent.yaml").write_text(json.dumps(config))
        self.ready = folder / "ready.json"
        self.status = folder / "state" / "learn-status.json"
        self.pid = 0

    def start(self) -> None:
        assert self.nursery.stdin is not None
        assert self.nursery.stdout is not None
        self.ready.unlink(missing_ok=True)
        self.nursery.stdin.write(f"{self.folder}\n")
        self.nursery.stdin.flush()
        self.pid = int(self.nursery.stdout.readline())
        until(self.ready.exists)
        assert json.loads(self.ready.read_text())["pid"] == self.pid

    def end(self, number: signal.Signals) -> int:
        assert self.nursery.stdout is not None
        os.kill(self.pid, number)
        self.pid = 0
        return int(self.nursery.stdout.readline())


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def nursery() -> Iterator["subprocess.Popen[str]"]:
    child = subprocess.Popen(
        [sys.executable, "-c", NURSERY],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        yield child
    finally:
        child.kill()
        child.communicate(timeout=30)


@pytest.fixture
def process(nursery: "subprocess.Popen[str]", tmp_path: Path) -> Iterator[Process]:
    made = Process(nursery, tmp_path)
    try:
        yield made
    finally:
        if made.pid:
            made.end(signal.SIGKILL)


def test_kill_9_at_any_moment_neither_loses_nor_repeats_a_decision(process: Process) -> None:
    state = process.folder / "state"
    journal = Journal(state / "journal")
    rng = random.Random(4)
    written = 0

    def write() -> None:
        """One more decision, every third one placing a pod that runs and ends."""
        nonlocal written
        written += 1
        pod = f"pod-{written}" if written % 3 == 0 else ""
        journal.append(varied(decision(written, pod)))
        if pod:
            for record in placed(pod, "n0", 10.0 * written + 1):
                journal.append(record)

    for _ in range(12):
        process.start()
        for _ in range(rng.randint(10, 60)):
            write()
            time.sleep(0.005)  # what is drawn is the moment of the kill
        assert process.end(signal.SIGKILL) == -signal.SIGKILL
    process.start()

    def settled() -> bool:
        # All but the last few, which make no batch of their own.
        seen = json.loads(process.status.read_text())
        return sum(seen["fates"].values()) >= written - FAST["min_batch"]

    until(settled)
    assert process.end(signal.SIGTERM) == 0
    journal.close()
    store = Store(state / "experience.sqlite")
    try:
        fates = store.fates()
        assert store.counter("decisions") == written
        assert fates["learned"] + store.open_count() == written
        assert sum(fates.values()) == fates["learned"]
        learner = OnlineLearner(
            Settings(state=state, learn=LearnSettings(**FAST)), store, journal=journal.folder
        )
        # Each round's decisions and the learner that learned from them are of one transaction.
        assert learner.transitions == fates["learned"]
        assert learner.algorithm.updates == learner.learning_rounds
        placing = sum(1 for n in range(3, fates["learned"] + 1, 3))
        assert store.counter("scheduled") == placing
    finally:
        store.close()


def test_sigterm_finishes_cleanly_and_a_second_learner_is_refused(process: Process) -> None:
    process.start()
    state = process.folder / "state"
    with (
        pytest.raises(LockedError, match=f"pid {process.pid}.*state directory of its own"),
        sole(state, "learn"),
    ):
        pass
    assert process.end(signal.SIGTERM) == 0
    with sole(state, "learn"):  # the lock went with the process
        pass


def test_a_second_state_directory_may_learn_from_the_same_journal(tmp_path: Path) -> None:
    owner = Journal(tmp_path / "owner" / "journal")
    for number in range(1, 9):
        owner.append(varied(decision(number)))
        if number % 3 == 0:
            owner.close()
            owner = Journal(owner.folder)
    owner.close()
    before = len(segments(owner.folder))
    settings = Settings(
        state=tmp_path / "reader", learn=LearnSettings(**{**FAST, "keep_segments": 0})
    )
    stop = threading.Event()
    reader = threading.Thread(
        target=run, args=(settings,), kwargs={"journal": owner.folder, "stop": stop}
    )
    reader.start()
    try:
        status = settings.state / "learn-status.json"
        until(status.exists)
        until(lambda: json.loads(status.read_text())["learning_rounds"] > 0)
    finally:
        stop.set()
        reader.join()
    assert len(segments(owner.folder)) == before


def test_a_replica_that_does_not_lead_learns_nothing_until_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(
        state=tmp_path, election=ElectionSettings(mode="lease"), learn=LearnSettings(**FAST)
    )
    journal = Journal(settings.journal_dir)
    for number in range(1, 9):
        journal.append(varied(decision(number)))
    journal.close()
    looks = 0
    read = leader_file.read

    def counted(path: Path) -> leader_file.Leadership:
        nonlocal looks
        looks += 1
        return read(path)

    monkeypatch.setattr(leader_file, "read", counted)
    stop, problems = threading.Event(), []

    def work() -> None:
        try:
            run(settings, stop=stop)
        except Exception as error:  # noqa: BLE001 - shown by the test's own thread
            problems.append(error)

    def learned() -> int:
        store = Store(tmp_path / "experience.sqlite")
        try:
            return store.counter("decisions")
        finally:
            store.close()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        until(lambda: looks > 20 or not thread.is_alive())
        assert learned() == 0
        held = leader_file.Leadership(True, "me", time.time() + 60.0, 60.0)
        leader_file.write(settings.leader_file, held)
        until(lambda: learned() == 8 or not thread.is_alive())
    finally:
        stop.set()
        thread.join()
    assert not problems
    assert learned() == 8
