"""What a rank hands over to be saved: its pieces of the run's tensors, and the scalars beside them.

The names of tensors are free to the writer; a run uses ``weights/NAME``, ``exp_avg/NAME``, ``master/NAME`` and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from plait.core.shard import Box


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What this rank holds of one logical tensor.

    ``shape``: of the whole tensor. ``values``: any shape; their row-major order is the content of ``boxes``, each
    row-major, one after the other. ``boxes``: disjoint boxes of the whole tensor. ``replicas``: all ranks that hold a
    piece of this name with the same boxes and the same values, this one among them; empty where it is this one alone.
    Every replica gives the same ``replicas``: what they hold is written once, shared out among them by bytes.
    A tensor of no elements still needs a piece (of no boxes, or empty ones), so that its shape is stored.
    """

    name: str
    shape: tuple[int, ...]
    values: torch.Tensor
    boxes: tuple[Box, ...]
    replicas: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A run at one instant, as one rank sees it; a rank without tensors gives no pieces.

    ``step``: steps done. ``scalars``: plain JSON without NaN or infinity, the same on every rank.
    """

    step: int
    pieces: Sequence[Piece]
    scalars: Mapping[str, Any]


class Agreement(Protocol):
    """How the ranks that save together speak. It is called from the saver's thread: give it a group of its own."""

    def gather(self, value: Any) -> list[Any]:
        """Every rank's ``value`` (plain JSON), in rank order, on every rank."""
        ...


class Link(Protocol):
    """How bytes go from rank to rank, in order for each pair. RankError, from the wait, where the other is not there.

    Both return what waits: until the data has left, and until it has come. Used from one thread at a time.
    """

    def send(self, data: memoryview, to: int) -> Callable[[], None]:
        """Send ``data``, which stays as it is until the wait."""
        ...

    def receive(self, out: memoryview, source: int) -> Callable[[], None]:
        """Fill ``out``."""
        ...
