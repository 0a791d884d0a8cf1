"""A save that stands still on a disk that has died: said, not waited for, and the run's end does not hang on it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import pytest

from plait.checkpoint import disk, steps
from plait.checkpoint.phases import SAVING
from plait.comm.world import World
from plait.core.config import dump
from plait.core.errors import ConfigError, SaveError
from plait.telemetry.record import read_metrics
from plait.train.events_log import EVENTS, read
from plait.train.run import prepare
from plait.train.step import Steps, Taken
from plait.train.trainer import train
from tests.pool import Connect, Pool
from tests.train import jobs
from tests.train.test_launch import ENV
from tests.train.test_trainer import config, settings, tokens

__all__ = ["tokens"]

RUN = ("train.steps=8", "train.eval_every=0", "checkpoint.every=2", "checkpoint.timeout=0.3", "run.device=cpu")


def on_a_dead_disk(connect: Connect, text: str, heals: int) -> str | None:
    """Train on two ranks; rank 1's first sync of a file does not return, until step ``heals``. What it ended with."""
    healed, fsync, take = threading.Event(), os.fsync, Steps.take

    def sync(descriptor: int) -> None:
        if connect.rank == 1 and threading.current_thread().name == SAVING:
            healed.wait(60)
        fsync(descriptor)

    def step(self: Steps, number: int) -> Taken:
        if number == heals:
            healed.set()
            for thread in saving():
                thread.join(20)
        return take(self, number)

    with mock.patch.object(os, "fsync", sync), mock.patch.object(Steps, "take", step):
        try:
            jobs.train_in_pool(connect, text, 2)
        except SaveError as error:
            return str(error)
        finally:
            healed.set()
            for thread in saving():
                thread.join(20)
    return None


def saving() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == SAVING]


def troubles(folder: Path) -> list[tuple[int, str]]:
    return [(one.fields["step"], one.fields["error"]) for one in read(folder / EVENTS) if one.kind == "checkpoint"]


