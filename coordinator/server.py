"""Runs the hub: link, round loop and dashboard in one process; called by ``coordinator serve``.

SIGTERM or SIGINT stops it cleanly: the round in progress is given up and its members are asked
again after the next start. A ``kill -9`` does no more harm than that.
"""

import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from sqlalchemy.exc import SQLAlchemyError
from starlette.applications import Starlette

from common.identity import read_key_pair
from common.weights import Arrays, write_atomic
from coordinator.link import LinkGrid
from coordinator.registry import Registry, told
from coordinator.rounds import RoundLoop
from coordinator.sessions import SessionServer, Terms
from coordinator.settings import CoordinatorSettings
from coordinator.setup import initialise, open_registry, utc_now

log = logging.getLogger(__name__)


def split(address: str) -> tuple[str, int]:
    """``host:port``, with the brackets of an IPv6 address taken off."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


@dataclass(frozen=True)
class Ports:
    """Where a running hub listens."""

    link: int
    dashboard: int


class Coordinator:
    """A hub in this process; tests and the server start and stop it alike."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        registry: Registry,
        terms: Terms,
        initial: Arrays,
        *,
        application: Callable[[Registry], Starlette] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``application`` makes the dashboard; None serves none. ``clock`` times the rounds."""
        self._settings, self._registry = settings, registry
        self._stop = threading.Event()
        self._sessions = SessionServer(
            registry, terms, max_message_bytes=settings.max_message_bytes
        )
        self.grid = LinkGrid(self._sessions)
        self.rounds = RoundLoop(self.grid, self.grid, registry, settings, initial, clock=clock)
        self._round_thread = threading.Thread(target=self._run_rounds, name="rounds", daemon=True)
        self._web: uvicorn.Server | None = None
        self._web_thread: threading.Thread | None = None
        self._application = application
        self.failure: Exception | None = None
        """What ended the round loop, if it was an error."""
        self.ended = threading.Event()
        """Set when the round loop has ended."""

    def start(self) -> Ports:
        """Listen and begin rounds; return the bound ports."""
        self._registry.all_disconnected()
        ca = initialise(self._settings, utc_now())
        pair = read_key_pair(self._settings.ca_dir, "server")
        host, port = split(self._settings.listen)
        link = self._sessions.start(self.grid, host, port, ca.certificate, pair)
        try:
            dashboard = self._start_web() if self._application is not None else 0
        except OSError:
            self._sessions.stop()
            raise
        self._round_thread.start()
        return Ports(link, dashboard)

    def _start_web(self) -> int:
        assert self._application is not None
        host, port = split(self._settings.dashboard_listen)
        listener = socket.create_server((host, port))
        bound: int = listener.getsockname()[1]
        # Health checks come every few seconds; a line for each would bury what matters.
        config = uvicorn.Config(
            self._application(self._registry), log_config=None, access_log=False
        )
        self._web = uvicorn.Server(config)
        self._web_thread = threading.Thread(
            target=self._web.run, kwargs={"sockets": [listener]}, name="dashboard", daemon=True
        )
        self._web_thread.start()
        return bound

    def _run_rounds(self) -> None:
        try:
            self.rounds.run(self._stop)
        except SQLAlchemyError as error:
            self.failure = error
            log.error("%s", told(error))
        except Exception as error:
            self.failure = error
            log.exception("the round loop failed")
        finally:
            self.ended.set()

    def stop(self) -> None:
        """Give up the round in progress and close everything."""
        self._stop.set()
        if self._round_thread.is_alive():
            self._round_thread.join()
        self._sessions.stop()
        if self._web is not None and self._web_thread is not None:
            self._web.should_exit = True
            self._web_thread.join()
        self._registry.all_disconnected()


def serve(
    settings: CoordinatorSettings,
    terms: Terms,
    initial: Arrays,
    application: Callable[[Registry], Starlette],
    ready_file: Path | None = None,
) -> int:
    """Run a hub until SIGTERM or SIGINT; return the process's exit status.

    ``ready_file`` receives, once everything listens, a JSON object with ``pid``, ``link_port`` and
    ``dashboard_port``.
    """
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    registry = open_registry(settings)
    coordinator = Coordinator(settings, registry, terms, initial, application=application)
    ports = coordinator.start()
    log.info("link on port %d, dashboard on port %d", ports.link, ports.dashboard)
    if ready_file is not None:
        ready = {"pid": os.getpid(), "link_port": ports.link, "dashboard_port": ports.dashboard}
        write_atomic(ready_file, json.dumps(ready).encode())
    try:
        # After max_rounds the hub stays up for its dashboard; a failed loop ends the process, so
        # that whatever supervises it starts it anew from the last checkpoint.
        while not stop.wait(0.2) and coordinator.failure is None:
            pass
    finally:
        coordinator.stop()
        registry.close()
    return 0 if coordinator.failure is None else 1
