"""Files from rank to rank, chunk by chunk: bounded memory, every wait with a time-out, and no rank stuck in another's
trouble: one that cannot write goes on receiving, and says so when all have sent."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

from plait.checkpoint import disk
from plait.checkpoint.state import Link

CHUNK = 2 * disk.BLOCK
"""Bytes of a message. A rank holds two of those that it receives."""


@dataclass(frozen=True, kw_only=True)
class Stream:
    """A file of ``bytes`` (at least one) on its way from rank ``source`` to rank ``target``."""

    file: str
    bytes: int
    source: int
    target: int

    @property
    def chunks(self) -> int:
        """Messages that it takes."""
        return -(-self.bytes // CHUNK)

    def chunk(self, index: int) -> tuple[int, int]:
        """First byte of message ``index``, and the one behind its last."""
        return index * CHUNK, min((index + 1) * CHUNK, self.bytes)


def batches(streams: Iterable[Stream]) -> list[list[Stream]]:
    """``streams`` in batches in which no rank sends or receives twice; in their order where that allows it."""
    found: list[list[Stream]] = []
    for stream in streams:
        for batch in found:
            if all(stream.source != other.source and stream.target != other.target for other in batch):
                batch.append(stream)
                break
        else:
            found.append([stream])
    return found


@final
class Arrival:
    """A file that comes in order and is written and summed up on the way; its folder is made where it is not there.

    What cannot be written is thrown away, and `end` says why: the sender is not to wait for a disk that is full.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._sums: list[str] = []
        self._at = 0
        self._trouble: OSError | None = None
        self._descriptor = -1
        try:
            path.parent.mkdir(exist_ok=True)
            path.unlink(missing_ok=True)  # of one that came to no end
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except OSError as error:
            self._trouble = error

    def take(self, data: memoryview) -> None:
        """The next bytes: a multiple of `disk.BLOCK` of them, but for the last."""
        self._sums.append(disk.block_sums(data))
        try:
            while data and self._trouble is None:
                count = os.pwrite(self._descriptor, data, self._at)
                data, self._at = data[count:], self._at + count
        except OSError as error:
            self._trouble = error

    def end(self) -> str:
        """Close it; the sums of what came. OSError where it could not be written."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        if self._trouble is not None:
            self._trouble.filename = str(self._path)
            with suppress(OSError):
                self._path.unlink()
            raise self._trouble
        return "".join(self._sums)


def relay(
    streams: Sequence[Stream],
    rank: int,
    link: Link,
    give: Callable[[Stream], disk.Source],
    arrive: Callable[[Stream], Arrival],
) -> dict[str, Arrival]:
    """Send and receive what is ``rank``'s of ``streams``, which all ranks give alike; the files that came here.

    Never stuck: a batch goes in rounds of one message a stream, and a message is awaited before it is sent, so ranks
    wait only for others that are in the same round or have still to come to it. RankError where one does not come.
    """
    came: dict[str, Arrival] = {}
    try:
        for batch in batches(streams):
            out = next((one for one in batch if one.source == rank), None)
            into = next((one for one in batch if one.target == rank), None)
            if into is not None:
                came[into.file] = arrive(into)
            _batch(out, give(out) if out else None, into, came[into.file] if into else None, link)
    except BaseException:
        with suppress(OSError):
            ended(came)
        raise
    return came


def ended(came: Mapping[str, Arrival]) -> dict[str, str]:
    """End all of ``came``; the sums by file. OSError where one could not be written."""
    sums: dict[str, str] = {}
    trouble: OSError | None = None
    for file, arrival in came.items():
        try:
            sums[file] = arrival.end()
        except OSError as error:
            trouble = trouble or error
    if trouble is not None:
        raise trouble
    return sums


def _batch(
    out: Stream | None, source: disk.Source | None, into: Stream | None, arrival: Arrival | None, link: Link
) -> None:
    """One rank's part of a batch: at most one stream each way."""
    sends, receives = out.chunks if out is not None else 0, into.chunks if into is not None else 0
    buffers = [memoryview(bytearray(min(CHUNK, into.bytes))) for _ in range(2)] if into is not None else []
    awaited: list[Callable[[], None]] = []
    for index in range(max(sends, receives)):
        if into is not None:  # one ahead
            for ahead in range(len(awaited), min(index + 2, receives)):
                start, stop = into.chunk(ahead)
                awaited.append(link.receive(buffers[ahead % 2][: stop - start], into.source))
        sent: Callable[[], None] | None = None
        if out is not None and source is not None and index < sends:
            sent = link.send(source(*out.chunk(index)), out.target)
        if into is not None and arrival is not None and index < receives:
            awaited[index]()
            start, stop = into.chunk(index)
            arrival.take(buffers[index % 2][: stop - start])
        if sent is not None:
            sent()
