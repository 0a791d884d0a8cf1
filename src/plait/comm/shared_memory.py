"""Groups and messages through memory shared by the processes of one host.

gloo moves a tensor through sockets (about 1 GB/s here, a third of a millisecond for the smallest message); ranks of one
host can read each other's memory. Each member of a group owns a ring in one anonymous memory file. To start an
operation a rank copies what the others need into its ring and raises its ``published`` counter; to finish, it waits
for the others' counters and reads. So an operation overlaps with whatever is computed between start and wait, without
a thread.

A counter is written by one process only, after the data it announces. Stores become visible in program order on x86-64
(total store order), which is why `available` asks for that architecture; elsewhere gloo serves.
"""

from __future__ import annotations

import mmap
import os
import platform
import sys
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import final

import torch
from torch import Tensor

from plait.comm.group import Book, Group, Pending, Reduction
from plait.core.errors import RankError

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


def wait_until(ready: Callable[[], bool], book: Book, cause: Callable[[], str]) -> None:
    """Spin, then yield, then sleep until ``ready()``; `RankError` naming ``cause()`` after the book's time-out."""
    for _ in range(_SPINS):
        if ready():
            return
    begin = time.monotonic()
    while not ready():
        for move_on in book.progress:
            move_on()
        waited = time.monotonic() - begin
        if waited > book.timeout:
            raise RankError(f"{cause()}, for {book.timeout:g} s")
        if waited < 0.002:
            os.sched_yield()
        else:
            time.sleep(50e-6)


_SPINS = 200


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
    memory = mmap.mmap(descriptor, members * stride)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    rings = []
    for member in range(members):
        begin = member * stride
        counters = memoryview(memory)[begin : begin + _HEADER].cast("q")
        rings.append(Ring(counters, whole[begin + _HEADER : begin + stride]))
    return rings


def create_file(members: int) -> int:
    """An anonymous memory file for ``members`` rings: the kernel frees it with the last process that maps it."""
    descriptor = os.memfd_create("plait")
    os.ftruncate(descriptor, members * (_HEADER + RING))
    return descriptor


