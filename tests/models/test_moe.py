"""Experts against a loop over rows, and the mixture inside a decoder."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from plait.models.batch import Batch
from plait.models.config import PRESETS, ModelConfig, parameter_shapes
from plait.models.decoder import Decoder
from plait.models.init import InitSource, initialise
from plait.models.moe import Choice, Experts, MoE, Router, Sums, routers
from plait.models.parts import MLAConfig, MoEConfig
from tests.models.routing import BASE, HIDDEN, ROWS, make_batch, make_rows

CONFIG = dataclasses.replace(BASE, top_k=3)
DEEPSEEK = ModelConfig(
    family="deepseek_v3",
    vocab_size=61,
    hidden_size=32,
    num_layers=3,
    num_heads=4,
    ffn_size=40,
    max_positions=64,
    mla=MLAConfig(q_rank=12, kv_rank=16, nope_dim=8, rope_dim=4, v_dim=6),
    moe=MoEConfig(
        num_experts=8,
        top_k=2,
        ffn_size=12,
        shared_ffn=24,
        dense_layers=(0,),
        score="sigmoid",
        groups=4,
        top_groups=2,
        bias=True,
        scale=2.5,
    ),
)


def make_experts() -> Experts:
    experts, generator = Experts(HIDDEN, CONFIG), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(generator=generator)
    return experts


def make_choice(kept: bool, experts: int = 8) -> Choice:
    generator = torch.Generator().manual_seed(4)
    order = torch.rand(ROWS, experts, generator=generator).argsort(-1)
    kept_NK = torch.rand(ROWS, 3, generator=generator) < 0.6 if kept else None
    weights_NK = torch.rand(ROWS, 3, generator=generator).requires_grad_()
    return Choice(experts_NK=order[:, :3], weights_NK=weights_NK, kept_NK=kept_NK)


def slow_experts(experts: Experts, x_ND: Tensor, choice: Choice) -> Tensor:
    rows = []
    for row in range(x_ND.shape[0]):
        total = torch.zeros(HIDDEN, dtype=x_ND.dtype)
        for k, expert in enumerate(choice.experts_NK[row].tolist()):
            if choice.kept_NK is None or choice.kept_NK[row, k]:
                gate, up = (experts.gate_up[expert] @ x_ND[row]).chunk(2)
                total = total + choice.weights_NK[row, k] * (experts.down[expert] @ (F.silu(gate) * up))
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("used", [3, 8])
def test_experts_and_every_gradient_are_those_of_a_loop(kept: bool, used: int) -> None:
    found = []
    for compute in (Experts.forward, slow_experts):
        experts, x_ND, choice = make_experts(), make_rows().requires_grad_(), make_choice(kept, used)
        out_ND = compute(experts, x_ND, choice)
        (out_ND * torch.arange(HIDDEN)).sum().backward()
        found.append([out_ND, x_ND.grad, choice.weights_NK.grad, experts.gate_up.grad, experts.down.grad])
    for got, want in zip(*found, strict=True):
        assert got is not None
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)
    for grad in found[0][3:]:
        assert grad is not None
        assert not grad[used:].any()  # nobody chose them


def test_no_assignment_at_all_gives_zero_and_zero_gradients() -> None:
    experts, x_ND, choice = make_experts(), make_rows().requires_grad_(), make_choice(False)
    nothing = dataclasses.replace(choice, kept_NK=torch.zeros(ROWS, 3, dtype=torch.bool))
    out_ND = experts(x_ND, nothing)
    assert not out_ND.any()
    out_ND.sum().backward()
    for moved in (x_ND, choice.weights_NK, experts.gate_up, experts.down):
        assert moved.grad is not None
        assert not moved.grad.any()


def test_outputs_are_weighted_and_summed_in_fp32() -> None:
    experts, x_ND, choice = make_experts().bfloat16(), make_rows().bfloat16(), make_choice(False)
    with torch.no_grad():
        out_ND = experts(x_ND, choice)
        parts = []
        for k in range(3):
            one_hot = dataclasses.replace(choice, kept_NK=torch.arange(3).expand(ROWS, 3) == k)
            unit = dataclasses.replace(one_hot, weights_NK=torch.ones(ROWS, 3))
            parts.append(experts(x_ND, unit).float() * choice.weights_NK[:, k : k + 1])
    assert out_ND.dtype == torch.bfloat16
    # The order of the three fp32 summands may move the rounding by one step of bf16, 2^-8.
    torch.testing.assert_close(out_ND, sum(parts).bfloat16(), rtol=2**-7, atol=1e-6)  # type: ignore[union-attr]
    assert (out_ND != sum(parts).bfloat16()).float().mean() < 0.01  # type: ignore[union-attr]


def build(config: ModelConfig) -> Decoder:
    with torch.device("meta"):
        model = Decoder(config)
    initialise(model, InitSource(config, seed=0))
    return model


def decoder_batch(samples: int = 2, seq: int = 12) -> Batch:
    tokens = torch.randint(0, 61, (samples, seq + 1), generator=torch.Generator().manual_seed(0))
    return Batch(tokens_BT=tokens[:, :-1], targets_BT=tokens[:, 1:], sample_B=torch.arange(samples), step=0)


def test_layers_have_experts_or_a_plain_mlp() -> None:
    model = build(DEEPSEEK)
    assert [type(block.mlp).__name__ for block in model.layers.values()] == ["GatedMLP", "MoE", "MoE"]
    assert list(routers(model)) == [1, 2]
    part = build(DEEPSEEK)
    del part.layers["0"], part.layers["1"]
    assert list(routers(part)) == [2]
    assert [name for name, _ in model.named_parameters()] == list(parameter_shapes(DEEPSEEK))


def test_a_decoder_with_experts_and_latent_attention_agrees_with_finite_differences() -> None:
    """In fp64, along one random direction for each parameter; steps are too small to change a choice."""
    model, batch = build(DEEPSEEK).double(), decoder_batch()

    def loss() -> Tensor:
        return F.cross_entropy(model(None, batch), batch.targets_BT.flatten())

    loss().backward()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        step = torch.randn(parameter.shape, generator=generator, dtype=torch.double)
        around = []
        with torch.no_grad():
            for moved in (1e-6, -2e-6, 1e-6):
                parameter.add_(step, alpha=moved)
                around.append(loss())
        assert parameter.grad is not None
        difference = (around[0] - around[1]) / 2e-6
        torch.testing.assert_close(difference, (parameter.grad * step).sum(), rtol=1e-4, atol=1e-8, msg=name)


def test_padding_changes_nothing_for_real_tokens() -> None:
    """Capacity, losses and sums are those of the sample without its padding."""
    assert DEEPSEEK.moe is not None
    moe = dataclasses.replace(DEEPSEEK.moe, capacity_factor=0.8, aux_loss=0.1, z_loss=0.1)
    config, batch = dataclasses.replace(DEEPSEEK, moe=moe), decoder_batch()
    longer = decoder_batch(seq=15)
    tokens, targets = longer.tokens_BT.clone(), torch.full_like(longer.targets_BT, -100)
    tokens[:, :12], targets[:, :12] = batch.tokens_BT, batch.targets_BT
    real_BT = (torch.arange(15) < 12).expand(2, 15)
    padded = dataclasses.replace(longer, tokens_BT=tokens, targets_BT=targets, real_BT=real_BT)
    found = []
    for each in (batch, padded):
        model = build(config)
        model.loss(model(None, each), each.targets_BT.flatten()).backward()
        found.append(model)
    for index, router in routers(found[0]).items():
        torch.testing.assert_close(routers(found[1])[index].stats, router.stats, rtol=1e-6, atol=1e-6)
        assert Sums.of(router.stats).dropped_E.sum() > 0
    gradients = dict(found[1].named_parameters())
    for name, parameter in found[0].named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(gradients[name].grad, parameter.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_the_mixture_is_experts_and_the_shared_expert() -> None:
    config = dataclasses.replace(CONFIG, shared_ffn=20)
    moe, generator = MoE(HIDDEN, config), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.normal_(generator=generator)
    assert isinstance(moe.router, Router)
    assert moe.shared is not None
    h_ND, batch = make_rows(), make_batch()
    want = moe.experts(h_ND, moe.router(h_ND, batch)) + moe.shared(h_ND)
    assert torch.equal(moe(h_ND, batch), want)


@pytest.mark.parametrize("preset", ["moe-tiny"])
def test_a_small_mixture_learns(preset: str) -> None:
    config = dataclasses.replace(PRESETS[preset], num_layers=2, vocab_size=61)
    model, batch = build(config), decoder_batch(samples=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        loss = model.loss(model(None, batch), batch.targets_BT.flatten()) / 48
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
