"""The queue: which gates are lifted when, what survives failures, and the way out."""

import asyncio
from pathlib import Path

import pytest

from agent.cluster.kubernetes import ApiError
from agent.cluster.records import GATE, Pod
from agent.cluster.speeds_file import KindSpeeds, SpeedsFile
from agent.cluster.view import USAGE_CPU
from agent.scheduling.queue import HOPELESS_SECONDS, RECONNECT_SECONDS, TRIES
from tests.unit.members import Member, gated, node, pod


@pytest.fixture
def member(tmp_path: Path) -> Member:
    made = Member(tmp_path, rule="hrrn-eft", max_extra_wait_seconds=600.0)
    made.state.replace_nodes([node("fast", gpus=2), node("slow", "k80", gpus=2)])
    return made


def test_pods_go_while_there_is_room_and_each_place_is_given_once(tmp_path: Path) -> None:
    member = Member(tmp_path, rule="djct")  # never waits
    member.state.replace_nodes([node("a", gpus=2), node("b", gpus=1)])
    for number in range(5):
        member.state.apply_pod(gated(f"u{number}"))
    assert len(member.queue.step()) == 3
    assert member.state.view.requested[:2, 2].tolist() == [2.0, 1.0]
    assert member.queue.step() == []
    assert len(member.queue.gated()) == 2
    assert [d.verb for d in member.decisions()] == ["queue"] * 3


def test_a_burst_of_pods_is_decided_in_several_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    member = Member(tmp_path, rule="djct")  # never waits
    member.state.replace_nodes([node("fast", gpus=2), node("slow", "k80", gpus=2)])
    for number in range(4):
        member.state.apply_pod(gated(f"u{number}"))
    monkeypatch.setattr("agent.scheduling.queue.STEP_SECONDS", -1.0)  # any decision takes longer
    for _ in range(4):
        member.queue.wake.clear()
        assert len(member.queue.step()) == 1
        assert member.queue.wake.is_set()  # the next look comes at once
    assert len({d.pods[d.action] for d in member.decisions()}) == 4


@pytest.fixture
def waiting(member: Member) -> Member:
    """Both GPUs of the fast node run what will end soon; pod x waits for one, for slow is free."""
    for number in range(2):
        member.state.apply_pod(pod(f"r{number}", node="fast", phase="Running"))
    member.state.set_speeds(
        SpeedsFile(
            gpu_models=["v100", "k80"], job_types=["a"], interference=[[0.0]],
            kinds=[KindSpeeds(job_type="a", gpus=1, slowdown=[0.0, 1.7])],
        )
    )  # fmt: skip
    member.now += 2900
    member.state.apply_pod(gated("x"))
    return member


def test_a_pod_waits_for_a_much_faster_node_that_will_be_free_soon(waiting: Member) -> None:
    member = waiting
    assert member.queue.step() == []
    [wait] = member.decisions()
    assert (wait.pods[wait.action], wait.nodes[wait.action]) == ("", "")
    assert len(wait.pods) == 2
    member.queue.step()  # nothing changed: still the same decision
    assert len(member.decisions()) == 1
    member.state.apply_pod(pod("r0", node="fast", phase="Succeeded"))
    assert [p.uid for p in member.queue.step()] == ["x"]
    assert member.state.assumed("x") == "fast"


def test_a_pod_that_the_policy_keeps_waiting_too_long_is_let_go(waiting: Member) -> None:
    assert waiting.queue.step() == []
    waiting.now += 599  # the slow node was free for it all the time
    assert waiting.queue.step() == []
    waiting.now += 2
    assert [p.uid for p in waiting.queue.step()] == ["x"]
    assert waiting.queue.step() == []  # once
    assert waiting.count("queue_released_total", cause="overdue") == 1
    assert waiting.queue.longest_extra_wait() == 601.0


def test_a_pod_that_claims_devices_is_left_to_kube_scheduler_at_once(member: Member) -> None:
    member.state.apply_pod(gated("claims", claims=1))
    member.state.apply_pod(pod("theirs", claims=1, gated=True, gates=("other", GATE)))
    assert [p.uid for p in member.queue.step()] == ["claims"]
    assert member.count("queue_released_total", cause="claims") == 1
    assert member.state.assumed("claims") == ""
    assert member.decisions() == []


def test_a_pod_that_no_node_could_hold_is_shown_to_kube_scheduler_soon(member: Member) -> None:
    member.state.apply_pod(gated("huge", gpus=8))
    assert member.queue.step() == []
    member.now += HOPELESS_SECONDS - 1
    assert member.queue.step() == []
    member.now += 2
    assert [p.uid for p in member.queue.step()] == ["huge"]
    assert member.count("queue_released_total", cause="hopeless") == 1
    assert member.decisions() == []


def test_a_full_cluster_keeps_pods_in_order_however_long_it_is_full(member: Member) -> None:
    for number in range(4):
        place = "fast" if number < 2 else "slow"
        member.state.apply_pod(pod(f"r{number}", node=place, phase="Running"))
    member.state.apply_pod(gated("x"))
    for _ in range(10):
        member.now += 3600
        assert member.queue.step() == []
    member.state.apply_pod(pod("r0", node="fast", phase="Succeeded"))
    assert [p.uid for p in member.queue.step()] == ["x"]
    assert member.count("queue_released_total", cause="decision") == 1


def test_a_pod_behind_somebody_elses_gate_holds_no_place(member: Member) -> None:
    member.state.apply_pod(gated("x"))
    member.state.apply_pod(
        Pod(uid="y", name="y", gated=True, gates=("other", "fedsched.io/queue"), gpus=1)
    )
    assert [p.uid for p in member.queue.step()] == ["x"]


