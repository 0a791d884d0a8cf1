"""Groups carried by ``torch.distributed``: NCCL on GPUs, gloo between hosts without them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from plait.comm.group import Book, Counts, Group, Pending, Reduction
from plait.comm.sends import Sends, Work
from plait.core.errors import RankError


def _waiter(works: Sequence[Work | None], result: Tensor, book: Book, what: str) -> Callable[[], Tensor]:
    def finish() -> Tensor:
        try:
            for work in works:
                if work is not None:
                    work.wait()
        except RuntimeError as error:
            raise _in_vain(book, what, error) from error
        return result

    return finish


def _in_vain(book: Book, what: str, error: RuntimeError) -> RankError:
    waited = f"rank {book.rank} waited for {book.doing or what} ({what}) in vain"
    return RankError(f"{waited}, time-out {book.timeout:g} s: {error}")


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

    def _done(self, work: Work | None, sent: Tensor, result: Tensor, what: str) -> Callable[[], Tensor]:
        finish = _waiter([work], result, self.book, f"{what} over {self.axis} with ranks {list(self.ranks)}")
        # What is sent lives until the wait: a backend sees to that itself, but the fake one of dry runs does not.
        return lambda: (finish(), sent)[0]

    def _all_reduce(self, x: Tensor, op: Reduction) -> Callable[[], Tensor]:
        kind = dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX
        return self._done(dist.all_reduce(x, op=kind, group=self._group, async_op=True), x, x, "all_reduce")

    def _reduce_scatter(self, x: Tensor, out: Tensor) -> Callable[[], Tensor]:
        work = dist.reduce_scatter_single(out, x, group=self._group, async_op=True)
        return self._done(work, x, out, "reduce_scatter")

    def _all_gather(self, x: Tensor, out: Tensor) -> Callable[[], Tensor]:
        return self._done(dist.all_gather_single(out, x, group=self._group, async_op=True), x, out, "all_gather")

    def _all_to_all(self, x: Tensor, out: Tensor) -> Callable[[], Tensor]:
        return self._done(dist.all_to_all_single(out, x, group=self._group, async_op=True), x, out, "all_to_all")

    def _exchange(self, x: Tensor, out: Tensor, counts: Counts) -> Callable[[], Tensor]:
        return self._send_runs(x, out, counts[self.index], [row[self.index] for row in counts], "exchange")

    def _send_runs(
        self, x: Tensor, out: Tensor, sent: Sequence[int], received: Sequence[int], what: str
    ) -> Callable[[], Tensor]:
        work = dist.all_to_all_single(out, x, list(received), list(sent), group=self._group, async_op=True)
        return self._done(work, x, out, what)

    # gloo's all-gather takes no uneven parts, and padding would send more bytes than are there: both row operations
    # are exchanges, which send exactly what the bandwidth-optimal algorithms do.

    def _gather_rows(self, x: Tensor, out: Tensor, counts: Sequence[int]) -> Callable[[], Tensor]:
        copies = x.repeat(self.size, *[1] * (x.dim() - 1))
        return self._send_runs(copies, out, [x.shape[0]] * self.size, counts, "gather_rows")

    def _scatter_rows(self, x: Tensor, out: Tensor, counts: Sequence[int]) -> Callable[[], Tensor]:
        terms = x.new_empty((self.size, *out.shape))
        received = [out.shape[0]] * self.size
        arrived = self._send_runs(x, terms.view(-1, *out.shape[1:]), counts, received, "scatter_rows")

        def finish() -> Tensor:
            arrived()
            torch.add(terms[0], terms[1], out=out)
            for term in terms[2:]:
                out.add_(term)
            return out

        return finish


@final
class TorchWire:
    """Point-to-point messages between any two ranks through ``torch.distributed``.

    ``up`` and ``down`` are process groups of all ranks (None: the default one): one for messages to higher ranks, one
    for those to lower. NCCL runs the messages of two ranks in a group one after the other, so two ranks that both
    send first would wait for each other for ever; this way each direction has a communicator and a stream of its own.
    """

    def __init__(
        self, book: Book, device: torch.device, up: dist.ProcessGroup | None, down: dist.ProcessGroup | None
    ) -> None:
        self._book = book
        self._up, self._down = up, down
        # What has left may be freed: or a step would hold every microbatch's activations to its end.
        self._sends = Sends(asked=device.type == "cuda")

    def send(self, x: Tensor, to: int) -> None:
        """Start to send ``x`` to rank ``to``; `flush` waits for it."""
        flight = self._book.flight
        flight.done(flight.begin("send", flight.group("pp", (self._book.rank, to)), x.shape, to))
        work = dist.isend(x, to, group=self._up if to > self._book.rank else self._down)
        if work is not None:
            self._sends.add(work, x)

    def recv(self, out: Tensor, source: int) -> Pending:
        """Start to receive into ``out`` from rank ``source``."""
        work = dist.irecv(out, source, group=self._down if source > self._book.rank else self._up)
        doing, flight = self._book.doing, self._book.flight
        record = flight.begin("recv", flight.group("pp", (source, self._book.rank)), out.shape, source)
        finish = _waiter([work], out, self._book, f"{doing}, from rank {source}")
        return Pending(finish, self._book, "recv pp", record=record)

    def flush(self) -> None:
        """Wait until every message has left."""
        try:
            self._sends.flush()
        except RuntimeError as error:
            raise _in_vain(self._book, "messages to leave", error) from error


@final
class FakeWire:
    """Messages of a world whose other ranks are not there: what is sent has left, what is received is there."""

    def send(self, x: Tensor, to: int) -> None:
        """Nothing waits, so nothing is kept."""

    def recv(self, out: Tensor, source: int) -> Pending:
        """``out`` as it is."""
        return Pending(lambda: out)

    def flush(self) -> None:
        """Nothing is under way."""
