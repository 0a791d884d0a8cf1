"""Launching: where a process is, how ranks end together, and what the caller is told."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from plait.core.errors import ConfigError, WeightsError
from plait.train.launch import Place, Worker, WorkerFailed, _failure, address_of, first_host, launch, placed, slurm_port
from plait.train.worker import resolve, write_error
from tests.train import jobs

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("node7", "node7"),
        ("node[01-04,7]", "node01"),
        ("node[7,1-4],login", "node7"),
        ("login,node[01-04]", "login"),
        ("rack[2-3]n[004-008,11].cluster,x", "rack2n004.cluster"),
        ("gpu-a[10-12]", "gpu-a10"),
    ],
)
def test_first_host_of_a_slurm_list(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


def test_no_host_says_what_to_set() -> None:
    with pytest.raises(ConfigError, match="MASTER_ADDR"):
        first_host("")


def test_place_under_torchrun() -> None:
    env = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}
    assert placed(env) == Place(rank=5, local_rank=1, world_size=8)


SRUN = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODELIST": "n[03-04]",
    "SLURM_JOB_ID": "4711",
}


def test_place_under_srun() -> None:
    port = slurm_port(4711, None)
    assert placed(SRUN) == Place(rank=3, local_rank=1, world_size=4, address=("n03", port))
    assert 15000 <= port < 30000
    assert slurm_port(4711, "1") != port  # two steps of one job do not meet
    given = {**SRUN, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    assert placed(given) == Place(rank=3, local_rank=1, world_size=4, address=("10.0.0.1", 29500))


def test_one_task_is_no_launcher() -> None:
    assert placed({}) is None
    assert placed({**SRUN, "SLURM_STEP_NUM_TASKS": "1"}) is None


def test_nonsense_variables_are_bad_input() -> None:
    with pytest.raises(ConfigError, match="launcher's variables"):
        placed({"RANK": "x", "WORLD_SIZE": "2"})


def test_functions_are_named_not_pickled() -> None:
    assert address_of(jobs.ranks) == "tests.train.jobs:ranks"
    assert resolve("tests.train.jobs:ranks") is jobs.ranks
    assert resolve(f"{ROOT}/tests/train/jobs.py:ranks").__name__ == "ranks"
    with pytest.raises(ConfigError, match="top-level"):
        address_of(lambda worker: None)
    with pytest.raises(ConfigError, match=r"no function 'tests\.train\.jobs:nothing'"):
        resolve("tests.train.jobs:nothing")
    with pytest.raises(ConfigError, match="JSON"):
        launch(jobs.ranks, processes=2, args=[{1, 2}])


def test_one_process_runs_here() -> None:
    found: list[Worker] = []
    HERE.append(found)
    launch("tests.train.test_launch:keep", processes=1)
    assert found[0].place == Place(rank=0, local_rank=0, world_size=1)


HERE: list[list[Worker]] = []


def keep(worker: Worker) -> None:
    HERE[-1].append(worker)


def test_ranks_meet_and_share_the_cores(tmp_path: Path) -> None:
    launch(jobs.ranks, processes=2, args=[str(tmp_path), "ok"], threads=3)
    notes = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [note["total"] for note in notes] == [2.0, 2.0]
    assert {note["omp"] for note in notes} == {"3"}
    assert all(note["pid"] != os.getpid() for note in notes)


@pytest.mark.parametrize(
    ("end", "says", "trace", "code"),
    [
        ("raise", "rank 1 of 2 failed: ValueError: rank one's own trouble", "jobs.py", 4),
        ("kill", r"rank 1 of 2 was ended by signal 9 \(SIGKILL\); .*memory", "", 4),
    ],
)
def test_a_failing_rank_ends_all(tmp_path: Path, end: str, says: str, trace: str, code: int) -> None:
    with pytest.raises(WorkerFailed, match=says) as caught:
        launch(jobs.ranks, processes=2, args=[str(tmp_path), end])
    ended = time.time()
    assert trace in caught.value.trace
    assert caught.value.exit_code == code
    assert caught.value.trace.count("Traceback") <= 1
    assert ended - max((tmp_path / f"{rank}.json").stat().st_mtime for rank in range(2)) < 5
    assert_gone(tmp_path)


def test_the_first_failure_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2 failed first, 0 because of it, and 1 was ended by the launcher."""
    failures: dict[int, ProcessFailure] = {}
    for rank, error in ((2, WeightsError("these weights are damaged")), (0, RuntimeError("connection closed"))):
        file = tmp_path / f"{rank}.json"
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
        assert write_error(error) == (5 if rank == 2 else 4)
        failures[rank] = ProcessFailure(local_rank=rank, pid=1, exitcode=1, error_file=str(file))
    failures = {0: failures[0], 1: ProcessFailure(1, 1, -signal.SIGTERM, str(tmp_path / "none")), 2: failures[2]}
    failed = _failure(failures, 3)
    assert str(failed).startswith("rank 2 of 3 failed: these weights are damaged")
    assert failed.exit_code == 5
    # One that died without a word did not die of another's failure.
    failures[1] = ProcessFailure(1, 1, -signal.SIGSEGV, str(tmp_path / "none"))
    assert "rank 1 of 3 was ended by signal 11 (SIGSEGV)" in str(_failure(failures, 3))


def test_killing_the_launcher_ends_every_rank(tmp_path: Path) -> None:
    code = (
        "from plait.train.launch import launch\n"
        f"launch('tests.train.jobs:ranks', processes=2, args=[{str(tmp_path)!r}, 'wait'])"
    )
    env = {**os.environ, "PYTHONPATH": f"{ROOT}/src:{ROOT}"}
    launcher = subprocess.Popen([sys.executable, "-c", code], env=env)
    wait_for(tmp_path / "0.json", tmp_path / "1.json")
    launcher.kill()
    launcher.wait(5)
    assert_gone(tmp_path)


def wait_for(*files: Path) -> None:
    deadline = time.monotonic() + 90
    while not all(file.exists() for file in files):
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.05)


def assert_gone(folder: Path) -> None:
    """No rank that left its note is still there."""
    pids = [json.loads(note.read_text())["pid"] for note in folder.glob("*.json")]
    assert len(pids) == 2
    deadline = time.monotonic() + 3
    while any(running(pid) for pid in pids):
        assert time.monotonic() < deadline, "a rank outlived its launcher"
        time.sleep(0.05)


def running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        # A zombie is gone; whoever adopted it has not collected it yet.
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False
