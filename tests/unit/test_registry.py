"""The hub's memory."""

import math
import sqlite3
from contextlib import closing

import pytest
from typer.testing import CliRunner

from coordinator.cli import app
from coordinator.registry import Registry, RegistryError
from coordinator.views import Checkpoint, NewUpdate, Point


@pytest.fixture
def clock():
    return [1000.0]


@pytest.fixture
def registry(tmp_path, clock):
    made = Registry(
        f"sqlite:///{tmp_path / 'registry.db'}",
        clock=lambda: clock[0],
        metric_points=3,
        event_limit=2,
    )
    yield made
    made.close()


def finish(registry, number, *updates, version="v"):
    registry.finish_round(
        number,
        invited=len(updates),
        updates=updates,
        version=version,
        policy_file=f"{number}.safetensors",
        global_norm=2.0,
        bytes_in=10,
        bytes_out=20,
    )


def accepted(member, pods=5, total=5, norm=1.0, counter=0xF):
    return NewUpdate(
        member,
        accepted=True,
        num_examples=pods,
        scheduled_pods=total,
        delta_norm=norm,
        counter=counter,
        speed_table=b"table",
    )


def test_members_pass_through_their_states(registry, clock):
    registry.enroll("alpha", "f1", 5000.0)
    assert registry.members()[0].state == "never seen"
    registry.connected("alpha", 1, "net", "0.1")
    clock[0] = 1010.0
    registry.traffic({"alpha": (7, 9)})
    (seen,) = registry.members()
    assert (seen.state, seen.last_seen, seen.bytes_in, seen.bytes_out) == (
        "connected",
        1010.0,
        7,
        9,
    )
    registry.disconnected("alpha")
    assert registry.members()[0].state == "disconnected"
    registry.revoke("alpha")
    assert registry.members()[0].state == "revoked"
    registry.enroll("alpha", "f2", 6000.0)
    (again,) = registry.members()
    assert (again.state, again.fingerprint, again.enrolled_at) == ("disconnected", "f2", 1000.0)


def test_refusal_says_why(registry):
    assert registry.refusal("alpha", "f") == "not enrolled"
    registry.enroll("alpha", "f", 0.0)
    assert registry.refusal("alpha", "f") is None
    assert registry.refusal("alpha", "g") == "certificate was replaced by a newer one"
    registry.revoke("alpha")
    assert registry.refusal("alpha", "f") == "revoked"
    assert registry.admitted() == {}
    with pytest.raises(RegistryError, match="no member is called beta"):
        registry.revoke("beta")


def test_round_numbers_never_repeat_and_an_open_one_is_told_from_an_interrupted(registry):
    assert registry.checkpoint() is None
    assert [registry.begin_round("fedavg") for _ in range(3)] == [1, 2, 3]
    finish(registry, 2, version="v2")
    assert registry.checkpoint() == Checkpoint(2, "v2", "2.safetensors")
    assert [(r.number, r.state) for r in registry.rounds()] == [
        (3, "open"),
        (2, "finished"),
        (1, "interrupted"),
    ]
    assert registry.overview().current_round == 3


def test_finished_round_commits_outcome_pods_and_speeds_together(registry):
    registry.enroll("alpha", "f", 0.0)
    registry.enroll("beta", "g", 0.0)
    number = registry.begin_round("fedavg")
    finish(
        registry,
        number,
        accepted("alpha", pods=5, total=25, counter=2**64 - 1),
        NewUpdate("beta", accepted=False, reason="odd", delta_norm=math.inf),
    )
    (done,) = registry.rounds()
    assert (done.invited, done.accepted, done.rejected, done.bytes_out) == (2, 1, 1, 20)
    assert registry.pod_counter("alpha") == (2**64 - 1, 25)
    assert registry.pod_counter("beta") == (None, 0)
    assert registry.speed_tables() == {"alpha": b"table"}
    rejected, taken = registry.updates()
    assert (rejected.reason, rejected.delta_norm) == ("odd", None)
    assert (taken.num_examples, taken.reason) == (5, "")
    assert registry.accepted_norms() == [1.0]
    overview = registry.overview()
    assert (overview.members, overview.rounds, overview.scheduled_pods) == (2, 1, 5)
    assert (overview.accepted_updates, overview.rejected_updates) == (1, 1)
    registry.revoke("alpha")
    assert registry.speed_tables() == {}


