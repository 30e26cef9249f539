"""Measured node use for tests: what node_exporter would tell, and a real Prometheus that reads it.

Called by the tests of safety and of crashes. Counters say when they were read: a scrape that was
held up on a busy machine would pass for another rate.
"""

import contextlib
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from examples.lab import prometheus
from examples.lab.control_plane import ControlPlane
from examples.processes import free_ports

PROMETHEUS = "prometheus"


class NodeExporter:
    """CPU seconds of some nodes at one address; ``use`` is the share of each node's, 0 to 1."""

    def __init__(self, use: dict[str, float]) -> None:
        self.use = use
        self._idle = dict.fromkeys(use, 0.0)
        self._at = self._began = time.monotonic()
        self._epoch = time.time()
        self._lock = threading.Lock()
        exporter = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = exporter.text().encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                with contextlib.suppress(ConnectionError):  # whoever asked was killed
                    self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def text(self) -> str:
        """Counters that have grown by the time since the last look, as use has been."""
        with self._lock:
            now = time.monotonic()
            for node, share in self.use.items():
                self._idle[node] += (now - self._at) * (1.0 - share)
            self._at, stamp = now, round((self._epoch + now - self._began) * 1e3)
            return "# TYPE node_cpu_seconds_total counter\n" + "".join(
                f'node_cpu_seconds_total{{cpu="0",mode="idle",node="{node}"}} {seconds} {stamp}\n'
                for node, seconds in self._idle.items()
            )

    def __enter__(self) -> "NodeExporter":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def run_prometheus(self, plane: ControlPlane, folder: Path) -> dict[str, Any]:
        """Start a Prometheus that scrapes it, and the agent's settings for that."""
        (port,) = free_ports(1)
        target = f"127.0.0.1:{self._server.server_address[1]}"
        config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
            "scrape_configs": [{"job_name": "nodes", "static_configs": [{"targets": [target]}]}],
        }
        program = plane.binaries / "prometheus"
        command = prometheus.command(program, folder / PROMETHEUS, config, port)
        plane.run(PROMETHEUS, command, ready=prometheus.ready_url(port))
        return {"prometheus_url": f"http://127.0.0.1:{port}", "seconds": 1.0, "window": "5s"}
