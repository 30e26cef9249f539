"""The end of the demo waits for the last word of a hub that was killed a moment before."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from examples.laptop import federation as module
from examples.laptop.federation import Federation
from examples.laptop.members import MEMBERS
from examples.processes import Supervisor, free_ports

POINTS = [[1.0, -2.0]]


class Hub(BaseHTTPRequestHandler):
    """Answers every question with a learning curve."""

    def do_GET(self) -> None:
        body = json.dumps({"points": POINTS, "rounds": []}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


class Reviving(Supervisor):
    """Brings a hub back at its second look."""

    looks = 0
    port = 0
    hub: ThreadingHTTPServer | None = None

    def watch(self) -> None:
        self.looks += 1
        if self.looks == 2:
            self.hub = ThreadingHTTPServer(("127.0.0.1", self.port), Hub)
            threading.Thread(target=self.hub.serve_forever).start()


@pytest.fixture
def supervisor() -> Iterator[Reviving]:
    made = Reviving(say=lambda _: None)
    (made.port,) = free_ports(1)
    yield made
    if made.hub is not None:
        made.hub.shutdown()
        made.hub.server_close()


@pytest.fixture
def federation(supervisor: Reviving, tmp_path: Path) -> Federation:
    """A federation of one member whose cluster is over; its hub was killed a moment ago."""
    north = MEMBERS[0]
    made = object.__new__(Federation)
    made.supervisor, made.run, made.members = supervisor, tmp_path, (north,)
    made.dashboard, made.clusters = f"http://127.0.0.1:{supervisor.port}", {}
    made.scales, made._last = {north.name: 1.0}, {north.name: {"over": True}}
    made.baseline = {north.name: SimpleNamespace(completion=np.ones(1))}
    return made


def test_curves_are_of_a_hub_that_came_back_in_the_last_moment(federation: Federation) -> None:
    live, _, curves = federation.finish()
    assert curves == {"north": POINTS}
    assert live["north"]["over"]


def test_hub_that_stays_away_costs_the_curves_and_not_the_end(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LAST_WORD_SECONDS", 0.0)
    monkeypatch.setattr(Reviving, "watch", lambda _: None)
    assert federation.finish()[2] == {"north": []}
