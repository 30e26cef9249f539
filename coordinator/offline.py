"""A whole federation in one process, without a network; the benchmark's suite federation runs it.

Everything but the transport is the hub's own: round loop, validation, strategies, personalisation,
speed tables, registry. Members are functions that answer the link's messages one after the other,
so that a federation takes the same course each time. As agent and coordinator do not import each
other, it is found by the entry point ``hub`` of the group ``fedsched.aggregation``.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from threading import Event
from typing import Any

from flwr.app import Message

from common import link_pb2 as pb
from common.metrics import allowed
from common.weights import Arrays
from coordinator.link import LinkGrid
from coordinator.registry import Registry
from coordinator.rounds import RoundLoop
from coordinator.settings import CoordinatorSettings

Answer = Callable[[pb.HubMessage], pb.MemberMessage]
"""What a member does with a message of the hub's; it copies the message's id into its answer."""
_FAR = 1e18  # certificates of members without a network do not expire


class _Post:
    """Stands where the members' sessions are: keeps what is sent until the members are asked."""

    def __init__(self, registry: Registry, names: Iterable[str]) -> None:
        self._registry, self._names = registry, sorted(names)
        self._waiting: list[tuple[str, pb.HubMessage]] = []
        self._received = self._sent = 0
        self.set_aside: dict[str, str] = {}
        """Why, by member, since this was last emptied."""

    def members(self) -> list[str]:
        return list(self._names)

    def traffic(self) -> tuple[int, int]:
        return self._received, self._sent

    def send(self, member: str, message: pb.HubMessage) -> int | None:
        if member not in self._names:
            return None
        self._waiting.append((member, message))
        self._sent += message.ByteSize()
        return 1

    def report(self, kind: str, text: str, member: str | None = None) -> None:
        self._registry.record_event(kind, text, member)
        if kind == "set aside" and member is not None:
            self.set_aside[member] = text

    def metrics(self, member: str, values: dict[str, float]) -> None:
        self._registry.record_metrics(member, allowed(values))

    def take(self) -> list[tuple[str, pb.HubMessage]]:
        """What was sent since the last call, in that order."""
        waiting, self._waiting = self._waiting, []
        return waiting

    def count(self, answer: pb.MemberMessage) -> None:
        self._received += answer.ByteSize()


class _LocalGrid(LinkGrid):
    """The link whose members answer when the hub looks for answers."""

    def __init__(self, post: _Post, members: Mapping[str, Answer]) -> None:
        super().__init__(post)
        self._post, self._members = post, members

    def deliver(self) -> None:
        """Let members answer all that was sent to them."""
        for name, message in self._post.take():
            answer = self._members[name](message)
            self._post.count(answer)
            self.replied(name, answer)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        self.deliver()
        return super().pull_messages(message_ids)


class OfflineHub:
    """A hub with its members in this process."""

    def __init__(
        self,
        folder: Path,
        initial: Arrays,
        members: Mapping[str, Answer],
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin a federation, or go on with the one whose state lies in ``folder``.

        Args:
            folder: state of the hub; a federation that is to begin anew needs an empty one.
            initial: start weights.
            members: what answers for each member, by name; all are connected.
            settings: those of :class:`CoordinatorSettings` that differ from the defaults. The
                environment has no say, so that equal arguments give equal policies.

        Raises:
            pydantic.ValidationError: a setting is unknown or out of range.
        """
        values: dict[str, Any] = {**(settings or {}), "state_dir": folder}
        defaults = {
            name: field.get_default(call_default_factory=True)
            for name, field in CoordinatorSettings.model_fields.items()
        }
        # What is given wins over the environment, so everything is given.
        self.settings = CoordinatorSettings(**{**defaults, **values})
        folder.mkdir(parents=True, exist_ok=True)
        self._registry = Registry(self.settings.database)
        for name in members:
            self._registry.enroll(name, f"offline {name}", _FAR)
        self._post = _Post(self._registry, members)
        self._grid = _LocalGrid(self._post, members)
        self._loop = RoundLoop(self._grid, self._grid, self._registry, self.settings, initial)

    @property
    def policy(self) -> Arrays:
        """The shared policy."""
        return self._loop.policy

    def round(self) -> dict[str, str]:
        """One round, personalised policies delivered; returns who was set aside, and why."""
        self._post.set_aside = {}
        self._loop.run_round(Event())
        self._grid.deliver()
        return self._post.set_aside

    def close(self) -> None:
        """Give the registry back."""
        self._registry.close()
