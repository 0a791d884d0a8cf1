"""Lower bounds on time and memory, for many plans at once, so that most need not be looked at.

Sound for `plait.planner.cost.predict` and `plait.planner.memory.memory`: no plan takes less than its bound (a test
holds them together). Three levels, each closer and dearer: a cell's from FLOPs; a cell's from its operators at the
device's best rate and its messages; a form's from what the time model says of the cell's layers, through the pipeline.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, final

import numpy as np

from plait.core.plan import Plan
from plait.models.config import flops_per_token
from plait.planner import layers
from plait.planner.kernels import Machine, seconds
from plait.planner.leaves import Leaf, Leaves, State
from plait.planner.ops import Message, Op, Slice
from plait.planner.pace import launch_of
from plait.planner.pipes import Floats, Pipe, Pipes
from plait.planner.room import Peak, Room
from plait.planner.space import (
    MODES,
    ZEROS,
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
from plait.planner.stages import Spent, end_times, groups_of, layer_times, machine_of, slice_of
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


@dataclass(frozen=True, kw_only=True)
class _After:
    """By number of pipeline ranks and ZeRO level: seconds of the communication of gradients and weights, and of the
    update; bytes of a mean rank's state. Infinite where a level makes no sense."""

    sent: Floats
    updates: Floats
    state: Floats


