"""The forms of a cell with their bounds, made in the order of the bounds; and bytes of state by ZeRO level."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from plait.models.config import ModelConfig, parameter_shapes
from plait.planner.pipes import Floats, Pipe, Pipes
from plait.planner.space import Cell, Form, Request


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """A form without its ZeRO level, and the seconds that its pipeline takes at least."""

    bound: float
    cell: Cell
    pipe: Pipe
    dp: int
    recompute: str
    ranks: Floats
    """Seconds of each pipeline rank for one microbatch, at least."""
    kept: float
    """Bytes of activations on the first rank, at least."""
    relief: tuple[tuple[float, float], ...]
    """What recomputing all of the first rank's layers saves (bytes) and costs (seconds a microbatch), mode by mode."""

    def form(self, zero: int) -> Form:
        pipe = self.pipe
        return Form(
            pp=pipe.pp,
            dp=self.dp,
            schedule=pipe.schedule,
            virtual=pipe.virtual,
            stages=pipe.stages,
            recompute=self.recompute,
            zero=zero,
        )


@final
class Leaves:
    """The forms of a cell in the order of their bounds, made one by one."""

    def __init__(self, cell: Cell, pipes: Pipes, dps: dict[int, int], modes: Sequence[str], **of: Floats) -> None:
        self._cell, self._pipes, self._dps, self._modes, self._of = cell, pipes, dps, modes, of
        # With the least that any ZeRO level adds; a leaf's own bound is without.
        self._sums = bounds = of["bounds"] + of["tails"][:, None]
        entries, numbers = np.nonzero(bounds < np.inf)
        order = np.argsort(bounds[entries, numbers], kind="stable")
        self._places = np.stack([entries[order], numbers[order]], axis=1)

    def __len__(self) -> int:
        return len(self._places)

    def bound(self, place: int) -> float:
        """Seconds of the leaf at ``place`` at any ZeRO level, at least."""
        return float(self._sums[tuple(self._places[place])])

    def has(self, place: int, wanted: Mapping[str, object]) -> bool:
        """Whether the leaf at ``place`` has these values of a plan (``zero`` is open)."""
        entry, mode = self._places[place].tolist()
        here = {**dataclasses.asdict(self._pipes.pipes[entry]), "recompute": self._modes[mode]}
        return all(here[name] == value for name, value in wanted.items() if name != "zero")

    def leaf(self, place: int) -> Leaf:
        """The leaf at ``place``."""
        entry, mode = self._places[place].tolist()
        of = self._of
        rows = self._pipes.rows(entry)
        relief: tuple[tuple[float, float], ...] = ()
        if len(self._modes) > 1 and mode == 0:
            first = of["ranks"][rows.start]
            saved, spent = of["kept"][entry, 0] - of["kept"][entry, 1:], first[1:] - first[0]
            relief = tuple(zip(saved.tolist(), spent.tolist(), strict=True))
        pipe = self._pipes.pipes[entry]
        return Leaf(
            bound=float(of["bounds"][entry, mode]),
            cell=self._cell,
            pipe=pipe,
            dp=self._dps[pipe.pp],
            recompute=self._modes[mode],
            ranks=of["ranks"][rows, mode],
            kept=float(of["kept"][entry, mode]),
            relief=relief,
        )


class State:
    """Bytes a parameter under ZeRO; dense ones are cut over tp and pp, those of experts over ep, etp and pp."""

    def __init__(self, request: Request) -> None:
        self.dense, self.experts = _parameters(request.model)
        practice, full = request.practice, request.base()["precision"] == "fp32"
        self.wire = 4.0 if full else 2.0
        self.weight = practice.weight_bytes or self.wire
        self.grad = practice.grad_bytes or 4.0
        self.optimizer = practice.optimizer_bytes or (8.0 if full else 12.0)

    def bytes(self, cell: Cell, pp: int, dp: int, zero: int) -> float:
        """Of a mean rank's weights, gradients and optimizer state: no more than the fullest one's."""
        experts = cell.ep * cell.etp
        data, copies = dp * cell.cp, dp * cell.cp * cell.tp // experts
        total = 0.0
        for count, cuts, sharing in ((self.dense, cell.tp, data), (self.experts, experts, copies)):
            optimizer = self.optimizer / (sharing if zero >= 1 else 1)
            grad, weight = self.grad / (sharing if zero >= 2 else 1), self.weight / (sharing if zero == 3 else 1)
            total += count / cuts * (optimizer + grad + weight)
        return total / pp


def _parameters(model: ModelConfig) -> tuple[float, float]:
    """(dense, in experts): those that every tp cuts, and those that ep does."""
    shapes = parameter_shapes(model)
    experts = sum(math.prod(shape) for shape in shapes.values() if len(shape) == 3)
    return float(sum(map(math.prod, shapes.values())) - experts), float(experts)
