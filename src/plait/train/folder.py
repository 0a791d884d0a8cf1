"""`held`: one run at a time in a folder. Two would cut each other's metrics off and prune each other's checkpoints."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from plait.core.errors import ConfigError


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep other runs out of the run folder ``folder`` meanwhile; ConfigError where one is at work in it.

    The lock is the kernel's, on the folder itself: it leaves no file, and ends with this process whatever ends that.
    A file system that locks no folders (NFS) has none.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f"run.dir = {folder}: another plait train is at work there; wait until it has ended, end it, or "
                    "name another folder"
                ) from None
        yield
    finally:
        os.close(descriptor)
