"""`Parcels`: runs of bytes from rank to rank over gloo, for a thread beside the run's own traffic, and a group of all
ranks to agree on them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import final

import torch
import torch.distributed as dist

from plait.comm.group import Book, Group
from plait.comm.torch_group import TorchGroup
from plait.comm.world import World
from plait.core.errors import RankError


@final
class Parcels:
    """Of all ranks of ``world`` (two at least); making it is collective, and the world's `close` ends it.

    ``patience``: seconds that any wait may take. Nothing of it is booked: bytes and time are the thread's own.
    """

    def __init__(self, world: World, patience: float) -> None:
        ranks = tuple(range(world.mesh.world_size))
        made = dist.new_group(backend="gloo", timeout=timedelta(seconds=patience))
        assert isinstance(made, dist.ProcessGroup)
        self._made, self._rank, self._patience = made, world.rank, patience
        book = Book(rank=world.rank, timeout=patience)
        self.everyone: Group = TorchGroup("parcels", ranks, book, made, torch.device("cpu"))

    def send(self, data: memoryview, to: int) -> Callable[[], None]:
        """Start to send ``data`` (writable memory) to rank ``to``; what is returned waits until it may change."""
        content = torch.frombuffer(data, dtype=torch.uint8)
        return self._waiter(dist.isend(content, to, group=self._made), content, f"to take {len(data)} bytes", to)

    def receive(self, out: memoryview, source: int) -> Callable[[], None]:
        """Start to receive ``out`` from rank ``source``; what is returned waits until it is there."""
        content = torch.frombuffer(out, dtype=torch.uint8)
        return self._waiter(dist.irecv(content, source, group=self._made), content, f"to send {len(out)} bytes", source)

    def _waiter(self, work: dist.Work | None, content: torch.Tensor, what: str, other: int) -> Callable[[], None]:
        assert work is not None, "both ranks are of the group"
        kept = [content]  # until the wait

        def wait() -> None:
            try:
                work.wait(timedelta(seconds=self._patience))
            except RuntimeError as error:
                raise RankError(
                    f"rank {self._rank} waited for rank {other} {what} in vain, time-out {self._patience:g} s: {error}"
                ) from error
            del kept[:]

        return wait
