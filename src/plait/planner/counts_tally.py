"""`Tally`: FLOPs, and bytes and calls by (axis, operation), added up."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import final

from plait.comm.ledger import WIRE


@final
@dataclass(kw_only=True)
class Tally:
    """What one rank does. Calls are booked as `plait.comm.ledger.Ledger` books them: none within a group of one."""

    flops: int = 0
    bytes: Counter[tuple[str, str]] = field(default_factory=Counter)
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)

    def product(self, rows: int, inputs: int, outputs: int, times: int = 1) -> None:
        """``times`` products [rows, inputs] x [inputs, outputs]."""
        self.flops += 2 * rows * inputs * outputs * times

    def call(self, axis: str, operation: str, size: int, tensor_bytes: int, times: int = 1) -> None:
        """``times`` calls of an operation of `WIRE` on a tensor of ``tensor_bytes`` over ``size`` ranks."""
        if size > 1:
            self.sent(axis, operation, WIRE[operation](size, tensor_bytes), times)

    def sent(self, axis: str, operation: str, sent: int, times: int = 1) -> None:
        """``times`` calls in which this rank sends ``sent`` bytes."""
        if times:
            self.bytes[axis, operation] += sent * times
            self.calls[axis, operation] += times
