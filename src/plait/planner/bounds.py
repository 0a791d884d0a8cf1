"""Lower bounds on time and memory, for many plans at once, so that most need not be looked at.

Sound for `plait.planner.cost.predict` and `plait.planner.memory.memory`: no plan takes less than its bound (a test
holds them together). Three levels, each closer and dearer: a cell's from FLOPs; a cell's from its operators at the
device's best rate and its messages; a form's from what the time model says of the cell's layers, through the pipeline.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, final

import numpy as np

from plait.core.plan import Plan
from plait.models.config import flops_per_token
from plait.planner import layers
from plait.planner.activations import layer_steps
from plait.planner.kernels import Machine, seconds
from plait.planner.leaves import Leaf, Leaves, State
from plait.planner.ops import Message, Op, Slice
from plait.planner.pipes import Pipe, Pipes
from plait.planner.saved import local_of
from plait.planner.space import (
    MODES,
    Cell,
    Form,
    Request,
    meshes,
    pipeline_sizes,
    pipelines,
    plan_of,
    stage_cuts,
    zeros,
)
from plait.planner.stages import end_times, groups_of, layer_times, machine_of, slice_of
from plait.planner.wires import Group, collective

_ROUNDING: Final = 1.0 - 1e-9
"""Sums in another order than the model's."""


@dataclass(frozen=True, kw_only=True)
class _Sample:
    """One sample in all layers and both ends, at the best rates."""

    seconds: float
    way: float
    """Without weight gradients, which may wait."""
    messages: tuple[tuple[Message, int, float], ...]
    """Those that block, how often, and the seconds that may hide them."""
    groups: Mapping[str, Group]


