"""The hub's web application: page, read-only JSON API, metrics and health; mounted by the server.

It changes nothing and holds no state of its own: every answer is read from the registry. It has no
sign-in, so it listens on loopback unless an operator puts a proxy before it.
"""

import logging
import time
from collections.abc import Callable
from typing import Any

from sqlalchemy.exc import SQLAlchemyError
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.metrics import DECLARED
from coordinator.dashboard import reports
from coordinator.dashboard.assets import STATIC, plotly
from coordinator.dashboard.exposition import exposition
from coordinator.reader import Reader

log = logging.getLogger(__name__)

MAX_LIMIT = 2000
DEFAULT_LIMIT = 100

SECURITY_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}
"""Sent with every answer. No inline script or style, nothing from elsewhere, no framing."""


class SecurityHeaders:
    """Adds the headers to every answer, errors and files too."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on and complete the head of its answer."""

        async def complete(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers[name] = value
                if "cache-control" not in headers:
                    live = "etag" not in headers
                    headers["cache-control"] = "no-store" if live else "no-cache"
            await send(message)

        await self._app(scope, receive, complete)


def create_app(registry: Reader, *, clock: Callable[[], float] = time.time) -> Starlette:
    """The application over a registry.

    Args:
        registry: what to show; only its reading half is used, from several threads.
        clock: seconds since the epoch.
    """

    def page(_request: Request) -> Response:
        return FileResponse(STATIC / "index.html", media_type="text/html")

    def overview(request: Request) -> Response:
        _parameters(request)
        return _answer(reports.overview(registry, clock()))

    def rounds(request: Request) -> Response:
        limit, since = _window(request)
        return _answer({"rounds": reports.rounds(registry, limit, since)})

    def members(request: Request) -> Response:
        _parameters(request)
        return _answer({"now": clock(), "members": reports.members(registry)})

    def metrics(request: Request) -> Response:
        limit, since = _window(request, "name")
        member, name = request.path_params["member"], request.query_params.get("name")
        if not reports.has_member(registry, member):
            raise HTTPException(404, f"no member is called {member!r}; see /api/v1/members")
        if name is None:
            names = registry.metric_names(member)
            return _answer({"member": member, "names": names})
        if name not in DECLARED:
            raise HTTPException(400, f"no metric is called {name!r}; see /api/v1/metrics")
        return _answer(reports.curve(registry, member, name, limit, since))

    def meanings(request: Request) -> Response:
        _parameters(request)
        return _answer({"metrics": DECLARED})

    def events(request: Request) -> Response:
        limit, since = _window(request)
        return _answer({"events": reports.events(registry, limit, since)})

    def prometheus(_request: Request) -> Response:
        kind = "text/plain; version=0.0.4; charset=utf-8"
        return Response(exposition(registry), headers={"content-type": kind})

    def healthy(_request: Request) -> Response:
        return PlainTextResponse("ok\n")

    def ready(_request: Request) -> Response:
        registry.overview()
        return PlainTextResponse("ok\n")

    api = [
        Route("/overview", overview),
        Route("/rounds", rounds),
        Route("/members", members),
        Route("/members/{member}/metrics", metrics),
        Route("/metrics", meanings),
        Route("/events", events),
    ]
    return Starlette(
        routes=[
            Route("/", page),
            Mount("/api/v1", routes=api),
            Route("/metrics", prometheus),
            Route("/healthz", healthy),
            Route("/readyz", ready),
            Route("/static/plotly.min.js", plotly),
            Mount("/static", StaticFiles(directory=STATIC)),
        ],
        middleware=[Middleware(SecurityHeaders)],
        exception_handlers={HTTPException: _refuse, SQLAlchemyError: _unavailable},
    )


def _answer(value: Any) -> Response:
    return JSONResponse(reports.finite(value))


def _refuse(_request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    headers = dict(error.headers or {})
    return JSONResponse({"error": error.detail}, status_code=error.status_code, headers=headers)


def _unavailable(_request: Request, error: Exception) -> Response:
    # The database's own words may hold its address; they belong in the hub's log.
    log.error("the registry did not answer the dashboard: %s", error)
    text = "the registry does not answer; see the hub's log, and check registry_url and its disk"
    return JSONResponse({"error": text}, status_code=503)


def _parameters(request: Request, *allowed: str) -> None:
    unknown = sorted(set(request.query_params) - set(allowed))
    if unknown:
        known = f"known here: {', '.join(allowed)}" if allowed else "there are none here"
        raise HTTPException(400, f"unknown parameter {', '.join(unknown)}; {known}")


def _window(request: Request, *more: str) -> tuple[int, float]:
    """``limit`` and ``since`` of a request; HTTPException 400 when they are no such numbers."""
    _parameters(request, "limit", "since", *more)
    text = request.query_params.get("limit", str(DEFAULT_LIMIT))
    # str.isdecimal knows other scripts' digits too, and int() reads them; both are harmless here.
    limit = int(text) if text.isdecimal() and len(text) < 10 else 0
    if not 1 <= limit <= MAX_LIMIT:
        raise HTTPException(400, f"limit must be a whole number from 1 to {MAX_LIMIT}")
    try:
        since = float(request.query_params.get("since", "0"))
    except ValueError:
        since = -1.0
    if not 0.0 <= since < 1e15:
        raise HTTPException(400, "since must be a number from 0: a round, or seconds (epoch)")
    return limit, since
