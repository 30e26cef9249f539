"""A member whose parts are killed fifty times under load loses no pod and no experience."""

import contextlib
import re
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from agent.journal import Decision, PodEvent, read
from agent.learning.learner import STATE_BLOB, Saved
from agent.learning.store import ENDED, FATES, Store
from examples.lab.control_plane import ControlPlane, node_manifest
from tests.kubernetes.member import WAIT, Agent
from tests.kubernetes.storm import Storm
from tests.kubernetes.usage import NodeExporter

pytestmark = pytest.mark.timeout(1200)  # only bounds a hanging run

KILLS = 50
SEED = 4
NODES = 4
LEARN: dict[str, Any] = {
    "min_batch": 8,
    "idle_seconds": 2.0,
    "poll_seconds": 0.5,
    "labels": 0,  # what is tested is bookkeeping: no time goes to practice and gates
    "gate_rounds": 100_000,
    "keep_segments": 1000,  # the journal is compared with the database at the end
}


@dataclass
class Aftermath:
    """What is left when all has calmed down and everything has ended."""

    storm: Storm
    pods: dict[str, Any]
    """By UID, as the API server had them last."""
    records: list[Any]
    """Of the whole journal."""
    heard: set[str]
    """Names of the pods for which kube-scheduler took the agent's scores."""

    @property
    def decisions(self) -> list[Decision]:
        return [record for record in self.records if isinstance(record, Decision)]

    @property
    def events(self) -> list[PodEvent]:
        return [record for record in self.records if isinstance(record, PodEvent)]

    def store(self) -> Store:
        """The learner's database, which nobody else has open any more."""
        return Store(self.storm.agent.state / "experience.sqlite")


@pytest.fixture(scope="module")
def aftermath(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Aftermath]:
    folder = tmp_path_factory.mktemp("chaos")
    names = [f"n{number}" for number in range(NODES)]
    with contextlib.ExitStack() as stack:
        plane = stack.enter_context(ControlPlane(folder, name="chaos"))
        plane.create_nodes(node_manifest(name, cpu=16) for name in names)
        exporter = stack.enter_context(NodeExporter(dict.fromkeys(names, 0.3)))
        telemetry = exporter.run_prometheus(plane, folder)
        agent = Agent(folder, plane.kubeconfig, {"telemetry": telemetry, "learn": LEARN})
        stack.callback(agent.stop)
        entry = {
            "urlPrefix": agent.url,
            "prioritizeVerb": "prioritize",
            "filterVerb": "filter",
            "weight": 13,
            "httpTimeout": "200ms",
            "nodeCacheCapable": True,
            "ignorable": True,
        }
        plane.start_scheduler({"extenders": [entry]}, arguments=["--vmodule=schedule_one=10"])
        storm = Storm(plane, agent, SEED, KILLS)
        agent.serve.start()
        agent.learn.start()
        storm.until(agent.ready, "the agent is ready", load=False)
        storm.rage()
        storm.until(storm.over, "every pod was bound and is done", load=False)
        storm.until(
            lambda: {pod.metadata.uid for pod in storm.pods()} <= _ended(agent),
            "the agent told how every pod ended",
            load=False,
        )
        measured = {"source": "cpu", "state": "ok"}
        storm.until(
            lambda: agent.metric("fedsched_telemetry", **measured) == 1,
            "Prometheus tells what nodes use again",
            load=False,
        )
        yield _settle(storm)


def _ended(agent: Agent) -> set[str]:
    """UIDs of the pods whose end stands in the journal; a watch cut by a kill tells it late."""
    records = (record for record, _, _ in read(agent.state / "journal"))
    return {r.uid for r in records if isinstance(r, PodEvent) and r.kind in ENDED}


def _settle(storm: Storm) -> Aftermath:
    """Let the learner deal with all that happened, then end it."""
    agent = storm.agent
    agent.serve.stop()  # nobody writes to the journal any more
    del storm.victims["serve"]
    records = [record for record, _, _ in read(agent.state / "journal")]
    total = sum(isinstance(record, Decision) for record in records)
    told = {(record.uid, record.kind) for record in records if isinstance(record, PodEvent)}

    def dealt_with() -> bool:
        with closing(sqlite3.connect(agent.state / "experience.sqlite", timeout=WAIT)) as db:
            (known,) = db.execute("SELECT COUNT(*) FROM decisions").fetchone()
            (unread,) = db.execute("SELECT COUNT(*) FROM decisions WHERE fate IS NULL").fetchone()
            heard = set(db.execute("SELECT uid, kind FROM pod_events"))
        return bool(known == total and unread <= 1 and told <= heard)

    storm.until(
        dealt_with, "every event is known and every decision but the last has its fate", load=False
    )
    agent.learn.stop()
    text = storm.plane.log("kube-scheduler").read_text(errors="replace")
    heard = set(re.findall(r'"Extender scored node for pod" pod="default/([\w-]+)"', text))
    return Aftermath(storm, {p.metadata.uid: p for p in storm.pods()}, records, heard)


