"""Every pair of ways to cut a run, and three at once, against one process.

See `tests.parallel.cuts` for the tolerances and why AdamW's eps is 1e-4 here.
"""

from __future__ import annotations

import pytest

from tests.parallel.cuts import Run, check_equal, models
from tests.pool import Pool

MODELS = models()
TENSOR = ("tp=2", "tp=2 sequence_parallel=false")
PIPELINE = ("pp=2", "pp=2 schedule=interleaved virtual=2")
DATA = ("dp=2", "dp=2 zero=1")
ALONE = [*TENSOR, *PIPELINE, *DATA]
PAIRS = [
    f"{a} {b}" for one, other in ((TENSOR, PIPELINE), (TENSOR, DATA), (PIPELINE, DATA)) for a in one for b in other
]
TRIPLE = "tp=2 pp=2 dp=2 zero=1"
STEPS = Run(steps=10)


def cut(pool: Pool, text: str, world_size: int, model: str) -> None:
    micro = 2 if "dp=2" in text else 4  # two microbatches a step: accumulation is in every test
    check_equal(pool, f"{text} micro={micro}", world_size, MODELS[model], STEPS)


@pytest.mark.parametrize("model", ["llama", "gpt2", "llama-tied", "gpt2-tied"])
@pytest.mark.parametrize("text", ALONE)
def test_one_way(pool: Pool, text: str, model: str) -> None:
    cut(pool, text, 2, model)


@pytest.mark.parametrize("model", ["llama", "gpt2", "llama-tied", "gpt2-tied"])
@pytest.mark.parametrize("text", PAIRS)
def test_every_pair(pool: Pool, text: str, model: str) -> None:
    cut(pool, text, 4, model)


@pytest.mark.parametrize("model", list(MODELS))
def test_three_at_once(pool: Pool, model: str) -> None:
    cut(pool, TRIPLE, 8, model)


@pytest.mark.parametrize(("text", "world_size"), [("tp=2", 2), ("tp=4", 4), ("tp=2 pp=2", 4), ("pp=2 dp=2 zero=1", 4)])
def test_norms_of_queries_and_keys(pool: Pool, text: str, world_size: int) -> None:
    cut(pool, text, world_size, "qwen3")


@pytest.mark.parametrize("text", ["pp=2 dp=2 zero=2", "pp=2 dp=2 zero=3 zero_group=1 schedule=zb-h1"])
def test_stages_of_a_copy_side_by_side(pool: Pool, text: str) -> None:
    cut(pool, f"{text} order=dp-pp-cp-tp", 4, "llama-tied")


@pytest.mark.parametrize("text", ["tp=2 dp=2 zero=1", "tp=2 pp=2", "pp=2 dp=2", "pp=2 dp=2 order=dp-pp-cp-tp"])
def test_over_gloo(pool: Pool, text: str) -> None:
    check_equal(pool, f"{text} micro=2", 4, MODELS["gpt2-tied"], Run(steps=2, transport="gloo"))
