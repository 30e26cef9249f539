"""Only what ``link.proto`` declares leaves a member: its bytes are recorded on the way."""

from concurrent import futures

import grpc
from google.protobuf.unknown_fields import UnknownFieldSet

from agent.federation import METHOD
from common import link_pb2 as pb
from common.identity import Bundle, create_ca, issue_server
from common.metrics import DECLARED
from common.speeds import SpeedRow, speed_key
from common.weights import version_id
from tests.federation.support import TERMS, DummyLearner, member, net, now, until

SECRETS = ["trainer-7f9c", "node-rack3", "resnet50-acme", "team-payments"]


class RecordingProxy:
    """Ends the member's TLS, keeps each message as it came, and passes it on with its identity."""

    def __init__(self, upstream: Bundle) -> None:
        self.recorded: list[bytes] = []
        self._upstream = grpc.secure_channel(
            upstream.hub,
            grpc.ssl_channel_credentials(upstream.ca, upstream.key, upstream.certificate),
            options=[("grpc.ssl_target_name_override", upstream.server_name)],
        )
        own = create_ca(now())
        pair = issue_server(own, ["proxy.test"], now())
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        handler = grpc.stream_stream_rpc_method_handler(self._session)
        service, method = METHOD.strip("/").split("/")
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, {method: handler}),)
        )
        credentials = grpc.ssl_server_credentials(
            [(pair.key, pair.certificate)], upstream.ca, require_client_auth=True
        )
        port = self._server.add_secure_port("127.0.0.1:0", credentials)
        self._server.start()
        self.bundle = Bundle(
            upstream.member,
            f"127.0.0.1:{port}",
            "proxy.test",
            own.certificate,
            upstream.certificate,
            upstream.key,
        )

    def _session(self, requests, _context):
        def keep():
            for raw in requests:
                self.recorded.append(raw)
                yield raw

        try:
            yield from self._upstream.stream_stream(METHOD)(keep())
        except grpc.RpcError:
            return

    def stop(self) -> None:
        self._server.stop(0).wait()
        self._upstream.close()


def assert_declared(message) -> None:
    assert len(UnknownFieldSet(message)) == 0
    for descriptor, value in message.ListFields():
        if descriptor.message_type is None or descriptor.message_type.GetOptions().map_entry:
            continue
        for part in value if descriptor.is_repeated else [value]:
            assert_declared(part)


def test_nothing_but_declared_fields_leaves_a_member(make_hub, closing, tmp_path):
    hub = make_hub(max_rounds=2)
    proxy = closing(RecordingProxy(hub.bundle("alpha")))
    pods, nodes, job_type, queue = SECRETS
    learner = DummyLearner(speeds={speed_key(f"{job_type}|2|v100"): SpeedRow(2.0, 1.0, 0.75)})
    learner.metrics |= {pods: 1.0, f"{nodes}_busy": 2.0, queue: 3.0}
    closing(member(proxy.bundle, learner, tmp_path / "alpha", status_seconds=0.0)).start()
    for number in (1, 2):
        until(lambda n=number: ("global", n) in learner.kinds, "the learner was asked")
        learner.step()
        hub.wait_round(number)
    until(lambda: ("personalised", 2) in learner.kinds, "the last push arrived")

    messages = [pb.MemberMessage.FromString(raw) for raw in list(proxy.recorded)]
    kinds = {message.WhichOneof("kind") for message in messages}
    assert kinds >= {"hello", "update", "status", "adopted"}
    for raw in proxy.recorded:
        assert not [secret for secret in SECRETS if secret.encode() in raw]
    texts = set()
    for message in messages:
        assert_declared(message)
        texts |= set(message.status.metrics) | set(message.update.metrics)
    assert texts == {"reward", "loss"} <= DECLARED.keys()
    # The remaining texts are the member's name, its release, and names that came from the hub.
    (hello,) = [m.hello for m in messages if m.WhichOneof("kind") == "hello"]
    assert (hello.member, hello.architecture) == ("alpha", TERMS.architecture)
    updates = [m.update for m in messages if m.WhichOneof("kind") == "update"]
    assert {t.name for u in updates for t in u.tensors} == net().keys()
    assert updates[0].base_version == version_id(net())
