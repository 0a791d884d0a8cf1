"""Every pair of axes and levels on 4 ranks (8 where state is shared in blocks), triples and quadruples on 8.

Each plan against one process: losses, norms, every parameter's gradient, the experts that tokens go to, and the weights
after 10 steps of AdamW. See `tests.parallel.cuts` for the tolerances.
"""

from __future__ import annotations

import itertools

import pytest

from plait.core.plan import Plan
from tests.parallel.cuts import Run, check_equal, expert_models, models
from tests.pool import Pool

MODELS = models() | expert_models()
STEPS = Run(steps=10)

WAYS = {
    "tp": "tp=2 sequence_parallel=false",
    "tp+sp": "tp=2",
    "pp": "pp=2",
    "interleaved": "pp=2 schedule=interleaved virtual=2",
    "zb-v": "pp=2 schedule=zb-v virtual=2",
    "dp": "",
    "zero-1": "zero=1",
    "zero-2": "zero=2",
    "zero-3": "zero=3",
    "hsdp": "zero=3 zero_group=2",
    "ep": "ep=2",
    "ep+etp": "ep=2 expert_tp=2",
    "ring": "cp=2",
    "ulysses": "cp=2 context=ulysses",
    "gather": "cp=2 context=gather",
    "recompute": "recompute=full",
}
KINDS = (("tp", "tp+sp"), ("pp", "interleaved", "zb-v"), ("dp", "zero-1", "zero-2", "zero-3", "hsdp"), ("ep", "ep+etp"),
         ("ring", "ulysses", "gather"), ("recompute",))  # fmt: skip
"""Of a kind one is chosen: they say the same thing differently."""
PAIRS = [(a, b) for one, other in itertools.combinations(KINDS, 2) for a in one for b in other]
DENSE = ("llama", "gpt2-tied", "llama-tied", "gpt2")
EXPERTS = ("mixtral", "deepseek")

MORE = {
    "tp=2 pp=2 zero=3": "llama-tied",
    "tp=2 pp=2 cp=2": "gpt2-tied",
    "tp=2 cp=2 zero=2": "llama",
    "pp=2 cp=2 zero=3 schedule=zb-v virtual=2 context=ulysses": "llama",
    "pp=2 ep=2 zero=2": "mixtral",
    "tp=2 ep=4 zero=3 sequence_parallel=false": "deepseek",
    "tp=2 pp=2 ep=2": "deepseek",
    "cp=2 ep=4 zero=3 context=gather": "mixtral",
    "cp=2 tp=2 ep=2 expert_tp=2 zero=1": "mixtral",
    "tp=2 ep=8 expert_tp=1": "dropping",
    "pp=2 tp=2 cp=2 ep=2 schedule=zb-v virtual=2": "by-score",
    "pp=2 tp=2 zero=3 schedule=dualpipe-v virtual=2 recompute=full": "gpt2-tied",
    "pp=2 cp=2 ep=2 zero=3 recompute=full gather=step": "deepseek",
    "pp=2 zero=3 zero_group=2 schedule=interleaved virtual=2": "gpt2",
    "tp=2 pp=2 cp=2 schedule=auto virtual=2 context=ulysses": "llama",
    "pp=4 ep=2 zero=2 schedule=zb-h1": "mixtral",
}


def plan_of(*parts: str, ranks: int) -> str:
    """The parts as one plan of ``ranks`` ranks, two microbatches a step where the batch allows."""
    text = " ".join(part for part in parts if part)
    dp = Plan.parse(text).mesh(ranks).dp
    return f"{text} micro={max(1, 4 // dp)}"


def test_the_pairs_are_all_there() -> None:
    assert sorted(way for kind in KINDS for way in kind) == sorted(WAYS)
    assert len(PAIRS) == 2 * 3 + 5 * 5 + 10 * 2 + 12 * 3 + 15


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_every_pair(pool: Pool, one: str, other: str) -> None:
    chosen = EXPERTS if {"ep", "ep+etp"} & {one, other} else DENSE
    model = chosen[PAIRS.index((one, other)) % len(chosen)]
    blocks = one == "hsdp" or other == "hsdp"
    ranks = 8 if (blocks and other != "recompute") or (other == "ep+etp" and WAYS[one].startswith("pp")) else 4
    check_equal(pool, plan_of(WAYS[one], WAYS[other], ranks=ranks), ranks, MODELS[model], STEPS)


@pytest.mark.parametrize("text", list(MORE))
def test_three_and_four_at_once(pool: Pool, text: str) -> None:
    check_equal(pool, plan_of(text, ranks=8), 8, MODELS[MORE[text]], STEPS)
