"""Lower bounds on time and memory, for many plans at once, so that most need not be looked at.

Sound for `plait.planner.cost.predict` and `plait.planner.memory.memory`: no plan takes less than its bound (a test
holds them together). Each level is closer and dearer: a cell's from FLOPs; that of cells alike and a cell's from
operators at the device's best rate and messages (`plait.planner.cell_bounds`); and here a form's from what the time
model says of the cell's layers, through the pipeline.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, final

import numpy as np

from plait.core.plan import Plan
from plait.planner.cell_bounds import CellBounds
from plait.planner.leaves import Leaf, Leaves
from plait.planner.ops import Slice
from plait.planner.pace import launch_of
from plait.planner.pipes import Floats, Pipe, Pipes
from plait.planner.room import Peak, Room
from plait.planner.space import MODES, Cell, Form, Request, meshes, pipeline_sizes, pipelines, plan_of, stage_cuts
from plait.planner.stages import Spent, end_times, layer_times, machine_of, slice_of
from plait.planner.tails import ROUNDING, Tails
from plait.planner.wires import Group, collective

_WHOLE: Final = 6
"""Layers that are recomputed one by one in a bound; more are taken as if they could be cut."""


@dataclass(frozen=True, kw_only=True)
class _Table:
    """Of a cell, by number of pipeline ranks: microbatches, seconds of a transfer, and by ZeRO level seconds of the
    communication of gradients and weights, and of the update."""

    counts: Floats
    hops: Floats
    sent: Floats
    updates: Floats


@dataclass(frozen=True, kw_only=True)
class _Timed:
    """Seconds at least of a cell's forms."""

    bounds: Floats
    """[pipes, modes, zeros]; infinite where there is no such form."""
    plain: Floats
    """Of the microbatches alone [pipes, modes]."""
    ranks: Floats
    """Of each pipeline rank for a microbatch [ranks, modes]."""
    tails: Floats
    """Of what follows the microbatches [pipes, modes, zeros]."""
    each: Floats
    """Of a layer of each kind, the embedding and the head, for a microbatch [kinds + 2, modes]."""


