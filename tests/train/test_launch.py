"""Launching: where a process is, how ranks end together, and what the caller is told."""

from __future__ import annotations

import errno
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import cast, final
from unittest import mock

import pytest
import torch

from plait.comm import flight
from plait.comm.flight import Flight
from plait.core.errors import ConfigError, PlaitError, SaveError, WeightsError
from plait.train import heartbeat
from plait.train.failure import Ended, WorkerFailed, _report, ended_of, failure
from plait.train.folder import private
from plait.train.heartbeat import Heartbeat
from plait.train.launch import Place, Worker, _share, address_of, launch, placed
from plait.train.local import _end, _watch, run_local
from plait.train.signals import Signals
from plait.train.slurm import first_host, port, tasks_here
from plait.train.worker import resolve, write_error
from tests.train import jobs

ROOT = Path(__file__).resolve().parents[2]
ENV = {**os.environ, "PYTHONPATH": f"{ROOT}/src:{ROOT}", "TERM": "xterm"}


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
    env = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "SLURM_PROCID": "0"}
    assert placed(env) == Place(rank=5, local_rank=1, world_size=8, local_size=4)
    assert placed({"RANK": "1", "WORLD_SIZE": "2"}) == Place(rank=1, local_rank=1, world_size=2, local_size=2)


BATCH = {
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_NODELIST": "n[03-04]",
    "SLURM_JOB_ID": "4711",
}
SRUN = {
    **BATCH,
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}


def test_place_under_srun() -> None:
    here = port(4711, 0)
    assert placed(SRUN) == Place(rank=3, local_rank=1, world_size=4, local_size=2, address=("n03", here))
    assert 15000 <= here < 30000
    assert port(4711, 1) != here  # two steps of one job do not meet
    given = placed({**SRUN, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"})
    assert given is not None
    assert given.address == ("10.0.0.1", 29500)


def test_only_tasks_of_a_step_join() -> None:
    assert placed({}) is None
    assert placed({**SRUN, "SLURM_STEP_NUM_TASKS": "1"}) is None
    # A batch script is told how many tasks its job may have, and that it is task 0.
    assert placed(BATCH) is None
    for step in ("batch", "4294967291"):
        assert placed({**SRUN, "SLURM_STEP_ID": step}) is None


@pytest.mark.parametrize(("counts", "node", "here"), [("8", 0, 8), ("2(x3),1", 2, 2), ("2(x3),1", 3, 1), ("4,3", 1, 3)])
def test_tasks_on_a_node(counts: str, node: int, here: int) -> None:
    assert tasks_here({"SLURM_STEP_TASKS_PER_NODE": counts, "SLURM_NODEID": str(node)}) == here
    assert tasks_here({"SLURM_NTASKS_PER_NODE": "5", "SLURM_NODEID": str(node)}) == 5
    with pytest.raises(ConfigError, match="ntasks-per-node"):
        tasks_here({})


def devices(monkeypatch: pytest.MonkeyPatch, gpus: int, device: str, places: list[Place]) -> list[str]:
    chosen: list[object] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    found = [str(Worker(place=place, device=device, timeout=1.0).torch_device()) for place in places]
    assert [f"cuda:{index}" for index in chosen] == [name for name in found if name != "cpu"]
    return found


def test_ranks_of_a_host_compute_on_one_kind_of_device(monkeypatch: pytest.MonkeyPatch) -> None:
    places = [Place(rank=4 + local, local_rank=local, world_size=8, local_size=4) for local in range(4)]
    assert devices(monkeypatch, 0, "auto", places) == ["cpu"] * 4
    assert devices(monkeypatch, 1, "auto", places) == ["cpu"] * 4
    assert devices(monkeypatch, 3, "auto", places) == ["cpu"] * 4
    assert devices(monkeypatch, 4, "auto", places) == [f"cuda:{local}" for local in range(4)]
    assert devices(monkeypatch, 4, "cpu", places) == ["cpu"] * 4
    for place in places:  # every rank says so, none starts to wait
        with pytest.raises(ConfigError, match=rf"4 ranks on this host need a GPU each; rank {place.rank} sees 3"):
            devices(monkeypatch, 3, "cuda", [place])


def test_slurm_gives_a_task_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = [{**SRUN, "SLURM_PROCID": str(2 + local), "SLURM_LOCALID": str(local)} for local in range(2)]
    for bound in ({"SLURM_GPUS_ON_NODE": "2"}, {"SLURM_GPUS_PER_TASK": "1"}):
        places = [place for task in tasks if (place := placed({**task, **bound})) is not None]
        assert devices(monkeypatch, 1, "auto", places) == ["cuda:0", "cuda:0"]
        assert devices(monkeypatch, 2, "cuda", places) == ["cuda:0", "cuda:1"]
    places = [place for task in tasks if (place := placed({**task, "SLURM_GPUS_ON_NODE": "1"})) is not None]
    assert devices(monkeypatch, 1, "auto", places) == ["cpu", "cpu"]  # the node's only one, which both see


def test_ranks_of_another_launcher_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.train.launch.cores", lambda: 8)
    place = Place(rank=0, local_rank=0, world_size=4, local_size=4)
    assert _share(place, {}) == 2
    assert _share(place, {"OMP_NUM_THREADS": "1"}) is None
    assert _share(place, {"SLURM_CPUS_ON_NODE": "32"}) == 8  # bound to its own eight


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
    """Rank 2 failed first, 0 because of it."""
    for rank, error in ((2, WeightsError("these weights are damaged")), (0, RuntimeError("connection closed"))):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / f"error-{rank}.json"))
        assert write_error(error) == (5 if rank == 2 else 4)
    ended = [Ended(rank=rank, code=1, report=_report(tmp_path, rank)) for rank in (0, 2)]
    failed = failure(ended, [0, 0, 0], tmp_path)
    assert isinstance(failed, WorkerFailed)
    assert str(failed).startswith("rank 2 of 3 failed: these weights are damaged")
    assert (failed.exit_code, failed.rank, failed.cause) == (5, 2, "error")
    # One that died without a word did not die of another's failure.
    ended.append(Ended(rank=1, code=-signal.SIGSEGV, report=None))
    failed = failure(ended, [0, 0, 0], tmp_path)
    assert "rank 1 of 3 was ended by signal 11 (SIGSEGV)" in str(failed)


