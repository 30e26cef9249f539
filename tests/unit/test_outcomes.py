"""What became of pods: kinds of ends, replacements by controllers, and what reaches the learner."""

import json
import re
import sqlite3
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agent.cluster import objects
from agent.cluster.outcomes import OUTCOMES, end_of
from agent.cluster.records import Node, Pod
from agent.cluster.state import ClusterState
from agent.cluster.telemetry import STATES
from agent.journal import Journal, PodEvent, Progress, read
from agent.learning.experience import take
from agent.learning.reward import CHARGED
from agent.learning.speeds import sample
from agent.learning.store import ENDED, Store
from tests.unit.api_server import pod_json
from tests.unit.journals import decision

OOM = {"terminated": {"reason": "OOMKilled", "exitCode": 137, "finishedAt": "1970-01-01T00:01:40Z"}}
DONE = {"terminated": {"reason": "Completed", "exitCode": 0, "finishedAt": "1970-01-01T00:01:40Z"}}
SIGNAL = {"terminated": {"reason": "Error", "exitCode": 143}}


def disrupted(reason: str) -> dict[str, Any]:
    return {"conditions": [{"type": "DisruptionTarget", "status": "True", "reason": reason}]}


def asked(at: int) -> dict[str, Any]:
    """Deletion asked for at this second of 1970, with 30 s of grace."""
    stamp = f"1970-01-01T00:{(at + 30) // 60:02d}:{(at + 30) % 60:02d}Z"
    return {"deletionTimestamp": stamp, "deletionGracePeriodSeconds": 30}


def read_pod(status: dict[str, Any], **meta: Any) -> Pod:
    data = pod_json("p", node="n", **meta)
    data["status"] = status
    return objects.pod(json.dumps(data).encode())


@pytest.mark.parametrize(
    ("status", "meta", "kind"),
    [
        ({"phase": "Succeeded", "containerStatuses": [{"state": DONE}]}, {}, "finished"),
        ({"phase": "Failed", "containerStatuses": [{"state": OOM}]}, {}, "oom"),
        ({"phase": "Failed", "containerStatuses": [{"lastState": OOM}]}, {}, "oom"),
        ({"phase": "Failed", "initContainerStatuses": [{"state": OOM}]}, {}, "oom"),
        ({"phase": "Failed", "reason": "Evicted"}, {}, "evicted"),
        (
            {"phase": "Failed", "reason": "Evicted", "containerStatuses": [{"lastState": OOM}]},
            {}, "evicted",
        ),
        ({"phase": "Failed", **disrupted("TerminationByKubelet")}, {}, "evicted"),
        ({"phase": "Failed", "reason": "OutOfcpu"}, {}, "misplaced"),
        ({"phase": "Failed", "reason": "OutOfnvidia.com/gpu"}, {}, "misplaced"),
        ({"phase": "Failed", "reason": "UnexpectedAdmissionError"}, {}, "misplaced"),
        ({"phase": "Failed", "reason": "NodeAffinity"}, {}, "misplaced"),
        ({"phase": "Running", **disrupted("PreemptionByScheduler")}, {}, "preempted"),
        ({"phase": "Failed", "reason": "Preempting"}, {}, "preempted"),
        ({"phase": "Running", **disrupted("EvictionByEvictionAPI")}, {}, "disrupted"),
        ({"phase": "Running", **disrupted("DeletionByTaintManager")}, {}, "disrupted"),
        ({"phase": "Failed", "reason": "Terminated"}, {}, "disrupted"),
        ({"phase": "Failed", **disrupted("DeletionByPodGC")}, {}, "lost"),
        ({"phase": "Failed", "reason": "NodeLost"}, {}, "lost"),
        ({"phase": "Failed", "containerStatuses": [{"state": SIGNAL}]}, {}, "failed"),
        ({"phase": "Failed", "reason": "DeadlineExceeded"}, {}, "failed"),
        ({"phase": "Running"}, {}, "deleted"),
        ({"phase": "Failed", "containerStatuses": [{"state": SIGNAL}]}, asked(50), "deleted"),
        ({"phase": "Succeeded", "containerStatuses": [{"state": DONE}]}, asked(50), "deleted"),
        ({"phase": "Succeeded", "containerStatuses": [{"state": DONE}]}, asked(100), "finished"),
        (
            {"phase": "Succeeded", "containerStatuses": [{"state": DONE}],
             **disrupted("EvictionByEvictionAPI")},
            asked(50), "disrupted",
        ),
    ],
)  # fmt: skip
def test_every_end_of_a_pod_has_its_kind(
    status: dict[str, Any], meta: dict[str, Any], kind: str
) -> None:
    assert end_of(read_pod(status, **meta)) == kind


