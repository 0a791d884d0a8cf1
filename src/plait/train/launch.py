"""`launch`: runs a function on every rank of a run, whoever starts the processes.

Without a launcher it starts local workers through torch.distributed's own. Under ``torchrun``, or ``srun`` with Slurm's
variables, this process *is* one of the ranks: it joins the others. Workers are started by command, with their function
named in a JSON file: nothing is pickled. A failing rank, or Ctrl-C, ends all ranks at once, and the failing rank's own
error is what the caller sees.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from plait.core.errors import ConfigError, PlanError, RankError
from plait.core.mesh import Mesh
from plait.train.worker import call, write_error

if TYPE_CHECKING:
    import torch
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    from plait.comm.world import World

MONITOR_SECONDS = 0.1
"""How often the launcher looks whether a rank has ended."""
GRACE_SECONDS = 2
"""What a rank that does not end on SIGTERM is given before SIGKILL."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a launcher put this process. ``address`` is rank 0's (host, port); None: torchrun's variables hold it."""

    rank: int
    local_rank: int
    world_size: int
    address: tuple[str, int] | None = None


@dataclass(frozen=True, kw_only=True)
class Worker:
    """What a launched function gets first: its place, and the way to the other ranks."""

    place: Place
    device: str
    """auto, cpu or cuda; auto is CUDA where this host has a GPU for the rank."""
    timeout: float

    def connect(self, mesh: Mesh) -> World:
        """Join the ranks of ``mesh``; PlanError when the launcher started another number of them."""
        from torch.distributed.rendezvous import rendezvous

        from plait.comm.world import World

        place, device = self.place, self.torch_device()
        if mesh.world_size != place.world_size:
            raise PlanError(f"{place.world_size} ranks were started, the mesh {mesh.sizes} needs {mesh.world_size}")
        if place.address is None:
            return World.connect(mesh, device=device, timeout=self.timeout)
        host, port = place.address
        patience = timedelta(seconds=self.timeout)
        try:
            meeting = rendezvous(f"tcp://{host}:{port}", place.rank, place.world_size, timeout=patience)
            store, _, _ = next(iter(meeting))
        except (RuntimeError, ValueError) as error:
            raise RankError(
                f"rank {place.rank} cannot reach rank 0 at {host}:{port}: {error}; set MASTER_ADDR and MASTER_PORT"
            ) from error
        return World.connect(mesh, device=device, timeout=self.timeout, store=store, rank=place.rank)

    def torch_device(self) -> torch.device:
        """The rank's device, made the current one when it is a GPU."""
        import torch

        gpus = torch.cuda.device_count() if self.device != "cpu" else 0
        if self.place.local_rank < gpus:
            torch.cuda.set_device(self.place.local_rank)
            return torch.device("cuda", self.place.local_rank)
        if self.device == "cuda":
            local = self.place.local_rank
            raise ConfigError(f"run.device=cuda: rank {self.place.rank} needs GPU {local}, there are {gpus} here")
        return torch.device("cpu")


class WorkerFailed(RankError):
    """A local worker failed. ``trace`` is its own traceback ("" when it left none)."""

    def __init__(self, message: str, *, trace: str, exit_code: int) -> None:
        super().__init__(message)
        self.trace = trace
        self.exit_code = exit_code


