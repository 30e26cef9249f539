"""A whole federation as a user runs it: its processes are killed, and nothing is lost."""

import json
import signal
import sqlite3
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agent.journal import Decision, read
from agent.learning.learner import STATE_BLOB, Saved
from agent.learning.speeds import sample
from agent.learning.store import FATES, Store
from coordinator.registry import Registry
from examples.laptop.evaluation import ARMS
from examples.laptop.federation import CURVE
from examples.processes import Supervisor, fedsched
from tests.laptop.support import NAMES, WAIT, Demo, alive, failures

pytestmark = pytest.mark.timeout(1500)  # only bounds a hanging run; one takes about a minute

ROUNDS = 3
HUB = "coordinator serve"
SERVES = tuple(f"agent serve .*/{name}.yaml" for name in NAMES)
LEARNER = "agent learn .*/north.yaml"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    """A run of the demo during which hub, serving processes and a learner are killed.

    What can only be seen at the time is checked here; when the tests get it, it has ended.
    """
    out = tmp_path_factory.mktemp("laptop") / "out"
    arguments = (
        *("--seconds", "40", "--jobs", "150", "--json", str(out / "figures.json")),
        *("--rounds", str(ROUNDS), "--windows", "2"),
    )
    with Demo(out, *arguments) as demo:
        demo.until(lambda: "Dashboard:" in demo.said(), "everything is up", 600.0)
        _kill_serving(demo)
        demo.until(lambda: demo.learned(), "somebody learns")
        _kill_hub(demo)
        _kill_learner(demo)
        demo.until(demo.ended, "the demo ends")
        yield demo


def _kill_serving(demo: Demo) -> None:
    demo.until(lambda: demo.placed() > len(NAMES), "the agents place")
    with demo.outage(*SERVES):
        before = {name: demo.progress(name) for name in NAMES}

        def own_scores() -> bool:
            for name in NAMES:
                demo.lift_gates(name)
                now = demo.progress(name)
                more = now["placed"] > before[name]["placed"]
                if more and failures(now) > failures(before[name]):
                    return True
            return False

        demo.until(own_scores, "kube-scheduler places by its own scores, and counts them")
    placed = demo.placed()
    demo.until(lambda: demo.placed() > placed or demo.over(), "the agents place again")


def _kill_hub(demo: Demo) -> None:
    demo.until(lambda: demo.rounds(), "the hub has begun a round")
    before = demo.rounds()[0]["number"]
    with demo.outage(HUB):
        placed, learned = demo.placed(), demo.learned()
        demo.until(lambda: demo.placed() > placed or demo.over(), "placements go on without it")
        demo.until(lambda: demo.learned() > learned, "learning goes on without it")
    demo.until(lambda: demo.rounds() and demo.rounds()[0]["number"] > before, "a new round begins")
    numbers = sorted(r["number"] for r in demo.rounds())
    assert numbers == list(range(1, len(numbers) + 1))
    demo.until(demo.all_connected, "every member is back")


def _kill_learner(demo: Demo) -> None:
    demo.until(lambda: demo.curve("north"), "the hub sees how it learns")
    with demo.outage(LEARNER):
        before = demo.status("north")
        assert before is not None
        finished = max(demo.finished, default=0)
        demo.until(
            lambda: max(demo.finished, default=0) > finished, "rounds go on without one member"
        )
        assert demo.status("north") == before
    demo.until(lambda: demo.ended() or demo.processes(LEARNER), "the learner comes back")


@pytest.fixture(scope="module")
def drained(demo: Demo) -> Demo:
    """The run after hub and learners were started once more and had read and sent everything."""
    run = demo.run
    supervisor = Supervisor(say=lambda _: None)
    commands = {"hub": ["coordinator", "serve", "--config", str(run / "hub.yaml")]} | {
        name: ["agent", "learn", "--config", str(run / f"{name}.yaml")] for name in NAMES
    }
    commands["hub"] += ["--ready-file", str(run / "hub.ready")]
    (run / "hub.ready").unlink()
    try:
        for name, arguments in commands.items():
            supervisor.start(name, fedsched(*arguments), run / "again.log")

        at: dict[str, int] = {}
        """Learning rounds of each learner when it had read all that was decided."""

        def settled() -> bool:
            status = {name: demo.status(name) or {} for name in NAMES}
            for name in NAMES:
                if name not in at and all_read(run / name):
                    at[name] = status[name]["learning_rounds"]
            members = demo.all_connected()
            return bool(members) and all(
                # What has been read is learned from, and counted, in the round after that.
                status[name]["learning_rounds"] > at.get(name, sys.maxsize)
                and members[name]["scheduled_pods"] == status[name]["scheduled_pods"]
                for name in NAMES
            )

        demo.until(settled, "the hub has counted every pod")
    finally:
        supervisor.stop()
    return demo


def all_read(state: Path) -> bool:
    """Whether the learner has taken in every decision of its journal."""
    decided = sum(1 for record, _, _ in read(state / "journal") if isinstance(record, Decision))
    with closing(sqlite3.connect(state / "experience.sqlite", timeout=60.0)) as db:
        ((taken,),) = db.execute("SELECT COUNT(*) FROM decisions").fetchall()
    return bool(taken == decided)


def figures(demo: Demo) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((demo.out / "figures.json").read_text())
    return found


