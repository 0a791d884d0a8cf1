"""`Mesh`: named axes and the arithmetic between ranks and coordinates. Pure: it holds no process group."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

AXES = ("pp", "dp", "cp", "tp")
"""Outermost first: neighbouring ranks differ in ``tp``, which talks most and so wants the fastest links."""


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """``pp x dp x cp x tp`` ranks in row-major order (``tp`` fastest)."""

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def sizes(self) -> dict[str, int]:
        """Axis name -> number of ranks along it."""
        return {"pp": self.pp, "dp": self.dp, "cp": self.cp, "tp": self.tp}

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp * self.cp * self.tp

    def coordinate(self, rank: int) -> dict[str, int]:
        """Axis name -> index of ``rank`` along it."""
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} is not in a mesh of {self.world_size}")
        found: dict[str, int] = {}
        for axis in reversed(AXES):
            rank, found[axis] = divmod(rank, self.sizes[axis])
        return {axis: found[axis] for axis in AXES}

    def rank(self, coordinate: Mapping[str, int]) -> int:
        """Inverse of `coordinate`; axes left out are 0."""
        rank = 0
        for axis in AXES:
            index = coordinate.get(axis, 0)
            if not 0 <= index < self.sizes[axis]:
                raise IndexError(f"{axis}={index} is not on an axis of {self.sizes[axis]}")
            rank = rank * self.sizes[axis] + index
        return rank

    def group(self, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
        """The ranks that differ from ``rank`` along ``axes`` alone, ``rank`` among them, in order."""
        here = self.coordinate(rank)
        wanted = [axis for axis in AXES if axis in axes]
        spans = [range(self.sizes[axis]) for axis in wanted]
        return tuple(
            self.rank({**here, **dict(zip(wanted, index, strict=True))}) for index in itertools.product(*spans)
        )

    def groups(self, axes: Sequence[str]) -> list[tuple[int, ...]]:
        """All groups along ``axes``: they partition the ranks."""
        return sorted({self.group(rank, axes) for rank in range(self.world_size)})
