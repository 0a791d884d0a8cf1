"""Tests of the rule table: whether a plan's cuts fit the model, its layers, its experts and its batch.

Each returns None, or why not, with the nearest values that would work.
"""

from __future__ import annotations

from plait.core.facts import Facts, ModelShape
from plait.core.plan import cut_stages, either, fold_reason, nearest, working

CONTEXTS = ("ring", "ulysses", "gather")


def _tp_cuts(shape: ModelShape, tp: int) -> bool:
    """Whether ``tp`` suits every width of the model: what the rules of tp suggest works for all of them at once."""
    kv = shape.num_kv_heads
    return (
        shape.num_heads % tp == 0
        and (kv % tp == 0 or tp % kv == 0)
        and shape.ffn_size % tp == 0
        and shape.shared_ffn % tp == 0
        and shape.vocab_size >= tp
    )


def _tp_reason(facts: Facts, fine: bool, what: str) -> str | None:
    if fine:
        return None
    shape = facts.shape
    values = nearest(facts.plan.tp, lambda n: _tp_cuts(shape, n), high=shape.num_heads)
    return f"tp={facts.plan.tp}: {what}; " + working(either("tp", values))


def heads(facts: Facts) -> str | None:
    heads = facts.shape.num_heads
    return _tp_reason(facts, heads % facts.plan.tp == 0, f"{heads} attention heads do not divide by it")


def kv_heads(facts: Facts) -> str | None:
    kv, tp = facts.shape.num_kv_heads, facts.plan.tp
    return _tp_reason(facts, kv % tp == 0 or tp % kv == 0, f"{kv} KV heads neither divide by it nor divide it")


def ffn(facts: Facts) -> str | None:
    size = facts.shape.ffn_size
    return _tp_reason(facts, size % facts.plan.tp == 0, f"the feed-forward size {size} does not divide by it")


def shared(facts: Facts) -> str | None:
    size = facts.shape.shared_ffn
    return _tp_reason(facts, size % facts.plan.tp == 0, f"the shared experts' width {size} does not divide by it")


def vocab(facts: Facts) -> str | None:
    size = facts.shape.vocab_size
    return _tp_reason(facts, size >= facts.plan.tp, f"a vocabulary of {size} leaves ranks without a token")


def depth(facts: Facts) -> str | None:
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


def stages(facts: Facts) -> str | None:
    plan, layers = facts.plan, facts.shape.num_layers
    if plan.stages is None:
        return None
    fits = len(plan.stages) == plan.stage_count and sum(plan.stages) == layers
    if fits and min(plan.stages) >= 0 and 0 not in plan.stages[1:-1]:
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


def context(facts: Facts) -> str | None:
    plan, heads = facts.plan, facts.shape.num_heads
    if plan.context not in CONTEXTS:
        return f"context={plan.context} is unknown; " + working(either("context", CONTEXTS))
    if plan.context != "ulysses" or heads % (plan.tp * plan.cp) == 0:
        return None
    cps = nearest(plan.cp, lambda n: heads % (plan.tp * n) == 0, high=heads)
    return f"context=ulysses: {heads} attention heads do not divide by tp x cp = {plan.tp * plan.cp}; " + working(
        either("cp", cps), "context=ring"
    )


def experts(facts: Facts) -> str | None:
    plan, experts = facts.plan, facts.shape.num_experts
    if plan.ep == 1 or (experts and experts % plan.ep == 0):
        return None
    why = f"{experts} experts do not divide by it" if experts else "the model has no experts"
    eps = nearest(plan.ep, lambda n: experts % n == 0, high=experts) if experts else [1]
    return f"ep={plan.ep}: {why}; " + working(either("ep", eps))


def expert_ffn(facts: Facts) -> str | None:
    plan, size = facts.plan, facts.shape.expert_ffn
    if size % plan.etp == 0:
        return None
    works = nearest(plan.etp, lambda n: size % n == 0, high=size)
    return f"expert_tp={plan.etp}: an expert's width {size} does not divide by it; " + working(
        either("expert_tp", works)
    )


def expert_ranks(facts: Facts) -> str | None:
    plan = facts.plan
    rest = plan.tp * plan.pp * plan.cp
    if facts.world_size % rest or facts.world_size < rest:
        return None  # another rule says so
    return fold_reason(plan, facts.world_size)


def batch(facts: Facts) -> str | None:
    micro, dp, batch = facts.plan.micro, facts.dp, facts.global_batch
    if batch >= 1 and batch % (micro * dp) == 0:
        return None
    return f"micro={micro} with dp={dp}: a global batch of {batch} is not a multiple of {micro * dp}; " + working(
        either("micro", nearest(micro, lambda n: batch % (n * dp) == 0, high=max(batch, 0))),
        either("dp", nearest(dp, lambda n: batch % (n * micro) == 0, high=max(batch, 0))),
        either("global_batch", nearest(batch, lambda n: n % (micro * dp) == 0, high=max(batch, 0) + micro * dp)),
    )


def rows(facts: Facts) -> str | None:
    plan, seq, limit = facts.plan, facts.seq, facts.shape.max_positions
    experts = facts.shape.num_experts > 0
    # A context-parallel share is padded until it divides.
    if not (plan.sp or experts) or plan.micro * seq % plan.tp == 0 or plan.cp > 1:
        return None
    who = "sequence parallelism cuts" if plan.sp else "the ranks share, for the experts,"
    return (
        f"tp={plan.tp}: {who} the {plan.micro} x {seq} tokens of a microbatch, which do not divide by it; "
        + working(
            either("seq", nearest(seq, lambda n: plan.micro * n % plan.tp == 0, high=limit or seq + plan.tp)),
            either("micro", nearest(plan.micro, lambda n: n * seq % plan.tp == 0, high=plan.micro + plan.tp)),
            "" if experts else "sequence_parallel=false",
        )
    )


def positions(facts: Facts) -> str | None:
    limit = facts.shape.max_positions
    if limit == 0 or facts.seq <= limit:
        return None
    return f"seq={facts.seq}: the model has {limit} learned positions; " + working(f"seq={limit}")