@final
class Unkillable:
    """In place of a process that waits for a dead disk in the kernel: no signal ends it, and nobody sees it end."""

    pid = os.getpid()

    def __init__(self) -> None:
        self.killed = 0

    def poll(self) -> None:
        """It is there."""

    def kill(self) -> None:
        self.killed += 1

    def wait(self, timeout: float) -> None:
        raise subprocess.TimeoutExpired("rank", timeout)


def test_a_rank_that_cannot_end_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its own last words count as its end, and the launcher does not wait for the process for ever."""
    process = cast("subprocess.Popen[bytes]", Unkillable())
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error-0.json"))
    write_error(WeightsError("the disk is dead"))
    assert ended_of([process], tmp_path) == []
    for room in ("failure", "local"):
        monkeypatch.setattr(f"plait.train.{room}.GONE_SECONDS", -1.0)
    (ended,) = ended_of([process], tmp_path)
    assert (ended.rank, ended.code) == (0, 5)
    _end([process], gently=False)
    assert process.killed == 1  # type: ignore[attr-defined]
    assert "cannot be ended: it is left behind" in capsys.readouterr().err


@pytest.mark.parametrize(("error", "code", "says"), [(SaveError, 8, "disk is dead"), (WeightsError, 143, "SIGTERM")])
def test_a_signal_is_why_ranks_end_unless_they_say_that_they_could_not_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[PlaitError], code: int, says: str
) -> None:
    """Ranks that a signal to the whole group has hit fail in many ways, which are not worth a word."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error-0.json"))
    rank = mock.Mock(pid=1, **{"poll.return_value": write_error(error("the disk is dead"))})
    signals = Signals(passed_on=True)
    signals.asked = signal.SIGTERM
    with pytest.raises(WorkerFailed, match=says) as caught:
        _watch([rank], tmp_path, signals, 60.0, None)
    assert (caught.value.exit_code, caught.value.trace) == (code, "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_of_the_terminal_is_no_failure_of_the_ranks_that_it_ends(
    tmp_path: Path, number: signal.Signals
) -> None:
    """Ctrl-C goes to the launcher and to its ranks, which are gone before it looks."""
    rank = mock.Mock(pid=1, **{"poll.return_value": -number})
    signals = Signals(passed_on=True)
    signals.fatal = number
    with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else WorkerFailed) as caught:
        _watch([rank], tmp_path, signals, 60.0, None)
    if isinstance(caught.value, WorkerFailed):
        assert (caught.value.cause, caught.value.exit_code) == ("", 129)


def test_a_rank_that_exits_ends_at_once(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match="rank 1 of 2 ended with exit code 3"):
        launch(jobs.leave, processes=2, args=[str(tmp_path), "exit"], device="cpu", timeout=30.0)
    assert time.time() - (tmp_path / "left").stat().st_mtime < 10