@final
class SharedMemoryGroup(Group):
    """A `Group` whose ranks share a host."""

    def __init__(self, axis: str, ranks: tuple[int, ...], book: Book, rings: list[Ring]) -> None:
        super().__init__(axis, ranks, book)
        self._rings = rings
        self._mine = rings[self.index]
        self._others = [ring for index, ring in enumerate(rings) if index != self.index]
        self._operation = 0
        self._unfinished: deque[tuple[int, Callable[[], None]]] = deque()
        book.progress.append(self._finish_arrived)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def _start(
        self, name: str, nbytes: int, write: Callable[[Tensor], None], read: Callable[[list[Tensor]], None]
    ) -> int:
        """Publish ``nbytes`` filled by ``write``; ``read`` gets all members' bytes when they are there."""
        self._operation += 1
        operation = self._operation
        offset: int | None = None

        def reserved() -> bool:
            nonlocal offset
            offset = self._mine.reserve(operation, nbytes, self._read_by_all)
            if offset is None:
                self._finish_arrived()
            return offset is not None

        wait_until(reserved, self.book, lambda: self._cause(name, operation - 1, consumed=True))
        assert offset is not None
        write(self._mine.data[offset : offset + nbytes])
        self._mine.publish(operation, offset, nbytes)

        def finish() -> None:
            read([ring.find(operation, nbytes) for ring in self._rings])

        self._unfinished.append((operation, finish))
        return operation

    def _read_by_all(self) -> int:
        # This rank counts too: it reads its own slot when it finishes, and may start the next operation before that.
        return min(ring.consumed for ring in self._rings)

    def _arrived(self, operation: int) -> bool:
        return all(ring.published >= operation for ring in self._others)

    def _cause(self, name: str, operation: int, *, consumed: bool = False) -> str:
        late = [
            rank
            for rank, ring in zip(self.ranks, self._rings, strict=True)
            if rank != self.book.rank and (ring.consumed if consumed else ring.published) < operation
        ]
        doing = f" in {self.book.doing}" if self.book.doing else ""
        waiting = f"rank {self.book.rank} waits for {name} over {self.axis}{doing}"
        return f"{waiting}; missing: ranks {late} of {list(self.ranks)}"

    def _finish_arrived(self, last: int = sys.maxsize) -> None:
        """Finish what all have published, up to operation ``last``: they may need its room while this rank waits."""
        while self._unfinished and self._unfinished[0][0] <= last and self._arrived(self._unfinished[0][0]):
            operation, finish = self._unfinished.popleft()
            finish()
            self._mine.consume(operation)

    def _ended(self, operation: int) -> bool:
        self._finish_arrived(operation)
        return not self._unfinished or self._unfinished[0][0] > operation

    def _finisher(self, name: str, operation: int, result: Tensor) -> Callable[[], Tensor]:
        def finish() -> Tensor:
            # Operations end in the order they began: consumed counters say "everything up to here".
            wait_until(lambda: self._ended(operation), self.book, partial(self._cause, name, operation))
            return result

        return finish

    def _all_reduce(self, x: Tensor, op: Reduction) -> Callable[[], Tensor]:
        flat = x.view(-1)
        operation = 0
        for begin, end in _chunks(flat.numel(), x.element_size()):
            part = flat[begin:end]

            def write(slot: Tensor, part: Tensor = part) -> None:
                slot.view(part.dtype).copy_(part)

            def read(slots: list[Tensor], part: Tensor = part) -> None:
                _reduce([slot.view(part.dtype) for slot in slots], part, op)

            operation = self._start("all_reduce", part.nbytes, write, read)
        return self._finisher("all_reduce", operation, x)

    def _reduce_scatter(self, x: Tensor, out: Tensor) -> Callable[[], Tensor]:
        parts, into = x.view(self.size, -1), out.view(-1)
        # ``out`` may be this rank's part of ``x``: only as one of the first two terms may it be overwritten by the sum.
        copied = self.index >= 2
        operation = 0
        for begin, end in _chunks(into.numel(), x.element_size() * self.size):

            def write(slot: Tensor, begin: int = begin, end: int = end) -> None:
                rows = slot.view(x.dtype).view(self.size, -1)
                for index in range(self.size):
                    if index != self.index or copied:
                        rows[index].copy_(parts[index, begin:end])

            def read(slots: list[Tensor], begin: int = begin, end: int = end) -> None:
                rows = [slot.view(x.dtype).view(self.size, -1)[self.index] for slot in slots]
                if not copied:
                    rows[self.index] = parts[self.index, begin:end]
                _reduce(rows, into[begin:end], "sum")

            operation = self._start("reduce_scatter", (end - begin) * x.element_size() * self.size, write, read)
        return self._finisher("reduce_scatter", operation, out)

    def _all_gather(self, x: Tensor, out: Tensor) -> Callable[[], Tensor]:
        flat, rows = x.view(-1), out.view(self.size, -1)
        in_place = rows[self.index].data_ptr() == flat.data_ptr()
        operation = 0
        for begin, end in _chunks(flat.numel(), x.element_size()):

            def write(slot: Tensor, begin: int = begin, end: int = end) -> None:
                slot.view(x.dtype).copy_(flat[begin:end])

            def read(slots: list[Tensor], begin: int = begin, end: int = end) -> None:
                for index, slot in enumerate(slots):
                    if index != self.index:
                        rows[index, begin:end].copy_(slot.view(x.dtype))
                    elif not in_place:
                        rows[index, begin:end].copy_(flat[begin:end])

            operation = self._start("all_gather", (end - begin) * x.element_size(), write, read)
        return self._finisher("all_gather", operation, out)

    def _all_to_all(self, x: Tensor, out: Tensor) -> Callable[[], Tensor]:
        parts, rows = x.view(self.size, -1), out.view(self.size, -1)
        operation = 0
        for begin, end in _chunks(parts.shape[1], x.element_size() * self.size):

            def write(slot: Tensor, begin: int = begin, end: int = end) -> None:
                slot.view(x.dtype).view(self.size, -1).copy_(parts[:, begin:end])

            def read(slots: list[Tensor], begin: int = begin, end: int = end) -> None:
                for index, slot in enumerate(slots):
                    rows[index, begin:end].copy_(slot.view(x.dtype).view(self.size, -1)[self.index])

            operation = self._start("all_to_all", (end - begin) * x.element_size() * self.size, write, read)
        return self._finisher("all_to_all", operation, out)