def test_a_pod_behind_somebody_elses_gate_has_its_turn_when_that_is_gone(member: Member) -> None:
    both = Pod(uid="y", name="y", gated=True, gates=("other", GATE), gpus=1)
    member.state.apply_pod(both)
    member.now += 5000
    assert member.queue.step() == []
    member.now += 5000
    assert member.queue.step() == []
    assert member.queue.longest_extra_wait() == 0.0
    member.state.apply_pod(gated("y"))
    assert [p.uid for p in member.queue.step()] == ["y"]
    assert member.count("queue_released_total", cause="decision") == 1


def test_nothing_is_decided_on_a_stale_state(member: Member) -> None:
    member.alive = False
    member.state.apply_pod(gated("x"))
    assert member.queue.step() == []
    member.alive = True
    assert [p.uid for p in member.queue.step()] == ["x"]
    assert member.count("queue_released_total", cause="decision") == 1


async def test_a_state_that_stays_lost_holds_no_gate(member: Member) -> None:
    for name in "abc":
        member.state.apply_pod(gated(name))
    away, tries = True, []

    async def lift(pod: Pod) -> None:
        tries.append(pod.uid)
        if away:
            raise ApiError(503, "away")

    member.lift, member.alive = lift, False
    member.now += member.settings.stale_seconds - 1
    assert member.queue.step() == []  # the first list may take that long
    member.now += 1
    [a] = member.queue.step()
    assert member.queue.step() == []  # one is tried at a time while nobody answers
    assert not await member.queue.write(a)
    away = False
    [a] = member.queue.step()
    assert await member.queue.write(a)
    assert member.queue.step() == []  # the API server is back: so may the watches be
    member.now += RECONNECT_SECONDS
    rest = member.queue.step()
    assert [p.uid for p in rest] == ["b", "c"]
    assert member.count("queue_released_total", cause="state_lost") == 4
    assert member.decisions() == []


async def test_a_state_that_is_known_again_is_decided_on_again(member: Member) -> None:
    member.alive = False
    member.now += member.settings.stale_seconds
    member.alive = True
    member.state.apply_pod(gated("x"))
    [x] = member.queue.step()
    assert member.count("queue_released_total", cause="decision") == 1
    assert await member.queue.write(x)
    member.alive = False
    member.state.apply_pod(gated("y"))
    assert member.queue.step() == []
    member.now += RECONNECT_SECONDS  # no more: the watches had been silent for stale_seconds
    [y] = member.queue.step()
    assert y.uid == "y"
    assert member.count("queue_released_total", cause="state_lost") == 1


async def test_a_replica_that_does_not_lead_lifts_nothing(waiting: Member) -> None:
    waiting.leads = False
    assert waiting.queue.step() == []
    waiting.now += 601
    assert waiting.queue.step() == []
    assert waiting.decisions() == []
    waiting.leads = True  # it has watched all the time, so it knows how long x has waited
    [x] = waiting.queue.step()
    assert waiting.count("queue_released_total", cause="overdue") == 1
    waiting.leads = False  # lost between decision and write
    assert not await waiting.queue.write(x)
    assert waiting.lifted == []


def test_only_pods_of_the_named_schedulers_are_dealt_with(tmp_path: Path) -> None:
    member = Member(tmp_path, rule="djct", scheduler_names=("ours",))
    member.state.replace_nodes([node("a", gpus=4)])
    member.state.apply_pod(gated("x"))
    member.state.apply_pod(gated("y", scheduler="ours"))
    assert [p.uid for p in member.queue.step()] == ["y"]


def test_a_busy_node_is_not_chosen_and_is_ready_again_afterwards(member: Member) -> None:
    member.state.set_use(USAGE_CPU, {"fast": 31.0 / 32})
    member.state.apply_pod(gated("x"))
    member.queue.step()
    assert member.state.assumed("x") in ("", "slow")
    assert member.state.view.ready[:2].all()


async def test_a_failed_write_is_tried_again_and_then_the_pod_decided_on_anew(
    member: Member,
) -> None:
    tries: list[str] = []

    async def fail_twice(pod: Pod) -> None:
        tries.append(pod.uid)
        if len(tries) < 3:
            raise ApiError(500, "down")

    member.lift = fail_twice
    member.state.apply_pod(gated("x"))
    [x] = member.queue.step()
    assert await member.queue.write(x)
    assert len(tries) == 3
    assert member.count("queue_lift_failures_total") == 2

    async def fail(pod: Pod) -> None:
        tries.append(pod.uid)
        raise ApiError(503, "down")

    member.lift = fail
    member.state.apply_pod(gated("y"))
    [y] = member.queue.step()
    tries.clear()
    assert not await member.queue.write(y)
    assert tries == ["y"] * TRIES
    assert member.state.assumed("y") == ""
    assert [p.uid for p in member.queue.step()] == ["y"]


async def test_a_gate_that_moved_is_left_to_what_the_watch_shows_next(member: Member) -> None:
    tries: list[str] = []

    async def moved(pod: Pod) -> None:
        tries.append(pod.uid)
        raise ApiError(422, "test failed")

    member.lift = moved
    member.state.apply_pod(gated("x"))
    [x] = member.queue.step()
    assert not await member.queue.write(x)
    assert tries == ["x"]


async def test_the_loop_acts_on_a_change_and_ends_its_writes(member: Member) -> None:
    task = asyncio.create_task(member.queue.run())
    hanging = asyncio.Event()

    async def hang(pod: Pod) -> None:
        member.lifted.append(pod.uid)
        await hanging.wait()

    member.lift = hang
    try:
        member.state.apply_pod(gated("x"))
        member.queue.wake.set()
        while member.lifted != ["x"]:
            await asyncio.sleep(0)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await member.queue.close()
    assert [p.uid for p in member.queue.gated()] == ["x"]  # for lift_gates to find
