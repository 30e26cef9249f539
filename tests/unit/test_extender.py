"""The extender protocol over real HTTP: its forms, its safety, and what it records."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from agent.cluster.view import USAGE_CPU
from agent.scheduling.extender import NEUTRAL
from agent.scheduling.http_server import listening
from tests.unit.members import Member, args, gated, node, pod, pod_object

NAMES = ["slow", "fast", "slow2"]


@pytest.fixture
def member(tmp_path: Path) -> Member:
    made = Member(tmp_path)
    made.state.replace_nodes([node("fast"), node("slow", "k80"), node("slow2", "k80")])
    return made


@asynccontextmanager
async def serving(member: Member) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    async with (
        listening(member.extender.routes(), "127.0.0.1", 0) as port,
        aiohttp.ClientSession() as session,
    ):
        yield session, f"http://127.0.0.1:{port}"


async def test_prioritize_answers_a_bare_array_of_integer_scores_with_its_length(
    member: Member,
) -> None:
    async with (
        serving(member) as (session, url),
        session.post(f"{url}/prioritize", data=args("x", NAMES)) as answer,
    ):
        text = await answer.text()
        assert answer.status == 200
        assert answer.headers["Content-Length"] == str(len(text))
        assert "Transfer-Encoding" not in answer.headers
    [entry] = json.loads(text)
    assert entry.keys() == {"Host", "Score"}
    assert entry["Host"] == "fast"
    assert type(entry["Score"]) is int
    assert 0 < entry["Score"] <= 10


def test_only_nodes_above_the_lowest_score_are_named_and_differences_stay(member: Member) -> None:
    member.state.apply_node(node("full", "k80", gpus=1))
    member.state.apply_pod(pod("there", node="full", phase="Running"))
    names = [*NAMES, "full", "new"]
    with_worst = member.scores("x", names)
    assert with_worst["full"] == 0  # it has no room, and its score is the lowest that there is
    assert with_worst["new"] == NEUTRAL
    assert with_worst["fast"] == 10
    without = member.scores("x", [*NAMES, "new"])
    lowest = min(with_worst[name] for name in without)
    assert without == {name: with_worst[name] - lowest for name in without}
    said = [entry.host for entry in member.extender.prioritize(args("x", names), 0.0)]
    assert said == [name for name in names if name != "full"]


async def test_filter_keeps_busy_nodes_out_and_says_why(member: Member) -> None:
    member.state.set_use(USAGE_CPU, {"fast": 29.0 / 32, "slow": 28.5 / 32})
    async with (
        serving(member) as (session, url),
        session.post(f"{url}/filter", data=args("x", [*NAMES, "new"])) as answer,
    ):
        body = await answer.json()
    assert body == {
        "Nodes": None,
        "NodeNames": ["slow", "slow2", "new"],
        "FailedNodes": {"fast": "fedsched: measured CPU use is above the limit"},
        "FailedAndUnresolvableNodes": {},
        "Error": "",
    }


async def test_whole_node_objects_are_understood_and_come_back_whole(member: Member) -> None:
    member.state.set_use(USAGE_CPU, {"fast": 31.0 / 32})
    items = [{"metadata": {"name": name}, "status": {"x": 1}} for name in NAMES]
    body = json.dumps({"Pod": pod_object("x"), "Nodes": {"metadata": {}, "items": items}})
    async with serving(member) as (session, url):
        async with session.post(f"{url}/filter", data=body) as answer:
            kept = await answer.json()
        async with session.post(f"{url}/prioritize", data=body) as answer:
            scores = await answer.json()
    assert kept["Nodes"]["items"] == [items[0], items[2]]
    assert kept["NodeNames"] is None
    assert [entry["Host"] for entry in scores] == ["slow", "slow2"]


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'{"Pod": 7}', b'{"Pod": {"metadata": {"name": "x"}}}', b"\xff"],
)
async def test_nonsense_gets_a_400_with_its_cause_and_costs_nothing(
    member: Member, body: bytes
) -> None:
    async with serving(member) as (session, url):
        for verb in ("prioritize", "filter"):
            async with session.post(f"{url}/{verb}", data=body) as answer:
                assert answer.status == 400
                assert "not an ExtenderArgs" in await answer.text()
        assert member.count("extender_no_opinion_total", reason="bad_request") == 2
        async with session.post(f"{url}/prioritize", data=args("x", NAMES)) as answer:
            assert len(await answer.json()) == 1


async def test_health_readiness_and_metrics_tell_how_it_stands(member: Member) -> None:
    async with serving(member) as (session, url):
        async with session.get(f"{url}/readyz") as answer:
            assert answer.status == 200
        member.alive = False
        async with session.get(f"{url}/readyz") as answer:
            assert answer.status == 503
        async with session.get(f"{url}/healthz") as answer:
            assert answer.status == 200
        async with session.post(f"{url}/prioritize", data=args("x", NAMES)) as answer:
            assert await answer.json() == []
        async with session.get(f"{url}/metrics") as answer:
            text = await answer.text()
    assert 'fedsched_extender_no_opinion_total{reason="stale_state"} 1.0' in text
    assert 'fedsched_extender_seconds_count{verb="prioritize"} 1.0' in text


def test_a_stale_state_lets_every_node_pass_the_filter(member: Member) -> None:
    member.state.set_use(USAGE_CPU, {"fast": 31.0 / 32})
    member.alive = False
    result = member.extender.filter(args("x", NAMES))
    assert result.node_names == NAMES
    assert member.count("extender_no_opinion_total", reason="stale_state") == 1


def test_an_answer_beyond_the_budget_is_no_opinion_and_no_decision(member: Member) -> None:
    member.spent = 0.051
    assert member.scores("x", NAMES) == {}
    assert member.count("extender_no_opinion_total", reason="deadline_exceeded") == 1
    assert member.decisions() == []
    assert member.state.assumed("x") == ""
    member.spent = 0.0
    assert member.best("y", NAMES) == "fast"


def test_a_pod_that_is_bound_or_done_gets_no_opinion(member: Member) -> None:
    member.state.apply_pod(pod("x", node="fast", phase="Running"))
    member.state.apply_pod(pod("y", node="fast", phase="Succeeded"))
    assert member.scores("x", NAMES) == member.scores("y", NAMES) == {}
    assert member.count("extender_no_opinion_total", reason="unknown_pod") == 2


def test_unknown_nodes_are_neutral_and_known_ones_alone_are_no_reason_to_fail(
    member: Member,
) -> None:
    scores = member.scores("x", ["new", "fast"])
    assert scores == {"new": 0, "fast": 10 - NEUTRAL}
    assert member.scores("y", ["new"]) == {}
    assert member.scores("z", []) == {}
    assert member.count("extender_no_opinion_total", reason="unknown_nodes") == 2


def test_a_fault_of_our_own_is_no_opinion_and_not_an_http_error(
    member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr("agent.scheduling.extender.decide_node", broken)
    assert member.scores("x", NAMES) == {}
    assert member.count("extender_no_opinion_total", reason="internal_error") == 1


def test_guarded_nodes_never_score_above_zero(member: Member) -> None:
    member.state.set_use(USAGE_CPU, {"fast": 31.0 / 32})
    scores = member.scores("x", NAMES)
    assert scores["fast"] == 0
    assert max(scores.values()) == 10  # told from the lowest on, which the guard's is
    assert member.count("guard_nodes_total", reason="cpu") == 1
    [decision] = member.decisions()
    assert "fast" not in decision.nodes
    need = {"fedsched.io/gpu-memory-gib": "17"}
    assert member.scores("y", NAMES, annotations=need) == {}  # all alike: none is better
    assert member.count("guard_nodes_total", reason="gpu_memory") == 2


def test_an_answer_is_recorded_and_the_place_it_gave_counts_for_the_next(member: Member) -> None:
    assert all(member.best(f"u{i}", NAMES) == "fast" for i in range(4))
    assert member.scores("u4", NAMES)["fast"] == 0  # its four GPUs are given out
    decisions = member.decisions()
    assert [d.pods[0] for d in decisions] == ["u0", "u1", "u2", "u3", "u4"]
    first = decisions[0]
    assert (first.verb, first.policy, first.session) == ("prioritize", "", "session")
    assert first.nodes[first.action] == "fast"
    assert len(first.rule_scores) == 4 * len(first.nodes)
    assert [d.running for d in decisions] == [0, 1, 2, 3, 4]


def test_a_retry_is_decided_as_if_its_first_answer_had_not_been(member: Member) -> None:
    for _ in range(6):
        assert member.best("x", NAMES) == "fast"
    assert len(member.decisions()) == 6


def test_a_pod_that_the_queue_placed_is_answered_with_that_place_and_recorded_once(
    member: Member,
) -> None:
    member.state.apply_pod(gated("x"))
    [released] = member.queue.step()
    intended = member.decisions()[0]
    assert intended.verb == "queue"
    place = intended.nodes[intended.action]
    member.state.apply_pod(pod("x"))
    assert member.best(released.uid, NAMES) == place
    assert member.state.assumed("x") == place
    assert [d.verb for d in member.decisions()] == ["queue"]


def test_a_place_of_the_queue_that_is_gone_gives_way(member: Member) -> None:
    member.state.apply_pod(gated("x"))
    member.queue.step()
    place = member.state.assumed("x")
    member.state.set_use(USAGE_CPU, {place: 31.0 / 32})
    scores = member.scores("x", NAMES)
    assert scores[place] == 0
    assert max(scores.values()) == 10


def test_a_full_disk_is_counted_and_never_blocks_an_answer(member: Member) -> None:
    member.journal.close()  # every write fails from here on: bad file descriptor
    assert member.best("x", NAMES) == "fast"
    assert member.count("journal_failures_total") == 2  # created, decision
