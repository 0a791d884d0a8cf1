"""What a rank of a supervised run uses: `Stop`, a signal that asks for an end; `Stragglers`, which of them is slow.

The other side, which starts ranks and starts them again, is `plait.train.local` and `plait.train.restart`.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from types import FrameType
from typing import TYPE_CHECKING, Any, final

from plait.core.config import Config
from plait.core.errors import PlaitError
from plait.core.fields import counted
from plait.train.events_log import EventLog

if TYPE_CHECKING:
    from plait.train.launch import Worker

STOPPING = (signal.SIGTERM, signal.SIGUSR1)
"""Signals that ask a run to save and end: a preemption notice, and what Slurm's ``--signal=USR1@60`` sends."""
PARTS = ("forward", "backward", "optimizer", "data")
"""What a rank's own time in a step goes to, in the order in which `Stragglers` is given it. Waiting is none of it."""
WINDOW_STEPS, WINDOW_SECONDS = 10, 10.0
"""A window is at least so many steps, and at least so many seconds of computing; a rank that is slow in two windows in
a row is named. Steps of milliseconds swing by more than any sensible ratio for no reason that would last."""


class StoppedError(PlaitError):
    """A signal asked the run to end, and its state has been saved. Not a failure, yet not the end of training."""

    exit_code = 6


@final
class Stop:
    """Whether a signal has asked this run to end.

    The trainer makes one before its first step and asks `requested` after each. Ranks may see the signal at unlike
    times, so they agree first (the largest of all ranks' answers), then save, then raise `StoppedError`::

        with Stop(worker) as stop:
            ...
                number = agreed_max(stop.requested())
                if number:
                    save(...)
                    raise StoppedError(Stop.message(number, step + 1))
    """

    def __init__(self, worker: Worker) -> None:
        self._file = stop_file(worker.watch) if worker.watch is not None else None
        self._seen = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in STOPPING}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._seen:  # asked twice: whoever sends it does not want to wait
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._seen = number

    def requested(self) -> int:
        """The number of the signal that came to this rank or to its launcher; 0 while none has."""
        if not self._seen and self._file is not None and self._file.exists():
            self._seen = int(self._file.read_text(encoding="ascii"))
        return self._seen

    @staticmethod
    def message(number: int, step: int) -> str:
        """What the run ends with."""
        name = signal.Signals(number).name
        return f"stopped by {name} after {counted(step, 'step')}; the state is saved, plait train --resume goes on"


def stop_file(folder: Path) -> Path:
    """Where a launcher with the private ``folder`` passes a signal on to its ranks."""
    return folder / "stop"


@final
class Stragglers:
    """Finds ranks whose own computing has become slow. One rank asks it, with the numbers of all.

    Waiting is no part of a compute time: in a step that all ranks share, everybody is as slow as the slowest, and only
    their own time tells who that is. ``peers`` are groups of ranks that have the same work (same pipeline stage); each
    is held against the median of the others in its group. A rank without its like is held against its own first window,
    relative to what became of the others since. ``slow`` is the ratio from which on a rank is named; 0: none ever is.
    """

    def __init__(
        self,
        peers: Sequence[Sequence[int]],
        *,
        slow: float = 1.5,
        seconds: float = WINDOW_SECONDS,
        log: EventLog | None = None,
    ) -> None:
        self._peers = {rank: [other for other in group if other != rank] for group in peers for rank in group}
        self._slow, self._seconds, self._log = slow, seconds, log
        self._window: list[Sequence[Sequence[float]]] = []
        self._spent = 0.0
        self._first: list[float] | None = None
        self._first_parts: list[list[float]] = []
        self._before: set[int] = set()
        self._named: set[int] = set()

    def observe(self, step: int, parts: Sequence[Sequence[float]]) -> str | None:
        """Take each rank's own seconds in ``step``, by `PARTS`; a warning when a rank has turned slow.

        It says so once: again only for a rank that was back to normal meanwhile. The event goes to the log.
        """
        if not self._slow:
            return None
        self._window.append(tuple(parts))
        self._spent += max(map(sum, parts), default=0.0)
        if len(self._window) < WINDOW_STEPS or self._spent < self._seconds:
            return None
        by_rank = list(zip(*self._window, strict=True))
        now = [median(map(sum, steps)) for steps in by_rank]
        now_parts = [[median(values) for values in zip(*steps, strict=True)] for steps in by_rank]
        self._window, self._spent = [], 0.0
        if self._first is None:
            self._first, self._first_parts = now, now_parts
        ratios = self._ratios(now, self._first)
        slow = {rank for rank, ratio in ratios.items() if ratio >= self._slow}
        lasting, self._before = slow & self._before, slow
        fresh = lasting - self._named
        self._named = self._named & slow | lasting
        if not fresh:
            return None
        worst = max(fresh, key=ratios.__getitem__)
        usual = self._usual_parts(worst, now, now_parts)
        part = max(range(len(PARTS)), key=lambda index: now_parts[worst][index] - usual[index])
        if self._log is not None:
            fields = {"step": step, "rank": worst, "seconds": now[worst], "ratio": ratios[worst]}
            self._log.write("straggler", {**fields, "phase": PARTS[part], "computes": now})
        spent = f"{now[worst]:.3g} s of its own computing a step"
        where = f"above all in {PARTS[part]}: {now_parts[worst][part]:.3g} s, not {usual[part]:.3g}"
        return f"step {step}: rank {worst} is slow: {spent}, {ratios[worst]:.1f} times what its like takes, {where}"

    def _usual_parts(self, rank: int, now: Sequence[float], parts: Sequence[Sequence[float]]) -> list[float]:
        """What each part takes the like of ``rank``; without its like, what it took at first, grown as others have."""
        others = self._peers[rank]
        if others:
            return [median(values) for values in zip(*(parts[other] for other in others), strict=True)]
        assert self._first is not None
        pairs = [pair for other, pair in enumerate(zip(now, self._first, strict=True)) if other != rank]
        grown = median([new / old if old > 0 else 1.0 for new, old in pairs]) if pairs else 1.0
        return [seconds * grown for seconds in self._first_parts[rank]]

    def _ratios(self, now: Sequence[float], first: Sequence[float]) -> Mapping[int, float]:
        """How many times the time of its like each rank takes."""
        growth = [new / old if old > 0 else 1.0 for new, old in zip(now, first, strict=True)]
        ratios = {}
        for rank, others in self._peers.items():
            mine, like = now[rank], [now[other] for other in others]
            if not others and len(now) > 1:
                mine, like = growth[rank], [value for other, value in enumerate(growth) if other != rank]
            usual = median(like) if like else mine
            ratios[rank] = mine / usual if usual > 0 else 1.0
        return ratios


def looked_after(config: Config, ranks: int) -> bool:
    """Whether the command that starts ``ranks`` local ranks also watches them and starts them again.

    One rank runs in the command's own process where there would be nothing to go on from, or no restart is allowed: it
    starts a second or two earlier so.
    """
    return ranks > 1 or (config.run.max_restarts > 0 and (config.checkpoint.every > 0 or config.run.replicas > 0))


def restarted(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun has started these ranks again after a failure: then a run goes on where its last commit is."""
    return int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
