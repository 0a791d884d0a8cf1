"""A rank's own part of a save: its pieces copied to host memory at one instant, and that memory written to one file."""

from __future__ import annotations

import itertools
import json
import mmap
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, final

import torch

from plait.checkpoint import disk
from plait.checkpoint.layout import Layout, dtype_name, lay_out, share
from plait.checkpoint.manifest import DTYPES, Manifest, StoredFile, StoredPiece, StoredTensor
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
class Copied:
    """A snapshot that stays as it is.

    ``give``: the file's bytes from start to stop, in memory that begins with a page; see `disk.Source`.
    """

    scalars: str
    give: disk.Source
    record: ShardRecord


@final
class Host:
    """Host memory for the copies of one rank, kept from save to save; pinned where the tensors are on a GPU."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._ring: Ring | None = None
        self._key: object = None
        self._layout: Layout | None = None
        self._record: ShardRecord | None = None

    def copy(self, snapshot: Snapshot, rank: int, *, private: bool) -> Copied:
        """Copy what ``rank`` writes of ``snapshot``; what was copied before is overwritten.

        Where not ``private``, the caller lets nothing change until all is written: what lies in host memory as it is
        to be written is then not copied. WeightsError for pieces that contradict themselves, and scalars that are no
        JSON.
        """
        try:
            scalars = json.dumps(dict(snapshot.scalars), allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise WeightsError(f"step {snapshot.step}: its scalars are no plain JSON: {error}") from error
        layout, record = self._plan(snapshot.pieces, rank)
        plain = all(piece.values.is_contiguous() and piece.values.device.type == "cpu" for piece in snapshot.pieces)
        give = self._filled(snapshot.pieces, layout) if private or not plain else self._joined(snapshot.pieces, layout)
        return Copied(scalars=scalars, give=give, record=record)

    def _joined(self, pieces: Sequence[Piece], layout: Layout) -> disk.Source:
        if self._ring is None:
            self._ring = Ring()
        return joined(views(pieces, layout), self._ring)

    def _filled(self, pieces: Sequence[Piece], layout: Layout) -> disk.Source:
        on_gpu = any(piece.values.is_cuda for piece in pieces)
        if self._memory.numel() < layout.bytes or on_gpu != self._memory.is_pinned():
            self._memory = _memory(layout.bytes, pinned=on_gpu)
        self._memory[: len(layout.head)] = torch.frombuffer(bytearray(layout.head), dtype=torch.uint8)
        for block in layout.blocks:
            values = pieces[block.run.piece].values.detach().reshape(-1)
            out = self._memory[block.offset : block.offset + block.bytes].view(values.dtype)
            out.copy_(values[block.run.start : block.run.start + out.numel()], non_blocking=on_gpu)
        if on_gpu:
            torch.cuda.synchronize()
        content = _bytes_of(self._memory)
        return lambda start, stop: content[start:stop]

    def _plan(self, pieces: Sequence[Piece], rank: int) -> tuple[Layout, ShardRecord]:
        """The layout of the file; the one of the save before where the pieces are of the same form."""
        key = (rank, [(p.name, p.shape, p.values.dtype, p.values.numel(), p.boxes, p.replicas) for p in pieces])
        if self._layout is None or self._record is None or key != self._key:
            runs = share(pieces, rank)
            self._layout = lay_out(pieces, runs)
            self._record = record_of(pieces, self._layout)
            self._key = key
        return self._layout, self._record


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


def write_file(copied: Copied, folder: Path, file: str, passed: Callable[[str], None]) -> ShardRecord:
    """Write ``copied`` to ``file`` of ``folder``, synced; nothing for a copy of no elements. OSError where it fails.

    The folder, which holds the name, is synced by the one that commits.
    """
    record = copied.record
    if not record["pieces"]:
        return record
    sums = disk.write(folder / file, record["bytes"], copied.give, passed)
    return {**record, "file": file, "sums": sums}


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
