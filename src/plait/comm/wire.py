"""Messages between two processes of one host, through a `Ring` for each direction."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import final

from torch import Tensor

from plait.comm.group import Book, Pending
from plait.comm.ring import Ring, chunks, wait_until


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
        channel, flight = self._channel(self._book.rank, to), self._book.flight
        flight.done(flight.begin("send", flight.group("pp", (self._book.rank, to)), x.shape, to))
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
        flight = self._book.flight
        record = flight.begin("recv", flight.group("pp", (source, self._book.rank)), out.shape, source)
        cause = f"rank {self._book.rank} waits for {self._book.doing}, from rank {source}"

        def finish() -> Tensor:
            wait_until(lambda: channel.deliver(message), self._book, lambda: cause, lambda: [source])
            return out

        return Pending(finish, self._book, "recv pp", record=record)

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
    return [flat[begin:end] for begin, end in chunks(flat.numel(), x.element_size())]
