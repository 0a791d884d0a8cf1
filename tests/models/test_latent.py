"""Latent attention against one query at a time, its heads cut, and the sharpening of yarn."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from plait.models.attention import rope_tables
from plait.models.batch import Batch
from plait.models.config import MLAConfig, ModelConfig, RopeScaling
from plait.models.latent import LatentAttention

SAMPLES, SEQ, HEADS = 2, 7, 4
MLA = MLAConfig(q_rank=12, kv_rank=10, nope_dim=6, rope_dim=4, v_dim=5)
CONFIG = ModelConfig(
    family="deepseek_v3",
    vocab_size=8,
    hidden_size=16,
    num_layers=1,
    num_heads=HEADS,
    ffn_size=8,
    max_positions=64,
    rope_theta=50.0,
    mla=MLA,
)
YARN = RopeScaling(kind="yarn", factor=4.0, original_max_positions=4, beta_fast=8.0, mscale=1.0, mscale_all_dim=0.7)
CASES = {
    "latent queries": CONFIG,
    "plain queries": dataclasses.replace(CONFIG, mla=dataclasses.replace(MLA, q_rank=None)),
    "halves": dataclasses.replace(CONFIG, mla=dataclasses.replace(MLA, interleaved=False)),
    "yarn": dataclasses.replace(CONFIG, rope_scaling=YARN),
}


def make_attention(config: ModelConfig) -> LatentAttention:
    attention, generator = LatentAttention(config, 0), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.normal_(0, 0.5, generator=generator)
    return attention.double()


def make_batch(packed: bool) -> Batch:
    tokens = torch.zeros(SAMPLES, SEQ, dtype=torch.int64)
    batch = Batch(tokens_BT=tokens, targets_BT=tokens, sample_B=torch.arange(SAMPLES), step=0)
    if not packed:
        return batch
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3], [0, 0, 1, 2, 3, 4, 5]])
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1]])
    return dataclasses.replace(batch, positions_BT=positions, documents_BT=documents)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def turned(x_E: Tensor, position: int, config: ModelConfig) -> Tensor:
    """Pairs as complex numbers, turned by the position's angles (those of the tables, which yarn's test holds)."""
    assert config.mla is not None
    at = make_batch(False)
    where = torch.full((1, 1), position)
    one = dataclasses.replace(at, tokens_BT=where, targets_BT=where, positions_BT=where)
    tables = rope_tables(config, one)
    assert tables is not None
    turn = torch.complex(tables[0].double(), tables[1].double()).flatten()
    pairs = x_E.view(-1, 2).T if config.mla.interleaved else x_E.view(2, -1)
    return torch.complex(pairs[0].contiguous(), pairs[1].contiguous()) * turn


def slow(attention: LatentAttention, h_ND: Tensor, batch: Batch, config: ModelConfig) -> Tensor:
    mla, weights = attention.mla, {name: value.detach() for name, value in attention.named_parameters()}
    documents = torch.zeros(SAMPLES, SEQ) if batch.documents_BT is None else batch.documents_BT
    positions = torch.arange(SEQ).expand(SAMPLES, SEQ) if batch.positions_BT is None else batch.positions_BT
    if mla.q_rank is None:
        q_N = h_ND @ weights["q.weight"].T
    else:
        q_N = rms(h_ND @ weights["q_a.weight"].T, weights["q_a_norm.weight"]) @ weights["q_b.weight"].T
    down = h_ND @ weights["kv_a.weight"].T
    kv_N = rms(down[:, : mla.kv_rank], weights["kv_a_norm.weight"]) @ weights["kv_b.weight"].T
    factor = (0.1 * 0.7 * math.log(4) + 1) ** 2 if config.rope_scaling is not None else 1.0
    rows = []
    for b in range(SAMPLES):
        for t in range(SEQ):
            seen = [s for s in range(t + 1) if documents[b, s] == documents[b, t]]
            heads = []
            for head in range(HEADS):
                q = q_N[b * SEQ + t].view(HEADS, -1)[head]
                scores, values = [], []
                for s in seen:
                    k, v = kv_N[b * SEQ + s].view(HEADS, -1)[head].split([mla.nope_dim, mla.v_dim])
                    q_turned = turned(q[mla.nope_dim :], int(positions[b, t]), config)
                    k_turned = turned(down[b * SEQ + s, mla.kv_rank :], int(positions[b, s]), config)
                    score = q[: mla.nope_dim] @ k + (q_turned * k_turned.conj()).real.sum()
                    scores.append(score * factor / math.sqrt(mla.qk_dim))
                    values.append(v)
                heads.append(torch.stack(scores).softmax(0) @ torch.stack(values))
            rows.append(weights["out.weight"] @ torch.cat(heads))
    return torch.stack(rows)


@pytest.mark.parametrize("name", sorted(CASES))
@pytest.mark.parametrize("packed", [False, True])
def test_latent_attention_is_that_of_one_query_at_a_time(name: str, packed: bool) -> None:
    config, batch = CASES[name], make_batch(packed)
    attention = make_attention(config)
    h_ND = torch.randn(SAMPLES * SEQ, 16, dtype=torch.double, generator=torch.Generator().manual_seed(1))
    got = attention(h_ND, rope_tables(config, batch), batch)
    # Rotary tables are fp32 on both sides, but products of two of them are added in another order.
    torch.testing.assert_close(got, slow(attention, h_ND, batch, config), rtol=1e-6, atol=1e-6)


def test_halves_of_the_heads_add_up_and_share_the_keys_gradient() -> None:
    """What a cut of the heads does: each half keeps its rows of q_b and kv_b and its columns of out."""
    batch, rope = make_batch(False), rope_tables(CONFIG, make_batch(False))
    whole = make_attention(CONFIG)
    h_ND = torch.randn(SAMPLES * SEQ, 16, dtype=torch.double, generator=torch.Generator().manual_seed(1))
    whole(h_ND, rope, batch).square().sum().backward()
    upstream = 2 * whole(h_ND, rope, batch).detach()
    total, gradient = torch.zeros_like(upstream), torch.zeros_like(whole.kv_a.weight)
    for half in range(2):
        part = make_attention(CONFIG)
        for module, dim in ((part.q_b, 0), (part.kv_b, 0), (part.out, 1)):
            assert module is not None
            size = module.weight.shape[dim] // 2
            cut = module.weight.detach().narrow(dim, half * size, size).clone()
            module.weight = torch.nn.Parameter(cut)
        out_ND = part(h_ND, rope, batch)
        out_ND.backward(upstream)
        total += out_ND.detach()
        assert part.kv_a.weight.grad is not None
        gradient += part.kv_a.weight.grad
    torch.testing.assert_close(2 * total, upstream)
    torch.testing.assert_close(gradient, whole.kv_a.weight.grad)


def test_all_heads_keys_pass_through_the_seam_once() -> None:
    batch, rope, seen = make_batch(False), rope_tables(CONFIG, make_batch(False)), []

    class Seam(torch.nn.Module):
        def forward(self, turned_NE: Tensor) -> Tensor:
            seen.append(tuple(turned_NE.shape))
            return turned_NE

    attention = make_attention(CONFIG)
    attention.share = Seam()  # type: ignore[assignment]
    attention(torch.randn(SAMPLES * SEQ, 16, dtype=torch.double), rope, batch)
    assert seen == [(SAMPLES * SEQ, MLA.rope_dim)]


def test_yarns_factors() -> None:
    assert YARN.table_factor == pytest.approx((0.1 * math.log(4) + 1) / (0.07 * math.log(4) + 1))
    assert YARN.score_factor == pytest.approx((0.07 * math.log(4) + 1) ** 2)
    plain = RopeScaling(kind="yarn", factor=4.0)
    assert (plain.table_factor, plain.score_factor) == (pytest.approx(0.1 * math.log(4) + 1), 1.0)
    assert dataclasses.replace(plain, attention_factor=1.5).table_factor == 1.5
    assert dataclasses.replace(plain, factor=0.5).table_factor == 1.0
    linear = RopeScaling(kind="linear", factor=4.0, mscale_all_dim=1.0)
    assert (linear.table_factor, linear.score_factor) == (1.0, 1.0)


def test_yarn_keeps_fast_frequencies_and_stretches_slow_ones() -> None:
    scaling = RopeScaling(kind="yarn", factor=8.0, original_max_positions=1024, attention_factor=2.0)
    config = ModelConfig(
        vocab_size=8,
        hidden_size=64,
        num_layers=1,
        num_heads=1,
        ffn_size=8,
        max_positions=64,
        rope_theta=10000.0,
        rope_scaling=scaling,
    )
    one = torch.ones(1, 1, dtype=torch.int64)
    batch = Batch(tokens_BT=one, targets_BT=one, sample_B=torch.zeros(1, dtype=torch.int64), step=0, positions_BT=one)
    rope = rope_tables(config, batch)
    assert rope is not None
    torch.testing.assert_close(torch.hypot(*rope), torch.full_like(rope[0], 2.0))
    found = torch.atan2(rope[1], rope[0]).flatten().double()
    plain = 10000.0 ** (-torch.arange(32, dtype=torch.double) / 32)
    turns = 1024 * plain / (2 * math.pi)
    dims = torch.arange(32)
    # The dims where 32 turns and 1 turn are made, rounded outwards: the ramp's ends.
    low = math.floor(32 * math.log(1024 / (32 * 2 * math.pi)) / math.log(10000))
    high = math.ceil(32 * math.log(1024 / (2 * math.pi)) / math.log(10000))
    assert turns[low] >= 32 > turns[low + 1]
    assert turns[high] <= 1 < turns[high - 1]
    torch.testing.assert_close(found[: low + 1], plain[: low + 1], rtol=1e-5, atol=0)
    torch.testing.assert_close(found[high:], plain[high:] / 8, rtol=1e-5, atol=0)
    kept = 1 - (dims - low).clamp(0, high - low) / (high - low)
    torch.testing.assert_close(found, plain * (kept + (1 - kept) / 8), rtol=1e-5, atol=0)
