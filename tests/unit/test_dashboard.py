"""The dashboard's API and metrics tell what the registry holds and refuse what they cannot read."""

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import text

from coordinator.dashboard import create_app
from coordinator.dashboard.app import MAX_LIMIT
from coordinator.dashboard.reports import finite, reason_class
from coordinator.registry import Registry
from coordinator.views import NewUpdate

START = 1_700_000_000.0
MARKUP = "<img src=x onerror=alert(1)>"


class Clock:
    """A time that only a test moves."""

    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def registry(tmp_path: Path, clock: Clock) -> Iterator[Registry]:
    opened = Registry(f"sqlite:///{tmp_path / 'registry.db'}", clock=clock)
    yield opened
    opened.close()


@pytest.fixture
async def client(registry: Registry, clock: Clock) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(registry, clock=clock))
    async with httpx.AsyncClient(transport=transport, base_url="http://hub") as opened:
        yield opened


def fill(registry: Registry, clock: Clock) -> None:
    """Three members and two finished rounds; a third round is open."""
    for name in ("berlin", "osaka", "prague"):
        registry.enroll(name, name, START + 1e6)
        registry.connected(name, 1, "scorer", "0.1")
    registry.traffic({"berlin": (1000, 5000)})
    registry.traffic({"osaka": (200, 700)})
    accepted = NewUpdate("berlin", True, "", 40, 50, 0.5, 900, 7, 140, b"")
    other = NewUpdate("osaka", True, "", 60, 20, 0.25, 800, 8, 60, b"")
    shape = NewUpdate("prague", False, "w1 has shape (2, 3), expected (3, 2)", size=700)
    size = NewUpdate("prague", False, f"its change has a norm of 9e+03 {MARKUP}", delta_norm=9e3)
    for updates in ([accepted, shape], [accepted, other, size]):
        number = registry.begin_round("fedprox")
        clock.now += 12.5
        registry.finish_round(
            number,
            invited=3,
            updates=updates,
            version="ab" * 32,
            policy_file="policy",
            global_norm=2.5,
            bytes_in=1600 * number,
            bytes_out=6000 * number,
        )
    registry.disconnected("osaka")
    clock.now += 5.0
    registry.begin_round("fedprox")
    clock.now += 2.0


async def get(client: httpx.AsyncClient, path: str) -> Any:
    answer = await client.get(path)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_overview_equals_what_the_registry_holds(
    client: httpx.AsyncClient, registry: Registry, clock: Clock
) -> None:
    fill(registry, clock)
    seen = await get(client, "/api/v1/overview")
    assert seen["now"] == START + 32.0
    assert (seen["members"], seen["connected"]) == (3, 2)
    assert (seen["rounds"], seen["current_round"]) == (2, 3)
    assert (seen["accepted_updates"], seen["rejected_updates"]) == (3, 2)
    assert seen["scheduled_pods"] == 40 + 40 + 60
    assert (seen["bytes_in"], seen["bytes_out"]) == (1200, 5700)
    assert seen["rejected_by_reason"] == {"norm": 1, "shape": 1}
    assert seen["last_round"]["number"] == 2
    assert seen["last_round"]["duration"] == 12.5
    assert seen["last_round"]["finished"] == START + 25.0


async def test_the_sentence_names_who_is_connected_and_what_was_set_aside_and_why(
    client: httpx.AsyncClient, registry: Registry, clock: Clock
) -> None:
    fill(registry, clock)
    assert (await get(client, "/api/v1/overview"))["sentence"] == (
        "2 of 3 members are connected; round 2 blended 2 of 3 updates and set 1 aside "
        f"(prague: its change has a norm of 9e+03 {MARKUP}); round 3 is under way."
    )


async def test_the_sentence_of_a_federation_that_has_just_begun(
    client: httpx.AsyncClient, registry: Registry
) -> None:
    async def sentence() -> Any:
        return (await get(client, "/api/v1/overview"))["sentence"]

    assert await sentence() == "No member is enrolled yet."
    registry.enroll("berlin", "a", START)
    assert await sentence() == "The only member is not connected; no round yet."
    registry.connected("berlin", 1, "scorer", "0.1")
    registry.begin_round("fedavg")
    assert await sentence() == "The only member is connected; round 1 is the first."


