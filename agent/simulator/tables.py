"""Finds trace files, and reads text tables row by row for traces.py.

A trace of a million rows with one bad cell is useless to its owner when the error only says
"could not convert string to float"; every check here therefore knows where it stands.
"""

import csv
import io
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

SHIPPED = Path(__file__).resolve().parents[2] / "examples" / "traces"
ENVIRONMENT = "FEDSCHED_TRACES"
LARGEST = 2.0**31  # no trace counts so much; more would not survive the step to int64 arrays


class TraceError(ValueError):
    """A trace could not be read; says where it is wrong and what was expected there.

    Attributes: ``path`` the file, ``line`` its 1-based line (None: the file as a whole) and
    ``column`` the column's name or number (None: the whole line).
    """

    def __init__(
        self, path: Path, problem: str, *, line: int | None = None, column: str | None = None
    ) -> None:
        place = str(path)
        if line is not None:
            place += f", line {line}"
        if column is not None:
            place += f", column {column}"
        super().__init__(f"{place}: {problem}")
        self.path, self.line, self.column = path, line, column


def _folders(environ: Mapping[str, str] | None) -> list[Path]:
    """Where to look: the named folder, then the shipped one."""
    named = (os.environ if environ is None else environ).get(ENVIRONMENT, "")
    if not named:
        return [SHIPPED]
    if not Path(named).is_dir():
        # A typing error must not silently turn a benchmark into one on the small slices.
        raise TraceError(
            Path(named),
            f"{ENVIRONMENT} names this folder and it is not there; correct it, or unset it "
            f"to use the shipped slices in {SHIPPED}",
        )
    return [Path(named), SHIPPED]


def find_traces(environ: Mapping[str, str] | None = None) -> Path:
    """The folder of traces: where FEDSCHED_TRACES points, else the shipped ``examples/traces``.

    Errors: TraceError, naming both places, when neither is there.
    """
    for folder in _folders(environ):
        if folder.is_dir():
            return folder
    raise TraceError(
        SHIPPED,
        f"no traces here, and {ENVIRONMENT} is not set; run from a checkout of the project, "
        f"or set {ENVIRONMENT} to a folder with gavel/, philly/, openb/ or swf/ in it",
    )


def trace_file(name: str, environ: Mapping[str, str] | None = None) -> Path:
    """The file ``name`` (such as ``gavel/msr_seed0_103959.csv``), shipped slices as second choice.

    Errors: TraceError, naming every place that was searched.
    """
    places = [folder / name for folder in _folders(environ)]
    for place in places:
        if place.is_file():
            return place
    raise TraceError(
        places[0],
        "no such trace file (searched " + ", ".join(map(str, places)) + f"); put it there, or "
        f"set {ENVIRONMENT} to a folder that has it",
    )


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a table: its cells, and where they stand."""

    path: Path
    line: int
    cells: list[str]
    columns: dict[str, int]

    def fail(self, column: str, expected: str) -> TraceError:
        """The error for a cell that is not what was expected; the caller raises it."""
        number = self.columns[column] + 1
        return TraceError(
            self.path,
            f"expected {expected}, found {self.text(column)!r}",
            line=self.line,
            column=f"{number} ({column})",
        )

    def text(self, column: str) -> str:
        """The cell without the blanks around it."""
        return self.cells[self.columns[column]].strip()

    def has(self, column: str) -> bool:
        """True when the table has this column and the cell is not blank."""
        return column in self.columns and bool(self.text(column))

    def number(self, column: str, *, minimum: float = -math.inf) -> float:
        """The cell as a finite number of at least ``minimum``."""
        try:
            value = float(self.text(column))
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < minimum:
            raise self.fail(column, _expected("a number", minimum))
        return value

    def positive(self, column: str) -> float:
        """The cell as a finite number above zero."""
        value = self.number(column)
        if value <= 0:
            raise self.fail(column, "a number above 0")
        return value

    def integer(self, column: str, *, minimum: float = -math.inf) -> int:
        """The cell as a whole number (``4`` and ``4.0`` alike), ``minimum`` to 2^31."""
        expected = _expected("a whole number", minimum)
        try:
            value = float(self.text(column))
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value != int(value) or not minimum <= value <= LARGEST:
            raise self.fail(column, expected)
        return int(value)

    def moment(self, column: str) -> float:
        """The cell, a date and time without a zone, in seconds since 1970 on the same clock."""
        try:
            value = datetime.fromisoformat(self.text(column))
        except ValueError:
            raise self.fail(column, "a time such as 2017-10-09 07:01:55") from None
        return (value.replace(tzinfo=None) - datetime(1970, 1, 1)).total_seconds()


def _expected(what: str, minimum: float) -> str:
    return what if minimum == -math.inf else f"{what} of at least {minimum:g}"


def read_text(path: Path) -> str:
    """The whole file as text; TraceError when it cannot be opened, is empty or is not UTF-8."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TraceError(path, f"cannot be read: {error.strerror or error}") from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        start = data.rfind(b"\n", 0, error.start) + 1
        raise TraceError(
            path,
            f"expected UTF-8 text, found the byte 0x{data[error.start]:02x}; "
            "save the file as UTF-8, uncompressed",
            line=data.count(b"\n", 0, error.start) + 1,
            column=f"at byte {error.start - start + 1}",
        ) from error
    if not text.strip():
        raise TraceError(path, "the file is empty", line=1)
    return text


def read_csv(path: Path, required: tuple[str, ...]) -> Iterator[Row]:
    """The rows below a header that has at least the ``required`` columns, in any order.

    Blank lines are passed over. Errors: TraceError for a missing or doubled column, for a row
    with too few or too many cells, and for a table without rows.
    """
    reader = csv.reader(io.StringIO(read_text(path), newline=None), strict=True)
    columns: dict[str, int] = {}
    rows = 0
    try:
        for cells in reader:
            if not any(cell.strip() for cell in cells):
                continue
            if not columns:
                columns = _header(path, reader.line_num, cells, required)
                continue
            if len(cells) != len(columns):
                # The first cell that is missing, or the first one too many.
                column = str(min(len(cells), len(columns)) + 1)
                if len(cells) < len(columns):
                    column += f" ({list(columns)[len(cells)]})"
                raise TraceError(
                    path,
                    f"expected {len(columns)} cells, found {len(cells)}",
                    line=reader.line_num,
                    column=column,
                )
            rows += 1
            yield Row(path, reader.line_num, cells, columns)
    except csv.Error as error:
        raise TraceError(path, f"not a CSV row: {error}", line=reader.line_num) from error
    if not rows:
        raise TraceError(path, "the table has a header and no rows", line=reader.line_num)


def _header(path: Path, line: int, cells: list[str], required: tuple[str, ...]) -> dict[str, int]:
    columns: dict[str, int] = {}
    for number, cell in enumerate(cells):
        name = cell.strip()
        if name in columns:
            raise TraceError(
                path,
                "the header names this column twice",
                line=line,
                column=f"{number + 1} ({name})",
            )
        columns[name] = number
    for name in required:
        if name not in columns:
            raise TraceError(
                path,
                f"the header lacks this column; expected {','.join(required)}, "
                f"found {','.join(columns)}",
                line=line,
                column=name,
            )
    return columns


def unique_index(names: list[str]) -> Callable[[str], int]:
    """A function that numbers names in the order it meets them, appending each to ``names``."""
    index = {name: number for number, name in enumerate(names)}

    def number(name: str) -> int:
        found = index.setdefault(name, len(names))
        if found == len(names):
            names.append(name)
        return found

    return number
