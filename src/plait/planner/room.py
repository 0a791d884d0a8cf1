"""Bytes of all pipelines of a cell at once, at least: state, what comes and goes with ZeRO, and activations."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from plait.core.plan import Plan
from plait.planner.habits import habits_of
from plait.planner.parameters import parts_of, width_of
from plait.planner.peaks import Peaks, Rows, parts_table, sizes_of
from plait.planner.pipes import Floats, Pipe
from plait.planner.saved import local_of
from plait.planner.space import MODES, ZEROS, Cell, Request, pipeline_sizes

_ROUNDING = 1.0 - 1e-9
"""Sums in another order than the model's."""


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Bytes of a cell's pipelines, at least."""

    rows: Rows
    values: Floats
    """With all layers in one mode [pipes, modes, zeros]."""
    least: Floats
    """With the best mode of every layer [pipes, zeros]."""
    over: Floats
    """What a row lacks when it recomputes nothing [rows, zeros]."""
    saved: Floats
    """Of one layer and microbatch [kinds + 3, modes]."""


@final
class Room:
    """The memory of ``pipes``; layers are of kinds ``numbers``, under ``modes`` of recomputation."""

    def __init__(self, request: Request, pipes: Sequence[Pipe], numbers: Sequence[int], modes: Sequence[str]) -> None:
        self.request = request
        self._numbers, self._modes = numbers, modes
        kinds = range(max(numbers) + 1)
        self._experts = [request.model.moe_of(numbers.index(kind)) is not None for kind in kinds]
        self._peaks = Peaks(pipes, request.model, numbers, request.practice)
        self._sizes = pipeline_sizes(request)
        self._of_pipe = np.array([self._sizes.index(pipe.pp) for pipe in pipes])
        self._known_widths: dict[tuple[int, int], tuple[Floats, Floats, Floats]] = {}
        wire = 4.0 if request.base()["precision"] == "fp32" else 2.0
        # What a layer's weights take on the wire; frameworks that gather a step's weights at once are left out.
        self._wires = np.array([wire, wire, 4.0])
        self._plain = not habits_of(request.practice).fsdp

    def peak(self, cell: Cell, plan: Plan, counts: Floats, sent: Floats) -> Peak:
        """Of every pipeline's telling ranks. ``plan``: one of the cell; ``counts``: microbatches of each pipeline;
        ``sent``: infinite for a number of ranks and a ZeRO level that make no sense."""
        request = self.request
        at = local_of(request.model, plan, request.seq, request.topology.device.kind == "cpu")
        firsts = tuple(self._numbers.index(number) for number in range(max(self._numbers) + 1))
        known = [mode if mode in MODES else "full" for mode in self._modes]  # ranges of layers: no less than that
        sizes = [sizes_of(request.model, plan, request.practice, at, firsts, mode) for mode in known]
        rows = self._peaks.rows(counts)
        keeps = rows.kept @ np.array([one.keeps for one in sizes]).T
        keeps += rows.waiting @ np.array([one.waits for one in sizes]).T
        work = np.array([one.work for one in sizes])[:, rows.work].T
        held = self._held(cell, parts_table(parts_of(request.model, plan)), rows, sent)
        limit = request.memory / _ROUNDING
        values = np.full((len(counts), len(sizes), len(ZEROS)), np.inf)
        least = np.full((len(counts), len(ZEROS)), np.inf)
        which = rows.pipe[rows.starts]
        values[which] = np.maximum.reduceat((keeps + work)[:, :, None] + held[:, None], rows.starts, axis=0) * _ROUNDING
        lowest = work.min(axis=1)[:, None] + held
        least[which] = np.maximum.reduceat(keeps.min(axis=1)[:, None] + lowest, rows.starts, axis=0) * _ROUNDING
        one = np.array([size.keeps for size in sizes]).T
        return Peak(rows=rows, values=values, least=least, over=keeps[:, :1] + lowest - limit, saved=one[:, :1] - one)

    def _held(self, cell: Cell, parts: Floats, rows: Rows, sent: Floats) -> Floats:
        """State, and whole weights at ZeRO 3 [rows, zeros]; infinite where a level makes no sense."""
        width, unit, bias = self._widths(cell)
        whole = parts[rows.units].sum(axis=1)
        place = self._of_pipe[rows.pipe]
        elements = rows.held @ self._per_part(parts)
        state = np.einsum("rk,rzk->rz", elements[:, :3], width[place]) - elements[:, 3:] * bias[place]
        if self._plain:
            coming = np.einsum("rk,rzk->rz", whole[:, :3], unit[place] * self._wires)
            state += coming * np.array([zero == 3 for zero in ZEROS])
        return np.where(np.isinf(sent[place]), np.inf, state)

    def _per_part(self, parts: Floats) -> Floats:
        """Elements of each kind of layer, the embedding, the tail, a tied embedding."""
        layers = [parts[2 if experts else 1] for experts in self._experts]
        return np.array([*layers, parts[0], parts[3], parts[4]])

    def _widths(self, cell: Cell) -> tuple[Floats, Floats, Floats]:
        """Bytes of state a parameter (dense, expert, router), whether several ranks share it, and bytes that a router's
        bias has not: [pipeline sizes, zeros, 3], the same, [pipeline sizes, zeros]."""
        experts = cell.ep * cell.etp
        if (cell.tp, experts) not in self._known_widths:
            request = self.request
            practice, precision = request.practice, str(request.base()["precision"])
            of = (practice.weight_bytes, practice.grad_bytes, practice.optimizer_bytes)
            fsdp, own, group = (
                habits_of(practice).fsdp,
                4 if precision == "fp32" else 2,
                request.fix.get("zero_group"),
            )
            width, unit = np.zeros((len(self._sizes), len(ZEROS), 3)), np.zeros((len(self._sizes), len(ZEROS), 3))
            bias = np.zeros(width.shape[:2])
            for place, zero in itertools.product(range(len(self._sizes)), ZEROS):
                ranks = request.world_size // self._sizes[place]
                shares = [1 if zero == 0 else max(1, ranks // cuts) for cuts in (cell.tp, experts)]
                if group is not None:
                    shares = [math.gcd(int(str(group)), share) for share in shares]
                for kind, (share, bytes_) in enumerate(zip((*shares, shares[0]), (own, own, 4), strict=True)):
                    one = width_of(bytes_, share, 1, zero, of, fsdp)
                    width[place, zero, kind] = one.weights + one.gradients + one.optimizer
                    unit[place, zero, kind] = one.gradients < (4.0 if of[1] is None else of[1])
                    if kind == 2:
                        bias[place, zero] = one.gradients + one.optimizer
            self._known_widths[cell.tp, experts] = width, unit, bias
        return self._known_widths[cell.tp, experts]