async def test_a_round_without_updates_kept_the_policy(
    client: httpx.AsyncClient, registry: Registry
) -> None:
    registry.enroll("berlin", "a", START)
    number = registry.begin_round("fedavg")
    registry.finish_round(
        number,
        invited=1,
        updates=[],
        version="cd" * 32,
        policy_file="policy",
        global_norm=1.0,
        bytes_in=0,
        bytes_out=0,
    )
    sentence = (await get(client, "/api/v1/overview"))["sentence"]
    assert sentence.endswith("round 1 got no update and kept the shared policy.")


async def test_rounds_come_newest_first_with_every_reason_in_its_round(
    client: httpx.AsyncClient, registry: Registry, clock: Clock
) -> None:
    fill(registry, clock)
    third, second, first = (await get(client, "/api/v1/rounds"))["rounds"]
    assert (third["number"], third["state"], third["duration"]) == (3, "open", None)
    assert (second["accepted"], second["rejected"], second["invited"]) == (2, 1, 3)
    assert second["set_aside"] == [
        {"member": "prague", "reason": f"its change has a norm of 9e+03 {MARKUP}"}
    ]
    assert first["set_aside"] == [
        {"member": "prague", "reason": "w1 has shape (2, 3), expected (3, 2)"}
    ]
    assert (first["bytes_in"], first["bytes_out"]) == (1600, 6000)


async def test_rounds_can_be_limited_and_continued(
    client: httpx.AsyncClient, registry: Registry, clock: Clock
) -> None:
    fill(registry, clock)
    numbers = [r["number"] for r in (await get(client, "/api/v1/rounds?limit=2"))["rounds"]]
    assert numbers == [3, 2]
    numbers = [r["number"] for r in (await get(client, "/api/v1/rounds?since=2"))["rounds"]]
    assert numbers == [3]


async def test_members_tell_state_traffic_newest_update_and_newest_metrics(
    client: httpx.AsyncClient, registry: Registry, clock: Clock
) -> None:
    fill(registry, clock)
    registry.record_metrics("berlin", {"reward": -2.0, "gate_gain": 0.01})
    registry.record_metrics("berlin", {"reward": -1.5})
    berlin, osaka, prague = (await get(client, "/api/v1/members"))["members"]
    assert (berlin["name"], berlin["state"]) == ("berlin", "connected")
    assert (berlin["bytes_in"], berlin["bytes_out"]) == (1000, 5000)
    assert berlin["scheduled_pods"] == 140
    assert berlin["metrics"] == {"reward": -1.5, "gate_gain": 0.01}
    assert berlin["last_update"]["delta_norm"] == 0.5
    assert berlin["last_update"]["round"] == 2
    assert osaka["state"] == "away"
    assert osaka["last_seen"] == START + 25.0
    assert prague["last_update"]["accepted"] is False
    assert prague["metrics"] == {}


async def test_a_member_is_refused_until_it_is_heard_of_again(
    client: httpx.AsyncClient, registry: Registry, clock: Clock
) -> None:
    fill(registry, clock)

    async def osaka() -> Any:
        return (await get(client, "/api/v1/members"))["members"][1]

    registry.record_event("set aside", "round 2: too late", "osaka")
    assert (await osaka())["state"] == "away"
    registry.record_event("refused", "certificate was replaced by a newer one", "osaka")
    assert (await osaka())["state"] == "refused"
    assert (await osaka())["refusal"]["text"] == "certificate was replaced by a newer one"
    clock.now += 1.0
    registry.connected("osaka", 1, "scorer", "0.1")
    assert (await osaka())["state"] == "connected"
    clock.now += 1.0
    registry.disconnected("osaka")
    assert (await osaka())["state"] == "away"
    registry.revoke("osaka")
    registry.record_event("refused", "revoked", "osaka")
    assert (await osaka())["state"] == "revoked"


