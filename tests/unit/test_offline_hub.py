"""The hub with its members in one process: the round is the real one, and so are its refusals."""

import math

import numpy as np
import pytest

from common import link_pb2 as pb
from common.codec import decode_arrays, decode_peers, encode_delta, encode_speeds
from common.speeds import NOBODY, Peers, SpeedRow
from common.weights import interpolate, quantise
from coordinator.offline import OfflineHub

START = {"a": np.zeros((2, 2), np.float32), "b": np.ones(3, np.float32)}


class Member:
    """Adds a constant to every weight, and keeps what it is sent."""

    def __init__(self, step, pods=1, speeds=None, broken=False):
        self.step, self.pods, self.speeds, self.broken = step, pods, speeds or {}, broken
        self.policy, self.peers, self.rounds = None, NOBODY, 0

    def __call__(self, message):
        if message.WhichOneof("kind") == "personalize":
            self.policy = decode_arrays(message.personalize.arrays)
            return pb.MemberMessage(
                adopted=pb.Adopted(reply_to=message.personalize.id, adopted=True)
            )
        train = message.train
        self.rounds += 1
        self.peers = decode_peers(train.speeds)
        change = {n: np.full_like(a, self.step) for n, a in decode_arrays(train.arrays).items()}
        tensors = encode_delta(quantise(change)[0])
        if self.broken:
            tensors[0].scale = math.nan
        return pb.MemberMessage(
            update=pb.Update(
                reply_to=train.id, base_round=train.round, base_version=train.version,
                tensors=tensors, scheduled_pods=self.pods * self.rounds, counter=1,
                speeds=encode_speeds(self.speeds),
            )
        )  # fmt: skip


def hub_of(folder, members, **settings):
    return OfflineHub(folder, START, members, {"strategy": "fedavg", "eta": 0.0, **settings})


def shifted(by):
    return {name: array + np.float32(by) for name, array in START.items()}


def same(left, right):
    for name in START:
        np.testing.assert_allclose(left[name], right[name], atol=1e-5)


def test_members_count_by_the_pods_that_they_scheduled(tmp_path):
    members = {"x": Member(1.0, pods=1), "y": Member(-1.0, pods=3)}
    hub = hub_of(tmp_path, members)
    assert hub.round() == {}
    same(hub.policy, shifted(-0.5))
    hub.round()  # counters are absolute: each round counts what is new
    same(hub.policy, shifted(-1.0))
    hub.close()


def test_each_member_gets_its_share_of_its_own_policy(tmp_path):
    members = {"x": Member(1.0), "y": Member(-1.0)}
    hub = hub_of(tmp_path, members, eta=0.25)
    hub.round()
    same(hub.policy, START)
    same(members["x"].policy, interpolate(shifted(1.0), START, 0.25))
    same(members["y"].policy, interpolate(shifted(-1.0), START, 0.25))
    hub.close()


def test_update_that_is_no_number_is_set_aside_and_the_round_completes(tmp_path):
    hub = hub_of(tmp_path, {"x": Member(1.0), "bad": Member(5.0, broken=True)})
    refused = hub.round()
    assert list(refused) == ["bad"]
    assert "finite" in refused["bad"]
    same(hub.policy, shifted(1.0))
    assert hub.round().keys() == {"bad"}
    hub.close()


@pytest.mark.parametrize(("strategy", "moved"), [("fedmedian", 1.0), ("fedavg", -1.3)])
def test_a_mean_by_pods_follows_who_claims_the_most_and_a_median_does_not(
    tmp_path, strategy, moved
):
    members = {name: Member(1.0) for name in "abcd"} | {"liar": Member(-1.3, pods=999_999)}
    hub = hub_of(tmp_path, members, strategy=strategy)
    assert hub.round() == {}
    np.testing.assert_allclose(hub.policy["b"], shifted(moved)["b"], atol=1e-4)
    hub.close()


def test_members_hear_of_each_others_speeds_from_the_second_round_on(tmp_path):
    told = {7: SpeedRow(2.0, 2.0, 2.5)}
    members = {"x": Member(0.0, speeds=told), "y": Member(0.0)}
    hub = hub_of(tmp_path, members)
    hub.round()
    hub.round()
    assert members["y"].peers == Peers(1, told, {})
    assert members["x"].peers == NOBODY
    hub.close()


def test_the_environment_has_no_say(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSCHED_COORDINATOR_STRATEGY", "krum")
    monkeypatch.setenv("FEDSCHED_COORDINATOR_ETA", "0.9")
    hub = OfflineHub(tmp_path, START, {"x": Member(1.0)})
    assert hub.settings.strategy != "krum"
    assert hub.settings.eta != 0.9
    hub.close()


def test_unknown_setting_is_refused(tmp_path):
    with pytest.raises(ValueError, match="stratgy"):
        hub_of(tmp_path, {"x": Member(1.0)}, stratgy="fedavg")
