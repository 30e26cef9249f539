"""Real parts for the federation tests: a hub in this process, a learner, a hand-driven member."""

import datetime as dt
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from agent.federation import METHOD, LocalState, Member, SharedPolicy
from agent.uploads import UploadPolicy
from common import link_pb2 as pb
from common.codec import decode_arrays, encode_delta
from common.identity import Bundle, KeyPair, create_ca, expires, fingerprint, issue_member
from common.speeds import NOBODY, Peers, SpeedTable
from common.weights import Arrays, carry_progress, copy, quantise
from coordinator.registry import Registry
from coordinator.server import Coordinator
from coordinator.sessions import Terms
from coordinator.settings import CoordinatorSettings
from coordinator.setup import initialise, open_registry

TERMS = Terms(features_version=7, architecture="test-net")
WAIT = 180.0
"""Longest wait for something that must happen, seconds. It only bounds a failing test: a member
whose hub is away may rest for half a minute before it tries again."""


def now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)


def net(value: float = 0.0) -> Arrays:
    return {
        "layer.weight": np.full((2, 3), value, np.float32),
        "layer.bias": np.full(2, value, np.float32),
    }


def until(condition: Callable[[], Any], what: str) -> Any:
    """Wait for a condition; the limit is generous, for it only bounds a failing test."""
    end = time.monotonic() + WAIT
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.01)
    raise AssertionError(f"waited in vain until {what}")


class Hub:
    """A hub on loopback with its registry; ``settings`` override the defaults of the tests."""

    def __init__(
        self,
        directory: Path,
        initial: Arrays | None = None,
        clock: Callable[[], float] = time.monotonic,
        **settings: Any,
    ) -> None:
        values: dict[str, Any] = {
            "state_dir": directory / "hub",
            "listen": "127.0.0.1:0",
            "dashboard_listen": "127.0.0.1:0",
            "server_names": ["hub.test"],
            "eta": 0.25,
            "strategy": "fedavg",
            "idle_pause": 0.0,
            **settings,
        }
        self.settings = CoordinatorSettings(**values)
        self.registry: Registry = open_registry(self.settings)
        self.ca: KeyPair = initialise(self.settings, now())
        self._initial = net() if initial is None else initial
        self._clock = clock
        self.coordinator: Coordinator | None = None
        self.port = 0

    def start(self) -> "Hub":
        self.coordinator = Coordinator(
            self.settings, self.registry, TERMS, self._initial, clock=self._clock
        )
        self.port = self.coordinator.start().link
        return self

    def stop(self) -> None:
        if self.coordinator is not None:
            self.coordinator.stop()
        self.registry.close()

    @property
    def policy(self) -> Arrays:
        assert self.coordinator is not None
        return self.coordinator.rounds.policy

    def bundle(self, name: str, ca: KeyPair | None = None, enrolled: bool = True) -> Bundle:
        """A bundle for ``name``, signed by the hub's CA or by another one."""
        pair = issue_member(ca or self.ca, name, now())
        if enrolled:
            end = expires(pair.certificate).timestamp()
            self.registry.enroll(name, fingerprint(pair.certificate), end)
        return Bundle(
            name,
            f"127.0.0.1:{self.port}",
            "hub.test",
            self.ca.certificate,
            pair.certificate,
            pair.key,
        )

    def finished(self, number: int) -> bool:
        last = self.registry.checkpoint()
        return last is not None and last.round >= number

    def wait_round(self, number: int) -> None:
        until(lambda: self.finished(number), f"round {number} is finished")


def other_ca() -> KeyPair:
    return create_ca(now())


class DummyLearner:
    """Keeps arrays; ``step`` stands for learning. It holds names that must never leave it."""

    def __init__(
        self, pods: int = 10, target: float = 1.0, speeds: SpeedTable | None = None
    ) -> None:
        self._lock = threading.Lock()
        self.arrays = net()
        self.pods, self.rounds, self.target = pods, 0, target
        self.speeds = speeds or {}
        self.metrics: dict[str, float] = {"reward": -1.5, "loss": 0.5}
        self.anchor: Arrays | None = None
        self.mu = 0.0
        self.kinds: list[tuple[str, int]] = []
        self.peers = NOBODY
        self.accept = True

    def local(self) -> LocalState:
        with self._lock:
            return LocalState(
                copy(self.arrays), self.rounds, self.pods, dict(self.speeds), dict(self.metrics)
            )

    def step(self, pods: int = 1) -> None:
        """Learn one round: move to the target; schedule pods."""
        with self._lock:
            self.arrays = net(self.target)
            self.rounds += 1
            self.pods += pods

    def adopt(self, policy: SharedPolicy) -> bool:
        with self._lock:
            self.kinds.append((policy.kind, policy.round))
            if policy.kind == "global":
                self.anchor, self.mu = policy.arrays, policy.proximal_mu
                return False
            if not self.accept:
                return False
            arrays = policy.arrays
            if policy.at_upload is not None:
                arrays = carry_progress(arrays, self.arrays, policy.at_upload)
            self.arrays = arrays
            return True

    def adopt_speeds(self, peers: Peers) -> None:
        with self._lock:
            self.peers = peers


