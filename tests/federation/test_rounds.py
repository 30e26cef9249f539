"""A federation over real mutual TLS on loopback: rounds, personalisation, counting, resuming."""

import threading

import numpy as np
import pytest

from common.speeds import Peers, SpeedRow
from common.weights import load, version_id
from tests.federation.support import WAIT, DummyLearner, RawMember, member, net, until, update


def test_global_policy_is_the_mean_weighted_by_scheduled_pods(make_hub, closing):
    hub = make_hub(min_members=2, max_rounds=1)
    first, second = (closing(RawMember(hub.bundle(n))) for n in ("alpha", "beta"))
    first.send(update=update(first.train(), change=1.0, pods=30))
    second.send(update=update(second.train(), change=-1.0, pods=10))
    hub.wait_round(1)
    # (30 * 1 + 10 * -1) / 40 = 0.5
    np.testing.assert_allclose(hub.policy["layer.weight"], np.full((2, 3), 0.5), rtol=1e-6)
    # 0.25 * own + 0.75 * 0.5
    for raw, expected in ((first, 0.625), (second, 0.125)):
        message = raw.personalize()
        values = np.frombuffer(message.arrays[0].values, "<f4")
        np.testing.assert_allclose(values, expected, rtol=1e-6)
        assert message.eta == 0.25


def test_second_round_starts_from_the_global_policy_of_the_first(make_hub, closing):
    hub = make_hub()
    raw = closing(RawMember(hub.bundle("alpha")))
    raw.send(update=update(raw.train(), change=1.0, pods=5))
    raw.personalize()
    train = raw.train()
    assert train.round == 2
    np.testing.assert_array_equal(np.frombuffer(train.arrays[1].values, "<f4"), np.full(6, 1.0))
    assert train.version == version_id(net(1.0))


def test_proximal_weight_reaches_the_learner(make_hub, closing, tmp_path):
    hub = make_hub(strategy="fedprox", proximal_mu=0.125)
    learner = DummyLearner()
    closing(member(hub.bundle("alpha"), learner, tmp_path / "alpha")).start()
    until(lambda: learner.anchor is not None, "the learner has its anchor")
    assert learner.mu == 0.125
    np.testing.assert_array_equal(learner.anchor["layer.bias"], np.zeros(2))


def test_member_uploads_when_due_and_keeps_what_it_learned_since(make_hub, closing, tmp_path):
    hub = make_hub(min_members=2)
    learner = DummyLearner(target=1.0)
    closing(member(hub.bundle("alpha"), learner, tmp_path / "alpha")).start()
    raw = closing(RawMember(hub.bundle("beta")))
    train = raw.train()
    until(lambda: learner.anchor is not None, "the learner was asked")
    learner.step()
    path = tmp_path / "alpha" / "federation.safetensors"
    until(path.exists, "the upload was made")
    learner.target = 1.5
    learner.step()  # learned while the other member is still busy
    raw.send(update=update(train, change=0.0, pods=11))
    hub.wait_round(1)
    until(lambda: ("personalised", 1) in learner.kinds, "the push arrived")
    # Global 0.5 (11 pods each); personal 0.25 * 1 + 0.75 * 0.5 = 0.625; plus 0.5 learned since.
    np.testing.assert_allclose(learner.local().arrays["layer.bias"], [1.125, 1.125], rtol=1e-5)


def test_scheduled_pods_are_counted_once_when_an_answer_is_repeated(make_hub, closing):
    hub = make_hub()
    raw = closing(RawMember(hub.bundle("alpha")))
    raw.send(update=update(raw.train(), pods=10))
    raw.personalize()
    raw.send(update=update(raw.train(), pods=10))  # the same ten again
    train = raw.train()
    raw.send(update=update(train, pods=25))
    raw.personalize()
    latest = hub.registry.updates()
    assert [(u.accepted, u.num_examples) for u in latest] == [(True, 15), (False, 0), (True, 10)]
    assert "at least 1" in latest[1].reason


