"""The decoder: names and shapes, parts that add up to the whole, packed documents, tied heads."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from plait.models.batch import Batch
from plait.models.config import PRESETS, MLAConfig, ModelConfig, MoEConfig, parameter_shapes
from plait.models.decoder import Decoder
from plait.models.init import InitSource, initialise

LLAMA = ModelConfig(
    vocab_size=61, hidden_size=32, num_layers=3, num_heads=4, num_kv_heads=2, ffn_size=40, max_positions=64
)
GPT2 = dataclasses.replace(
    PRESETS["gpt2-tiny"],
    vocab_size=61,
    hidden_size=32,
    head_dim=8,
    num_layers=3,
    ffn_size=40,
    max_positions=64,
    dropout=0.2,
)
QWEN3 = dataclasses.replace(LLAMA, family="qwen3", head_dim=12, qk_norm=True, tied=True)
MIXTRAL = dataclasses.replace(LLAMA, family="mixtral", moe=MoEConfig(num_experts=4, top_k=2, ffn_size=40))
DEEPSEEK = dataclasses.replace(
    LLAMA,
    family="deepseek_v3",
    head_dim=12,
    num_kv_heads=4,
    mla=MLAConfig(q_rank=12, kv_rank=16, nope_dim=8, rope_dim=4, v_dim=6),
    moe=MoEConfig(num_experts=4, top_k=2, ffn_size=20, shared_ffn=20, dense_layers=(0,), score="sigmoid", bias=True),
)
CONFIGS = {
    "llama": LLAMA,
    "gpt2": GPT2,
    "qwen3": QWEN3,
    "qwen2": dataclasses.replace(LLAMA, qkv_bias=True),
    "mixtral": MIXTRAL,
    "deepseek": DEEPSEEK,
}


def build(config: ModelConfig) -> Decoder:
    with torch.device("meta"):
        model = Decoder(config)
    initialise(model, InitSource(config, seed=0))
    return model


def make_batch(config: ModelConfig, samples: int = 2, seq: int = 12) -> Batch:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, config.vocab_size, (samples, seq + 1), generator=generator)
    return Batch(tokens_BT=tokens[:, :-1], targets_BT=tokens[:, 1:], sample_B=torch.arange(samples), step=0)


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_shapes_and_order_are_those_of_the_modules(preset: str) -> None:
    config = dataclasses.replace(PRESETS[preset], num_layers=2)
    with torch.device("meta"):
        model = Decoder(config)
    built = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert list(built.items()) == list(parameter_shapes(config).items())


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_every_parameter_gets_a_gradient(family: str) -> None:
    config = CONFIGS[family]
    model, batch = build(config), make_batch(config)
    logits = model(None, batch)
    assert logits.shape == (24, 61)
    model.loss(logits, batch.targets_BT.flatten()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (not name.endswith("router.bias"))
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_parts_add_up_to_the_whole(family: str) -> None:
    config = CONFIGS[family]
    batch, whole = make_batch(config), build(config)
    first, last = build(config), build(config)
    for index in range(config.num_layers):
        del (last if index < 2 else first).layers[str(index)]
    first.norm = first.head = None
    last.embed = None
    torch.testing.assert_close(last(first(None, batch), batch), whole(None, batch), rtol=0, atol=0)
    assert set(dict(first.named_parameters())) | set(dict(last.named_parameters())) >= set(parameter_shapes(config))
    with pytest.raises(ValueError, match="no embedding"):
        last(None, batch)


def test_tied_head_is_the_same_parameter() -> None:
    model = build(QWEN3)
    assert model.embed is not None
    assert model.head is not None
    assert model.head.weight is model.embed.tokens.weight
    assert "head.weight" not in dict(model.named_parameters())
    untied = build(LLAMA)
    assert untied.embed is not None
    assert untied.head is not None
    assert not torch.equal(untied.head.weight, untied.embed.tokens.weight)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "deepseek"])
def test_packed_documents_equal_documents_run_apart(family: str) -> None:
    config = dataclasses.replace(CONFIGS[family], dropout=0.0)
    model, lengths = build(config), (5, 1, 6)
    plain = make_batch(config, samples=1)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None]
    packed = dataclasses.replace(plain, positions_BT=positions, documents_BT=documents)
    together = model(None, packed)
    start, apart = 0, []
    for length in lengths:
        cut = slice(start, start + length)
        alone = dataclasses.replace(plain, tokens_BT=plain.tokens_BT[:, cut], targets_BT=plain.targets_BT[:, cut])
        apart.append(model(None, alone))
        start += length
    torch.testing.assert_close(together, torch.cat(apart), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(together, model(None, plain), atol=1e-3)


def test_dropout_of_a_microbatch_is_that_of_the_batch() -> None:
    model, batch = build(GPT2), make_batch(GPT2, samples=4)
    whole = model(None, batch)
    parts = []
    for rows in (slice(0, 1), slice(1, 4)):
        part = dataclasses.replace(
            batch, tokens_BT=batch.tokens_BT[rows], targets_BT=batch.targets_BT[rows], sample_B=batch.sample_B[rows]
        )
        parts.append(model(None, part))
    torch.testing.assert_close(whole, torch.cat(parts), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(whole, model(None, dataclasses.replace(batch, step=1)), atol=1e-2)
    evaluated = model.eval()(None, batch)
    assert torch.equal(evaluated, model(None, dataclasses.replace(batch, step=1)))


def test_custom_gradients_agree_with_finite_differences() -> None:
    """The whole of a small model in fp64, along one random direction for each parameter."""
    config = dataclasses.replace(QWEN3, num_layers=2)
    model, batch = build(config).double(), make_batch(config)

    def loss() -> Tensor:
        return F.cross_entropy(model(None, batch), batch.targets_BT.flatten())

    loss().backward()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        assert parameter.grad is not None
        step = torch.randn(parameter.shape, generator=generator, dtype=torch.double)
        around = []
        with torch.no_grad():
            for moved in (1e-5, -2e-5, 1e-5):
                parameter.add_(step, alpha=moved)
                around.append(loss())
        # Rotary tables are fp32, the same on both sides of the difference.
        difference = (around[0] - around[1]) / 2e-5
        torch.testing.assert_close(difference, (parameter.grad * step).sum(), rtol=1e-5, atol=1e-8)


def test_bf16_runs_near_fp32() -> None:
    model, batch = build(LLAMA), make_batch(LLAMA)
    exact = model(None, batch)
    rough = model.bfloat16()(None, batch)
    assert rough.dtype == torch.bfloat16
    torch.testing.assert_close(rough.float(), exact, rtol=0.05, atol=0.02)
