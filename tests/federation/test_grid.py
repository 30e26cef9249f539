"""The grid keeps Flower's contract, and Flower keeps the parts of its own that it rests on."""

import os
import subprocess
import sys

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp import strategy as flower

from common import link_pb2 as pb
from coordinator import link
from coordinator.settings import CoordinatorSettings
from coordinator.strategy import AggregateError, aggregate, make_strategy
from tests.federation.support import RawMember, net, until, update


def reply(member, value, pods):
    """A validated reply of ``member``, as the round loop hands it to a strategy."""
    question = Message(RecordDict(), link.node_id_of(member), link.TRAIN)
    answer = Message(RecordDict(), reply_to=question)
    return link.trained(answer, net(value), pods)


def test_message_needs_the_private_task_identity_that_the_link_sets():
    from flwr.supercore.task_identity import TaskIdentity

    assert TaskIdentity.run_id == TaskIdentity.node_id == TaskIdentity.task_id == 1
    message = Message(RecordDict(), 5, "train")
    assert (message.metadata.dst_node_id, message.metadata.message_type) == (5, "train")
    assert Message(RecordDict(), reply_to=message).metadata.src_node_id == 5


def test_grid_is_complete_and_flower_does_not_phone_home():
    assert issubclass(link.LinkGrid, Grid)
    assert link.LinkGrid.__abstractmethods__ == frozenset()
    assert os.environ["FLWR_TELEMETRY_ENABLED"] == "0"
    assert os.environ["FLWR_DISABLE_UPDATE_CHECK"] == "1"


def test_hub_needs_neither_torch_nor_kubernetes():
    code = (
        "import sys, coordinator.server, coordinator.cli; "
        "print([m for m in ('torch', 'kubernetes') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_member_needs_neither_flower_nor_torch():
    code = (
        "import sys, agent.federation; "
        "print([m for m in ('flwr', 'torch', 'coordinator') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_node_ids_are_stable_and_differ():
    assert link.node_id_of("alpha") == link.node_id_of("alpha") < 2**63
    assert link.node_id_of("alpha") != link.node_id_of("beta")


def test_arrays_survive_flowers_records():
    record = link.to_record(net(0.5))
    assert list(record) == ["layer.bias", "layer.weight"]
    np.testing.assert_array_equal(
        link.from_record(record)["layer.weight"], net(0.5)["layer.weight"]
    )


@pytest.mark.parametrize("name", ["fedavg", "fedprox"])
def test_stock_strategies_weigh_by_scheduled_pods(name):
    strategy = make_strategy(CoordinatorSettings(strategy=name))
    replies = [reply("alpha", 1.0, 30), reply("beta", -1.0, 10)]
    np.testing.assert_allclose(aggregate(strategy, 1, replies, net())["layer.bias"], [0.5, 0.5])


@pytest.mark.parametrize("name", ["fedmedian", "fedtrimmedavg", "krum", "multikrum"])
def test_robust_strategies_withstand_one_liar_among_five(name):
    settings = CoordinatorSettings(strategy=name, malicious_members=1, selected_members=3)
    values = {"a": 0.9, "b": 1.0, "c": 1.0, "d": 1.1, "e": 1000.0}
    replies = [reply(member, value, 10) for member, value in values.items()]
    policy = aggregate(make_strategy(settings), 1, replies, net())
    np.testing.assert_allclose(policy["layer.weight"], np.full((2, 3), 1.0), atol=0.11)


@pytest.mark.parametrize("name", ["fedmedian", "fedtrimmedavg", "krum", "multikrum"])
def test_robust_strategies_work_with_a_single_member(name):
    strategy = make_strategy(CoordinatorSettings(strategy=name))
    policy = aggregate(strategy, 1, [reply("a", 2.0, 1)], net())
    np.testing.assert_allclose(policy["layer.bias"], [2.0, 2.0])


def test_strategy_that_fails_is_named():
    strategy = make_strategy(CoordinatorSettings(strategy="fedavg"))
    bad = reply("alpha", 1.0, 3)
    bad.content["metrics"] = link.MetricRecord({"other": 1})
    with pytest.raises(AggregateError, match="FedAvg could not aggregate 1 updates"):
        aggregate(strategy, 1, [bad], net())


def test_round_trip_over_the_grid_with_a_stock_strategy(make_hub, closing):
    hub = make_hub(min_members=9)  # the round loop stays idle
    grid = hub.coordinator.grid
    raw = closing(RawMember(hub.bundle("alpha")))
    until(lambda: list(grid.get_node_ids()), "the member is connected")
    strategy = flower.FedProx(
        fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1, proximal_mu=0.5
    )
    questions = list(strategy.configure_train(4, link.to_record(net(1.0)), ConfigRecord(), grid))
    (wire_id,) = grid.push_messages(questions)
    train = raw.train()
    assert (train.id, train.round, train.proximal_mu) == (int(wire_id), 4, 0.5)
    assert grid.pull_messages([wire_id]) == []
    raw.send(update=update(train))
    (answer,) = until(lambda: grid.pull_messages([wire_id]), "the answer is there")
    opened = link.open_reply(answer)
    assert opened.node_id == link.node_id_of("alpha")
    assert opened.update.base_round == 4
    assert grid.pull_messages([wire_id]) == []


def test_waiting_for_answers_ends_at_the_timeout_and_at_a_disconnect(make_hub, closing):
    hub = make_hub(min_members=9)
    grid = hub.coordinator.grid
    raw = closing(RawMember(hub.bundle("alpha")))
    until(lambda: list(grid.get_node_ids()), "the member is connected")

    def question():
        content = RecordDict(
            {
                "arrays": link.to_record(net()),
                "config": ConfigRecord({"server-round": 1}),
            }
        )
        return grid.create_message(content, link.TRAIN, link.node_id_of("alpha"), "1")

    assert grid.send_and_receive([question()], timeout=0.05) == []
    (wire_id,) = grid.push_messages([question()])
    raw.close()
    (answer,) = until(lambda: grid.pull_messages([wire_id]), "the message fails")
    assert link.open_reply(answer).retry
    until(lambda: not list(grid.get_node_ids()), "the member is gone")
    (unsent,) = grid.send_and_receive([question()], timeout=5.0)
    assert unsent.error.reason == "not connected"


def test_failure_reason_that_is_no_number_of_the_contract_is_unspecified(make_hub, closing):
    hub = make_hub(max_rounds=1)
    raw = closing(RawMember(hub.bundle("alpha")))
    failure = pb.Failure(reply_to=raw.train().id)
    failure.MergeFromString(b"\x10\x63")  # field 2 = 99
    raw.send(failure=failure)
    hub.wait_round(1)
    assert hub.registry.updates()[0].reason == "no usable answer: UNSPECIFIED"
