"""Groups through memory shared by the processes of one host.

gloo moves a tensor through sockets (docs/performance.md has it beside this file, measured); ranks of one
host can read each other's memory. Each member of a group owns a `Ring` in one anonymous memory file. To start an
operation a rank copies what the others need into its ring and raises its ``published`` counter; to finish, it waits
for the others' counters and reads. So an operation overlaps with whatever is computed between start and wait, without
a thread.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import final

import torch
from torch import Tensor

from plait.comm.group import Book, Counts, Group, Reduction
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
        self,
        name: str,
        sizes: int | Sequence[int],
        write: Callable[[Tensor], None],
        read: Callable[[list[Tensor]], None],
    ) -> int:
        """Publish this rank's bytes, filled by ``write``; ``read`` gets all members' bytes when they are there.

        ``sizes``: bytes of each member, or one number for all.
        """
        self._operation += 1
        operation = self._operation
        expected = [sizes] * self.size if isinstance(sizes, int) else sizes
        nbytes = expected[self.index]
        offset: int | None = None

        def reserved() -> bool:
            nonlocal offset
            offset = self._mine.reserve(operation, nbytes, self._read_by_all)
            if offset is None:
                self._finish_arrived()
            return offset is not None

        if not reserved():
            flight = self.book.flight
            flight.waiting(flight.last)
            before = operation - 1
            cause = partial(self._cause, name, before, consumed=True)
            wait_until(reserved, self.book, cause, partial(self._late, before, consumed=True))
            flight.moving(flight.last)
        assert offset is not None
        write(self._mine.data[offset : offset + nbytes])
        self._mine.publish(operation, offset, nbytes)

        def finish() -> None:
            read([ring.find(operation, size) for ring, size in zip(self._rings, expected, strict=True)])

        self._unfinished.append((operation, finish))
        return operation

    def _read_by_all(self) -> int:
        # This rank counts too: it reads its own slot when it finishes, and may start the next operation before that.
        return min(ring.consumed for ring in self._rings)

    def _arrived(self, operation: int) -> bool:
        return all(ring.published >= operation for ring in self._others)

    def _late(self, operation: int, *, consumed: bool = False) -> list[int]:
        return [
            rank
            for rank, ring in zip(self.ranks, self._rings, strict=True)
            if rank != self.book.rank and (ring.consumed if consumed else ring.published) < operation
        ]

    def _cause(self, name: str, operation: int, *, consumed: bool = False) -> str:
        late = self._late(operation, consumed=consumed)
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
            cause, late = partial(self._cause, name, operation), partial(self._late, operation)
            wait_until(lambda: self._ended(operation), self.book, cause, late)
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
        return self._gathered("all_gather", x, out, [x.shape[0]] * self.size)

    def _gather_rows(self, x: Tensor, out: Tensor, counts: Sequence[int]) -> Callable[[], Tensor]:
        return self._gathered("gather_rows", x, out, counts)

    def _gathered(self, name: str, x: Tensor, out: Tensor, counts: Sequence[int]) -> Callable[[], Tensor]:
        flat, parts = x.view(-1), [part.view(-1) for part in torch.split(out, list(counts))]
        in_place = parts[self.index].data_ptr() == flat.data_ptr()
        width = x.element_size()
        operation = 0
        for begin, end in chunks(max(part.numel() for part in parts), width):

            def write(slot: Tensor, begin: int = begin, end: int = end) -> None:
                slot.view(x.dtype).copy_(flat[begin:end])

            def read(slots: list[Tensor], begin: int = begin, end: int = end) -> None:
                for index, slot in enumerate(slots):
                    if index != self.index:
                        parts[index][begin:end].copy_(slot.view(x.dtype))
                    elif not in_place:
                        parts[index][begin:end].copy_(flat[begin:end])

            sizes = [part[begin:end].numel() * width for part in parts]
            operation = self._start(name, sizes, write, read)
        return self._finisher(name, operation, out)

    def _all_to_all(self, x: Tensor, out: Tensor) -> Callable[[], Tensor]:
        return self._exchanged("all_to_all", x, out, [[x.shape[0] // self.size] * self.size] * self.size)

    def _exchange(self, x: Tensor, out: Tensor, counts: Counts) -> Callable[[], Tensor]:
        return self._exchanged("exchange", x, out, counts)

    def _exchanged(self, name: str, x: Tensor, out: Tensor, counts: Counts) -> Callable[[], Tensor]:
        runs = _Runs(counts, x, self.index)
        parts = [part.view(-1) for part in torch.split(x, list(counts[self.index]))]
        into = [part.view(-1) for part in torch.split(out, [row[self.index] for row in counts])]
        into[self.index].copy_(parts[self.index])

        def read(slots: list[Tensor], begin: int, end: int) -> None:
            for index, slot in enumerate(slots):
                if index != self.index:
                    into[index][begin:end].copy_(runs.own(slot, index, begin, end))

        return self._exchange_runs(name, runs, parts, read, out)

    def _scatter_rows(self, x: Tensor, out: Tensor, counts: Sequence[int]) -> Callable[[], Tensor]:
        runs = _Runs([counts] * self.size, x, self.index)
        parts, into = [part.view(-1) for part in torch.split(x, list(counts))], out.view(-1)

        def read(slots: list[Tensor], begin: int, end: int) -> None:
            terms = [runs.own(slot, index, begin, end) for index, slot in enumerate(slots) if index != self.index]
            terms.insert(self.index, parts[self.index][begin:end])
            _reduce(terms, into[begin:end], "sum")

        return self._exchange_runs("scatter_rows", runs, parts, read, out)

    def _exchange_runs(
        self,
        name: str,
        runs: _Runs,
        parts: list[Tensor],
        read: Callable[[list[Tensor], int, int], None],
        out: Tensor,
    ) -> Callable[[], Tensor]:
        """Publish a chunk of every run to another rank at a time; ``read`` takes what came for this one."""
        operation = 0
        for begin, end in chunks(runs.longest, runs.width * max(1, self.size - 1)):

            def write(slot: Tensor, begin: int = begin, end: int = end) -> None:
                for index, part in enumerate(parts):
                    if index != self.index:
                        runs.run(slot, self.index, index, begin, end).copy_(part[begin:end])

            def take(slots: list[Tensor], begin: int = begin, end: int = end) -> None:
                read(slots, begin, end)

            sizes = [runs.chunk_bytes(index, begin, end) for index in range(self.size)]
            operation = self._start(name, sizes, write, take)
        return self._finisher(name, operation, out)


@final
class _Runs:
    """Where the runs of elements that ranks send each other lie in the ranks' slots: one behind the other, without the
    rank's own."""

    def __init__(self, counts: Counts, x: Tensor, index: int) -> None:
        row = math.prod(x.shape[1:])
        self._elements = [
            [0 if to == source else count * row for to, count in enumerate(sent)] for source, sent in enumerate(counts)
        ]
        self._dtype = x.dtype
        self._index = index
        self.width = x.element_size()
        self.longest = max(map(max, self._elements))

    def _sizes(self, source: int, begin: int, end: int) -> list[int]:
        return [max(0, min(end, elements) - begin) for elements in self._elements[source]]

    def chunk_bytes(self, source: int, begin: int, end: int) -> int:
        """Bytes that rank ``source`` publishes for elements begin..end of each of its runs."""
        return sum(self._sizes(source, begin, end)) * self.width

    def run(self, slot: Tensor, source: int, to: int, begin: int, end: int) -> Tensor:
        """Elements begin..end, as far as there are any, of the run from ``source`` to ``to`` in ``source``'s slot."""
        sizes = self._sizes(source, begin, end)
        start = sum(sizes[:to])
        return slot.view(self._dtype)[start : start + sizes[to]]

    def own(self, slot: Tensor, source: int, begin: int, end: int) -> Tensor:
        """`run` to this rank."""
        return self.run(slot, source, self._index, begin, end)


def _reduce(rows: list[Tensor], out: Tensor, op: Reduction) -> None:
    """Fold ``rows`` in rank order, so that every rank gets the same bits. ``out`` may be one of the rows."""
    combine = torch.add if op == "sum" else torch.maximum
    combine(rows[0], rows[1], out=out)
    for row in rows[2:]:
        combine(out, row, out=out)
