"""What a real kube-scheduler does where an extender fails, hangs or is not there."""

import datetime as dt
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.lab import certificates
from tests.kubernetes.facts.bench import PAIR, Bench, Scheduler, extender, until
from tests.kubernetes.facts.recording import (
    Answer,
    Call,
    RecordingExtender,
    Reply,
    as_json,
    keep_all,
    no_opinion,
    scores,
)

PREFERS, REQUIRES, IGNORES = "prefers", "requires", "ignores"
TIMEOUTS = {PREFERS: 1.0, REQUIRES: 1.0, IGNORES: 5.0}
"""``httpTimeout`` of the schedulers here, seconds. The last one's is above what a busy machine is
late by: what answers in time must be heard beside what does not."""


def hangs(call: Call) -> Answer:
    """Longer than any time-out here."""
    return Answer(no_opinion(call).body, delay=5 * max(TIMEOUTS.values()))


def fails(_: Call) -> Answer:
    return Answer(b"[]", status=503)


def babbles(_: Call) -> Answer:
    return Answer(b"{not json")


FAILURES = {"hangs": hangs, "fails": fails, "babbles": babbles}


@pytest.fixture(scope="module")
def schedulers(bench: Bench, server: RecordingExtender) -> dict[str, Scheduler]:
    """One that only prefers, one that also filters, and one whose filter may be ignored.

    They log as a cluster's scheduler usually does, at level 2.
    """
    kinds: dict[str, dict[str, Any]] = {
        PREFERS: {},
        REQUIRES: {"filterVerb": "filter"},
        IGNORES: {"filterVerb": "filter", "ignorable": True},
    }
    made = {}
    for name, settings in kinds.items():
        entry = extender(server, httpTimeout=f"{TIMEOUTS[name]}s", **settings)
        made[name] = bench.scheduler(name, [entry], verbosity=2)
    return made


@pytest.fixture(autouse=True)
def _well_again(server: RecordingExtender) -> Iterator[None]:
    yield
    server.replies = {"filter": keep_all, "prioritize": no_opinion}


def attempt_seconds(scheduler: Scheduler) -> float:
    """Time spent in attempts that placed a pod."""
    name = "scheduler_scheduling_attempt_duration_seconds_sum"
    return scheduler.metric(name, result="scheduled")


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failed_prioritize_is_passed_over_without_a_word_or_a_figure(
    bench: Bench, server: RecordingExtender, schedulers: dict[str, Scheduler], failure: str
) -> None:
    scheduler = schedulers[PREFERS]
    before = {key: value for key, value in scheduler.metrics().items() if "error" in str(key)}
    server.replies["prioritize"] = FAILURES[failure]
    name = f"prefers-{failure}"
    bench.pod(name, PREFERS)
    assert bench.node_of(name) in PAIR
    assert len(server.until(1, name)) == 1
    after = {key: value for key, value in scheduler.metrics().items() if "error" in str(key)}
    assert after == before
    about = [line for line in scheduler.lines(name) if "Successfully bound" not in line]
    assert not [line for line in about if "extender" in line or line[0] in "WE"]
    assert not [key for key, _ in scheduler.metrics().items() if "extender" in key[0]]


@pytest.mark.parametrize(("name", "verbs"), [(PREFERS, 1), (IGNORES, 2)])
def test_a_hung_extender_costs_a_time_out_for_each_verb_of_each_pod(
    bench: Bench,
    server: RecordingExtender,
    schedulers: dict[str, Scheduler],
    name: str,
    verbs: int,
) -> None:
    server.replies = dict.fromkeys(("filter", "prioritize"), hangs)
    before = attempt_seconds(schedulers[name])
    bench.pod(f"hung-{name}", name)
    assert bench.node_of(f"hung-{name}") in PAIR
    until(
        lambda: attempt_seconds(schedulers[name]) - before >= verbs * TIMEOUTS[name],
        f"the attempt shows {verbs} time-outs",
    )


@pytest.mark.parametrize(
    ("name", "reply"),
    [*FAILURES.items(), ("says", lambda _: as_json({"Error": "cannot say", "NodeNames": [*PAIR]}))],
)
def test_a_failed_filter_fails_the_attempt_and_the_pod_is_tried_again(
    bench: Bench,
    server: RecordingExtender,
    schedulers: dict[str, Scheduler],
    name: str,
    reply: Reply,
) -> None:
    scheduler = schedulers[REQUIRES]
    errors = scheduler.metric("scheduler_schedule_attempts_total", result="error")
    server.replies["filter"] = reply
    pod = f"requires-{name}"
    bench.pod(pod, REQUIRES)
    condition = bench.condition(pod, "SchedulerError")
    assert condition.status == "False"
    assert not server.calls(pod, "prioritize")
    assert scheduler.metric("scheduler_schedule_attempts_total", result="error") > errors
    server.replies["filter"] = keep_all
    assert bench.node_of(pod) in PAIR


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failed_filter_that_may_be_ignored_is_passed_over_and_logged(
    bench: Bench, server: RecordingExtender, schedulers: dict[str, Scheduler], failure: str
) -> None:
    scheduler = schedulers[IGNORES]
    before = len(scheduler.lines("Skipping extender as it returned error"))
    server.replies["filter"] = FAILURES[failure]
    server.replies["prioritize"] = scores(n_000=0, n_001=10)
    pod = f"ignores-{failure}"
    bench.pod(pod, IGNORES)
    assert bench.node_of(pod) == PAIR[1], "prioritize is asked all the same"
    assert len(scheduler.lines("Skipping extender as it returned error")) == before + 1


def test_an_extender_that_is_not_there_costs_nothing(bench: Bench) -> None:
    """A refused connection is an error at once: no time-out is waited for."""
    with RecordingExtender() as gone:
        entry = extender(gone, filterVerb="filter", ignorable=True, httpTimeout="30s")
    scheduler = bench.scheduler("deserted", [entry], verbosity=2)
    pods = [f"deserted-{number}" for number in range(10)]
    for pod in pods:
        bench.pod(pod, "deserted")
    for pod in pods:
        bench.node_of(pod)
    assert attempt_seconds(scheduler) < 30


@pytest.fixture
def two_authorities(tmp_path: Path) -> Iterator[tuple[RecordingExtender, Path, Path]]:
    """An extender behind TLS, the CA of its certificate, and another CA."""
    now = dt.datetime.now(dt.UTC)
    own, other = tmp_path / "own", tmp_path / "other"
    certificates.create(own, now)
    certificates.create(other, now)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(own / "apiserver.crt", own / "apiserver.key")
    with RecordingExtender(context) as server:
        yield server, own / "ca.crt", other / "ca.crt"


def test_https_without_a_ca_checks_nothing_and_with_one_it_does(
    bench: Bench, two_authorities: tuple[RecordingExtender, Path, Path]
) -> None:
    server, own, other = two_authorities
    server.replies["prioritize"] = scores(n_000=0, n_001=10)
    asked = {"unchecked": {}, "right": {"caFile": str(own)}, "wrong": {"caFile": str(other)}}
    for name, tls in asked.items():
        entry = extender(server, enableHTTPS=True, **({"tlsConfig": tls} if tls else {}))
        bench.scheduler(f"https-{name}", [entry], verbosity=5)
        bench.pod(f"https-{name}", f"https-{name}")
        bench.node_of(f"https-{name}")
    assert {call.pod for call in server.calls()} == {"https-unchecked", "https-right"}
