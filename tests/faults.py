"""Faults for ranks of real runs: `fail_at` plans one, `run_rank` is the rank that meets it.

A fault strikes when the rank beats (`plait.train.heartbeat`): phases are load, step, evaluate and save; ``collective``
is the first operation with other ranks in that step. It strikes once, whatever is started again, or ``times`` times.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from plait.comm.group import Group
from plait.core.config import loads
from plait.train import trainer
from plait.train.heartbeat import Heartbeat
from plait.train.launch import Worker

RANK = "tests.faults:run_rank"
PLANNED = "faults.json"
Fault = dict[str, Any]


def fail_at(rank: int, step: int, phase: str, kind: str, *, times: int = 1) -> Fault:
    """``kind``: SIGKILL, SIGSTOP, SIGSEGV (any signal), exception, exit, slow, hang."""
    return {"rank": rank, "step": step, "phase": phase, "kind": kind, "times": times}


def plan_faults(folder: Path, *faults: Fault) -> None:
    """Let the ranks of the run in ``folder`` meet ``faults``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / PLANNED).write_text(json.dumps(faults))


def run_rank(worker: Worker, text: str, as_json: bool) -> None:
    """`plait.train.trainer.run_rank` with the faults that are planned in the run's folder."""
    folder = loads(text).run.dir
    assert folder is not None
    faults = json.loads((folder / PLANNED).read_text())
    mine = [(number, fault) for number, fault in enumerate(faults) if fault["rank"] == worker.place.rank]
    beat, under_way = Heartbeat.beat, Group._under_way
    armed: list[Fault] = []

    def meet(step: int, phase: str) -> None:
        for number, fault in mine:
            mark = folder / f"struck-{number}"
            struck = len(mark.read_bytes()) if mark.exists() else 0
            if fault["step"] != step or struck >= fault["times"]:
                continue
            if fault["phase"] == phase:
                mark.write_bytes(b"x" * (struck + 1))
                strike(fault["kind"])
            elif fault["phase"] == "collective" and phase == "step":
                mark.write_bytes(b"x" * (struck + 1))
                armed.append(fault)

    def beat_and_meet(self: Heartbeat, step: int, phase: str, **rest: Any) -> None:
        beat(self, step, phase, **rest)
        meet(step, phase)

    def stumble(self: Group, *arguments: Any) -> Any:
        while armed and threading.current_thread() is threading.main_thread():  # not in that of a save
            strike(armed.pop()["kind"])
        return under_way(self, *arguments)

    # The rank's process is its own: what is changed in it here ends with it.
    Heartbeat.beat = beat_and_meet  # type: ignore[method-assign, assignment]
    Group._under_way = stumble  # type: ignore[method-assign]
    trainer.run_rank(worker, text, as_json)


def strike(kind: str) -> None:
    """What befalls this process."""
    if kind.startswith("SIG"):
        os.kill(os.getpid(), signal.Signals[kind])
    elif kind == "exception":
        raise ValueError("a fault was planned here")
    elif kind == "exit":
        sys.exit(9)
    else:
        time.sleep({"slow": 1.0, "hang": 3600.0}[kind])
