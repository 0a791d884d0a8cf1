"""A run folder is one run's at a time, whatever the runs' ends."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from plait.core.errors import ConfigError
from plait.train import trainer
from plait.train.folder import held
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