def test_demo_ends_well_though_its_processes_were_killed(demo: Demo) -> None:
    said = demo.said()
    assert demo.popen.returncode == 0, said
    assert "Traceback" not in said
    for victim in ("hub", "north serve", "west serve", "south serve", "north learn"):
        assert f"{victim} ended with signal 9; starting it again" in said
    assert not alive(demo)


def test_nothing_that_ran_met_an_error_of_its_own(demo: Demo) -> None:
    for log in demo.run.glob("*.log"):
        assert "Traceback" not in log.read_text(), log


def test_figures_hold_all_members_arms_rounds_and_curves(demo: Demo) -> None:
    found = figures(demo)
    assert set(found["arms"]) == set(found["live"]) == set(NAMES)
    for name in NAMES:
        assert [arm["name"] for arm in found["arms"][name]] == list(ARMS)
        assert found["curves"][name], f"no point of {CURVE} reached the hub"
    finished = [r for r in found["rounds"] if r["finished"]]
    assert len(finished) >= ROUNDS
    assert sum(r["accepted"] for r in finished) >= ROUNDS
    assert (demo.out / "demo.png").stat().st_size > 10_000


def test_every_job_of_a_live_cluster_is_accounted_for(demo: Demo) -> None:
    for name, live in figures(demo)["live"].items():
        ended = live["finished"] + live["failed"]
        assert ended + live["unfinished"] + live["not_arrived"] == live["jobs"] == 150, name
        assert live["over"]


def test_table_names_every_arm_of_every_member(demo: Demo) -> None:
    table = demo.said().split("Jobs that no agent has seen")[1]
    rows = [line.split() for line in table.splitlines() if line.strip()]
    for name in NAMES:
        assert [name, "LeastAllocated"] in [row[:2] for row in rows]
    for arm in ARMS:
        shown = [row for row in rows if " ".join(row).removeprefix("north ").startswith(arm)]
        assert shown, arm
    assert f"{sum(1 for r in figures(demo)['rounds'] if r['finished'])} federation rounds" in table


def test_counts_never_fall_over_kills_and_restarts(drained: Demo) -> None:
    for name, samples in drained.learning.items():
        for counts in zip(*samples, strict=True):
            assert list(counts) == sorted(counts), name
    assert drained.finished == sorted(drained.finished)


def test_every_decision_is_in_the_experience_once_with_its_fate(drained: Demo) -> None:
    for name in NAMES:
        state = drained.run / name
        decided = [r.id for r, _, _ in read(state / "journal") if isinstance(r, Decision)]
        assert len(decided) == len(set(decided)) > 0
        with closing(sqlite3.connect(state / "experience.sqlite")) as db:
            rows = db.execute("SELECT id, fate FROM decisions").fetchall()
        assert Counter(seen for seen, _ in rows) == Counter(decided), name
        assert {fate for _, fate in rows} <= {*FATES, None}


@pytest.mark.parametrize("suffix", ["", "-alone"])
def test_learners_consumed_what_their_store_says(drained: Demo, suffix: str) -> None:
    for name in NAMES:
        path = drained.run / f"{name}{suffix}" / "experience.sqlite"
        with closing(Store(path)) as store, closing(sqlite3.connect(path)) as db:
            saved = msgspec.msgpack.decode(store.blob(STATE_BLOB) or b"", type=Saved)
            counted = dict(db.execute("SELECT fate, COUNT(*) FROM decisions GROUP BY fate"))
            assert saved.transitions == store.fates()["learned"] == counted["learned"] > 0
            assert store.open_count() == counted.get(None, 0)
            assert store.counter("repeated_decisions") == 0


def test_agent_alone_missed_nothing_either(drained: Demo) -> None:
    for name in NAMES:
        journal = drained.run / name / "journal"
        with closing(Store(drained.run / f"{name}-alone" / "experience.sqlite")) as store:
            store.ingest(journal, sample)
            decided = sum(1 for record, _, _ in read(journal) if isinstance(record, Decision))
            assert store.counter("decisions") == decided
            assert store.counter("dropped_segments") == 0


def test_hub_counted_each_scheduled_pod_once(drained: Demo) -> None:
    live = figures(drained)["live"]
    with closing(Registry(f"sqlite:///{drained.run / 'hub' / 'registry.db'}")) as registry:
        updates = registry.updates(limit=10_000)
        assert not [update for update in updates if not update.accepted]
        for name in NAMES:
            counted = sum(u.num_examples for u in updates if u.member == name and u.accepted)
            with closing(Store(drained.run / name / "experience.sqlite")) as store:
                assert 0 < counted == store.counter("scheduled")
            assert counted <= live[name]["scheduler"]["bound"]


def test_demo_that_is_stopped_leaves_no_process(tmp_path: Path) -> None:
    with Demo(tmp_path / "out", "--seconds", "60", "--jobs", "40") as demo:
        demo.until(lambda: demo.processes("agent learn"), "hub, a cluster and its agents run")
        assert len(alive(demo)) >= 3
        demo.popen.send_signal(signal.SIGINT)
        demo.until(lambda: demo.ended() or len(alive(demo)) < 3, "it ends its processes")
        if not demo.ended():
            demo.popen.send_signal(signal.SIGTERM)  # somebody is impatient
        assert demo.popen.wait(WAIT) == 130
        assert not alive(demo)
        assert "Stopped by SIGINT." in demo.said()
        assert "Traceback" not in demo.said()
