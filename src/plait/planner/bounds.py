"""Lower bounds on time and memory, for many plans at once, so that most need not be looked at.

Sound for `plait.planner.cost.predict` and `plait.planner.memory.memory`: no plan takes less than its bound (a test
holds them together). Each level is closer and dearer: a cell's from FLOPs; that of cells alike and a cell's from
operators at the device's best rate and messages (`plait.planner.cell_bounds`); and here a form's from what the time
model says of the cell's layers, through the pipeline.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from plait.core.mesh import ORDERS
from plait.core.plan import Plan
from plait.planner.cell_bounds import CellBounds
from plait.planner.cell_seconds import CellSeconds
from plait.planner.chains import SIMULATED, Chains
from plait.planner.cost import stage_costs
from plait.planner.leaves import Leaf, Leaves
from plait.planner.local import own_cores
from plait.planner.pipes import Floats, Pipe, Pipes
from plait.planner.room import Peak, Room
from plait.planner.space import MODES, Cell, Request, meshes, pipeline_sizes, pipelines, stage_cuts
from plait.planner.stage_cut import least_to_save
from plait.planner.stage_fit import Costs, free
from plait.planner.stages import machine_of
from plait.planner.tails import ROUNDING, After, Tails
from plait.planner.wires import Group, collective


@dataclass(frozen=True, kw_only=True)
class _Table:
    """Of a cell, by number of pipeline ranks: microbatches, seconds of a transfer, and what follows."""

    counts: Floats
    hops: Floats
    after: After


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
        self._machine = machine_of(own_cores(request.topology, request.world_size))
        kinds = [(model.moe_of(layer) is not None, model.window_of(layer)) for layer in range(model.num_layers)]
        self._kinds = list(dict.fromkeys(kinds))
        self._numbers = [self._kinds.index(kind) for kind in kinds]
        self._host = self._constant("microbatch_host")
        self._modes = list(MODES) if request.fix.get("recompute") is None else [str(request.fix["recompute"])]
        self._pipes: Pipes | None = None
        self._sizes = pipeline_sizes(request)
        self.chains = Chains()
        self._each = CellSeconds(request, self._machine, self._kinds)
        self.tails = Tails(request, self._machine, self._constant)
        self.cells = CellBounds(
            request,
            self._machine,
            self.tails,
            kinds=Counter(kinds),
            slices=self._each.slice,
            constant=self._constant,
        )

    def lay(self, typical: Cell) -> int:
        """Fix the pipelines; stages that are cut anew are cut by the costs of ``typical``, a promising cell."""
        request = self.request
        each = self._each.of(typical, "none").phases.sum(axis=0).tolist()
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
            self._free = np.array([free(request, pipe.schedule, pipe.virtual, pipe.stages) for pipe in found])
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
        peak = self._room.peak(cell, self._each.plan(cell), counts, table.after.state)
        fits = (peak.values <= self.request.memory) & (counts < np.inf)[:, None, None]
        if all_of_them:
            fits[:] = (peak.values < np.inf) & (counts < np.inf)[:, None, None]
        may = len(modes) > 1 and bool((peak.least <= self.request.memory).any())
        kept = fits.any(axis=1) | ((peak.least <= self.request.memory) & (len(modes) > 1))
        if not (kept & (first.bounds[:, 0] <= limit)).any():
            return None
        timed = first if len(modes) == 1 else self._seconds(cell, modes, counts, hop, table)
        relieved, extra = np.full(fits[:, 0].shape, np.inf), np.zeros((len(timed.ranks), fits.shape[2]))
        if may:
            with np.errstate(invalid="ignore"):
                relieved, extra = self._relieved(peak, counts, timed)
        bounds = np.where(fits, timed.bounds, np.inf)
        return Leaves(
            cell,
            pipes,
            dps,
            modes,
            bounds=bounds,
            relieved=relieved,
            extra=extra,
            ranks=timed.ranks,
            tails=timed.tails,
        )

    def _seconds(self, cell: Cell, modes: Sequence[str], counts: Floats, hop: Floats, table: _Table) -> _Timed:
        """Of every form of ``cell``, at least."""
        pipes = self._pipes
        assert pipes is not None, "lay() comes first"
        each = [self._each.of(cell, mode) for mode in modes]
        phases = np.array([one.phases for one in each]).transpose(1, 2, 0)
        host = np.array([one.host for one in each]).T
        with np.errstate(invalid="ignore"):
            spans, ranks = pipes.seconds(counts, phases, hop, host, self._constant("pace_join"))
            # Under a rank that computes longer more is hidden, but no more than it is longer by.
            tails = self.tails.seconds(table.after, self._of_pipe, counts, spans / counts[:, None])
            plain = spans + (counts * self._host)[:, None]
            bounds = np.nan_to_num(plain[:, :, None] * ROUNDING + tails, nan=np.inf)
        return _Timed(bounds=bounds, plain=plain, ranks=ranks, tails=tails, each=phases.sum(axis=0))

    def _relieved(self, peak: Peak, counts: Floats, timed: _Timed) -> tuple[Floats, Floats]:
        """Seconds at least once enough layers are recomputed [pipes, zeros], infinite where all are too few; and what
        each rank recomputes in a microbatch [ranks, zeros]."""
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
        recomputed = np.zeros((len(ranks), extra.shape[1]))
        np.maximum.at(recomputed, rows.rank, extra)
        # Where the cut is free as well, layers may move to ranks that have room.
        later[self._free], recomputed[np.repeat(self._free, [pipe.pp for pipe in self._pipes.pipes])] = 0.0, 0.0
        seconds = np.maximum(plain[:, None], later) * ROUNDING + timed.tails[:, 0]
        return np.where(fit, seconds, np.inf), recomputed

    def _by_size(self, cell: Cell, dps: Mapping[int, int]) -> _Table:
        """What a cell's number of pipeline ranks decides; infinite counts where there can be none."""
        request, sizes = self.request, self._sizes
        counts, hops = np.full(len(sizes), np.inf), np.zeros(len(sizes))
        for place, pp in enumerate(sizes):
            dp = dps.get(pp)
            experts = cell.ep * cell.etp
            if dp is None or request.global_batch % (cell.micro * dp) or dp * cell.cp * cell.tp % experts:
                continue
            counts[place] = request.global_batch // (cell.micro * dp)
            hops[place] = self._hop(cell, pp, dp)
        return _Table(counts=counts, hops=hops, after=self.tails.of(cell))

    def peak(self, leaf: Leaf) -> float:
        """Bytes that the leaf's form fills on its fullest rank, at least."""
        cell = leaf.cell
        table = self._by_size(cell, dict(meshes(self.request, cell.tp, cell.cp)))
        assert self._pipes is not None, "lay() comes first"
        values = self._room.peak(cell, self._each.plan(cell), table.counts[self._of_pipe], table.after.state).values
        return float(values[self._pipes.pipes.index(leaf.pipe), self._modes.index(leaf.recompute), leaf.zero])

    def recomputed(self, leaf: Leaf, extra: Mapping[int, float]) -> float:
        """Seconds at least of the leaf when ranks recompute for so many seconds a microbatch."""
        times = self._times(leaf)
        busiest = max(leaf.ranks[rank] + max(0.0, more) for rank, more in extra.items())
        least = max(leaf.bound, float(times * (busiest + self._host) * ROUNDING) + leaf.tail)
        more = np.array([max(0.0, extra.get(rank, 0.0)) for rank in range(leaf.pipe.pp)])
        return max(least, self.chained(leaf, more))

    def chained(self, leaf: Leaf, extra: Floats | None = None) -> float:
        """Seconds at least of the leaf, by what steps of its schedule have been simulated; 0 where none has.

        ``extra``: seconds a microbatch that each pipeline rank recomputes.
        """
        pipe, times = leaf.pipe, self._times(leaf)
        step = (pipe.schedule, pipe.pp, times, pipe.virtual)
        if not self.chains.knows(step):
            return 0.0
        assert self._pipes is not None, "lay() comes first"
        stages = self._pipes.stages_of(pipe)
        each = self._each.of(leaf.cell, leaf.recompute)
        phases = each.phases @ stages.T
        total, host = phases.sum(axis=0), stages @ each.host
        power = self._constant("pace_join")
        high, low = np.maximum(total, host), np.minimum(total, host)
        paced = high * (1 + (low / np.maximum(high, 1e-30)) ** power) ** (1 / power)
        costs = phases * (paced / np.maximum(total, 1e-30))
        span = self.chains.seconds(step, costs, self._hop(leaf.cell, pipe.pp, leaf.dp), extra)
        return (span + times * self._host) * ROUNDING + leaf.tail

    def learn(self, leaf: Leaf, plan: Plan) -> None:
        """Keep what a step of the plan of ``leaf`` waits for."""
        pipe = leaf.pipe
        if pipe.schedule in SIMULATED:
            step = (pipe.schedule, pipe.pp, self._times(leaf), pipe.virtual)
            self.chains.learn(step, stage_costs(self.request.job(plan)), self._hop(leaf.cell, pipe.pp, leaf.dp))

    def _times(self, leaf: Leaf) -> int:
        """Microbatches of a step."""
        return self.request.global_batch // (leaf.cell.micro * leaf.dp)

    def _hop(self, cell: Cell, pp: int, dp: int) -> float:
        """Seconds of a transfer between stages, in the better order of axes."""
        cut = self._each.slice(cell)
        size = cut.width * cut.tokens * self.request.model.hidden_size / cell.tp
        orders = [str(self.request.fix.get("order", one)) for one in ORDERS]
        strides = {cell.cp * cell.tp * (dp if order == ORDERS[0] else 1) for order in orders}
        return min(
            (collective(self._machine, "p2p", size, Group(size=pp, stride=stride)) for stride in strides if pp > 1),
            default=0.0,
        )

    def _constant(self, name: str) -> float:
        return self._machine.table.of(name, self._machine.family)

    def costs(self, cell: Cell) -> Costs:
        """What a cut of the layers of ``cell`` goes by."""
        each = self._each.of(cell, "none").phases.sum(axis=0)
        layers = [float(each[number]) for number in self._numbers]
        return Costs(layers=layers, first=float(each[-2]), last=float(each[-1]), spent=self.recompute_seconds(cell))

    def recompute_seconds(self, cell: Cell) -> dict[str, float]:
        """What each mode costs a layer of a microbatch, in the mean."""
        each = {mode: self._each.of(cell, mode).phases.sum(axis=0)[self._numbers] for mode in MODES}
        means = {mode: float(one.mean()) for mode, one in each.items()}
        return {mode: means[mode] - means["none"] for mode in MODES[1:]}
