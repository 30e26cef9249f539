"""The member's end: when it uploads, what it remembers, how it comes back."""

import numpy as np
import pytest

from agent.uploads import FILE, UploadPolicy, UploadState, read_state, write_state
from common.weights import load
from tests.federation.support import DummyLearner, RawMember, member, net, until, update

NEVER = {"learning_rounds": 10**9, "seconds": 1e9, "drift": float("inf")}


@pytest.mark.parametrize(
    ("learned", "seconds", "drift", "due"),
    [
        (49, 3599.0, 0.24, False),
        (50, 0.0, 0.0, True),
        (0, 3600.0, 0.0, True),
        (0, 0.0, 0.25, True),
    ],
    ids=["none reached", "learning rounds", "an hour", "drift"],
)
def test_upload_is_due_when_one_of_three_limits_is_reached(learned, seconds, drift, due):
    assert UploadPolicy().due(learned, seconds, drift) is due


def test_upload_after_an_hour_without_learning(make_hub, closing, tmp_path):
    hub = make_hub(max_rounds=1)
    hour = [0.0]
    learner = DummyLearner()
    options = {"policy": UploadPolicy(**NEVER | {"seconds": 3600.0}), "clock": lambda: hour[0]}
    closing(member(hub.bundle("alpha"), learner, tmp_path / "alpha", **options)).start()
    until(lambda: learner.anchor is not None, "the learner was asked")
    hour[0] = 3599.0
    assert not (tmp_path / "alpha" / FILE).exists()
    hour[0] = 3600.0
    hub.wait_round(1)
    assert hub.registry.updates()[0].accepted


def test_upload_as_soon_as_the_policy_drifts(make_hub, closing, tmp_path):
    hub = make_hub(max_rounds=1, initial=net(1.0))
    learner = DummyLearner(target=1.5)
    learner.arrays = net(1.0)
    options = {"policy": UploadPolicy(**NEVER | {"drift": 0.5})}
    closing(member(hub.bundle("alpha"), learner, tmp_path / "alpha", **options)).start()
    until(lambda: learner.anchor is not None, "the learner was asked")
    learner.step()  # half the norm of the shared policy away from it
    hub.wait_round(1)
    np.testing.assert_allclose(hub.policy["layer.bias"], [1.5, 1.5], rtol=1e-6)


def test_member_that_restarts_after_its_upload_takes_the_push_and_keeps_its_progress(
    make_hub, closing, tmp_path
):
    hub = make_hub(min_members=2, max_rounds=1)
    learner = DummyLearner(pods=10, target=1.0)
    bundle, state = hub.bundle("alpha"), tmp_path / "alpha"
    first = closing(member(bundle, learner, state))
    first.start()
    raw = closing(RawMember(hub.bundle("beta")))
    train = raw.train()
    until(lambda: learner.anchor is not None, "the learner was asked")
    learner.step(pods=5)
    until(lambda: hub.registry.metric_names("alpha"), "its upload arrived")
    first.stop()
    learner.target = 1.5
    learner.step()
    closing(member(bundle, learner, state, software_version="0.1")).start()
    until(lambda: hub.registry.members()[0].software_version == "0.1", "it is back")
    raw.send(update=update(train, change=0.0, pods=15))
    hub.wait_round(1)
    until(lambda: read_state(state, 0).accepted_pods == 15, "the count is acknowledged")
    (mine,) = hub.registry.updates(member="alpha")
    assert (mine.accepted, mine.num_examples) == (True, 15)
    # Global 0.5, personal 0.25 * 1 + 0.75 * 0.5 = 0.625, plus 0.5 learned since the upload.
    np.testing.assert_allclose(learner.local().arrays["layer.bias"], [1.125, 1.125], rtol=1e-5)


def test_upload_that_was_lost_is_repeated_when_the_hub_asks_again(make_hub, closing, tmp_path):
    hub = make_hub(max_rounds=1)
    state = UploadState(accepted_pods=0, learning_rounds=1, round=1)
    write_state(tmp_path / "alpha", state)  # it uploaded in round 1, and nothing arrived
    learner = DummyLearner(pods=10)
    learner.rounds = 1
    closing(member(hub.bundle("alpha"), learner, tmp_path / "alpha")).start()
    hub.wait_round(1)
    (mine,) = hub.registry.updates()
    assert (mine.accepted, mine.num_examples) == (True, 10)


def test_residual_is_kept_only_when_the_push_was_adopted():
    state = UploadState(residual=net(9.0), upload=net(1.0), pending=net(0.5), round=3)
    state.settle(accepted_pods=12, adopted=True)
    assert (state.accepted_pods, state.round, state.upload, state.pending) == (12, 0, None, None)
    np.testing.assert_array_equal(state.residual["layer.bias"], [0.5, 0.5])
    # A learner that keeps its own policy still holds what quantising lost.
    state.pending, state.round = net(0.25), 4
    state.settle(accepted_pods=13, adopted=False)
    assert state.residual is None


