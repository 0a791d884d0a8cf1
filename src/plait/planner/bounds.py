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
from plait.models.config import ModelConfig, flops_per_token, parameter_shapes
from plait.planner import layers
from plait.planner.activations import layer_steps
from plait.planner.kernels import Machine, seconds
from plait.planner.ops import Message, Op, Slice
from plait.planner.pipes import Floats, Pipe, Pipes
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
class Leaves:
    """The forms of a cell in the order of their bounds, made one by one."""

    def __init__(self, cell: Cell, pipes: Pipes, dps: dict[int, int], modes: Sequence[str], **of: Floats) -> None:
        self._cell, self._pipes, self._dps, self._modes, self._of = cell, pipes, dps, modes, of
        bounds = of["bounds"]
        entries, numbers = np.nonzero(bounds < np.inf)
        order = np.argsort(bounds[entries, numbers], kind="stable")
        self._places = np.stack([entries[order], numbers[order]], axis=1)

    def __len__(self) -> int:
        return len(self._places)

    def bound(self, place: int) -> float:
        """Seconds of the leaf at ``place``."""
        return float(self._of["bounds"][tuple(self._places[place])])

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
        self._state = _State(request)
        self._flops = flops_per_token(model, request.seq)
        self._best = _best_rate(self._machine, self._precision)
        self._host = self._machine.table.of("microbatch_host", self._machine.family)
        self._passes_of_state = self._machine.table.of("optimizer_passes", self._machine.family)
        self._modes = list(MODES) if request.fix.get("recompute") is None else [str(request.fix["recompute"])]
        self._ones: dict[Cell, _Sample] = {}
        self._pipes: Pipes | None = None

    def roughly(self, cell: Cell) -> float:
        """Seconds of every plan of ``cell``, at least: FLOPs at the best rate, of a step and of one microbatch's way."""
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
        return max(work, sample.way * times + sent) * _ROUNDING

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
        phases = [np.array(one).T for one in zip(*(self._phases(cell, mode) for mode in self._modes), strict=True)]
        of_size = {pp: self._of_size(cell, pp, dps.get(pp)) for pp in {pipe.pp for pipe in pipes.pipes}}
        counts, hop, state = np.array([of_size[pipe.pp] for pipe in pipes.pipes]).T
        with np.errstate(invalid="ignore"):
            spans, ranks = pipes.seconds(counts, phases, hop)
            bounds = (spans + (counts * self._host)[:, None]) * _ROUNDING
            kept = pipes.kept(counts, np.array([self._kept(cell, mode) for mode in self._modes]).T) * _ROUNDING
            fits = state[:, None] + kept <= self.request.memory
        if all_of_them:
            fits[:] = True
        if len(self._modes) > 1:
            fits[:, 0] = fits.any(axis=1)  # some of its layers can be recomputed
        bounds = np.where(fits & (bounds < np.inf), bounds, np.inf)
        return Leaves(cell, pipes, dps, self._modes, bounds=bounds, ranks=ranks, kept=kept)

    def _of_size(self, cell: Cell, pp: int, dp: int | None) -> tuple[float, float, float]:
        """(microbatches, seconds of a transfer, least bytes of state) with ``pp`` ranks; infinite where none are."""
        request = self.request
        if dp is None or request.global_batch % (cell.micro * dp) or dp * cell.cp * cell.tp % (cell.ep * cell.etp):
            return math.inf, 0.0, math.inf
        hop = 0.0
        if pp > 1:
            cut = self.slice(cell)
            size = cut.width * cut.tokens * request.model.hidden_size / cell.tp
            hop = collective(self._machine, "p2p", size, Group(size=pp, stride=dp * cell.cp * cell.tp))
        least = min(self._state.bytes(cell, pp, dp, zero) for zero in zeros(request.fix, dp * cell.cp))
        return float(request.global_batch // (cell.micro * dp)), hop, least

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

        A mean rank's: no more than the slowest one's. Communication that compute hides still slows it.
        """
        cell, machine, state = leaf.cell, self._machine, self._state
        data, copies = leaf.dp * cell.cp, leaf.dp * cell.cp * cell.tp // (cell.ep * cell.etp)
        experts = cell.ep * cell.etp
        update = sent = 0.0
        for count, sharing, stride in (
            (state.dense / cell.tp, data, cell.tp),
            (state.experts / experts, copies, experts),
        ):
            each, group = count / leaf.pipe.pp, Group(size=sharing, stride=stride)
            update += (
                each
                / (sharing if zero else 1)
                * (2 * state.optimizer + state.grad + state.wire)
                * self._passes_of_state
            )
            if not each or self.request.fix.get("zero_group") is not None:
                continue
            if zero == 0:
                sent += collective(machine, "all_reduce", state.grad * each, group)
                continue
            sent += collective(machine, "reduce_scatter", state.grad * each, group)
            # Gathered once a step; at ZeRO 3 for every forward and every backward.
            sent += (2 if zero == 3 else 1) * collective(machine, "all_gather", state.wire * each, group)
        shared = "prefetch_share" if zero == 3 else "hidden_share"
        # What is hidden slows; what is longer than the work it may hide under is not hidden.
        slowing, usable = (min(1.0, machine.table.of(name, machine.family)) for name in ("contention", shared))
        times = 1 if zero < 3 else self.request.global_batch // (cell.micro * leaf.dp)
        added = times * float(max(sent * slowing, sent - usable * (1.0 - slowing) * leaf.ranks.max()))
        return (added + update / machine.optimizer_bandwidth) * _ROUNDING

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


class _State:
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
