"""What a suite of the benchmark is: its cells, what they yield and which arms are compared.

Each suite's module implements :class:`Suite`; ``agent.benchmark.runner`` works its cells off and
``agent.benchmark.report`` compares the arms.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Generic, Literal, Protocol, TypeVar

import msgspec

Size = Literal["reduced", "full"]
Figures = dict[str, float]
"""By metric, such as ``mean_completion`` (s), ``p99`` (s), ``makespan`` (s) or ``unfinished``."""
Say = Callable[[str], None]
Count = Annotated[int, msgspec.Meta(ge=1)]
Several = Annotated[int, msgspec.Meta(ge=2)]
"""Of windows that are to have an interval, which one of them cannot have."""
T = TypeVar("T")


class BySize(msgspec.Struct, Generic[T], frozen=True, forbid_unknown_fields=True):
    """What is another at each size, such as ``{reduced: 10, full: 30}`` in a suite's data.

    What it may be is said by the type, as in ``BySize[Count]``, so that a wrong one is refused by
    its key, as in ``windows.full``.
    """

    reduced: T
    full: T

    def of(self, size: Size) -> T:
        """What it is at one size."""
        return self.full if size == "full" else self.reduced


class Cell(msgspec.Struct, frozen=True):
    """One arm on one window in one setting: the unit of work, done or not done."""

    suite: str
    setting: str
    """What is the same for all arms of a comparison, such as ``load 0.8``."""
    arm: str
    """The policy, such as ``least-allocated`` or ``ablation: no mask``."""
    window: str
    """Which jobs. Cells of equal setting and window are paired: same jobs, same random numbers."""
    trace: str
    """The cluster that the window is of; intervals are clustered by it."""
    seed: int


class Comparison(msgspec.Struct, frozen=True):
    """Arms against one baseline by one metric. Its rows are one family for Holm's adjustment."""

    metric: str
    baseline: str
    arms: tuple[str, ...] = ()
    """Empty: every other arm."""
    settings: tuple[str, ...] = ()
    """Empty: all."""
    pooled: bool = True
    """Over all settings together; otherwise one row for each setting."""
    band: float = 0.0
    """No worse: the worse end of the interval is at most this (0.01 is 1 %) beyond the baseline."""
    difference: bool = False
    """Of the figures' difference and not of their ratio: for shares, which may be 0."""
    higher_is_better: bool = False
    title: str = ""
    """What is asked, in plain words."""


class Row(msgspec.Struct, frozen=True):
    """One arm against the baseline: a ratio (1 is equal) or a difference (0 is equal)."""

    arm: str
    setting: str
    """``all`` where settings are pooled."""
    mean: float
    low: float
    high: float
    """95 % interval."""
    windows: int
    traces: int
    p: float
    p_holm: float
    verdict: str
    """better, worse, no worse, or undecided."""


class Result(msgspec.Struct, frozen=True):
    """A comparison with its rows."""

    comparison: Comparison
    rows: tuple[Row, ...]


class Curve(msgspec.Struct, frozen=True):
    """A line chart that a suite adds to its report: figures over a number, a line for each arm."""

    title: str
    x: str
    y: str
    """Labels of the axes, with units."""
    lines: dict[str, list[tuple[float, float]]]
    """(x, y) by name."""
    log_x: bool = False
    log_y: bool = False


Means = Mapping[str, Mapping[str, Mapping[str, float]]]
"""Mean of a metric over windows: [setting][arm][metric]."""


class Suite(Protocol):
    """A suite. Instances are made by calling the object that ``SUITES`` names, in each process."""

    name: str
    """Also of its data, ``agent/benchmark/suites/<name>.yaml``."""
    title: str
    """One line: what is compared where."""
    comparisons: Sequence[Comparison]
    timed: frozenset[str] = frozenset()
    """Metrics that measure the machine and differ from run to run; they are reported apart."""
    units: Mapping[str, tuple[str, float]] = {}
    """How reports show a metric: unit and how much of the figure is one of it, as in
    ``{"mean_completion": ("h", 3600.0)}``."""
    notes: Sequence[str] = ()
    """What a reader must know of how the figures came about, in plain words."""

    def cells(self, size: Size) -> list[Cell]:
        """All cells, those that share what is costly to make next to each other."""
        ...

    def prepare(self, size: Size, folder: Path, say: Say) -> None:
        """Fit what arms need and leave it in ``folder``: deterministic, and resumed if it broke."""

    def run(self, cell: Cell, folder: Path) -> Figures:
        """Work one cell off, in a worker process: the same figures to the digit each time."""
        ...

    def inputs(self, size: Size) -> Sequence[Path]:
        """Files besides data and code that the figures depend on: traces, policies."""
        del size
        return ()

    def findings(self, means: Means, results: Sequence[Result]) -> list[str]:
        """What the figures say, in plain words, each a sentence of the report; the timed metrics
        are not in ``means``."""
        del means, results
        return []

    def curves(self, means: Means) -> list[Curve]:
        """Line charts to add to the report; ``means`` has the timed metrics too."""
        del means
        return []
