"""The folder of a run's checkpoints: names, what is committed there, what is stale, what is pruned.

``step-00001200`` is committed: a folder takes that name, whole and synced, in one rename. A second save of a step
whose name is taken is ``step-00001200-2``, and the higher number is the newer. ``step-00001200.tmp-...`` is under way,
or left by a run that died; any other ending is somebody else's.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG

from plait.checkpoint.disk import sync_folder
from plait.checkpoint.manifest import Manifest, load
from plait.core.errors import ConfigError, WeightsError

LATEST = "latest.json"
_COMMITTED = re.compile(r"step-(\d{8,18})(?:-(\d{1,6}))?")
_STALE = re.compile(r"step-\d{8,18}(-\d{1,6})?\.tmp-[0-9a-z-]+")


@dataclass(frozen=True, order=True)
class Entry:
    """A committed checkpoint; they sort from old to new. ``attempt``: 1 for the first save of its step."""

    step: int
    attempt: int
    path: Path


def committed(folder: Path) -> list[Entry]:
    """The checkpoints in ``folder``, from old to new; none where there is no such folder. Nothing in them is read."""
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise WeightsError(f"{folder} cannot be read: {error.strerror}") from error
    found = [(match, folder / name) for name in names if (match := _COMMITTED.fullmatch(name))]
    return sorted(Entry(int(match[1]), int(match[2] or 1), path) for match, path in found if path.is_dir())


def free_name(folder: Path, step: int) -> str:
    """The name that the next save of ``step`` takes when it is committed."""
    attempts = [entry.attempt for entry in committed(folder) if entry.step == step]
    return f"step-{step:08d}" + (f"-{max(attempts) + 1}" if attempts else "")


def check(path: Path, *, only: Collection[str] | None = None) -> Manifest:
    """The manifest of a checkpoint whose files are all there, plain, and of the right size; WeightsError names another.

    ``only``: the files that are looked at, None: all. No byte of them is read: `disk.first_damage` does that.
    """
    manifest = load(path)
    for name, file in manifest.files.items():
        if only is not None and name not in only:
            continue
        try:
            found = os.lstat(path / name)
        except OSError as error:
            raise WeightsError(f"{path / name} is missing or damaged: {error.strerror}") from error
        if not S_ISREG(found.st_mode):
            raise WeightsError(f"{path / name} is a link out of the folder, or no file")
        if found.st_size != file.bytes:
            raise WeightsError(
                f"{path / name} is missing or damaged: it holds {found.st_size} bytes, the manifest says {file.bytes}"
            )
    return manifest


def free_bytes(folder: Path) -> int:
    """Bytes that may still be written on the disk of ``folder``."""
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


def amount(count: float) -> str:
    """So many bytes, as a person reads them."""
    return f"{count / 1e9:,.3f} GB" if count >= 1e9 else f"{count / 1e6:,.3f} MB"


def no_room(need: int, free: int, where: str) -> str | None:
    """What to say where ``need`` bytes are more than the ``free`` ones; None where they are not."""
    if need <= free:
        return None
    return f"a checkpoint takes {amount(need)}, {where} has room for {amount(free)}: {amount(need - free)} are missing"


def check_folder(folder: Path, need: int = 0, *, full: bool = False) -> str | None:
    """Make ``folder`` and try it: ConfigError where it cannot be written, or has less than ``need`` bytes of room.

    ``full``: a disk without room is no error; what is missing is returned in words, None where nothing is.
    """
    probe = folder / f".{os.getpid()}-{secrets.token_hex(4)}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"\0")
        probe.unlink()
        free = free_bytes(folder)
    except OSError as error:
        if full and error.errno in (errno.ENOSPC, errno.EDQUOT):
            probe.unlink(missing_ok=True)
            return no_room(max(need, 1), 0, str(folder))
        raise ConfigError(f"checkpoints cannot be written to {folder}: {error.strerror}") from error
    lacking = no_room(need, free, str(folder))
    if lacking is not None and not full:
        raise ConfigError(f"{lacking}; make room, or name another folder")
    return lacking


def clean(folder: Path) -> None:
    """Remove what saves that died have left; call it only while no save is under way."""
    for name in os.listdir(folder):
        if _STALE.fullmatch(name) or name == f"{LATEST}.tmp":
            remove(folder / name)


def remove(path: Path) -> None:
    """Remove a file or a folder as far as that can be done: what stays behind is nothing that a reader looks at."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def superseded(folder: Path, keep: int, keep_every: int) -> list[Entry]:
    """What pruning to the newest ``keep``, and every step that ``keep_every`` divides (0: none), takes away.

    A checkpoint counts as kept only where `check` holds, so that a damaged one never drives out a good one.
    """
    if keep < 1 or keep_every < 0:
        raise ConfigError(f"checkpoints: keep = {keep} has to be at least 1, keep_every = {keep_every} at least 0")
    kept: set[int] = set()
    gone: list[Entry] = []
    for entry in reversed(committed(folder)):
        lasting = keep_every > 0 and entry.step % keep_every == 0
        if entry.step in kept or (len(kept) >= keep and not lasting):
            gone.append(entry)
        elif _holds(entry.path):
            kept.add(entry.step)
    return gone[::-1]


def _holds(path: Path) -> bool:
    try:
        check(path)
    except WeightsError:
        return False
    return True


def take_away(entries: list[Entry], passed: Callable[[str], None]) -> None:
    """Remove committed checkpoints: each loses its name in one rename first, so that no half of it is ever trusted.

    ``passed`` is told ``renamed`` and ``removed`` for each. OSError where one cannot be renamed.
    """
    for entry in entries:
        stale = entry.path.with_name(f"{entry.path.name}.tmp-old-{secrets.token_hex(4)}")
        entry.path.rename(stale)
        sync_folder(entry.path.parent)
        passed("renamed")
        remove(stale)
        passed("removed")
