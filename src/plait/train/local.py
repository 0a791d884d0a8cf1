"""Ranks on this machine: started by command, watched, and ended together.

Each rank is a process with a store to meet the others at and a private folder in which it leaves its signs of life
(`plait.train.heartbeat`), its last operations (`plait.comm.flight`) and the error that it ends with. Nothing is
pickled. When one fails, or stands still, all are ended, and the error names that rank, what became of it, and what the
others waited for. The kernel ends them when this process dies.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from plait.comm import flight
from plait.core.errors import ConfigError, SaveError
from plait.train.failure import GONE_SECONDS, ended_of, failure, hang, signalled
from plait.train.folder import private
from plait.train.heartbeat import SIZE, Lookout, beat_file, state_of
from plait.train.signals import Signals
from plait.train.supervise import StoppedError, stop_file

POLL_SECONDS = 0.05
"""How often it is looked whether a rank has ended."""
LOOK_SECONDS = 0.5
"""How often their signs of life are read."""
SETTLE_SECONDS = 0.1
"""After a rank has failed: others that fail at the same time are asked too, the first of them is the cause."""
GRACE_SECONDS = 2.0
"""What ranks that do not end on SIGTERM are given before SIGKILL; a run that is started again has no such patience."""
_WORKER = """\
import json, sys
with open(sys.argv[1], encoding="utf-8") as file: sys.path[:] = json.load(file)["path"]
from plait.train.worker import start
start(sys.argv[1])
"""
"""A worker's program. With ``python -P`` it imports what the launcher can, and does not take a ``signal.py`` in the
folder where a run was started for Python's own."""


@dataclass(frozen=True, kw_only=True)
class Watched:
    """How ranks that heed `plait.train.supervise.Stop` are looked after.

    ``grace``: seconds they get to save after SIGTERM or SIGUSR1, which is passed on to them; another such signal ends
    them at once. ``recall`` is asked now and then: True asks the ranks to save and end, as a signal does. ``places``:
    the places on this machine (GPUs, where it has them) that the ranks take; None: the first ones.
    """

    grace: float
    recall: Callable[[], bool]
    places: Sequence[int] | None = None
    memory: Path | None = None
    """Folder of memory files that outlives the ranks; None: there is none."""


def run_local(job: Mapping[str, object], processes: int, *, timeout: float, watched: Watched | None = None) -> None:
    """Run ``job`` on ``processes`` local ranks; returns when all are done.

    ``timeout``: a rank whose signs of life stop for so many seconds hangs. ``watched``: None for functions that know
    nothing of signals: one ends them all. Raises `WorkerFailed`, `StoppedError` when all ranks ended on a signal as
    they should, KeyboardInterrupt, and BrokenPipeError when who read the output has left.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, yet torch does not list it

    limit, least = resource.getrlimit(resource.RLIMIT_FSIZE)[0], flight.SIZE
    if limit != resource.RLIM_INFINITY and limit < least:
        raise ConfigError(f"this process may make files of {limit:,} bytes at most (ulimit -f); ranks need {least:,}")
    with private("plait-ranks-") as folder:
        try:
            memory = str(watched.memory) if watched is not None and watched.memory is not None else None
            whole = {**job, "watch": str(folder), "memory": memory}
            text = json.dumps(whole)
        except TypeError as error:
            raise ConfigError(f"the arguments of a launched function have to be JSON values: {error}") from error
        _set_aside(folder, text, processes)
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ranks: list[subprocess.Popen[bytes]] = []
        with Signals(passed_on=watched is not None) as signals:
            try:
                for rank in range(processes):
                    command = [sys.executable, "-P", "-c", _WORKER, str(folder / "job.json")]
                    environment = _environment(rank, processes, folder, store.port)
                    if watched is not None and watched.places is not None:
                        environment |= _visible(watched.places)
                    ranks.append(subprocess.Popen(command, env=environment))
                _watch(ranks, folder, signals, timeout, watched)
            finally:
                _end(ranks, gently=watched is None)


def _set_aside(folder: Path, job: str, processes: int) -> None:
    """The job in ``folder``, and room for what ranks say of themselves: they map it, and a hole would kill them."""
    try:
        (folder / "job.json").write_text(job, encoding="utf-8")
        for rank in range(processes):
            flight.flight_file(folder, rank).write_bytes(bytes(flight.SIZE))
            beat_file(folder, rank).write_bytes(bytes(SIZE))
    except OSError as error:
        least = len(job) + processes * (flight.SIZE + SIZE)
        raise ConfigError(
            f"the folder for temporary files {folder.parent} has no {least:,} bytes for {processes} ranks: "
            f"{error.strerror}; make room there, or set TMPDIR to another"
        ) from error


def _visible(places: Sequence[int], env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Show ranks the GPUs of ``places`` alone, so that the k-th rank takes the k-th of them."""
    shown = env.get("CUDA_VISIBLE_DEVICES", "")
    names = shown.split(",") if shown else [str(place) for place in range(max(places, default=-1) + 1)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[place] for place in places if place < len(names))}


