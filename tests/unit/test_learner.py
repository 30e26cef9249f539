"""The learner: each decision learned from once; adopts policies and peers at rounds' ends."""

import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent.cluster import nodes_file, speeds_file
from agent.federation import SharedPolicy
from agent.journal import Decision, Journal, segments
from agent.learning.promotion import promoted
from agent.settings import LearnSettings, Settings
from common.features import FEATURE_COUNT
from common.metrics import DECLARED
from common.policy import initial_arrays
from common.speeds import Peers, SpeedRow
from common.weights import Arrays, apply, like, load, save
from tests.unit.journals import NODES, decision, life_of_pods, placed
from tests.unit.learners import Member


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Callable[..., Member]]:
    made: list[Member] = []

    def make(name: str = "state", **learn: Any) -> Member:
        made.append(Member(tmp_path / name, **learn))
        return made[-1]

    yield make
    for member in made:
        member.store.close()
        member.journal.close()


def same(left: Arrays, right: Arrays) -> bool:
    return all(np.array_equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("algorithm", ["ppo", "dqn"])
def test_a_round_learns_commits_and_tells(build: Callable[..., Member], algorithm: str) -> None:
    options = {"warm_up": 4, "minibatch": 4} if algorithm == "dqn" else {}
    member = build(algorithm=algorithm, options=options)
    member.waits(1, 4)
    assert not member.learner.round()  # three are ready, four are wanted
    member.waits(5, 4)
    assert member.learner.round()
    assert member.store.fates()["learned"] == 7
    assert not same(member.learner.arrays(), initial_arrays())
    status = json.loads((member.settings.state / "learn-status.json").read_text())
    assert status["learning_rounds"] == 1
    assert status["fates"]["learned"] == 7
    assert status["open"] == 1
    local = member.learner.handover.local()
    assert local.learning_rounds == 1
    assert local.metrics["reward"] < 0.0
    assert {"loss", "entropy", "experiences", "scheduled_pods"} <= local.metrics.keys() & DECLARED


def test_few_decisions_are_learned_from_after_a_while(build: Callable[..., Member]) -> None:
    member = build(idle_seconds=60.0)
    member.waits(1, 3)
    assert not member.learner.round()
    member.now = 61.0
    assert member.learner.round()
    assert member.store.fates()["learned"] == 2


def test_a_restart_goes_on_where_the_last_round_was_committed(
    build: Callable[..., Member],
) -> None:
    through, restarted = build("through"), build("restarted")
    for first in (1, 17, 33):
        for member in (through, restarted):
            member.waits(first, 16)
            assert member.learner.round()
        restarted.reopen()
    assert restarted.learner.learning_rounds == 3
    assert same(through.learner.arrays(), restarted.learner.arrays())
    assert restarted.store.fates() == through.store.fates()


def test_another_algorithm_or_state_starts_from_what_is_live(
    build: Callable[..., Member], caplog: pytest.LogCaptureFixture
) -> None:
    member = build()
    member.waits(1, 8)
    member.learner.round()
    fields = dict(member.settings.learn)
    member.settings = Settings(
        state=member.settings.state, learn=LearnSettings(**{**fields, "algorithm": "dqn"})
    )
    member.reopen()
    assert "choose the former setting" in caplog.text
    assert same(member.learner.arrays(), initial_arrays())  # nothing was live: the rule
    assert member.learner.learning_rounds == 1
    member.store.commit(blobs={"learner": b"\x93torn"})
    member.reopen()
    assert "another version" in caplog.text
    assert member.store.fates()["learned"] == 7


def test_a_batch_that_cannot_be_learned_from_is_set_aside(build: Callable[..., Member]) -> None:
    member = build()
    member.waits(1, 4)
    bad = decision(5)
    fields = {name: getattr(bad, name) for name in bad.__struct_fields__}
    huge = np.full((len(bad.pods), FEATURE_COUNT), 3e38, np.float32)
    member.write(Decision(**{**fields, "features": huge.tobytes()}), decision(6))
    before = member.learner.arrays()
    assert member.learner.round()
    assert member.store.fates()["invalid"] == 5
    assert same(member.learner.arrays(), before)
    member.waits(7, 5)
    assert member.learner.round()
    assert member.store.fates()["learned"] == 5


def test_scheduled_pods_count_what_was_bound_after_a_decision(
    build: Callable[..., Member],
) -> None:
    member = build()
    member.write(decision(1, "a"), *placed("a", "n0", 11), decision(2), decision(3, "b"))
    member.write(*placed("b", "elsewhere", 31), decision(4), decision(5), decision(6))
    member.learner.round()
    assert member.learner.handover.local().scheduled_pods == 2


def test_a_passed_candidate_goes_live_and_its_file_is_mended(
    build: Callable[..., Member],
) -> None:
    member = build(gate_rounds=1, options={"learning_rate": 1e-9})
    nodes_file.write(member.settings.nodes_file, NODES)
    member.write(*life_of_pods(40))
    member.waits(1, 8)
    assert member.learner.round()
    path = member.settings.policy_file
    version = load(path)[1]["version"]
    assert version == member.learner.live.version
    path.unlink()
    member.reopen()
    assert load(path)[1]["version"] == version


@pytest.mark.parametrize("harm", ["state", "database"])
def test_a_learner_that_lost_its_state_starts_from_the_live_policy(
    build: Callable[..., Member], harm: str
) -> None:
    member = build(gate_rounds=1, options={"learning_rate": 1e-9})
    nodes_file.write(member.settings.nodes_file, NODES)
    member.write(*life_of_pods(40))
    member.waits(1, 8)
    member.learner.round()
    live = shifted(initial_arrays(), 0.5)
    _, about = load(member.settings.policy_file)
    save(member.settings.policy_file, live, {**about, "version": "before"})
    if harm == "state":
        member.store.commit(blobs={"learner": b"\x93torn"})
    else:
        member.store.close()
        member.store.path.write_bytes(os.urandom(8192))
    member.reopen()
    assert member.learner.live.version == "before"
    assert same(member.learner.arrays(), live)


def test_a_policy_file_of_other_features_is_no_start(build: Callable[..., Member]) -> None:
    member = build()
    save(
        member.settings.policy_file,
        shifted(initial_arrays(), 0.5),
        {"version": "old", "features_version": "0"},
    )
    member.reopen()
    assert member.learner.live.version == ""
    assert same(member.learner.arrays(), initial_arrays())


def test_nothing_goes_live_unjudged(build: Callable[..., Member]) -> None:
    member = build(gate_rounds=1)  # no nodes are known
    member.waits(1, 8)
    assert member.learner.round()
    assert not member.settings.policy_file.exists()


def test_only_what_passed_the_gate_leaves_the_member(build: Callable[..., Member]) -> None:
    member = build(gate_rounds=2, options={"learning_rate": 1e-4})
    nodes_file.write(member.settings.nodes_file, NODES)
    member.write(*life_of_pods(40))
    member.waits(1, 8)
    assert member.learner.round()
    local = member.learner.handover.local()
    assert local.candidate is not None
    assert same(local.candidate, member.learner.arrays())
    assert not same(local.candidate, initial_arrays())
    assert same(local.arrays, initial_arrays())  # not judged yet
    member.waits(9, 8)
    assert member.learner.round()
    live = member.learner.live.arrays()
    assert live is not None
    assert same(member.learner.handover.local().arrays, live)


def test_without_a_judged_policy_a_member_has_no_opinion_on_the_shared_one(
    build: Callable[..., Member],
) -> None:
    member = build()
    shared = shifted(initial_arrays(), 0.25)
    assert offer(member, SharedPolicy("global", shared, 1, 0.5))
    assert same(member.learner.handover.local().arrays, shared)


def test_a_withdrawn_policy_leaves_the_member_without_an_opinion(
    build: Callable[..., Member],
) -> None:
    member = build()
    shared = shifted(initial_arrays(), 0.25)
    assert offer(member, SharedPolicy("global", shared, 1, 0.5))
    member.learner.live = promoted(member.learner.live, initial_arrays(), 1)  # the rule again
    member.waits(1, 8)
    assert member.learner.round()
    assert same(member.learner.handover.local().arrays, shared)


def test_rollouts_teach_a_quiet_cluster(build: Callable[..., Member]) -> None:
    member = build(rollouts=2, rollout_decisions=64, idle_seconds=5.0)
    nodes_file.write(member.settings.nodes_file, NODES)
    member.write(*life_of_pods(40))
    assert not member.learner.round()
    member.now = 6.0
    assert member.learner.round()
    assert member.learner.learning_rounds == 1
    assert not same(member.learner.arrays(), initial_arrays())
    assert member.store.fates()["learned"] == 0


def test_labels_teach_a_quiet_cluster(build: Callable[..., Member]) -> None:
    member = build(labels=200, gate_jobs=100, idle_seconds=5.0)
    nodes_file.write(member.settings.nodes_file, NODES)
    member.write(*life_of_pods(40))
    member.learner.round()
    for _ in range(5):  # until there are enough for a minibatch
        member.now += 6.0
        member.learner.round()
    status = json.loads((member.settings.state / "learn-status.json").read_text())
    assert status["metrics"]["labels"] >= 256
    assert status["metrics"]["distillation_loss"] > 0.0
    assert not same(member.learner.arrays(), initial_arrays())


def test_speeds_reach_the_decision_path(build: Callable[..., Member]) -> None:
    member = build()
    nodes_file.write(member.settings.nodes_file, NODES)
    member.write(*life_of_pods(40))
    member.learner.round()
    speeds = speeds_file.read(member.settings.speeds_file)
    assert speeds.gpu_models == ["k80", "p100", "v100"]
    assert len(speeds.kinds) > 10
    assert np.mean([kind.slowdown[0] for kind in speeds.kinds]) > 0.8


# ---- the hub's policies ----


def offer(member: Member, policy: SharedPolicy) -> bool:
    """Offer a policy as the link's thread does while the learner does one round."""
    answers: list[bool] = []
    link = threading.Thread(target=lambda: answers.append(member.learner.handover.adopt(policy)))
    link.start()
    assert member.learner.handover.offered.wait(60.0)
    member.learner.round()
    link.join()
    (answer,) = answers
    return answer


def shifted(arrays: Arrays, by: float) -> Arrays:
    return apply(arrays, like(arrays, by))


def test_a_fresh_learner_starts_from_the_shared_policy(build: Callable[..., Member]) -> None:
    member = build()
    shared = shifted(initial_arrays(), 0.25)
    assert offer(member, SharedPolicy("global", shared, 1, 0.5))
    assert same(member.learner.arrays(), shared)
    assert member.learner.algorithm.proximal.mu == 0.5
    member.reopen()  # the answer meant that it is on disk
    assert same(member.learner.arrays(), shared)
    assert member.learner.algorithm.proximal.mu == 0.5


def test_later_shared_policies_are_anchors_only(build: Callable[..., Member]) -> None:
    member = build()
    member.waits(1, 8)
    member.learner.round()
    own = member.learner.arrays()
    assert offer(member, SharedPolicy("global", shifted(own, 1.0), 2, 0.1))
    assert same(member.learner.arrays(), own)


def test_a_personalised_policy_keeps_what_was_learned_since_the_upload(
    build: Callable[..., Member],
) -> None:
    member = build()
    at_upload = member.learner.arrays()
    member.waits(1, 8)
    member.learner.round()
    learned = member.learner.arrays()
    pushed = shifted(at_upload, 0.5)
    assert offer(member, SharedPolicy("personalised", pushed, 1, 0.0, at_upload=at_upload))
    got = member.learner.arrays()
    for name, array in got.items():
        expected = pushed[name] + (learned[name] - at_upload[name])
        assert array == pytest.approx(expected, abs=1e-6)


def test_a_policy_that_does_not_fit_is_kept_out(build: Callable[..., Member]) -> None:
    member = build()
    own = member.learner.arrays()
    broken = {**own, "correction.bias": np.array([np.nan], np.float32)}
    assert not offer(member, SharedPolicy("personalised", broken, 1, 0.0))
    assert same(member.learner.arrays(), own)


def test_offers_to_a_stopping_learner_are_refused(build: Callable[..., Member]) -> None:
    member = build()
    member.learner.handover.close()
    assert not member.learner.handover.adopt(SharedPolicy("global", initial_arrays(), 1, 0.0))


def test_peers_speeds_survive_a_restart(build: Callable[..., Member]) -> None:
    member = build()
    told = Peers(4, {7: SpeedRow(3.0, 1.5, 0.75)}, {8: SpeedRow(1.0, 0.5, 0.25)})
    member.learner.handover.adopt_speeds(told)
    member.learner.round()
    member.reopen()
    assert member.learner.speeds.peers == told
    assert 7 not in member.learner.handover.local().speeds  # its own observations alone


def test_the_owner_deletes_what_it_has_consumed(build: Callable[..., Member]) -> None:
    member = build(keep_segments=1)
    for first in (1, 9, 17):
        member.waits(first, 8)
        member.journal.close()
        member.journal = Journal(member.journal.folder)
    member.waits(25, 1)  # whoever reads the fourth segment is done with the third
    member.learner.round()
    assert [number for number, _ in segments(member.journal.folder)] == [3, 4]


def test_an_unknown_option_is_named(build: Callable[..., Member]) -> None:
    with pytest.raises(ValueError, match=r"no option 'clipp'.*gae_lambda"):
        build(options={"clipp": 0.1})
