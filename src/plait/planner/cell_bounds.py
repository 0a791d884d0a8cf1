"""Lower bounds on the time of cells, before their layers are timed one by one.

Of many cells a sample's operators are the same but for their number of tokens: what grows with them and what does not
are taken apart once. `plait.planner.bounds` has what comes after: the forms of a cell.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import final

import numpy as np

from plait.models.config import flops_per_token
from plait.planner import layers
from plait.planner.kernels import Machine, seconds
from plait.planner.ops import Message, Op, Slice, Work
from plait.planner.pace import launch_of, smooth
from plait.planner.space import Cell, Request, pipeline_sizes
from plait.planner.stages import groups_of
from plait.planner.tails import ROUNDING, Tails
from plait.planner.wires import Group, collective

Messages = tuple[tuple[Message, int, float], ...]
"""Of a sample, those that block: how often, and the seconds that may hide one."""


@dataclass(frozen=True, kw_only=True)
class _Part:
    """Layers of a kind, the embedding, or the head, with the best rates."""

    times: int
    first: float
    """Seconds of a microbatch of one sample, and of each sample more."""
    more: float
    way: tuple[float, float]
    """The same without weight gradients, which may wait."""
    host: float
    """Seconds of the host's launches for a microbatch."""
    messages: Messages
    groups: Mapping[str, Group]


@dataclass(frozen=True, kw_only=True)
class _Spent:
    """Seconds of a microbatch, at least: on the device, of the host, of messages, and without weight gradients."""

    device: float = 0.0
    host: float = 0.0
    sent: float = 0.0
    way: float = 0.0

    def plus(self, other: _Spent, times: int) -> _Spent:
        return _Spent(
            device=self.device + other.device * times,
            host=self.host + other.host * times,
            sent=self.sent + other.sent * times,
            way=self.way + other.way * times,
        )


@dataclass(frozen=True, kw_only=True)
class _Alone:
    """All of a model, its cheapest layer, and the head."""

    whole: _Spent
    layer: float
    """In a measure of which that of sums is the sum, and no more than what they take."""
    head: float
    """In the same measure."""