def test_all_victims_were_killed_again_and_again_under_load(aftermath: Aftermath) -> None:
    killed = Counter(line.split()[-1] for line in aftermath.storm.log if " killed " in line)
    assert sum(killed.values()) == KILLS
    assert set(killed) == {"serve", "learn", "kube-apiserver", "prometheus"}
    assert min(killed.values()) >= KILLS // 4
    assert len(aftermath.pods) > 2 * KILLS


def test_every_pod_ended_up_scheduled_and_no_gate_stayed(aftermath: Aftermath) -> None:
    storm = aftermath.storm
    assert len(aftermath.pods) + len(storm.deleted) == len(storm.names)
    for pod in aftermath.pods.values():
        assert pod.spec.node_name, pod.metadata.name
        assert not pod.spec.scheduling_gates, pod.metadata.name


def test_nothing_that_kube_scheduler_heard_is_missing_from_the_journal(
    aftermath: Aftermath,
) -> None:
    decided = {uid for record in aftermath.decisions for uid in record.pods}
    uids = {pod.metadata.name: uid for uid, pod in aftermath.pods.items()}
    kept = aftermath.heard & uids.keys()
    assert kept
    assert {name for name in kept if uids[name] not in decided} == set()


def test_every_decision_is_in_the_experience_once_with_one_fate(aftermath: Aftermath) -> None:
    decided = [record.id for record in aftermath.decisions]
    assert len(decided) == len(set(decided)) > 0
    with closing(aftermath.store()) as store, closing(sqlite3.connect(store.path)) as db:
        rows = db.execute("SELECT id, fate FROM decisions").fetchall()
        assert Counter(seen for seen, _ in rows) == Counter(decided)
        fates = Counter(fate for _, fate in rows)
        assert set(fates) <= {*FATES, None}
        assert fates[None] <= 1, "only the very last one has no follower"
        assert store.fates() == {fate: fates[fate] for fate in FATES}
        for name in ("dropped_segments", "unreadable_records", "repeated_decisions"):
            assert store.counter(name) == 0, name
        saved = msgspec.msgpack.decode(store.blob(STATE_BLOB) or b"", type=Saved)
        assert saved.transitions == fates["learned"] > 0


def test_every_pod_is_told_bound_where_it_was_and_ended_once(aftermath: Aftermath) -> None:
    with closing(aftermath.store()) as store:
        for uid, pod in aftermath.pods.items():
            events = store.events(uid)
            assert events["bound"].node == pod.spec.node_name
            assert [kind for kind in ENDED if kind in events] == ["finished"]
        assert store.counter("pods_finished") == len(aftermath.pods)


def test_pods_that_were_deleted_end_once_too_whoever_was_away_meanwhile(
    aftermath: Aftermath,
) -> None:
    decided = {record.pods[record.action] for record in aftermath.decisions}
    deleted = aftermath.storm.deleted
    assert len(deleted) > 5
    with closing(aftermath.store()) as store:
        for uid, node in deleted.items():
            events = store.events(uid)
            ends = [kind for kind in ENDED if kind in events]
            assert len(ends) <= 1
            assert set(ends) <= {"deleted", "gone"}
            assert ends or uid not in decided, "a decision waits for it for ever"
            if "bound" in events:
                assert events["bound"].node == node


def test_what_was_learned_is_credited_to_where_the_pod_was(aftermath: Aftermath) -> None:
    nodes = {uid: pod.spec.node_name for uid, pod in aftermath.pods.items()}
    nodes |= aftermath.storm.deleted
    with closing(aftermath.store()) as store, closing(sqlite3.connect(store.path)) as db:
        learned = {i for (i,) in db.execute("SELECT id FROM decisions WHERE fate = 'learned'")}
    for record in aftermath.decisions:
        uid = record.pods[record.action]
        if record.id in learned and uid:
            assert nodes[uid] in {
                n for p, n in zip(record.pods, record.nodes, strict=True) if p == uid
            }


def test_nothing_of_ours_met_an_error_of_its_own(aftermath: Aftermath) -> None:
    for process in (aftermath.storm.agent.serve, aftermath.storm.agent.learn):
        assert "Traceback" not in process.log.read_text(), process.log