def test_member_that_lost_its_state_begins_a_new_count(make_hub, closing):
    hub = make_hub()
    raw = closing(RawMember(hub.bundle("alpha")))
    raw.send(update=update(raw.train(), pods=100))
    raw.personalize()
    raw.send(update=update(raw.train(), pods=7, counter=99))
    raw.personalize()
    assert hub.registry.updates()[0].num_examples == 7


def test_member_that_joins_during_a_round_takes_part_in_it(make_hub, closing):
    hub = make_hub()
    first = closing(RawMember(hub.bundle("alpha")))
    train = first.train()
    second = closing(RawMember(hub.bundle("beta")))
    late = second.train()
    assert late.round == train.round == 1
    first.send(update=update(train))
    second.send(update=update(late))
    hub.wait_round(1)
    assert hub.registry.rounds()[-1].accepted == 2


def test_member_that_comes_back_during_a_round_is_asked_again(make_hub, closing):
    hub = make_hub(max_rounds=1)
    bundle, other = hub.bundle("alpha"), closing(RawMember(hub.bundle("beta")))
    waiting = other.train()
    first = closing(RawMember(bundle))
    assert first.train().round == 1
    first.close()
    second = closing(RawMember(bundle))
    second.send(update=update(second.train()))
    other.send(update=update(waiting))
    hub.wait_round(1)
    assert sorted(u.member for u in hub.registry.updates() if u.accepted) == ["alpha", "beta"]


def test_newest_session_of_a_member_wins(make_hub, closing):
    hub = make_hub()
    bundle = hub.bundle("alpha")
    old = closing(RawMember(bundle))
    old.train()
    new = closing(RawMember(bundle))
    new.send(update=update(new.train()))
    assert old.ended.wait(WAIT)
    hub.wait_round(1)
    assert hub.registry.members()[0].state == "connected"


def test_member_that_is_back_at_once_is_not_shown_as_gone(make_hub, closing, monkeypatch):
    hub = make_hub()
    bundle, registry = hub.bundle("alpha"), hub.registry
    first = closing(RawMember(bundle))
    first.train()
    busy, free, left = threading.Event(), threading.Event(), []
    count, note = registry.traffic, registry.disconnected

    def slowly(counts):
        busy.set()
        assert free.wait(WAIT)
        count(counts)

    monkeypatch.setattr(registry, "traffic", slowly)
    monkeypatch.setattr(registry, "disconnected", lambda name: left.append(note(name)))
    first.close()
    until(busy.is_set, "its bytes are being counted")
    second = closing(RawMember(bundle))
    second.train()
    free.set()
    until(lambda: left, "its end was recorded")
    assert registry.members()[0].state == "connected"


def answer_before_the_end(hub, raw, time):
    """Beta answers the first round, and then its time is up."""
    raw.send(update=update(raw.train(), change=1.0, metrics={"reward": 1.0}))
    until(lambda: hub.registry.metric_names("beta"), "the answer is there")
    assert not hub.finished(1)
    time[0] += hub.settings.round_timeout
    hub.wait_round(1)


def test_round_closes_without_a_member_that_never_answers(make_hub, closing):
    time = [0.0]
    hub = make_hub(min_members=2, round_timeout=60.0, max_rounds=1, clock=lambda: time[0])
    silent, good = (closing(RawMember(hub.bundle(n))) for n in ("alpha", "beta"))
    silent.train()
    answer_before_the_end(hub, good, time)
    np.testing.assert_allclose(hub.policy["layer.bias"], [1.0, 1.0])


