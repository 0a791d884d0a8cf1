"""Cases P11, P14, P15 and P16 of the project's list: failures of mixtures of experts in other systems."""

from __future__ import annotations

import dataclasses

import pytest

from tests.parallel.cuts import Run, check_equal, expert_models
from tests.pool import Pool

MODELS = expert_models()


def test_p11_one_norm_counts_each_expert_once(pool: Pool) -> None:
    """`check_equal` clips by the norm at 1, and compares the norms of every step."""
    check_equal(pool, "pp=2 tp=2 ep=2 micro=4", 8, MODELS["mixtral"], Run(steps=3))


def test_experts_beside_stages_of_a_copy(pool: Pool) -> None:
    """The ranks that share experts lie apart: those of the other stage are between them."""
    check_equal(pool, "pp=2 dp=2 tp=2 ep=4 zero=1 micro=2 order=dp-pp-cp-tp", 8, MODELS["mixtral"], Run(steps=2))


def test_p14_ranks_without_tokens(pool: Pool) -> None:
    """One expert a rank, one choice a token, few tokens: some ranks of ep get none in some microbatches."""
    config = MODELS["mixtral"]
    assert config.moe is not None
    few = dataclasses.replace(config, moe=dataclasses.replace(config.moe, top_k=1))
    check_equal(pool, "dp=8 ep=8 micro=1", 8, few, Run(steps=3, seq=2))


@pytest.mark.parametrize("model", ["mixtral", "deepseek"])
@pytest.mark.parametrize("text", ["tp=2", "tp=2 sequence_parallel=false", "tp=2 expert_tp=1"])
def test_p15_router_under_tp_without_ep(pool: Pool, text: str, model: str) -> None:
    check_equal(pool, f"{text} micro=4", 2, MODELS[model], Run(steps=3))


@pytest.mark.parametrize("model", ["mixtral", "dropping", "by-score"])
def test_p16_padding_in_the_losses_of_routers(pool: Pool, model: str) -> None:
    """15 tokens on cp=2 tp=2 are padded to 16: padding takes no part in balance, capacity or means."""
    check_equal(pool, "cp=2 tp=2 micro=4", 4, MODELS[model], Run(steps=3, seq=15))
    check_equal(pool, "cp=2 micro=4 context=ulysses", 2, MODELS[model], Run(steps=3, seq=15))
