"""The router against a slow plain reference: choice, weights, capacity."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from plait.models.batch import Batch
from plait.models.moe import Choice, Router, Sums
from tests.models.routing import BASE, HIDDEN, ROUTINGS, ROWS, SAMPLES, SEQ, make_batch, make_router, make_rows, padded


def slow_choice(h_D: Tensor, router: Router) -> list[tuple[int, float]]:
    """[(expert, weight)] of one row, by loops over Python numbers."""
    config = router.config
    logits = (router.weight.detach().double() @ h_D.double()).tolist()
    if config.score == "softmax":
        whole = sum(math.exp(logit - max(logits)) for logit in logits)
        scores = [math.exp(logit - max(logits)) / whole for logit in logits]
    else:
        scores = [1 / (1 + math.exp(-logit)) for logit in logits]
    biased = scores if router.bias is None else [s + b for s, b in zip(scores, router.bias.tolist(), strict=True)]
    each = config.num_experts // config.groups
    groups = [range(group * each, (group + 1) * each) for group in range(config.groups)]
    ranked = sorted(groups, key=lambda group: -sum(sorted((biased[e] for e in group), reverse=True)[:2]))
    allowed = (
        range(config.num_experts) if config.groups == 1 else sorted(e for g in ranked[: config.top_groups] for e in g)
    )
    chosen = sorted(allowed, key=lambda expert: (-biased[expert], expert))[: config.top_k]
    weights = [scores[expert] for expert in chosen]
    if config.normalise:
        weights = [weight / sum(weights) for weight in weights]
    return [(expert, weight * config.scale) for expert, weight in zip(chosen, weights, strict=True)]


@pytest.mark.parametrize("name", sorted(ROUTINGS))
def test_choice_and_weights_are_those_of_the_slow_reference(name: str) -> None:
    router, h_ND = make_router(ROUTINGS[name]), make_rows()
    choice: Choice = router(h_ND, make_batch())
    assert choice.kept_NK is None
    assert choice.weights_NK.dtype == torch.float32
    for row in range(ROWS):
        want = slow_choice(h_ND[row], router)
        assert choice.experts_NK[row].tolist() == [expert for expert, _ in want], row
        torch.testing.assert_close(choice.weights_NK[row], torch.tensor([w for _, w in want]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", sorted(ROUTINGS))
def test_gradients_of_the_weights_agree_with_finite_differences(name: str) -> None:
    router, h_ND = make_router(ROUTINGS[name]).double(), make_rows().double().requires_grad_()
    mix_NK = torch.randn(ROWS, router.config.top_k, dtype=torch.float64)

    def value() -> Tensor:
        return (router(h_ND, make_batch()).weights_NK * mix_NK).sum()

    value().backward()
    for moved in (h_ND, router.weight):
        assert moved.grad is not None
        step = torch.randn(moved.shape, dtype=torch.float64)
        with torch.no_grad():
            moved += 1e-6 * step
            above = value()
            moved -= 2e-6 * step
            below = value()
            moved += 1e-6 * step
        torch.testing.assert_close((above - below) / 2e-6, (moved.grad * step).sum(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", sorted(ROUTINGS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_takes_the_same_experts_whichever_rows_are_beside_it(name: str, dtype: torch.dtype) -> None:
    router, h_ND = make_router(ROUTINGS[name]).to(dtype), make_rows().to(dtype)
    whole: Choice = router(h_ND, make_batch())
    for step in (1, 5, 7):
        for first in range(0, ROWS, step):
            rows = slice(first, min(first + step, ROWS))
            part: Choice = router(h_ND[rows], make_batch(), rows)
            assert torch.equal(part.experts_NK, whole.experts_NK[rows])
            assert torch.equal(part.weights_NK, whole.weights_NK[rows])


def test_logits_are_products_in_fp64() -> None:
    """1e8 + 1 - 1e8 is 1 in fp64 in any order, and 0 or 1 in fp32: a choice would hang on the order of the sum."""
    router, h_ND = make_router(dataclasses.replace(BASE, normalise=False)), torch.zeros(ROWS, HIDDEN)
    h_ND[:, 0], h_ND[:, 7], h_ND[:, 15] = 1e8, 1.0, -1e8
    with torch.no_grad():
        router.weight.zero_()[3] = 1.0
        router.weight[5] = 0.5
    choice: Choice = router(h_ND, make_batch())
    scores = torch.tensor([0.0, 0, 0, 1, 0, 0.5, 0, 0]).softmax(0)
    assert torch.equal(choice.experts_NK, torch.tensor([3, 5]).expand(ROWS, 2))
    torch.testing.assert_close(choice.weights_NK, scores[[3, 5]].expand(ROWS, 2))


def test_of_equal_scores_the_lower_expert_comes_first() -> None:
    for config in (BASE, dataclasses.replace(BASE, score="sigmoid", bias=True, groups=4, top_groups=2)):
        router = make_router(config)
        with torch.no_grad():
            router.weight.copy_(router.weight[:1].expand_as(router.weight))
            if router.bias is not None:
                router.bias.zero_()
        choice: Choice = router(make_rows(), make_batch())
        assert torch.equal(choice.experts_NK, torch.tensor([0, 1]).expand(ROWS, 2))


# Capacity


def slow_kept(
    experts_NK: Tensor, score_NK: Tensor, real_N: Tensor, factor: float, experts: int, by_score: bool
) -> list[list[bool]]:
    rows, top_k = experts_NK.shape
    kept = [[False] * top_k for _ in range(rows)]
    for sample in range(SAMPLES):
        mine = [n for n in range(sample * SEQ, (sample + 1) * SEQ) if real_N[n]]
        limit = math.ceil(factor * top_k * len(mine) / experts - 1e-9)
        queue = [(n, k) for n in mine for k in range(top_k)]
        if by_score:
            queue.sort(key=lambda place: -score_NK[place].item())
        taken = [0] * experts
        for n, k in queue:
            expert = int(experts_NK[n, k])
            kept[n][k] = taken[expert] < limit
            taken[expert] += 1
    return kept


@pytest.mark.parametrize("factor", [0.3, 0.5, 1.0, 1.1, 2.0, 100.0])
@pytest.mark.parametrize("drop", ["position", "score"])
@pytest.mark.parametrize("batch", [make_batch(), padded(), padded((8, 0, 1))], ids=["whole", "padded", "empty"])
def test_capacity_drops_what_the_slow_reference_drops(factor: float, drop: str, batch: Batch) -> None:
    router = make_router(dataclasses.replace(BASE, capacity_factor=factor, drop=drop, normalise=False))
    choice: Choice = router(make_rows(), batch)
    assert choice.kept_NK is not None
    real_N = torch.ones(ROWS, dtype=torch.bool) if batch.real_BT is None else batch.real_BT.flatten()
    want = slow_kept(choice.experts_NK, choice.weights_NK, real_N, factor, 8, drop == "score")
    assert choice.kept_NK.tolist() == want


def test_dropping_by_score_keeps_the_better_ones_and_by_position_the_earlier() -> None:
    # All rows want expert 0 alone, ever more: 4 of 8 fit.
    h_ND = torch.zeros(ROWS, HIDDEN)
    h_ND[:, 0] = torch.arange(ROWS) % SEQ + 1.0
    for drop, want in (("position", [True] * 4 + [False] * 4), ("score", [False] * 4 + [True] * 4)):
        router = make_router(dataclasses.replace(BASE, top_k=1, capacity_factor=4.0, drop=drop))
        with torch.no_grad():
            router.weight.zero_()[0, 0] = 0.1
        choice: Choice = router(h_ND, make_batch())
        assert choice.kept_NK is not None
        assert choice.kept_NK.view(SAMPLES, SEQ).tolist() == [want] * SAMPLES


def test_equal_scores_drop_the_later_row() -> None:
    router = make_router(dataclasses.replace(BASE, top_k=1, capacity_factor=4.0, drop="score"))
    choice: Choice = router(torch.ones(ROWS, HIDDEN), make_batch())
    assert choice.kept_NK is not None
    assert choice.kept_NK.view(SAMPLES, SEQ).tolist() == [[True] * 4 + [False] * 4] * SAMPLES


@pytest.mark.parametrize("drop", ["position", "score"])
@pytest.mark.parametrize("rows", [slice(0, 7), slice(7, ROWS)])
def test_a_part_of_the_rows_drops_the_same_through_the_seams(drop: str, rows: slice) -> None:
    """The part is given what the other ranks would send, and must have sent its own part of it."""
    config = dataclasses.replace(BASE, capacity_factor=0.6, drop=drop)
    h_ND, batch, router, sent = make_rows(), padded(), make_router(config), []

    def note(part: Tensor, batch: Batch) -> Tensor:
        sent.append(part)
        return part

    router.gather = note
    whole: Choice = router(h_ND, batch)
    assert len(sent) == (2 if drop == "score" else 1)
    waiting = list(sent)

    def gather(part: Tensor, batch: Batch) -> Tensor:
        full = waiting.pop(0)
        assert torch.equal(part, full[rows])
        return full

    router.gather, router.mine = gather, lambda kept, batch: kept[rows]
    part: Choice = router(h_ND[rows], batch, rows)
    assert not waiting
    assert part.kept_NK is not None
    assert whole.kept_NK is not None
    assert torch.equal(part.kept_NK, whole.kept_NK[rows])


def test_padding_is_dropped_and_not_counted_without_capacity() -> None:
    router, batch = make_router(BASE), padded()
    choice: Choice = router(make_rows(), batch)
    assert choice.kept_NK is not None
    real_N = batch.real_N()
    assert real_N is not None
    assert torch.equal(choice.kept_NK, real_N[:, None].expand(ROWS, 2))
    sums = Sums.of(router.stats)
    assert sums.real == 16
    assert sums.load_E.sum() == 32
    assert sums.dropped_E.sum() == 0
    torch.testing.assert_close(sums.probability_E.sum().item(), 16.0)