def test_late_reply_to_a_closed_round_is_ignored(make_hub, closing):
    time = [0.0]
    hub = make_hub(min_members=2, round_timeout=60.0, clock=lambda: time[0])
    slow, good = (closing(RawMember(hub.bundle(n))) for n in ("alpha", "beta"))
    old = slow.train()
    answer_before_the_end(hub, good, time)
    new = slow.train()
    slow.send(update=update(old, change=50.0))
    slow.send(update=update(new, change=1.0))
    good.send(update=update(good.train(), change=1.0, pods=20))
    hub.wait_round(2)
    # Both moved by 1 from the policy of round 1, which was 1.
    np.testing.assert_allclose(hub.policy["layer.bias"], [2.0, 2.0])


def test_round_without_new_pods_completes_and_keeps_the_policy(make_hub, closing, tmp_path):
    hub = make_hub(max_rounds=1)
    learner = DummyLearner(pods=0)
    closing(member(hub.bundle("alpha"), learner, tmp_path / "alpha")).start()
    until(lambda: learner.anchor is not None, "the learner was asked")
    learner.step(pods=0)
    hub.wait_round(1)
    np.testing.assert_array_equal(hub.policy["layer.bias"], np.zeros(2))
    assert hub.registry.updates() == []


def test_failing_learner_ends_neither_the_link_nor_the_round(make_hub, closing, tmp_path):
    hub = make_hub(max_rounds=1)
    learner = DummyLearner()
    learner.arrays["layer.bias"][0] = np.nan
    closing(member(hub.bundle("alpha"), learner, tmp_path / "alpha")).start()
    hub.wait_round(1)
    assert hub.registry.updates()[0].reason == "no usable answer: NOT_FINITE"


def test_speed_tables_are_summed_over_the_others_and_survive_a_resend(make_hub, closing):
    hub = make_hub(min_members=2)
    first, second = (closing(RawMember(hub.bundle(n))) for n in ("alpha", "beta"))
    row = {"key": 3, "n": 2.0, "sum_x": 1.0, "sum_x2": 0.75}
    for pods in (10, 20):
        first.send(update=update(first.train(), pods=pods, speeds=[row]))
        second.send(update=update(second.train(), pods=pods))
        told = second.personalize()
        assert told.speeds.members == 1
        (got,) = told.speeds.rows
        assert (got.key, got.n, got.sum_x, got.sum_x2) == (3, 2.0, 1.0, 0.75)
        assert list(first.personalize().speeds.rows) == []


def test_newcomer_is_told_the_speeds_of_the_others_before_its_first_upload(
    make_hub, closing, tmp_path
):
    hub = make_hub()
    table = {1: SpeedRow(3.0, 6.0, 12.5)}
    old = DummyLearner(speeds=table)
    closing(member(hub.bundle("alpha"), old, tmp_path / "alpha")).start()
    until(lambda: old.anchor is not None, "the first member was asked")
    old.step()
    hub.wait_round(1)
    newcomer = DummyLearner()
    closing(member(hub.bundle("beta"), newcomer, tmp_path / "beta")).start()
    until(lambda: newcomer.anchor is not None, "the newcomer was asked")
    assert newcomer.peers == Peers(1, table, {})


def test_learning_curves_hold_declared_finite_metrics_only(make_hub, closing, tmp_path):
    hub = make_hub()
    learner = DummyLearner()
    learner.metrics = {"reward": 2.0, "loss": float("nan"), "pod_web_7f9": 1.0}
    closing(member(hub.bundle("alpha"), learner, tmp_path / "a", status_seconds=0.0)).start()
    until(lambda: hub.registry.metrics("alpha", "reward"), "a point was recorded")
    raw = closing(RawMember(hub.bundle("beta")))
    raw.train()
    raw.send(status={"metrics": {"node-17": 1.0, "entropy": 0.5}})
    until(lambda: hub.registry.metrics("beta", "entropy"), "the other's point was recorded")
    assert hub.registry.metric_names("alpha") == ["reward"]
    assert hub.registry.metric_names("beta") == ["entropy"]
    assert [e.kind for e in hub.registry.events()] == ["metric"]
    assert "node-17" not in hub.registry.events()[0].text


