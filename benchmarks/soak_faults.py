"""The faults of `soak.py`: drawn from a seed, and met by the ranks of a run that plays them."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from plait.checkpoint import saver
from plait.checkpoint.commit import Place, Saved, commit
from plait.checkpoint.phases import COMMITTER, EVERYWHERE
from plait.comm.group import Group
from plait.core.config import loads
from plait.models.batch import Batch
from plait.train import trainer
from plait.train.heartbeat import Heartbeat
from plait.train.launch import Worker
from plait.train.step import Steps

KINDS = ("kill", "stop", "exception", "exit", "save-kill", "save-full", "nan", "slot")
EVERY = 10
"""Steps between two checkpoints."""
RANK = f"{os.path.abspath(__file__)}:run_rank"
Fault = dict[str, Any]


def draw(count: int, steps: int, ranks: int, seed: int, kinds: tuple[str, ...] = KINDS) -> list[Fault]:
    """``count`` faults of a run of ``steps`` steps, every kind as often as every other, at steps of their own."""
    chance = random.Random(seed)
    order: list[str] = []
    while len(order) < count:
        order += chance.sample(kinds, len(kinds))
    saves = chance.sample(range(EVERY, steps, EVERY), (steps - 1) // EVERY)
    others = [step for step in range(2, steps * 3 // 4) if step % EVERY]  # late enough is left for a place to come back
    chance.shuffle(others)
    faults: list[Fault] = []
    for kind in order[:count]:
        rank = chance.randrange(ranks)
        phase = {"nan": "", "slot": "step"}.get(kind, chance.choice(("step", "collective")))
        if kind.startswith("save-"):
            whole = EVERYWHERE + (COMMITTER if rank == 0 else ())
            parts = [part for part in whole if not part.startswith("prune.")]
            phase = chance.choice(parts) if kind == "save-kill" else "file.half"
        step = saves.pop() if kind.startswith("save-") else others.pop()
        faults.append({"kind": kind, "step": step, "rank": rank, "phase": phase})
        if kind == "slot":
            back = step + max(4, steps // 20)
            faults.append({"kind": "slot back", "step": back, "rank": rank, "phase": "step"})
    return sorted(faults, key=lambda fault: (fault["step"], fault["kind"]))


def run_rank(worker: Worker, text: str, as_json: bool) -> None:
    """`plait.train.trainer.run_rank` among the faults of the run's folder; what it says goes to a file there."""
    folder = loads(text).run.dir
    assert folder is not None
    rank, world = worker.place.rank, worker.place.world_size
    out = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(out, 1)
    os.dup2(out, 2)
    faults: list[Fault] = json.loads((folder / "faults.json").read_text(encoding="utf-8"))
    _Meeting(folder, rank, world, faults).begin()
    trainer.run_rank(worker, text, as_json)


class _Meeting:
    """Where this rank meets the faults. Its process is its own: what is changed in it ends with it."""

    def __init__(self, folder: Path, rank: int, world: int, faults: list[Fault]) -> None:
        self._folder, self._rank, self._world = folder, rank, world
        self._bad = {fault["step"] for fault in faults if fault["kind"] == "nan"}
        self._numbers = {fault["step"]: number for number, fault in enumerate(faults) if fault["kind"] == "nan"}
        # Under a plan of fewer ranks another one meets what was meant for those that are not there.
        whole = [(number, fault) for number, fault in enumerate(faults) if fault["kind"] != "nan"]
        self._mine = [(number, fault) for number, fault in whole if self._whose(fault) == rank]
        self._armed: list[tuple[int, Fault]] = []

    def _whose(self, fault: Fault) -> int:
        return 0 if fault["kind"].startswith("slot") else int(fault["rank"]) % self._world

    def begin(self) -> None:
        beat, under_way, batches_of = Heartbeat.beat, Group._under_way, Steps._batches

        def beat_and_meet(heart: Heartbeat, step: int, phase: str, **rest: Any) -> None:
            beat(heart, step, phase, **rest)
            self._beat(step, phase)

        def stumble(group: Group, *arguments: Any) -> Any:
            while self._armed and threading.current_thread() is threading.main_thread():  # not in that of a save
                self._strike(*self._armed.pop())
            return under_way(group, *arguments)

        def spoiled(steps: Steps, step: int) -> list[Batch]:
            batches = batches_of(steps, step)
            if step in self._bad and self._rank == self._world - 1:
                self._mark(self._numbers[step])
                return [*batches[:-1], dataclasses.replace(batches[-1], scale=math.nan)]
            return batches

        def disturbed(step: int, copied: Any, place: Place, seconds: float) -> Saved:
            due = [(n, f) for n, f in self._mine if f["kind"].startswith("save-") and f["step"] == step]

            def probe(phase: str) -> None:
                for number, fault in due:
                    if fault["phase"] == phase and not self._struck(number):
                        self._strike(number, fault)

            return commit(step, copied, dataclasses.replace(place, probe=probe), seconds)

        patches: list[tuple[Any, str, Callable[..., Any]]] = [
            (Heartbeat, "beat", beat_and_meet),
            (Group, "_under_way", stumble),
            (Steps, "_batches", spoiled),
            (saver, "commit", disturbed),
        ]
        for place, name, function in patches:
            setattr(place, name, function)

    def _beat(self, step: int, phase: str) -> None:
        if phase == "save" and self._rank == 0:
            with (self._folder / "steps.log").open("a", encoding="ascii") as log:
                log.write(f"{time.time()} {step}\n")
        for number, fault in self._mine:
            if phase != "step" or fault["kind"].startswith("save-") or self._struck(number):
                continue
            # A place comes back once it has gone, which the supervisor sees at its own time.
            back = fault["kind"] == "slot back" and step >= fault["step"] and self._fewer()
            if back or (fault["kind"] != "slot back" and step == fault["step"]):
                if fault["phase"] == "collective":
                    self._mark(number)
                    self._armed.append((number, fault))
                else:
                    self._strike(number, fault)

    def _fewer(self) -> bool:
        return len((self._folder / "slots").read_text(encoding="ascii").split()) == self._world

    def _struck(self, number: int) -> bool:
        return (self._folder / f"struck-{number}").exists()

    def _mark(self, number: int) -> None:
        if not self._struck(number):
            draft = self._folder / f"struck-{number}.draft-{self._rank}"
            draft.write_text(str(time.time()), encoding="ascii")
            draft.rename(self._folder / f"struck-{number}")

    def _strike(self, number: int, fault: Fault) -> None:
        self._mark(number)
        kind = fault["kind"]
        if kind in ("kill", "save-kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kind == "exception":
            raise ValueError("a fault was planned here")
        elif kind == "exit":
            sys.exit(9)
        elif kind == "save-full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        else:
            write_slots(self._folder, without=fault["rank"] if kind == "slot" else None)


def write_slots(folder: Path, *, without: int | None, ranks: int | None = None) -> None:
    if ranks is None:
        ranks = int((folder / "ranks").read_text(encoding="ascii"))
    draft = folder / "slots.draft"
    draft.write_text(" ".join(str(place) for place in range(ranks) if place != without), encoding="ascii")
    draft.rename(folder / "slots")
