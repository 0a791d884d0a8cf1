"""Experts placed by load in a run: where they go, and that the run stays the one that it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plait.core.config import dump, load, loads
from plait.parallel.placement import identity
from plait.parallel.placement import loads as rank_loads
from plait.train import rebalance
from plait.train.data import write_tokens
from plait.train.rebalance import WORTH, better, shadows_for
from plait.train.run import build, open_samples, prepare
from plait.train.step import Steps
from tests.pool import Connect, Pool

SKEWED = (40.0, 30.0, 1.0, 1.0, 1.0, 1.0, 13.0, 13.0)
SETS = (
    "model.preset=moe-tiny", "model.hidden_size=32", "model.num_layers=2", "model.num_heads=4", "model.num_kv_heads=2",
    'model.moe={"num_experts"=4, "top_k"=1, "ffn_size"=24}', "data.seq=16", "train.global_batch=8", "plan.tp=1",
    "plan.pp=1", "plan.micro=2", "plan.ep=2", "optimizer.warmup=0",
)  # fmt: skip


def test_experts_move_where_that_pays() -> None:
    now = identity(8, 2)
    found = better(SKEWED, now)
    assert found is not None
    assert max(rank_loads(found, SKEWED)) < max(rank_loads(now, SKEWED)) * (1 - WORTH)
    assert better(SKEWED, found) is None, "once is enough"
    assert better((1.0,) * 8, now) is None, "nothing to gain"
    assert better((0.0,) * 8, now) is None


def test_only_what_alone_is_more_than_an_even_share_gets_copies() -> None:
    assert shadows_for((9.0, 1.0, 1.0, 1.0), 2) == 1
    assert shadows_for((3.0, 3.0, 3.0, 3.0), 2) == 0
    assert shadows_for((5.0, 5.0, 1.0, 1.0), 4) == 2


def moved_run(connect: Connect, text: str, ranks: int) -> dict[str, Any]:
    """Losses and norms of some steps, and where the experts of the first layer ended; they are looked at every 2."""
    config = loads(text)
    setup = prepare(config, world_size=ranks)
    world = connect(setup.plan.mesh(ranks))
    parallel = build(setup, world)
    steps = Steps(setup, parallel, open_samples(setup), 6)
    every, rebalance.EVERY = rebalance.EVERY, 2
    try:
        taken = [steps.take(step) for step in range(6)]
    finally:
        rebalance.EVERY = every
    last = parallel.mixtures[0].placement
    return {
        "losses": [one.loss for one in taken],
        "norms": [one.norm for one in taken],
        "placed": (last.order, last.shadows),
    }


@pytest.mark.parametrize("plan", [["plan.dp=2"], ["plan.dp=4", "plan.zero=3"], ["plan.dp=2", "plan.tp=2"]])
def test_a_run_goes_on_as_it_was(pool: Pool, tmp_path: Path, plan: list[str]) -> None:
    tokens = tmp_path / "tokens.bin"
    write_tokens(tokens, [[7, 7, 7, 3] * 200], dtype="uint16", vocab_size=256, tokenizer="bytes")
    ranks = 2 if plan == ["plan.dp=2"] else 4
    found = {}
    for placement in ("static", "load"):
        text = dump(load(None, [*SETS, *plan, f"data.tokens={tokens}", f"moe.placement={placement}"]))
        results = pool.run(ranks, moved_run, text, ranks)
        assert all(result == results[0] for result in results)
        found[placement] = results[0]
    assert found["static"]["placed"] == ((0, 1, 2, 3), ())
    assert found["load"]["placed"] != found["static"]["placed"], "two tokens leave most experts idle: some must move"
    assert found["load"]["losses"] == pytest.approx(found["static"]["losses"], rel=1e-5)
    assert found["load"]["norms"] == pytest.approx(found["static"]["norms"], rel=1e-4)
