"""The queue: which gates are lifted when, what survives failures, and the way out."""

import asyncio
from pathlib import Path

import pytest

from agent.cluster.kubernetes import ApiError
from agent.cluster.records import Pod
from agent.cluster.speeds_file import KindSpeeds, SpeedsFile
from agent.scheduling.queue import TRIES
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


def test_a_pod_waits_for_a_much_faster_node_that_will_be_free_soon(member: Member) -> None:
    for number in range(2):  # both GPUs of the fast node run what will end soon
        member.state.apply_pod(pod(f"r{number}", node="fast", phase="Running"))
    member.state.set_speeds(
        SpeedsFile(
            gpu_models=["v100", "k80"], job_types=["a"], interference=[[0.0]],
            kinds=[KindSpeeds(job_type="a", gpus=1, slowdown=[0.0, 1.7])],
        )
    )  # fmt: skip
    member.now += 2900
    member.state.apply_pod(gated("x"))
    assert member.queue.step() == []
    [wait] = member.decisions()
    assert (wait.pods[wait.action], wait.nodes[wait.action]) == ("", "")
    assert len(wait.pods) == 2
    member.queue.step()  # nothing changed: still the same decision
    assert len(member.decisions()) == 1
    member.state.apply_pod(pod("r0", node="fast", phase="Succeeded"))
    assert [p.uid for p in member.queue.step()] == ["x"]
    assert member.state.assumed("x") == "fast"


def test_a_pod_that_waited_too_long_is_let_go_whatever_the_policy_says(member: Member) -> None:
    member.state.apply_pod(gated("huge", gpus=8))
    assert member.queue.step() == []
    member.now += 599
    assert member.queue.step() == []
    member.now += 2
    assert [p.uid for p in member.queue.step()] == ["huge"]
    assert member.queue.step() == []  # once
    assert member.count("queue_released_total", cause="overdue") == 1
    assert member.decisions() == []


def test_a_pod_behind_somebody_elses_gate_holds_no_place(member: Member) -> None:
    member.state.apply_pod(gated("x"))
    member.state.apply_pod(
        Pod(uid="y", name="y", gated=True, gates=("other", "fedsched.io/queue"), gpus=1)
    )
    assert [p.uid for p in member.queue.step()] == ["x"]


def test_nothing_is_decided_on_a_stale_state(member: Member) -> None:
    member.alive = False
    member.state.apply_pod(gated("x"))
    assert member.queue.step() == []
    member.alive = True
    assert [p.uid for p in member.queue.step()] == ["x"]


def test_a_busy_node_is_not_chosen_and_is_ready_again_afterwards(member: Member) -> None:
    member.state.set_usage({"fast": (31.0, 1.0)})
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


async def test_the_loop_acts_on_a_change_and_every_gate_is_lifted_on_the_way_out(
    member: Member,
) -> None:
    task = asyncio.create_task(member.queue.run())
    try:
        member.state.apply_pod(gated("x"))
        member.state.apply_pod(gated("huge", gpus=8))
        member.queue.wake.set()
        while member.lifted != ["x"]:
            await asyncio.sleep(0)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert await member.queue.lift_all() == 0
    assert member.lifted == ["x", "huge"]
    assert member.count("queue_released_total", cause="shutdown") == 1