def _chunks(elements: int, element_bytes: int) -> list[tuple[int, int]]:
    step = max(1, CHUNK // element_bytes)
    return [(begin, min(begin + step, elements)) for begin in range(0, elements, step)] or [(0, 0)]


def _reduce(rows: list[Tensor], out: Tensor, op: Reduction) -> None:
    """Fold ``rows`` in rank order, so that every rank gets the same bits. ``out`` may be one of the rows."""
    combine = torch.add if op == "sum" else torch.maximum
    combine(rows[0], rows[1], out=out)
    for row in rows[2:]:
        combine(out, row, out=out)


@final
class SharedMemoryWire:
    """Messages between two ranks of one host. A send never blocks: what finds no room leaves while the rank waits."""

    def __init__(self, book: Book, connect: Callable[[int, int], Ring]) -> None:
        self._book = book
        self._connect = connect
        self._channels: dict[tuple[int, int], _Channel] = {}
        self._queue: deque[tuple[_Channel, Tensor]] = deque()
        book.progress.append(self._push)

    def _channel(self, source: int, to: int) -> _Channel:
        key = (source, to)
        if key not in self._channels:
            self._channels[key] = _Channel(self._connect(source, to))
        return self._channels[key]

    def send(self, x: Tensor, to: int) -> None:
        """Copy ``x`` into the channel to rank ``to``, or queue it while the channel is full."""
        channel = self._channel(self._book.rank, to)
        self._queue.extend((channel, part) for part in _parts(x))
        self._push()

    def _push(self) -> None:
        blocked: set[int] = set()
        for _ in range(len(self._queue)):
            channel, part = self._queue.popleft()
            if id(channel) in blocked or not channel.write(part):
                blocked.add(id(channel))
                self._queue.append((channel, part))

    def recv(self, out: Tensor, source: int) -> Pending:
        """Receive into ``out`` from rank ``source``; messages of a pair arrive in the order they were sent."""
        channel = self._channel(source, self._book.rank)
        message = channel.expect(_parts(out))
        cause = f"rank {self._book.rank} waits for {self._book.doing}, from rank {source}"

        def finish() -> Tensor:
            wait_until(lambda: channel.deliver(message), self._book, lambda: cause)
            return out

        return Pending(finish, self._book, "recv pp")

    def flush(self) -> None:
        """Return when every message has left this rank, to a receiver that is there: this one may leave then."""

        def empty() -> bool:
            self._push()
            return not self._queue and all(channel.met for channel in self._channels.values())

        wait_until(empty, self._book, lambda: f"rank {self._book.rank} waits for its messages to be read")


@final
class _Channel:
    """One direction between two ranks: a ring with one writer and one reader."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._sent = 0
        self._received = 0
        self._expected: deque[Tensor] = deque()
        self._announced = 0

    def write(self, part: Tensor) -> bool:
        operation = self._sent + 1
        offset = self._ring.reserve(operation, part.nbytes, lambda: self._ring.consumed)
        if offset is None:
            return False
        self._ring.data[offset : offset + part.nbytes].view(part.dtype).copy_(part)
        self._ring.publish(operation, offset, part.nbytes)
        self._sent = operation
        return True

    @property
    def met(self) -> bool:
        """Whether the reader has been seen, if anything was written."""
        return self._sent == 0 or self._ring.consumed > 0

    def expect(self, parts: list[Tensor]) -> int:
        """Queue buffers for what comes next; returns the number of the last part."""
        self._expected.extend(parts)
        self._announced += len(parts)
        return self._announced

    def deliver(self, last: int) -> bool:
        """Copy out what has arrived; whether that includes part ``last``."""
        while self._expected and self._received < last and self._ring.published > self._received:
            part = self._expected.popleft()
            self._received += 1
            part.copy_(self._ring.find(self._received, part.nbytes).view(part.dtype))
            self._ring.consume(self._received)
        return self._received >= last


def _parts(x: Tensor) -> list[Tensor]:
    flat = x.reshape(-1)
    return [flat[begin:end] for begin, end in _chunks(flat.numel(), x.element_size())]
