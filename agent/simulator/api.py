"""Serves the subset of the Kubernetes API that a member's agent uses, over plain HTTP on loopback.

cluster.py builds the application over its store; anything that speaks to a real API server's
nodes, pods and metrics (list, watch, merge and JSON patches) can speak to it.
"""

import json
import logging
from collections.abc import Callable, Mapping

from aiohttp import web
from aiohttp.typedefs import Handler

from agent.simulator.patches import patch_pod
from agent.simulator.store import ApiError, Collection, Event, Json, Store

LOG = logging.getLogger(__name__)
BOOKMARK_SECONDS = 10.0
UNPLACED = "spec.nodeName="
"""The one field selector that is served, for lists: pods on no node yet."""
"""A watch that asked for bookmarks gets one this often, wall seconds."""
MAX_WATCH_SECONDS = 3600


class KubernetesApi:
    """The HTTP face of a store with a collection of nodes and one of pods.

    metrics: gives the items of the current ``NodeMetricsList``. progress: gives what
    ``/fedsched/progress`` shows. start: lets a waiting clock go. patched: told the key, the pod
    before and the pod after each accepted patch. monotonic: wall seconds.
    """

    def __init__(
        self,
        store: Store,
        collections: Mapping[str, Collection],
        *,
        metrics: Callable[[], list[Json]],
        progress: Callable[[], Json],
        start: Callable[[], None],
        patched: Callable[[str, Json, Json], None],
        monotonic: Callable[[], float],
        bookmark_seconds: float = BOOKMARK_SECONDS,
    ) -> None:
        self._store, self._collections = store, collections
        self._metrics, self._progress = metrics, progress
        self._start, self._patched = start, patched
        self._monotonic, self._bookmark_seconds = monotonic, bookmark_seconds

    def application(self) -> web.Application:
        """The aiohttp application."""
        app = web.Application(middlewares=[_refusals], client_max_size=1 << 20)
        for path in ("/healthz", "/livez", "/readyz"):
            app.router.add_get(path, _healthy)
        app.router.add_get("/version", _version)
        app.router.add_get("/api/v1/nodes", self._list_nodes)
        app.router.add_get("/api/v1/nodes/{name}", self._get_node)
        app.router.add_get("/api/v1/pods", self._list_pods)
        app.router.add_get("/api/v1/namespaces/{namespace}/pods/{name}", self._get_pod)
        app.router.add_patch("/api/v1/namespaces/{namespace}/pods/{name}", self._patch_pod)
        app.router.add_get("/apis/metrics.k8s.io/v1beta1/nodes", self._list_metrics)
        app.router.add_get("/fedsched/progress", self._show_progress)
        app.router.add_post("/fedsched/start", self._start_clock)
        return app

    async def _list_nodes(self, request: web.Request) -> web.StreamResponse:
        return await self._list_or_watch(request, self._collections["nodes"])

    async def _list_pods(self, request: web.Request) -> web.StreamResponse:
        return await self._list_or_watch(request, self._collections["pods"])

    async def _get_node(self, request: web.Request) -> web.StreamResponse:
        return self._get(self._collections["nodes"], request.match_info["name"])

    async def _get_pod(self, request: web.Request) -> web.StreamResponse:
        return self._get(self._collections["pods"], _pod_key(request))

    async def _patch_pod(self, request: web.Request) -> web.StreamResponse:
        pods, key = self._collections["pods"], _pod_key(request)
        body = await request.read()
        pods.body(key)  # 404 before anything about the patch
        before = pods.objects[key]
        after = patch_pod(before, request.headers.get("Content-Type", ""), body)
        if after != before:
            self._patched(key, before, after)
        return self._get(pods, key)

    async def _list_metrics(self, _: web.Request) -> web.StreamResponse:
        return _json(
            {
                "kind": "NodeMetricsList",
                "apiVersion": "metrics.k8s.io/v1beta1",
                "metadata": {},
                "items": self._metrics(),
            }
        )

    async def _show_progress(self, _: web.Request) -> web.StreamResponse:
        return _json(self._progress())

    async def _start_clock(self, _: web.Request) -> web.StreamResponse:
        self._start()
        return _json(self._progress())

    def _get(self, collection: Collection, key: str) -> web.Response:
        return _raw(_typed(collection, collection.body(key)))

    async def _list_or_watch(
        self, request: web.Request, collection: Collection
    ) -> web.StreamResponse:
        query = request.query
        watching = query.get("watch", "") in ("1", "true")
        unplaced = query.get("fieldSelector", "") == UNPLACED and not watching
        for selector in ("fieldSelector", "labelSelector", "sendInitialEvents"):
            served = selector == "fieldSelector" and unplaced
            if query.get(selector, "") not in ("", "false") and not served:
                raise ApiError(
                    400, "BadRequest", f"{selector} is not served here: list all and choose"
                )
        if watching:
            return await self._watch(request, collection)
        page = collection.page(_number(query, "limit", 0), query.get("continue", ""))
        bodies = page.bodies
        if unplaced:
            bodies = [body for body in bodies if not json.loads(body)["spec"].get("nodeName")]
        metadata: Json = {"resourceVersion": str(page.version)}
        if page.token:
            metadata |= {"continue": page.token, "remainingItemCount": page.remaining}
        head = {"kind": f"{collection.kind}List", "apiVersion": "v1", "metadata": metadata}
        items = b",".join(bodies)
        return _raw(json.dumps(head)[:-1].encode() + b',"items":[' + items + b"]}")

    async def _watch(self, request: web.Request, collection: Collection) -> web.StreamResponse:
        query = request.query
        bookmarks = query.get("allowWatchBookmarks", "") in ("1", "true")
        seconds = _number(query, "timeoutSeconds", MAX_WATCH_SECONDS) or MAX_WATCH_SECONDS
        version = _number(query, "resourceVersion", 0)
        if version == 0:  # any version will do: begin with all that is there
            page = collection.page()
            version = page.version
            pending = [Event(version, "ADDED", body) for body in page.bodies]
        else:
            pending = collection.since(version)  # 410 as an HTTP status while it still can be
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        try:
            try:
                await self._stream(response, collection, version, pending, seconds, bookmarks)
            except ApiError as error:  # fell out of the history: the stream ends with the reason
                await response.write(_event("ERROR", json.dumps(error.status()).encode()))
            await response.write_eof()
        except ConnectionError:
            LOG.debug("a watcher of %s left", collection.kind)
        return response

    async def _stream(
        self,
        response: web.StreamResponse,
        collection: Collection,
        version: int,
        pending: list[Event],
        seconds: float,
        bookmarks: bool,
    ) -> None:
        """Write ``pending`` and all that follows until ``seconds`` are over or the store closes."""
        now = self._monotonic()
        end, bookmark_at = now + seconds, now + self._bookmark_seconds
        while True:
            if pending:
                version = pending[-1].version
                await response.write(b"".join(_line(collection, event) for event in pending))
            now = self._monotonic()
            over = now >= end or self._store.closed
            if bookmarks and (over or now >= bookmark_at):
                # Changes of other collections move the version on too, and a bookmark is what
                # keeps a quiet watch from falling out of the history. No await stands between
                # these two lines, so nothing of this collection is missed.
                pending = collection.since(version)
                version = self._store.version
                lines = b"".join(_line(collection, event) for event in pending)
                await response.write(lines + _bookmark(collection, version))
                bookmark_at = now + self._bookmark_seconds
            if over:
                return
            pending = collection.since(version)
            if not pending:
                until = min(end, bookmark_at) if bookmarks else end
                await self._store.wait(max(until - self._monotonic(), 0.0))
                pending = collection.since(version)


