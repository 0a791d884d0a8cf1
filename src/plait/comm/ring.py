"""`Ring`: memory of one process that the other processes of its host read, and how to wait for them.

A counter is written by one process only, after the data it announces. Stores become visible in program order on x86-64
(total store order), which is why `available` asks for that architecture; elsewhere gloo serves.
"""

from __future__ import annotations

import errno
import mmap
import os
import platform
import resource
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor

from plait.comm.group import Book
from plait.core.errors import ConfigError, RankError

RING = 32 << 20
"""Bytes of one rank's ring."""
CHUNK = 2 << 20
"""Longer operations are cut into pieces of this many bytes: they stay in cache between writer and reader."""
_OPS = 256
_LINE = 8
_PUBLISHED, _CONSUMED, _OFFSETS, _SIZES = 0, _LINE, 2 * _LINE, 2 * _LINE + _OPS
_HEADER = (2 * _LINE + 2 * _OPS) * 8
_ALIGN = 64


def available() -> bool:
    """Whether this machine can carry a group through shared memory."""
    return platform.machine() in ("x86_64", "AMD64") and "memfd_create" in os.__dict__


def host_identity() -> str:
    """Equal for two processes exactly when they can map each other's memory (one kernel, one PID namespace)."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"


def wait_until(
    ready: Callable[[], bool], book: Book, cause: Callable[[], str], late: Callable[[], Sequence[int]] = tuple
) -> None:
    """Spin, then yield, then sleep until ``ready()``; `RankError` naming ``cause()`` after the book's time-out.

    ``late`` gives the ranks that are waited for: when one of them has died, it is said at once.
    """
    for _ in range(_SPINS):
        if ready():
            return
    begin = asked = time.monotonic()
    while not ready():
        for move_on in book.progress:
            move_on()
        now = time.monotonic()
        waited = now - begin
        if now - asked > _ALIVE_SECONDS:
            asked = now
            # It may have sent all that it had to, and left: only then is this wait over.
            dead = [rank for rank in late() if rank in book.pids and not _alive(book.pids[rank])]
            if dead and not ready() and set(dead) & set(late()):
                raise RankError(f"{cause()}: rank {dead[0]} has died")
        if waited > book.timeout:
            raise RankError(f"{cause()}, for {book.timeout:g} s")
        if waited < 0.002:
            os.sched_yield()
        else:
            # A look takes some of a core that another rank may need; it comes late by a twentieth of the wait at most.
            time.sleep(min(500e-6, max(50e-6, waited / 20)))


_SPINS = 200
_ALIVE_SECONDS = 0.2


def _alive(pid: int) -> bool:
    """Whether there is such a process on this host."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


@final
class Ring:
    """One member's counters and data inside the shared file; written by its owner, read by the others."""

    def __init__(self, counters: memoryview, data: Tensor) -> None:
        self.counters = counters
        self.data = data
        self._used: deque[tuple[int, int, int]] = deque()
        self._head = 0

    @property
    def published(self) -> int:
        return int(self.counters[_PUBLISHED])

    @property
    def consumed(self) -> int:
        return int(self.counters[_CONSUMED])

    def consume(self, operation: int) -> None:
        self.counters[_CONSUMED] = operation

    def find(self, operation: int, nbytes: int) -> Tensor:
        """The bytes of a published operation; `RankError` when the writer sent another size than the reader expects."""
        offset, size = self.counters[_OFFSETS + operation % _OPS], self.counters[_SIZES + operation % _OPS]
        if size != nbytes:
            raise RankError(f"a message of {size} bytes came where one of {nbytes} was expected: the ranks disagree")
        return self.data[offset : offset + nbytes]

    def publish(self, operation: int, offset: int, nbytes: int) -> None:
        self.counters[_OFFSETS + operation % _OPS] = offset
        self.counters[_SIZES + operation % _OPS] = nbytes
        self.counters[_PUBLISHED] = operation

    def reserve(self, operation: int, nbytes: int, consumed: Callable[[], int]) -> int | None:
        """Offset of ``nbytes`` free bytes for ``operation``, or None while readers still hold them."""
        done = consumed()
        while self._used and self._used[0][0] <= done:
            self._used.popleft()
        if not self._used:
            self._head = 0
        elif len(self._used) >= _OPS - 1:
            return None
        begin = self._head
        tail = self._used[0][1] if self._used else RING
        if self._used and begin <= tail:
            if begin + nbytes > tail:
                return None
        elif begin + nbytes > RING:
            begin = 0
            if self._used and nbytes > tail:
                return None
        self._used.append((operation, begin, begin + nbytes))
        self._head = -(-(begin + nbytes) // _ALIGN) * _ALIGN
        return begin


def map_rings(members: int, descriptor: int) -> list[Ring]:
    """Map the shared file behind ``descriptor`` as ``members`` rings."""
    stride = _HEADER + RING
    try:
        memory = mmap.mmap(descriptor, members * stride)
    except OSError as error:
        raise _refused(members * stride, error) from error
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    rings = []
    for member in range(members):
        begin = member * stride
        counters = memoryview(memory)[begin : begin + _HEADER].cast("q")
        rings.append(Ring(counters, whole[begin + _HEADER : begin + stride]))
    return rings


def create_file(members: int) -> int:
    """An anonymous memory file for ``members`` rings: the kernel frees it with the last process that maps it.

    ConfigError where a limit of this process is in the way.
    """
    size = members * (_HEADER + RING)
    descriptor = os.memfd_create("plait")
    try:
        os.ftruncate(descriptor, size)
    except OSError as error:
        os.close(descriptor)
        raise _refused(size, error) from error
    return descriptor


def _refused(size: int, error: OSError) -> ConfigError:
    why = error.strerror or str(error)
    if error.errno == errno.EFBIG:
        why = f"the limit on the size of a file is {resource.getrlimit(resource.RLIMIT_FSIZE)[0]:,} bytes (ulimit -f)"
    elif error.errno == errno.ENOMEM:
        why += " (ulimit -v)"
    return ConfigError(
        f"ranks of one host share {size:,} bytes of memory a group, which this process may not have: {why}; what "
        "works: a higher limit"
    )


def chunks(elements: int, element_bytes: int) -> list[tuple[int, int]]:
    """Ranges of at most `CHUNK` bytes that make up ``elements``; one empty range for none."""
    step = max(1, CHUNK // element_bytes)
    return [(begin, min(begin + step, elements)) for begin in range(0, elements, step)] or [(0, 0)]