def test_an_oom_kill_before_a_restart_is_news_while_the_pod_lives() -> None:
    pod = read_pod({"phase": "Running", "containerStatuses": [{"lastState": OOM}]})
    assert (pod.reason, pod.done) == ("OOMKilled", False)


def test_every_kind_of_end_is_one_for_the_learner_and_the_charged_ones_are_among_them() -> None:
    assert set(ENDED) == set(OUTCOMES)
    assert set(CHARGED) <= set(OUTCOMES)


class Told:
    """A cluster state, its clock, and what it told."""

    def __init__(self) -> None:
        self.now, self.events = 1000.0, list[PodEvent | Progress]()
        self.state = ClusterState(
            clock=lambda: self.now, emit=self.events.append, spec=lambda _: None
        )
        self.state.apply_node(Node(name="n", cpu=8.0, memory=8.0))

    def pod(self, uid: str, *, deleted: bool = False, at: float = 0.0, **changes: Any) -> None:
        self.now += at
        values: dict[str, Any] = {"name": uid, "cpu": 1.0, "owner": "job-uid"}
        self.state.apply_pod(Pod(uid=uid, **{**values, **changes}), deleted=deleted)

    def of(self, uid: str, kind: str) -> PodEvent:
        [event] = [e for e in self.events if isinstance(e, PodEvent) and e.uid == uid
                   and e.kind == kind]  # fmt: skip
        return event


def test_a_replacement_goes_on_with_the_job_of_the_pod_that_it_replaces() -> None:
    told = Told()
    told.pod("a")
    told.pod("a", node="n", at=30.0)
    told.pod("a", node="n", phase="Failed", reason="OOMKilled", at=100.0)
    told.pod("b", at=10.0)
    assert told.state.view.arrival[told.state.slots["b"]] == 1140.0 - 30.0  # its job waited 30 s
    told.pod("b", node="n", at=20.0)
    told.pod("b", node="n", phase="Failed", reason="Evicted", at=1.0)
    told.pod("c", at=5.0)
    assert told.state.view.arrival[told.state.slots["c"]] == told.now - 50.0
    told.pod("c", node="n", phase="Succeeded", at=50.0)
    made = [told.of(uid, "created") for uid in "abc"]
    assert [event.job for event in made] == ["a", "a", "a"]
    assert [event.attempt for event in made] == [0, 1, 2]
    assert [told.of(uid, "bound").pending_seconds for uid in "abc"] == [30.0, 20.0, 50.0]


def test_pods_side_by_side_are_jobs_of_their_own_and_each_lost_one_is_replaced_once() -> None:
    told = Told()
    for uid in ("a", "b", "c"):
        told.pod(uid, node="n")
    told.pod("b", node="n", phase="Succeeded")
    told.pod("d")  # the next of a Job's completions: nothing was lost
    told.pod("c", node="n", deleting=True)  # a controller does not wait for the end
    told.pod("e")
    told.pod("c", node="n", deleting=True, deleted=True)
    told.pod("f")
    assert [told.of(uid, "created").job for uid in "abcdef"] == ["a", "b", "c", "d", "c", "f"]


def test_an_index_names_the_job_whatever_the_agent_has_seen_before() -> None:
    told = Told()
    told.pod("late", index="3")
    told.pod("other", index="4")
    assert told.of("late", "created").job == "job-uid/3"
    assert told.of("other", "created").job == "job-uid/4"


def test_a_pod_made_much_later_or_by_nobody_or_somebody_else_replaces_none() -> None:
    told = Told()
    told.pod("a", node="n")
    told.pod("a", node="n", deleted=True)
    told.pod("bare", owner="")
    told.pod("stranger", owner="other")
    told.pod("late", at=3601.0)
    for uid in ("bare", "stranger", "late"):
        event = told.of(uid, "created")
        assert (event.job, event.attempt) == (uid, 0)


