"""What the demo cannot do it says at once, with the cure, and leaves nothing running."""

import contextlib
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from agent.simulator.traces import trace_file
from examples.laptop.__main__ import app
from examples.laptop.members import HELD_OUT_FROM, MEMBERS
from examples.processes import SIGNALS, Process, StoppedError, Supervisor, fedsched, stoppable


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def said(result: Result) -> str:
    """Its output in one line: a console breaks lines where it likes."""
    return " ".join(result.output.split())


@pytest.mark.parametrize("option", ["--out", "--json"])
def test_place_that_cannot_be_written_is_refused_before_anything_starts(
    tmp_path: Path, option: str
) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("kept")
    places = {"--out": tmp_path / "out", "--json": tmp_path / "figures.json"}
    places[option] = in_the_way / "below"
    result = run(*(part for pair in places.items() for part in pair))
    assert result.exit_code == 1
    assert "cannot be written" in said(result)
    assert "name another place with --out or --json" in said(result)
    assert in_the_way.read_text() == "kept"


def test_figures_of_an_earlier_run_stay_until_there_are_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = tmp_path / "figures.json"
    figures.write_text("{}")
    monkeypatch.setenv("FEDSCHED_TRACES", str(tmp_path / "nothing"))
    result = run("--out", tmp_path / "out", "--json", figures)
    assert result.exit_code == 1
    assert figures.read_text() == "{}"
    assert run("--out", tmp_path / "out", "--json", tmp_path / "new.json").exit_code == 1
    assert not (tmp_path / "new.json").exists()


def test_traces_that_are_not_there_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDSCHED_TRACES", str(tmp_path / "nothing"))
    result = run("--out", tmp_path / "out")
    assert result.exit_code == 1
    assert "FEDSCHED_TRACES names this folder and it is not there" in said(result)


def test_trace_too_short_to_hold_jobs_out_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = trace_file(MEMBERS[0].trace).parent
    shutil.copytree(shipped, tmp_path / "traces" / "gavel")
    short = tmp_path / "traces" / MEMBERS[0].trace
    lines = short.read_text().splitlines()[: HELD_OUT_FROM + 1]  # a header and one job too few
    short.write_text("\n".join(lines) + "\n")
    monkeypatch.setenv("FEDSCHED_TRACES", str(tmp_path / "traces"))
    result = run("--out", tmp_path / "out")
    assert result.exit_code == 1
    assert f"{short.name} has {HELD_OUT_FROM} jobs" in said(result).replace("- ", "-")
    assert "give it a longer trace" in said(result)


def test_port_of_the_dashboard_that_is_taken_is_told_at_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run("--out", tmp_path / "out", "--dashboard-port", port)
    assert result.exit_code == 1
    assert f"port {port} of the dashboard is taken" in said(result)
    assert "--dashboard-port 0" in said(result)
    assert not list(tmp_path.glob("out/run-*/*.ready"))  # no process came up


class Impatient(Supervisor):
    """Its user presses Ctrl-C while it ends its processes."""

    def stop(self) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        super().stop()


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    """A supervisor with one process that ends by a signal alone."""
    supervisor = Impatient(say=lambda _: None)
    process = Process("sleeper", [], tmp_path / "log")
    process.popen = subprocess.Popen(["sleep", "1000"])
    supervisor.processes.append(process)
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    yield supervisor
    for number, handler in handlers.items():
        signal.signal(number, handler)
    process.popen.kill()
    process.popen.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_second_signal_does_not_break_off_the_ending(supervisor: Supervisor, number: int) -> None:
    popen = supervisor.processes[0].popen
    assert popen is not None
    with (
        pytest.raises(StoppedError, match=signal.Signals(number).name),
        stoppable(supervisor),
    ):
        signal.raise_signal(number)
    assert popen.returncode == -signal.SIGTERM
    for late in SIGNALS:  # all has ended, and the exit status is still to be told
        signal.raise_signal(late)


def test_signal_that_the_interpreter_swallowed_stops_at_the_next_step(
    supervisor: Supervisor,
) -> None:
    def step() -> None:
        with contextlib.suppress(StoppedError):  # as the interpreter does within a callback
            signal.raise_signal(signal.SIGTERM)
        supervisor.watch()

    with pytest.raises(StoppedError, match="SIGTERM"), stoppable(supervisor):
        step()
    assert not supervisor.processes


def test_signal_while_a_process_is_being_started_loses_no_process(
    supervisor: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def start(process: Process) -> None:
        started.append(subprocess.Popen(["sleep", "1000"]))
        signal.raise_signal(signal.SIGINT)  # it runs, and nobody knows it yet
        process.popen = started[0]

    monkeypatch.setattr(Process, "start", start)
    with pytest.raises(StoppedError, match="SIGINT"), stoppable(supervisor):
        supervisor.start("late", [], tmp_path / "log")
    assert started[0].returncode == -signal.SIGTERM


def test_signal_during_an_orderly_ending_is_passed_over(supervisor: Supervisor) -> None:
    popen = supervisor.processes[0].popen
    assert popen is not None
    before = {number: signal.getsignal(number) for number in SIGNALS}
    with stoppable(supervisor):
        pass
    assert popen.returncode == -signal.SIGTERM
    assert {number: signal.getsignal(number) for number in SIGNALS} == before


def test_supervisor_says_why_a_process_ended_before_it_starts_it_again(tmp_path: Path) -> None:
    heard: list[str] = []
    supervisor = Supervisor(say=heard.append)
    missing = tmp_path / "missing.yaml"
    process = supervisor.start(
        "hub", fedsched("coordinator", "serve", "--config", str(missing)), tmp_path / "log"
    )
    try:
        assert process.popen is not None
        process.popen.wait(60)
        supervisor.watch()
        assert process.restarts == 1
        (text,) = heard
        assert text.startswith("hub ended with status ")
        assert "missing.yaml" in text
        assert text.endswith("; starting it again")
    finally:
        supervisor.stop()
