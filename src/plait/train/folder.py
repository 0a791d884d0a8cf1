"""Folders that are one process's alone: a run's, its checkpoints', and what a launcher keeps in the temporary folder.

`held` keeps other runs out of a folder: two would cut each other's metrics off and prune each other's checkpoints.
`private` makes a folder that goes with its process, and removes those that killed processes have left.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from plait.checkpoint.steps import Entry, committed
from plait.core.config import Config
from plait.core.errors import ConfigError, WeightsError

LOCK = ".plait-lock"
"""The lock's file, where the file system locks no folders."""
CHECKPOINTS = "checkpoints"
"""Folder of a run's checkpoints in its own, unless checkpoint.dir names another."""


@contextmanager
def claimed(config: Config) -> Iterator[None]:
    """Hold the folders that the run ``config`` writes to; an interrupt meanwhile says how the run goes on."""
    home, checkpoints = config.run.dir, config.checkpoint.dir
    assert home is not None, "claim_folder names it"
    with ExitStack() as leaving:
        leaving.enter_context(held(home, "run.dir"))
        if checkpoints is not None and checkpoints.resolve() != home.resolve():
            with suppress(OSError):  # the ranks say what is wrong with it
                checkpoints.mkdir(parents=True, exist_ok=True)
                leaving.enter_context(held(checkpoints, "checkpoint.dir"))
        try:
            yield
        except KeyboardInterrupt:
            if not (home / "config.toml").is_file():
                raise  # it had not begun, and --resume would find no run
            raise KeyboardInterrupt(_goes_on(home, checkpoints or home / CHECKPOINTS)) from None


def _goes_on(home: Path, checkpoints: Path) -> str:
    newest: list[Entry] = []
    with suppress(WeightsError):
        newest = committed(checkpoints)[-1:]
    shown = home.relative_to(Path.cwd()) if home.is_relative_to(Path.cwd()) else home
    does = f"goes on from step {newest[0].step}" if newest else "starts it anew, as there is no checkpoint yet"
    return f"plait train --resume {shown} {does}"


@contextmanager
def held(folder: Path, key: str = "run.dir") -> Iterator[None]:
    """Keep other runs out of ``folder``, which ``key`` names, meanwhile; ConfigError where one is at work in it.

    The lock is the kernel's, on the folder itself: it leaves no file, and ends with this process whatever ends that.
    Where a file system locks no folders (NFS) a file `LOCK` stands for it, made with O_EXCL, that names its process.
    What a killed process has left of that is taken over on its machine; another machine cannot know, and is refused.
    """
    with ExitStack() as leaving:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        leaving.callback(os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _busy(folder, key, "another plait train is at work there") from None
        except OSError:
            leaving.enter_context(_lock_file(folder, key))
        yield


def _busy(folder: Path, key: str, why: str) -> ConfigError:
    return ConfigError(f"{key} = {folder}: {why}; wait until it has ended, end it, or name another folder")


@contextmanager
def _lock_file(folder: Path, key: str) -> Iterator[None]:
    path, mine = folder / LOCK, json.dumps(_process())
    while not _made(path, mine):
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            continue  # its process has just ended
        why = _holder(text, path)
        if why is not None or not _taken_away(path, text):
            raise _busy(folder, key, why or "another plait train has just begun there")
    try:
        yield
    finally:
        with suppress(OSError):
            if path.read_text(encoding="utf-8") == mine:
                path.unlink()


def _made(path: Path, text: str) -> bool:
    """Whether ``path`` could be made, which then holds ``text``; not where it is there already."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except FileExistsError:
        return False
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
    try:
        os.write(descriptor, text.encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return True


def _process() -> dict[str, Any]:
    """What tells this process from any other: machine, boot, the numbers' namespace, number, and when it began."""
    machine = Path("/etc/machine-id")
    return {
        "host": socket.gethostname(),
        "machine": machine.read_text(encoding="ascii").strip() if machine.is_file() else "",
        "boot": _boot(),
        "pids": _namespace(),
        "pid": os.getpid(),
        "began": _began(os.getpid()),
        "job": os.environ.get("TORCHELASTIC_RUN_ID", "none"),
    }


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _began(pid: int) -> str:
    """When process ``pid`` began, in ticks since the boot; "" where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _holder(text: str, path: Path) -> str | None:
    """Why the lock that says ``text`` holds, in words; None where its process is known to have ended."""
    try:
        held_by, here = dict(json.loads(text)), _process()
        who = f"plait train, process {held_by['pid']} on {held_by['host']}, is at work there"
        if held_by["job"] == here["job"] != "none":
            return None  # torchrun has started the ranks again, the first of them perhaps on another machine
        same = all(held_by[name] == here[name] for name in ("host", "machine"))
        if same and here["machine"] and here["boot"] and held_by["boot"] != here["boot"]:
            return None  # this machine has been started anew since
        if same and all(here[name] and held_by[name] == here[name] for name in ("boot", "pids")):
            alive = _began(int(held_by["pid"])) == held_by["began"] != ""
            return who if alive else None
    except (ValueError, KeyError, TypeError):
        who = "a run is at work there, or was ended as it began"
    return f"{who}, as {path} says (this file system has no other locks): if that has ended, remove the file"


def _taken_away(path: Path, text: str) -> bool:
    """Take away the lock of a dead process that says ``text``; not one that another process has put there since."""
    aside = path.with_name(f"{LOCK}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        path.rename(aside)
        if aside.read_text(encoding="utf-8") != text:
            with suppress(OSError):
                os.link(aside, path)
            return False
        return True
    except FileNotFoundError:
        return True
    finally:
        aside.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Make file ``path`` hold ``text``; what it held before stays where that fails with an OSError (a full disk)."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


@contextmanager
def private(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """A folder of this process alone in ``parent`` (None: the temporary folder), gone when it ends.

    Its name is ``prefix`` and the process; this process locks it. Folders of that name whose process has ended, and
    that nobody holds any more (a process of another container may have left no other trace), are removed first.
    """
    parent = parent or Path(tempfile.gettempdir())
    _remove_left(prefix, parent)
    with (
        tempfile.TemporaryDirectory(prefix=f"{prefix}{os.getpid()}-", dir=parent, ignore_cleanup_errors=True) as name,
        ExitStack() as leaving,
    ):
        descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        leaving.callback(os.close, descriptor)
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield Path(name)


def _remove_left(prefix: str, parent: Path) -> None:
    for name in os.listdir(parent):
        match = re.fullmatch(rf"{re.escape(prefix)}(\d+)-.+", name)
        if match is None or os.path.exists(f"/proc/{match[1]}"):
            continue
        with suppress(OSError), ExitStack() as leaving:
            descriptor = os.open(parent / name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
            leaving.callback(os.close, descriptor)
            if os.fstat(descriptor).st_uid == os.getuid():
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(parent / name, ignore_errors=True)
