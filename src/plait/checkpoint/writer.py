"""A rank's own part of a save: its pieces copied to host memory at one instant, and that memory written to one file."""

from __future__ import annotations

import itertools
import json
import mmap
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, final

import torch

from plait.checkpoint import disk
from plait.checkpoint.layout import Layout, dtype_name, lay_out
from plait.checkpoint.manifest import DTYPES, Manifest, StoredFile, StoredPiece, StoredTensor
from plait.checkpoint.spread import Hosts, Part, parts
from plait.checkpoint.state import Piece, Snapshot
from plait.core.errors import WeightsError


class PieceRecord(TypedDict):
    """One stored block, as plain JSON."""

    name: str
    key: str
    offset: int
    box: list[list[int]]


class ShardRecord(TypedDict):
    """A file, or none (""), and what it holds, as plain JSON: ranks send theirs to the one that writes the manifest.

    ``tensors``: shape and dtype of every tensor that the rank holds, whoever writes it.
    """

    file: str
    bytes: int
    sums: str
    tensors: dict[str, tuple[list[int], str]]
    pieces: list[PieceRecord]


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A file as it will be. ``file``: its name; ``record``: what it will hold, without name and sums.

    ``give``: the file's bytes from start to stop, in memory that begins with a page; see `disk.Source`.
    ``to`` and ``copy``: see `spread.Part`.
    """

    file: str
    give: disk.Source
    record: ShardRecord
    to: int | None = None
    copy: bool = False


@dataclass(frozen=True, kw_only=True)
class Copied:
    """A snapshot that stays as it is: the files that this rank writes of it. Those of no pieces are not made."""

    scalars: str
    shards: tuple[Shard, ...]

    @property
    def bytes(self) -> int:
        """Of all its files."""
        return sum(shard.record["bytes"] for shard in self.shards)


@final
class Host:
    """Host memory for the copies of one rank, kept from save to save; pinned where the tensors are on a GPU."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._ring: Ring | None = None
        self._key: object = None
        self._planned: list[tuple[Part, Layout, ShardRecord]] = []

    def copy(self, snapshot: Snapshot, rank: int, *, private: bool, hosts: Hosts | None = None) -> Copied:
        """Copy what ``rank`` writes of ``snapshot``; what was copied before is overwritten. ``hosts``: it is spread.

        Where not ``private``, the caller lets nothing change until all is written: what lies in host memory as it is
        to be written is then not copied. WeightsError for pieces that contradict themselves, and scalars that are no
        JSON.
        """
        try:
            scalars = json.dumps(dict(snapshot.scalars), allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise WeightsError(f"step {snapshot.step}: its scalars are no plain JSON: {error}") from error
        planned = self._plan(snapshot.pieces, rank, hosts)
        layouts = [layout for _, layout, _ in planned]
        plain = all(piece.values.is_contiguous() and piece.values.device.type == "cpu" for piece in snapshot.pieces)
        fill = self._filled if private or not plain else self._joined
        shards = [
            Shard(file=part.file, give=give, record=record, to=part.to, copy=part.copy)
            for (part, _, record), give in zip(planned, fill(snapshot.pieces, layouts), strict=True)
        ]
        return Copied(scalars=scalars, shards=tuple(shards))

    def _joined(self, pieces: Sequence[Piece], layouts: Sequence[Layout]) -> list[disk.Source]:
        if self._ring is None:
            self._ring = Ring()
        return [joined(views(pieces, layout), self._ring) for layout in layouts]

    def _filled(self, pieces: Sequence[Piece], layouts: Sequence[Layout]) -> list[disk.Source]:
        on_gpu = any(piece.values.is_cuda for piece in pieces)
        starts = list(itertools.accumulate((-(-one.bytes // disk.PAGE) * disk.PAGE for one in layouts), initial=0))
        if self._memory.numel() < starts[-1] or on_gpu != self._memory.is_pinned():
            self._memory = _memory(starts[-1], pinned=on_gpu)
        gives: list[disk.Source] = []
        for first, layout in zip(starts, layouts, strict=False):
            memory = self._memory[first : first + layout.bytes]
            memory[: len(layout.head)] = torch.frombuffer(bytearray(layout.head), dtype=torch.uint8)
            for block in layout.blocks:
                values = pieces[block.run.piece].values.detach().reshape(-1)
                out = memory[block.offset : block.offset + block.bytes].view(values.dtype)
                out.copy_(values[block.run.start : block.run.start + out.numel()], non_blocking=on_gpu)
            gives.append(partial(_slice, _bytes_of(memory)))
        if on_gpu:
            torch.cuda.synchronize()
        return gives

    def _plan(self, pieces: Sequence[Piece], rank: int, hosts: Hosts | None) -> list[tuple[Part, Layout, ShardRecord]]:
        """The layouts of the files; those of the save before where the pieces are of the same form."""
        forms = [(p.name, p.shape, p.values.dtype, p.values.numel(), p.boxes, p.replicas) for p in pieces]
        if not self._planned or self._key != (rank, hosts, forms):
            planned: list[tuple[Part, Layout, ShardRecord]] = []
            for part in parts(pieces, rank, hosts):
                layout = lay_out(pieces, part.runs)
                record = record_of(pieces, layout)
                if planned:
                    record["tensors"] = {}  # the first says what the rank holds
                planned.append((part, layout, record))
            self._planned, self._key = planned, (rank, hosts, forms)
        return self._planned


def _slice(content: memoryview, start: int, stop: int) -> memoryview:
    return content[start:stop]


def _memory(size: int, *, pinned: bool) -> torch.Tensor:
    """Bytes that are not yet used by anything: huge pages, so that the first copy need not wait for small ones."""
    if pinned or not size:
        return torch.empty(size, dtype=torch.uint8, pin_memory=pinned and size > 0)
    memory = mmap.mmap(-1, size)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def views(pieces: Sequence[Piece], layout: Layout) -> tuple[torch.Tensor, ...]:
    """The file's bytes, where they lie: its head, and runs of the pieces' values, which are contiguous host tensors."""
    found = [torch.frombuffer(bytearray(layout.head), dtype=torch.uint8)]
    for block in layout.blocks:
        content = pieces[block.run.piece].values.detach().reshape(-1).view(torch.uint8)
        start = block.run.start * DTYPES[block.dtype][1]
        found.append(content[start : start + block.bytes])
    return tuple(found)


@final
class Ring:
    """As many buffers of a chunk as are in use at a time while a file is written."""

    def __init__(self) -> None:
        self._buffers = [_memory(disk.CHUNK, pinned=False) for _ in range(disk.DEPTH + 1)]
        self._next = 0

    def turn(self) -> torch.Tensor:
        """The buffer that was given longest ago."""
        self._next = (self._next + 1) % len(self._buffers)
        return self._buffers[self._next]


def joined(parts: Sequence[torch.Tensor], ring: Ring) -> disk.Source:
    """Many runs of bytes as one, gathered chunk by chunk into the buffers of ``ring``."""
    starts = list(itertools.accumulate((part.numel() for part in parts), initial=0))

    def give(start: int, stop: int) -> memoryview:
        buffer = ring.turn()
        index, at = bisect_right(starts, start) - 1, start
        while at < stop:
            begin, end = starts[index], min(starts[index + 1], stop)
            buffer[at - start : end - start].copy_(parts[index][at - begin : end - begin])
            at, index = end, index + 1
        return _bytes_of(buffer)[: stop - start]

    return give


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.numpy())  # type: ignore[arg-type]


def record_of(pieces: Sequence[Piece], layout: Layout) -> ShardRecord:
    """What a file of ``layout`` holds; WeightsError where a tensor has two forms."""
    tensors: dict[str, tuple[list[int], str]] = {}
    for piece in pieces:
        form = (list(piece.shape), dtype_name(piece))
        if tensors.setdefault(piece.name, form) != form:
            raise WeightsError(f"{piece.name} has two forms on one rank: {tensors[piece.name]} and {form}")
    records = [
        PieceRecord(
            name=pieces[block.run.piece].name,
            key=block.key,
            offset=block.offset,
            box=[list(ends) for ends in block.run.box],
        )
        for block in layout.blocks
    ]
    return ShardRecord(file="", bytes=layout.bytes if records else 0, sums="", tensors=tensors, pieces=records)


def write_file(shard: Shard, folder: Path, passed: Callable[[str], None]) -> ShardRecord:
    """Write ``shard`` to its file in ``folder``, synced; nothing for one of no elements. OSError where it fails.

    The folder, which holds the name, is synced by the one that commits.
    """
    record = shard.record
    if not record["pieces"]:
        return record
    sums = disk.write(folder / shard.file, record["bytes"], shard.give, passed)
    return {**record, "file": shard.file, "sums": sums}


@dataclass(frozen=True, kw_only=True)
class Written:
    """What a rank has written: its records, and the sums by file of what it has written again for a twin."""

    records: list[ShardRecord]
    copies: dict[str, str]


def write_files(copied: Copied, folder: Path, passed: Callable[[str], None]) -> Written:
    """`write_file` for all of ``copied``."""
    written = [(shard.copy, write_file(shard, folder, passed)) for shard in copied.shards]
    copies = {record["file"]: record["sums"] for copy, record in written if copy and record["file"]}
    return Written(records=[record for copy, record in written if not copy], copies=copies)


def gather(records: Sequence[ShardRecord], *, step: int | None, created: str, scalars: Mapping[str, Any]) -> Manifest:
    """The manifest of what all ranks have written; WeightsError where they disagree on a tensor's form."""
    files: dict[str, StoredFile] = {}
    forms: dict[str, tuple[list[int], str]] = {}
    pieces: dict[str, list[StoredPiece]] = {}
    for record in records:
        if record["file"]:
            files[record["file"]] = StoredFile(bytes=record["bytes"], sums=record["sums"])
        for name, (shape, dtype) in record["tensors"].items():
            known = forms.setdefault(name, (shape, dtype))
            if known[0] != shape:
                raise WeightsError(f"{name} was written in several shapes: {known[0]} and {shape}")
            if known[1] != dtype:
                raise WeightsError(f"{name} was written in several dtypes: {', '.join(sorted({known[1], dtype}))}")
        for row in record["pieces"]:
            box = tuple((start, stop) for start, stop in row["box"])
            piece = StoredPiece(file=record["file"], key=row["key"], offset=row["offset"], box=box)
            pieces.setdefault(row["name"], []).append(piece)
    tensors = {
        name: StoredTensor(shape=tuple(shape), dtype=dtype, pieces=tuple(pieces.get(name, ())))
        for name, (shape, dtype) in forms.items()
    }
    return Manifest(step=step, created=created, files=files, tensors=tensors, scalars=scalars)