async def test_a_quiet_members_last_update_is_found_behind_many_others(
    client: httpx.AsyncClient, registry: Registry, clock: Clock
) -> None:
    fill(registry, clock)
    many = [NewUpdate("berlin", False, "no usable answer: INTERNAL")] * 70
    registry.finish_round(
        3,
        invited=70,
        updates=many,
        version="ab" * 32,
        policy_file="policy",
        global_norm=2.5,
        bytes_in=0,
        bytes_out=0,
    )
    osaka = (await get(client, "/api/v1/members"))["members"][1]
    assert osaka["last_update"]["num_examples"] == 60


async def test_a_learning_curve_is_read_whole_or_from_a_moment_on(
    client: httpx.AsyncClient, registry: Registry, clock: Clock
) -> None:
    registry.enroll("berlin", "a", START)
    for value in (-3.0, -2.0, -1.0):
        registry.record_metrics("berlin", {"reward": value, "loss": 0.5})
        clock.now += 10.0
    path = "/api/v1/members/berlin/metrics"
    assert await get(client, path) == {"member": "berlin", "names": ["loss", "reward"]}
    whole = await get(client, f"{path}?name=reward")
    assert whole["points"] == [[START, -3.0], [START + 10, -2.0], [START + 20, -1.0]]
    later = await get(client, f"{path}?name=reward&since={START}")
    assert later["points"] == whole["points"][1:]
    assert (await get(client, f"{path}?name=reward&limit=1"))["points"] == whole["points"][2:]


async def test_events_come_newest_first(
    client: httpx.AsyncClient, registry: Registry, clock: Clock
) -> None:
    registry.record_event("refused", "of another CA")
    clock.now += 1.0
    registry.record_event("set aside", "round 1", "berlin")
    events = (await get(client, "/api/v1/events"))["events"]
    assert events == [
        {"time": START + 1.0, "kind": "set aside", "member": "berlin", "text": "round 1"},
        {"time": START, "kind": "refused", "member": None, "text": "of another CA"},
    ]
    assert (await get(client, "/api/v1/events?limit=1"))["events"] == events[:1]
    assert (await get(client, f"/api/v1/events?since={START}"))["events"] == events[:1]


async def test_an_empty_federation_has_empty_answers(client: httpx.AsyncClient) -> None:
    assert await get(client, "/api/v1/rounds") == {"rounds": []}
    assert await get(client, "/api/v1/events") == {"events": []}
    assert (await get(client, "/api/v1/members"))["members"] == []
    assert (await get(client, "/api/v1/overview"))["last_round"] is None


@pytest.mark.parametrize(
    ("path", "cause"),
    [
        ("/api/v1/rounds?limit=0", f"limit must be a whole number from 1 to {MAX_LIMIT}"),
        (f"/api/v1/rounds?limit={MAX_LIMIT + 1}", "limit must be"),
        ("/api/v1/events?limit=ten", "limit must be"),
        ("/api/v1/events?limit=-1", "limit must be"),
        ("/api/v1/events?since=yesterday", "since must be a number"),
        ("/api/v1/events?since=nan", "since must be a number"),
        ("/api/v1/events?since=-1", "since must be a number"),
        ("/api/v1/rounds?page=2", "unknown parameter page; known here: limit, since"),
        ("/api/v1/overview?limit=2", "unknown parameter limit; there are none here"),
        ("/api/v1/members/berlin/metrics?name=pod", "no metric is called 'pod'"),
    ],
)
async def test_a_wrong_parameter_is_named_in_json(
    client: httpx.AsyncClient, registry: Registry, path: str, cause: str
) -> None:
    registry.enroll("berlin", "a", START)
    answer = await client.get(path)
    assert answer.status_code == 400
    assert cause in answer.json()["error"]


