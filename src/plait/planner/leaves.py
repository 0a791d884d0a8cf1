"""The forms of a cell with their bounds, made in the order of the bounds; and bytes of state by ZeRO level."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from plait.models.config import ModelConfig, parameter_shapes
from plait.planner.habits import habits_of
from plait.planner.pipes import Floats, Pipe, Pipes
from plait.planner.space import ZEROS, Cell, Form, Request


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """A form, and the seconds that it takes at least."""

    bound: float
    cell: Cell
    pipe: Pipe
    dp: int
    recompute: str
    zero: int
    fit: bool
    """Not the form itself, but the one that recomputes as many of its layers as it takes to fit."""
    ranks: Floats
    """Seconds of each pipeline rank for one microbatch, at least."""
    relieved: float
    """The bound of what ``fit`` means; infinite where nothing fits, or layers' recomputation is given."""
    extra: Floats
    """What each of them recomputes at least for ``fit``, in seconds a microbatch."""
    tail: float
    """What follows the pipeline, in all these bounds."""

    @property
    def form(self) -> Form:
        pipe = self.pipe
        return Form(
            pp=pipe.pp,
            dp=self.dp,
            schedule=pipe.schedule,
            virtual=pipe.virtual,
            stages=pipe.stages,
            recompute=self.recompute,
            zero=self.zero,
        )


@final
class Leaves:
    """The forms of a cell in the order of their bounds, made one by one.

    ``bounds`` and ``tails`` are [pipes, modes, zeros], ``relieved`` [pipes, zeros], ``ranks`` [ranks, modes], ``extra``
    [ranks, zeros]; infinite bounds are no forms.
    """

    def __init__(self, cell: Cell, pipes: Pipes, dps: dict[int, int], modes: Sequence[str], **of: Floats) -> None:
        self._cell, self._pipes, self._dps, self._modes, self._of = cell, pipes, dps, modes, of
        bounds, relieved = of["bounds"], of["relieved"]
        # Where nothing fits as it is, what fits is the first mode with some layers recomputed: one mode more.
        more = np.where(np.isinf(bounds[:, 0]), relieved, np.inf)
        self._every = np.concatenate([bounds, more[:, None]], axis=1)
        places = np.nonzero(self._every.ravel() < np.inf)[0]
        self._places = places[np.argsort(self._every.ravel()[places], kind="stable")]

    def __len__(self) -> int:
        return len(self._places)

    def bound(self, place: int) -> float:
        """Seconds of the leaf at ``place``, at least."""
        return float(self._every.ravel()[self._places[place]])

    @property
    def plain(self) -> int | None:
        """The place of the first leaf that is a form as it is."""
        modes = self._places // self._every.shape[2] % self._every.shape[1]
        found = np.flatnonzero(modes < len(self._modes))
        return int(found[0]) if len(found) else None

    def _at(self, place: int) -> tuple[int, int, int]:
        entry, mode, zero = np.unravel_index(self._places[place], self._every.shape)
        return int(entry), int(mode), int(zero)

    def has(self, place: int, wanted: Mapping[str, object]) -> bool:
        """Whether the leaf at ``place`` is a form as it is, with these values of a plan."""
        entry, mode, zero = self._at(place)
        if mode == len(self._modes):
            return False
        here = {**dataclasses.asdict(self._pipes.pipes[entry]), "recompute": self._modes[mode], "zero": ZEROS[zero]}
        return all(here[name] == value for name, value in wanted.items())

    def leaf(self, place: int) -> Leaf:
        """The leaf at ``place``."""
        entry, mode, zero = self._at(place)
        of, pipe = self._of, self._pipes.pipes[entry]
        fit = mode == len(self._modes)
        mode = 0 if fit else mode
        return Leaf(
            bound=self.bound(place),
            cell=self._cell,
            pipe=pipe,
            dp=self._dps[pipe.pp],
            recompute=self._modes[mode],
            zero=ZEROS[zero],
            fit=fit,
            ranks=of["ranks"][self._pipes.rows(entry), mode],
            extra=of["extra"][self._pipes.rows(entry), zero] if fit else np.zeros(pipe.pp),
            relieved=float(of["relieved"][entry, zero]) if mode == 0 else math.inf,
            tail=float(of["tails"][entry, mode, zero]),
        )


class State:
    """Bytes a parameter under ZeRO; dense ones are cut over tp and pp, those of experts over ep, etp and pp."""

    def __init__(self, request: Request) -> None:
        self.dense, self.experts = _parameters(request.model)
        practice, full = request.practice, request.base()["precision"] == "fp32"
        # FSDP shares its fp32 weights at level 2 as well.
        self.whole = 2 if habits_of(practice).fsdp else 3
        self.wire = 4.0 if full else 2.0
        self.weight = practice.weight_bytes or self.wire
        self.grad = practice.grad_bytes or 4.0
        self.optimizer = practice.optimizer_bytes or (8.0 if full else 12.0)

    def bytes(self, cell: Cell, pp: int, data: int, zero: int, group: int | None = None) -> float:
        """Of a mean rank's weights, gradients and optimizer state, with ``data`` ranks on dp and cp, of which ``group``
        (None: all) share them: no more than the fullest one's."""
        experts = cell.ep * cell.etp
        copies = data * cell.tp // experts
        if group is not None:
            data, copies = math.gcd(group, data), math.gcd(group, copies)
        total = 0.0
        for count, cuts, sharing in ((self.dense, cell.tp, data), (self.experts, experts, copies)):
            optimizer = self.optimizer / (sharing if zero >= 1 else 1)
            grad, weight = (
                self.grad / (sharing if zero >= 2 else 1),
                self.weight / (sharing if zero >= self.whole else 1),
            )
            total += count / cuts * (optimizer + grad + weight)
        return total / pp


def _parameters(model: ModelConfig) -> tuple[float, float]:
    """(dense, in experts): those that every tp cuts, and those that ep does."""
    shapes = parameter_shapes(model)
    experts = sum(math.prod(shape) for shape in shapes.values() if len(shape) == 3)
    return float(sum(map(math.prod, shapes.values())) - experts), float(experts)
