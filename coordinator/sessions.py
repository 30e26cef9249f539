"""The members' sessions: a gRPC server over mutual TLS in a thread of its own; used by the link.

Who a member is comes from its certificate alone. A refused connection is logged and recorded. The
newest session of a member wins, because an older one may be a dead connection that nobody noticed.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol, TypeVar

import grpc
from sqlalchemy.exc import SQLAlchemyError

from common import link_pb2 as pb
from common.identity import KeyPair, fingerprint
from common.metrics import allowed, undeclared
from coordinator.doorman import Doorman
from coordinator.registry import Registry, told

T = TypeVar("T")

log = logging.getLogger(__name__)

HELLO_SECONDS = 10.0
HOUSEKEEPING_SECONDS = 2.0
"""How often byte counts are written and revocations take effect on open sessions."""
_OPTIONS = [
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    # Pings of a member whose machine halted come together; that is no reason to hang up.
    ("grpc.http2.max_ping_strikes", 0),
    # Two hubs must not share a port by accident: members would be split between them.
    ("grpc.so_reuseport", 0),
]


class Receiver(Protocol):
    """What the link does with what members send; called in the server's thread."""

    def joined(self, member: str) -> None: ...
    def left(self, member: str, session: int) -> None: ...
    def replied(self, member: str, message: pb.MemberMessage, fault: str = "") -> None: ...


@dataclass
class _Session:
    number: int
    member: str
    fingerprint: str
    outbox: asyncio.Queue[pb.HubMessage | None] = field(default_factory=asyncio.Queue)
    bytes_in: int = 0
    bytes_out: int = 0
    last_status: float = -1e9


@dataclass(frozen=True)
class Terms:
    """What a member must share with the hub to take part."""

    features_version: int
    architecture: str


