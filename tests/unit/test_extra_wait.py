"""What counts as extra waiting, so that no pod is starved and none is let go for a full cluster."""

from pathlib import Path

import pytest

from agent.cluster.records import GATE, Pod
from agent.scheduling import extra_wait
from agent.scheduling.extra_wait import ExtraWait
from tests.unit.members import Member, gated, node, pod


@pytest.fixture
def member(tmp_path: Path) -> Member:
    made = Member(tmp_path)
    made.state.replace_nodes([node("a", gpus=4)])
    return made


def look(member: Member, waits: ExtraWait) -> None:
    member.state.tick()
    waits.look([member.state.pods[uid] for uid in member.state.gated])


def test_it_begins_when_there_is_room(member: Member) -> None:
    waits = ExtraWait(member.state)
    member.state.apply_pod(pod("r", gpus=3, node="a", phase="Running"))
    member.state.apply_pod(gated("x", gpus=2))
    look(member, waits)
    member.now += 100
    look(member, waits)
    assert waits.of("x") == 0.0  # nobody could have started it
    member.state.apply_pod(pod("r", gpus=3, node="a", phase="Succeeded"))
    look(member, waits)
    member.now += 30
    member.state.tick()
    assert waits.of("x") == 30.0


def test_pods_that_went_ahead_do_not_hide_that_one_is_kept_waiting(member: Member) -> None:
    waits = ExtraWait(member.state)
    for name in "rs":
        member.state.apply_pod(pod(name, gpus=2, node="a", phase="Running"))
    member.now += 1
    member.state.apply_pod(gated("large", gpus=4))
    # Each time that two GPUs come free, a small pod gets them: four are never free at once.
    for old, new in (("r", "t"), ("s", "u")):
        look(member, waits)
        assert waits.of("large") == 0.0
        member.now += 10
        member.state.apply_pod(pod(old, gpus=2, node="a", phase="Succeeded"))
        member.state.apply_pod(pod(new, gpus=2, node="a", phase="Running"))
    look(member, waits)  # had it been first in line, it would run now
    member.now += 50
    look(member, waits)
    assert waits.of("large") == 50.0
    assert waits.of("nobody") == 0.0


def test_room_is_that_of_a_node_which_the_pod_accepts(member: Member) -> None:
    waits = ExtraWait(member.state)
    member.state.apply_pod(gated("k", gpu_models=("k80",)))
    member.state.apply_pod(gated("big", gpu_memory=80.0))
    member.state.apply_pod(gated("free"))
    look(member, waits)
    member.now += 5
    look(member, waits)
    assert [waits.of(uid) for uid in ("k", "big", "free")] == [0.0, 0.0, 5.0]
    assert [waits.hopeless(uid) for uid in ("k", "big", "free")] == [True, True, False]
    member.state.apply_node(node("b", "k80", ready=False))
    look(member, waits)
    assert not waits.hopeless("k")  # it may become ready
    assert waits.of("k") == 0.0


def test_the_turn_of_a_pod_begins_when_others_have_taken_their_gates_off(member: Member) -> None:
    waits = ExtraWait(member.state)
    member.state.apply_pod(Pod(uid="x", name="x", gpus=1, gated=True, gates=("theirs", GATE)))
    look(member, waits)
    member.now += 1000
    member.state.apply_pod(gated("x"))
    look(member, waits)
    member.now += 7
    look(member, waits)
    assert waits.of("x") == 7.0


def test_a_restart_neither_forgives_nor_adds_waiting(member: Member, tmp_path: Path) -> None:
    waits = ExtraWait(member.state)
    member.state.apply_pod(gated("x"))
    look(member, waits)
    content = waits.content()
    assert content is not None
    assert waits.content() is None  # nothing new to write
    path = tmp_path / "waits.json"
    path.write_bytes(content)
    member.now += 40
    again = ExtraWait(member.state)
    again.read(path)
    look(member, again)
    assert again.of("x") == 40.0
    path.write_bytes(b'{"x": ')
    broken = ExtraWait(member.state)
    broken.read(path)
    look(member, broken)
    assert broken.of("x") == 0.0


def test_many_pods_are_found_out_about_in_turns(
    member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extra_wait, "MOST", 3)
    waits = ExtraWait(member.state)
    for number in range(6):  # the first ones will never fit
        member.state.apply_pod(gated(f"h{number}", gpus=8))
    member.state.apply_pod(gated("x"))
    for _ in range(3):
        look(member, waits)
    member.now += 9
    member.state.tick()
    assert waits.of("x") == 9.0