def test_a_run_goes_on_beside_a_save_that_stands_still(pool: Pool, tokens: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    begin = time.monotonic()
    ends = pool.run(2, on_a_dead_disk, dump(config(tokens, folder, *RUN, "plan.dp=2")), 99)
    assert time.monotonic() - begin < 30
    assert all("the state after 8 steps could not be saved" in str(end) for end in ends)
    (first, why), *left_out = troubles(folder)
    assert first == 2
    assert "rank 1 stands still behind file.written, at " in why
    assert "no progress for 0." in why and why.endswith("checkpoints/rank-00001.safetensors")
    assert {step for step, _ in left_out} == {4, 6, 8}
    assert all("left out, the one of step 2 is not done: no progress for" in trouble for _, trouble in left_out)
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 8


def test_a_save_that_has_the_state_itself_ends_the_run(pool: Pool, tokens: Path, tmp_path: Path) -> None:
    """Nothing was copied: a step would change what is being written."""
    run = config(tokens, tmp_path / "run", *RUN, "plan.dp=2", "checkpoint.asynchronous=false")
    ends = pool.run(2, on_a_dead_disk, dump(run), 99)
    assert all(str(end).startswith("checkpoint of step 2: no progress for 0.") for end in ends)
    assert all("the run cannot go on beside it" in str(end) for end in ends)


def test_a_save_that_comes_to_life_again_is_a_checkpoint_and_so_are_those_after_it(
    pool: Pool, tokens: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    more = (*RUN, "plan.dp=2", "checkpoint.keep=9")
    assert pool.run(2, on_a_dead_disk, dump(config(tokens, folder, *more)), 5) == [None, None]
    names = sorted(path.name for path in (folder / "checkpoints").glob("step-*"))
    assert names == ["step-00000002", "step-00000006", "step-00000008"]
    assert [step for step, _ in troubles(folder)] == [2, 4]


def test_the_end_of_a_command_does_not_hang_on_a_dead_disk(tokens: Path, tmp_path: Path) -> None:
    """Of one rank in the command's own process, whose interpreter would wait for the thread."""
    program = (
        "import os, sys, threading\nfrom plait.cli import main\nfsync = os.fsync\n"
        "def dead(file):\n"
        "    threading.Event().wait() if threading.current_thread().name == 'plait-save' else fsync(file)\n"
        "os.fsync = dead\nsys.exit(main(['train', *sys.argv[1:]]))\n"
    )
    more = ("train.steps=1", "plan.tp=1", "plan.pp=1", *RUN[1:], "checkpoint.every=0")
    words = [word for text in settings(tokens, tmp_path / "run", *more) for word in ("--set", text)]
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, *words], env=ENV, capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == SaveError.exit_code == 8, done.stderr
    assert "the state after 1 step could not be saved" in done.stderr


def test_without_room_a_run_does_not_begin_but_goes_on(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A new run is told at once what is missing. One that goes on trains, tries each save, and saves once it can."""
    run = (*RUN, "train.steps=4", "checkpoint.timeout=60")
    train(prepare(config(tokens, tmp_path / "run", *run, "train.steps=2")), World.alone(), as_json=True)
    capfd.readouterr()
    missing = r"takes 0\.\d+ MB, .*checkpoints has room for 0\.001 MB: 0\.\d+ MB are missing"
    with monkeypatch.context() as patch:
        patch.setattr(steps, "free_bytes", lambda _: 1000)
        with pytest.raises(ConfigError, match=f"{missing}; make room, or name another folder"):
            train(prepare(config(tokens, tmp_path / "new", *run)), World.alone(), as_json=True)
        on = prepare(config(tokens, tmp_path / "run", *run, "run.resume=true"))
        with pytest.raises(SaveError, match="the state after 4 steps could not be saved"):
            train(on, World.alone(), as_json=True)
    said = capfd.readouterr().err.splitlines()
    assert re.search(f"{missing}; the run goes on, and each save is tried", said[0])
    assert all(re.search(f"checkpoint of step 4: .*{missing}", line) for line in said[1:])
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 4
    first, *_, last = [row["loss"] for row in read_metrics(tmp_path / "run/metrics.jsonl")]
    train(on, World.alone(), as_json=False)
    assert f"done 4 steps (from step 2 on in 0:00), loss {first:.3f} → {last:.3f}" in capfd.readouterr().out
    assert (tmp_path / "run/checkpoints/step-00000004").is_dir()


def test_a_disk_without_a_byte_is_one_without_room(tmp_path: Path) -> None:
    with mock.patch.object(Path, "write_bytes", side_effect=OSError(28, os.strerror(28))):
        with pytest.raises(ConfigError, match="cannot be written"):
            steps.check_folder(tmp_path, 10)
        assert "has room for 0.000 MB: 2.000 MB are missing" in str(steps.check_folder(tmp_path, 2_000_000, full=True))


@pytest.mark.parametrize("failures", [1, 2])
def test_the_last_save_is_tried_twice_and_then_the_run_has_failed(
    tokens: Path, tmp_path: Path, failures: int, capfd: pytest.CaptureFixture[str]
) -> None:
    tried: list[Path] = []
    write = disk.write

    def full(path: Path, *rest: object) -> str:
        if path.parent.name.startswith("step-"):
            tried.append(path)
            if len(tried) <= failures:
                raise OSError(28, os.strerror(28))
        return write(path, *rest)  # type: ignore[arg-type]

    run = config(tokens, tmp_path / "run", *RUN, "train.steps=1", "checkpoint.every=0")
    with mock.patch.object(disk, "write", full):
        if failures == 1:
            train(prepare(run), World.alone(), as_json=True)
        else:
            with pytest.raises(SaveError, match=r"1 step could not be saved, .*/weights holds its weights alone"):
                train(prepare(run), World.alone(), as_json=True)
    assert len(tried) == 2
    assert capfd.readouterr().err.count("checkpoint of step 1: rank 0: No space left on device") == failures
    assert (tmp_path / "run/weights/manifest.json").is_file()
