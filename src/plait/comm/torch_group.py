"""Groups carried by ``torch.distributed``: NCCL on GPUs, gloo between hosts without them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, final

import torch
import torch.distributed as dist
from torch import Tensor

from plait.comm.group import Book, Group, Pending, Reduction
from plait.core.errors import RankError


class _Work(Protocol):
    def wait(self) -> object: ...


def _waiter(works: Sequence[_Work | None], result: Tensor, book: Book, what: str) -> Callable[[], Tensor]:
    def finish() -> Tensor:
        try:
            for work in works:
                if work is not None:
                    work.wait()
        except RuntimeError as error:
            waited = f"rank {book.rank} waited for {book.doing or what} ({what}) in vain"
            raise RankError(f"{waited}, time-out {book.timeout:g} s: {error}") from error
        return result

    return finish


@final
class TorchGroup(Group):
    """A `Group` over a ``torch.distributed`` process group."""

    def __init__(
        self, axis: str, ranks: tuple[int, ...], book: Book, process_group: dist.ProcessGroup, device: torch.device
    ) -> None:
        super().__init__(axis, ranks, book)
        self._group = process_group
        self._device = device

    @property
    def device(self) -> torch.device:
        return self._device

    def _done(self, work: _Work | None, result: Tensor, what: str) -> Callable[[], Tensor]:
        return _waiter([work], result, self.book, f"{what} over {self.axis} with ranks {list(self.ranks)}")

    def _all_reduce(self, x: Tensor, op: Reduction) -> Callable[[], Tensor]:
        kind = dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX
        return self._done(dist.all_reduce(x, op=kind, group=self._group, async_op=True), x, "all_reduce")

    def _reduce_scatter(self, x: Tensor, out: Tensor) -> Callable[[], Tensor]:
        work = dist.reduce_scatter_single(out, x, group=self._group, async_op=True)
        return self._done(work, out, "reduce_scatter")

    def _all_gather(self, x: Tensor, out: Tensor) -> Callable[[], Tensor]:
        return self._done(dist.all_gather_single(out, x, group=self._group, async_op=True), out, "all_gather")

    def _all_to_all(self, x: Tensor, out: Tensor) -> Callable[[], Tensor]:
        return self._done(dist.all_to_all_single(out, x, group=self._group, async_op=True), out, "all_to_all")

    def _broadcast(self, x: Tensor, source: int) -> Callable[[], Tensor]:
        work = dist.broadcast(x, src=self.ranks[source], group=self._group, async_op=True)
        return self._done(work, x, "broadcast")


@final
class TorchWire:
    """Point-to-point messages between any two ranks through ``torch.distributed``.

    ``channels`` holds a process group for each direction of a pair that needs its own: NCCL runs the messages of a
    communicator one after the other, so that two ranks which both send first would wait for each other for ever.
    gloo matches messages by rank and order and needs none.
    """

    def __init__(self, book: Book, channels: Mapping[tuple[int, int], dist.ProcessGroup]) -> None:
        self._book = book
        self._channels = channels
        self._sends: list[tuple[_Work, Tensor]] = []

    def send(self, x: Tensor, to: int) -> None:
        """Start to send ``x`` to rank ``to``; `flush` waits for it."""
        operation = dist.P2POp(dist.isend, x, to, self._channels.get((self._book.rank, to)))
        self._sends.extend((work, x) for work in dist.batch_isend_irecv([operation]))

    def recv(self, out: Tensor, source: int) -> Pending:
        """Start to receive into ``out`` from rank ``source``."""
        operation = dist.P2POp(dist.irecv, out, source, self._channels.get((source, self._book.rank)))
        works = dist.batch_isend_irecv([operation])
        doing = self._book.doing
        return Pending(_waiter(works, out, self._book, f"{doing}, from rank {source}"), self._book, "recv pp")

    def flush(self) -> None:
        """Wait until every message has left."""
        for work, x in self._sends:
            _waiter([work], x, self._book, "messages to leave")()
        self._sends.clear()
