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


@pytest.mark.parametrize(
    "command",
    [
        "plan --model tiny --cluster a100 --gpus 1 --seq 64 --global-batch 1",  # written by rich
        "checkpoint list .",  # printed, and still buffered when the command is done
    ],
)
def test_a_reader_who_has_left_has_its_exit_code(command: str, tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    env = {name: value for name, value in ENV.items() if name != "PYTHONUNBUFFERED"}
    run = [sys.executable, "-P", "-m", "plait", *command.split()]
    done = subprocess.run(run, env=env, cwd=tmp_path, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


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
    with pytest.raises(SystemExit):
        main(["verify", "--steps", "many"])
    assert "argument --steps: 'many' is no whole number" in capsys.readouterr().err


def test_converting_nothing_known_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(tmp_path / "none"), str(tmp_path / "out")]) == 2
    assert "plait: error: " in capsys.readouterr().err


# Planning


JOB = ["--model", "llama3-8b", "--cluster", "h100", "--seq", "2048", "--global-batch", "64"]


def test_plan_writes_a_plan_that_simulate_and_train_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.toml"
    assert main(["plan", *JOB, "--gpus", "16", "--fix", "tp=2", "--json", "-o", str(path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "tp=2" in found["plans"][0]["plan"]
    trace, picture = tmp_path / "trace.json", tmp_path / "plan.svg"
    assert main(["simulate", str(path), *JOB, "--json", "--trace", str(trace), "--svg", str(picture)]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["step_time"] == pytest.approx(found["plans"][0]["step_time"])
    assert json.loads(trace.read_text())["traceEvents"]
    assert picture.read_text().startswith("<svg")
    run = ["model.preset=llama3-8b", "data.seq=2048", "train.global_batch=64"]
    path.write_text(path.read_text() + "[model]\npreset = 'llama3-8b'\n")
    assert main(["train", str(path), "--dry", "--json", *(w for key in run for w in ("--set", key))]) == 0
    assert json.loads(capsys.readouterr().out)["world_size"] == 16


def test_planning_starts_without_torch() -> None:
    code = (
        "import sys\n"
        "from plait.cli import main\n"
        f"assert main(['plan', *{JOB!r}, '--gpus', '8', '--json']) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], env=ENV, check=True, capture_output=True, timeout=60)


@pytest.mark.parametrize(
    ("arguments", "says", "code"),
    [
        (["--model", "lama"], "neither a preset", 2),
        (["--cluster", "h10"], "nearest: h100", 2),
        (["--fix", "pp=3"], "pp=3", 3),
        (["--fix", "tq=2"], "unknown key 'tq' in a plan; nearest: tp", 2),
        (["--fix", "tp=3"], "tp=3", 3),
        (["--max-memory", "1.5"], "max_memory=1.5", 2),
        (["--max-memory", "0.05"], "no plan for 8 devices fits", 3),
        (["--max-memory", "0.05", "--gpus", "1"], "no plan for 1 device fits", 3),
        (["--fix", "schedule=2bw", "zero=3"], "schedule=2bw with zero=3 is in no plan for 8 ranks: ", 3),
    ],
)
def test_requests_that_cannot_be_met_are_one_message(
    arguments: list[str], says: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *JOB, "--gpus", "8", *arguments]) == code
    errors = capsys.readouterr().err
    assert errors.startswith("plait: error: ")
    assert says in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("model.toml", "model = 3", "model.toml: model = 3: expected a table [model]"),
        ("model.json", "[1]", "model.json: expected a JSON object, found list"),
        ("cluster.toml", 'name = "mine"', "cluster.toml.devices is missing: expected a whole number"),
    ],
)
def test_files_of_another_kind_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, says: str
) -> None:
    file = tmp_path / name
    file.write_text(text)
    where = ["--cluster", str(file)] if name.startswith("cluster") else ["--model", str(file)]
    assert main(["plan", *JOB, "--gpus", "8", *where]) == 2
    assert says in capsys.readouterr().err


# What runs left


def test_reports_and_checkpoints_of_nothing_are_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "metrics.jsonl" in capsys.readouterr().err
    assert main(["checkpoint", "list", str(tmp_path / "none")]) == 2
    assert "none" in capsys.readouterr().err


def test_a_run_is_not_resumed_from_two_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "run.toml", "--resume", str(tmp_path)]) == 2
    assert "leave run.toml out" in capsys.readouterr().err


def test_a_run_that_is_not_there_is_not_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--resume", str(tmp_path / "runs/nosuch")]) == 2
    assert capsys.readouterr().err.endswith("/nosuch: there is no such folder, and so no run to go on with\n")
    for name in ("a-run", "b-run"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.toml").touch()
    (tmp_path / "runs/empty").mkdir()
    assert main(["train", "--resume", str(tmp_path / "runs/a-rnu")]) == 2
    assert "no run to go on with; runs in " in (said := capsys.readouterr().err)
    assert said.endswith("/runs: nearest: a-run, b-run\n") or said.endswith("/runs: nearest: a-run\n")
    assert main(["train", "--resume", str(tmp_path / "runs/empty")]) == 2
    assert "/empty: it holds no config.toml, and so" in capsys.readouterr().err
