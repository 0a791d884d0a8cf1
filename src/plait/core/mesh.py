"""`Mesh`: named axes and the arithmetic between ranks and coordinates. Pure: it holds no process group.

Two folds of the same ranks. Dense tensors lie on ``pp x dp x cp x tp``. Experts lie on ``pp x edp x ep x etp``, folded
out of the same ``dp cp tp`` ranks of a pipeline rank: ``ep`` ranks share the experts, ``etp`` ranks share each expert,
and ``edp`` is what is left, the copies of an expert.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

AXES = ("pp", "dp", "cp", "tp")
"""Outermost first: neighbouring ranks differ in ``tp``, which talks most and so wants the fastest links."""
EXPERT_AXES = ("pp", "edp", "ep", "etp")
"""The ranks of a pipeline rank, in the same order, as experts see them."""
ORDERS = ("pp-dp-cp-tp", "dp-pp-cp-tp")
"""How axes lie on ranks, outermost first: copies of a stage side by side, or the stages of a copy."""


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """``pp x dp x cp x tp`` ranks in row-major order of the axes of ``order`` (``tp`` fastest); ``ep`` and ``etp`` fold
    experts out of the ranks of each pipeline rank."""

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1
    order: str = ORDERS[0]

    def __post_init__(self) -> None:
        if self.dp * self.cp * self.tp % (self.ep * self.etp):
            raise ValueError(f"ep={self.ep} x etp={self.etp} does not fold out of {self.dp * self.cp * self.tp} ranks")

    @property
    def sizes(self) -> dict[str, int]:
        """Axis name -> number of ranks along it, for dense tensors."""
        return {"pp": self.pp, "dp": self.dp, "cp": self.cp, "tp": self.tp}

    @property
    def expert_sizes(self) -> dict[str, int]:
        """Axis name -> number of ranks along it, for experts."""
        copies = self.dp * self.cp * self.tp // (self.ep * self.etp)
        return {"pp": self.pp, "edp": copies, "ep": self.ep, "etp": self.etp}

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def apart(self) -> int:
        """Of a pipeline rank's ranks, ``cp x tp`` lie side by side; the next ones so many times that further on."""
        return 1 if self.order == ORDERS[0] else self.pp

    def coordinate(self, rank: int) -> dict[str, int]:
        """Axis name -> index of ``rank`` along it, for the axes of both folds."""
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} is not in a mesh of {self.world_size}")
        found: dict[str, int] = {}
        left, sizes = rank, self.sizes
        for axis in reversed(self.order.split("-")):
            left, found[axis] = divmod(left, sizes[axis])
        left, sizes = (found["dp"] * self.cp + found["cp"]) * self.tp + found["tp"], self.expert_sizes
        for axis in reversed(EXPERT_AXES[1:]):
            left, found[axis] = divmod(left, sizes[axis])
        return {axis: found[axis] for axis in (*AXES, *EXPERT_AXES[1:])}

    def rank(self, coordinate: Mapping[str, int]) -> int:
        """The rank at ``coordinate``, given on the axes of one fold; axes left out are 0."""
        expert = any(axis in coordinate for axis in EXPERT_AXES[1:])
        axes, sizes = (EXPERT_AXES, self.expert_sizes) if expert else (AXES, self.sizes)
        at = {axis: coordinate.get(axis, 0) for axis in axes}
        for axis, index in at.items():
            if not 0 <= index < sizes[axis]:
                raise IndexError(f"{axis}={index} is not on an axis of {sizes[axis]}")
        if expert:
            left = (at["edp"] * self.ep + at["ep"]) * self.etp + at["etp"]
            for axis in reversed(AXES[1:]):
                left, at[axis] = divmod(left, self.sizes[axis])
        rank = 0
        for axis in self.order.split("-"):
            rank = rank * self.sizes[axis] + at[axis]
        return rank

    def group(self, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
        """The ranks that differ from ``rank`` along ``axes`` (of one fold) alone, ``rank`` among them, in order."""
        expert = any(axis in axes for axis in EXPERT_AXES[1:])
        fold, sizes = (EXPERT_AXES, self.expert_sizes) if expert else (AXES, self.sizes)
        if any(axis not in fold for axis in axes):
            raise ValueError(f"axes {list(axes)} are of two folds: {list(AXES)} or {list(EXPERT_AXES)}")
        here = {axis: index for axis, index in self.coordinate(rank).items() if axis in fold}
        wanted = [axis for axis in fold if axis in axes]
        spans = [range(sizes[axis]) for axis in wanted]
        ranks = (self.rank({**here, **dict(zip(wanted, index, strict=True))}) for index in itertools.product(*spans))
        return tuple(sorted(ranks))

    def groups(self, axes: Sequence[str]) -> list[tuple[int, ...]]:
        """All groups along ``axes``: they partition the ranks."""
        expert = any(axis in axes for axis in EXPERT_AXES[1:])
        fold = EXPERT_AXES if expert else AXES
        sizes = self.expert_sizes if expert else self.sizes
        # One of each group stands for it: the rank at 0 on all of the axes. Worlds have many thousands of ranks.
        firsts = itertools.product(*(range(1 if axis in axes else sizes[axis]) for axis in fold))
        return sorted(self.group(self.rank(dict(zip(fold, at, strict=True))), axes) for at in firsts)
