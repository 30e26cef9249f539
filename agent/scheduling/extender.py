"""kube-scheduler's extender over HTTP: filter and prioritize, with health checks and metrics.

Served by ``agent.scheduling.serve``, called by kube-scheduler for each pod that has more than one
feasible node. The protocol is ``k8s.io/kube-scheduler/extender/v1``: JSON under Go's field names,
scores that are integers from 0 to 10, a Content-Length and never an HTTP 500. An empty array is "no
opinion": kube-scheduler's own scores decide, and the reason is counted.
"""

import logging
import time
from collections.abc import Callable, Collection

import msgspec
import numpy as np
from aiohttp import web

from agent.cluster import objects
from agent.cluster.records import Pod
from agent.cluster.state import ClusterState
from agent.scheduling.candidates import LOWEST_SCORE
from agent.scheduling.decision import HIGHEST, Choice, decide_node, extender_scores
from agent.scheduling.guard import LivePolicy, held_back
from agent.scheduling.metrics import Metrics
from agent.scheduling.recorder import Recorder
from agent.settings import ServeSettings

log = logging.getLogger(__name__)
NEUTRAL = HIGHEST // 2
"""Score of a node that the agent does not know yet."""
MAX_REQUEST_BYTES = 256 << 20
"""5,000 whole node objects are about 60 MB."""
KEEP_ALIVE_SECONDS = 120.0
"""Above the 90 s after which kube-scheduler's client drops an idle connection itself."""


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


class HostPriority(msgspec.Struct, frozen=True, rename="pascal"):
    """One node's score in a prioritize answer."""

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

    def app(self) -> web.Application:
        """The HTTP application."""
        app = web.Application(client_max_size=MAX_REQUEST_BYTES)
        app.router.add_post("/filter", self._on_filter)
        app.router.add_post("/prioritize", self._on_prioritize)
        app.router.add_get("/healthz", self._on_healthz)
        app.router.add_get("/readyz", self._on_readyz)
        app.router.add_get("/metrics", self._on_metrics)
        return app

    # Verbs ----------------------------------------------------------------------------------

    def prioritize(self, body: bytes, began: float) -> list[HostPriority]:
        """Scores of the request's nodes, in its order; empty for no opinion.

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
        known = [name for name in names if name in state.rows]
        if not known:
            raise NoOpinionError("unknown_nodes")
        intended = state.suspend(pod.uid)
        try:
            choice, scores = self._score(pod, known, intended)
            if self._monotonic() - began > self._settings.budget_seconds:
                raise NoOpinionError("deadline_exceeded")
        except BaseException:
            if intended:
                state.assume(pod.uid, intended)
            raise
        if choice is not None:
            if pod.uid not in self._queued:
                self._recorder.decision("prioritize", choice, state, self._policy)
            best = max(known, key=scores.__getitem__)
            state.assume(pod.uid, best)
        return [HostPriority(name, scores.get(name, NEUTRAL)) for name in names]

    def _score(
        self, pod: Pod, names: list[str], intended: str
    ) -> tuple[Choice | None, dict[str, int]]:
        """The choice among the nodes that the guard lets through (None: it lets none), and all
        scores."""
        state, view = self._state, self._state.view
        rows = np.array([state.rows[name] for name in names], np.int64)
        reasons = held_back(view, pod, rows, self._settings.cpu_limit)
        for reason in ("cpu", "gpu_memory"):
            self._metrics.guarded.labels(reason).inc(int((reasons == reason).sum()))
        scores = dict.fromkeys(names, 0)
        free = np.flatnonzero(reasons == "")
        if not len(free):
            return None, scores
        slot = state.slots[pod.uid]
        choice = decide_node(view, self._policy.current, slot, rows[free])
        points = extender_scores(choice)
        if pod.uid in self._queued:
            points = self._prefer(intended, choice, points)
        for place, score in zip(free, points, strict=True):
            scores[names[place]] = score
        return choice, scores

    def _prefer(self, intended: str, choice: Choice, points: list[int]) -> list[int]:
        """Put the node that the queue chose first, unless another is now clearly better."""
        places = np.flatnonzero(choice.nodes == self._state.rows.get(intended, -1))
        if not len(places):
            return points
        place = int(places[0])
        lost = float(choice.scores.max() - choice.scores[place])
        if choice.rule_scores[place] <= LOWEST_SCORE or lost > self._settings.margin:
            return points
        points = [min(score, HIGHEST - 1) for score in points]
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
        known = [name for name in names if name in self._state.rows]
        rows = np.array([self._state.rows[name] for name in known], np.int64)
        reasons = held_back(self._state.view, pod, rows, self._settings.cpu_limit)
        return {
            name: _FAILED[str(reason)]
            for name, reason in zip(known, reasons, strict=True)
            if reason != ""
        }

    # HTTP -----------------------------------------------------------------------------------

    async def _on_prioritize(self, request: web.Request) -> web.Response:
        body = await request.read()
        return self._answer("prioritize", lambda began: self.prioritize(body, began))

    async def _on_filter(self, request: web.Request) -> web.Response:
        body = await request.read()
        return self._answer("filter", lambda _: self.filter(body))

    def _answer(self, verb: str, work: Callable[[float], object]) -> web.Response:
        began = self._monotonic()
        try:
            answer = web.Response(body=_encode(work(began)), content_type="application/json")
        except BadRequestError as error:
            answer = web.Response(status=400, text=f"{error}\n")
        self._metrics.answers.labels(verb).inc()
        self._metrics.seconds.labels(verb).observe(self._monotonic() - began)
        return answer

    async def _on_healthz(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _on_readyz(self, _: web.Request) -> web.Response:
        if self._fresh():
            return web.Response(text="ok\n")
        return web.Response(status=503, text="nodes and pods are not synced with the API server\n")

    async def _on_metrics(self, _: web.Request) -> web.Response:
        return web.Response(
            body=self._metrics.text(), headers={"Content-Type": "text/plain; version=0.0.4"}
        )
