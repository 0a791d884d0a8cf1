"""Who writes what, and where it lies in the file: pure arithmetic on pieces, the same on every rank without a word.

What several ranks hold is shared out among them: large boxes are cut into one run of rows a rank, small ones go whole
to the rank that has the fewest bytes so far. A file is a safetensors file: its length of header, the header, and the
blocks without a gap, the widest dtypes first so that each lies at a multiple of its element.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from plait.checkpoint.manifest import DTYPES
from plait.checkpoint.reshard import flat_to_boxes, volume
from plait.checkpoint.state import Piece
from plait.core.errors import WeightsError
from plait.core.shard import Box, split

LARGE = 1 << 20
"""Bytes from which on a box that several ranks hold is cut among them."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run of a piece that this rank writes: ``box`` of the whole tensor, elements from ``start`` on of its values."""

    piece: int
    box: Box
    start: int


@dataclass(frozen=True, kw_only=True)
class Block:
    """A stored run: its key in the file, and its bytes there."""

    key: str
    run: Run
    dtype: str
    offset: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A file before it is filled: ``head`` are its first bytes, ``blocks`` fill the rest up to ``bytes``."""

    head: bytes
    blocks: tuple[Block, ...]
    bytes: int


def dtype_name(piece: Piece) -> str:
    """The piece's dtype as manifests write it; WeightsError for one that is not stored."""
    dtype = str(piece.values.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise WeightsError(f"{piece.name}: dtype {dtype} is not stored; known: {', '.join(DTYPES)}")
    return dtype


def share(pieces: Sequence[Piece], rank: int) -> list[Run]:
    """What ``rank`` writes of its ``pieces``. WeightsError where a piece contradicts itself."""
    mine: list[Run] = []
    small: dict[tuple[int, ...], list[tuple[int, str, Box, Run]]] = {}
    for index, piece in enumerate(pieces):
        ranks = tuple(sorted(piece.replicas)) or (rank,)
        if rank not in ranks:
            raise WeightsError(f"{piece.name}: rank {rank} holds it, its replicas are said to be {ranks}")
        _check(piece)
        start, width = 0, DTYPES[dtype_name(piece)][1]
        for box in piece.boxes:
            size = volume(box)
            run = Run(piece=index, box=box, start=start)
            start += size
            if not size:
                continue
            if len(ranks) == 1:
                mine.append(run)
            elif size * width < LARGE:
                small.setdefault(ranks, []).append((size * width, piece.name, box, run))
            else:
                mine += _cut(run, len(ranks), ranks.index(rank))
    for ranks, held in small.items():
        loads = [(0, place) for place in range(len(ranks))]
        for size, _, _, run in sorted(held, key=lambda one: (-one[0], one[1], one[2])):
            load, place = min(loads)
            loads[place] = (load + size, place)
            if ranks[place] == rank:
                mine.append(run)
    return sorted(mine, key=lambda run: (run.piece, run.start))


def _check(piece: Piece) -> None:
    sizes = sum(volume(box) for box in piece.boxes)
    if piece.values.numel() != sizes:
        raise WeightsError(f"{piece.name}: {piece.values.numel()} values do not fill boxes of {sizes} elements")
    for box in piece.boxes:
        if len(box) != len(piece.shape) or any(
            not 0 <= start <= stop <= size for (start, stop), size in zip(box, piece.shape, strict=True)
        ):
            raise WeightsError(f"{piece.name}: box {box} is not inside shape {piece.shape}")


def _cut(run: Run, parts: int, part: int) -> Iterator[Run]:
    """Part ``part`` of ``parts`` of a run: whole rows where there are enough of them, else elements."""
    sizes = tuple(stop - start for start, stop in run.box)
    rows, row = 1, volume(run.box)
    for size in sizes:
        if rows >= 8 * parts:
            break
        rows, row = rows * size, row // size
    first, last = (row * at for at in split(rows, parts, part))
    start = run.start + first
    for inner in flat_to_boxes(sizes, first, last):
        box = tuple((low + a, low + b) for (low, _), (a, b) in zip(run.box, inner, strict=True))
        yield Run(piece=run.piece, box=box, start=start)
        start += volume(box)


def lay_out(pieces: Sequence[Piece], runs: Sequence[Run]) -> Layout:
    """The file that holds ``runs``: in dtypes from wide to narrow, else in their order."""
    numbers: dict[str, int] = {}
    rows: list[tuple[str, Run, str, int]] = []
    for run in runs:
        piece = pieces[run.piece]
        number = numbers.get(piece.name, 0)
        numbers[piece.name] = number + 1
        dtype = dtype_name(piece)
        rows.append((f"{piece.name}.{number}", run, dtype, volume(run.box) * DTYPES[dtype][1]))
    rows.sort(key=lambda one: -DTYPES[one[2]][1])
    header: dict[str, object] = {}
    at = 0
    for key, run, dtype, size in rows:
        shape = [stop - start for start, stop in run.box]
        header[key] = {"dtype": DTYPES[dtype][0], "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 64)
    head = len(text).to_bytes(8, "little") + text
    blocks: list[Block] = []
    offset = len(head)
    for key, run, dtype, size in rows:
        blocks.append(Block(key=key, run=run, dtype=dtype, offset=offset, bytes=size))
        offset += size
    return Layout(head=head, blocks=tuple(blocks), bytes=offset)