def member(bundle: Bundle, learner: DummyLearner, directory: Path, **options: Any) -> Member:
    """A member that looks often; it uploads after each learning round unless told otherwise."""
    values: dict[str, Any] = {
        "features_version": TERMS.features_version,
        "architecture": TERMS.architecture,
        "software_version": "0.0",
        "policy": UploadPolicy(learning_rounds=1, seconds=1e9, drift=float("inf")),
        "tick_seconds": 0.02,
        "first_backoff": 0.05,
        "status_seconds": 1e9,
        **options,
    }
    return Member(bundle, learner, directory, **values)


class RawMember:
    """A stream that a test drives by hand, to send what an honest member never would."""

    def __init__(
        self, bundle: Bundle, hello: pb.Hello | None = None, credentials: Any = None
    ) -> None:
        self._out: queue.SimpleQueue[pb.MemberMessage | None] = queue.SimpleQueue()
        self.messages: queue.SimpleQueue[pb.HubMessage] = queue.SimpleQueue()
        self.ended = threading.Event()
        self.code: grpc.StatusCode | None = None
        self.details = ""
        self.bundle = bundle
        self._channel = grpc.secure_channel(
            bundle.hub,
            credentials or grpc.ssl_channel_credentials(bundle.ca, bundle.key, bundle.certificate),
            options=[
                ("grpc.ssl_target_name_override", bundle.server_name),
                ("grpc.enable_retries", 0),
            ],
        )
        call = self._channel.stream_stream(
            METHOD,
            request_serializer=pb.MemberMessage.SerializeToString,
            response_deserializer=pb.HubMessage.FromString,
        )(iter(self._out.get, None))
        self.send(
            hello=hello
            or pb.Hello(
                member=bundle.member,
                features_version=TERMS.features_version,
                architecture=TERMS.architecture,
            )
        )
        self._thread = threading.Thread(target=self._read, args=(call,), daemon=True)
        self._thread.start()

    def _read(self, call: Any) -> None:
        try:
            for message in call:
                self.messages.put(message)
        except grpc.RpcError as error:
            self.code, self.details = error.code(), error.details()
        self.ended.set()

    def send(self, **kind: Any) -> None:
        self._out.put(pb.MemberMessage(**kind))

    def train(self) -> pb.Train:
        """The next Train message; a personalised policy before it is acknowledged."""
        while True:
            message = self.messages.get(timeout=WAIT)
            if message.WhichOneof("kind") == "personalize":
                self.send(adopted=pb.Adopted(reply_to=message.personalize.id, adopted=True))
            if message.WhichOneof("kind") == "train":
                return message.train

    def personalize(self) -> pb.Personalize:
        """The next Personalize message."""
        while True:
            message = self.messages.get(timeout=WAIT)
            if message.WhichOneof("kind") == "personalize":
                self.send(adopted=pb.Adopted(reply_to=message.personalize.id, adopted=True))
                return message.personalize

    def close(self) -> None:
        self._out.put(None)
        self._channel.close()
        self._thread.join(WAIT)


def update(train: pb.Train, change: float = 0.5, pods: int = 10, **fields: Any) -> pb.Update:
    """An honest update that moves every weight by ``change``."""
    base = decode_arrays(train.arrays)
    code, _ = quantise({name: np.full_like(a, change) for name, a in base.items()})
    values: dict[str, Any] = {
        "reply_to": train.id,
        "base_round": train.round,
        "base_version": train.version,
        "tensors": encode_delta(code),
        "scheduled_pods": pods,
        "counter": 5,
        **fields,
    }
    return pb.Update(**values)
