"""Real ranks of real runs that are killed, stopped, stuck, slow, or fail: the run goes on and comes to the same end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from plait.comm.flight import read_dumps
from plait.core.config import dump
from plait.telemetry.record import read_metrics
from plait.train.events_log import EVENTS, LoggedEvent, read
from plait.train.failure import WorkerFailed
from plait.train.local import Watched, run_local
from plait.train.replicas import MEMORY, run_key
from plait.train.restart import supervise
from tests.faults import RANK, fail_at, plan_faults
from tests.pool import Pool
from tests.train import jobs
from tests.train.test_launch import ENV, running, wait_for
from tests.train.test_trainer import config, same_run, settings, tokens

__all__ = ["tokens"]

RUN = (
    "train.steps=8",
    "train.eval_every=0",
    "checkpoint.every=2",
    "checkpoint.asynchronous=false",  # what is due is there when the next step begins
    "run.threads=1",
    "run.device=cpu",
)
TIMEOUT = 4.0
"""Seconds without a sign of life that make a hang here; a start under load takes longer than a step."""


@pytest.fixture(scope="module")
def undisturbed(pool: Pool, tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    pool.run(2, jobs.train_in_pool, dump(config(tokens, folder, *RUN, "plan.dp=2")), 2)
    return folder


def events(folder: Path, kind: str) -> list[LoggedEvent]:
    return [event for event in read(folder / EVENTS) if event.kind == kind]


def steps(folder: Path) -> list[object]:
    return [row["step"] for row in read_metrics(folder / "metrics.jsonl")]


def test_whatever_befalls_a_rank_the_run_comes_to_the_same_end(
    undisturbed: Path,
    tokens: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Killed in a step, failed in a save, stopped in a step, stuck before a collective: four ends of four attempts."""
    folder, private = tmp_path / "run", tmp_path / "private"
    private.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(private))
    run = config(tokens, folder, *RUN, "plan.dp=2", f"run.timeout={TIMEOUT}", "run.max_restarts=4")
    plan_faults(
        folder,
        fail_at(1, 3, "step", "SIGKILL"),
        fail_at(0, 4, "save", "exception"),
        fail_at(1, 5, "step", "SIGSTOP"),
        fail_at(0, 7, "collective", "hang"),
    )
    supervise(run, 2, as_json=True, function=RANK)
    assert steps(folder) == list(range(8))
    same_run(folder, undisturbed, loss=0.0, weights=0.0)
    failures = events(folder, "failure")
    told = [(event.fields["rank"], event.fields["cause"], event.fields["step"]) for event in failures]
    assert told == [(1, "signal", 3), (0, "error", 4), (1, "hang", 5), (0, "hang", 7)]
    assert "SIGKILL" in failures[0].fields["message"]
    assert "ValueError: a fault was planned here" in failures[1].fields["message"]
    assert "rank 1 of 2 hangs in step 5 (step): it is stopped by a signal (SIGSTOP)" in failures[2].fields["message"]
    assert failures[2].fields["diagnosis"].startswith("rank 1 never entered all_reduce #")
    assert failures[2].fields["diagnosis"].endswith("rank 0 waits")
    assert failures[3].fields["diagnosis"].startswith("rank 0 never entered")
    assert [event.fields["from_step"] for event in events(folder, "restart")] == [2, 2, 4, 6]
    assert {path.name for path in (folder / "flight").iterdir()} == {"rank-0.json", "rank-1.json"}
    assert capfd.readouterr().err.count("the run starts again from step") == 4
    assert os.listdir(private) == []
    assert not [name for name in os.listdir(folder / "checkpoints") if ".tmp-" in name]


def test_a_run_that_loses_a_rank_for_good_goes_on_with_fewer(undisturbed: Path, tokens: Path, tmp_path: Path) -> None:
    """Rank 1 ends at once whenever it is started: its place is given up, and what it had is computed by the other."""
    folder = tmp_path / "run"
    run = config(tokens, folder, *RUN, "plan.dp=2", f"run.timeout={TIMEOUT}")
    plan_faults(folder, fail_at(1, 0, "step", "exit", times=9))
    supervise(run, 2, as_json=True, function=RANK)
    same_run(folder, undisturbed)
    assert ["dp=1" in str(event.fields["plan"]).split() for event in events(folder, "plan")] == [True]
    assert [event.fields["ranks"] for event in events(folder, "plan")] == [1]


