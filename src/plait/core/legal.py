"""Which plans can work: one table of rules, read by `check` and by the docs."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

from plait.core.errors import PlanError
from plait.core.fields import nearest_names
from plait.core.plan import (
    SCHEDULE_SUFFIXES,
    Plan,
    cut_stages,
    either,
    nearest,
    recompute_ranges,
    sizes_reason,
    working,
    world_reason,
)

SCHEDULES = ("gpipe", "1f1b", "interleaved")
PRECISIONS = ("fp32", "bf16")


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a model that decide which plans can cut it. ``max_positions`` 0: sequences of any length."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    ffn_size: int
    hidden_size: int
    max_positions: int


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a rule may look at."""

    plan: Plan
    shape: ModelShape
    world_size: int
    global_batch: int
    seq: int

    @property
    def dp(self) -> int:
        """Data-parallel size; 1 while the world size does not fit, which another rule reports."""
        return self.plan.dp or max(1, self.world_size // (self.plan.tp * self.plan.pp * self.plan.cp))


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One condition of a plan that works: the key it concerns, the condition in words (for docs), and its test."""

    axis: str
    says: str
    test: Callable[[Facts], str | None]
    """None, or why the plan breaks the rule, with the nearest values that would work."""


def _tp_cuts(shape: ModelShape, tp: int) -> bool:
    """Whether ``tp`` suits every width of the model: what the rules of tp suggest works for all of them at once."""
    kv = shape.num_kv_heads
    return (
        shape.num_heads % tp == 0
        and (kv % tp == 0 or tp % kv == 0)
        and shape.ffn_size % tp == 0
        and shape.vocab_size >= tp
    )


def _tp_reason(facts: Facts, fine: bool, what: str) -> str | None:
    if fine:
        return None
    shape = facts.shape
    values = nearest(facts.plan.tp, lambda n: _tp_cuts(shape, n), high=shape.num_heads)
    return f"tp={facts.plan.tp}: {what}; " + working(either("tp", values))


def _heads(facts: Facts) -> str | None:
    heads = facts.shape.num_heads
    return _tp_reason(facts, heads % facts.plan.tp == 0, f"{heads} attention heads do not divide by it")


def _kv_heads(facts: Facts) -> str | None:
    kv, tp = facts.shape.num_kv_heads, facts.plan.tp
    return _tp_reason(facts, kv % tp == 0 or tp % kv == 0, f"{kv} KV heads neither divide by it nor divide it")


def _ffn(facts: Facts) -> str | None:
    size = facts.shape.ffn_size
    return _tp_reason(facts, size % facts.plan.tp == 0, f"the feed-forward size {size} does not divide by it")


def _vocab(facts: Facts) -> str | None:
    size = facts.shape.vocab_size
    return _tp_reason(facts, size >= facts.plan.tp, f"a vocabulary of {size} leaves ranks without a token")


def _depth(facts: Facts) -> str | None:
    plan, layers = facts.plan, facts.shape.num_layers
    if plan.stages is not None or layers >= plan.stage_count:
        return None
    pps = nearest(plan.pp, lambda n: n * plan.virtual <= layers, high=plan.pp)
    virtuals = nearest(plan.virtual, lambda n: n * plan.pp <= layers, high=plan.virtual)
    works = working(either("pp", pps), either("virtual", virtuals), "" if pps or virtuals else "pp=1 virtual=1")
    return (
        f"pp={plan.pp} virtual={plan.virtual}: {plan.stage_count} virtual stages for {layers} layers would leave some "
        f"empty; {works}"
    )


def _stages(facts: Facts) -> str | None:
    plan, layers = facts.plan, facts.shape.num_layers
    if plan.stages is None:
        return None
    name = "stages=" + ",".join(map(str, plan.stages))
    roomy = layers >= plan.stage_count
    even = ",".join(map(str, cut_stages([1.0] * layers, plan.stage_count))) if roomy else ""
    works = working(
        f"stages={even}" if roomy else f"{plan.stage_count} counts that sum to {layers}, 0 at the ends alone"
    )
    if len(plan.stages) != plan.stage_count:
        return f"{name} has {len(plan.stages)} counts for {plan.stage_count} virtual stages (pp x virtual); {works}"
    if sum(plan.stages) != layers:
        return f"{name} sums to {sum(plan.stages)}, the model has {layers} layers; {works}"
    if min(plan.stages) < 0 or 0 in plan.stages[1:-1]:
        return f"{name}: only the first and the last stage may hold no layer; {works}"
    return None


def _schedule(facts: Facts) -> str | None:
    plan = facts.plan
    if plan.schedule_file is not None or plan.schedule in SCHEDULES:
        return None
    return (
        f"schedule={plan.schedule}: neither a schedule ({nearest_names(plan.schedule, SCHEDULES)}) "
        f"nor a file that ends in {' or '.join(SCHEDULE_SUFFIXES)}"
    )


def _virtual(facts: Facts) -> str | None:
    plan = facts.plan
    if plan.virtual == 1 or plan.schedule not in ("gpipe", "1f1b"):
        return None
    return f"virtual={plan.virtual}: schedule={plan.schedule} has one stage a rank; " + working(
        "virtual=1", "schedule=interleaved"
    )


def _batch(facts: Facts) -> str | None:
    micro, dp, batch = facts.plan.micro, facts.dp, facts.global_batch
    if batch >= 1 and batch % (micro * dp) == 0:
        return None
    return f"micro={micro} with dp={dp}: a global batch of {batch} is not a multiple of {micro * dp}; " + working(
        either("micro", nearest(micro, lambda n: batch % (n * dp) == 0, high=max(batch, 0))),
        either("dp", nearest(dp, lambda n: batch % (n * micro) == 0, high=max(batch, 0))),
        either("global_batch", nearest(batch, lambda n: n % (micro * dp) == 0, high=max(batch, 0) + micro * dp)),
    )


def _rows(facts: Facts) -> str | None:
    plan, seq, limit = facts.plan, facts.seq, facts.shape.max_positions
    if not plan.sp or plan.micro * seq % plan.tp == 0:
        return None
    return (
        f"tp={plan.tp}: sequence parallelism cuts the {plan.micro} x {seq} tokens of a microbatch, which do not divide "
        f"by it; "
        + working(
            either("seq", nearest(seq, lambda n: plan.micro * n % plan.tp == 0, high=limit or seq + plan.tp)),
            either("micro", nearest(plan.micro, lambda n: n * seq % plan.tp == 0, high=plan.micro + plan.tp)),
            "sequence_parallel=false",
        )
    )


def _positions(facts: Facts) -> str | None:
    limit = facts.shape.max_positions
    if limit == 0 or facts.seq <= limit:
        return None
    return f"seq={facts.seq}: the model has {limit} learned positions; " + working(f"seq={limit}")


def _only_one(facts: Facts, axis: str) -> str | None:
    value = getattr(facts.plan, axis)
    return None if value == 1 else f"{axis}={value} is not available in this version; " + working(f"{axis}=1")


def _zero(facts: Facts) -> str | None:
    zero = facts.plan.zero
    if zero in (0, 1):
        return None
    why = "ZeRO 2 and 3 are not available in this version" if zero in (2, 3) else "there is no such ZeRO stage"
    return f"zero={zero}: {why}; " + working("zero=1", "zero=0")


def _precision(facts: Facts) -> str | None:
    value = facts.plan.precision
    works = working(either("precision", PRECISIONS))
    return None if value in PRECISIONS else f"precision={value} is unknown; {works}"


def _recompute(facts: Facts) -> str | None:
    try:
        ranges = recompute_ranges(facts.plan.recompute)
    except PlanError as error:
        return str(error)
    layers, seen = facts.shape.num_layers, -1
    for _, first, last in sorted(ranges, key=lambda row: row[1]):
        last = layers - 1 if last is None else last
        if not first <= last < layers:
            return f"recompute={facts.plan.recompute}: {first}-{last} is no range of the layers 0-{layers - 1}"
        if first <= seen:
            return f"recompute={facts.plan.recompute}: layer {first} is named twice; name each layer once"
        seen = last
    return None


def _bucket(facts: Facts) -> str | None:
    size = facts.plan.bucket_mb
    return None if 0 < size < math.inf else f"bucket_mb={size}: not above 0; " + working("bucket_mb=25")


def _at_least_one(axis: str, facts: Facts) -> str | None:
    return sizes_reason(facts.plan, (axis,))


SIZE_RULES = tuple(
    Rule(axis=axis, says=f"{axis} is at least 1", test=functools.partial(_at_least_one, axis))
    for axis in ("tp", "pp", "dp", "cp", "ep", "micro", "virtual")
)
"""Tested first: the other rules divide by these sizes."""

RULES = (
    *SIZE_RULES,
    Rule(axis="dp", says="pp x dp x cp x tp is the world size", test=lambda f: world_reason(f.plan, f.world_size)),
    Rule(axis="tp", says="attention heads divide by tp", test=_heads),
    Rule(axis="tp", says="KV heads divide by tp, or tp by KV heads (several ranks then hold each)", test=_kv_heads),
    Rule(axis="tp", says="the feed-forward size divides by tp", test=_ffn),
    Rule(axis="tp", says="the vocabulary has at least tp tokens (it need not divide: it is cut unevenly)", test=_vocab),
    Rule(axis="tp", says="with sequence parallelism, micro x seq divides by tp", test=_rows),
    Rule(axis="pp", says="there are at least pp x virtual layers, unless stages is given", test=_depth),
    Rule(axis="stages", says="pp x virtual counts that sum to the layers; only the ends may be 0", test=_stages),
    Rule(axis="schedule", says="gpipe, 1f1b, interleaved, or a .txt/.schedule file", test=_schedule),
    Rule(axis="virtual", says="above 1 needs schedule=interleaved or a schedule file", test=_virtual),
    Rule(axis="micro", says="the global batch is a multiple of micro x dp", test=_batch),
    Rule(axis="seq", says="a sequence is no longer than learned positions", test=_positions),
    Rule(axis="cp", says="cp is 1 in this version", test=lambda facts: _only_one(facts, "cp")),
    Rule(axis="ep", says="ep is 1 in this version", test=lambda facts: _only_one(facts, "ep")),
    Rule(axis="zero", says="ZeRO stage 0 or 1 in this version", test=_zero),
    Rule(axis="precision", says="fp32 or bf16", test=_precision),
    Rule(axis="recompute", says="modes are known, ranges lie within the layers and do not overlap", test=_recompute),
    Rule(axis="bucket_mb", says="bucket_mb is above 0", test=_bucket),
)
"""What makes a plan legal: `check` and the docs read this one table."""


def check(plan: Plan, shape: ModelShape, *, world_size: int, global_batch: int, seq: int) -> None:
    """Raise PlanError with every rule of `RULES` that the plan breaks, one a line; return when it can work.

    Each line's suggestion looks at its own rule; the last line names whole plans that pass all of them, where changing
    tp, pp, dp or micro is enough. ``global_batch`` is in samples, ``seq`` in tokens a sample.
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
    """Up to ``most`` plans for these ranks and this batch that break no rule, fewest changes of tp, pp, micro first."""
    plan, world_size = facts.plan, facts.world_size
    found: list[tuple[int, float, Plan]] = []
    for tp in _divisors(world_size):
        for pp in _divisors(world_size // tp):
            dp = world_size // (tp * pp)
            for micro in sorted({plan.micro, *_divisors(facts.global_batch // dp)}):
                other = dataclasses.replace(plan, tp=tp, pp=pp, dp=None if plan.dp is None else dp, micro=micro)
                if any(rule.test(dataclasses.replace(facts, plan=other)) for rule in RULES):
                    continue
                pairs = [(tp, plan.tp), (pp, plan.pp), (micro, plan.micro)]
                changed = sum(new != old for new, old in pairs)
                distance = sum(abs(math.log(new / max(old, 1))) for new, old in pairs)
                found.append((changed, distance, other))
    return [other for _, _, other in sorted(found, key=lambda row: row[:2])[:most]]


def _divisors(size: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(max(size, 0)) + 1) if size % n == 0]
    return sorted({*small, *(size // n for n in small)})
