"""The commands of ``fedsched benchmark``, mounted by ``common.cli``."""

import contextlib
import functools
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from agent.benchmark import documents
from agent.benchmark.fingerprint import fingerprint
from agent.benchmark.latency import latency
from agent.benchmark.level_search import tune_level
from agent.benchmark.quick import engine, rules
from agent.benchmark.report import decode, encode, make_report
from agent.benchmark.rule_search import tune_rule
from agent.benchmark.runner import read_times, run
from agent.benchmark.suite import Size
from agent.benchmark.suites import HELP, SUITES, load_suite
from agent.data_files import DataFileError
from agent.simulator.traces import TraceError
from common.weights import write_atomic

app = typer.Typer(no_args_is_help=True, help="Compare policies, and measure what decisions cost.")
console = Console()

Full = Annotated[bool, typer.Option("--full", help="All windows and seeds, not the reduced size.")]
Output = Annotated[Path, typer.Option(help="Results, and what is done of a run that broke off.")]
Workers = Annotated[int, typer.Option(min=1, help="Processes that work cells off.")]
Fresh = Annotated[
    bool, typer.Option("--fresh/--resume", help="Work everything off anew, or what is not done.")
]
Docs = Annotated[
    Path | None,
    typer.Option(help="Also write results.md there, and JSON and pictures to results/ in it."),
]
RESULTS = Path("benchmark-results")
FAILURES = (DataFileError, TraceError, RuntimeError, ValueError, OSError)
"""What a command says in a line."""


def suite(name: str, size: Size, output: Path, workers: int, fresh: bool) -> bool:
    """Run one suite, show its report and leave JSON and pictures; whether every cell succeeded.

    Raises:
        RuntimeError, ValueError: as ``runner.run`` and ``report.make_report`` do.
    """
    chosen = load_suite(name)
    cells = chosen.cells(size)
    outcome = run(chosen, size, output, workers=workers, fresh=fresh, console=console, cells=cells)
    if outcome.resumed:
        console.print(f"{outcome.resumed} of {len(cells)} cells were done before.")
    report = make_report(chosen, size, outcome, cells)
    write_atomic(output / f"{name}.json", encode(report))
    documents.show(report, console)
    draw(output, name)
    show_times(output, size, [name])
    return not outcome.failures


def show_times(output: Path, size: Size, names: Sequence[str]) -> None:
    """Print what suites took, all runs together that their figures are from, and the sum.

    Not of suites whose figures are of another version of them than was timed.
    """
    known, spent = read_times(output), {}
    for name in names:
        with contextlib.suppress(*FAILURES):  # said when the suite itself was tried
            one = known.get(f"{name} {size}")
            if one is not None and one.fingerprint == fingerprint(load_suite(name), size):
                spent[name] = one
    for name, one in spent.items():
        console.print(documents.spent_line(name, [one]), soft_wrap=True)
    if len(spent) > 1:
        console.print(documents.spent_line("all", list(spent.values())), soft_wrap=True)


def draw(folder: Path, name: str) -> None:
    """Draw the pictures of a report in ``folder``, where matplotlib is installed."""
    try:
        from agent.benchmark import plots  # it takes a second to import
    except ModuleNotFoundError as error:
        console.print(f"no pictures without {error.name}: pip install 'fedsched[demo]'")
        return
    plots.draw(decode((folder / f"{name}.json").read_bytes()), folder)


def _careful(name: str, size: Size, output: Path, workers: int, fresh: bool) -> bool:
    """Run a suite; what goes wrong is said in a line."""
    try:
        return suite(name, size, output, workers, fresh)
    except KeyboardInterrupt:
        console.print("stopped; the same command goes on with what is not done")
        raise typer.Exit(130) from None
    except FAILURES as error:
        console.print(f"[red]error[/red]: {error}", soft_wrap=True)
        return False


def _plain(command: Callable[..., None]) -> Callable[..., None]:
    """The command, with what goes wrong said in a line."""

    @functools.wraps(command)
    def careful(**options: Any) -> None:
        try:
            command(**options)
        except FAILURES as error:
            console.print(f"[red]error[/red]: {error}", soft_wrap=True)
            raise typer.Exit(1) from None

    return careful


def publish(output: Path, docs: Path) -> None:
    """Copy reports and pictures to ``docs/results`` and render ``docs/results.md`` from them."""
    kept = docs / "results"
    kept.mkdir(parents=True, exist_ok=True)
    for name in SUITES:
        if (output / f"{name}.json").exists():
            for old in kept.glob(f"{name}*.svg"):
                old.unlink()
            found = [output / f"{name}.json", *output.glob(f"{name}.svg")]
            for file in [*found, *output.glob(f"{name}-[0-9].svg")]:
                shutil.copyfile(file, kept / file.name)
    write_atomic(docs / "results.md", documents.results_page(kept, docs).encode())


def _one(name: str) -> Callable[..., None]:
    """The command that runs one suite."""

    def command(
        full: Full = False,
        output: Output = RESULTS,
        workers: Workers = 2,
        fresh: Fresh = False,
    ) -> None:
        if not _careful(name, "full" if full else "reduced", output, workers, fresh):
            raise typer.Exit(1)

    return command


def run_all(
    full: Full = False,
    output: Output = RESULTS,
    workers: Workers = 2,
    fresh: Fresh = False,
    docs: Docs = None,
) -> None:
    """Every suite in turn, and the page of all results."""
    size: Size = "full" if full else "reduced"
    failed = [name for name in SUITES if not _careful(name, size, output, workers, fresh)]
    _pages(output, None if failed else docs)
    show_times(output, size, list(SUITES))
    if failed:
        left = f"; {docs} is left as it was" if docs else ""
        console.print(f"[red]not whole[/red]: {', '.join(failed)}{left}")
        raise typer.Exit(1)


def report(
    output: Output = RESULTS,
    docs: Docs = None,
) -> None:
    """Render the page of all results anew from the reports that are there."""
    _pages(output, docs)


def _pages(output: Path, docs: Path | None) -> None:
    """Pictures and pages of the reports in ``output``."""
    try:
        reports = documents.read_reports(output)
        if not reports:
            raise DataFileError(f"no reports in {output}: run a suite with that --output first")
        for found in reports:
            draw(output, found.suite)
        write_atomic(output / "results.md", documents.results_page(output, output).encode())
        if docs is not None:
            publish(output, docs)
    except DataFileError as error:
        console.print(f"[red]error[/red]: {error}", soft_wrap=True)
        raise typer.Exit(1) from None


for _name in SUITES:
    app.command(_name, help=HELP[_name])(_one(_name))
app.command("all")(run_all)
app.command()(report)
app.command()(rules)
app.command()(engine)
app.command()(latency)
app.command()(_plain(tune_rule))
app.command()(_plain(tune_level))
