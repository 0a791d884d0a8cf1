"""The fastest plans that fit: best first over lower bounds, so that what is not looked at cannot be among them.

Cells wait by their bound; the nearest one is opened into its forms, with closer bounds; a form whose turn comes is
predicted. The search ends when no bound is below the slowest plan that is kept. Exact over the space of
`plait.planner.space`, by `predict` and `memory` as they are (a test compares with every legal plan).
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import final

from plait.core.plan import Plan
from plait.core.topology import Topology
from plait.models.config import ModelConfig
from plait.planner.bounds import Bounds
from plait.planner.cells import cells, grouped, likely, plan_count
from plait.planner.cost import predict
from plait.planner.given import require_possible
from plait.planner.job import PLAIT, Practice
from plait.planner.leaves import Leaf, Leaves
from plait.planner.losers import Losers, order
from plait.planner.memory import Ranks, memory
from plait.planner.prediction import Prediction
from plait.planner.space import (
    Cell,
    Form,
    Request,
    laid_out,
    legal,
    meshes,
    orders,
    pipelines,
    plan_of,
    require_some,
    zeros,
)
from plait.planner.stage_cut import recompute_to_fit
from plait.planner.stage_fit import free, recut_to_fit
from plait.planner.why import Candidate, Loser, nearest_words

_TIGHTEST = 24
"""Plans with the least state whose memory is worked out where nothing fits."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """What a search found. ``ranked`` is empty where nothing fits; then ``nearest`` is what lacks least memory."""

    request: Request
    ranked: tuple[Candidate, ...]
    losers: tuple[Loser, ...]
    nearest: Candidate | None
    advice: tuple[str, ...]
    """In words: what is nearest to fitting, and what would fit. Empty where something fits."""
    considered: int
    """Legal combinations."""
    predicted: int
    """Of them, those that were predicted; bounds excluded the others."""
    narrowed: tuple[str, ...] = ()
    """What was left out by rule, because there were so many (`plait.planner.cells.likely`)."""

    @property
    def best(self) -> Candidate | None:
        return self.ranked[0] if self.ranked else None


def search(
    model: ModelConfig,
    topology: Topology,
    *,
    world_size: int,
    seq: int,
    global_batch: int,
    precision: str = "bf16",
    fix: Mapping[str, object] | None = None,
    max_memory: float = 0.9,
    top: int = 10,
    practice: Practice = PLAIT,
    losers: bool = True,
) -> Search:
    """The ``top`` fastest plans that fill no more than ``max_memory`` of a device, and why others lost.

    ``seq`` is tokens a sample, ``global_batch`` samples a step, ``fix`` plan keys that are given. ConfigError for
    numbers that make no request, PlanError where no plan is legal, whatever the memory.
    """
    request = Request(
        model=model,
        topology=topology,
        world_size=world_size,
        seq=seq,
        global_batch=global_batch,
        precision=precision,
        fix=fix or {},
        max_memory=max_memory,
        practice=practice,
    )
    require_possible(request)
    run = Run(request, top=top)
    run.finish()
    if run.narrowed and not run.ranked:
        run = Run(request, top=top, everything=True)
        run.finish()
    near = None if run.ranked else tightest(request)
    require_some(request, bool(run.ranked) or near is not None)
    return Search(
        request=request,
        ranked=tuple(run.ranked),
        losers=tuple(run.losers()) if losers and run.ranked else (),
        nearest=near,
        advice=() if near is None else tuple(nearest_words(request, near, tightest)),
        considered=run.considered,
        predicted=run.predicted,
        narrowed=run.narrowed,
    )


def tightest(request: Request) -> Candidate | None:
    """Of the plans that recompute all, share all and take the smallest microbatch: the one with the lowest peak."""
    fix = {"micro": 1, "recompute": "full", **request.fix}
    small = dataclasses.replace(request, fix=fix)
    bounds = Bounds(small)
    found: list[tuple[float, int, Cell, int, int, int]] = []
    for cell in cells(small):
        for pp, dp in meshes(small, cell.tp, cell.cp):
            if dp * cell.cp * cell.tp % (cell.ep * cell.etp):
                continue  # the experts do not fold out of a stage's ranks
            for zero in zeros(small.fix, dp * cell.cp)[-1:]:
                found.append((bounds.tails.state_of(cell, pp, dp, zero), len(found), cell, pp, dp, zero))
    best: Candidate | None = None
    for _, _, cell, pp, dp, zero in sorted(found)[:_TIGHTEST]:
        for schedule, virtual in pipelines(small.fix, pp, small.shape.num_layers)[:1]:
            mode, cut = str(fix["recompute"]), small.base().get("stages")
            form = Form(pp=pp, dp=dp, schedule=schedule, virtual=virtual, stages=cut, recompute=mode, zero=zero)
            plan = plan_of(small, cell, form)
            if not legal(request, plan):
                continue
            report = memory(request.job(plan))
            if best is None or report.fullest.peak < best.memory.fullest.peak:
                best = Candidate(plan=plan, prediction=predict(request.job(plan)), memory=report)
    return best


@dataclass(frozen=True, kw_only=True)
class _Alike:
    """Cells that share a bound, which has been taken."""

    cells: tuple[Cell, ...]


@dataclass(frozen=True, kw_only=True)
class _Next:
    """The next form of a cell."""

    leaves: Leaves
    place: int


_Node = tuple[Cell, ...] | _Alike | Cell | _Next | Leaf


@final
class Run:
    """One search as it goes on."""

    def __init__(self, request: Request, *, top: int, everything: bool = False) -> None:
        self.request = request
        self.ranked: list[Candidate] = []
        self.predicted = 0
        self._top = top
        self._tried: set[tuple[Plan, bool]] = set()
        self._bounds = Bounds(request)
        found = list(cells(request))
        self.considered = plan_count(request, found)
        require_some(request, self.considered > 0)
        self.narrowed: tuple[str, ...] = ()
        if not everything:
            found, self.narrowed = likely(request, found)
        self._count = itertools.count()
        self._cells = found
        self._heap: list[tuple[float, int, _Node]] = []
        typical = min(found, key=self._bounds.cells.roughly)
        require_some(request, self._bounds.lay(typical) > 0)
        for group in grouped(found):
            self._push(self._bounds.cells.roughly(group[0]), group)

    @property
    def limit(self) -> float:
        """Seconds of the slowest plan that is kept; infinite while there is room."""
        return self.ranked[-1].prediction.step_time if len(self.ranked) >= self._top else float("inf")

    def finish(self) -> None:
        """Until nothing that is left can be among the best."""
        while self._heap and self._heap[0][0] <= self.limit:
            _, _, node = heapq.heappop(self._heap)
            if isinstance(node, tuple):
                self._push(self._bounds.cells.alike(node[0]), _Alike(cells=node))
            elif isinstance(node, _Alike):
                for cell in node.cells:
                    self._push(self._bounds.cells.closely(cell), cell)
            elif isinstance(node, Cell):
                leaves = self._bounds.leaves(node, limit=self.limit)
                if leaves is not None:
                    self._probe(leaves)
                    self._next(leaves, 0)
            elif isinstance(node, _Next):
                self._next(node.leaves, node.place + 1)
                self._try(node.leaves.leaf(node.place))
            else:
                self._try(node)

    def _push(self, bound: float, node: _Node) -> None:
        if bound <= self.limit:
            heapq.heappush(self._heap, (bound, next(self._count), node))

    def _next(self, leaves: Leaves, place: int) -> None:
        if place < len(leaves):
            self._push(leaves.bound(place), _Next(leaves=leaves, place=place))

    def _probe(self, leaves: Leaves) -> None:
        """A cell's first form that may fit as it is, out of turn: a good plan early spares much of what comes later."""
        place = leaves.plain
        if place is not None and leaves.bound(place) < self.limit:
            self._try(leaves.leaf(place))

    def _try(self, leaf: Leaf) -> None:
        """A form, or (``fit``) the one that recomputes as many of its layers as it takes to fit."""
        if self._bounds.chained(leaf, leaf.extra) > self.limit:
            return  # recomputing takes longer than not
        plan = plan_of(self.request, leaf.cell, leaf.form)
        if (plan, leaf.fit) in self._tried or not legal(self.request, plan):
            return
        self._tried.add((plan, leaf.fit))
        # Layers are recomputed under the usual sharing alone, so that fewer of them are.
        ways = (orders if leaf.fit else laid_out)(self.request, plan)
        each = [(one, predict(self.request.job(one))) for one in ways]
        each.sort(key=lambda pair: pair[1].step_time)  # the first of equals: the usual one
        if each[0][1].step_time > self.limit:
            self._bounds.learn(leaf, each[0][0])
            return
        if leaf.fit:
            self._fit(leaf, each[0][0])
            return
        # State that fewer ranks share may not fit.
        for one, prediction in each:
            if prediction.step_time > self.limit:
                break
            self.predicted += 1
            if self._keep(one, prediction):
                return
        if leaf.relieved < math.inf:
            bound = max(leaf.relieved, each[0][1].step_time * (1.0 - 1e-9))
            self._push(bound, dataclasses.replace(leaf, bound=bound, fit=True))

    def _fit(self, leaf: Leaf, plan: Plan) -> None:
        chosen = recompute_to_fit(
            self.request,
            plan,
            self._bounds.recompute_seconds(leaf.cell),
            hopes=lambda extra: self._bounds.recomputed(leaf, extra) <= self.limit,
            worth=lambda one: self._worth(leaf, one),
        )
        again = None
        if plan.pp > 1 and free(self.request, plan.schedule, plan.virtual, plan.stages):
            again = recut_to_fit(self.request, plan, self._bounds.costs(leaf.cell), lambda one: self._worth(leaf, one))
        for one in (chosen, again):
            if one is not None and (one, False) not in self._tried:
                self._tried.add((one, False))
                self.predicted += 1
                prediction = predict(self.request.job(one))
                if prediction.step_time <= self.limit:
                    self._keep(one, prediction)

    def _worth(self, leaf: Leaf, plan: Plan) -> bool:
        """Whether a plan is among the best if it fits."""
        worth = predict(self.request.job(plan)).step_time <= self.limit
        if not worth:
            self._bounds.learn(leaf, plan)
        return worth

    def _keep(self, plan: Plan, prediction: Prediction) -> bool:
        """Whether the plan fits; then it is among the best."""
        ranks = Ranks(self.request.job(plan))
        # The ends of a pipeline are mostly the fullest: one of them over the limit spares the others.
        for rank in sorted({0, plan.pp - 1, max(0, plan.pp - 2)}):
            if ranks.of(rank).peak > self.request.memory:
                return False
        report = ranks.report()
        if report.fullest.peak > self.request.memory:
            return False
        bisect.insort(self.ranked, Candidate(plan=plan, prediction=prediction, memory=report), key=order)
        del self.ranked[self._top :]
        return True

    def losers(self) -> Iterator[Loser]:
        """The most promising plan with each other value of an axis, and why it lost."""
        return Losers(self.request, self._bounds, self._cells, self.ranked).each()
