"""The cut of layers to stages by time and memory at once: what a stage recomputes to fit is part of what it takes.

Early stages hold the most live microbatches, the first and the last one the embedding and the head. A balanced cut then
has early stages recompute while late ones have room; layers that move to later stages spare more than they cost.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from plait.core.plan import Plan
from plait.parallel.layout import stage_layers
from plait.planner.memory import Ranks
from plait.planner.pipes import Floats
from plait.planner.space import MODES, Request
from plait.planner.stage_cut import cheapest, mixed

_REPAIRS: Final = 4
"""Times that a choice which does not fit by the memory model is enlarged."""
ONE_STAGE: Final = ("1f1b", "gpipe", "zb-h1", "zb-h2")
"""Schedules with one stage a rank, whose cut is free."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds of a microbatch: every layer without recomputation, both ends, and what a mode adds to a layer."""

    layers: Sequence[float]
    first: float
    last: float
    spent: Mapping[str, float]


def free(request: Request, schedule: str, virtual: int, stages: tuple[int, ...] | None) -> bool:
    """Whether a pipeline's layers may be cut by memory: nothing of it is given, and it stands for all its cuts."""
    return (
        schedule in ONE_STAGE and virtual == 1 and stages is None and not {"stages", "recompute"} & request.fix.keys()
    )


def cut_by(layers: Sequence[float], first: float, last: float, extra: Floats) -> tuple[int, ...] | None:
    """Layers of each stage: of the cuts with the least longest stage, one with the least seconds in all.

    A stage takes its ``layers`` in order, ``first`` or ``last`` at the ends, and ``extra[stage, count]`` for how many
    it holds; infinite where it cannot hold as many. Every stage gets a layer. None where no cut is possible.
    """
    count, stages = len(layers), len(extra)
    sums = np.concatenate([[0.0], np.cumsum(layers)])
    held = np.arange(count + 1)[None, :] - np.arange(count + 1)[:, None]  # [from, to]
    ends = np.zeros(stages)
    ends[0] += first
    ends[-1] += last
    took = [
        np.where(held > 0, sums[None, :] - sums[:, None] + extra[stage][np.maximum(held, 0)] + ends[stage], np.inf)
        for stage in range(stages)
    ]
    # Phase 1: the least longest stage of the layers up to each.
    longest = took[0][0]
    for one in took[1:]:
        longest = np.maximum(longest[:, None], one).min(axis=0)
    limit = longest[count] * (1 + 1e-12)
    if np.isinf(limit):
        return None
    # Phase 2: within it, the least sum.
    total, choices = np.where(took[0][0] <= limit, took[0][0], np.inf), []
    for one in took[1:]:
        every = total[:, None] + np.where(one <= limit, one, np.inf)
        choices.append(every.argmin(axis=0))
        total = every.min(axis=0)
    bounds = [count]
    for choice in reversed(choices):
        bounds.append(int(choice[bounds[-1]]))
    return tuple(stop - start for start, stop in itertools.pairwise([0, *reversed(bounds)]))


def recut_to_fit(request: Request, plan: Plan, costs: Costs, worth: Callable[[Plan], bool]) -> Plan | None:
    """``plan``, one stage a rank, cut and recomputed so that every rank fits and the longest stage is shortest.

    A rank's peak is taken as linear in its layers, by the memory model on two cuts and every mode; that model has the
    last word. None where nothing fits, or where the plan that comes out is not ``worth`` it.
    """
    peaks = _peaks(request, plan)
    count = request.model.num_layers
    choices = [[_choice(request, one, held, costs) for held in range(count + 1)] for one in peaks]
    extra = np.array([[np.inf if choice is None else _seconds(choice, costs) for choice in row] for row in choices])
    cut = cut_by(costs.layers, costs.first, costs.last, extra)
    if cut is None:
        return None
    usual = stage_layers(request.model, dataclasses.replace(plan, stages=None))
    found = dataclasses.replace(plan, stages=None if cut == usual else cut)
    chosen = [choices[stage][held] or (0, 0) for stage, held in enumerate(cut)]
    for repair in range(_REPAIRS):
        one = mixed(request, found, chosen)
        if repair == 0 and not worth(one):
            return None
        ranks = Ranks(request.job(one))
        over = [rank for rank in range(plan.pp) if ranks.of(rank).peak > request.memory]
        if not over:
            return one
        for rank in over:
            full, selective = chosen[rank]
            chosen[rank] = (min(full + 1, cut[rank]), max(0, min(selective, cut[rank] - full - 1)))
    return None


@dataclass(frozen=True, kw_only=True)
class _Peak:
    """Of a rank with ``held`` layers: bytes without recomputation, those of a layer more, and what a mode saves."""

    held: int
    peak: float
    more: float
    saved: Mapping[str, float]


def _peaks(request: Request, plan: Plan) -> list[_Peak]:
    """Of every rank: of the usual cut, and of one in which neighbours have a layer more and a layer less."""
    usual = stage_layers(request.model, dataclasses.replace(plan, stages=None))
    other = list(usual)
    for even in range(0, plan.pp - 1, 2):
        step = 1 if other[even + 1] > 1 else -1
        other[even], other[even + 1] = other[even] + step, other[even + 1] - step
    if plan.pp % 2:  # the last one is alone
        step = 1 if other[0] > 1 else -1
        other[-1], other[0] = other[-1] + step, other[0] - step
    if min(other) < 1:
        other = list(usual)
    here = {mode: Ranks(request.job(dataclasses.replace(plan, stages=usual, recompute=mode))) for mode in MODES}
    there = Ranks(request.job(dataclasses.replace(plan, stages=tuple(other))))
    found = []
    for rank, (held, changed) in enumerate(zip(usual, other, strict=True)):
        peak = here["none"].of(rank).peak
        more = (there.of(rank).peak - peak) / (changed - held) if changed != held else peak / max(1, held)
        saved = {mode: (peak - here[mode].of(rank).peak) / max(1, held) for mode in MODES[1:]}
        found.append(_Peak(held=held, peak=peak, more=more, saved=saved))
    return found


def _choice(request: Request, one: _Peak, held: int, costs: Costs) -> tuple[int, int] | None:
    """(full, selective) layers of a rank that holds so many; None where it does not fit."""
    over = one.peak + (held - one.held) * one.more - request.memory
    if over <= 0:
        return 0, 0
    full, selective = cheapest(held, over, one.saved, costs.spent)
    enough = full * one.saved["full"] + selective * one.saved["selective"] >= over * (1 - 1e-9)
    return (full, selective) if enough else None


def _seconds(choice: tuple[int, int], costs: Costs) -> float:
    return choice[0] * costs.spent["full"] + choice[1] * costs.spent["selective"]
