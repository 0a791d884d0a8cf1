"""The command: quick to answer, and clear about what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from plait.cli import main

ROOT = Path(__file__).resolve().parents[1]
ENV = {**os.environ, "PYTHONPATH": f"{ROOT}/src"}


def test_help_is_quick_and_loads_nothing_heavy() -> None:
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "plait", "--help"], env=ENV, check=True, capture_output=True, text=True
        )
        times.append(time.perf_counter() - begin)
        if times[-1] < 0.5:
            break
    assert min(times) < 0.5
    assert all(word in done.stdout for word in ("train", "verify", "convert", "exit codes"))
    code = (
        "import sys\n"
        "from plait.cli import main\n"
        "try: main(['train', '--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'numpy', 'rich'} & set(sys.modules), 'heavy'"
    )
    subprocess.run([sys.executable, "-c", code], env=ENV, check=True, capture_output=True)


@pytest.mark.parametrize("command", ["train", "verify"])
@pytest.mark.parametrize(
    ("arguments", "says", "code"),
    [
        (["nowhere.toml"], "nowhere.toml: No such file", 2),
        (["--set", "plan.pt=4"], "unknown key 'pt' in [plan]; nearest: tp", 2),
        (["--set", "train.steps=many"], "train.steps = 'many': expected int", 2),
        (["--set", "train.steps=0"], "steps = 0: must be at least 1", 2),
        (["--set", "model.preset=tinny"], "nearest: tiny", 2),
        (["--set", "data.tokens=no.bin"], "data.tokens: no file", 2),
        (["--set", "plan.tp=3"], "tp=3: 4 attention heads do not divide by it", 3),
        (["--set", "plan.micro=5"], "micro=5 with dp=1: a global batch of 16", 3),
        (["--set", "run.processes=6"], "world size 6 is not a multiple of tp=2 pp=2", 3),
        (["--set", "plan.schedule=1b1f"], "nearest: 1f1b", 3),
    ],
)
def test_bad_input_is_one_message(
    command: str, arguments: list[str], says: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, *arguments]) == code
    output, errors = capsys.readouterr()
    assert errors.startswith("plait: error: ")
    assert says in errors
    assert "Traceback" not in errors
    assert output == ""


def test_a_broken_schedule_file_shows_the_grid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.schedule"
    file.write_text("schedule mine stages=2 microbatches=4\nrank 0: 0F0\nrank 1: 1F0\n")
    code = main(["train", "--set", f"plan.schedule={file}", "--set", "plan.tp=1"])
    errors = capsys.readouterr().err
    assert code == 3
    assert errors.startswith("plait: error: ")


def test_a_dry_run_starts_nothing_and_loads_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from plait.cli import main\n"
        "assert main(['train', '--dry', '--json']) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=ENV, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert isinstance(json.loads(done.stdout), dict)
    assert list(tmp_path.iterdir()) == []


def test_usage_errors_are_argparses(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["tarin"], ["verify", "--steps", "0"], ["convert", "only-one"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
    assert "below 1" in capsys.readouterr().err


def test_converting_nothing_known_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(tmp_path / "none"), str(tmp_path / "out")]) == 2
    assert "plait: error: " in capsys.readouterr().err
