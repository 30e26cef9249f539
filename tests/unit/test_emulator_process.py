"""The node emulator as a process: it says what is wrong, and goes when told."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import yaml

from examples.processes import free_ports


def emulator(folder: Path, **settings: object) -> subprocess.Popen[str]:
    """Start one whose API server is not there."""
    (port,) = free_ports(1)
    cluster = {"name": "c", "cluster": {"server": f"https://127.0.0.1:{port}"}}
    kubeconfig = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [cluster],
        "users": [{"name": "u", "user": {"token": "secret"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    (folder / "kubeconfig").write_text(yaml.safe_dump(kubeconfig))
    config = {"kubeconfig": str(folder / "kubeconfig"), "workload": {"jobs": 4}, **settings}
    (folder / "emulator.yaml").write_text(yaml.safe_dump(config))
    return subprocess.Popen(
        [sys.executable, "-m", "examples.lab.emulator", "--config", str(folder / "emulator.yaml"),
         "--result", str(folder / "result.json"), "--ready-file", str(folder / "ready.json")],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def test_emulator_without_an_api_server_tries_on_and_stops_when_told(tmp_path: Path) -> None:
    with emulator(tmp_path) as process:
        assert process.stdout is not None
        try:
            assert any("trying again" in line for line in process.stdout)
            assert not (tmp_path / "ready.json").exists()
            process.send_signal(signal.SIGTERM)
            words = process.stdout.read()
            assert process.wait(60) == 0
        finally:
            process.kill()
    assert "interrupted: 0 of 4 jobs finished" in words
    assert json.loads((tmp_path / "result.json").read_text())["interrupted"] is True


def test_emulator_names_a_setting_that_is_wrong(tmp_path: Path) -> None:
    with emulator(tmp_path, clock_scale=-1.0) as process:
        words, _ = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "clock_scale" in words
    assert "Traceback" not in words