@final
class Bounds:
    """The bounds of one request."""

    def __init__(self, request: Request) -> None:
        self.request = request
        model = request.model
        self._precision = str(request.base()["precision"])
        self._machine = machine_of(request.topology)
        self._layers = [(model.moe_of(layer) is not None, model.window_of(layer)) for layer in range(model.num_layers)]
        self._kinds = list(dict.fromkeys(self._layers))
        self._numbers = [self._kinds.index(kind) for kind in self._layers]
        self._state = State(request)
        self._flops = flops_per_token(model, request.seq)
        self._best = _best_rate(self._machine, self._precision)
        self._host = self._constant("microbatch_host")
        self._slowing = min(1.0, self._constant("contention"))
        self._tails: dict[tuple[int, ...], float] = {}
        self._modes = list(MODES) if request.fix.get("recompute") is None else [str(request.fix["recompute"])]
        self._ones: dict[Cell, _Sample] = {}
        self._pipes: Pipes | None = None

    def roughly(self, cell: Cell) -> float:
        """Seconds of every plan of ``cell``, at least: FLOPs at the best rate, of a step and of one microbatch."""
        request = self.request
        tokens = request.global_batch * request.seq / request.world_size
        # Forward and input gradients are two thirds of a product's FLOPs, and more of attention's.
        way = cell.micro * request.seq / (cell.tp * cell.cp) * 2 / 3
        step = tokens * self._flops / self._best + self._host * self._passes(cell)
        return max(step, way * self._flops / self._best) * _ROUNDING

    def closely(self, cell: Cell, *, whole: bool) -> float:
        """The same from operators and messages: those of one sample a microbatch, which are fewer a sample.

        ``whole``: with what crosses cp; without, cells of all cp and contexts share the operators of cp=1.
        """
        one = dataclasses.replace(cell, micro=1) if whole else dataclasses.replace(cell, micro=1, cp=1, context="ring")
        if one not in self._ones:
            self._ones[one] = self._one_sample(one)
        sample = self._ones[one]
        times = cell.micro * one.cp / cell.cp
        sent = 0.0
        for message, count, hiding in sample.messages:
            took = collective(self._machine, message.op, message.size * times, sample.groups[message.axis])
            sent += count * max(0.0, took - hiding * times)
        # A mean rank's work; or the way of one microbatch through all stages and back.
        work = self._passes(cell) * (sample.seconds * times + sent + self._host)
        tail = 0.0
        if whole:
            tails = [self._least_tail(cell, pp, dp) for pp, dp in meshes(self.request, cell.tp, cell.cp)]
            tail = min(tails, default=math.inf)
        return (max(work, sample.way * times + sent) + tail) * _ROUNDING

    def _passes(self, cell: Cell) -> float:
        """Microbatches that a mean rank takes through all layers in a step, at least."""
        return self.request.global_batch * cell.tp * cell.cp / (self.request.world_size * cell.micro)

    def _one_sample(self, one: Cell) -> _Sample:
        cut, practice = self.slice(one), self.request.practice
        parts = [(layers.layer(cut, *kind), self._numbers.count(number)) for number, kind in enumerate(self._kinds)]
        parts += [(layers.embedding(cut), 1), (layers.head(cut), 1)]
        shown = {axis for axis, hides in (("tp", practice.overlap_tp), ("ep", practice.overlap_ep)) if not hides}
        way = weight = 0.0
        messages: list[tuple[Message, int, float]] = []
        for work, times in parts:
            weight += times * sum(self._least(op) for op in work.weight.ops)
            for phase in (work.forward, work.backward):
                way += times * sum(self._least(op) for op in phase.ops)
                core = sum(seconds(self._machine, op) for op in phase.ops if op.part == "core")
                for message in phase.messages:
                    if message.axis in shown or message.axis == "cp":
                        messages.append((message, times, core if message.op == "ring" else 0.0))
        return _Sample(seconds=way + weight, way=way, messages=tuple(messages), groups=groups_of(cut))

    def _least(self, op: Op) -> float:
        """Seconds that an operator takes at least for each sample."""
        machine = self._machine
        if op.kind == "memory":
            return op.bytes / machine.bandwidth
        if op.kind.startswith("attention") and not machine.measured.attention:
            return seconds(machine, op) - machine.gap * op.kernels
        rate = self._best if machine.measured.gemm or not machine.gpu else machine.rate(op.precision)
        return op.flops / rate

    def lay(self, typical: Cell) -> int:
        """Fix the pipelines; stages that are cut anew are cut by the costs of ``typical``, a promising cell."""
        request = self.request
        each = [sum(one) for one in zip(*self._phases(typical, "none"), strict=True)]
        costs = [each[number] for number in self._numbers]
        found: list[Pipe] = []
        for pp in pipeline_sizes(request):
            for schedule, virtual in pipelines(request.fix, pp, request.shape.num_layers):
                looped = schedule == "interleaved" and virtual > 1
                for cut in stage_cuts(request, pp * virtual, costs, each[-2], each[-1], looped=looped):
                    found.append(Pipe(pp=pp, schedule=schedule, virtual=virtual, stages=cut))
        if found:
            self._pipes = Pipes(found, request.model, self._numbers, len(self._kinds) + 2)
        return len(found)

    def leaves(self, cell: Cell, *, all_of_them: bool = False) -> Leaves:
        """The forms of ``cell`` that may fit at some ZeRO level, or all."""
        pipes = self._pipes
        assert pipes is not None, "lay() comes first"
        dps = dict(meshes(self.request, cell.tp, cell.cp))
        of_size = {pp: self._of_size(cell, pp, dps.get(pp)) for pp in {pipe.pp for pipe in pipes.pipes}}
        counts, hop, state, tails = np.array([of_size[pipe.pp] for pipe in pipes.pipes]).T
        with np.errstate(invalid="ignore"):
            kept = pipes.kept(counts, np.array([self._kept(cell, mode) for mode in self._modes]).T) * _ROUNDING
            fits = state[:, None] + kept <= self.request.memory
        if all_of_them:
            fits[:] = True
        if len(self._modes) > 1:
            fits[:, 0] = fits.any(axis=1)  # some of its layers can be recomputed
        if not fits.any():
            nothing = np.full(fits.shape, np.inf)
            return Leaves(cell, pipes, dps, self._modes, bounds=nothing, ranks=nothing, kept=kept, tails=tails)
        phases = [np.array(one).T for one in zip(*(self._phases(cell, mode) for mode in self._modes), strict=True)]
        with np.errstate(invalid="ignore"):
            spans, ranks = pipes.seconds(counts, phases, hop)
            bounds = (spans + (counts * self._host)[:, None]) * _ROUNDING
        bounds = np.where(fits & (bounds < np.inf), bounds, np.inf)
        return Leaves(cell, pipes, dps, self._modes, bounds=bounds, ranks=ranks, kept=kept, tails=tails)

    def _of_size(self, cell: Cell, pp: int, dp: int | None) -> tuple[float, float, float, float]:
        """With ``pp`` ranks: microbatches, seconds of a transfer, least bytes of state, least seconds of a tail.

        Infinite where there can be none.
        """
        request = self.request
        if dp is None or request.global_batch % (cell.micro * dp) or dp * cell.cp * cell.tp % (cell.ep * cell.etp):
            return math.inf, 0.0, math.inf, 0.0
        hop = 0.0
        if pp > 1:
            cut = self.slice(cell)
            size = cut.width * cut.tokens * request.model.hidden_size / cell.tp
            hop = collective(self._machine, "p2p", size, Group(size=pp, stride=dp * cell.cp * cell.tp))
        least = min(self._state.bytes(cell, pp, dp, zero) for zero in zeros(request.fix, dp * cell.cp))
        return float(request.global_batch // (cell.micro * dp)), hop, least, self._least_tail(cell, pp, dp)

    def _kept(self, cell: Cell, mode: str) -> list[float]:
        """Bytes that a microbatch keeps in each kind of layer; the ends are not counted."""
        request, plan = self.request, self._plan(cell)
        at = local_of(request.model, plan, request.seq, request.topology.device.kind == "cpu")
        known = mode if mode in MODES else "full"  # ranges of layers: no less than that
        first = [self._numbers.index(number) for number in range(len(self._kinds))]
        steps = [layer_steps(request.model, plan, request.practice, at, layer, known) for layer in first]
        return [*(sum(step.keeps for step in one) for one in steps), 0.0, 0.0]

    def state_of(self, cell: Cell, pp: int, dp: int, zero: int) -> float:
        """Bytes of state of a mean rank."""
        return self._state.bytes(cell, pp, dp, zero)

    def excess(self, leaf: Leaf, zero: int) -> float:
        """Bytes that the first rank lacks, at least; 0 or less where it may fit."""
        return self._state.bytes(leaf.cell, leaf.pipe.pp, leaf.dp, zero) + leaf.kept - self.request.memory

    def relieved(self, leaf: Leaf, zero: int) -> float:
        """Seconds at least of the leaf once enough layers of its first rank are recomputed; infinite: none are."""
        over = max(0.0, self.excess(leaf, zero))
        ways = [over / saved * spent for saved, spent in leaf.relief if saved >= over and saved > 0]
        return self.recomputed(leaf, {0: min(ways)}) if ways else math.inf

    def recomputed(self, leaf: Leaf, extra: Mapping[int, float]) -> float:
        """Seconds at least of the leaf when ranks recompute for so many seconds a microbatch."""
        times = self.request.global_batch // (leaf.cell.micro * leaf.dp)
        busiest = max(leaf.ranks[rank] + max(0.0, more) for rank, more in extra.items())
        # A rank waits for the others' forwards and backwards, together half of a pipeline's fill and more. A split
        # backward's weight gradients may take their place.
        fill = leaf.bound - times * (leaf.ranks.max() + self._host)
        idle = 0.0 if leaf.pipe.split else 0.5 * max(0.0, fill)
        return max(leaf.bound, float(times * (busiest + self._host) + idle) * _ROUNDING)

    def tail(self, leaf: Leaf, zero: int) -> float:
        """Seconds that gradients, weights and the optimizer of a rank add to the pipeline's, at least.

        A mean rank's: no more than the slowest one's. Communication that compute hides still slows it; what is longer
        than the work it may hide under is not hidden.
        """
        sent, update = self._updates(leaf.cell, leaf.pipe.pp, leaf.dp, zero)
        times = 1 if zero < 3 else self.request.global_batch // (leaf.cell.micro * leaf.dp)
        usable = min(1.0, self._constant("prefetch_share" if zero == 3 else "hidden_share"))
        shown = sent - usable * (1.0 - self._slowing) * float(leaf.ranks.max())
        return (times * max(sent * self._slowing, shown) + update) * _ROUNDING

    def _least_tail(self, cell: Cell, pp: int, dp: int) -> float:
        """The same at the best ZeRO level, when all of it is hidden in one microbatch."""
        key = (cell.tp, cell.cp, cell.ep, cell.etp, pp)
        if dp * cell.cp * cell.tp % (cell.ep * cell.etp):
            return math.inf  # experts do not fold out of these ranks
        if key not in self._tails:
            pairs = [self._updates(cell, pp, dp, zero) for zero in zeros(self.request.fix, dp * cell.cp)]
            self._tails[key] = min(sent * self._slowing + update for sent, update in pairs) * _ROUNDING
        return self._tails[key]

    def _updates(self, cell: Cell, pp: int, dp: int, zero: int) -> tuple[float, float]:
        """Seconds of a mean rank: communication of gradients and weights, once each, and the optimizer."""
        machine, state, experts = self._machine, self._state, cell.ep * cell.etp
        data, copies = dp * cell.cp, dp * cell.cp * cell.tp // experts
        update = sent = 0.0
        for count, sharing, stride in (
            (state.dense / cell.tp, data, cell.tp),
            (state.experts / experts, copies, experts),
        ):
            each, group = count / pp, Group(size=sharing, stride=stride)
            update += each / (sharing if zero else 1) * (2 * state.optimizer + state.grad + state.wire)
            if not each or self.request.fix.get("zero_group") is not None:
                continue
            if zero == 0:
                sent += collective(machine, "all_reduce", state.grad * each, group)
                continue
            sent += collective(machine, "reduce_scatter", state.grad * each, group)
            # Gathered once a step; at ZeRO 3 for every forward and every backward.
            sent += (2 if zero == 3 else 1) * collective(machine, "all_gather", state.wire * each, group)
        return sent, update * self._constant("optimizer_passes") / machine.optimizer_bandwidth

    def _constant(self, name: str) -> float:
        return self._machine.table.of(name, self._machine.family)

    def recompute_seconds(self, cell: Cell) -> dict[str, float]:
        """What each mode costs a layer of a microbatch, in the mean."""
        each = {mode: [sum(one) for one in zip(*self._phases(cell, mode), strict=True)] for mode in MODES}
        means = {mode: sum(one[number] for number in self._numbers) / len(self._numbers) for mode, one in each.items()}
        return {mode: means[mode] - means["none"] for mode in MODES[1:]}

    def _phases(self, cell: Cell, mode: str) -> tuple[list[float], list[float], list[float]]:
        """Seconds of F, B and W of one microbatch: each kind of layer, the embedding, the head."""
        cut = self.slice(cell)
        known = mode if mode in MODES else "none"  # ranges of layers: no less than that
        parts = [layer_times(self._machine, cut, *kind, known) for kind in self._kinds]
        parts += [end_times(self._machine, cut, last) for last in (False, True)]
        forward, backward, weight = ([phase.total for phase in side] for side in zip(*parts, strict=True))
        return forward, backward, weight

    def slice(self, cell: Cell) -> Slice:
        """A rank's share of a layer."""
        return slice_of(self.request.job(self._plan(cell)))

    @functools.cache  # noqa: B019 - lives as long as the search
    def _plan(self, cell: Cell) -> Plan:
        """A plan of the cell, whatever its form."""
        form = Form(pp=1, dp=1, schedule="1f1b", virtual=1, stages=None, recompute="none", zero=0)
        return plan_of(self.request, cell, form)


def _best_rate(machine: Machine, precision: str) -> float:
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
