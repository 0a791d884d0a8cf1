"""Which parameters share a bucket: arithmetic alone, for the flat buffers and for the planner. No torch."""

from __future__ import annotations

import math
import sys
from collections.abc import Hashable, Sequence
from typing import Protocol, TypeVar

from plait.core.shard import Copies, Piece, ShardSpec
from plait.parallel.rules import DATA_AXES, EXPERT_DATA_AXES

ALIGN = 16
"""Shards begin at multiples of this many elements (64 bytes of fp32)."""


class Kept(Protocol):
    """What of a parameter on a rank decides its bucket; see `plait.parallel.flat.Held`."""

    @property
    def name(self) -> str: ...

    @property
    def spec(self) -> ShardSpec: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def pieces(self) -> tuple[Piece, ...]: ...

    @property
    def stage(self) -> int | None: ...

    @property
    def tied(self) -> bool: ...

    @property
    def dtype(self) -> object: ...


One = TypeVar("One", bound=Kept)


def is_data(axis: str) -> bool:
    """Whether ranks along ``axis`` see other data, in either fold."""
    return axis in DATA_AXES or axis in EXPERT_DATA_AXES


def decays(one: Kept) -> bool:
    """Decoupled weight decay acts on tensors of two or more dims only: not on norms and biases."""
    return len(one.spec.shape) >= 2


def place_of(name: str) -> int:
    """Where in the model's forward a parameter is used first: -1 the embedding, i layer i, more than any: the rest."""
    part, _, rest = name.partition(".")
    if part == "layers":
        return int(rest.partition(".")[0])
    return -1 if part == "embed" else sys.maxsize


def first_use(one: Kept) -> int:
    """Where this rank uses the parameter first: of a tied weight, the last stage has the head's copy."""
    return sys.maxsize if one.tied and one.stage else place_of(one.name)


def bucket_groups(held: Sequence[One], bucket_bytes: int, *, by_place: bool = False) -> list[list[One]]:
    """Parameters that may share a bucket, in the order in which backward completes them.

    ``by_place``: none has parameters of two layers, so that each layer can be gathered by itself.
    """
    rows = list(reversed(held))
    kinds = []
    for one in rows:
        partial = any(copies.partial and not is_data(copies.axis) for piece in one.pieces for copies in piece.copies)
        # Partial ones apart: their layout is then the same on all their holders, whatever is cut unevenly elsewhere.
        # A tied weight is the same on both its stages for the same reason.
        kind = (one.stage, one.tied, decays(one), partial, one.spec.expert, one.dtype)
        kinds.append((*kind, first_use(one) if by_place else 0))
    sizes = [4 * math.prod(one.shape) for one in rows]
    return [[rows[index] for index in group] for group in pack(list(zip(kinds, sizes, strict=True)), bucket_bytes)]


def pack(members: Sequence[tuple[Hashable, int]], most: int) -> list[list[int]]:
    """Places of ``members``, (kind, bytes) each, that share a bucket: of one kind and ``most`` bytes, or one alone."""
    kinds: dict[Hashable, list[int]] = {}
    for index, (kind, _) in enumerate(members):
        kinds.setdefault(kind, []).append(index)
    groups: list[list[int]] = []
    for places in kinds.values():
        filled = most
        for index in places:
            size = members[index][1]
            if filled + size > most:
                groups.append([])
                filled = 0
            groups[-1].append(index)
            filled += size
    return groups


def bucket_length(elements: int, shards: int) -> int:
    """Elements of a bucket's buffers: ``elements`` and the padding that makes the ``shards`` of it alike."""
    step = ALIGN * shards
    return -(-elements // step) * step


def runs(pieces: Sequence[Piece], shape: Sequence[int]) -> list[tuple[tuple[Copies, ...], slice]]:
    """The flat local tensor, made of ``pieces``, as stretches of elements with the same holders."""
    holders = [piece.copies for piece in pieces]
    if all(copies == holders[0] for copies in holders):
        return [(holders[0], slice(0, math.prod(shape)))]
    # Blocks with different holders are sections of dim 0: runs of whole rows.
    row = math.prod(shape[1:])
    return [(p.copies, slice(p.local[0][0] * row, p.local[0][1] * row)) for p in pieces]