@final
class Bounds:
    """The bounds of one request."""

    def __init__(self, request: Request) -> None:
        self.request = request
        model = request.model
        self._machine = machine_of(request.topology)
        kinds = [(model.moe_of(layer) is not None, model.window_of(layer)) for layer in range(model.num_layers)]
        self._kinds = list(dict.fromkeys(kinds))
        self._numbers = [self._kinds.index(kind) for kind in kinds]
        self._host = self._constant("microbatch_host")
        self._modes = list(MODES) if request.fix.get("recompute") is None else [str(request.fix["recompute"])]
        self._pipes: Pipes | None = None
        self._sizes = pipeline_sizes(request)
        self.tails = Tails(request, self._machine, self._constant)
        self.cells = CellBounds(
            request,
            self._machine,
            self.tails,
            kinds=Counter(kinds),
            slices=self.slice,
            constant=self._constant,
        )

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

    def leaves(self, cell: Cell, *, limit: float = math.inf, all_of_them: bool = False) -> Leaves | None:
        """The forms of ``cell`` that may fit, or all; None where none of them takes less than ``limit`` seconds."""
        pipes = self._pipes
        assert pipes is not None, "lay() comes first"
        dps = dict(meshes(self.request, cell.tp, cell.cp))
        table = self._by_size(cell, dps)
        counts, hop = table.counts[self._of_pipe], table.hops[self._of_pipe]
        if np.isinf(counts).all():
            return None
        modes = self._modes
        # What recomputes takes no less than what does not: where that is too slow, nothing else is looked at.
        first = self._seconds(cell, modes[:1], counts, hop, table)
        if not (first.bounds.min(axis=(1, 2)) <= limit).any():
            return None
        peak = self._room.peak(cell, self._plan(cell), counts, table.sent)
        fits = (peak.values <= self.request.memory) & (counts < np.inf)[:, None, None]
        if all_of_them:
            fits[:] = (peak.values < np.inf) & (counts < np.inf)[:, None, None]
        may = len(modes) > 1 and bool((peak.least <= self.request.memory).any())
        kept = fits.any(axis=1) | ((peak.least <= self.request.memory) & (len(modes) > 1))
        if not (kept & (first.bounds[:, 0] <= limit)).any():
            return None
        timed = first if len(modes) == 1 else self._seconds(cell, modes, counts, hop, table)
        relieved = np.full(fits[:, 0].shape, np.inf)
        if may:
            with np.errstate(invalid="ignore"):
                relieved = self._relieved(peak, counts, timed) + timed.tails[:, 0]
        bounds = np.where(fits, timed.bounds, np.inf)
        return Leaves(cell, pipes, dps, modes, bounds=bounds, relieved=relieved, ranks=timed.ranks, tails=timed.tails)

    def _seconds(self, cell: Cell, modes: Sequence[str], counts: Floats, hop: Floats, table: _Table) -> _Timed:
        """Of every form of ``cell``, at least."""
        pipes = self._pipes
        assert pipes is not None, "lay() comes first"
        phases = [np.array(one).T for one in zip(*(self._phases(cell, mode) for mode in modes), strict=True)]
        host = np.array([self._launched(cell, mode) for mode in modes]).T
        with np.errstate(invalid="ignore"):
            spans, ranks = pipes.seconds(counts, phases, hop, host, self._constant("pace_join"))
            # Under a rank that computes longer more is hidden, but no more than it is longer by.
            sent, updates = table.sent[self._of_pipe], table.updates[self._of_pipe]
            tails = self.tails.seconds(sent, updates, counts, spans / counts[:, None])
            plain = spans + (counts * self._host)[:, None]
            bounds = np.nan_to_num(plain[:, :, None] * ROUNDING + tails, nan=np.inf)
        return _Timed(bounds=bounds, plain=plain, ranks=ranks, tails=tails, each=sum(phases[1:], phases[0]))

    def _relieved(self, peak: Peak, counts: Floats, timed: _Timed) -> Floats:
        """Seconds at least once enough layers are recomputed [pipes, zeros]; infinite where all are too few."""
        rows, kinds = peak.rows, len(self._kinds)
        spent, saved = timed.each[:kinds], peak.saved
        plain, ranks = timed.plain[:, 0], timed.ranks[:, 0]
        assert self._pipes is not None, "lay() comes first"
        busiest = np.maximum.reduceat(ranks, self._pipes.starts)
        over = np.maximum(peak.over, 0.0) / np.maximum(rows.most, 1e-9)[:, None]
        extra = least_to_save(over, saved[:kinds, 1:], spent[:, 1:] - spent[:, :1])
        most = np.full((len(counts), over.shape[1]), -np.inf)
        most[rows.pipe[rows.starts]] = np.maximum.reduceat(ranks[rows.rank][:, None] + extra, rows.starts, axis=0)
        # A rank waits for the others' forwards and backwards, together half of a pipeline's fill and more. A split
        # backward's weight gradients may take their place.
        fill = plain - counts * (busiest + self._host)
        idle = np.where(self._split, 0.0, 0.5 * np.maximum(0.0, fill))
        later = counts[:, None] * (np.maximum(most, busiest[:, None]) + self._host) + idle[:, None]
        fit = (peak.least <= self.request.memory) & (counts < np.inf)[:, None]
        return np.where(fit, np.maximum(plain[:, None], later) * ROUNDING, np.inf)

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
        after = self.tails.of(cell)
        return _Table(counts=counts, hops=hops, sent=after.sent, updates=after.updates)

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
        return max(leaf.bound, float(times * (busiest + self._host) * ROUNDING) + leaf.tail)

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
        shown = 1.0 if launch else 0.0
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
        # The ends know nothing of experts and contexts: cells share them.
        ends = self.slice(dataclasses.replace(cell, ep=1, etp=cell.tp, context="ring"))
        parts += [end_times(self._machine, ends, last) for last in (False, True)]
        return parts

    def slice(self, cell: Cell) -> Slice:
        """A rank's share of a layer."""
        return slice_of(self.request.job(self._plan(cell)))

    @functools.cache  # noqa: B019 - lives as long as the search
    def _plan(self, cell: Cell) -> Plan:
        """A plan of the cell, whatever its form."""
        form = Form(pp=1, dp=1, schedule="1f1b", virtual=1, stages=None, recompute="none", zero=0)
        return plan_of(self.request, cell, form)


def least_to_save(over: Floats, saved: Floats, spent: Floats) -> Floats:
    """Seconds of the cheapest layers to recompute that save ``over`` bytes, at least; 0 where there is nothing to save.

    ``saved`` bytes and ``spent`` seconds of a layer: [kinds, modes]. Each mode at its best: the most that any kind
    saves, for the least that any takes. Layers are whole: a few of the mode that saves most are tried one by one.
    """
    most, least = saved.max(axis=0), np.maximum(spent, 0.0).min(axis=0)
    useful = [(float(size), float(cost)) for size, cost in zip(most, least, strict=True) if size > 0]
    if not useful:
        return np.where(over > 0, np.inf, 0.0)
    rate = min(cost / size for size, cost in useful)
    big, dear = max(useful)
    found = np.maximum(over * rate, _WHOLE * dear)  # with so many layers of the mode that saves most, or more
    for count in range(_WHOLE):
        left = np.maximum(over - count * big, 0.0)
        rest = np.full(over.shape, np.inf)
        for size, cost in useful:
            if size < big:
                rest = np.minimum(rest, np.ceil(left / size * ROUNDING) * cost)
        found = np.minimum(found, np.where(left > 0, rest, 0.0) + count * dear)
    return np.where(over > 0, found, 0.0)
