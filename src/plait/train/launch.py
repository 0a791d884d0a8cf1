"""`launch`: runs a function on every rank of a run, whoever starts the processes.

Without a launcher it starts local workers through torch.distributed's own. Under ``torchrun``, or ``srun`` with Slurm's
variables, this process *is* one of the ranks: it joins the others. Workers are started by command, with their function
named in a JSON file: nothing is pickled. A failing rank, or Ctrl-C, ends all ranks at once, and the failing rank's own
error is what the caller sees; a rank that another launcher started says it itself.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import threading
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from plait.core.errors import ConfigError, PlaitError, PlanError, RankError
from plait.core.mesh import Mesh
from plait.train import slurm
from plait.train.worker import BROKEN_PIPE, call, run

if TYPE_CHECKING:
    import torch
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    from plait.comm.world import World

MONITOR_SECONDS = 0.1
"""How often the launcher looks whether a rank has ended."""
GRACE_SECONDS = 2
"""What a rank that does not end on SIGTERM is given before SIGKILL."""
_WORKER = """\
import json, sys
with open(sys.argv[1], encoding="utf-8") as file: sys.path[:] = json.load(file)["path"]
from plait.train.worker import start
start(sys.argv[1])
"""
"""A worker's program. With ``python -P`` it imports what the launcher can, and does not take a ``signal.py`` in the
folder where a run was started for Python's own."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a launcher put this process.

    ``local_size`` is the number of ranks on this host; ``own_gpu``: a GPU that is the only one to be seen is this
    rank's alone. ``address`` is rank 0's (host, port); None: torchrun's variables hold it.
    """

    rank: int
    local_rank: int
    world_size: int
    local_size: int = 1
    own_gpu: bool = False
    address: tuple[str, int] | None = None


@dataclass(frozen=True, kw_only=True)
class Worker:
    """What a launched function gets first: its place, and the way to the other ranks."""

    place: Place
    device: str
    """auto, cpu or cuda; auto is CUDA where this host has a GPU for each of its ranks."""
    timeout: float
    watch: Path | None = None
    """Private folder in which the launcher of this rank looks for its signs of life; None: another launcher's rank."""

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
        """The rank's device, made the current one when it is a GPU. All ranks of a host get the same kind: they could
        not talk to each other otherwise."""
        import torch

        place, gpus = self.place, torch.cuda.device_count() if self.device != "cpu" else 0
        own = gpus == 1 and place.own_gpu
        if own or gpus >= place.local_size:
            index = 0 if own else place.local_rank
            torch.cuda.set_device(index)
            return torch.device("cuda", index)
        if self.device == "cuda":
            raise ConfigError(
                f"run.device=cuda: {place.local_size} ranks on this host need a GPU each; rank {place.rank} sees {gpus}"
            )
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
            here = int(env.get("LOCAL_WORLD_SIZE", size))
            return Place(rank=rank, local_rank=int(env.get("LOCAL_RANK", rank)), world_size=size, local_size=here)
        size = slurm.tasks(env)
        if size == 1:  # no Slurm, an interactive shell, or a script that starts its own workers
            return None
        here = slurm.tasks_here(env)
        return Place(
            rank=int(env["SLURM_PROCID"]),
            local_rank=int(env.get("SLURM_LOCALID", 0)),
            world_size=size,
            local_size=here,
            own_gpu=slurm.own_gpu(env, here),
            address=slurm.address(env),
        )
    except ValueError as error:
        raise ConfigError(f"the launcher's variables cannot be read: {error}") from error


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
    process. Raises `WorkerFailed` naming the first local worker that failed, KeyboardInterrupt on Ctrl-C, and
    BrokenPipeError when who read the output has left, after every rank has ended. When a rank that torchrun or srun
    started fails, it says why and this process ends.
    """
    place = placed()
    if place is None and processes == 1:
        _use_threads(threads)
        alone = Place(rank=0, local_rank=0, world_size=1)
        call(address_of(function), Worker(place=alone, device=device, timeout=timeout), args)
    elif place is not None:
        _use_threads(threads or _share(place))
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


def _share(place: Place, env: Mapping[str, str] = os.environ) -> int | None:
    """Threads of a rank that shares this host with others; None where OMP_NUM_THREADS has told torch."""
    if env.get("OMP_NUM_THREADS"):
        return None
    # A task that Slurm has bound to cores of its own sees no others: it is the node's that are shared.
    node = int(env.get("SLURM_CPUS_ON_NODE") or cores())
    return max(1, min(cores(), node // place.local_size))


def _use_threads(threads: int | None) -> None:
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def _join(address: str, worker: Worker, args: Sequence[object]) -> None:
    """Be one of the ranks that another launcher started, which gets the error file that it asks for.

    Returns when the function has; otherwise it says why, and ends this process at once: threads of a process group that
    is no longer whole would keep the interpreter, and so the launcher, until the time-out.
    """
    if threading.current_thread() is threading.main_thread():
        # The launcher ends its ranks with the signal it got: die at once, it has the message to give.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    code, error = run(address, worker, args)
    if code == 0:
        return
    place = worker.place
    if isinstance(error, PlaitError):
        print(f"plait: error: rank {place.rank} of {place.world_size}: {error}", file=sys.stderr)
    elif error is not None:
        traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


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
                elastic_launch(config, sys.executable)("-P", "-c", _WORKER, str(file))
            except ChildFailedError as error:
                _leave_panel()
                if any(failure.exitcode == BROKEN_PIPE for failure in error.failures.values()):
                    raise BrokenPipeError from None
                raise _failure(error.failures, processes) from None
            except SignalException as error:
                _leave_panel()
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


def _leave_panel() -> None:
    """Rank 0 may have died while it drew: give the terminal its cursor back, and what follows a line of its own."""
    from rich.console import Console

    console = Console()
    if console.is_terminal:
        console.show_cursor()
        console.print()


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