@web.middleware
async def _refusals(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every refusal is a ``Status`` object, as of a real API server."""
    try:
        return await handler(request)
    except ApiError as error:
        return _json(error.status(), error.code)
    except web.HTTPException as error:
        reason = {404: "NotFound", 405: "MethodNotAllowed"}.get(error.status, "BadRequest")
        refusal = ApiError(error.status, reason, f"{request.method} {request.path}: {error.reason}")
        return _json(refusal.status(), error.status)


async def _healthy(_: web.Request) -> web.Response:
    return web.Response(text="ok")


async def _version(_: web.Request) -> web.Response:
    return _json({"major": "1", "minor": "36", "gitVersion": "v1.36.0+fedsched-embedded"})


def _pod_key(request: web.Request) -> str:
    return f"{request.match_info['namespace']}/{request.match_info['name']}"


def _number(query: Mapping[str, str], name: str, default: int) -> int:
    text = query.get(name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 19):
        raise ApiError(400, "BadRequest", f"{name} is not a number of zero or more: {text[:40]!r}")
    return int(text)


def _typed(collection: Collection, body: bytes) -> bytes:
    """The object with the kind that list items leave out."""
    head = f'{{"kind":"{collection.kind}","apiVersion":"{collection.api_version}",'
    return head.encode() + body[1:]


def _event(change: str, body: bytes) -> bytes:
    return b'{"type":"' + change.encode() + b'","object":' + body + b"}\n"


def _line(collection: Collection, event: Event) -> bytes:
    return _event(event.change, _typed(collection, event.body))


def _bookmark(collection: Collection, version: int) -> bytes:
    metadata = {"resourceVersion": str(version), "creationTimestamp": None}
    body = json.dumps({"metadata": metadata, "spec": {}, "status": {}}).encode()
    return _event("BOOKMARK", _typed(collection, body))


def _raw(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")


def _json(item: Json, status: int = 200) -> web.Response:
    return web.json_response(item, status=status)
