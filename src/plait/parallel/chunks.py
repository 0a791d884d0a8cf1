"""Which tokens, keys and heads each rank of ``cp`` has: arithmetic alone, for executor and planner. No torch.

Samples are cut in 2c chunks of n tokens; rank i holds chunks i and 2c-1-i (`plait.parallel.zigzag`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


def padded(seq: int, size: int, context: str, multiple: int = 1) -> int:
    """The length that samples of ``seq`` tokens are padded to, so that ``size`` ranks hold parts of one length.

    ``multiple``: what the length of a part divides by (``tp`` under sequence parallel).
    """
    unit = size * (multiple if context == "ulysses" else math.lcm(2, multiple))
    return -(-seq // unit) * unit


def zigzag(size: int, index: int) -> tuple[int, int]:
    """The chunks, of ``2 * size``, that rank ``index`` of ``size`` holds, in its order."""
    return index, 2 * size - 1 - index


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One call of the kernel: this rank's queries ``rows`` and the keys ``columns`` of a buffer of chunks."""

    rows: slice
    columns: slice
    causal: bool = False
    """Query i sees keys 0..i of the piece."""
    masked: bool = False
    """Which keys a query sees has to be looked up."""


def pieces(
    queries: tuple[int, int], keys: Sequence[int], chunk: int, *, window: int, packed: bool, local: bool
) -> list[Piece]:
    """The fewest calls that cover what the ``queries`` chunks see of a buffer that holds the chunks ``keys`` in order.

    ``chunk``: tokens of a chunk; ``window``: keys that a query sees at most; ``packed``: documents hide keys as well.
    ``local``: the chunks that this rank holds itself, in a buffer of them alone, else those it does not (skipped).
    """
    whole = slice(0, 2 * chunk)
    wanted = [at for at, key in enumerate(keys) if (key in queries) == local]
    if local and not packed and window >= (queries[1] + 1) * chunk:
        return [Piece(rows=whole, columns=whole, causal=True)]

    def kind(query: int, key: int) -> str:
        near, far = (query - key - 1) * chunk + 1, (query - key + 1) * chunk - 1
        if key > query or near >= window:
            return "hidden"
        return "full" if key < query and far < window and not packed else "masked"

    runs: list[tuple[int, int, tuple[str, ...]]] = []
    for at in wanted:
        kinds = tuple(kind(query, keys[at]) for query in queries)
        if runs and runs[-1][1] == at and runs[-1][2] == kinds:
            runs[-1] = (runs[-1][0], at + 1, kinds)
        else:
            runs.append((at, at + 1, kinds))
    found: list[Piece] = []
    for begin, end, kinds in runs:
        columns = slice(begin * chunk, end * chunk)
        if kinds[0] == kinds[1] and kinds[0] != "hidden":
            found.append(Piece(rows=whole, columns=columns, masked=kinds[0] == "masked"))
            continue
        for half, one in enumerate(kinds):
            if one != "hidden":
                rows = slice(half * chunk, (half + 1) * chunk)
                found.append(Piece(rows=rows, columns=columns, masked=one == "masked"))
    return found


def kv_heads_of(heads: int, kv_heads: int, size: int) -> list[int]:
    """The key/value heads that each rank's ``heads / size`` query heads use, one rank after the other.

    The same number for each rank: all different where ``kv_heads`` or ``size`` divides the other, else one for each
    query head.
    """
    if kv_heads % size == 0:
        return list(range(kv_heads))
    shared = heads // kv_heads
    if size % kv_heads == 0:
        return [rank * (heads // size) // shared for rank in range(size)]
    return [head // shared for head in range(heads)]