def test_failed_transaction_leaves_nothing_behind(registry):
    registry.enroll("alpha", "f", 0.0)
    number = registry.begin_round("fedavg")

    def broken():
        yield accepted("alpha", total=9)
        raise RuntimeError("crash")

    with pytest.raises(RuntimeError, match="crash"):
        registry.finish_round(
            number,
            invited=1,
            updates=broken(),
            version="v",
            policy_file="p",
            global_norm=0.0,
            bytes_in=0,
            bytes_out=0,
        )
    assert registry.pod_counter("alpha") == (None, 0)
    assert registry.checkpoint() is None
    assert registry.updates() == []


def test_learning_curves_are_bounded_and_hold_no_nan(registry, clock):
    for value in (1.0, math.nan, 2.0, math.inf, 3.0, 4.0):
        clock[0] += 1
        registry.record_metrics("alpha", {"reward": value})
    registry.record_metrics("beta", {"reward": 9.0})
    assert registry.metrics("alpha", "reward") == [
        Point(1003.0, 2.0),
        Point(1005.0, 3.0),
        Point(1006.0, 4.0),
    ]
    assert registry.metric_names("beta") == ["reward"]


def test_events_are_bounded_newest_first(registry):
    for text in ("one", "two", "three"):
        registry.record_event("refused", text, "alpha")
    assert [e.text for e in registry.events()] == ["three", "two"]


def test_registry_outlives_its_process(tmp_path):
    url = f"sqlite:///{tmp_path / 'registry.db'}"
    first = Registry(url)
    first.enroll("alpha", "f", 0.0)
    first.connected("alpha", 1, "net", "0.1")
    first.close()
    second = Registry(url)
    second.all_disconnected()
    assert second.members()[0].state == "disconnected"
    second.close()


def test_registry_that_cannot_be_opened_says_so(tmp_path):
    with pytest.raises(RegistryError, match="check registry_url"):
        Registry(f"sqlite:///{tmp_path / 'none' / 'registry.db'}")


@pytest.mark.parametrize("first", [0, 8192], ids=["its head", "its inside"])
def test_damaged_registry_is_refused_and_left_as_it_is(tmp_path, first):
    path = tmp_path / "registry.db"
    made = Registry(f"sqlite:///{path}")
    for _ in range(100):
        made.record_event("kind", "text " * 90)
    made.close()
    content = bytearray(path.read_bytes())
    content[first : first + 20_000] = b"\xa5" * 20_000
    path.write_bytes(content)
    with pytest.raises(RegistryError, match=r"registry\.db is damaged .*restore it from a copy"):
        Registry(f"sqlite:///{path}")
    assert path.read_bytes() == content


def test_registry_that_fails_at_work_is_told_in_one_line(tmp_path):
    state = ["--state-dir", str(tmp_path)]
    assert CliRunner().invoke(app, ["init", *state]).exit_code == 0
    with closing(sqlite3.connect(tmp_path / "registry.db")) as db, db:
        db.execute(
            "CREATE TRIGGER full BEFORE INSERT ON members "
            "BEGIN SELECT RAISE(FAIL, 'database or disk is full'); END"
        )
    out = ["--out", str(tmp_path / "alpha")]
    result = CliRunner().invoke(app, ["enroll", "alpha", *out, *state])
    assert result.exit_code == 1
    said = " ".join(result.output.split())
    assert "the registry failed at work" in said
    assert "database or disk is full" in said
    assert "free some disk" in said
    assert "Traceback" not in said
