"""Flower's strategies by name, and the view of the grid that invites chosen members to a round.

Called by the round loop. ``fedavg`` (https://arxiv.org/abs/1602.05629) and ``fedprox``
(https://arxiv.org/abs/1812.06127) weigh members by their scheduled pods; ``fedmedian`` and
``fedtrimmedavg`` (https://arxiv.org/abs/1803.01498), ``krum`` and ``multikrum``
(https://arxiv.org/abs/1703.02757) withstand members that lie.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp import strategy as flower
from flwr.serverapp.exception import AggregationError, InconsistentMessageReplies

from common import link_pb2 as pb
from common.weights import Arrays, check_same_form
from coordinator.link import WEIGHT_KEY, from_record, to_record, with_speeds
from coordinator.settings import CoordinatorSettings


class AggregateError(RuntimeError):
    """The strategy could make no policy of the accepted updates."""


def make_strategy(settings: CoordinatorSettings) -> flower.FedAvg:
    """The strategy that the settings name; it never waits for members by itself."""
    common: dict[str, Any] = {
        "fraction_evaluate": 0.0,
        "min_train_nodes": 1,
        "min_available_nodes": 1,
        "weighted_by_key": WEIGHT_KEY,
    }
    match settings.strategy:
        case "fedavg":
            return flower.FedAvg(**common)
        case "fedprox":
            return flower.FedProx(proximal_mu=settings.proximal_mu, **common)
        case "fedmedian":
            return flower.FedMedian(**common)
        case "fedtrimmedavg":
            return flower.FedTrimmedAvg(beta=settings.trim, **common)
        case "krum":
            return flower.Krum(num_malicious_nodes=settings.malicious_members, **common)
        case "multikrum":
            return flower.MultiKrum(
                num_malicious_nodes=settings.malicious_members,
                num_nodes_to_select=settings.selected_members,
                **common,
            )


class _Invited(Grid):
    """A grid that shows a strategy only the nodes that are to be invited."""

    def __init__(self, grid: Grid, nodes: Collection[int]) -> None:
        self._grid = grid
        self._nodes = sorted(nodes)

    def set_run(self, run: Any) -> None:
        self._grid.set_run(run)

    @property
    def run(self) -> Any:
        return self._grid.run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        return self._grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def get_node_ids(self) -> Iterable[int]:
        return list(self._nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return self._grid.pull_messages(message_ids)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        return self._grid.send_and_receive(messages, timeout=timeout)


def invitations(
    strategy: flower.FedAvg,
    round_number: int,
    arrays: Arrays,
    grid: Grid,
    speeds: dict[int, pb.PeerSpeeds],
) -> list[Message]:
    """One message to each node of ``speeds``, configured by the strategy."""
    view = _Invited(grid, speeds)
    configured = strategy.configure_train(round_number, to_record(arrays), ConfigRecord(), view)
    return [with_speeds(message, speeds[message.metadata.dst_node_id]) for message in configured]


def aggregate(
    strategy: flower.FedAvg, round_number: int, replies: Sequence[Message], form: Arrays
) -> Arrays:
    """The new global policy from validated replies (at least one), in the form of ``form``.

    Raises:
        AggregateError: the strategy fails on them, such as Krum on too few members.
    """
    try:
        record, _ = strategy.aggregate_train(round_number, list(replies))
        if record is None:
            raise ValueError("it returned no arrays")
        arrays = from_record(record)
        check_same_form(arrays, form)
    except (AggregationError, InconsistentMessageReplies, ValueError, IndexError) as error:
        name = type(strategy).__name__
        raise AggregateError(
            f"{name} could not aggregate {len(replies)} updates: {error}"
        ) from error
    return arrays
