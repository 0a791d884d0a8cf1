"""`launch`: runs a function on every rank of a run, whoever starts the processes.

Without a launcher it starts local workers (`plait.train.local`). Under ``torchrun``, or ``srun`` with Slurm's
variables, this process *is* one of the ranks: it joins the others. Workers are started by command, with their function
named in a JSON file: nothing is pickled. A failing rank, or Ctrl-C, ends all ranks at once, and the failing rank's own
error is what the caller sees; a rank that another launcher started says it itself.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from plait.comm.flight import Flight, flight_file
from plait.core.errors import ConfigError, PlaitError, PlanError, RankError
from plait.core.mesh import Mesh
from plait.train import slurm
from plait.train.failure import WorkerFailed
from plait.train.local import Watched, run_local
from plait.train.supervise import StoppedError
from plait.train.worker import call, run

if TYPE_CHECKING:
    import torch

    from plait.comm.world import World


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
    memory: Path | None = None
    """Folder of memory files that outlives the ranks, for `plait.train.replicas`; None: there is none."""

    def connect(self, mesh: Mesh) -> World:
        """Join the ranks of ``mesh``; PlanError when the launcher started another number of them."""
        from torch.distributed.rendezvous import rendezvous

        from plait.comm.world import World

        place, device = self.place, self.torch_device()
        if mesh.world_size != place.world_size:
            raise PlanError(f"{place.world_size} ranks were started, the mesh {mesh.sizes} needs {mesh.world_size}")
        if place.address is None:
            flight = Flight(place.rank, flight_file(self.watch, place.rank)) if self.watch is not None else None
            return World.connect(mesh, device=device, timeout=self.timeout, flight=flight)
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
    watched: Watched | None = None,
) -> None:
    """Run ``function(worker, *args)`` on ``processes`` ranks; returns when all have.

    ``function`` is importable at top level: the object, or ``"module:name"``. ``args`` are JSON values. ``device`` is
    auto, cpu or cuda; ``timeout`` the seconds any rank waits for another; ``threads`` those a local rank computes with
    (None: OMP_NUM_THREADS, or the cores shared evenly). ``watched``: for functions that heed
    `plait.train.supervise.Stop`; None: a signal ends all ranks at once. One rank that is not watched, or a rank that
    torchrun or srun started, runs in this process. Raises `WorkerFailed` naming the first local worker that failed or
    hangs, `StoppedError` when watched ranks heeded a signal, KeyboardInterrupt on Ctrl-C, and
    BrokenPipeError when who read the output has left, after every rank has ended. When a rank that torchrun or srun
    started fails, it says why and this process ends.
    """
    place = placed()
    if place is None and processes == 1 and watched is None:
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
        try:
            run_local(payload, processes, timeout=timeout, watched=watched)
        except (WorkerFailed, StoppedError, KeyboardInterrupt, BrokenPipeError):
            _leave_panel()
            raise


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


def _leave_panel() -> None:
    """Rank 0 may have died while it drew: give the terminal its cursor back, and what follows a line of its own."""
    from rich.console import Console

    console = Console()
    if console.is_terminal:
        console.show_cursor()
        console.print()
