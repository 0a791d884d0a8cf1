"""In-memory replicas: a run's state beside its ranks every few steps, so that losing one costs at most so many steps.

As in Gemini (Wang et al., SOSP 2023), the state goes to memory far more often than to the disk. On one machine what
dies is a process, not its memory: the replicas are checkpoints, with the same commit and the same hashes, in a folder
of memory files (``/dev/shm``) that the supervisor owns and that outlives the ranks. They load under any plan; the
newest of them and of the disk's checkpoints is what a run goes on from. The folder ends with the supervisor.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import final

from plait.checkpoint.commit import Saved
from plait.checkpoint.reader import agree_latest
from plait.checkpoint.saver import Saver
from plait.checkpoint.state import Agreement, Snapshot
from plait.checkpoint.steps import Entry, committed
from plait.core.errors import ConfigError

MEMORY = Path("/dev/shm")
_NAME = re.compile(r"plait-memory-(\d+)-.+")


@final
class Replicas:
    """The replicas of one run, as one of its ranks sees them. Every method but `poll` is collective over all ranks.

    ``folder``: the supervisor's. ``every``: steps between two. ``group``: the ranks, for the replicas' own agreement:
    a checkpoint may be under way on the disk at the same time.
    """

    def __init__(self, folder: Path, *, rank: int, group: Agreement, every: int, asynchronous: bool) -> None:
        self._folder, self._rank, self._group, self._every = folder, rank, group, every
        self._saver = Saver(folder, rank=rank, group=group, keep=1, asynchronous=asynchronous)

    def save_if_due(self, step: int, snapshot: Callable[[int], Snapshot]) -> None:
        """Keep the state after ``step`` steps, where it is its turn."""
        if step % self._every == 0:
            self._saver.save(snapshot(step))

    def newest(self) -> Entry | None:
        """The newest whole replica, the same on all ranks."""
        self._saver.drain()
        path, _ = agree_latest(self._folder, rank=self._rank, group=self._group)
        return next((entry for entry in committed(self._folder) if entry.path == path), None)

    def poll(self) -> list[Saved]:
        """How replicas went that have ended since the last call."""
        return self._saver.poll()


@contextmanager
def memory_folder(wanted: bool, parent: Path = MEMORY) -> Iterator[Path | None]:
    """A private folder of memory files for one supervisor, gone when it ends; None where none is ``wanted``.

    What a supervisor that was killed has left there is removed. ConfigError where this machine has no such folder.
    """
    if not wanted:
        yield None
        return
    if not parent.is_dir():
        raise ConfigError(f"run.replicas keeps state in {parent}, which this machine does not have: set run.replicas=0")
    for name in os.listdir(parent):
        match = _NAME.fullmatch(name)
        if match and (parent / name).stat().st_uid == os.getuid() and not Path(f"/proc/{match[1]}").exists():
            shutil.rmtree(parent / name, ignore_errors=True)
    with tempfile.TemporaryDirectory(
        prefix=f"plait-memory-{os.getpid()}-", dir=parent, ignore_cleanup_errors=True
    ) as name:
        yield Path(name)
