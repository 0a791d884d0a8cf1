"""Which plans can work: one table of rules, read by `check` and by the docs."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

from plait.core import choices, fitting
from plait.core.errors import PlanError
from plait.core.facts import Facts, ModelShape
from plait.core.plan import NEAR, Plan, sizes_reason, world_reason


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One condition of a plan that works: the key it concerns, the condition in words (for docs), and its test."""

    axis: str
    says: str
    test: Callable[[Facts], str | None]
    """None, or why the plan breaks the rule, with the nearest values that would work."""


def _at_least_one(axis: str, facts: Facts) -> str | None:
    return sizes_reason(facts.plan, (axis,))


SIZE_RULES = tuple(
    Rule(axis=axis, says=f"{axis} is at least 1", test=functools.partial(_at_least_one, axis))
    for axis in ("tp", "pp", "dp", "cp", "ep", "expert_tp", "micro", "virtual", "live", "zero_group", "node")
)
"""Tested first: the other rules divide by these sizes."""

RULES = (
    *SIZE_RULES,
    Rule(axis="dp", says="pp x dp x cp x tp is the world size", test=lambda f: world_reason(f.plan, f.world_size)),
    Rule(axis="order", says="pp-dp-cp-tp or dp-pp-cp-tp", test=choices.order),
    Rule(axis="tp", says="attention heads divide by tp", test=fitting.heads),
    Rule(
        axis="tp", says="KV heads divide by tp, or tp by KV heads (several ranks then hold each)", test=fitting.kv_heads
    ),
    Rule(axis="tp", says="the feed-forward size divides by tp", test=fitting.ffn),
    Rule(axis="tp", says="the width of shared experts divides by tp", test=fitting.shared),
    Rule(
        axis="tp",
        says="the vocabulary has at least tp tokens (it need not divide: it is cut unevenly)",
        test=fitting.vocab,
    ),
    Rule(
        axis="tp",
        says="with sequence parallelism or experts, micro x seq divides by tp, unless cp is above 1",
        test=fitting.rows,
    ),
    Rule(axis="pp", says="there are at least pp x virtual layers, unless stages is given", test=fitting.depth),
    Rule(axis="stages", says="pp x virtual counts that sum to the layers; only the ends may be 0", test=fitting.stages),
    Rule(axis="schedule", says=f"{', '.join(choices.SCHEDULES)}, or a .txt/.schedule file", test=choices.schedule),
    Rule(
        axis="virtual",
        says="1 for gpipe, 1f1b, zb-h1, zb-h2, 2bw; 2 for zb-v, dualpipe-v; 1 or 2 for auto; any for the others",
        test=choices.virtual,
    ),
    Rule(axis="live", says="only with schedule=auto, and no less than virtual", test=choices.live),
    Rule(
        axis="schedule",
        says="2bw keeps two weight versions: zero 0 or 1, no fp16, no experts, at least pp microbatches",
        test=choices.two_versions,
    ),
    Rule(axis="micro", says="the global batch is a multiple of micro x dp", test=fitting.batch),
    Rule(axis="seq", says="a sequence is no longer than learned positions", test=fitting.positions),
    Rule(axis="context", says="ring, gather, or ulysses with heads that divide by tp x cp", test=fitting.context),
    Rule(axis="ep", says="ep x expert_tp divides dp x cp x tp", test=fitting.expert_ranks),
    Rule(axis="ep", says="the experts divide by ep", test=fitting.experts),
    Rule(axis="expert_tp", says="an expert's width divides by expert_tp", test=fitting.expert_ffn),
    Rule(axis="zero", says="ZeRO stage 0 to 3", test=choices.zero),
    Rule(axis="zero_group", says="divides dp x cp, with zero above 0", test=choices.zero_group),
    Rule(axis="gather", says="use, or step with zero=3", test=choices.gather),
    Rule(
        axis="compress",
        says="none, half, topk:SHARE or powersgd:RANK; these two with zero 0 or 1, no fp16, no zero_group",
        test=choices.compress,
    ),
    Rule(axis="node", says="divides dp x cp; without compress and zero_group", test=choices.node),
    Rule(axis="precision", says="fp32, bf16, fp16, or fp8 on a device that has it", test=choices.precision),
    Rule(
        axis="recompute",
        says="modes are known, ranges lie within the layers and do not overlap",
        test=choices.recompute,
    ),
    Rule(axis="bucket_mb", says="bucket_mb is above 0", test=choices.bucket),
)
"""What makes a plan legal: `check` and the docs read this one table."""


def check(plan: Plan, shape: ModelShape, *, world_size: int, global_batch: int, seq: int) -> None:
    """Raise PlanError with every rule of `RULES` that the plan breaks, one a line; return when it can work.

    Each line's suggestion looks at its own rule; the last line names whole plans that pass all of them, where changing
    tp, pp, dp, micro or ep is enough. ``global_batch`` is in samples, ``seq`` in tokens a sample.
    """
    facts = Facts(plan=plan, shape=shape, world_size=world_size, global_batch=global_batch, seq=seq)
    reasons = [reason for rule in SIZE_RULES if (reason := rule.test(facts))]
    if not reasons:
        reasons = [reason for rule in RULES if (reason := rule.test(facts))]
        near = nearest_plans(facts) if reasons else []
        if near:
            reasons.append(f"on {world_size} ranks, these pass every rule: " + "; ".join(map(str, near)))
    if reasons:
        raise PlanError("\n  ".join([f"plan {str(plan) or 'of one rank'!r} cannot work:", *reasons]))


def nearest_plans(facts: Facts, most: int = 3) -> list[Plan]:
    """Up to ``most`` plans for these ranks and this batch that break no rule, fewest changes of tp, pp, micro, ep."""
    plan, world_size = facts.plan, facts.world_size
    found: list[tuple[int, float, Plan]] = []
    copies = world_size // plan.cp if world_size % plan.cp == 0 else 0
    eps = divisors(facts.shape.num_experts) if plan.ep > 1 else [1]
    for tp in divisors(copies):
        for pp in divisors(copies // tp):
            dp = copies // (tp * pp)
            micros = sorted({plan.micro, *divisors(facts.global_batch // dp)})
            for micro, ep in itertools.product(micros, eps or [1]):
                other = dataclasses.replace(plan, tp=tp, pp=pp, dp=None if plan.dp is None else dp, micro=micro, ep=ep)
                if any(rule.test(dataclasses.replace(facts, plan=other)) for rule in RULES):
                    continue
                pairs = [(tp, plan.tp), (pp, plan.pp), (micro, plan.micro), (ep, plan.ep)]
                changed = sum(new != old for new, old in pairs)
                distance = sum(abs(math.log(new / max(old, 1))) for new, old in pairs)
                found.append((changed, distance, other))
    return [other for _, _, other in sorted(found, key=lambda row: row[:2])[:most]]


def divisors(size: int) -> list[int]:
    """Numbers that divide ``size``, in order; of huge sizes those up to `NEAR`, and their counterparts."""
    return list(_divisors(size))


@functools.cache
def _divisors(size: int) -> tuple[int, ...]:
    small = [n for n in range(1, min(math.isqrt(max(size, 0)), NEAR) + 1) if size % n == 0]
    return tuple(sorted({*small, *(size // n for n in small)}))
