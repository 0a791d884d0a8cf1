"""Whether the plan keys that a request gives can stand in any plan: looked at before plans are, so that the reason is
the key's own and not that nothing was found."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Final

from plait.core import choices, fitting
from plait.core.errors import PlanError
from plait.core.facts import Facts
from plait.core.legal import SIZE_RULES
from plait.core.plan import Plan, working, world_reason
from plait.planner.space import Request

_RULES: Final[tuple[tuple[Callable[[Facts], str | None], frozenset[str]], ...]] = (
    (choices.precision, frozenset()),
    (choices.zero, frozenset()),
    (choices.schedule, frozenset()),
    (choices.order, frozenset()),
    (choices.recompute, frozenset()),
    (choices.bucket, frozenset()),
    (choices.compress, frozenset()),
    (choices.virtual, frozenset({"schedule", "virtual"})),
    (choices.live, frozenset({"live"})),
    (fitting.positions, frozenset()),
    (fitting.heads, frozenset({"tp"})),
    (fitting.kv_heads, frozenset({"tp"})),
    (fitting.ffn, frozenset({"tp"})),
    (fitting.shared, frozenset({"tp"})),
    (fitting.vocab, frozenset({"tp"})),
    (fitting.experts, frozenset({"ep"})),
    (fitting.expert_ffn, frozenset({"expert_tp"})),
    (fitting.context, frozenset({"context"})),
)
"""Rules whose answer follows from the keys beside them: no value of another key that is searched mends what they
refuse."""


def require_possible(request: Request) -> None:
    """PlanError with the first given key that no plan can have, why, and what works, in one line."""
    for reason in _reasons(request):
        raise PlanError(reason)


def _reasons(request: Request) -> Iterator[str]:
    fix = request.fix
    plan = Plan(**request.base())
    facts = request.facts(plan)
    yield from (reason for rule in SIZE_RULES if (reason := rule.test(facts)))
    yield from (reason for test, needed in _RULES if needed <= fix.keys() and (reason := test(facts)))
    device = request.topology.device
    if plan.precision == "fp8" and "fp8" not in device.peaks:
        yield f"precision=fp8: {device.name} has no such units; " + working("precision=bf16")
    shared = plan if fix.get("zero") is not None else dataclasses.replace(plan, zero=3)
    if reason := choices.gather(request.facts(shared)):
        yield reason
    if plan.zero_group is not None and fix.get("zero") == 0 and (reason := choices.zero_group(facts)):
        yield reason
    if plan.stages is not None:
        alone = dataclasses.replace(plan, pp=max(1, len(plan.stages)), virtual=1)
        if reason := fitting.stages(request.facts(alone)):
            yield reason
    if reason := world_reason(dataclasses.replace(plan, dp=None), request.world_size):
        yield reason
