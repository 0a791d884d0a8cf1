"""`supervise`: runs a training run's ranks on this machine, and starts them again from the last commit.

What ends a rank (a signal, an exception, an exit, a hang) ends all; the next attempt resumes from the newest
checkpoint, a second or two later. ``run.max_restarts`` bounds attempts that come without a new checkpoint, and an error
that comes twice at the same place is not tried a third time. A checkpoint that two attempts could not load is set
aside. Places for ranks that are gone lead to another plan (`plait.train.elastic`). Everything is in ``events.jsonl``.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import final

from plait.checkpoint.steps import Entry, committed
from plait.comm.flight import write_dump
from plait.core.config import Config, dump
from plait.core.errors import ConfigError, DivergedError, PlanError, SaveError
from plait.train.elastic import FAILURES, Slots, fit
from plait.train.events_log import EVENTS, FAILURE, EventLog
from plait.train.failure import WorkerFailed
from plait.train.folder import CHECKPOINTS
from plait.train.launch import launch
from plait.train.local import Watched
from plait.train.promise import write_promise
from plait.train.recut import recalled
from plait.train.replicas import memory_folder
from plait.train.run import prepare
from plait.train.supervise import StoppedError

RANK = "plait.train.trainer:run_rank"
LOADS = 2
"""Attempts that end while they load a checkpoint, after which it is set aside."""
FLIGHT = "flight"
"""Folder of the ranks' last operations in a run's folder."""
_FINAL = (ConfigError.exit_code, PlanError.exit_code, DivergedError.exit_code, SaveError.exit_code)
"""What comes again whenever it is tried: bad input, training that has diverged, a last state that cannot be saved."""


def supervise(config: Config, processes: int, *, as_json: bool, function: str = RANK) -> None:
    """Train as ``config`` says on ``processes`` local ranks, until it is done.

    ``config.run.dir`` is claimed. ``function``: what a rank runs, with the arguments of `trainer.run_rank`. Raises what
    `launch` does, for a failure that cannot be recovered from, and `StoppedError` once a run that a signal asked to end
    has saved its state.
    """
    with memory_folder(config.run.replicas > 0) as memory:
        _Supervisor(config, processes, as_json, function, memory).run()


@final
class _Supervisor:
    def __init__(self, config: Config, processes: int, as_json: bool, function: str, memory: Path | None) -> None:
        assert config.run.dir is not None, "claim_folder names it"
        self._config, self._as_json, self._function = config, as_json, function
        self._folder: Path = config.run.dir
        self._checkpoints = config.checkpoint.dir or self._folder / CHECKPOINTS
        self._memory = memory
        self._log = EventLog(self._folder / EVENTS)
        self._slots = Slots.of(processes)
        self._places = self._slots.usable()
        self._newest = self._last_commit()
        self._restarts = self._blamed = self._in_a_row = 0
        self._loads: dict[Path, int] = {}
        self._last = ""
        self._promised = str(prepare(config, world_size=processes).plan)
        """The plan that ``prediction.json`` is about."""

    def run(self) -> None:
        began = False
        while True:
            config, size = self._planned(began)
            began = True
            try:
                self._launch(config, size)
                return
            except StoppedError:
                if (newest := self._last_commit()) != self._newest:
                    self._newest, self._restarts, self._last = newest, 0, ""
                if not self._recalled():
                    self._log.write("stopped", {"step": self._step()})
                    raise
                self._recall()
            except WorkerFailed as failed:
                self._after(failed)
                self._told(failed)
                if set(self._slots.usable()) - set(self._places):
                    self._recall()  # places have come back that the attempt ended too soon to be called together for

    def _recall(self) -> None:
        self._log.write("recalled", {"step": self._step(), "places": list(self._slots.usable())})

    def _planned(self, again: bool) -> tuple[Config, int]:
        """What to run next, and on how many ranks: the run's own plan where all places are there."""
        self._places = self._slots.usable()
        if not self._places:
            raise PlanError(f"no place for a rank is left on this machine (of {self._slots.total})")
        if len(self._places) == self._slots.total:
            config, size = self._config, self._slots.total
        else:
            config, size = fit(self._config, len(self._places))
            fields = {"plan": str(config.plan), "ranks": size, "places": list(self._places)}
            self._log.write("plan", fields)
            left = f"{len(self._places)} of {self._slots.total} places"
            _say(f"{left} are left: the run goes on with {size} ranks, plan {str(config.plan)!r}")
        if again:
            config = dataclasses.replace(config, run=dataclasses.replace(config.run, resume=True))
        setup = recalled(prepare(config, world_size=size))
        if str(setup.plan) != self._promised:
            self._promised = str(setup.plan)
            write_promise(setup)
        return setup.config, size

    def _launch(self, config: Config, size: int) -> None:
        whole = len(self._places) == self._slots.total
        run = config.run
        launch(
            self._function,
            processes=size,
            args=[dump(config), self._as_json],
            device=run.device,
            timeout=run.timeout,
            threads=run.threads,
            watched=Watched(
                grace=run.grace,
                recall=self._recalled,
                places=None if whole else self._places[:size],
                memory=self._memory,
            ),
        )

    def _recalled(self) -> bool:
        """Whether other places can be used than those that the ranks were started on."""
        return self._slots.usable() != self._places

    def _after(self, failed: WorkerFailed) -> None:
        """Return when the run is to be started again; raise ``failed`` when it is not."""
        beats = failed.beats
        beat = beats.get(failed.rank)
        where = {"step": beat.step, "phase": beat.phase} if beat is not None else {}
        fields = {"rank": failed.rank, "cause": failed.cause, "message": str(failed).splitlines()[0]}
        self._log.write(FAILURE, {**fields, **where, "diagnosis": failed.diagnosis})
        if failed.diagnosis or failed.cause == "hang":
            self._dump(failed)
        if not failed.cause or failed.exit_code in _FINAL:
            raise failed
        newest = self._last_commit()
        forward = newest != self._newest
        loading = any(one.phase == "load" for one in beats.values()) and newest is not None
        # In whatever phase: ranks that save or evaluate have taken steps.
        at_once = not any(one.phase != "load" and one.step > self._step() for one in beats.values())
        if forward:
            self._newest, self._restarts, self._last = newest, 0, ""
        if loading and newest is not None and self._set_aside(newest):
            return
        if self._lost_place(failed, at_once and not forward):
            return
        same = f"{failed.rank} {failed.cause} {fields['message']} {where}"
        if failed.cause == "error" and same == self._last:
            raise failed
        self._last = same
        self._restarts += 1
        if self._restarts > self._config.run.max_restarts:
            raise failed

    def _dump(self, failed: WorkerFailed) -> None:
        """Leave the ranks' last operations in the run's folder."""
        try:
            for held in failed.flights:
                write_dump(self._folder / FLIGHT, held)
        except OSError as error:
            _say(f"{self._folder / FLIGHT} cannot be written: {error.strerror}")

    def _set_aside(self, entry: Entry) -> bool:
        """Count an attempt that ended while it loaded; whether the checkpoint was set aside for it."""
        count = self._loads[entry.path] = self._loads.get(entry.path, 0) + 1
        if count < LOADS:
            return False
        del self._loads[entry.path]  # a later one may have its name
        aside, number = entry.path.with_name(f"{entry.path.name}.bad"), 1
        while aside.exists():
            number += 1
            aside = entry.path.with_name(f"{entry.path.name}.bad-{number}")
        entry.path.rename(aside)
        self._newest, self._restarts, self._last = self._last_commit(), 0, ""
        self._log.write("quarantine", {"checkpoint": entry.path.name, "now": aside.name, "loads": count})
        _say(f"{entry.path.name} could not be loaded {count} times: it is now {aside.name}, the one before is tried")
        return True

    def _lost_place(self, failed: WorkerFailed, at_once: bool) -> bool:
        """Give up the place of a rank that keeps failing before its first step, where another plan can do without."""
        place = self._places[failed.rank] if 0 <= failed.rank < len(self._places) else -1
        self._in_a_row = (self._in_a_row + 1 if place == self._blamed else 1) if at_once else 0
        self._blamed = place
        device = failed.cause != "error" or "CUDA error" in str(failed)
        if self._in_a_row < FAILURES or not device or len(self._places) == 1:
            return False
        try:
            fit(self._config, len(self._places) - 1)
        except PlanError:
            return False
        self._slots.lost.add(place)
        self._in_a_row = 0
        self._log.write("lost", {"place": place, "rank": failed.rank})
        return True

    def _told(self, failed: WorkerFailed) -> None:
        count, most = self._restarts, self._config.run.max_restarts
        self._log.write("restart", {"from_step": self._step(), "restarts": count, "most": most})
        lines = str(failed).splitlines()
        _say("; ".join(line.rstrip(".") for line in lines[:-1]))
        _say(f"the run starts again from step {self._step()} (restart {count} of {most} without a new checkpoint)")

    def _last_commit(self) -> Entry | None:
        """The newest checkpoint, on the disk or in memory: of two of one step the one that is loaded."""
        folders = [*([self._memory] if self._memory is not None else []), self._checkpoints]
        newest = (entry for folder in folders for entry in committed(folder)[-1:])
        return max(newest, key=lambda entry: entry.step, default=None)

    def _step(self) -> int:
        """Steps that the newest checkpoint has."""
        return self._newest.step if self._newest is not None else 0


def _say(text: str) -> None:
    print(f"plait: warning: {text}", file=sys.stderr, flush=True)
