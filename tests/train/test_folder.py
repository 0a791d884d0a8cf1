"""A run folder is one run's at a time, and a full disk that holds it ends no run for the sake of its logs."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from plait.comm.flight import Flight
from plait.comm.world import World
from plait.core.errors import ConfigError
from plait.telemetry.record import Metrics, read_metrics
from plait.train import folder, trainer
from plait.train.folder import LOCK, claimed, held, private
from plait.train.run import prepare
from plait.train.trainer import train
from tests.train.test_launch import ENV
from tests.train.test_trainer import config, tokens

__all__ = ["tokens"]


def test_a_folder_in_which_a_run_is_at_work_is_refused_until_that_has_ended(tokens: Path, tmp_path: Path) -> None:
    run = config(tokens, tmp_path, "run.resume=true")
    hold = "import sys, time\nfrom pathlib import Path\nfrom plait.train.folder import held\n"
    hold += "with held(Path(sys.argv[1])):\n    print('held', flush=True)\n    time.sleep(60)\n"
    other = subprocess.Popen([sys.executable, "-c", hold, str(tmp_path)], env=ENV, stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=r"run\.dir = .*: another plait train is at work there"):
            trainer.start(run, as_json=True)
        assert list(tmp_path.iterdir()) == []
        with held(tmp_path.parent):  # another folder is another run's
            pass
    finally:
        other.send_signal(signal.SIGKILL)
        other.communicate()
    for _ in range(2):
        with held(tmp_path):
            pass


def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that locks no folders."""

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)


def test_without_locks_of_folders_a_file_stands_for_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_locks(monkeypatch)
    with held(tmp_path):
        assert os.listdir(tmp_path) == [LOCK]
        with pytest.raises(ConfigError, match=f"process {os.getpid()} on .*, is at work there; wait"), held(tmp_path):
            pass
        assert os.listdir(tmp_path) == [LOCK]
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("change", "stale"),
    [
        ({"pid": 1}, True),  # there is such a process, and it began at another time
        ({"boot": "before"}, True),
        ({"host": "elsewhere"}, False),
        ({"host": "elsewhere", "job": "17"}, True),  # the same job of torchrun's, started again
        ({"machine": "another of this name"}, False),
        ({"pids": "another container's"}, False),
    ],
)
def test_the_lock_of_a_dead_process_is_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], stale: bool
) -> None:
    """Where it can be known that it is dead; else it is said who it is, and which file to remove."""
    no_locks(monkeypatch)
    here = {**folder._process(), "machine": "m", "job": change.get("job", "none")}
    monkeypatch.setattr(folder, "_process", lambda: here)
    text = json.dumps({**here, **change})
    (tmp_path / LOCK).write_text(text)
    if stale:
        with held(tmp_path):
            assert json.loads((tmp_path / LOCK).read_text()) == here
        assert os.listdir(tmp_path) == []
    else:
        with pytest.raises(ConfigError, match=rf"{LOCK} says .*: if that has ended, remove the file"), held(tmp_path):
            pass
        assert (tmp_path / LOCK).read_text() == text


def test_a_torn_lock_is_somebodys_and_a_new_one_is_not_taken_for_the_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_locks(monkeypatch)
    path = tmp_path / LOCK
    path.write_text("")
    with pytest.raises(ConfigError, match="or was ended as it began"), held(tmp_path):
        pass
    path.write_text("of a process that came between")
    assert not folder._taken_away(path, "of a dead one")
    assert path.read_text() == "of a process that came between"
    assert os.listdir(tmp_path) == [LOCK]


def test_a_folder_of_checkpoints_is_one_runs_too(tokens: Path, tmp_path: Path) -> None:
    """Of two runs with folders of their own."""
    shared = tmp_path / "checkpoints"
    first = config(tokens, tmp_path / "a", f"checkpoint.dir={shared}")
    second = config(tokens, tmp_path / "b", f"checkpoint.dir={shared}")
    with claimed(first):
        with pytest.raises(ConfigError, match=r"checkpoint\.dir = .*: another plait train is at work"), claimed(second):
            pass
        with claimed(config(tokens, tmp_path / "c")):
            pass
    with claimed(config(tokens, tmp_path / "d", f"checkpoint.dir={tmp_path / 'd'}")):  # both in one
        pass


def test_an_interrupt_says_how_the_run_goes_on(tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = config(tokens, tmp_path / "runs/a")
    with pytest.raises(KeyboardInterrupt, match=r"^$"), claimed(run):  # there is nothing yet to go on with
        raise KeyboardInterrupt
    (tmp_path / "runs/a/config.toml").touch()
    with pytest.raises(KeyboardInterrupt, match="--resume runs/a starts it anew, as there is no"), claimed(run):
        raise KeyboardInterrupt
    for step in (20, 40):
        (tmp_path / f"runs/a/checkpoints/step-{step:08d}").mkdir(parents=True)
    with pytest.raises(KeyboardInterrupt, match=r"plait train --resume runs/a goes on from step 40$"), claimed(run):
        raise KeyboardInterrupt


def test_private_folders_of_dead_processes_are_removed(tmp_path: Path) -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    dead, other = f"x-{child.pid}-abc", f"x-{os.getpid()}-abc"
    for name in (dead, other, "x-9", "y"):
        (tmp_path / name).mkdir()
    (tmp_path / dead / "file").touch()
    held_by = os.open(tmp_path / dead, os.O_RDONLY)
    fcntl.flock(held_by, fcntl.LOCK_EX)  # as by a process of another container, whose number is none here
    with private("x-", tmp_path) as mine:
        assert sorted(os.listdir(tmp_path)) == sorted([mine.name, dead, other, "x-9", "y"])
    os.close(held_by)
    with private("x-", tmp_path) as mine:
        assert sorted(os.listdir(tmp_path)) == sorted([mine.name, other, "x-9", "y"])
    assert not mine.exists()


def test_a_full_disk_ends_no_run_for_the_sake_of_its_metrics(
    tokens: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write = Metrics.write

    def full(metrics: Metrics, row: dict[str, object]) -> None:
        if row["step"] in (1, 2):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(metrics, row)

    with mock.patch.object(Metrics, "write", full):
        train(prepare(config(tokens, tmp_path / "run")), World.alone(), as_json=True)
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [0, 3]
    said = capfd.readouterr().err.splitlines()
    assert said == [f"plait: warning: metrics.jsonl, step {step}: No space left on device" for step in (1, 2)]


def test_last_operations_are_kept_whole_or_not_at_all(tmp_path: Path) -> None:
    """A half of them would stand in the way of the report at the run's end."""
    path = Flight(3).dump(tmp_path)
    before = path.read_bytes()
    with pytest.raises(OSError, match="No space"), mock.patch.object(Path, "replace", side_effect=OSError("No space")):
        Flight(3).dump(tmp_path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
