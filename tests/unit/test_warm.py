"""What former versions compiled goes once it is old, and nothing else does."""

import os
import time
from pathlib import Path

from agent.warm import OLD_DAYS, prune


def test_only_old_kernels_of_other_versions_are_removed(tmp_path: Path) -> None:
    old = time.time() - 86400.0 * (OLD_DAYS + 1.0)
    folders = {name: tmp_path / name for name in ("kernels-a", "kernels-b", "kernels-c", "lab")}
    for folder in folders.values():
        folder.mkdir()
        (folder / "agent.nbc").write_bytes(b"code")
        os.utime(folder, (old, old))
    os.utime(folders["kernels-b"])  # another clone's, installed today
    assert prune(folders["kernels-c"]) == [folders["kernels-a"]]
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"kernels-b", "kernels-c", "lab"}
    assert (folders["kernels-c"] / "agent.nbc").read_bytes() == b"code"


def test_what_cannot_be_removed_is_in_nobodys_way(tmp_path: Path) -> None:
    (tmp_path / "kernels-gone").symlink_to(tmp_path / "nowhere")
    occupied = tmp_path / "file"
    occupied.write_bytes(b"")
    assert prune(tmp_path / "kernels-a") == []
    assert prune(occupied / "kernels-a") == []  # no folder can be made there


def test_a_first_installation_has_nothing_to_remove(tmp_path: Path) -> None:
    assert prune(tmp_path / "cache" / "kernels-a") == []
    assert (tmp_path / "cache" / "kernels-a").is_dir()
