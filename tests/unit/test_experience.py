"""Experience: exactly once in and out, credited by where pods landed, in contiguous runs."""

import math
import os
import shutil
import struct
import zlib
from pathlib import Path

import msgspec
import numpy as np
import pytest

from agent.journal import Census, Decision, Journal, Progress, Record, segments
from agent.learning.experience import Taken, take
from agent.learning.reward import RewardWeights
from agent.learning.store import Store
from common.features import FEATURE_COUNT
from tests.unit.journals import decision, event, no_samples, placed

JOBS_ONLY = RewardWeights(alpha=0.0, beta=0.0, gamma=0.0, delta=1.0)


class Member:
    """A journal that serving writes and a store that learning reads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.journal = Journal(folder / "journal")
        self.store = Store(folder / "experience.sqlite", now=lambda: 1000.0)

    def write(self, *records: Record) -> None:
        for record in records:
            self.journal.append(record)
        self.ingest()

    def ingest(self) -> int:
        return self.store.ingest(self.journal.folder, no_samples)

    def take(self, limit: int = 100, wait: float = 1e6) -> Taken:
        return take(self.store, limit, outcome_wait=wait, weights=JOBS_ONLY, run_time_prior=100.0)

    def reopen(self) -> None:
        self.store.close()
        self.store = Store(self.store.path, now=lambda: 1000.0)


@pytest.fixture
def member(tmp_path: Path) -> Member:
    return Member(tmp_path)


def fates(taken: Taken) -> list[str]:
    return [fate for _, fate in taken.fates]


def run_times(taken: Taken, mean: float, *seconds: float) -> bool:
    """Whether the transitions last so many seconds, told in mean run times."""
    assert taken.batch is not None
    return taken.batch.elapsed.tolist() == pytest.approx([s / mean for s in seconds])


def test_a_transition_runs_from_its_decision_to_the_next(member: Member) -> None:
    member.write(decision(1, "a"), *placed("a", "n0", 11), decision(2))
    taken = member.take()
    assert taken.batch is not None
    assert fates(taken) == ["learned"]
    assert taken.batch.action.tolist() == [0]
    assert run_times(taken, 91.0, 10.0)
    # 50 job seconds over a mean run time of (10 * 100 + 1) / (10 + 1) = 91 s.
    assert taken.batch.reward[0] == pytest.approx(-50.0 / 91.0)
    assert taken.batch.features.shape == (1, 3, FEATURE_COUNT)
    assert (taken.batch.features == 1.0).all()
    assert taken.batch.rule_scores.tolist() == [[0.0, -1.0, -2.0]]
    assert taken.scheduled == 1


def test_nothing_is_learned_before_the_outcome_is_known(member: Member) -> None:
    member.write(decision(1, "a"), event("a", "bound", 11, "n0"), decision(2))
    assert member.take().batch is None
    member.write(event("a", "oom", 25, "n0"))
    taken = take(
        member.store,
        9,
        outcome_wait=1e6,
        weights=RewardWeights(alpha=0.0, beta=0.0, gamma=2.0, delta=0.0),
    )
    assert taken.batch is not None
    assert taken.batch.reward.tolist() == [-2.0]  # the OOM kill, credited to its decision


def test_a_slow_outcome_is_not_waited_for_beyond_the_limit(member: Member) -> None:
    member.write(decision(1, "a"), event("a", "bound", 11, "n0"), decision(2))
    assert member.take(wait=11.0).batch is None  # newest record: 20 s, decided at 10 s
    taken = member.take(wait=10.0)
    assert fates(taken) == ["learned"]
    member.store.commit(taken.fates)
    member.write(event("a", "finished", 500, "n0", run=489.0))
    assert member.store.counter("late_outcomes") == 1


def test_a_wait_needs_only_the_next_decision(member: Member) -> None:
    member.write(decision(1), decision(2))
    taken = member.take()
    assert fates(taken) == ["learned"]
    assert taken.batch is not None
    assert taken.batch.action.tolist() == [2]
    assert taken.scheduled == 0


def test_credit_goes_to_the_node_where_the_pod_was_seen(member: Member) -> None:
    member.write(decision(1, "a"), *placed("a", "n1", 11), decision(2))
    taken = member.take()
    assert taken.batch is not None
    assert taken.batch.action.tolist() == [1]
    # Rule alone, temperature 0.5: softmax of (0, −2, −4) at row 1.
    expected = -2.0 - math.log(1.0 + math.exp(-2.0) + math.exp(-4.0))
    assert taken.batch.log_prob[0] == pytest.approx(expected)


def test_a_moved_pod_is_scored_by_the_policy_that_decided(member: Member) -> None:
    member.write(decision(1, "a", policy="v7"), *placed("a", "n1", 11), decision(2))
    taken = take(
        member.store,
        9,
        outcome_wait=1e6,
        scores=lambda version, _: (
            np.array([0.0, 1.0, 0.0], np.float32) if version == "v7" else None
        ),
    )
    assert taken.batch is not None
    # (0, −1, −2) + (0, 1, 0) over 0.5: (0, 0, −4).
    assert taken.batch.log_prob[0] == pytest.approx(-math.log(2.0 + math.exp(-4.0)))


@pytest.mark.parametrize(
    ("node", "options"),
    [
        ("stranger", {}),
        ("n1", {"temperature": 0.0, "log_prob": 0.0}),
        ("n1", {"policy": "unknown"}),
    ],
    ids=["no candidate", "greedy", "unknown policy"],
)
def test_a_pod_that_landed_where_no_probability_is_known_is_set_aside(
    member: Member, node: str, options: dict[str, float]
) -> None:
    member.write(
        decision(1),
        decision(2, "a", **options),  # type: ignore[arg-type]  # options of several types
        *placed("a", node, 21),
        decision(3),
        decision(4),
    )
    taken = member.take()
    assert fates(taken) == ["learned", "elsewhere", "learned"]
    assert taken.batch is not None
    # The run is broken where the decision is missing, yet time and reward run up to it.
    assert taken.batch.ends.tolist() == [True, True]
    assert run_times(taken, 91.0, 10.0, 10.0)


def test_a_greedy_decision_that_was_followed_is_learned_from(member: Member) -> None:
    member.write(
        decision(1, "a", temperature=0.0, log_prob=0.0), *placed("a", "n0", 11), decision(2)
    )
    taken = member.take()
    assert taken.batch is not None
    assert taken.batch.log_prob.tolist() == [0.0]


def test_a_retry_supersedes_the_earlier_decision(member: Member) -> None:
    member.write(decision(1), decision(2, "a"), decision(3, "a"), *placed("a", "n0", 31))
    member.write(decision(4))
    taken = member.take()
    assert sorted(fates(taken)) == ["learned", "learned", "superseded"]
    assert taken.batch is not None
    # The superseded decision is as if it had not been: the first interval reaches to the third.
    assert run_times(taken, 91.0, 20.0, 10.0)
    assert taken.batch.ends.tolist() == [False, True]


def test_a_pod_that_never_got_a_node_is_given_up(member: Member) -> None:
    member.write(decision(1, "a"), decision(2), event("a", "deleted", 21))
    assert fates(member.take()) == ["unplaced"]


def test_the_first_unready_decision_holds_back_the_rest(member: Member) -> None:
    member.write(decision(1), decision(2, "a"), decision(3), decision(4))
    taken = member.take()
    assert fates(taken) == ["learned"]
    member.store.commit(taken.fates)
    member.write(*placed("a", "n0", 21))
    taken = member.take()
    assert fates(taken) == ["learned", "learned"]
    assert taken.batch is not None
    assert taken.batch.ends.tolist() == [False, True]


def test_a_pod_that_was_gone_when_serving_came_back_holds_nothing_up(member: Member) -> None:
    member.write(decision(1, "a"), event("a", "bound", 11.0, "n0"))
    member.write(decision(2, "b"), event("b", "bound", 21.0, "n1"))
    member.write(decision(3, "c"), decision(4))
    assert fates(member.take()) == []
    member.write(Census(time=50.0, uids=["b", "someone"]))
    assert fates(member.take()) == ["learned"]
    gone = member.store.events("a")["gone"]
    assert (gone.node, gone.time, gone.run_seconds) == ("n0", 50.0, 0.0)
    assert "gone" not in member.store.events("b")
    member.write(event("b", "finished", 60.0, "n1"))
    assert fates(member.take()) == ["learned", "learned", "unplaced"]
    assert member.store.counter("pods_gone") == 2


def test_a_session_ends_its_run(member: Member) -> None:
    member.write(decision(1), decision(2), decision(3, session="s2"), decision(4, session="s2"))
    taken = member.take()
    assert fates(taken) == ["learned", "unfollowed", "learned"]
    assert taken.batch is not None
    assert taken.batch.ends.tolist() == [True, True]


def test_limits_cut_the_run_and_the_rest_follows(member: Member) -> None:
    member.write(*(decision(n) for n in range(1, 6)))
    first = member.take(limit=3)
    member.store.commit(first.fates)
    second = member.take(limit=3)
    assert [len(first.fates), len(second.fates)] == [3, 1]  # the fifth has no follower yet
    assert second.batch is not None
    assert second.batch.features[0, 0, 0] == 4.0


def test_candidates_of_unlike_number_are_padded(member: Member) -> None:
    member.write(decision(1), decision(2, "a", ("n0", "n1", "n2")), *placed("a", "n2", 21))
    member.write(decision(3))
    batch = member.take().batch
    assert batch is not None
    assert batch.mask.sum(axis=1).tolist() == [3, 4]
    assert batch.features[0, 3].tolist() == [0.0] * FEATURE_COUNT


def test_a_decision_of_another_layout_is_invalid(member: Member) -> None:
    odd = decision(1)
    torn = Decision(
        **{name: getattr(odd, name) for name in odd.__struct_fields__} | {"features": b"1234"}
    )
    member.write(torn, decision(2), decision(3))
    assert fates(member.take()) == ["invalid", "learned"]


def test_records_are_taken_once_over_restarts_of_both_sides(member: Member) -> None:
    bound, finished = placed("a", "n0", 11)
    member.write(decision(1, "a"), bound, finished)
    member.reopen()
    assert member.ingest() == 0
    member.journal.close()
    member.journal = Journal(member.journal.folder)  # serve restarts and sees the pod once more
    member.write(decision(1, "a"), bound, finished, decision(2))
    assert member.store.counter("decisions") == 2
    assert member.store.counter("repeated_decisions") == 1
    assert member.store.counter("repeated_events") == 2
    assert member.store.counter("pods_finished") == 1


def test_a_failed_ingest_leaves_position_and_content_as_they_were(member: Member) -> None:
    member.journal.append(decision(1))
    reading = Progress(
        uid="a", time=1, job_type="j", gpus=1, gpu_model="m", steps_per_second=1, neighbours=[]
    )
    member.journal.append(reading)

    def broken(_: Progress) -> tuple[str, float]:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        member.store.ingest(member.journal.folder, broken)
    assert member.store.position == (0, 0)
    assert member.store.counter("decisions") == 0
    assert member.store.ingest(member.journal.folder, lambda _: ("k", 2.0)) == 2
    assert member.store.speed_sums() == {"k": (1.0, 2.0, 4.0)}


def test_a_decision_is_never_consumed_twice(member: Member) -> None:
    member.write(decision(1), decision(2))
    taken = member.take()
    member.store.commit(taken.fates, {"learner": b"one"})
    with pytest.raises(RuntimeError, match="consumed before"):
        member.store.commit(taken.fates, {"learner": b"two"}, {"learned": 1})
    assert member.store.blob("learner") == b"one"  # the state is of the same transaction
    assert member.store.fates()["learned"] == 1
    assert member.store.counter("learned") == 0


def test_dropped_segments_are_counted_and_passed_over(member: Member) -> None:
    member.write(decision(1))
    for number in range(2, 5):
        member.journal.close()
        member.journal = Journal(member.journal.folder)
        member.journal.append(decision(number))
    for _, path in segments(member.journal.folder)[1:3]:
        path.unlink()
    member.ingest()
    assert member.store.counter("dropped_segments") == 2
    assert member.store.counter("decisions") == 2


def test_a_segment_of_a_process_that_died_before_it_wrote_is_not_dropped(member: Member) -> None:
    member.write(decision(1))
    for _ in range(2):
        member.journal.close()
        member.journal = Journal(member.journal.folder)
    member.write(decision(2))
    assert [member.store.counter(name) for name in ("dropped_segments", "decisions")] == [0, 2]


def test_consumed_segments_are_deleted_but_never_the_newest(member: Member) -> None:
    for number in range(1, 5):
        member.journal.close()
        member.journal = Journal(member.journal.folder)
        member.journal.append(decision(number))
    member.ingest()
    assert member.store.forget_segments(member.journal.folder, keep=1) == 3
    assert len(segments(member.journal.folder)) == 2
    assert member.store.forget_segments(member.journal.folder, keep=0) == 1
    assert len(segments(member.journal.folder)) == 1


def test_consumed_decisions_are_pruned_and_still_counted(tmp_path: Path) -> None:
    member = Member(tmp_path)
    member.store.keep_decisions = 3
    member.write(*(decision(n) for n in range(1, 12)))
    taken = member.take()
    member.store.commit(taken.fates)
    assert member.store.fates()["learned"] == 10
    left = member.store._db.execute("SELECT COUNT(*) FROM decisions").fetchone()
    assert left == (3,)
    assert member.store.open_count() == 1


def test_a_damaged_database_is_moved_aside(
    member: Member, caplog: pytest.LogCaptureFixture
) -> None:
    member.write(decision(1), decision(2))
    member.store.close()
    member.store.path.write_bytes(os.urandom(8192))
    member.store = Store(member.store.path, now=lambda: 1000.0)
    assert member.store.moved_aside is not None
    assert member.store.moved_aside.stat().st_size == 8192
    assert "moved to" in caplog.text
    assert member.ingest() == 2  # the journal still holds them


def test_completion_times_run_from_creation_to_the_end(member: Member) -> None:
    member.write(event("a", "created", 5), *placed("a", "n0", 11), event("b", "created", 6))
    assert member.store.completion_seconds() == [7.0]


def test_a_record_of_another_release_is_counted_and_those_behind_it_are_taken(
    member: Member,
) -> None:
    body = b"\x93\xa7unknown\x01\x02"  # sound MessagePack: an array tagged "unknown"
    newest = segments(member.journal.folder)[-1][1]
    with newest.open("ab") as file:
        file.write(struct.pack("<II", len(body), zlib.crc32(body)) + body)
    member.write(decision(1, "a"))
    assert member.store.counter("unreadable_records") == 1
    assert member.store.counter("decisions") == 1
    assert member.ingest() == 0  # and it is not met again


def test_decisions_of_any_width_and_of_a_release_that_did_not_compress_are_learned_from(
    member: Member,
) -> None:
    nodes = tuple(f"n{n}" for n in range(300))
    member.write(decision(1, "a", nodes), decision(2, "b", nodes), decision(3))
    member.write(*placed("a", "n0", 11), *placed("b", "n7", 21))
    rows = member.store._db.execute("SELECT seq, record FROM decisions").fetchall()
    assert len(rows[0][1]) < len(decision(1, "a", nodes).features) / 5
    earlier = msgspec.msgpack.encode(decision(1, "a", nodes))
    member.store._db.execute("UPDATE decisions SET record = ? WHERE id = 'd1'", (earlier,))
    taken = member.take()
    assert taken.batch is not None
    assert taken.batch.action.tolist() == [0, 7]
    assert taken.batch.features.shape == (2, 301, FEATURE_COUNT)
    assert (taken.batch.features == np.array([1.0, 2.0])[:, None, None]).all()


def test_a_journal_that_was_replaced_is_read_from_its_beginning(member: Member) -> None:
    member.write(decision(1, "a"))
    member.journal.close()
    for _ in range(3):  # three processes, so that numbers are well behind the next journal's
        Journal(member.journal.folder).close()
    member.journal = Journal(member.journal.folder)
    member.write(decision(2, "b"))
    member.journal.close()
    shutil.rmtree(member.journal.folder)
    member.journal = Journal(member.journal.folder)
    member.write(decision(2, "b"), decision(3, "c"))
    assert member.store.counter("decisions") == 3
    assert member.store.counter("repeated_decisions") == 1
