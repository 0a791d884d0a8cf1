"""Tests of the rule table: whether a plan's schedule, ZeRO, precision and the like are known and go together.

Each returns None, or why not, with the nearest values that would work.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from plait.core.compression import Compression, compress_reason
from plait.core.errors import PlanError
from plait.core.facts import Facts
from plait.core.fields import nearest_names
from plait.core.mesh import ORDERS
from plait.core.plan import SCHEDULE_SUFFIXES, either, nearest, recompute_ranges, working

SCHEDULES: Mapping[str, tuple[int, ...] | None] = {
    "gpipe": (1,),
    "1f1b": (1,),
    "interleaved": None,
    "zb-h1": (1,),
    "zb-h2": (1,),
    "zb-v": (2,),
    "dualpipe-v": (2,),
    "auto": (1, 2),
    "2bw": (1,),
}
"""Schedule -> the virtual stages a rank that it is made for (None: any number)."""
PRECISIONS = ("fp32", "bf16", "fp16", "fp8")
GATHERS = ("use", "step")


def schedule(facts: Facts) -> str | None:
    plan = facts.plan
    if plan.schedule_file is not None or plan.schedule in SCHEDULES:
        return None
    return (
        f"schedule={plan.schedule}: neither a schedule ({nearest_names(plan.schedule, SCHEDULES)}) "
        f"nor a file that ends in {' or '.join(SCHEDULE_SUFFIXES)}"
    )


def virtual(facts: Facts) -> str | None:
    plan = facts.plan
    fits = SCHEDULES.get(plan.schedule)
    if fits is None or plan.virtual in fits:
        return None
    takes = " or ".join(map(str, fits))
    other = "schedule=interleaved" if plan.virtual > 1 else "schedule=1f1b"
    return f"virtual={plan.virtual}: schedule={plan.schedule} has {takes} stages a rank; " + working(
        either("virtual", fits), other
    )


def live(facts: Facts) -> str | None:
    live, plan = facts.plan.live, facts.plan
    if live is None:
        return None
    if plan.schedule != "auto":
        return f"live={live}: only schedule=auto has a bound; " + working("no live", "schedule=auto")
    # Each of its stages needs the first microbatch to come back before anything is let go.
    least = plan.virtual
    return None if live >= least else f"live={live}: a rank has {least} stages; " + working(f"live={least}")


def two_versions(facts: Facts) -> str | None:
    plan = facts.plan
    if plan.schedule != "2bw":
        return None
    name = "schedule=2bw: two versions of the weights are kept"
    if plan.zero > 1:
        return f"{name}, which zero={plan.zero} does not do; " + working("zero=1", "schedule=1f1b")
    if plan.precision == "fp16":
        return f"{name}, and fp16's loss scale would be of another step; " + working("precision=bf16", "schedule=1f1b")
    if facts.shape.num_experts:
        return "schedule=2bw: forwards of the next step would count in the routers' loads of this one; " + working(
            "schedule=1f1b", "schedule=zb-h1"
        )
    count = facts.global_batch // (plan.micro * facts.dp)
    if count < plan.pp:
        works = nearest(
            facts.global_batch,
            lambda n: n % (plan.micro * facts.dp) == 0 and n >= plan.micro * facts.dp * plan.pp,
            high=facts.global_batch + plan.micro * facts.dp * plan.pp,
        )
        return (
            f"schedule=2bw: {count} microbatches a step on pp={plan.pp}: a version must last a whole pass; "
            + working(either("global_batch", works), "schedule=1f1b")
        )
    return None


def _data_block(facts: Facts, axis: str, does: str) -> str | None:
    """Why blocks of data ranks, given as plan key ``axis``, do not fit."""
    value = getattr(facts.plan, axis)
    ranks = facts.dp * facts.plan.cp
    if value is None or (value >= 1 and ranks % value == 0):
        return None
    works = nearest(value, lambda n: ranks % n == 0, high=ranks)
    return f"{axis}={value}: the {ranks} data ranks (dp x cp) do not divide into blocks that {does}; " + working(
        either(axis, works)
    )


def zero_group(facts: Facts) -> str | None:
    plan = facts.plan
    if plan.zero_group is not None and plan.zero == 0:
        return f"zero_group={plan.zero_group}: zero=0 shares nothing; " + working("zero=1", "no zero_group")
    return _data_block(facts, "zero_group", "share state")


def node(facts: Facts) -> str | None:
    if facts.plan.node is not None and facts.plan.compress != "none":
        return f"node={facts.plan.node} with compress={facts.plan.compress}: one or the other; " + working(
            "no node", "compress=none"
        )
    if facts.plan.node is not None and facts.plan.zero_group is not None:
        return (
            f"node={facts.plan.node} with zero_group={facts.plan.zero_group}: both say where sums are made first; "
            + working("no node", "no zero_group")
        )
    return _data_block(facts, "node", "reduce first")


def order(facts: Facts) -> str | None:
    value = facts.plan.order
    return None if value in ORDERS else f"order={value} is unknown; " + working(either("order", ORDERS))


def gather(facts: Facts) -> str | None:
    plan = facts.plan
    if plan.gather not in GATHERS:
        return f"gather={plan.gather} is unknown; " + working(either("gather", GATHERS))
    if plan.gather != "use" and plan.zero != 3:
        return f"gather={plan.gather}: only zero=3 gathers weights; " + working("zero=3", "gather=use")
    return None


def compress(facts: Facts) -> str | None:
    plan = facts.plan
    reason = compress_reason(plan.compress)
    if reason is not None or not Compression.parse(plan.compress).feedback:
        return reason
    if plan.zero > 1:
        return (
            f"compress={plan.compress}: it keeps what it did not send of whole gradients, which zero={plan.zero} "
            + ("lets go; ")
            + working("zero=1", "compress=half")
        )
    if plan.precision == "fp16":
        return f"compress={plan.compress}: what it keeps would be in units of fp16's old loss scale; " + working(
            "precision=bf16", "compress=half"
        )
    if plan.zero_group is not None:
        return (
            f"compress={plan.compress}: it chooses what to send of each whole tensor, and between blocks of "
            f"zero_group={plan.zero_group} data ranks only shards are summed; "
        ) + working("no zero_group", "compress=half")
    return None


def zero(facts: Facts) -> str | None:
    zero = facts.plan.zero
    return None if zero in (0, 1, 2, 3) else f"zero={zero}: there is no such ZeRO stage; " + working("zero=3", "zero=0")


def precision(facts: Facts) -> str | None:
    value = facts.plan.precision
    works = working(either("precision", PRECISIONS))
    return None if value in PRECISIONS else f"precision={value} is unknown; {works}"


def recompute(facts: Facts) -> str | None:
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


def bucket(facts: Facts) -> str | None:
    size = facts.plan.bucket_mb
    return None if 0 < size < math.inf else f"bucket_mb={size}: not above 0; " + working("bucket_mb=25")
