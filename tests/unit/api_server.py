"""A small API server for tests of the agent's client: scripted lists and watches over real HTTP."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

Json = dict[str, Any]


def node_json(name: str, **changes: Any) -> Json:
    return {
        "metadata": {"name": name, "labels": {"nvidia.com/gpu.product": "v100"}},
        "spec": {},
        "status": {
            "allocatable": {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": "4"},
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    } | changes


def pod_json(name: str, *, node: str = "", gates: tuple[str, ...] = (), **meta: Any) -> Json:
    return {
        "metadata": {"name": name, "uid": f"uid-{name}", "namespace": "default", **meta},
        "spec": {
            "containers": [{"resources": {"requests": {"cpu": "1", "nvidia.com/gpu": "1"}}}],
            "schedulingGates": [{"name": gate} for gate in gates],
            **({"nodeName": node} if node else {}),
        },
        "status": {"phase": "Pending"},
    }


class ApiServer:
    """Serves ``pods`` and ``nodes`` in pages; watches play ``watches`` one after another.

    A watch is a list of lines (bytes, or an object to encode) that is sent and then closed; an
    integer is an HTTP status; when the script is over, watches stay open and silent.
    """

    def __init__(self) -> None:
        self.objects: dict[str, list[Json]] = {"pods": [], "nodes": []}
        self.metrics: list[Json] | None = None
        self.watches: list[list[Any] | int] = []
        self.list_status: list[int] = []
        self.patch_status: list[int] = []
        self.queries: list[dict[str, str]] = []
        self.patches: list[tuple[str, str, Any]] = []
        self.page = 2
        self.url = ""

    async def collection(self, request: web.Request) -> web.StreamResponse:
        kind, query = request.match_info["kind"], dict(request.query)
        self.queries.append(query)
        if "watch" in query:
            return await self.watch(request)
        if self.list_status:
            status = self.list_status.pop(0)
            if status != 200:
                return web.json_response({"kind": "Status", "code": status}, status=status)
        start = int(query.get("continue", "0"))
        items = self.objects[kind][start : start + self.page]
        more = start + self.page < len(self.objects[kind])
        meta = {"resourceVersion": "10"} | ({"continue": str(start + self.page)} if more else {})
        return web.json_response({"metadata": meta, "items": items})

    async def watch(self, request: web.Request) -> web.StreamResponse:
        script = self.watches.pop(0) if self.watches else None
        if isinstance(script, int):
            return web.json_response({"kind": "Status", "code": script}, status=script)
        answer = web.StreamResponse()
        await answer.prepare(request)
        for line in script or ():
            await answer.write(line if isinstance(line, bytes) else json.dumps(line).encode())
            await answer.write(b"\n")
        if script is None:
            await asyncio.Event().wait()
        return answer

    async def node_metrics(self, _: web.Request) -> web.Response:
        if self.metrics is None:
            return web.Response(status=404)
        return web.json_response({"metadata": {}, "items": self.metrics})

    async def patch(self, request: web.Request) -> web.Response:
        self.patches.append(
            (request.path, request.headers["Content-Type"], json.loads(await request.read()))
        )
        status = self.patch_status.pop(0) if self.patch_status else 200
        if status == 200:
            for pod in self.objects["pods"]:
                if pod["metadata"]["name"] == request.match_info["name"]:
                    pod["spec"]["schedulingGates"] = []
        return web.json_response({}, status=status)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["ApiServer"]:
        app = web.Application()
        app.router.add_get("/api/v1/{kind:nodes|pods}", self.collection)
        app.router.add_get("/apis/metrics.k8s.io/v1beta1/nodes", self.node_metrics)
        app.router.add_patch("/api/v1/namespaces/{ns}/pods/{name}", self.patch)
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()


def event(kind: str, data: Json, version: int) -> Json:
    meta = {**data["metadata"], "resourceVersion": str(version)}
    return {"type": kind, "object": data | {"metadata": meta}}


async def until(condition: Callable[[], bool]) -> None:
    """Let the event loop work until the condition holds; the test's own time limit ends it."""
    while not condition():
        await asyncio.sleep(0.002)
