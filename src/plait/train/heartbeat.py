"""`Heartbeat`: a rank's sign of life, and how whoever started the rank reads it.

A rank that stands still cannot say so. Each rank therefore keeps a few bytes in a file that is mapped into memory, in
its launcher's private folder: where it is, and since when. Writing them costs about a microsecond and no system call;
the launcher reads them whatever state the rank is in. A rank that another launcher started (torchrun, srun) has no such
folder: its beats go nowhere.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, final

from plait.comm import flight

if TYPE_CHECKING:
    from plait.train.launch import Worker

_BEAT = struct.Struct("<qqqdd?63s")
"""Beats so far, pid, step, time on the host's monotonic clock in seconds, compute seconds, bounded, phase."""
SIZE = 128
"""Bytes of a rank's file."""
COMPUTING = 0.1
"""Cores that a rank takes at least which computes; one that stands still has threads that take next to nothing."""


@dataclass(frozen=True, kw_only=True)
class Beat:
    """What a rank last said of itself."""

    count: int
    pid: int
    step: int
    phase: str
    time: float
    """Of the host's monotonic clock (`time.monotonic`), the same in all its processes."""
    compute: float
    """Seconds that the rank itself computed in its last whole step; 0 before that."""
    bounded: bool
    """Whether the next beat has to come within ``run.timeout``."""


@final
class Heartbeat:
    """Beats of one rank. The trainer makes one, and calls `beat` wherever it begins something else:

    ``beat(step, "load", bounded=False)`` before a checkpoint is loaded (``step`` is the checkpoint's),
    ``beat(step, "step")`` before each step, ``beat(step, "evaluate")``, ``beat(step, "save", bounded=False)``.
    Between two beats the rank's operations with others count as signs of life too (`plait.comm.flight`), so a long step
    is no hang.
    """

    def __init__(self, worker: Worker) -> None:
        self._memory: mmap.mmap | bytearray = bytearray(SIZE)
        if worker.watch is not None:
            file = os.open(beat_file(worker.watch, worker.place.rank), os.O_RDWR | os.O_CREAT, 0o600)
            os.pwrite(file, bytes(SIZE), 0)  # no hole, as in `flight.Flight`
            self._memory = mmap.mmap(file, SIZE)
            os.close(file)
        self._count = 0
        self._pid = os.getpid()
        self._compute = 0.0
        self.beat(0, "start", bounded=False)

    def beat(self, step: int, phase: str, *, bounded: bool = True, compute: float | None = None) -> None:
        """Say that ``phase`` (a word or two) of ``step`` begins now.

        ``bounded``: it is a hang when nothing follows within ``run.timeout`` seconds; False for what may take as long
        as it needs (files). ``compute``: seconds that this rank computed in the step before, waiting left out.
        """
        self._count += 1
        if compute is not None:
            self._compute = compute
        name = phase.encode("utf-8")[:63]
        now = time.monotonic()
        _BEAT.pack_into(self._memory, 0, self._count, self._pid, step, now, self._compute, bounded, name)


def beat_file(folder: Path, rank: int) -> Path:
    """Where rank ``rank`` of the launcher with the private ``folder`` keeps its beats."""
    return folder / f"beat-{rank}"


def read_beat(folder: Path, rank: int) -> Beat | None:
    """The last beat of a rank; None before its first."""
    try:
        content = beat_file(folder, rank).read_bytes()
    except FileNotFoundError:
        return None
    if len(content) < _BEAT.size:
        return None
    count, pid, step, when, compute, bounded, name = _BEAT.unpack_from(content)
    if count == 0:
        return None
    phase = name.rstrip(b"\0").decode("utf-8", errors="replace")
    return Beat(count=count, pid=pid, step=step, phase=phase, time=when, compute=compute, bounded=bounded)


@final
class Lookout:
    """Tells which of a launcher's ranks hangs: bounded by its last beat, or stopped, and without a sign of life for
    ``timeout`` seconds."""

    def __init__(self, folder: Path, ranks: int, timeout: float) -> None:
        self._folder = folder
        self._timeout = timeout
        self._seen: list[object] = [None] * ranks
        self._since = [0.0] * ranks
        self._looked: float | None = None
        self._spent = 0.0

    def hung(self, now: float) -> int | None:
        """Look at all ranks, at ``now`` (monotonic seconds). A rank that stands still because another does is not
        named: its own wait ends by time-out too, and says what it waited for. A rank that is alone takes as long for an
        action as it needs while it computes: nobody waits for it.
        """
        if self._looked is not None and now - self._looked > self._timeout:
            self._seen = [None] * len(self._seen)  # who looks stood still itself (Ctrl-Z): so may they have
        self._looked = now
        late = []
        for rank in range(len(self._seen)):
            beat = read_beat(self._folder, rank)
            sign = (beat and beat.count, flight.stamp(flight.flight_file(self._folder, rank)))
            free = beat is None or not (beat.bounded or state_of(beat.pid).startswith("is stopped"))
            if sign != self._seen[rank] or free:
                self._seen[rank], self._since[rank] = sign, now
                self._spent = self._alone(beat)
            elif now - self._since[rank] > self._timeout:
                spent = self._alone(beat)
                if spent - self._spent > COMPUTING * self._timeout:
                    self._since[rank], self._spent = now, spent
                else:
                    late.append(rank)
        if not late:
            return None
        held = [flight.read(flight.flight_file(self._folder, rank)) for rank in range(len(self._seen))]
        cause = flight.suspect([one for one in held if one is not None])
        if cause is not None:
            return cause if cause in late else None
        computing = [rank for rank in late if held[rank] is None or flight.standing(held[rank] or {}) is None]
        return min(computing, key=self._since.__getitem__) if computing else None

    def _alone(self, beat: Beat | None) -> float:
        """Processor seconds of the rank that ``beat`` is of, where it is the only one; else 0."""
        return processor_seconds(beat.pid) if beat is not None and len(self._seen) == 1 else 0.0


def processor_seconds(pid: int) -> float:
    """Seconds of processor time that all threads of a process took; 0 where this system does not tell."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError):
        return 0.0


def state_of(pid: int) -> str:
    """What the kernel says a process does, as a clause without its subject."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            state = file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "is in a state that this system does not tell"
    known = {
        "T": "is stopped by a signal (SIGSTOP)",
        "t": "is stopped by a debugger",
        "R": "is running",
        "D": "waits for a disk or a device",
        "Z": "is dead",
    }
    return known.get(state, "sleeps")