def placed(env: Mapping[str, str] = os.environ) -> Place | None:
    """Where torchrun or srun put this process; None without either. ConfigError for variables that make no sense."""
    try:
        if "RANK" in env and "WORLD_SIZE" in env:
            rank, size = int(env["RANK"]), int(env["WORLD_SIZE"])
            return Place(rank=rank, local_rank=int(env.get("LOCAL_RANK", rank)), world_size=size)
        if "SLURM_PROCID" not in env:
            return None
        size = int(env.get("SLURM_STEP_NUM_TASKS") or env.get("SLURM_NTASKS") or 1)
        if size == 1:  # an interactive shell, or a script that starts its own workers
            return None
        rank = int(env["SLURM_PROCID"])
        host = env.get("MASTER_ADDR") or first_host(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST") or "")
        port = int(env.get("MASTER_PORT") or slurm_port(int(env.get("SLURM_JOB_ID") or 0), env.get("SLURM_STEP_ID")))
        return Place(rank=rank, local_rank=int(env.get("SLURM_LOCALID", 0)), world_size=size, address=(host, port))
    except ValueError as error:
        raise ConfigError(f"the launcher's variables cannot be read: {error}") from error


def first_host(nodelist: str) -> str:
    """``rack[2-3]n[04-08,11],login1`` -> ``rack2n04``; ConfigError for an empty list."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodelist)
    if first is None:
        raise ConfigError("srun gave no SLURM_NODELIST: set MASTER_ADDR to the host of rank 0")
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0])


def slurm_port(job: int, step: str | None) -> int:
    """A port that all ranks of a job's step agree on, below the range from which Linux hands out ports of its own."""
    return 15000 + (job + 97 * int(step or 0)) % 15000


def launch(
    function: Callable[..., object] | str,
    *,
    processes: int,
    args: Sequence[object] = (),
    device: str = "auto",
    timeout: float = 60.0,
    threads: int | None = None,
) -> None:
    """Run ``function(worker, *args)`` on ``processes`` ranks; returns when all have.

    ``function`` is importable at top level: the object, or ``"module:name"``. ``args`` are JSON values. ``device`` is
    auto, cpu or cuda; ``timeout`` the seconds any rank waits for another; ``threads`` those a local rank computes with
    (None: OMP_NUM_THREADS, or the cores shared evenly). One rank, or a rank that torchrun or srun started, runs in this
    process. Raises `WorkerFailed` naming the first local worker that failed, and KeyboardInterrupt on Ctrl-C, after
    every rank has ended.
    """
    place = placed()
    if place is None and processes == 1:
        _use_threads(threads)
        alone = Place(rank=0, local_rank=0, world_size=1)
        call(address_of(function), Worker(place=alone, device=device, timeout=timeout), args)
    elif place is not None:
        _join(address_of(function), Worker(place=place, device=device, timeout=timeout), args)
    else:
        payload = {
            "function": address_of(function),
            "args": list(args),
            "device": device,
            "timeout": timeout,
            "threads": threads or int(os.environ.get("OMP_NUM_THREADS") or max(1, cores() // processes)),
            "path": sys.path,
            "parent": os.getpid(),
        }
        _start(payload, processes)


def address_of(function: Callable[..., object] | str) -> str:
    """``module:name`` of a top-level function, ``file.py:name`` for one in a script; ConfigError for others."""
    if isinstance(function, str):
        return function
    name, module = getattr(function, "__qualname__", ""), getattr(function, "__module__", "")
    if not name or "<" in name:
        raise ConfigError(f"launch() needs a top-level function that workers can import, not {name or function!r}")
    if module == "__main__":
        main = sys.modules["__main__"]
        module = main.__spec__.name if main.__spec__ is not None else os.path.abspath(str(main.__file__))
    return f"{module}:{name}"


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _use_threads(threads: int | None) -> None:
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def _join(address: str, worker: Worker, args: Sequence[object]) -> None:
    """Be one of the ranks that another launcher started; it gets the error file that it asks for."""
    if threading.current_thread() is threading.main_thread():
        # The launcher ends its ranks with the signal it got: die at once, it has the message to give.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        call(address, worker, args)
    except Exception as error:
        write_error(error)
        raise


def _start(payload: Mapping[str, object], processes: int) -> None:
    """Start local workers and wait for them."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    with tempfile.TemporaryDirectory(prefix="plait-") as folder:
        file = Path(folder) / "job.json"
        try:
            file.write_text(json.dumps(payload), encoding="utf-8")
        except TypeError as error:
            raise ConfigError(f"the arguments of a launched function have to be JSON values: {error}") from error
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            monitor_interval=MONITOR_SECONDS,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            signals_to_handle="SIGTERM,SIGHUP,SIGQUIT",
            shutdown_timeout=GRACE_SECONDS,
        )
        with _quiet("torch.distributed"), _signals() as interrupts:
            try:
                elastic_launch(config, sys.executable)("-m", "plait.train.worker", str(file))
            except ChildFailedError as error:
                raise _failure(error.failures, processes) from None
            except SignalException as error:
                if interrupts:
                    raise KeyboardInterrupt from None
                name = signal.Signals(error.sigval).name
                raise WorkerFailed(f"{name}: all ranks were ended", trace="", exit_code=128 + error.sigval) from None


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Turn Ctrl-C into what torch's launcher ends its workers on, by SIGTERM; yields the interrupts that came."""
    from torch.distributed.elastic.multiprocessing import SignalException

    came: list[int] = []

    def interrupted(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one must not stop the ranks from being ended
        came.append(number)
        raise SignalException("interrupted", sigval=signal.SIGTERM)

    if threading.current_thread() is not threading.main_thread():
        yield came
        return
    taken = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in taken}
    signal.signal(signal.SIGINT, interrupted)
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _quiet(prefix: str) -> Iterator[None]:
    """Keep the launcher's own log out of the way: what it says of a failure, `WorkerFailed` says better."""
    loggers = [log for name, log in logging.root.manager.loggerDict.items() if name.startswith(prefix)]
    before = [(log, log.level) for log in loggers if isinstance(log, logging.Logger)]
    for log, _ in before:
        log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for log, level in before:
            log.setLevel(level)


def _failure(failures: Mapping[int, ProcessFailure], processes: int) -> WorkerFailed:
    """The error of the rank that failed first: others may have failed because of it, or were ended by the launcher."""

    def order(item: tuple[int, ProcessFailure]) -> tuple[int, float]:
        _, failure = item
        report = _report(failure)
        if report is None:  # died without a word: no consequence of another's failure, unless the launcher ended it
            return (2, 0.0) if failure.exitcode == -signal.SIGTERM else (0, 0.0)
        return 1, float(report["time"])

    rank, failure = min(failures.items(), key=order)
    report = _report(failure)
    who = f"rank {rank} of {processes}"
    if report is not None:
        code = int(report["exit_code"])
        what = str(report["summary"])
        return WorkerFailed(f"{who} failed: {what}\nAll ranks were ended.", trace=str(report["trace"]), exit_code=code)
    if failure.exitcode < 0:
        how = f"{who} was ended by signal {-failure.exitcode} ({failure.signal_name()})"
        hint = "if nobody killed it, the machine ran out of memory: take a smaller plan.micro, or plan.recompute=full"
        hint = hint if failure.exitcode == -signal.SIGKILL else "its last words, if any, are above"
    else:
        how, hint = f"{who} ended with exit code {failure.exitcode}", "its last words, if any, are above"
    return WorkerFailed(f"{how}; {hint}.\nAll ranks were ended.", trace="", exit_code=RankError.exit_code)


def _report(failure: ProcessFailure) -> dict[str, Any] | None:
    found = failure.error_file_data.get("plait")
    return found if isinstance(found, dict) else None
