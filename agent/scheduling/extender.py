"""kube-scheduler's extender over HTTP: filter and prioritize, with health checks and metrics.

Served by ``agent.scheduling.serve``, called by kube-scheduler for each pod that has more than one
feasible node. The protocol is ``k8s.io/kube-scheduler/extender/v1``: JSON under Go's field names,
scores that are integers from 0 to 10, a Content-Length and never an HTTP 500. An empty array is "no
opinion": kube-scheduler's own scores decide, and the reason is counted.

kube-scheduler adds nothing to a node that is not named, and only differences count for it. Scores
are therefore told from the lowest one on, and nodes that have it are left out: where most nodes are
alike it has one score to read, and not hundreds.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Collection
from http import HTTPStatus
from itertools import repeat

import msgspec
import numpy as np

from agent.arrays import Ints
from agent.cluster import objects
from agent.cluster.records import Pod
from agent.cluster.state import ClusterState
from agent.scheduling.candidates import LOWEST_SCORE
from agent.scheduling.decision import HIGHEST, Choice, decide_node, extender_scores
from agent.scheduling.guard import HELD_BACK, LivePolicy, held_back
from agent.scheduling.http_server import Answer, Request, Routes, text
from agent.scheduling.metrics import Metrics
from agent.scheduling.recorder import Recorder
from agent.settings import ServeSettings

log = logging.getLogger(__name__)
NEUTRAL = HIGHEST // 2
"""Score of a node that the agent does not know yet."""
_TCP_ESTABLISHED = 1
"""First byte of Linux's ``tcp_info``."""


class _Name(msgspec.Struct, frozen=True):
    class Meta(msgspec.Struct, frozen=True):
        name: str

    metadata: Meta


class _NodeList(msgspec.Struct, frozen=True):
    items: list[msgspec.Raw] | None = None


class ExtenderArgs(msgspec.Struct, frozen=True, rename="pascal"):
    """A request of kube-scheduler: a pod, and nodes by name or as whole objects."""

    pod: msgspec.Raw
    nodes: _NodeList | None = None
    node_names: list[str] | None = None


class HostPriority(msgspec.Struct, frozen=True, rename="pascal", gc=False):
    """One node in a prioritize answer, with its score above the lowest of the request's nodes."""

    host: str
    score: int


class FilterResult(msgspec.Struct, frozen=True, rename="pascal"):
    """A filter answer; nodes come back in the form in which they were sent."""

    nodes: dict[str, list[msgspec.Raw]] | None = None
    node_names: list[str] | None = None
    failed_nodes: dict[str, str] = {}
    failed_and_unresolvable_nodes: dict[str, str] = {}
    error: str = ""


class NoOpinionError(Exception):
    """There is no opinion to give; ``args[0]`` is one of ``metrics.REASONS``."""


class BadRequestError(Exception):
    """The request cannot be read; the message says why."""


_decode_args = msgspec.json.Decoder(ExtenderArgs).decode
_decode_name = msgspec.json.Decoder(_Name).decode
_encode = msgspec.json.Encoder().encode
_FAILED = {
    "cpu": "fedsched: measured CPU use is above the limit",
    "gpu_memory": "fedsched: not enough GPU memory",
}


def _hung_up(transport: asyncio.Transport) -> bool:
    """Whether the asker has closed the connection, as kube-scheduler does at its time-out.

    The event loop learns it too late where the request and the end of its connection were waiting
    together, behind a process that hung. Only Linux tells it at once.
    """
    if transport.is_closing():
        return True
    connection = transport.get_extra_info("socket")
    if connection is None or not hasattr(socket, "TCP_INFO"):
        return False
    state = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    return bool(state != _TCP_ESTABLISHED)


def _read(body: bytes) -> tuple[Pod, list[str], list[msgspec.Raw] | None]:
    """The pod, the candidates' names, and their objects where they were sent whole."""
    try:
        args = _decode_args(body)
        pod = objects.pod(args.pod)
        if args.node_names is not None:
            return pod, args.node_names, None
        whole = list((args.nodes.items if args.nodes else None) or ())
        return pod, [_decode_name(item).metadata.name for item in whole], whole
    except (msgspec.DecodeError, UnicodeDecodeError, objects.ObjectError) as error:
        raise BadRequestError(f"not an ExtenderArgs: {error}") from error


