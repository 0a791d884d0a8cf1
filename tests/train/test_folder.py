"""A run folder is one run's at a time, and a full disk that holds it ends no run for the sake of its logs."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from plait.comm.flight import Flight
from plait.comm.world import World
from plait.core.errors import ConfigError
from plait.telemetry.record import Metrics, read_metrics
from plait.train import trainer
from plait.train.folder import held
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
