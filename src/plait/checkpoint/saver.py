"""`Saver`: saves a run's snapshots, in the background where asked, one at a time.

The run waits for the copy into host memory alone, and for a save that is still under way when the next begins.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self, final

from plait.checkpoint.commit import Place, Saved, commit
from plait.checkpoint.disk import Source
from plait.checkpoint.phases import COMMITTER, EVERYWHERE, SAVING, Probe
from plait.checkpoint.spread import Spread
from plait.checkpoint.state import Agreement, Snapshot
from plait.checkpoint.steps import check_folder
from plait.checkpoint.writer import Copied, Host
from plait.core.errors import ConfigError

PHASES = ("save.enter", "save.free", "save.copied", *EVERYWHERE, *COMMITTER, "save.left", "save.end")
"""Every boundary that a ``probe`` is told of; those of `COMMITTER` on rank 0 alone."""


def _unseen(phase: str) -> None:
    """The probe of a run that nobody tests."""


@dataclass(frozen=True, kw_only=True)
class UnderWay:
    """A save that has not ended. ``phase``: the boundary of `PHASES` that this rank has passed last; ``idle``: seconds
    since then, or since it last had bytes of its file to write."""

    step: int
    phase: str
    idle: float


@final
class Saver:
    """Saves into ``folder`` as ``rank``; every rank of ``group`` makes one and calls `save` at the same steps.

    ``keep``: newest checkpoints that stay; ``keep_every``: and those of every step that it divides (0: none).
    ``asynchronous``: `save` returns after the copy. ``need``: bytes that a checkpoint of all ranks will take.
    ``spread``: ``folder`` is one host's memory, of which the last save alone stays, on two hosts.
    ``probe``: told of every phase boundary (`PHASES`), for tests. ConfigError where ``folder`` cannot be written, or
    has no room for ``need``, so that it is known at the start; a run that is ``going_on`` has begun, and may find room
    until its next save: `lacking` then says what is missing.

    A save that fails is told by `poll` and `drain`, never raised: the run goes on, and the next save is tried.
    """

    def __init__(
        self,
        folder: Path,
        *,
        rank: int,
        group: Agreement,
        keep: int = 2,
        keep_every: int = 0,
        asynchronous: bool = True,
        need: int = 0,
        going_on: bool = False,
        spread: Spread | None = None,
        probe: Probe = _unseen,
    ) -> None:
        if keep < 1 or keep_every < 0:
            raise ConfigError(f"[checkpoint] keep = {keep} has to be at least 1, keep_every = {keep_every} at least 0")
        self.lacking = check_folder(folder, need, full=going_on)
        self._place = Place(
            folder=folder, rank=rank, group=group, keep=keep, keep_every=keep_every, spread=spread, probe=self._passed
        )
        self.folder = folder
        self._mark = (-1, "", 0.0)
        self._hosts = spread.hosts if spread is not None else None
        self._probe, self._asynchronous = probe, asynchronous
        self._host = Host()
        self._thread: threading.Thread | None = None
        self._done: queue.SimpleQueue[Saved] = queue.SimpleQueue()

    def save(self, snapshot: Snapshot) -> None:
        """Save ``snapshot``: its tensors may change as soon as this returns. Waits for the save before, if any."""
        self.begin(snapshot)
        if not self._asynchronous:
            self._wait()

    def begin(self, snapshot: Snapshot) -> None:
        """`save`, which the caller waits for where it is not asynchronous."""
        self._probe("save.enter")
        self._wait()
        self._probe("save.free")
        start = time.perf_counter()
        copied: Copied | Exception
        try:
            copied = self._host.copy(snapshot, self._place.rank, private=self._asynchronous, hosts=self._hosts)
        except Exception as error:  # of whatever kind: the other ranks are told, and the save fails on all
            copied = error
        seconds = time.perf_counter() - start
        self._probe("save.copied")
        self._mark = (snapshot.step, "save.copied", time.monotonic())
        # A daemon: a rank that fails for another reason ends, and what it had not committed was never there.
        self._thread = threading.Thread(
            target=self._work, args=(snapshot.step, copied, seconds), name=SAVING, daemon=True
        )
        self._thread.start()
        self._probe("save.left")

    @property
    def busy(self) -> bool:
        """Whether a save is under way."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def under_way(self) -> UnderWay | None:
        """How far the save under way is; None where there is none."""
        step, phase, since = self._mark
        return UnderWay(step=step, phase=phase, idle=time.monotonic() - since) if self.busy else None

    def join(self, seconds: float) -> None:
        """Wait for the save under way, so long at most."""
        if self._thread is not None:
            self._thread.join(seconds)

    def poll(self) -> list[Saved]:
        """How the saves went that have ended since the last call; never waits."""
        found: list[Saved] = []
        with suppress(queue.Empty):
            while True:
                found.append(self._done.get_nowait())
        return found

    def drain(self) -> list[Saved]:
        """`poll`, after the save under way has ended."""
        self._wait()
        return self.poll()

    def _work(self, step: int, copied: Copied | Exception, seconds: float) -> None:
        self._done.put(commit(step, self._followed(copied), self._place, seconds))
        self._probe("save.end")

    def _passed(self, phase: str) -> None:
        self._mark = (self._mark[0], phase, time.monotonic())
        self._probe(phase)

    def _followed(self, copied: Copied | Exception) -> Copied | Exception:
        """``copied``, of which every chunk that is asked for counts as progress."""
        if isinstance(copied, Exception):
            return copied

        def noted(give: Source, start: int, stop: int) -> memoryview:
            self._mark = (*self._mark[:2], time.monotonic())
            return give(start, stop)

        shards = (dataclasses.replace(shard, give=partial(noted, shard.give)) for shard in copied.shards)
        return dataclasses.replace(copied, shards=tuple(shards))

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Wait for the save under way; not where the run ends in an error, whose other ranks may be gone."""
        if kind is None:
            self._wait()
