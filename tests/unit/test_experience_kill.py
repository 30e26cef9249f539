"""A learner that dies between any two statements neither loses nor repeats a decision."""

import os
import shutil
import signal
from pathlib import Path

from agent.journal import Journal, Progress
from agent.learning.experience import take
from agent.learning.store import Store
from tests.unit.journals import decision, placed


def learn_once(store: Store, journal: Path) -> None:
    """What a learner does in a round, with a count of learned decisions in place of a network."""
    store.ingest(journal, lambda reading: ("key", reading.steps_per_second))
    taken = take(store, 3, outcome_wait=1e6)
    if taken.fates:
        learned = 0 if taken.batch is None else len(taken.batch)
        state = int(store.blob("learner") or b"0") + learned
        store.commit(taken.fates, {"learner": str(state).encode()}, {"scheduled": taken.scheduled})


def killed_at(statement: int, folder: Path) -> bool:
    """Learn in a child that kills itself before its nth SQL statement; whether it came to that."""
    child = os.fork()
    if child == 0:
        try:
            store = Store(folder / "experience.sqlite")
            left = statement

            def count(_: str) -> None:
                nonlocal left
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

            store._db.set_trace_callback(count)
            for _ in range(3):
                learn_once(store, folder / "journal")
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def test_a_kill_before_any_sql_statement_neither_loses_nor_repeats(tmp_path: Path) -> None:
    origin = Journal(tmp_path / "origin" / "journal")
    reading = Progress(
        uid="a", time=12, job_type="j", gpus=1, gpu_model="m", steps_per_second=2, neighbours=[]
    )
    for record in (decision(1), decision(2, "a"), *placed("a", "n0", 21), reading, decision(3)):
        origin.append(record)
    origin.append(decision(4))
    origin.append(decision(5))
    origin.close()
    statement, killed = 0, True
    while killed:
        statement += 1
        folder = tmp_path / f"kill-{statement}"
        shutil.copytree(origin.folder, folder / "journal")
        killed = killed_at(statement, folder)
        store = Store(folder / "experience.sqlite")
        # What was learned and the record of it are there together or not at all.
        assert store.fates()["learned"] == int(store.blob("learner") or b"0")
        for _ in range(3):
            learn_once(store, folder / "journal")
        assert store.fates()["learned"] == int(store.blob("learner") or b"0") == 4
        assert store.counter("scheduled") == 1
        assert store.counter("decisions") == 5
        assert store.counter("repeated_decisions") == store.counter("repeated_events") == 0
        assert store.speed_sums() == {"key": (1.0, 2.0, 4.0)}
        store.close()
    assert statement > 50
