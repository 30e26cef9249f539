"""Who may not take part, and that each refusal is logged and recorded."""

import asyncio
import contextlib
import socket
import struct

import grpc
import pytest
from sqlalchemy.exc import OperationalError

from common import link_pb2 as pb
from common.identity import fingerprint, issue_member
from coordinator.doorman import Doorman
from tests.federation.support import TERMS, WAIT, RawMember, now, other_ca, until


def refusals(hub):
    return [e for e in hub.registry.events() if e.kind == "refused"]


def assert_refused(raw, code):
    assert raw.ended.wait(WAIT)
    assert raw.code == code
    assert raw.messages.empty()


def test_connection_without_a_certificate_is_refused_and_recorded(make_hub, closing, caplog):
    hub = make_hub()
    bundle = hub.bundle("alpha")
    raw = closing(RawMember(bundle, credentials=grpc.ssl_channel_credentials(bundle.ca)))
    assert_refused(raw, grpc.StatusCode.UNAVAILABLE)
    # Its channel tries again by itself, so there may be more of them by now.
    event, *_ = until(lambda: refusals(hub), "the refusal is recorded")
    assert event.text.startswith("127.0.0.1:")
    assert "no certificate" in event.text
    assert "failed the TLS handshake" in caplog.text


def test_certificate_of_another_ca_is_refused_and_recorded(make_hub, closing, caplog):
    hub = make_hub()
    raw = closing(RawMember(hub.bundle("alpha", ca=other_ca())))
    assert_refused(raw, grpc.StatusCode.UNAVAILABLE)
    event, *_ = until(lambda: refusals(hub), "the refusal is recorded")
    assert "another CA" in event.text
    assert "failed the TLS handshake" in caplog.text
    assert hub.registry.members()[0].state == "never seen"


async def test_refusal_is_noticed_though_the_client_was_still_sending():
    refused: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        doorman = Doorman(server.getsockname()[1], refused.append)
        port = await doorman.start("127.0.0.1", 0)
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"hello")
            connection, _ = await asyncio.to_thread(server.accept)
            await asyncio.to_thread(connection.recv, 5)
            # The relay looks at neither end meanwhile, as on a busy machine, and then at both.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
            client.sendall(b"more")
            with contextlib.suppress(ConnectionResetError):
                await asyncio.to_thread(client.recv, 1)
            address = "{}:{}".format(*client.getsockname())
        await doorman.stop()
    assert refused == [address]


def test_connection_that_only_knocks_is_not_reported(make_hub, closing):
    hub = make_hub()
    socket.create_connection(("127.0.0.1", hub.port)).close()
    raw = closing(RawMember(hub.bundle("alpha")))
    raw.train()
    assert refusals(hub) == []


@pytest.mark.parametrize(
    ("enrolled", "why"), [(False, "not enrolled"), (True, "revoked")], ids=["stranger", "revoked"]
)
def test_member_that_is_not_admitted_is_refused(make_hub, closing, caplog, enrolled, why):
    hub = make_hub()
    bundle = hub.bundle("alpha", enrolled=enrolled)
    if enrolled:
        hub.registry.revoke("alpha")
    raw = closing(RawMember(bundle))
    assert_refused(raw, grpc.StatusCode.PERMISSION_DENIED)
    assert why in raw.details
    (event,) = refusals(hub)
    assert event.member == "alpha"
    assert why in event.text
    assert why in caplog.text


def test_replaced_certificate_is_refused_and_the_new_one_admitted(make_hub, closing):
    hub = make_hub()
    old = hub.bundle("alpha")
    new = hub.bundle("alpha")
    raw = closing(RawMember(old))
    assert_refused(raw, grpc.StatusCode.PERMISSION_DENIED)
    assert "replaced" in raw.details
    assert closing(RawMember(new)).train().round == 1


def test_member_that_names_somebody_else_is_refused(make_hub, closing, caplog):
    hub = make_hub()
    hub.bundle("beta")
    hello = pb.Hello(
        member="beta", features_version=TERMS.features_version, architecture=TERMS.architecture
    )
    raw = closing(RawMember(hub.bundle("alpha"), hello))
    assert_refused(raw, grpc.StatusCode.PERMISSION_DENIED)
    (event,) = refusals(hub)
    assert event.member == "alpha"
    assert "claimed to be 'beta'" in event.text
    assert "claimed to be 'beta'" in caplog.text


@pytest.mark.parametrize(
    ("hello", "code", "words"),
    [
        (
            pb.Hello(member="alpha", features_version=6, architecture=TERMS.architecture),
            grpc.StatusCode.FAILED_PRECONDITION,
            "features version 6, the hub has 7",
        ),
        (
            pb.Hello(member="alpha", features_version=7, architecture="other"),
            grpc.StatusCode.FAILED_PRECONDITION,
            "architecture 'other'",
        ),
    ],
    ids=["features", "architecture"],
)
def test_member_of_another_release_is_told_why(make_hub, closing, hello, code, words):
    hub = make_hub()
    raw = closing(RawMember(hub.bundle("alpha"), hello))
    assert_refused(raw, code)
    assert words in raw.details
    assert words in refusals(hub)[0].text


def test_member_that_does_not_greet_first_is_refused(make_hub, closing):
    hub = make_hub()
    bundle = hub.bundle("alpha")
    raw = closing(RawMember(bundle, hello=None))
    raw.train()  # the honest greeting works
    silent = closing(_Rude(bundle))
    assert_refused(silent, grpc.StatusCode.INVALID_ARGUMENT)


class _Rude(RawMember):
    def send(self, **kind):
        if "hello" in kind:
            kind = {"status": pb.Status(metrics={"reward": 1.0})}
        super().send(**kind)


def test_open_session_ends_when_its_member_is_revoked(make_hub, closing):
    hub = make_hub()
    raw = closing(RawMember(hub.bundle("alpha")))
    raw.train()
    hub.registry.revoke("alpha")
    assert raw.ended.wait(WAIT)
    until(lambda: "revoked" in [e.kind for e in hub.registry.events()], "it is recorded")


def test_another_certificate_of_the_same_name_is_refused(make_hub, closing):
    hub = make_hub()
    bundle = hub.bundle("alpha")
    pair = issue_member(hub.ca, "beta", now())
    hub.registry.enroll("beta", fingerprint(bundle.certificate), 0.0)
    credentials = grpc.ssl_channel_credentials(bundle.ca, pair.key, pair.certificate)
    hello = pb.Hello(
        member="beta", features_version=TERMS.features_version, architecture=TERMS.architecture
    )
    raw = closing(RawMember(bundle, hello, credentials=credentials))
    assert_refused(raw, grpc.StatusCode.PERMISSION_DENIED)


def test_a_revoked_member_is_shut_out_though_the_registry_failed_for_a_while(
    make_hub, closing, monkeypatch, caplog
):
    monkeypatch.setattr("coordinator.sessions.HOUSEKEEPING_SECONDS", 0.05)
    hub = make_hub()
    raw = closing(RawMember(hub.bundle("alpha")))
    raw.train()
    admitted, failures = hub.registry.admitted, []

    def unlucky():
        if len(failures) < 2:
            failures.append("database is locked")
            raise OperationalError("SELECT", {}, Exception(failures[-1]))
        return admitted()

    monkeypatch.setattr(hub.registry, "admitted", unlucky)
    until(lambda: len(failures) == 2, "the registry failed")
    hub.registry.revoke("alpha")
    assert raw.ended.wait(WAIT)
    assert "database is locked" in caplog.text