def test_a_measured_progress_goes_before_what_the_pod_says_and_memory_is_kept() -> None:
    told = Told()
    told.pod("a", node="n", steps_per_second=1.0)
    told.state.report("a", steps_per_second=2.0, memory=3.0)
    told.state.report("a", steps_per_second=2.0, memory=1.0)
    told.pod("a", node="n", steps_per_second=1.5)
    told.state.report("nobody", steps_per_second=2.0)
    told.pod("a", node="n", phase="Succeeded")
    rates = [event.steps_per_second for event in told.events if isinstance(event, Progress)]
    assert rates == [1.0, 2.0]
    assert told.of("a", "finished").memory_used == 3.0


def test_a_journal_of_an_earlier_release_is_read(tmp_path: Path) -> None:
    class Old(msgspec.Struct, tag="pod", array_like=True):
        uid: str
        time: float
        kind: str
        node: str = ""
        job_type: str = ""
        gpus: int = 0
        gpu_model: str = ""
        gpu_share: float = 0.0
        cpu: float = 0.0
        memory: float = 0.0
        gpu_memory: float = 0.0
        run_seconds: float = 0.0

    journal = Journal(tmp_path)
    earlier: Any = Old("a", 5.0, "finished", run_seconds=7.0)
    journal.append(earlier)
    journal.close()
    [(record, _, _)] = read(tmp_path)
    assert record == PodEvent(uid="a", time=5.0, kind="finished", run_seconds=7.0)


def journaled(folder: Path, *records: Any) -> Store:
    journal = Journal(folder / "journal")
    for record in records:
        journal.append(record)
    journal.close()
    store = Store(folder / "experience.sqlite")
    store.ingest(folder / "journal", sample)
    return store


def event(uid: str, kind: str, time: float, **more: Any) -> PodEvent:
    return PodEvent(uid=uid, kind=kind, time=time, **more)


def test_a_job_completes_from_its_first_pod_on(tmp_path: Path) -> None:
    store = journaled(
        tmp_path,
        event("a", "created", 100.0, job="a"),
        event("a", "oom", 150.0, job="a"),
        event("b", "created", 160.0, job="a", attempt=1),
        event("b", "finished", 300.0, job="a", attempt=1),
        event("old", "created", 10.0),  # of an earlier release
        event("old", "finished", 30.0),
    )
    assert store.completion_seconds() == [200.0, 20.0]


def test_a_database_of_an_earlier_release_takes_every_pod_for_a_job(tmp_path: Path) -> None:
    store = journaled(tmp_path, event("a", "created", 100.0), event("a", "finished", 130.0))
    store.close()
    path = tmp_path / "experience.sqlite"
    with sqlite3.connect(path) as db:
        db.execute("DROP INDEX pod_events_job")
        db.execute("ALTER TABLE pod_events DROP COLUMN job")
    store = Store(path)
    assert store.completion_seconds() == [30.0]
    store.close()
    assert Store(path).completion_seconds() == [30.0]


@pytest.mark.parametrize("kind", sorted(OUTCOMES))
def test_every_outcome_is_learned_from_and_want_of_room_is_charged(
    tmp_path: Path, kind: str
) -> None:
    store = journaled(
        tmp_path,
        decision(1, "a"),
        event("a", "bound", 11.0, node="n0"),
        event("a", kind, 15.0, node="n0"),
        decision(2),
    )
    taken = take(store, 10, outcome_wait=1e6)
    assert (taken.fates[0][1], taken.metrics["reward_oom"]) == (
        "learned", -1.0 if kind in CHARGED else 0.0,
    )  # fmt: skip


def test_the_tables_of_outcomes_and_states_are_those_of_the_code() -> None:
    text = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    rows = dict(re.findall(r"^\| `([a-z_]+)` \| (.*) \|$", text, re.MULTILINE))
    outcomes = {
        kind: f"{meaning} | {'yes' if kind in CHARGED else ''}".rstrip()
        for kind, meaning in OUTCOMES.items()
    }
    assert {kind: rows[kind].rstrip() for kind in outcomes} == outcomes
    assert {state: rows[state] for state in STATES} == STATES
    assert set(rows) == set(outcomes) | set(STATES)
