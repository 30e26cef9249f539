"""Events for operators: what is told, how often, and that nothing waits for them."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

from agent.cluster.access import Access
from agent.cluster.events import MOST_WAITING, QUIET_SECONDS, EventRecorder
from agent.cluster.kubernetes import ApiError
from agent.scheduling.alarms import Alarms
from agent.scheduling.metrics import Metrics
from agent.settings import KubernetesSettings


class Recording:
    """A recorder whose Events come here; ``fails`` are the errors of the next tries."""

    def __init__(self, **settings: Any) -> None:
        self.now, self.made, self.fails = 1e9, [], list[Exception]()
        about = KubernetesSettings(
            **{"api_url": "http://127.0.0.1:1", "namespace": "here", "pod": "agent-0", **settings}
        )
        access = Access(about)
        access.close()
        self.recorder = EventRecorder(
            about, access, self.create, clock=lambda: self.now, rng=random.Random(0),
            sleep=self.sleep,
        )  # fmt: skip
        self.tell = self.recorder.tell

    async def create(self, event: dict[str, Any]) -> None:
        if self.fails:
            raise self.fails.pop(0)
        self.made.append(event)

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        await asyncio.sleep(0)

    async def running(self, done: Callable[[], bool]) -> None:
        """Let it write until ``done``."""
        task = asyncio.create_task(self.recorder.run())
        try:
            while not done():
                await asyncio.sleep(0)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    @property
    def notes(self) -> list[tuple[str, str]]:
        return [(event["reason"], event["note"]) for event in self.made]


async def test_an_event_is_about_the_agents_own_pod() -> None:
    recording = Recording(pod_uid="u-1")
    recording.tell("WatchStale", "silent")
    await recording.running(lambda: bool(recording.made))
    [event] = recording.made
    assert event["metadata"]["namespace"] == "here"
    assert event["regarding"] == {
        "apiVersion": "v1", "kind": "Pod", "name": "agent-0", "namespace": "here", "uid": "u-1",
    }  # fmt: skip
    assert (event["type"], event["eventTime"]) == ("Warning", "2001-09-09T01:46:40.000000Z")


async def test_what_repeats_is_said_once_in_a_while_and_counted() -> None:
    recording = Recording()
    recording.tell("GatesOverdue", "1 gate")
    await recording.running(lambda: len(recording.made) == 1)
    for number in range(2, 5):
        recording.tell("GatesOverdue", f"{number} gates")
    recording.tell("Other", "at once")
    began = recording.now
    await recording.running(lambda: len(recording.made) == 3)
    assert recording.notes == [
        ("GatesOverdue", "1 gate"), ("Other", "at once"), ("GatesOverdue", "4 gates (3 times)"),
    ]  # fmt: skip
    assert recording.now - began >= QUIET_SECONDS


async def test_the_opposite_needs_no_wait_and_ends_it() -> None:
    recording = Recording()
    for _ in range(2):
        recording.tell("WatchStale", "silent", ends="WatchFresh")
        recording.tell("WatchFresh", "heard", "Normal", ends="WatchStale")
    before = recording.now
    await recording.running(lambda: len(recording.made) == 2)
    recording.tell("WatchStale", "silent", ends="WatchFresh")
    recording.tell("WatchFresh", "heard", "Normal", ends="WatchStale")
    await recording.running(lambda: len(recording.made) == 4)
    assert recording.now - before < QUIET_SECONDS


async def test_what_a_server_that_is_away_missed_is_said_when_it_is_back() -> None:
    recording = Recording()
    recording.fails = [ConnectionError("away"), ApiError(503, "starting")]
    recording.tell("WatchStale", "silent")
    await recording.running(lambda: bool(recording.made))
    assert recording.notes == [("WatchStale", "silent")]
    assert recording.recorder.dropped == 0


async def test_a_refused_event_is_given_up_and_others_go_on() -> None:
    recording = Recording()
    recording.fails = [ApiError(403, "events is forbidden")]
    recording.tell("A", "refused")
    recording.tell("B", "taken")
    await recording.running(lambda: bool(recording.made))
    assert recording.notes == [("B", "taken")]
    assert recording.recorder.dropped == 1


async def test_telling_never_waits_and_keeps_a_bounded_number() -> None:
    recording = Recording()
    for number in range(MOST_WAITING + 5):
        recording.tell(f"R{number}", "x" * 5000)
    assert recording.recorder.dropped == 5
    await recording.recorder.flush()
    assert len(recording.made) == MOST_WAITING
    assert all(len(event["note"]) <= 1024 for event in recording.made)


async def test_outside_a_pod_there_are_no_events() -> None:
    recording = Recording(pod="")
    recording.tell("WatchStale", "silent")
    await recording.recorder.flush()
    assert recording.made == []


async def test_fallback_is_told_when_it_begins_with_its_reason_and_when_it_ends() -> None:
    recording, fresh, metrics = Recording(), [False], Metrics()
    alarms = Alarms(recording.recorder, metrics, fresh=lambda: fresh[0], silent=lambda: 130.0)
    alarms.look()  # the first list is still under way
    fresh[0] = True
    alarms.look()
    alarms.look()
    await recording.recorder.flush()
    assert recording.made == []
    fresh[0] = False
    alarms.look()
    alarms.look()
    await recording.running(lambda: len(recording.made) == 1)
    assert recording.notes[0][0] == "WatchStale"
    assert "130 s" in recording.notes[0][1]
    fresh[0] = True
    alarms.look()
    metrics.policy_failures.labels("bad_features_version").inc()
    metrics.no_opinion.labels("stale_state").inc()  # told as WatchStale already
    metrics.no_opinion.labels("deadline_exceeded").inc(12)
    metrics.released.labels("overdue").inc(3)
    metrics.released.labels("decision").inc(9)
    alarms.look()
    metrics.policy_loads.inc()
    alarms.look()
    await recording.running(lambda: len(recording.made) == 6)
    assert [reason for reason, _ in recording.notes] == [
        "WatchStale", "WatchFresh", "PolicyRefused", "GatesOverdue", "NoOpinion", "PolicyInUse",
    ]  # fmt: skip
    assert "12 times" in recording.notes[4][1]
    alarms.look()
    await recording.recorder.flush()
    assert len(recording.made) == 6
