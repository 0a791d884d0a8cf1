"""What became of a local rank: how it ended, what it and the others left, and the error that says so."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.comm import flight
from plait.core.errors import ConfigError, PlanError, RankError, SaveError
from plait.train.heartbeat import Beat, read_beat, state_of
from plait.train.supervise import StoppedError
from plait.train.worker import BROKEN_PIPE

GONE_SECONDS = 10.0
"""What a process is given to be gone, once it has left its error or was sent SIGKILL: one that waits for a dead disk in
the kernel is not, and is not waited for."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a rank ended: its exit code (below zero: minus a signal) and the report it left, if any."""

    rank: int
    code: int
    report: Mapping[str, Any] | None


class WorkerFailed(RankError):
    """A local rank failed, and all were ended.

    ``rank`` is which (-1: none, a signal came to the launcher), ``cause`` is error, exit, signal, hang or recall (they
    did not end when they were asked to make room for others; "": a signal, which is obeyed),
    ``trace`` its own traceback ("" when it left none), ``diagnosis`` what the others waited for ("" when nobody did),
    ``flights`` the last operations of all ranks, ``beats`` their last signs of life.
    """

    def __init__(
        self,
        message: str,
        *,
        trace: str,
        exit_code: int,
        rank: int = -1,
        cause: str = "",
        diagnosis: str = "",
        flights: Sequence[Mapping[str, Any]] = (),
        beats: Mapping[int, Beat] | None = None,
    ) -> None:
        super().__init__(message)
        self.trace = trace
        self.exit_code = exit_code
        self.rank = rank
        self.cause = cause
        self.diagnosis = diagnosis
        self.flights = flights
        self.beats = beats or {}


def signalled(number: int, why: str, cause: str = "") -> WorkerFailed:
    return WorkerFailed(f"{signal.Signals(number).name}: {why}", trace="", exit_code=128 + number, cause=cause)


def ended_of(ranks: Sequence[subprocess.Popen[bytes]], folder: Path) -> list[Ended]:
    """Those that have; one that has left its error long ago has, too, whatever keeps it in the kernel."""
    found = []
    for rank, process in enumerate(ranks):
        code, report = process.poll(), _report(folder, rank)
        if code is None and report is not None and time.time() > float(report["time"]) + GONE_SECONDS:
            code = int(report["exit_code"])
        if code is not None:
            found.append(Ended(rank=rank, code=code, report=report))
    return found


def _report(folder: Path, rank: int) -> dict[str, Any] | None:
    try:
        found = json.loads((folder / f"error-{rank}.json").read_text(encoding="utf-8"))["plait"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, dict) else None


def failure(ended: Sequence[Ended], pids: Sequence[int], folder: Path) -> Exception:
    """The error of the rank that failed first: others may have failed because of it. Where it waited in vain for one
    that is still there, that one hangs."""
    failed = [one for one in ended if one.code not in (0, StoppedError.exit_code)]
    if any(one.code == BROKEN_PIPE for one in failed):
        return BrokenPipeError()
    # One that died without a word did not die of another's failure.
    first = min(failed, key=lambda one: (0, 0.0) if one.report is None else (1, float(one.report["time"])))
    processes = len(pids)
    who, code, trace, cause = f"rank {first.rank} of {processes}", RankError.exit_code, "", "exit"
    hint, known = "its last words, if any, are above", f"it ended with exit code {first.code}"
    if first.report is not None:
        code, cause = int(first.report["exit_code"]), "error"
        explained = code in (ConfigError.exit_code, PlanError.exit_code, SaveError.exit_code)
        trace = "" if explained else str(first.report["trace"])
        text, known = f"{who} failed: {first.report['summary']}", "it failed"
        late = flight.suspect(_flights(folder, processes))
        if code == RankError.exit_code and late is not None and late not in {one.rank for one in ended}:
            return hang(late, pids, folder, f"{who}: {first.report['summary']}")
    elif first.code < 0:
        name, cause = signal.Signals(-first.code).name, "signal"
        known = f"it was ended by {name}"
        if first.code == -signal.SIGKILL:
            hint = "if nobody killed it, the machine ran out of memory: take a smaller plan.micro, or "
            hint += "plan.recompute=full"
        text = f"{who} was ended by signal {-first.code} ({name}); {hint}."
    else:
        text = f"{who} ended with exit code {first.code}; {hint}."
    return _failed(text, folder, processes, {first.rank: known}, first.rank, cause, trace, code)


def hang(rank: int, pids: Sequence[int], folder: Path, noticed: str) -> WorkerFailed:
    beat, state = read_beat(folder, rank), state_of(pids[rank])
    where = f" in step {beat.step} ({beat.phase})" if beat is not None else ""
    text = f"rank {rank} of {len(pids)} hangs{where}: it {state}; {noticed}."
    return _failed(text, folder, len(pids), {rank: f"it {state}"}, rank, "hang", "", RankError.exit_code)


def _flights(folder: Path, processes: int) -> list[dict[str, Any]]:
    found = (flight.read(flight.flight_file(folder, rank)) for rank in range(processes))
    return [held for held in found if held is not None]


def _failed(
    text: str, folder: Path, processes: int, places: Mapping[int, str], rank: int, cause: str, trace: str, code: int
) -> WorkerFailed:
    flights = _flights(folder, processes)
    beats = {one: beat for one in range(processes) if (beat := read_beat(folder, one)) is not None}
    diagnosis = flight.diagnose(flights, places)
    lines = [text, *([diagnosis[0].upper() + diagnosis[1:] + "."] if diagnosis else []), "All ranks were ended."]
    return WorkerFailed(
        "\n".join(lines),
        trace=trace,
        exit_code=code,
        rank=rank,
        cause=cause,
        diagnosis=diagnosis,
        flights=flights,
        beats=beats,
    )