async def test_an_unknown_member_and_an_unknown_path_are_404_in_json(
    client: httpx.AsyncClient,
) -> None:
    answer = await client.get("/api/v1/members/nobody/metrics?name=reward")
    assert answer.status_code == 404
    assert answer.json() == {"error": "no member is called 'nobody'; see /api/v1/members"}
    for path in ("/api/v1/nothing", "/nothing", "/static/nothing.js", "/static/../app.py"):
        answer = await client.get(path)
        assert answer.status_code == 404
        assert answer.headers["content-type"] == "application/json"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
async def test_nothing_can_be_written(client: httpx.AsyncClient, method: str) -> None:
    for path in ("/api/v1/overview", "/api/v1/members", "/api/v1/members/x/metrics", "/"):
        assert (await client.request(method, path)).status_code == 405


async def test_a_lost_registry_is_503_and_not_ready_but_alive(
    client: httpx.AsyncClient, registry: Registry
) -> None:
    assert (await client.get("/readyz")).status_code == 200
    with registry._session.begin() as session:
        for table in ("updates", "rounds", "member_metrics", "events", "members"):
            session.execute(text(f"DROP TABLE {table}"))
    for path in ("/api/v1/overview", "/readyz", "/metrics"):
        answer = await client.get(path)
        assert answer.status_code == 503
        assert "registry_url" in answer.json()["error"]
        assert "SELECT" not in answer.text
    assert (await client.get("/healthz")).status_code == 200


async def test_prometheus_reads_the_same_figures(
    client: httpx.AsyncClient, registry: Registry, clock: Clock
) -> None:
    fill(registry, clock)
    answer = await client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = set(answer.text.splitlines())
    assert {
        "fedsched_members_enrolled 3.0",
        "fedsched_members_connected 2.0",
        "fedsched_round 2.0",
        "fedsched_rounds_total 2.0",
        "fedsched_round_duration_seconds 12.5",
        "fedsched_updates_accepted_total 3.0",
        'fedsched_updates_rejected_total{reason="norm"} 1.0',
        'fedsched_updates_rejected_total{reason="shape"} 1.0',
        "fedsched_received_bytes_total 1200.0",
        "fedsched_sent_bytes_total 5700.0",
        'fedsched_member_connected{member="berlin"} 1.0',
        'fedsched_member_connected{member="osaka"} 0.0',
    } <= lines
    assert MARKUP not in answer.text


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("w1 holds NaN or infinite entries", "not_finite"),
        ("its change has a norm of 9e+03, at most 100 is allowed", "norm"),
        ("w1 has shape (2, 3), expected (3, 2)", "shape"),
        ("the array w2 is missing", "arrays"),
        ("an array has an unknown name of 7 characters", "arrays"),
        ("it counts -3 newly scheduled pods, at least 1 must have been scheduled", "examples"),
        ("it refers to round 3, not to round 4 as it was sent", "stale"),
        ("position 99 lies outside a tensor of 10 entries", "encoding"),
        ("w1 has the scale nan, expected a finite one >= 0", "not_finite"),
        ("no usable answer: NOT_FINITE", "member_failed"),
        ("no usable answer: its message of 99 bytes is larger than 9", "member_failed"),
        ("Krum could not aggregate 2 updates: no norm of them", "aggregation"),
        ("the speed row 00ff comes twice", "speeds"),
        ("something that nobody thought of", "other"),
    ],
)
def test_reasons_become_a_few_classes(reason: str, expected: str) -> None:
    assert reason_class(reason) == expected


def test_what_json_cannot_say_is_null() -> None:
    value = {"a": [1.0, float("nan")], "b": {"c": float("inf")}, "d": "NaN"}
    assert finite(value) == {"a": [1.0, None], "b": {"c": None}, "d": "NaN"}


async def test_texts_of_members_reach_the_browser_as_data(
    client: httpx.AsyncClient, registry: Registry, clock: Clock
) -> None:
    fill(registry, clock)
    registry.record_event("refused", MARKUP)
    for path in ("/api/v1/overview", "/api/v1/rounds", "/api/v1/events"):
        answer = await client.get(path)
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert MARKUP in json.dumps(answer.json())
    assert MARKUP not in (await client.get("/")).text
