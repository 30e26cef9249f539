"""Processes of an example: the order in which they end."""

import sys
from pathlib import Path

from examples.processes import Supervisor

WORLD = """
import pathlib, signal, sys, time
def end(*_):
    pathlib.Path(sys.argv[1], "world.ended").touch()
    sys.exit()
signal.signal(signal.SIGTERM, end)
ready = pathlib.Path(sys.argv[1], "world.ready")
ready.with_name("begun").write_text("{}")
ready.with_name("begun").replace(ready)
time.sleep(60)
"""
AGENT = """
import pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
def end(*_):
    time.sleep(0.3)
    there = not (folder / "world.ended").exists()
    (folder / "agent.saw").write_text("world" if there else "nothing")
    sys.exit()
signal.signal(signal.SIGTERM, end)
(folder / "begun").write_text("{}")
(folder / "begun").replace(folder / "agent.ready")
time.sleep(60)
"""


def test_the_world_that_agents_say_goodbye_to_ends_after_them(tmp_path: Path) -> None:
    supervisor = Supervisor(say=lambda _: None)
    try:
        for name, code, restart in (("world", WORLD, False), ("agent", AGENT, True)):
            command = [sys.executable, "-c", code, str(tmp_path)]
            process = supervisor.start(name, command, tmp_path / "log", restart=restart)
            supervisor.wait_for(process, tmp_path / f"{name}.ready")
    finally:
        supervisor.stop()
    assert (tmp_path / "agent.saw").read_text() == "world"
    assert (tmp_path / "world.ended").exists()
    assert supervisor.processes == []
