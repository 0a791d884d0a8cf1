"""Of each kind of plan that is not the best one's, the most promising plan and why it lost; and the order of plans."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

from plait.core.mesh import ORDERS
from plait.core.plan import Plan
from plait.planner.bounds import Bounds
from plait.planner.cost import predict
from plait.planner.memory import memory
from plait.planner.space import MODES, SCHEDULES, ZEROS, Cell, Request, legal, orders, pipeline_sizes, plan_of
from plait.planner.why import Candidate, Loser, reason

_CELLS, _FORMS, _TRIES = 8, 24, 64
"""Of a losing kind: cells that are opened, forms of each, and plans of them all that are predicted."""
_CELL_AXES = {"tp": "tp", "cp": "cp", "ep": "ep", "expert_tp": "etp", "micro": "micro"}


def order(candidate: Candidate) -> tuple[Any, ...]:
    """Faster first; among equals the one with fewer special choices."""
    return (candidate.prediction.step_time, *simplicity(candidate.plan))


def simplicity(plan: Plan) -> tuple[Any, ...]:
    """Smaller for plans with fewer special choices."""
    known = {name: place for place, name in enumerate(SCHEDULES)}
    special = (
        plan.stages is not None,
        plan.recompute not in ("none", "selective", "full"),
        plan.tp > 1 and not plan.sp,
        plan.cp > 1,
        plan.order != ORDERS[0],
        plan.zero_group is not None,
        plan.schedule != "1f1b",
        plan.recompute != "none",
        plan.expert_tp is not None,
        plan.ep > 1,
    )
    order = (known.get(plan.schedule, len(known)), plan.virtual, plan.zero, plan.pp, plan.tp, plan.cp, plan.ep)
    return (sum(special), *order, plan.context, plan.recompute, -plan.micro, plan.stages or ())


@final
class Losers:
    """Those of one search, whose ``cells`` and ``bounds`` it takes over."""

    def __init__(self, request: Request, bounds: Bounds, cells: Sequence[Cell], ranked: Sequence[Candidate]) -> None:
        self._request, self._bounds, self._cells, self._best = request, bounds, cells, ranked[0]
        self._ranked = ranked

    def each(self) -> Iterator[Loser]:
        """The most promising plan with each other value of an axis, and why it lost."""
        best = self._best.plan
        own = cell_of(best)
        for axis, name in _CELL_AXES.items():
            if axis in ("ep", "expert_tp") and not self._request.shape.num_experts:
                continue
            mine = getattr(own, name)
            for value in sorted({getattr(cell, name) for cell in self._cells}):
                if value != mine and _near(value, mine):
                    alike = [cell for cell in self._cells if getattr(cell, name) == value]
                    likely = heapq.nsmallest(_CELLS, alike, key=self._promise)
                    # Bounds know little of the pipeline: cells that cut samples as far as the best plan are tried too.
                    near = [cell for cell in alike if cell.micro * own.tp * own.cp == own.micro * cell.tp * cell.cp]
                    likely += [cell for cell in heapq.nsmallest(_CELLS, near, key=self._promise) if cell not in likely]
                    yield from self._loser(f"{axis}={value}", likely, {})
        for axis, values in self._values().items():
            for value in values:
                if value != getattr(best, axis) and (axis != "pp" or _near(value, best.pp)):
                    wanted = {axis: value} if axis in ("pp", "schedule") else {"pp": best.pp, axis: value}
                    yield from self._loser(f"{axis}={value}", [own], wanted)

        for plan in orders(self._request, best):
            if plan.order != best.order:
                job, kind = self._request.job(plan), f"order={plan.order}"
                other = Candidate(plan=plan, prediction=predict(job), memory=self._best.memory)
                yield Loser(kind=kind, candidate=other, why=reason(self._request, kind, other, self._best))

    def _promise(self, cell: Cell) -> float:
        return self._bounds.cells.alike(cell)

    def _values(self) -> dict[str, list[Any]]:
        """What the forms of the best plan's cell may be."""
        sizes = pipeline_sizes(self._request)
        found: dict[str, list[Any]] = {"pp": sizes, "schedule": list(SCHEDULES)}
        found |= {"recompute": list(MODES), "zero": list(ZEROS)}
        if max(sizes) == 1:
            del found["schedule"]
        return {axis: values for axis, values in found.items() if axis not in self._request.fix}

    def _loser(self, kind: str, likely: list[Cell], wanted: Mapping[str, Any]) -> Iterator[Loser]:
        """The fastest that fits of the plans with the least bounds; else the one of them that lacks least."""
        plans: list[tuple[float, int, Plan]] = []
        for cell in likely:
            # Where memory allows no form of a cell, one of them still says by how much.
            leaves = self._bounds.leaves(cell)
            if leaves is None or not any(leaves.has(place, wanted) for place in range(len(leaves))):
                leaves = self._bounds.leaves(cell, all_of_them=True)
            if leaves is None:
                continue
            places = (place for place in range(len(leaves)) if leaves.has(place, wanted))
            for place in itertools.islice(places, _FORMS):
                leaf = leaves.leaf(place)
                plans.append((leaf.bound, len(plans), plan_of(self._request, cell, leaf.form)))
        tried: list[Candidate] = []
        axis, _, value = kind.partition("=")
        # What is ranked is of many kinds: none of them has a better plan that is not.
        best = next((one for one in self._ranked if str(_value(one.plan, axis)) == value), None)
        if best is not None:
            tried, plans = [best], []
        for bound, _, plan in heapq.nsmallest(_TRIES, plans):
            if best is not None and bound >= best.prediction.step_time:
                break
            if not legal(self._request, plan):
                continue
            job = self._request.job(plan)
            prediction = predict(job)
            if best is not None and prediction.step_time >= best.prediction.step_time:
                continue
            tried.append(Candidate(plan=plan, prediction=prediction, memory=memory(job)))
            if tried[-1].fits(self._request.memory):
                best = tried[-1]
        if tried:
            chosen = best or min(tried, key=lambda one: one.memory.fullest.peak)
            yield Loser(kind=kind, candidate=chosen, why=reason(self._request, kind, chosen, self._best))


def cell_of(plan: Plan) -> Cell:
    """The cell of a plan."""
    return Cell(tp=plan.tp, sp=plan.sp, cp=plan.cp, context=plan.context, ep=plan.ep, etp=plan.etp, micro=plan.micro)


def _value(plan: Plan, axis: str) -> object:
    """The plan's own value of what a kind is named by."""
    return plan.etp if axis == "expert_tp" else getattr(plan, axis)


def _near(value: object, own: object) -> bool:
    """Whether a size is not far from the best plan's: half and twice as much tell enough."""
    return not isinstance(value, int) or not isinstance(own, int) or own == 0 or own / 4 <= value <= own * 4