def test_state_comes_back_from_its_file(tmp_path):
    state = UploadState(
        counter=2**64 - 1,
        baseline=3,
        accepted_pods=4,
        learning_rounds=5,
        round=6,
        residual=net(1.0),
        upload=net(2.0),
    )
    write_state(tmp_path, state)
    back = read_state(tmp_path, 0)
    for name in ("counter", "baseline", "accepted_pods", "learning_rounds", "round", "pending"):
        assert getattr(back, name) == getattr(state, name)
    np.testing.assert_array_equal(back.upload["layer.weight"], net(2.0)["layer.weight"])
    assert load(tmp_path / FILE)[1]["counter"] == "f" * 16


def test_broken_state_counts_no_pod_twice(tmp_path):
    (tmp_path / FILE).write_bytes(b"torn")
    state = read_state(tmp_path, scheduled_pods=40)
    assert state.count(42) == 2


def test_learner_that_lost_its_count_begins_a_new_one():
    state = UploadState(counter=1, accepted_pods=100)
    assert state.count(120) == 120
    assert state.counter == 1
    assert state.count(7) == 7
    assert state.counter != 1


def test_refused_member_learns_the_reason_and_keeps_trying(make_hub, closing, tmp_path):
    hub = make_hub()
    bundle = hub.bundle("alpha")
    hub.registry.revoke("alpha")
    learner = DummyLearner()
    end = closing(member(bundle, learner, tmp_path / "alpha"))
    end.start()
    until(lambda: "revoked" in end.last_error, "the reason arrived")
    assert not end.connected
    hub.bundle("alpha")  # a new certificate: the old one stays out
    until(lambda: "replaced" in end.last_error, "it tried again")


def test_policy_of_another_form_is_refused_by_the_member(make_hub, closing, tmp_path):
    hub = make_hub(max_rounds=1)
    learner = DummyLearner()
    learner.arrays = {"layer.weight": np.zeros((9, 9), np.float32)}
    closing(member(hub.bundle("alpha"), learner, tmp_path / "alpha")).start()
    hub.wait_round(1)
    assert hub.registry.updates()[0].reason == "no usable answer: INCOMPATIBLE"
    assert learner.anchor is None


def test_exception_in_the_learner_is_answered_and_the_link_stays(make_hub, closing, tmp_path):
    hub = make_hub(max_rounds=2)

    class Fragile(DummyLearner):
        def adopt(self, policy):
            if policy.round == 1:
                raise RuntimeError("out of memory")
            return super().adopt(policy)

    learner = Fragile()
    end = closing(member(hub.bundle("alpha"), learner, tmp_path / "alpha"))
    end.start()
    until(lambda: ("global", 2) in learner.kinds, "the second round began")
    assert hub.registry.updates()[0].reason == "no usable answer: INTERNAL"
    learner.step()
    hub.wait_round(2)
    assert hub.registry.updates()[0].accepted


def test_policy_that_the_learner_keeps_out_is_not_installed(make_hub, closing, tmp_path):
    hub = make_hub(max_rounds=1, eta=0.0)
    learner = DummyLearner(target=1.0)
    learner.accept = False
    closing(member(hub.bundle("alpha"), learner, tmp_path / "alpha")).start()
    until(lambda: learner.anchor is not None, "the learner was asked")
    learner.step()
    until(lambda: read_state(tmp_path / "alpha", 0).accepted_pods == 11, "the upload is settled")
    np.testing.assert_array_equal(learner.local().arrays["layer.bias"], [1.0, 1.0])
    assert read_state(tmp_path / "alpha", 0).residual is None


def test_a_replica_that_does_not_lead_has_no_link(make_hub, closing, tmp_path):
    hub = make_hub(max_rounds=1)
    leads, looks = [False], [0]

    def active():
        looks[0] += 1
        return leads[0]

    learner = DummyLearner()
    link = closing(member(hub.bundle("alpha"), learner, tmp_path / "alpha", active=active))
    link.start()
    until(lambda: looks[0] > 5, "it was asked several times")
    assert not link.connected
    assert learner.anchor is None
    leads[0] = True
    until(lambda: learner.anchor is not None, "it takes part")
    leads[0] = False
    until(lambda: link.last_error == "another replica leads", "it has left")
    learner.step(pods=5)
    seen = looks[0]
    until(lambda: looks[0] > seen + 10, "it was asked again")
    assert not link.connected
    assert hub.registry.updates() == []
    leads[0] = True
    hub.wait_round(1)