class SessionServer:
    """Accepts members, keeps one session each, and moves messages between threads."""

    def __init__(
        self,
        registry: Registry,
        terms: Terms,
        *,
        max_message_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``clock`` is monotonic, in seconds."""
        self._registry = registry
        self._terms = terms
        self._max_message_bytes = max_message_bytes
        self._clock = clock
        self._receiver: Receiver | None = None
        self._lock = threading.Lock()
        self._sessions: dict[str, _Session] = {}
        self._count = 0
        self._total_in = 0
        self._total_out = 0
        self._last_event: dict[tuple[str, str], float] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)
        self._server: grpc.aio.Server | None = None
        self._doorman: Doorman | None = None
        self._housekeeper: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        """Work that outlives its call and is waited for at the end."""
        self._presence = ThreadPoolExecutor(1, "presence")
        """One thread, so that who came and who left is recorded in the order in which it happened:
        a member may be back before its old session has been cleared away."""

    # ---- called from any thread ----

    def start(self, receiver: Receiver, host: str, port: int, ca: bytes, pair: KeyPair) -> int:
        """Listen on ``host:port`` (0: a free one) and return the bound port.

        Raises:
            OSError: the address is taken or not of this machine.
        """
        self._receiver = receiver
        self._thread.start()
        return self._call(self._start(host, port, ca, pair))

    def stop(self) -> None:
        """End every session and the thread."""
        if self._thread.is_alive():
            self._call(self._stop())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._presence.shutdown()

    def members(self) -> list[str]:
        """Names of the connected members, sorted."""
        with self._lock:
            return sorted(self._sessions)

    def traffic(self) -> tuple[int, int]:
        """Bytes of messages received from and sent to members since the start."""
        with self._lock:
            return self._total_in, self._total_out

    def send(self, member: str, message: pb.HubMessage) -> int | None:
        """Queue a message; return the session that carries it, None if there is none."""
        with self._lock:
            session = self._sessions.get(member)
            if session is None:
                return None
            self._loop.call_soon_threadsafe(session.outbox.put_nowait, message)
            return session.number

    def report(self, kind: str, text: str, member: str | None = None) -> None:
        """Log and record an event, at most one a second of a kind and member."""
        now = self._clock()
        key = (kind, member or "")
        if now - self._last_event.get(key, -1e9) < 1.0:
            return
        if len(self._last_event) > 10_000:
            self._last_event.clear()
        self._last_event[key] = now
        log.warning("%s: %s", kind, text)
        self._registry.record_event(kind, text, member)

    # ---- the thread ----

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _start(self, host: str, port: int, ca: bytes, pair: KeyPair) -> int:
        self._server = grpc.aio.server(
            # What is a little too large is set aside with its reason; only what is far too large
            # ends the session unread.
            options=[*_OPTIONS, ("grpc.max_receive_message_length", 4 * self._max_message_bytes)]
        )
        handler = grpc.stream_stream_rpc_method_handler(
            self._serve,
            request_deserializer=pb.MemberMessage.FromString,
            response_serializer=pb.HubMessage.SerializeToString,
        )
        service = pb.DESCRIPTOR.services_by_name["Link"].full_name
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, {"Session": handler}),)
        )
        credentials = grpc.ssl_server_credentials(
            [(pair.key, pair.certificate)], root_certificates=ca, require_client_auth=True
        )
        inner = self._server.add_secure_port("127.0.0.1:0", credentials)
        await self._server.start()
        self._doorman = Doorman(inner, self._refused_handshake)
        bound = await self._doorman.start(host, port)
        self._housekeeper = asyncio.create_task(self._keep_house())
        return bound

    async def _stop(self) -> None:
        if self._housekeeper is not None:
            self._housekeeper.cancel()
        with self._lock:
            for session in self._sessions.values():
                session.outbox.put_nowait(None)
        if self._server is not None:
            await self._server.stop(1.0)
        if self._doorman is not None:
            await self._doorman.stop()
        await asyncio.sleep(0)  # lets calls that were just cancelled leave their last words
        while self._tasks:
            await asyncio.gather(*self._tasks)

    def _refused_handshake(self, address: str) -> None:
        text = (
            f"{address} failed the TLS handshake: it has no certificate, or one that is expired "
            "or signed by another CA"
        )
        self._later(asyncio.to_thread(self.report, "refused", text))

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(HOUSEKEEPING_SECONDS)
            try:
                await self._look_after_sessions()
            except SQLAlchemyError as error:
                # The next look comes soon; without one a revoked member would stay connected.
                log.error("%s", told(error))

    async def _look_after_sessions(self) -> None:
        admitted = await asyncio.to_thread(self._registry.admitted)
        with self._lock:
            sessions = list(self._sessions.values())
        for session in sessions:
            if admitted.get(session.member) != session.fingerprint:
                session.outbox.put_nowait(None)
                text = f"{session.member} was revoked or got a new certificate"
                await asyncio.to_thread(self.report, "revoked", text, session.member)
        await asyncio.to_thread(self._flush, sessions)

    def _flush(self, sessions: Iterable[_Session]) -> None:
        counts: dict[str, tuple[int, int]] = {}
        with self._lock:
            for session in sessions:
                counts[session.member] = (session.bytes_in, session.bytes_out)
                session.bytes_in = session.bytes_out = 0
        self._registry.traffic(counts)

    # ---- a session ----

    async def _serve(self, _requests: Any, context: Any) -> None:
        """Serve one member until either side ends; see ``link.proto``."""
        member, print_ = _identity(context)
        assert self._doorman is not None
        address = self._doorman.identify(context.peer())
        if why := await asyncio.to_thread(self._registry.refusal, member, print_):
            text = f"{member} ({address}) may not connect: {why}"
            await self._refuse(context, grpc.StatusCode.PERMISSION_DENIED, text, member)
        hello = await self._greeting(context, member, address)
        with self._lock:
            self._count += 1
            session = _Session(self._count, member, print_)
            older = self._sessions.get(member)
            self._sessions[member] = session
        assert self._receiver is not None
        if older is not None:
            older.outbox.put_nowait(None)
            self._receiver.left(member, older.number)
        self._receiver.joined(member)
        try:
            await self._loop.run_in_executor(
                self._presence,
                self._registry.connected,
                member,
                hello.features_version,
                hello.architecture,
                hello.software_version,
            )
            log.info("%s connected from %s", member, address)
            reading = asyncio.create_task(self._read(session, context))
            try:
                while (message := await session.outbox.get()) is not None:
                    await context.write(message)
                    self._count_bytes(session, 0, message.ByteSize())
            finally:
                reading.cancel()
        finally:
            # In a task of its own: a cancelled call must not wait for the registry.
            self._later(self._leave(session))

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _leave(self, session: _Session) -> None:
        with self._lock:
            if current := self._sessions.get(session.member) is session:
                del self._sessions[session.member]
        assert self._receiver is not None
        self._receiver.left(session.member, session.number)
        if current:
            await self._loop.run_in_executor(
                self._presence, self._registry.disconnected, session.member
            )
            log.info("%s disconnected", session.member)
        await asyncio.to_thread(self._flush, [session])

    async def _greeting(self, context: Any, member: str, address: str) -> pb.Hello:
        try:
            first = await asyncio.wait_for(context.read(), HELLO_SECONDS)
        except TimeoutError:
            first = None
        if not isinstance(first, pb.MemberMessage) or first.WhichOneof("kind") != "hello":
            text = f"{member} ({address}) did not begin with a greeting"
            await self._refuse(context, grpc.StatusCode.INVALID_ARGUMENT, text, member)
        hello = first.hello
        if hello.member != member:
            # The claimed name is a stranger's text and may be anything; it is shown shortened.
            text = f"{member} ({address}) claimed to be {hello.member[:63]!r}"
            await self._refuse(context, grpc.StatusCode.PERMISSION_DENIED, text, member)
        terms = self._terms
        if hello.features_version != terms.features_version:
            text = (
                f"{member} has features version {hello.features_version}, the hub has "
                f"{terms.features_version}; install the same release on both"
            )
            await self._refuse(context, grpc.StatusCode.FAILED_PRECONDITION, text, member)
        if hello.architecture != terms.architecture:
            text = (
                f"{member} has the policy architecture {hello.architecture[:64]!r}, the hub has "
                f"{terms.architecture!r}; install the same release on both"
            )
            await self._refuse(context, grpc.StatusCode.FAILED_PRECONDITION, text, member)
        return hello

    async def _refuse(
        self, context: Any, code: grpc.StatusCode, text: str, member: str
    ) -> NoReturn:
        await asyncio.to_thread(self.report, "refused", text, member)
        await context.abort(code, text)
        raise AssertionError("abort ends the call")

    async def _read(self, session: _Session, context: Any) -> None:
        assert self._receiver is not None
        try:
            while isinstance(message := await context.read(), pb.MemberMessage):
                size = message.ByteSize()
                self._count_bytes(session, size, 0)
                fault = ""
                if size > self._max_message_bytes:
                    fault = (
                        f"its message of {size} bytes is larger than {self._max_message_bytes} "
                        "(max_message_bytes)"
                    )
                if message.WhichOneof("kind") == "status":
                    await asyncio.to_thread(self._status, session, message.status)
                elif message.WhichOneof("kind") not in (None, "hello"):
                    self._receiver.replied(session.member, message, fault)
        except (grpc.RpcError, grpc.aio.BaseError) as error:
            log.info("%s: the stream broke: %s", session.member, error)
        finally:
            session.outbox.put_nowait(None)

    def _status(self, session: _Session, status: pb.Status) -> None:
        now = self._clock()
        if now - session.last_status < 0.2:
            return
        session.last_status = now
        self.metrics(session.member, dict(status.metrics))

    def metrics(self, member: str, values: dict[str, float]) -> None:
        """Record those metrics of a member that are declared and finite; report the others."""
        if names := undeclared(values):
            # An undeclared name may be anything, so it is counted and not repeated.
            self.report("metric", f"{member} sent {len(names)} undeclared metrics", member)
        self._registry.record_metrics(member, allowed(values))

    def _count_bytes(self, session: _Session, received: int, sent: int) -> None:
        with self._lock:
            session.bytes_in += received
            session.bytes_out += sent
            self._total_in += received
            self._total_out += sent


def _identity(context: Any) -> tuple[str, str]:
    peer = context.auth_context()
    names = peer.get("x509_common_name", [b""])
    certificates = peer.get("x509_pem_cert", [b""])
    name = names[0].decode(errors="replace")
    return name, fingerprint(certificates[0]) if certificates[0] else ""
