"""Folders of memory files: whose they are, and when they go."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from plait.core.errors import ConfigError
from plait.train.replicas import host_name, launched_folder, launcher, memory_folder

HERE = os.stat("/proc/self/ns/pid").st_ino


def test_memory_that_a_killed_supervisor_has_left_is_freed(tmp_path: Path) -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    kept = [f"plait-memory-{os.getpid()}-{HERE}-abc", f"plait-memory-{child.pid}-{HERE + 1}-abc", "others"]
    for left in (f"plait-memory-{child.pid}-{HERE}-abc", *kept):
        (tmp_path / left).mkdir()
    with memory_folder(True, tmp_path) as folder:
        assert folder is not None
        assert sorted(os.listdir(tmp_path)) == sorted([folder.name, *kept])
    assert not folder.exists()
    with memory_folder(False) as none:
        assert none is None
    with pytest.raises(ConfigError, match=r"run\.replicas"), memory_folder(True, tmp_path / "nowhere"):
        pass


def test_ranks_of_one_launcher_find_one_folder_again(tmp_path: Path) -> None:
    first = launched_folder(tmp_path / "run", tmp_path)
    (first / "kept").touch()
    assert launched_folder(tmp_path / "run", tmp_path) == first
    assert (first / "kept").exists()
    assert first.stat().st_mode & 0o777 == 0o700
    assert first.name.startswith(f"plait-memory-{os.getppid()}-{HERE}-")
    other = launched_folder(tmp_path / "other", tmp_path)
    assert other != first
    assert host_name(first) == host_name(launched_folder(tmp_path / "run", tmp_path)) != host_name(other)
    first.rename(tmp_path / "elsewhere")
    first.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="belongs to another user"):
        launched_folder(tmp_path / "run", tmp_path)
    with pytest.raises(ConfigError, match=r"set run\.replicas=0"):
        launched_folder(tmp_path / "run", tmp_path / "nowhere")


@pytest.mark.parametrize("mark", ["LOCAL_RANK", "RANK", "SLURM_PROCID"])
def test_a_shell_around_a_rank_is_not_its_launcher(mark: str) -> None:
    """It ends with the rank; what started it does not."""
    ask = "from plait.train.replicas import launcher; print(launcher())"
    env = {name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "RANK", "SLURM_PROCID")}
    command = ["sh", "-c", '"$0" -c "$1"; true', sys.executable, ask]
    found = subprocess.run(command, env=env | {mark: "0"}, capture_output=True, text=True, check=True, timeout=60)
    assert int(found.stdout) == os.getpid()
    assert launcher(env) == os.getppid()
