"""Folders of memory files (``/dev/shm``) that outlive the ranks of a run: where `plait.train.mirror` keeps replicas.

A process dies, and its memory files do not: a folder belongs to whoever starts the ranks again, and is named after it.
Under plait's own supervisor that is the supervisor, which makes the folder and takes it away. Ranks that torchrun or
srun started name one after their launcher on their host, come to the same one when that starts them again, and take it
away when the run ends. What belongs to a process that is gone is removed by whoever makes the next folder.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from plait.core.errors import ConfigError

MEMORY = Path("/dev/shm")
_NAME = re.compile(r"plait-memory-(\d+)-(\d+)-.+")
"""Of the process that it belongs to, and of the namespace of processes in which that has this number."""


@contextmanager
def memory_folder(wanted: bool, parent: Path = MEMORY) -> Iterator[Path | None]:
    """A private folder of memory files for one supervisor, gone when it ends; None where none is ``wanted``.

    What a supervisor that was killed has left there is removed. ConfigError where this machine has no such folder.
    """
    if not wanted:
        yield None
        return
    _tidy(parent)
    with tempfile.TemporaryDirectory(prefix=_name(os.getpid()), dir=parent, ignore_cleanup_errors=True) as name:
        yield Path(name)


def launched_folder(run: Path, parent: Path = MEMORY) -> Path:
    """The folder of memory files of the ranks on this host of the run in the folder ``run``, which a launcher started.

    Any of them makes it, the others find it; so do those that the launcher starts next. ConfigError where this machine
    has no such folder, or another user has this one.
    """
    _tidy(parent)
    folder = parent / f"{_name(launcher())}{run_key(run)}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = os.lstat(folder)
    except OSError as error:
        raise ConfigError(f"run.replicas: {folder} cannot be made: {error.strerror}; set run.replicas=0") from error
    if found.st_uid != os.getuid() or folder.is_symlink():
        raise ConfigError(f"run.replicas: {folder} belongs to another user; remove it, or set run.replicas=0")
    return folder


def run_key(run: Path) -> str:
    """What the names of the folders of the run in ``run`` end with."""
    return hashlib.sha256(os.fsencode(os.path.abspath(run))).hexdigest()[:16]


def host_name(folder: Path) -> str:
    """Equal for two ranks exactly when they see the same memory folder: then they are of one host here."""
    found = os.stat(folder)
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{file.read().strip()} {found.st_dev} {found.st_ino}"


def launcher(env: Mapping[str, str] = os.environ) -> int:
    """The process that starts this host's ranks again: the nearest ancestor that is not itself started as a rank."""
    mark = next(name for name in ("LOCAL_RANK", "RANK", "SLURM_PROCID") if name in env or name == "SLURM_PROCID")
    pid = os.getppid()
    while pid > 1 and _was_given(pid, mark):  # a shell, say, that torchrun has started for the rank
        pid = _parent(pid)
    return pid


def _was_given(pid: int, name: str) -> bool:
    """Whether process ``pid`` was started with the variable ``name``; not where that cannot be seen."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return any(variable.startswith(f"{name}=".encode()) for variable in variables)


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
    except OSError:
        return 1


def _name(pid: int) -> str:
    return f"plait-memory-{pid}-{_processes()}-"


def _processes() -> int:
    """The namespace of processes: in another one (another container) the same number is another process."""
    return os.stat("/proc/self/ns/pid").st_ino


def _tidy(parent: Path) -> None:
    """Remove what belongs to processes that are gone. ConfigError where there is no ``parent``."""
    if not parent.is_dir():
        raise ConfigError(f"run.replicas keeps state in {parent}, which this machine does not have: set run.replicas=0")
    for name in os.listdir(parent):
        match = _NAME.fullmatch(name)
        if match is None or int(match[2]) != _processes() or Path(f"/proc/{match[1]}").exists():
            continue
        try:
            mine = os.lstat(parent / name).st_uid == os.getuid()
        except OSError:  # another rank was faster
            continue
        if mine:
            shutil.rmtree(parent / name, ignore_errors=True)
