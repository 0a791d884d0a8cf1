"""Making a plan fit: no more of its layers recomputed than memory asks for."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np

from plait.core.plan import Plan
from plait.parallel.layout import placement, stage_bounds, stage_layers
from plait.planner.memory import Ranks
from plait.planner.pipes import Floats
from plait.planner.space import MODES, Request
from plait.planner.tails import ROUNDING

_REPAIRS: Final = 4
"""Times that a choice which does not fit by the memory model is enlarged: a rank's peak is not quite linear in it."""
_WHOLE: Final = 6
"""Layers that are recomputed one by one in a bound; more are taken as if they could be cut."""


def recompute_to_fit(
    request: Request,
    plan: Plan,
    seconds: Mapping[str, float],
    *,
    hopes: Callable[[Mapping[int, float]], bool],
    worth: Callable[[Plan], bool],
) -> Plan | None:
    """``plan``, which recomputes nothing, with the cheapest recomputation of layers by which every rank fits.

    ``seconds``: what ``selective`` and ``full`` cost a layer. On each pipeline rank, its first layers are recomputed in
    full, the next ones selectively; how many follows from the rank's memory under the uniform plans, and the memory
    model has the last word. None where nothing fits, where a uniform plan is what comes out, where what ranks
    recompute (seconds a microbatch) leaves no ``hopes``, or where the plan that comes out is not ``worth`` it.
    """
    held = _layers_of_ranks(request, plan)
    jobs = {mode: Ranks(request.job(dataclasses.replace(plan, recompute=mode))) for mode in MODES}
    choices: dict[int, tuple[int, int]] = {}
    extra: dict[int, float] = {}
    share: float | None = None
    for rank in _telling(plan.pp):
        over = jobs["none"].of(rank).peak - request.memory
        choices[rank] = (0, 0)
        if over <= 0:
            continue
        full = over + request.memory - jobs["full"].of(rank).peak
        if full < over:
            return None
        if share is None:  # what both modes save grows with the microbatches that a rank holds
            share = max(0.0, over + request.memory - jobs["selective"].of(rank).peak) / full
        each = full / max(1, len(held[rank]))
        choices[rank] = cheapest(len(held[rank]), over, {"full": each, "selective": share * each}, seconds)
        extra[rank] = choices[rank][0] * seconds["full"] + choices[rank][1] * seconds["selective"]
        if not hopes(extra):
            return None
    chosen = [choices[rank] for rank in range(plan.pp)]
    for repair in range(_REPAIRS):
        one = mixed(request, plan, chosen)
        if one.recompute in MODES or (repair == 0 and not worth(one)):
            return None
        memory = Ranks(request.job(one))
        # A rank whose layers were left alone has been seen to fit.
        changed = [rank for rank, counts in enumerate(chosen) if counts != (0, 0)]
        fuller = [rank for rank in changed if memory.of(rank).peak > request.memory]
        if not fuller:
            return one
        for rank in fuller:
            full, selective = chosen[rank]
            chosen[rank] = (min(full + 1, len(held[rank])), max(0, min(selective, len(held[rank]) - full - 1)))
    return None


def mixed(request: Request, plan: Plan, chosen: Sequence[tuple[int, int]]) -> Plan:
    """``plan`` with so many layers of each rank recomputed in full, and so many after them selectively."""
    return dataclasses.replace(plan, recompute=_ranges(_modes(_layers_of_ranks(request, plan), chosen)))


def _telling(ranks: int) -> list[int]:
    """All ranks, those first that are fullest most often: the ends, and every eighth."""
    return list(dict.fromkeys([0, ranks - 1, min(1, ranks - 1), *range(ranks // 2, ranks, 8), *range(ranks)]))


def _layers_of_ranks(request: Request, plan: Plan) -> list[list[int]]:
    """Layers on each pipeline rank, in order."""
    held: list[list[int]] = [[] for _ in range(plan.pp)]
    for home, (first, stop) in zip(placement(plan), stage_bounds(stage_layers(request.model, plan)), strict=True):
        held[home].extend(range(first, stop))
    return [sorted(layers) for layers in held]


def cheapest(layers: int, over: float, saved: Mapping[str, float], seconds: Mapping[str, float]) -> tuple[int, int]:
    """(full, selective) layers that save ``over`` bytes for the least seconds; all in full where nothing does."""
    best, least = (layers, 0), math.inf
    for full in range(layers + 1):
        left = over - full * saved["full"]
        if left <= 0:
            selective = 0
        elif saved["selective"] > 0 and math.ceil(left / saved["selective"]) <= layers - full:
            selective = math.ceil(left / saved["selective"])
        else:
            continue
        spent = full * seconds["full"] + selective * seconds["selective"]
        if spent < least:
            best, least = (full, selective), spent
    return best


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


def _modes(held: Sequence[Sequence[int]], chosen: Sequence[tuple[int, int]]) -> list[str]:
    """The mode of every layer."""
    modes: dict[int, str] = {}
    for layers, (full, selective) in zip(held, chosen, strict=True):
        for place, layer in enumerate(layers):
            modes[layer] = "full" if place < full else "selective" if place < full + selective else "none"
    return [modes[layer] for layer in sorted(modes)]


def _ranges(modes: Sequence[str]) -> str:
    """``full:0-3 selective:4-7``; one word where all layers are alike."""
    if len(set(modes)) == 1:
        return modes[0]
    words = []
    for mode, group in itertools.groupby(enumerate(modes), key=lambda pair: pair[1]):
        layers = [layer for layer, _ in group]
        if mode != "none":
            words.append(f"{mode}:{layers[0]}" + (f"-{layers[-1]}" if len(layers) > 1 else ""))
    return " ".join(words)
