"""Groups through memory shared by the processes of one host.

gloo moves a tensor through sockets (docs/performance.md has it beside this file, measured); ranks of one
host can read each other's memory. Each member of a group owns a `Ring` in one anonymous memory file. To start an
operation a rank copies what the others need into its ring and raises its ``published`` counter; to finish, it waits
for the others' counters and reads. So an operation overlaps with whatever is computed between start and wait, without
a thread.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import final

import torch
from torch import Tensor

from plait.comm.group import Book, Group, Reduction
from plait.comm.ring import Ring, chunks, wait_until


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
        for begin, end in chunks(flat.numel(), x.element_size()):
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
        for begin, end in chunks(into.numel(), x.element_size() * self.size):

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
        for begin, end in chunks(flat.numel(), x.element_size()):

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
        for begin, end in chunks(parts.shape[1], x.element_size() * self.size):

            def write(slot: Tensor, begin: int = begin, end: int = end) -> None:
                slot.view(x.dtype).view(self.size, -1).copy_(parts[:, begin:end])

            def read(slots: list[Tensor], begin: int = begin, end: int = end) -> None:
                for index, slot in enumerate(slots):
                    rows[index, begin:end].copy_(slot.view(x.dtype).view(self.size, -1)[self.index])

            operation = self._start("all_to_all", (end - begin) * x.element_size() * self.size, write, read)
        return self._finisher("all_to_all", operation, out)


def _reduce(rows: list[Tensor], out: Tensor, op: Reduction) -> None:
    """Fold ``rows`` in rank order, so that every rank gets the same bits. ``out`` may be one of the rows."""
    combine = torch.add if op == "sum" else torch.maximum
    combine(rows[0], rows[1], out=out)
    for row in rows[2:]:
        combine(out, row, out=out)