@dataclass(frozen=True, kw_only=True)
class _Table:
    """Of a cell, by number of pipeline ranks: microbatches, seconds of a transfer, and by ZeRO level seconds of the
    communication of gradients and weights, and of the update."""

    counts: Floats
    hops: Floats
    sent: Floats
    updates: Floats


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
        self._afters: dict[tuple[int, int], _After] = {}
        self._thirds = np.array([zero == 3 for zero in ZEROS])
        # What a second of compute hides of communication, beside what hidden communication costs.
        usable = [min(1.0, self._constant("prefetch_share" if one else "hidden_share")) for one in self._thirds]
        self._hidden = np.array(usable) * (1.0 - self._slowing)
        self._modes = list(MODES) if request.fix.get("recompute") is None else [str(request.fix["recompute"])]
        self._ones: dict[Cell, _Sample] = {}
        self._pipes: Pipes | None = None
        self._sizes = pipeline_sizes(request)

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
        least = max(work, sample.way * times + sent)
        if whole:
            least += self._least_tail(cell, work)
        return least * _ROUNDING

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
        cuts = stage_cuts(request, costs, each[-2], each[-1])
        found: list[Pipe] = []
        for pp in pipeline_sizes(request):
            for schedule, virtual in pipelines(request.fix, pp, request.shape.num_layers):
                looped = schedule == "interleaved" and virtual > 1
                for cut in cuts(pp * virtual, looped):
                    found.append(Pipe(pp=pp, schedule=schedule, virtual=virtual, stages=cut))
        if found:
            self._pipes = Pipes(
                found, request.model, self._numbers, len(self._kinds) + 2, closed=request.topology.cores is None
            )
            self._room = Room(request, found, self._numbers, self._modes)
            self._of_pipe = np.array([self._sizes.index(pipe.pp) for pipe in found])
            self._split = np.array([pipe.split for pipe in found])
        return len(found)

    def leaves(self, cell: Cell, *, all_of_them: bool = False) -> Leaves:
        """The forms of ``cell`` that may fit, or all."""
        pipes = self._pipes
        assert pipes is not None, "lay() comes first"
        dps = dict(meshes(self.request, cell.tp, cell.cp))
        table = self._by_size(cell, dps)
        counts, hop = table.counts[self._of_pipe], table.hops[self._of_pipe]
        if np.isinf(counts).all():
            none = np.full((1, 1, 1), np.inf)
            return Leaves(cell, pipes, dps, self._modes, bounds=none, relieved=none[:, 0], ranks=none, tails=none)
        peak = self._room.peak(cell, self._plan(cell), counts, table.sent)
        fits = (peak.values <= self.request.memory) & (counts < np.inf)[:, None, None]
        if all_of_them:
            fits[:] = (peak.values < np.inf) & (counts < np.inf)[:, None, None]
        may = len(self._modes) > 1 and bool((peak.least <= self.request.memory).any())
        if not may and not fits.any():
            nothing = np.full(fits.shape, np.inf)
            return Leaves(
                cell, pipes, dps, self._modes, bounds=nothing, relieved=nothing[:, 0], ranks=nothing, tails=nothing
            )
        phases = [np.array(one).T for one in zip(*(self._phases(cell, mode) for mode in self._modes), strict=True)]
        with np.errstate(invalid="ignore"):
            host = np.array([self._launched(cell, mode) for mode in self._modes]).T
            spans, ranks = pipes.seconds(counts, phases, hop, host, self._constant("pace_join"))
            busiest = np.maximum.reduceat(ranks, pipes.starts, axis=0)
            # Under a rank that computes longer more is hidden, but no more than it is longer by.
            tails = self._tails(table, counts, spans / counts[:, None])
            plain = spans + (counts * self._host)[:, None]
            bounds = np.where(fits, plain[:, :, None] * _ROUNDING + tails, np.inf)
            relieved = np.full(fits[:, 0].shape, np.inf)
            if may:
                relieved = self._relieved(peak, counts, plain[:, 0], ranks[:, 0], busiest[:, 0], phases) + tails[:, 0]
        return Leaves(cell, pipes, dps, self._modes, bounds=bounds, relieved=relieved, ranks=ranks, tails=tails)

    def _relieved(
        self, peak: Peak, counts: Floats, plain: Floats, ranks: Floats, busiest: Floats, phases: Sequence[Floats]
    ) -> Floats:
        """Seconds at least once enough layers are recomputed [pipes, zeros]; infinite where all are too few."""
        rows, kinds = peak.rows, len(self._kinds)
        spent = (phases[0] + phases[1] + phases[2])[:kinds]
        saved = peak.saved
        # Of the ways to save a byte, the cheapest: seconds a microbatch.
        rates = [
            (spent[kind, mode] - spent[kind, 0]) / saved[kind, mode]
            for kind in range(kinds)
            for mode in range(1, len(self._modes))
            if saved[kind, mode] > 0
        ]
        rate = max(0.0, min(rates, default=math.inf))
        over = np.maximum(peak.over, 0.0)
        extra = np.where(over > 0, over / np.maximum(rows.most, 1e-9)[:, None] * rate, 0.0)
        most = np.full((len(counts), over.shape[1]), -np.inf)
        most[rows.pipe[rows.starts]] = np.maximum.reduceat(ranks[rows.rank][:, None] + extra, rows.starts, axis=0)
        # A rank waits for the others' forwards and backwards, together half of a pipeline's fill and more. A split
        # backward's weight gradients may take their place.
        fill = plain - counts * (busiest + self._host)
        idle = np.where(self._split, 0.0, 0.5 * np.maximum(0.0, fill))
        later = counts[:, None] * (np.maximum(most, busiest[:, None]) + self._host) + idle[:, None]
        fit = (peak.least <= self.request.memory) & (counts < np.inf)[:, None]
        return np.where(fit, np.maximum(plain[:, None], later) * _ROUNDING, np.inf)

    def _by_size(self, cell: Cell, dps: Mapping[int, int]) -> _Table:
        """What a cell's number of pipeline ranks decides; infinite counts where there can be none."""
        request, sizes = self.request, self._sizes
        counts, hops = np.full(len(sizes), np.inf), np.zeros(len(sizes))
        cut = self.slice(cell)
        size = cut.width * cut.tokens * request.model.hidden_size / cell.tp
        for place, pp in enumerate(sizes):
            dp = dps.get(pp)
            experts = cell.ep * cell.etp
            if dp is None or request.global_batch % (cell.micro * dp) or dp * cell.cp * cell.tp % experts:
                continue
            counts[place] = request.global_batch // (cell.micro * dp)
            if pp > 1:
                hops[place] = collective(self._machine, "p2p", size, Group(size=pp, stride=dp * cell.cp * cell.tp))
        after = self._after(cell)
        return _Table(counts=counts, hops=hops, sent=after.sent, updates=after.updates)

    def _tails(self, table: _Table, counts: Floats, busiest: Floats) -> Floats:
        """Seconds that gradients, weights and the optimizer of a rank add, at least [pipes, modes, zeros].

        A mean rank's: no more than the slowest one's. Communication that compute hides still slows it; what is longer
        than the work it may hide under is not hidden.
        """
        sent, update = table.sent[self._of_pipe][:, None], table.updates[self._of_pipe][:, None]
        hidden = self._hidden * busiest[:, :, None]
        times = np.where(self._thirds, counts[:, None], 1.0)[:, None]
        return np.asarray((times * np.maximum(sent * self._slowing, sent - hidden) + update) * _ROUNDING)

    def state_of(self, cell: Cell, pp: int, dp: int, zero: int) -> float:
        """Bytes of state of a mean rank."""
        return self._state.bytes(cell, pp, dp, zero)

    def peak(self, leaf: Leaf) -> float:
        """Bytes that the leaf's form fills on its fullest rank, at least."""
        cell = leaf.cell
        table = self._by_size(cell, dict(meshes(self.request, cell.tp, cell.cp)))
        assert self._pipes is not None, "lay() comes first"
        values = self._room.peak(cell, self._plan(cell), table.counts[self._of_pipe], table.sent).values
        return float(values[self._pipes.pipes.index(leaf.pipe), self._modes.index(leaf.recompute), leaf.zero])

    def recomputed(self, leaf: Leaf, extra: Mapping[int, float]) -> float:
        """Seconds at least of the leaf when ranks recompute for so many seconds a microbatch."""
        times = self.request.global_batch // (leaf.cell.micro * leaf.dp)
        busiest = max(leaf.ranks[rank] + max(0.0, more) for rank, more in extra.items())
        return max(leaf.bound, float(times * (busiest + self._host) * _ROUNDING) + leaf.tail)

    def _least_tail(self, cell: Cell, work: float) -> float:
        """The least of any size and ZeRO level whose state fits; ``work``: seconds that a mean rank computes, at least.

        Under a rank that computes longer more is hidden, but no more than it is longer by.
        """
        request, after = self.request, self._after(cell)
        counts = request.global_batch * cell.tp * cell.cp * np.array(self._sizes) / (request.world_size * cell.micro)
        times = np.where(self._thirds, counts[:, None], 1.0)
        shown = after.sent - self._hidden * (work / counts)[:, None]
        tails = times * np.maximum(after.sent * self._slowing, shown) + after.updates
        fits = (after.state <= request.memory) & (counts == np.floor(counts))[:, None]
        return float(np.where(fits, tails, np.inf).min())

    def _after(self, cell: Cell) -> _After:
        """By number of pipeline ranks and ZeRO level; the same for all cells that cut parameters alike."""
        experts, world = cell.ep * cell.etp, self.request.world_size
        if (cell.tp, experts) not in self._afters:
            sent, updates, state = np.full((3, len(self._sizes), len(ZEROS)), np.inf)
            alone = dataclasses.replace(cell, cp=1, context="ring")
            for place, pp in enumerate(self._sizes):
                dp = world // (cell.tp * pp)
                if world % (cell.tp * pp) or dp * cell.tp % experts:
                    continue
                for zero in zeros(self.request.fix, dp):
                    sent[place, zero], updates[place, zero] = self._updates(alone, pp, dp, zero)
                    state[place, zero] = self._state.bytes(alone, pp, dp, zero)
            self._afters[cell.tp, experts] = _After(sent=sent, updates=updates, state=state)
        return self._afters[cell.tp, experts]

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

    def _launched(self, cell: Cell, mode: str) -> list[float]:
        """Seconds of the host for one microbatch: each kind of layer, the embedding, the head."""
        practice = self.request.practice
        launch = 0.0 if practice.graph else launch_of(self._machine, practice)
        shown = 0.0 if practice.graph else 1.0
        return [sum(phase.launches * launch + phase.waits * shown for phase in one) for one in self._spent(cell, mode)]

    def _phases(self, cell: Cell, mode: str) -> tuple[list[float], list[float], list[float]]:
        """Seconds of F, B and W of one microbatch: each kind of layer, the embedding, the head."""
        parts = self._spent(cell, mode)
        forward, backward, weight = ([phase.total for phase in side] for side in zip(*parts, strict=True))
        return forward, backward, weight

    def _spent(self, cell: Cell, mode: str) -> list[tuple[Spent, Spent, Spent]]:
        cut = self.slice(cell)
        known = mode if mode in MODES else "none"  # ranges of layers: no less than that
        parts = [layer_times(self._machine, cut, *kind, known) for kind in self._kinds]
        parts += [end_times(self._machine, cut, last) for last in (False, True)]
        return parts

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
