"""`Ledger`: bytes and calls by axis, operation and phase. Every collective passes through it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final, final

WIRE: Final[dict[str, Callable[[int, int], int]]] = {
    "all_reduce": lambda size, bytes_: 2 * (size - 1) * bytes_ // size,
    "reduce_scatter": lambda size, bytes_: (size - 1) * bytes_ // size,
    "all_gather": lambda size, bytes_: (size - 1) * bytes_ // size,
    "all_to_all": lambda size, bytes_: (size - 1) * bytes_ // size,
    "send": lambda size, bytes_: bytes_,
}
"""Bytes that one rank sends for a tensor of ``bytes_`` (the whole one: gathered, or before it is scattered) over a
group of ``size`` ranks with bandwidth-optimal algorithms (ring; Patarasuk and Yuan 2009)."""


@final
class Ledger:
    """What was sent since the last `clear`, by (axis, operation, phase)."""

    def __init__(self) -> None:
        self.bytes: Counter[tuple[str, str, str]] = Counter()
        self.calls: Counter[tuple[str, str, str]] = Counter()

    def add(self, axis: str, operation: str, phase: str, size: int, tensor_bytes: int) -> int:
        """Book one call on a tensor of ``tensor_bytes`` over ``size`` ranks; returns the bytes this rank sends."""
        return self.add_sent(axis, operation, phase, WIRE[operation](size, tensor_bytes))

    def add_sent(self, axis: str, operation: str, phase: str, sent: int) -> int:
        """Book one call in which this rank sends ``sent`` bytes: operations whose ranks send unlike amounts."""
        self.bytes[axis, operation, phase] += sent
        self.calls[axis, operation, phase] += 1
        return sent

    def by_axis(self) -> dict[str, int]:
        """Bytes sent by axis."""
        total: Counter[str] = Counter()
        for (axis, _, _), sent in self.bytes.items():
            total[axis] += sent
        return dict(total)

    def clear(self) -> None:
        """Start anew."""
        self.bytes.clear()
        self.calls.clear()