class Extender:
    """The two verbs on one cluster state; everything runs in the event loop, without I/O."""

    def __init__(
        self,
        state: ClusterState,
        policy: LivePolicy,
        recorder: Recorder,
        settings: ServeSettings,
        metrics: Metrics,
        *,
        fresh: Callable[[], bool],
        queued: Collection[str] = (),
        monotonic: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``fresh`` says whether the state can be trusted; ``queued`` are the UIDs of pods whose
        place the queue chose (and recorded) already."""
        self._state, self._policy, self._recorder = state, policy, recorder
        self._settings, self._metrics = settings, metrics
        self._fresh, self._queued, self._monotonic = fresh, queued, monotonic

    def routes(self) -> Routes:
        """All that is answered, by method and path."""
        return {
            ("POST", "/filter"): self._on_filter,
            ("POST", "/prioritize"): self._on_prioritize,
            **self.health_routes(),
        }

    def health_routes(self) -> Routes:
        """Health checks and metrics alone, for those who have no decisions to ask for."""
        return {
            ("GET", "/healthz"): self._on_healthz,
            ("GET", "/readyz"): self._on_readyz,
            ("GET", "/metrics"): self._on_metrics,
        }

    # Verbs ----------------------------------------------------------------------------------

    def prioritize(self, body: bytes, began: float) -> list[HostPriority]:
        """The request's nodes that are better than its worst, in its order, each with how many
        points; none where all are alike, or where there is no opinion.

        ``began`` is when work on it began, on the monotonic clock. Raises BadRequestError.
        """
        try:
            pod, names, _ = _read(body)
            try:
                return self._prioritize(pod, names, began)
            except NoOpinionError as reason:
                self._metrics.no_opinion.labels(reason.args[0]).inc()
            except Exception:
                log.exception("prioritize for pod %s/%s failed", pod.namespace, pod.name)
                self._metrics.no_opinion.labels("internal_error").inc()
            return []
        except BadRequestError:
            self._metrics.no_opinion.labels("bad_request").inc()
            raise

    def _prioritize(self, pod: Pod, names: list[str], began: float) -> list[HostPriority]:
        state = self._state
        if not self._fresh():
            raise NoOpinionError("stale_state")
        state.tick()
        if not state.introduce(pod):
            raise NoOpinionError("unknown_pod")
        rows = self._rows(names)
        known = np.flatnonzero(rows >= 0)
        if not len(known):
            raise NoOpinionError("unknown_nodes")
        scores = np.full(len(names), NEUTRAL)
        intended = state.suspend(pod.uid)
        try:
            choice, scores[known] = self._score(pod, rows[known], intended)
            if self._monotonic() - began > self._settings.budget_seconds:
                raise NoOpinionError("deadline_exceeded")
        except BaseException:
            if intended:
                state.assume(pod.uid, intended)
            raise
        if choice is not None:
            if pod.uid not in self._queued:
                self._recorder.decision("prioritize", choice, state, self._policy)
            state.assume(pod.uid, names[known[scores[known].argmax()]])
        above = (scores - scores.min()).tolist()
        return [
            HostPriority(name, score) for name, score in zip(names, above, strict=True) if score
        ]

    def _rows(self, names: list[str]) -> Ints:
        """[C] view rows; −1 for a node that the agent does not know yet."""
        return np.fromiter(map(self._state.rows.get, names, repeat(-1)), np.int64, len(names))

    def _score(self, pod: Pod, rows: Ints, intended: str) -> tuple[Choice | None, Ints]:
        """The choice among the nodes that the guard lets through (None: it lets none), and all
        scores."""
        state, view = self._state, self._state.view
        scores = np.zeros(len(rows), np.int64)
        reasons = self._reasons(pod, rows)
        free = np.flatnonzero(reasons == 0)
        if not len(free):
            return None, scores
        choice = decide_node(view, self._policy.current, state.slots[pod.uid], rows[free])
        points = extender_scores(choice)
        if pod.uid in self._queued:
            points = self._prefer(intended, choice, points)
        scores[free] = points
        return choice, scores

    def _prefer(self, intended: str, choice: Choice, points: Ints) -> Ints:
        """Put the node that the queue chose first, unless another is now clearly better."""
        places = np.flatnonzero(choice.nodes == self._state.rows.get(intended, -1))
        if not len(places):
            return points
        place = int(places[0])
        lost = float(choice.scores.max() - choice.scores[place])
        if choice.rule_scores[place] <= LOWEST_SCORE or lost > self._settings.margin:
            return points
        points = np.minimum(points, HIGHEST - 1)
        points[place] = HIGHEST
        return points

    def filter(self, body: bytes) -> FilterResult:
        """The nodes that the guard lets through. Raises BadRequestError."""
        try:
            pod, names, whole = _read(body)
        except BadRequestError:
            self._metrics.no_opinion.labels("bad_request").inc()
            raise
        failed: dict[str, str] = {}
        if not self._fresh():
            self._metrics.no_opinion.labels("stale_state").inc()
        else:
            try:
                failed = self._held_back(pod, names)
            except Exception:
                log.exception("filter for pod %s/%s failed", pod.namespace, pod.name)
                self._metrics.no_opinion.labels("internal_error").inc()
        kept = [name for name in names if name not in failed]
        if whole is None:
            return FilterResult(node_names=kept, failed_nodes=failed)
        items = [item for item, name in zip(whole, names, strict=True) if name not in failed]
        return FilterResult(nodes={"items": items}, failed_nodes=failed)

    def _held_back(self, pod: Pod, names: list[str]) -> dict[str, str]:
        rows = self._rows(names)
        known = np.flatnonzero(rows >= 0)
        reasons = self._reasons(pod, rows[known])
        out = np.flatnonzero(reasons)
        return {names[known[at]]: _FAILED[HELD_BACK[reasons[at] - 1]] for at in out}

    def _reasons(self, pod: Pod, rows: Ints) -> Ints:
        """[C] why each of ``rows`` is held back, as ``held_back`` codes it; counted."""
        reasons = held_back(self._state, pod, rows, self._settings.cpu_limit)
        if reasons.any():
            for code, reason in enumerate(HELD_BACK):
                self._metrics.guarded.labels(reason).inc(int((reasons == code + 1).sum()))
        return reasons

    # HTTP -----------------------------------------------------------------------------------

    def _on_prioritize(self, request: Request) -> Answer:
        if _hung_up(request.transport):  # what nobody hears is no decision
            self._metrics.no_opinion.labels("unheard").inc()
            return self._answer("prioritize", lambda _: [])
        return self._answer("prioritize", lambda began: self.prioritize(request.body, began))

    def _on_filter(self, request: Request) -> Answer:
        return self._answer("filter", lambda _: self.filter(request.body))

    def _answer(self, verb: str, work: Callable[[float], object]) -> Answer:
        began = self._monotonic()
        try:
            answer = Answer(_encode(work(began)), "application/json")
        except BadRequestError as error:
            answer = text(HTTPStatus.BAD_REQUEST, str(error))
        self._metrics.answers.labels(verb).inc()
        self._metrics.seconds.labels(verb).observe(self._monotonic() - began)
        return answer

    def _on_healthz(self, _: Request) -> Answer:
        return text(HTTPStatus.OK, "ok")

    def _on_readyz(self, _: Request) -> Answer:
        if self._fresh():
            return text(HTTPStatus.OK, "ok")
        missing = "nodes and pods are not synced with the API server"
        return text(HTTPStatus.SERVICE_UNAVAILABLE, missing)

    def _on_metrics(self, _: Request) -> Answer:
        return Answer(self._metrics.text(), "text/plain; version=0.0.4")
