"""What a router does for balance: the gradients of its losses, its sums over a step, the bias."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from plait.models.batch import Batch
from plait.models.moe import Choice, Router, Sums, end_step, moe_losses, moe_metrics, routers
from plait.models.parts import MoEConfig
from tests.models.routing import BASE, HIDDEN, ROWS, make_batch, make_router, make_rows, padded

# Losses


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("kind", ["aux", "z", "both"])
@pytest.mark.parametrize("batch", [make_batch(), padded()], ids=["whole", "padded"])
def test_gradients_of_the_losses_are_those_of_their_formulas(score: str, kind: str, batch: Batch) -> None:
    aux, z = (0.3 if kind != "z" else 0.0), (0.2 if kind != "aux" else 0.0)
    config = dataclasses.replace(BASE, score=score, aux_loss=aux, z_loss=z)
    batch = dataclasses.replace(batch, total=41, scale=8.0)
    share_E = torch.rand(8, generator=torch.Generator().manual_seed(3))
    gradients = []
    for fused in (True, False):
        router, h_ND = make_router(config if fused else dataclasses.replace(BASE, score=score)), make_rows()
        h_ND.requires_grad_()
        router.share_E = share_E / share_E.sum()
        choice: Choice = router(h_ND, batch)
        value = (choice.weights_NK * torch.arange(ROWS * 2).view(ROWS, 2)).sum()
        if not fused:
            logits_NE = h_ND @ router.weight.t()
            scores_NE = logits_NE.softmax(-1) if score == "softmax" else logits_NE.sigmoid()
            probability_NE = scores_NE / scores_NE.sum(-1, keepdim=True)
            real_N = torch.ones(ROWS) if batch.real_BT is None else batch.real_BT.flatten().float()
            mean_E = (probability_NE * real_N[:, None]).sum(0) / 41
            balance = 8 * (router.share_E * mean_E).sum()
            size = (logits_NE.logsumexp(-1).square() * real_N).sum() / 41
            value = value + 8.0 * (aux * balance + z * size)
        value.backward()
        assert router.weight.grad is not None
        assert h_ND.grad is not None
        gradients.append((h_ND.grad, router.weight.grad))
    for got, want in zip(*gradients, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_a_fresh_routers_balancing_loss_pulls_nowhere() -> None:
    """The load is taken as even at step 0: sum_e P_e / E is constant."""
    h_ND = make_rows().requires_grad_()
    router = make_router(dataclasses.replace(BASE, top_k=1, aux_loss=1.0))
    router(h_ND, make_batch()).weights_NK.sum().backward()  # one normalised weight is constant too
    assert h_ND.grad is not None
    assert h_ND.grad.abs().max() < 1e-6


def test_losses_are_means_of_the_batch_when_no_total_is_given() -> None:
    router = make_router(dataclasses.replace(BASE, top_k=1, z_loss=1.0))
    gradients = []
    for total in (None, 16, 32):
        h_ND = make_rows().requires_grad_()
        router(h_ND, dataclasses.replace(padded(), total=total)).weights_NK.sum().backward()
        assert h_ND.grad is not None
        gradients.append(h_ND.grad)
    assert torch.equal(gradients[0], gradients[1])
    torch.testing.assert_close(gradients[2], gradients[1] / 2)


def test_an_evaluation_adds_no_loss_and_no_sums() -> None:
    router = make_router(dataclasses.replace(BASE, top_k=1, z_loss=1.0)).eval()
    h_ND = make_rows().requires_grad_()
    router(h_ND, make_batch()).weights_NK.sum().backward()
    assert h_ND.grad is not None
    assert h_ND.grad.abs().max() < 1e-6
    assert not router.stats.any()


# Sums and the end of a step


def slow_sums(choice: Choice, logits_NE: Tensor, config: MoEConfig) -> Sums:
    load, dropped, probability = ([0.0] * config.num_experts for _ in range(3))
    entropy = squared = 0.0
    for row in range(ROWS):
        scores = logits_NE[row].softmax(-1) if config.score == "softmax" else logits_NE[row].sigmoid()
        scores = scores / scores.sum()
        for k, expert in enumerate(choice.experts_NK[row].tolist()):
            load[expert] += 1
            dropped[expert] += choice.kept_NK is not None and not choice.kept_NK[row, k]
        for expert, value in enumerate(scores.tolist()):
            probability[expert] += value
            entropy -= value * math.log(value)
        squared += logits_NE[row].logsumexp(-1).item() ** 2
    return Sums(
        load_E=torch.tensor(load).double(),
        dropped_E=torch.tensor(dropped).double(),
        probability_E=torch.tensor(probability).double(),
        entropy=torch.tensor(entropy).double(),
        squared_lse=torch.tensor(squared).double(),
        real=torch.tensor(float(ROWS)).double(),
    )


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_sums_are_those_of_the_slow_reference_and_add_up_over_microbatches(score: str) -> None:
    config = dataclasses.replace(BASE, score=score, capacity_factor=0.7)
    router, h_ND = make_router(config), make_rows()
    want = slow_sums(router(h_ND, make_batch()), (h_ND @ router.weight.t()).detach(), config)
    assert 0 < want.dropped_E.sum() < want.load_E.sum()
    found = Sums.of(router.stats)
    for field in dataclasses.fields(Sums):
        torch.testing.assert_close(getattr(found, field.name), getattr(want, field.name), rtol=1e-5, atol=1e-5)
    router(h_ND, make_batch())
    torch.testing.assert_close(Sums.of(router.stats).entropy, 2 * want.entropy, rtol=1e-5, atol=1e-5)


def test_a_router_that_does_not_record_leaves_its_sums() -> None:
    router = make_router(BASE)
    router(make_rows(), make_batch())
    before = router.stats.clone()
    router.recording = False
    router(make_rows(), make_batch())
    assert torch.equal(router.stats, before)


def test_metrics_of_a_known_step() -> None:
    config = MoEConfig(num_experts=2, top_k=1, ffn_size=4, aux_loss=0.5, z_loss=0.25)
    total = torch.tensor([6.0, 2.0, 1.0, 0.0, 5.0, 3.0, 4.0, 72.0, 8.0], dtype=torch.float64)
    assert moe_losses(total, config) == pytest.approx({"aux": 0.5 * 2 * (6 / 8 * 5 / 8 + 2 / 8 * 3 / 8), "z": 0.25 * 9})
    found = moe_metrics(total, config)
    assert found["load"] == [0.75, 0.25]
    assert found["probability"] == [0.625, 0.375]
    assert (found["dropped"], found["spread"], found["entropy"]) == (0.125, 0.5, 0.5)
    assert moe_metrics(torch.zeros(9, dtype=torch.float64), config)["spread"] == 0


def test_the_end_of_a_step_sets_the_load_and_starts_anew() -> None:
    router = make_router(BASE)
    router(make_rows(), make_batch())
    total = 2 * router.stats
    end_step(router, total)
    load_E = Sums.of(total).load_E
    torch.testing.assert_close(router.share_E, (load_E / load_E.sum()).float())
    assert not router.stats.any()
    before = router.share_E
    end_step(router, router.stats)  # a step without a real row
    assert torch.equal(router.share_E, before)


def test_the_bias_moves_towards_the_experts_that_had_less() -> None:
    router = make_router(dataclasses.replace(BASE, bias=True, bias_balance=True, bias_rate=0.01))
    assert router.bias is not None
    before = router.bias.clone()
    total = torch.zeros(27, dtype=torch.float64)
    total[:8] = torch.tensor([8.0, 0, 4, 4, 4, 4, 4, 4])
    end_step(router, total)
    torch.testing.assert_close(router.bias - before, torch.tensor([-0.01, 0.01, 0, 0, 0, 0, 0, 0]))
    assert not router.bias.requires_grad
    still = make_router(dataclasses.replace(BASE, bias=True))
    before = still.bias.clone()  # type: ignore[union-attr]
    end_step(still, total)
    assert torch.equal(still.bias, before)


def test_balancing_by_bias_evens_out_a_skewed_stream() -> None:
    """Rows that lean towards one expert: the spread of the load falls from above 45% to below 8%, by the bias alone."""
    config = dataclasses.replace(BASE, score="sigmoid", bias=True, bias_balance=True, bias_rate=0.01)
    router = make_router(config)
    generator = torch.Generator().manual_seed(5)
    lean_D = router.weight[2].detach() * 2 / HIDDEN
    with torch.no_grad():
        assert router.bias is not None
        router.bias.zero_()
    spreads = []
    weight = router.weight.detach().clone()
    for _ in range(120):
        with torch.no_grad():
            for _ in range(4):
                router(torch.randn(512, HIDDEN, generator=generator) * 0.3 + lean_D, make_batch())
        spreads.append(moe_metrics(router.stats, config)["spread"])
        end_step(router, router.stats.clone())
    assert spreads[0] > 0.45
    assert sum(spreads[-20:]) / 20 < 0.08  # type: ignore[arg-type]
    assert torch.equal(router.weight, weight)


def test_stats_are_real_where_a_model_is_built_on_meta_and_keep_their_dtype() -> None:
    with torch.device("meta"):
        router = Router(HIDDEN, BASE)
    assert not router.stats.is_meta
    assert not router.share_E.is_meta
    assert make_router(BASE).bfloat16().stats.dtype == torch.float64
    assert routers(torch.nn.Linear(1, 1)) == {}
