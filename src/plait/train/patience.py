"""`PatientSaver`: a run's saves, none of which the run waits for longer than it makes progress.

A disk that has died does not say so: whoever writes to it stands still in the kernel. The thread that saves cannot be
ended then, but the run need not stand still with it. The ranks tell each other how far their saves are; where none of
them has made progress for ``checkpoint.timeout`` seconds, all know it at once, say which rank and which file it is, and
leave the saves that follow out until that one has ended.
"""

from __future__ import annotations

from typing import Any, cast, final

from plait.checkpoint.commit import Saved
from plait.checkpoint.manifest import MANIFEST
from plait.checkpoint.saver import Saver, UnderWay
from plait.checkpoint.state import Snapshot
from plait.checkpoint.steps import LATEST
from plait.comm.world import World
from plait.core.errors import SaveError
from plait.train.exchange import gather_json

LOOK_SECONDS = 0.2
"""How often ranks that wait for a save tell each other how far it is."""
_FOR_OTHERS = ("begin.agree", "write.agree", "end.agree")
"""Boundaries behind which a rank waits for others: not its own disk."""


@final
class PatientSaver:
    """`Saver` as all ranks of ``world`` use it together: every method is collective, and comes to the same on all.

    ``patience``: seconds without progress on any rank, after which a save counts as one that stands still.
    """

    def __init__(self, saver: Saver, world: World, *, patience: float, asynchronous: bool) -> None:
        self._saver, self._world = saver, world
        self._patience, self._asynchronous = patience, asynchronous
        self._under_way = False
        self._told: list[Saved] = []
        self._step = -1
        self.stands: str | None = None
        """Why the save under way counts as one that stands still; None where none does."""

    def save(self, snapshot: Snapshot) -> None:
        """Save ``snapshot``, once the save before has ended; left out, as a save that failed, while that stands still.

        SaveError where it cannot be left out: ``checkpoint.asynchronous=false`` gives the state itself to the writer.
        """
        if self._ended():
            self._step = snapshot.step
            self._saver.begin(snapshot)
            self._under_way = True
            if not self._asynchronous and not self._ended():
                raise SaveError(f"checkpoint of step {snapshot.step}: {self.stands}; the run cannot go on beside it")
        else:
            self._tell(snapshot.step, error=f"left out, the one of step {self._step} is not done: {self.stands}")

    def poll(self) -> list[Saved]:
        """How saves went that have ended since the last call; and, once, that one stands still. Never waits."""
        before = self.stands
        if self._under_way:
            self._look()
        if self.stands is not None and before is None:
            self._tell(self._step, warning=self.stands)
        found, self._told = self._told, []
        return [*self._saver.poll(), *found]

    def drain(self) -> list[Saved]:
        """`poll`, after the save under way has ended, or stands still."""
        self._ended()
        return self.poll()

    def _ended(self) -> bool:
        """Wait for the save under way; whether it has ended, and does not stand still."""
        before = self.stands
        while self._under_way:
            self._look()
            if self.stands is not None:
                if before is None:
                    self._tell(self._step, warning=self.stands)
                return False
            if self._under_way:
                self._saver.join(LOOK_SECONDS)
        return True

    def _look(self) -> None:
        mine = self._saver.under_way
        rows = gather_json(self._world, None if mine is None else [mine.step, mine.phase, mine.idle])
        found = {rank: _read(row) for rank, row in enumerate(rows) if row is not None}
        self._under_way = bool(found)
        if not found or min(one.idle for one in found.values()) < self._patience:
            self.stands = None
            return
        own = [rank for rank, one in found.items() if one.phase not in _FOR_OTHERS] or list(found)
        rank = max(own, key=lambda rank: found[rank].idle)
        where = self._saver.folder / _file(found[rank].phase, rank)
        self.stands = (
            f"no progress for {found[rank].idle:.3g} s (checkpoint.timeout = {self._patience:g}): rank {rank} stands "
            f"still behind {found[rank].phase}, at {where}"
        )

    def _tell(self, step: int, *, error: str | None = None, warning: str | None = None) -> None:
        self._told.append(Saved(step=step, path=None, error=error, warning=warning, bytes=0, copy=0.0, write=0.0))


def _read(row: object) -> UnderWay:
    step, phase, idle = cast("list[Any]", row)
    return UnderWay(step=int(step), phase=str(phase), idle=float(idle))


def _file(phase: str, rank: int) -> str:
    """What a save is at work on behind the boundary ``phase``; "" for the folder."""
    if phase.startswith("file.") or phase in ("write.enter", "write.done"):
        return f"rank-{rank:05d}.safetensors"
    if phase.startswith("manifest."):
        return MANIFEST
    return LATEST if phase.startswith("latest.") or phase in ("tidy.enter", "commit.durable") else ""