@pytest.mark.parametrize(
    ("how", "says", "code"),
    [
        ("raise", "ValueError: rank one's own trouble", 4),
        ("refuse", "plait: error: rank 1 of 2: these weights are damaged", 5),
    ],
)
def test_a_rank_of_another_launcher_ends_at_once(tmp_path: Path, how: str, says: str, code: int) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        env = {**ENV, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "WORLD_SIZE": "2"}
    program = launching(
        f"'tests.train.jobs:leave', processes=2, args=[{str(tmp_path)!r}, {how!r}], threads=3, timeout=30.0"
    )
    ranks = [
        subprocess.Popen(program, env={**env, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        wait_for(tmp_path / "left")
        _, errors = ranks[1].communicate(timeout=10)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert ranks[1].returncode == code
    assert says in errors
    assert ("Traceback" in errors) == (how == "raise")
    assert (tmp_path / "left").read_text() == "3"  # threads


def launching(arguments: str) -> list[str]:
    """A program that calls `launch`."""
    return [sys.executable, "-P", "-c", f"from plait.train.launch import launch\nlaunch({arguments})"]


def test_killing_the_launcher_ends_every_rank(tmp_path: Path) -> None:
    program = launching(f"'tests.train.jobs:ranks', processes=2, args=[{str(tmp_path)!r}, 'wait']")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    launcher = subprocess.Popen(program, env={**ENV, "TMPDIR": str(temporary)})
    wait_for(tmp_path / "0.json", tmp_path / "1.json")
    launcher.kill()
    launcher.wait(5)
    assert_gone(tmp_path)
    assert [name.startswith(f"plait-ranks-{launcher.pid}-") for name in os.listdir(temporary)] == [True]
    with private("plait-ranks-", temporary) as mine:  # the next start
        assert os.listdir(temporary) == [mine.name]
    assert os.listdir(temporary) == []


@pytest.mark.parametrize("end", ["wait", "kill"])
def test_the_terminal_gets_its_cursor_back(tmp_path: Path, end: str) -> None:
    """Whoever drew on it died without a word: by Ctrl-C, or because another rank did."""
    ours, theirs = pty.openpty()
    program = launching(f"'tests.train.jobs:ranks', processes=2, args=[{str(tmp_path)!r}, {end!r}]")
    launcher = subprocess.Popen(program, env=ENV, stdout=theirs, stderr=subprocess.DEVNULL)
    wait_for(tmp_path / "0.json", tmp_path / "1.json")
    if end == "wait":
        launcher.send_signal(signal.SIGINT)
    assert launcher.wait(20) != 0
    os.close(theirs)
    assert os.read(ours, 4096).endswith(b"\x1b[?25h\r\n")
    os.close(ours)


def test_a_reader_who_leaves_ends_the_ranks_without_a_word(tmp_path: Path) -> None:
    program = launching(f"'tests.train.jobs:chatter', processes=2, args=[{str(tmp_path)!r}]")
    program[-1] = program[-1].replace("\nlaunch", "\ntry: launch") + "\nexcept BrokenPipeError: raise SystemExit(7)"
    with subprocess.Popen(program, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == b"a line\n"
        wait_for(*(tmp_path / f"{rank}.json" for rank in range(2)))
        launcher.stdout.close()
        _, errors = launcher.communicate(timeout=20)
    assert launcher.returncode == 7
    assert errors == b""
    assert_gone(tmp_path)


def test_files_of_the_current_folder_are_not_pythons(tmp_path: Path) -> None:
    for name in ("json", "signal"):  # what a worker needs before and after it knows where its launcher imports from
        (tmp_path / f"{name}.py").write_text("raise ImportError('not mine')")
    program = launching(f"'tests.train.jobs:ranks', processes=2, args=[{str(tmp_path)!r}, 'ok']")
    subprocess.run(program, env=ENV, cwd=tmp_path, check=True, timeout=90)


def wait_for(*files: Path) -> None:
    deadline = time.monotonic() + 90
    while not all(file.exists() for file in files):
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.05)


def assert_gone(folder: Path) -> None:
    """No rank that left its note is still there."""
    pids = [json.loads(note.read_text())["pid"] for note in folder.glob("*.json")]
    assert len(pids) == 2
    deadline = time.monotonic() + 5
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


def test_no_room_for_temporary_files_is_said_before_a_rank_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else ranks would map files with holes, and be killed by SIGBUS at the first touch."""
    written, write = [], Path.write_bytes

    def fill(path: Path, content: bytes) -> int:
        if len(written) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(path)
        return write(path, content)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(Path, "write_bytes", fill)
    needed = r"has no [\d,]+ bytes for 2 ranks: No space left on device; make room there, or set TMPDIR"
    with pytest.raises(ConfigError, match=needed):
        run_local({"function": "tests.train.jobs:nothing", "args": []}, 2, timeout=1.0)
    assert not list(tmp_path.glob("*/*"))
    assert len(written) == 2


def test_what_ranks_say_of_themselves_has_no_holes(tmp_path: Path) -> None:
    Flight(0, tmp_path / "flight")
    Heartbeat(Worker(place=Place(rank=0, local_rank=0, world_size=1), device="cpu", timeout=1.0, watch=tmp_path))
    for name, size in (("flight", flight.SIZE), ("beat-0", heartbeat.SIZE)):
        found = (tmp_path / name).stat()
        assert (found.st_size, found.st_blocks * 512 >= size) == (size, True)
