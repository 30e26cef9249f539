"""The demo's live display: a table that is redrawn on a terminal, a line now and then elsewhere."""

import time
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from examples.laptop.federation import Federation

LINE_SECONDS = 15.0


def _percent(live: float, baseline: float) -> str:
    return f"{100.0 * (live / baseline - 1.0):+.0f} %"


class Display:
    """Shows what :meth:`Federation.poll` found; a context manager."""

    def __init__(self, console: Console, federation: Federation, seconds: float) -> None:
        self._console, self._federation, self._seconds = console, federation, seconds
        self._began = time.monotonic()
        self._line = 0.0
        self._live = Live(console=console, refresh_per_second=2) if console.is_terminal else None

    def __enter__(self) -> "Display":
        if self._live is not None:
            self._live.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.__exit__(kind, error, trace)

    def show(self, found: dict[str, Any]) -> None:
        """Draw it, or print a line where nobody can redraw one."""
        if self._live is not None:
            self._live.update(self._drawn(found))
            return
        now = time.monotonic()
        if now - self._line >= LINE_SECONDS:
            self._line = now
            self._console.print(self._said(found), highlight=False, soft_wrap=True)

    def _drawn(self, found: dict[str, Any]) -> Group:
        table = Table(expand=False)
        table.add_column("member")
        for column in (
            "jobs placed", "ended", "mean, h", "to Least-\nAllocated*", "no answer",
            "learning\nrounds", "policy", "OOM kills",
        ):  # fmt: skip
            table.add_column(column, justify="right", no_wrap=True)
        for member in self._federation.members:
            table.add_row(*self._row(member.name, found))
        elapsed = time.monotonic() - self._began
        bar = ProgressBar(total=self._seconds, completed=min(elapsed, self._seconds), width=50)
        return Group(
            table,
            Text(
                "* mean completion time of the jobs that ended, to LeastAllocated on the same jobs"
            ),
            Text(self._hub(found)),
            Text(f"dashboard: {self._federation.dashboard}"),
            bar,
        )

    def _row(self, name: str, found: dict[str, Any]) -> list[str]:
        cluster, learner = found.get(name) or {}, found.get(f"{name} learner") or {}
        so_far = self._federation.so_far(name)
        failures = ((cluster.get("extender") or {}).get("failures") or {}).values()
        policy = str(learner.get("policy") or "")
        return [
            name,
            f"{cluster.get('placed', 0)}/{cluster.get('jobs', '?')}",
            str(cluster.get("finished", 0)),
            "–" if so_far is None else f"{so_far[0] / 3600:.1f}",
            "–" if so_far is None else _percent(*so_far),
            str(sum(failures)),
            str(learner.get("learning_rounds", 0)),
            policy[:8] or "rule",
            str(cluster.get("oom_kills", 0)),
        ]

    def _hub(self, found: dict[str, Any]) -> str:
        overview = found.get("overview") or {}
        rounds = [r for r in found.get("rounds") or [] if r.get("finished")]
        up, down = (sum(r[f"bytes_{way}"] for r in rounds) / 1e3 for way in ("in", "out"))
        return (
            f"{len(rounds)} federation rounds, {up:.0f} kB up, {down:.0f} kB down. "
            f"{overview.get('sentence', '')}"
        )

    def _said(self, found: dict[str, Any]) -> str:
        parts = []
        for member in self._federation.members:
            row = self._row(member.name, found)
            parts.append(f"{row[0]} {row[1]} placed, {row[4]} to LeastAllocated, policy {row[7]}")
        elapsed = time.monotonic() - self._began
        return f"[{elapsed:4.0f} s] {'; '.join(parts)}; {self._hub(found)}"
