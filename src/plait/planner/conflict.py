"""Which of the plan keys that a request gives stand in each other's way, and by which rule."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from plait.core.legal import RULES, SIZE_RULES, divisors
from plait.core.plan import Plan

if TYPE_CHECKING:
    from plait.planner.space import Request

_TWO_STAGES = ("interleaved", "zb-v", "dualpipe-v")
"""Schedules that have several stages a rank: their plans are tried with two."""


def conflict(request: Request) -> str | None:
    """The fewest given keys that no plan can have together, and why; None where that is due to no given key."""
    keys = dict(request.fix)
    if not _broken(request, keys):
        return None
    for name in tuple(keys):
        rest = {other: value for other, value in keys.items() if other != name}
        if _broken(request, rest):
            keys = rest
    if not keys:
        return None
    given = " with ".join(f"{name}={_text(value)}" for name, value in keys.items())
    return f"{given} is in no plan for {request.world_size} ranks: {_broken(request, keys)[0]}"


def _text(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _broken(request: Request, given: Mapping[str, Any]) -> list[str]:
    """The reasons against the plan with the ``given`` keys that has the fewest against it; none where one can work."""
    found: list[list[str]] = []
    for plan in _plans(request, given):
        facts = request.facts(plan)
        reasons = [reason for rule in SIZE_RULES if (reason := rule.test(facts))]
        reasons = reasons or [reason for rule in RULES if (reason := rule.test(facts))]
        if not reasons:
            return []
        found.append(reasons)
    return min(found, key=len)


def _plans(request: Request, given: Mapping[str, Any]) -> Iterator[Plan]:
    """Plans of all sizes that fill the ranks, and one of none but the given sizes, each with the ``given`` keys."""
    precision = request.precision if "precision" not in request.fix else "bf16"
    schedule = "interleaved" if given.get("virtual", 1) > 1 else "1f1b"
    base = {
        "schedule": schedule,
        "precision": precision,
        "virtual": 2 if given.get("schedule") in _TWO_STAGES else 1,
        **given,
    }
    world = divisors(request.world_size)
    choices = [[given[name]] if name in given else world for name in ("tp", "pp", "cp")]
    for tp, pp, cp in itertools.product(*choices):
        ranks = tp * pp * cp
        if ranks <= request.world_size and request.world_size % ranks == 0:
            yield Plan(**{**base, "tp": tp, "pp": pp, "cp": cp})
    yield Plan(**base)