@final
class CellBounds:
    """The bounds of one request's cells. ``slices`` gives a rank's share of a layer."""

    def __init__(
        self,
        request: Request,
        machine: Machine,
        tails: Tails,
        *,
        kinds: Mapping[tuple[bool, int | None], int],
        slices: Callable[[Cell], Slice],
        constant: Callable[[str], float],
    ) -> None:
        self._request, self._machine, self._tails, self._slices = request, machine, tails, slices
        self._kinds = kinds
        precision = str(request.base()["precision"])
        self._flops = flops_per_token(request.model, request.seq)
        self._best = best_rate(machine, precision)
        self._host = constant("microbatch_host")
        self._backward_launch, self._expert_launch = constant("backward_launch"), constant("expert_launch")
        self._uneven = 1.0 if request.practice.balanced else max(1.0, constant("imbalance"))
        self._grouped_share = min(1.0, machine.grouped_share)
        self._join = constant("pace_join")
        self._sizes = np.array(pipeline_sizes(request))
        self._ones: dict[Cell, list[_Part]] = {}
        self._crossing: dict[Cell, Messages] = {}
        self._alike: dict[tuple[Cell, float], _Alone] = {}

    def roughly(self, cell: Cell) -> float:
        """Seconds of every plan of ``cell``, at least: FLOPs at the best rate, of a step and of one microbatch."""
        request = self._request
        tokens = request.global_batch * request.seq / request.world_size
        # Forward and input gradients are two thirds of a product's FLOPs, and more of attention's.
        way = cell.micro * request.seq / (cell.tp * cell.cp) * 2 / 3
        step = tokens * self._flops / self._best + self._host * self.passes(cell)
        return max(step, way * self._flops / self._best) * ROUNDING

    def passes(self, cell: Cell) -> float:
        """Microbatches that a mean rank takes through all layers in a step, at least."""
        return self._request.global_batch * cell.tp * cell.cp / (self._request.world_size * cell.micro)

    def alike(self, cell: Cell) -> float:
        """The same from operators and messages, without what crosses cp: cells of all cp and contexts whose ranks have
        as many tokens share it."""
        whole = self._alone(cell).whole
        return max(self.passes(cell) * (self._paced(whole) + self._host), whole.way + whole.sent) * ROUNDING

    def closely(self, cell: Cell) -> float:
        """With what crosses cp, by number of pipeline ranks, and what follows the microbatches of plans that fit."""
        alone = self._alone(cell)
        sent = self._sent(self._across(cell), cell.micro, groups_of(self._slices(cell))) if cell.cp > 1 else 0.0
        whole = alone.whole.plus(_Spent(sent=sent), 1)
        counts, sizes = self._tails.counts(cell), self._sizes
        # The busiest rank does no less than a mean one, and no less than the head takes.
        busiest = np.maximum(self._paced(whole) / sizes, alone.head)
        # Layers are whole, and one rank has the head beside its own.
        layer, head = alone.layer, alone.head
        layers = self._request.model.num_layers + (math.floor(head / layer) if layer else 0)
        busiest = np.maximum(busiest, np.ceil(layers / sizes) * layer)
        plain = np.maximum(counts * (busiest + self._host), whole.way + whole.sent)
        return self._tails.least(cell, counts, plain) * ROUNDING

    def _paced(self, spent: _Spent) -> float:
        """The host's pace joins in (`plait.planner.pace`): that of sums is no more than the sum of the stages'."""
        return smooth(*self._steps(spent), self._join)

    def _steps(self, spent: _Spent) -> tuple[float, float]:
        """Seconds of the device and of the host, neither of which works while messages are on their way."""
        return spent.device + spent.sent, spent.host + spent.sent if spent.host else 0.0

    def _alone(self, cell: Cell) -> _Alone:
        """What does not cross cp."""
        one = dataclasses.replace(cell, micro=1, cp=1, context="ring")
        times = cell.micro / cell.cp
        if (one, times) not in self._alike:
            if one not in self._ones:
                self._ones[one] = self._sample(one)
            # Operators are of whole rows.
            rows = times * self._request.seq / cell.tp
            exact = rows == int(rows) and self._request.seq % cell.tp == 0
            more = times * (1.0 if exact else max(0.0, 1.0 - 1.0 / rows)) - 1
            each = [
                _Spent(
                    device=max(0.0, part.first + more * part.more),
                    host=part.host,
                    sent=self._sent(part.messages, times, part.groups),
                    way=max(0.0, part.way[0] + more * part.way[1]),
                )
                for part in self._ones[one]
            ]
            whole = _Spent()
            for part, spent in zip(self._ones[one], each, strict=True):
                whole = whole.plus(spent, part.times)
            device, host = self._steps(whole)
            # Its tangent at one point is nowhere above a norm.
            norm, power = self._paced(whole), self._join - 1
            along = ((device / norm) ** power, (host / norm) ** power) if norm else (0.0, 0.0)
            *layers, _, head = (sum(map(operator.mul, along, self._steps(spent))) for spent in each)
            self._alike[one, times] = _Alone(whole=whole, layer=min(layers), head=head)
        return self._alike[one, times]

    def _sent(self, messages: Messages, times: float, groups: Mapping[str, Group]) -> float:
        """Seconds of the messages of ``times`` samples, but for what hides them."""
        sent = 0.0
        for message, count, hiding in messages:
            took = collective(self._machine, message.op, message.size * times, groups[message.axis])
            sent += count * max(0.0, took - hiding * times)
        return sent

    def _across(self, cell: Cell) -> Messages:
        """Messages of a sample that cross cp."""
        one = dataclasses.replace(cell, micro=1, ep=1, etp=cell.tp)
        if one not in self._crossing:
            found = []
            for work, times in self._parts(one):
                for phase in (work.forward, work.backward):
                    core = sum(seconds(self._machine, op) for op in phase.ops if op.part == "core")
                    found += [
                        (message, times, core if message.op == "ring" else 0.0)
                        for message in phase.messages
                        if message.axis == "cp"
                    ]
            self._crossing[one] = tuple(found)
        return self._crossing[one]

    def _parts(self, one: Cell) -> list[tuple[Work, int]]:
        cut = self._slices(one)
        parts = [(layers.layer(cut, *kind), count) for kind, count in self._kinds.items()]
        return [*parts, (layers.embedding(cut), 1), (layers.head(cut), 1)]

    def _sample(self, one: Cell) -> list[_Part]:
        """Layers of each kind, the embedding, the head."""
        practice = self._request.practice
        hides = {"tp": practice.overlap_tp, "etp": practice.overlap_tp, "ep": practice.overlap_ep}
        found = []
        twice = dataclasses.replace(one, micro=2)
        for (work, times), (double, _) in zip(self._parts(one), self._parts(twice), strict=True):
            # What an operator takes is convex in its tokens: a line through two points is no more than it beyond them.
            way, more_way = (self._ways(each) for each in (work, double))
            weight, more_weight = (
                sum(self._least(op, weight=True) for op in each.weight.ops) for each in (work, double)
            )
            messages = [message for phase in (work.forward, work.backward) for message in phase.messages]
            found.append(
                _Part(
                    times=times,
                    first=way + weight,
                    more=max(0.0, more_way + more_weight - way - weight),
                    way=(way, max(0.0, more_way - way)),
                    host=self._launches(work),
                    messages=tuple((message, 1, 0.0) for message in messages if not hides.get(message.axis, True)),
                    groups=groups_of(self._slices(one)),
                )
            )
        return found

    def _ways(self, work: Work) -> float:
        """Seconds of forward and input gradients on the device."""
        return sum(self._least(op) for phase in (work.forward, work.backward) for op in phase.ops)

    def _launches(self, work: Work) -> float:
        """Seconds of the host, without the launches of messages."""
        if self._request.practice.graph:
            return 0.0
        launch, total = launch_of(self._machine, self._request.practice), 0.0
        for phase, factor in ((work.forward, 1.0), (work.backward, self._backward_launch), (work.weight, 1.0)):
            launches = sum(op.kernels * (self._expert_launch if op.part == "experts" else 1) for op in phase.ops)
            total += factor * launches * launch
        return total

    def _least(self, op: Op, *, weight: bool = False) -> float:
        """Seconds of an operator, at least: no more than convex in its tokens, which ``weight`` gradients sum over.

        A product's tiles are whole, and each pays for its start; the bytes join in (`plait.planner.kernels`).
        """
        machine = self._machine
        if op.kind == "memory" or (op.kind.startswith("attention") and not machine.measured.attention):
            return seconds(machine, op)
        uneven = self._uneven if op.kind == "grouped" else 1.0
        if machine.measured.gemm or not machine.gpu or op.kind not in ("product", "grouped"):
            return op.flops / self._best * uneven
        rate = machine.rate(op.precision)
        if op.odd:
            rate /= max(1.0, machine.table.of("unaligned", machine.family))
        # Experts' rows are rounded after they were counted.
        loose, side = (0.5 if op.kind == "grouped" else 0.0), min(machine.tiles)
        rows, wide, deep = float(op.m), max(float(op.n), side), float(op.k)
        if weight:
            rows, deep = max(rows, side), op.flops / (2.0 * op.groups * op.m * op.n) - loose
        else:
            rows = max(op.flops / (2.0 * op.groups * op.n * op.k) - loose, side)
        compute = 2.0 * op.groups * rows * wide * max(deep + machine.prologue, 0.0) / rate
        moved = op.bytes / machine.bandwidth
        if op.kind == "grouped":
            return (compute / self._grouped_share + moved + machine.gap) * uneven
        return float((compute**machine.join + moved**machine.join) ** (1 / machine.join)) + machine.gap * op.kernels


def best_rate(machine: Machine, precision: str) -> float:
    """FLOP/s that no product or attention on the device exceeds."""
    device, points = machine.topology.device, machine.measured
    rates = [machine.peak(precision), machine.peak("bf16")]
    if precision == "fp8":
        rates += [peak for name, peak in device.peaks.items() if name in ("fp8", "fp4")]
    rates += [2.0 * point.batch * point.m * point.n * point.k / point.seconds for point in points.gemm]
    for one in points.attention:
        flops = 2.0 * one.batch * one.heads * one.seq * one.seq * one.head_dim
        rates += [flops / one.forward, flops * 5 / 2 / one.backward]
    return max(rates)
