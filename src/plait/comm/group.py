"""`Group`: ranks that communicate along some mesh axes, whatever carries their bytes.

Every operation books its bytes in the ledger, gives its wait a time-out, and records the time the caller stood still.
Operations are started at once and return a `Pending`; work done before `Pending.wait` overlaps with them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal, Protocol, final

import torch
from torch import Tensor

from plait.comm.flight import Flight
from plait.comm.ledger import Ledger
from plait.core.errors import RankError

Reduction = Literal["sum", "max"]
Counts = Sequence[Sequence[int]]
"""``counts[i][j]``: rows that rank i of a group sends to rank j. Every rank knows all of them."""


class SpanSink(Protocol):
    """Where spans go: ``telemetry.record.Recorder.add`` fits."""

    def __call__(self, stream: str, kind: str, name: str, start: float, end: float, bytes: int = 0, /) -> None: ...


def _nowhere(stream: str, kind: str, name: str, start: float, end: float, bytes: int = 0, /) -> None:
    """A sink for spans nobody asked for."""


@dataclass(kw_only=True)
class Book:
    """What a rank's groups share: the ledger, the sink of spans, and what the rank is doing (for errors)."""

    rank: int = 0
    timeout: float = 60.0
    ledger: Ledger = field(default_factory=Ledger)
    sink: SpanSink = _nowhere
    phase: str = ""
    """F, B or step: the third key of the ledger."""
    flight: Flight = field(default_factory=Flight)
    """The last operations, for who asks why this rank stands still."""
    progress: list[Callable[[], None]] = field(default_factory=list)
    """Called while waiting: what can be sent or finished meanwhile is, so that waiting ranks never block each other."""
    pids: dict[int, int] = field(default_factory=dict)
    """Processes of the ranks, where all are on this host: who waits for one that has died need not wait on."""
    _doing: str = field(default="", init=False)

    @property
    def doing(self) -> str:
        """The logical cause of a wait, such as ``RECV_F of stage 2, microbatch 5``."""
        return self._doing

    @doing.setter
    def doing(self, text: str) -> None:
        self._doing = text
        self.flight.note(text)


@final
class Pending:
    """An operation under way; `wait` returns its result. Waiting twice is free."""

    def __init__(
        self, finish: Callable[[], Tensor], book: Book | None = None, name: str = "", sent: int = 0, record: int = -1
    ) -> None:
        self._finish: Callable[[], Tensor] | None = finish
        self._result: Tensor | None = None
        self._book = book
        self._name = name
        self._sent = sent
        self._record = record

    def wait(self) -> Tensor:
        """The result, once every rank has done its part (on CUDA: once it is ordered on the current stream)."""
        if self._finish is not None:
            start = perf_counter()
            if self._book is not None:
                self._book.flight.waiting(self._record)
            self._result = self._finish()
            self._finish = None
            if self._book is not None:
                self._book.flight.done(self._record)
                self._book.sink("comm", self._name, self._name, start, perf_counter(), self._sent)
        assert self._result is not None
        return self._result