def test_replicas_in_memory_cost_a_step_at_most(undisturbed: Path, tokens: Path, tmp_path: Path) -> None:
    """Nothing is on the disk, and the run goes on from the step before that in which its rank was killed."""
    folder = tmp_path / "run"
    more = ("plan.dp=2", "checkpoint.every=0", "run.replicas=1")
    plan_faults(folder, fail_at(1, 5, "step", "SIGKILL"))
    supervise(config(tokens, folder, *RUN, *more), 2, as_json=True, function=RANK)
    assert steps(folder) == list(range(8))
    same_run(folder, undisturbed, loss=0.0, weights=0.0)
    assert [event.fields["from_step"] for event in events(folder, "restart")] == [5]
    assert [event.fields["step"] for event in events(folder, "resume")] == [5]
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(f"plait-memory-{os.getpid()}-")]
    assert os.listdir(folder / "checkpoints") != []  # the one of the end


def test_a_signal_saves_the_run_and_it_goes_on_later(
    pool: Pool, undisturbed: Path, tokens: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    more = (*RUN, "plan.tp=1", "plan.pp=1", "plan.dp=2", "checkpoint.every=0")
    command = [sys.executable, "-P", "-m", "plait", "train", "--json"]
    for text in settings(tokens, folder, *more):
        command += ["--set", text]
    first = subprocess.Popen(command, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(folder / "metrics.jsonl")
        first.send_signal(signal.SIGTERM)
        _, errors = first.communicate(timeout=60)
    finally:
        first.kill()
        first.wait()
    assert first.returncode == 6, errors
    assert "stopped by SIGTERM after" in errors
    done = len(steps(folder))
    assert 0 < done < 8
    pool.run(2, jobs.train_in_pool, dump(config(tokens, folder, *more, "run.resume=true")), 2)
    assert steps(folder) == list(range(8))
    same_run(folder, undisturbed, loss=0.0, weights=0.0)


def test_torchrun_starts_a_run_again(undisturbed: Path, tokens: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    script = tmp_path / "rank.py"
    script.write_text(
        "import sys\nfrom plait.train import trainer\nfrom plait.core.config import load\nfrom tests import faults\n"
        f"trainer.RANK = {RANK!r}\ntrainer.start(load(None, sys.argv[1:]), as_json=True)\n"
    )
    plan_faults(folder, fail_at(1, 3, "step", "SIGKILL"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    more = ("plan.tp=1", "plan.pp=1", "plan.dp=2", "run.timeout=60", "run.replicas=1")
    arguments = settings(tokens, folder, *RUN, *more)
    begin = time.monotonic()
    run = subprocess.run(
        [*command, str(script), *arguments], env=ENV, capture_output=True, text=True, timeout=240, check=False
    )
    assert run.returncode == 0, run.stderr
    assert time.monotonic() - begin < 200
    same_run(folder, undisturbed, loss=0.0, weights=0.0)
    assert [(event.fields["step"], event.fields["source"]) for event in events(folder, "resume")] == [(3, "memory")]
    assert not list(MEMORY.glob(f"plait-memory-*-{run_key(folder)}"))  # torchrun's is gone with the run
    (left,) = read_dumps(folder / "flight")  # of the one that waited for the killed one
    assert left["rank"] == 0


def test_a_rank_that_ignores_the_signal_is_ended(tmp_path: Path) -> None:
    """After ``grace``, and its launcher says so."""
    job = {"function": "tests.train.jobs:deaf", "args": [str(tmp_path)], "device": "cpu", "timeout": 30.0}
    job |= {"threads": 1, "path": sys.path, "parent": os.getpid()}
    asked = [False]

    def recall() -> bool:
        asked[0] = all((tmp_path / f"{rank}.json").exists() for rank in range(2))
        return asked[0]

    with pytest.raises(WorkerFailed, match=r"SIGUSR1: the ranks had not saved within 0\.5 s \(run\.grace\)"):
        run_local(job, 2, timeout=30.0, watched=Watched(grace=0.5, recall=recall))
    assert asked[0]
    pids = [json.loads((tmp_path / f"{rank}.json").read_text())["pid"] for rank in range(2)]
    assert not any(running(pid) for pid in pids)