def _environment(rank: int, processes: int, folder: Path, port: int) -> dict[str, str]:
    """What torch.distributed's ``env://`` reads, and where a failing rank leaves its error."""
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_ERROR_FILE": str(folder / f"error-{rank}.json"),
    }


def _watch(
    ranks: Sequence[subprocess.Popen[bytes]], folder: Path, signals: Signals, timeout: float, watched: Watched | None
) -> None:
    """Return when all ranks have ended well; raise as `run_local` says, with ranks perhaps still there."""
    lookout, looked = Lookout(folder, len(ranks), timeout), time.monotonic()
    asked: float | None = None
    while True:
        ended = ended_of(ranks, folder)
        if any(one.code not in (0, StoppedError.exit_code) for one in ended):
            time.sleep(SETTLE_SECONDS)
            _obey(signals)  # a terminal's Ctrl-C ends the ranks too, at once: they have not failed
            # A signal to all of them came before they could heed it.
            if signals.asked and not any(one.code == SaveError.exit_code for one in ended):
                raise signalled(signals.asked, "the ranks ended before they could save")
            raise failure(ended_of(ranks, folder), [process.pid for process in ranks], folder)
        if len(ended) == len(ranks):
            stopped = [one for one in ended if one.code]
            if not stopped:
                return
            report = stopped[0].report or {}
            raise StoppedError(str(report.get("summary", "the ranks stopped")))
        now = time.monotonic()
        _obey(signals)
        if watched is not None and asked is not None and now > asked + watched.grace:
            late = f"the ranks had not saved within {watched.grace:g} s (run.grace)"
            raise signalled(signals.asked or signal.SIGUSR1, late, cause="" if signals.asked else "recall")
        if signals.asked and asked is None:
            asked = _ask(folder, signals.asked)
        if now > looked + LOOK_SECONDS:
            looked = now
            if watched is not None and asked is None and watched.recall():
                asked = _ask(folder, signal.SIGUSR1)
            rank = lookout.hung(now)
            if rank is not None:
                noticed = f"no sign of life for {timeout:g} s (run.timeout)"
                raise hang(rank, [process.pid for process in ranks], folder, noticed)
        time.sleep(POLL_SECONDS)


def _obey(signals: Signals) -> None:
    """Raise for a signal that ends the ranks."""
    if signals.fatal == signal.SIGINT:
        raise KeyboardInterrupt
    if signals.fatal:
        raise signalled(signals.fatal, "all ranks were ended")


def _ask(folder: Path, number: int) -> float:
    """Ask the ranks to save and end, as signal ``number`` does; returns when."""
    draft = folder / "stop.tmp"
    draft.write_text(str(int(number)), encoding="ascii")
    draft.rename(stop_file(folder))
    return time.monotonic()


def _end(ranks: Sequence[subprocess.Popen[bytes]], *, gently: bool) -> None:
    """End what is left of the ranks, stopped ones too."""
    if gently:
        for process in ranks:
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + GRACE_SECONDS
        while any(process.poll() is None for process in ranks) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS / 5)
    for process in ranks:
        if process.poll() is None:
            process.kill()
    deadline = time.monotonic() + GONE_SECONDS
    for rank, process in enumerate(ranks):
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            left = f"rank {rank} (process {process.pid}) {state_of(process.pid)} and cannot be ended: it is left behind"
            print(f"plait: warning: {left}", file=sys.stderr)