class Group(ABC):
    """``ranks`` (in order, this one at ``index``) that communicate along ``axis``. Tensors are contiguous.

    Gathers concatenate along dim 0; scatters cut dim 0, which must divide by `size`. Where ranks have unlike numbers of
    rows (`exchange`, `gather_rows`, `scatter_rows`), all know the numbers, so that none waits for another's to start.
    """

    def __init__(self, axis: str, ranks: tuple[int, ...], book: Book) -> None:
        self.axis = axis
        self.ranks = ranks
        self.book = book
        self.index = ranks.index(book.rank)
        self.size = len(ranks)
        self._flight_group = book.flight.group(axis, ranks)

    def _pending(
        self, operation: str, x: Tensor, start: Callable[[], Callable[[], Tensor]], tensor_bytes: int | None = None
    ) -> Pending:
        size = x.nbytes if tensor_bytes is None else tensor_bytes
        sent = self.book.ledger.add(self.axis, operation, self.book.phase, self.size, size)
        return self._under_way(operation, sent, x, start)

    def _uneven(self, operation: str, rows: int, x: Tensor, start: Callable[[], Callable[[], Tensor]]) -> Pending:
        sent = rows * math.prod(x.shape[1:]) * x.element_size()
        self.book.ledger.add_sent(self.axis, operation, self.book.phase, sent)
        return self._under_way(operation, sent, x, start)

    def _under_way(self, operation: str, sent: int, x: Tensor, start: Callable[[], Callable[[], Tensor]]) -> Pending:
        name = f"{operation} {self.axis}"
        begin = perf_counter()
        record = self.book.flight.begin(operation, self._flight_group, x.shape)
        finish = start()
        self.book.sink("comm", operation, name, begin, perf_counter(), 0)
        return Pending(finish, self.book, name, sent, record)

    def all_reduce(self, x: Tensor, op: Reduction = "sum") -> Pending:
        """Reduce ``x`` over the ranks, in place; every rank gets the same bits."""
        if self.size == 1:
            return Pending(lambda: x)
        return self._pending("all_reduce", x, lambda: self._all_reduce(x, op))

    def reduce_scatter(self, x: Tensor, out: Tensor | None = None) -> Pending:
        """Sum ``x`` [size * n, ...] over the ranks; this one gets its n rows, in ``out`` (may lie inside ``x``)."""
        if self.size == 1:
            return Pending(lambda: x)
        rows = x.shape[0] // self.size
        result = torch.empty((rows, *x.shape[1:]), dtype=x.dtype, device=x.device) if out is None else out
        return self._pending("reduce_scatter", x, lambda: self._reduce_scatter(x, result))

    def all_gather(self, x: Tensor, out: Tensor | None = None) -> Pending:
        """Concatenate the ranks' ``x`` [n, ...] to [size * n, ...], in ``out`` (``x`` may be its own part of it)."""
        if self.size == 1:
            return Pending(lambda: x)
        shape = (x.shape[0] * self.size, *x.shape[1:])
        result = torch.empty(shape, dtype=x.dtype, device=x.device) if out is None else out
        return self._pending("all_gather", x, lambda: self._all_gather(x, result), result.nbytes)

    def all_to_all(self, x: Tensor) -> Pending:
        """Cut ``x`` [size * n, ...] along dim 0, send part j to rank j; returns the parts received, in order."""
        if self.size == 1:
            return Pending(lambda: x)
        return self._pending("all_to_all", x, lambda: self._all_to_all(x, torch.empty_like(x)))

    def exchange(self, x: Tensor, counts: Counts) -> Pending:
        """Send row runs of ``x`` [sent, ...] (cut along dim 0 in rank order, run j to rank j); returns [received, ...].

        Zero rows are as good as any number: a rank may send or receive nothing at all.
        """
        self._fits(x, sum(counts[self.index]), "exchange")
        if self.size == 1:
            return Pending(lambda: x)
        out = x.new_empty((sum(row[self.index] for row in counts), *x.shape[1:]))
        sent = x.shape[0] - counts[self.index][self.index]
        return self._uneven("exchange", sent, x, lambda: self._exchange(x, out, counts))

    def gather_rows(self, x: Tensor, counts: Sequence[int]) -> Pending:
        """Concatenate the ranks' ``x`` [counts[index], ...] to [sum(counts), ...]."""
        self._fits(x, counts[self.index], "gather_rows")
        if self.size == 1:
            return Pending(lambda: x)
        out = x.new_empty((sum(counts), *x.shape[1:]))
        sent = x.shape[0] * (self.size - 1)
        return self._uneven("gather_rows", sent, x, lambda: self._gather_rows(x, out, counts))

    def scatter_rows(self, x: Tensor, counts: Sequence[int]) -> Pending:
        """Sum ``x`` [sum(counts), ...] over the ranks (in rank order); this one gets its [counts[index], ...] rows."""
        self._fits(x, sum(counts), "scatter_rows")
        if self.size == 1:
            return Pending(lambda: x)
        out = x.new_empty((counts[self.index], *x.shape[1:]))
        sent = x.shape[0] - counts[self.index]
        return self._uneven("scatter_rows", sent, x, lambda: self._scatter_rows(x, out, counts))

    def _fits(self, x: Tensor, rows: int, operation: str) -> None:
        if x.shape[0] != rows:
            raise RankError(f"{operation} over {self.axis}: {x.shape[0]} rows where the counts say {rows}")

    def barrier(self) -> None:
        """Return when all ranks have come here."""
        # The copy to the host waits for a GPU's stream, on which the operation is only ordered.
        self.all_reduce(torch.zeros(1, device=self.device)).wait().cpu()

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the tensors of this group live."""

    @abstractmethod
    def _all_reduce(self, x: Tensor, op: Reduction) -> Callable[[], Tensor]: ...

    @abstractmethod
    def _reduce_scatter(self, x: Tensor, out: Tensor) -> Callable[[], Tensor]: ...

    @abstractmethod
    def _all_gather(self, x: Tensor, out: Tensor) -> Callable[[], Tensor]: ...

    @abstractmethod
    def _all_to_all(self, x: Tensor, out: Tensor) -> Callable[[], Tensor]: ...

    @abstractmethod
    def _exchange(self, x: Tensor, out: Tensor, counts: Counts) -> Callable[[], Tensor]: ...

    @abstractmethod
    def _gather_rows(self, x: Tensor, out: Tensor, counts: Sequence[int]) -> Callable[[], Tensor]: ...

    @abstractmethod
    def _scatter_rows(self, x: Tensor, out: Tensor, counts: Sequence[int]) -> Callable[[], Tensor]: ...


@final
class Alone(Group):
    """A group of one rank: nothing is sent."""

    def __init__(self, axis: str, book: Book, device: torch.device) -> None:
        super().__init__(axis, (book.rank,), book)
        self._device = device

    @property
    def device(self) -> torch.device:
        return self._device

    def _all_reduce(self, x: Tensor, op: Reduction) -> Callable[[], Tensor]:
        return lambda: x

    def _reduce_scatter(self, x: Tensor, out: Tensor) -> Callable[[], Tensor]:
        return lambda: x

    def _all_gather(self, x: Tensor, out: Tensor) -> Callable[[], Tensor]:
        return lambda: x

    def _all_to_all(self, x: Tensor, out: Tensor) -> Callable[[], Tensor]:
        return lambda: x

    def _exchange(self, x: Tensor, out: Tensor, counts: Counts) -> Callable[[], Tensor]:
        return lambda: x

    def _gather_rows(self, x: Tensor, out: Tensor, counts: Sequence[int]) -> Callable[[], Tensor]:
        return lambda: x

    def _scatter_rows(self, x: Tensor, out: Tensor, counts: Sequence[int]) -> Callable[[], Tensor]:
        return lambda: x