def test_restarted_hub_goes_on_at_the_next_round_with_the_last_policy(make_hub, closing):
    hub = make_hub()
    raw = closing(RawMember(hub.bundle("alpha")))
    raw.send(update=update(raw.train(), change=1.0))
    raw.personalize()
    assert raw.train().round == 2
    hub.coordinator.stop()
    hub.start()
    np.testing.assert_array_equal(hub.policy["layer.bias"], [1.0, 1.0])
    saved = hub.registry.checkpoint()
    arrays, metadata = load(hub.settings.policy_dir / saved.policy_file)
    assert version_id(arrays) == saved.version == metadata["version"]
    again = closing(RawMember(hub.bundle("alpha")))
    assert again.train().round == 3  # 2 was interrupted
    assert [r.state for r in hub.registry.rounds()] == ["open", "interrupted", "finished"]


def crash(*_arguments, **_options):
    raise RuntimeError("killed here")


@pytest.mark.parametrize(
    ("point", "counted"), [("accepted_norms", False), ("finish_round", False), ("", True)]
)
def test_crash_inside_a_round_leaves_the_last_checkpoint_whole(
    make_hub, closing, monkeypatch, point, counted
):
    """Before the aggregate, between the policy's file and the commit, and after the commit."""
    hub = make_hub()
    raw = closing(RawMember(hub.bundle("alpha")))
    raw.send(update=update(raw.train(), change=1.0, pods=10))
    second = raw.train()
    loop = hub.coordinator.rounds
    if counted:
        monkeypatch.setattr(loop, "_personalise", crash)
    else:
        monkeypatch.setattr(hub.registry, point, crash)
    raw.send(update=update(second, change=1.0, pods=15))
    assert hub.coordinator.ended.wait(WAIT)
    assert str(hub.coordinator.failure) == "killed here"
    hub.coordinator.stop()
    monkeypatch.undo()
    hub.start()
    # The second round took effect, pods and policy, or neither did.
    expected, pods = ([2.0, 2.0], 15) if counted else ([1.0, 1.0], 10)
    np.testing.assert_array_equal(hub.policy["layer.bias"], expected)
    assert hub.registry.pod_counter("alpha") == (5, pods)
    again = closing(RawMember(hub.bundle("alpha")))
    train = again.train()
    assert train.round == 3
    again.send(update=update(train, change=1.0, pods=20))
    hub.wait_round(3)
    assert sum(u.num_examples for u in hub.registry.updates() if u.accepted) == 20


def test_members_with_nothing_to_say_do_not_keep_the_hub_spinning(make_hub, closing, tmp_path):
    hub = make_hub()
    learner = DummyLearner(pods=0)
    closing(member(hub.bundle("alpha"), learner, tmp_path / "alpha")).start()
    until(lambda: learner.anchor is not None, "the learner was asked")
    learner.step(pods=0)
    until(lambda: ("global", 2) in learner.kinds, "the next round began")
    learner.step(pods=0)
    until(lambda: ("global", 3) in learner.kinds, "the next round began")
    assert not hub.finished(3)  # nothing is due again until it learns again


@pytest.mark.parametrize("keep", [1.0, 0.5])
def test_members_agree_on_a_policy_over_many_rounds(make_hub, closing, tmp_path, keep):
    hub = make_hub(min_members=2, max_rounds=12, eta=0.0)
    learners = {"alpha": DummyLearner(target=1.0), "beta": DummyLearner(target=3.0)}
    for name, learner in learners.items():
        closing(member(hub.bundle(name), learner, tmp_path / name, keep=keep)).start()
    for number in range(1, 13):
        until(
            lambda n=number: all(("global", n) in x.kinds for x in learners.values()),
            f"round {number} began",
        )
        for learner in learners.values():
            learner.step(pods=5)
        hub.wait_round(number)
    assert np.abs(hub.policy["layer.weight"] - 2.0).max() < (0.05 if keep == 1.0 else 1.0)
