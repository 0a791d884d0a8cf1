"""config.json to ModelConfig and back."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from plait.models.config import PRESETS, MoEConfig, RopeScaling
from plait.models.families import from_hf, to_hf

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": 100,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 64,
}
DEEPSEEK = {**LLAMA, "model_type": "deepseek_v3"}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_round_trip_of_the_presets(preset: str) -> None:
    assert from_hf(to_hf(PRESETS[preset])) == PRESETS[preset]


def test_rope_is_read_in_both_forms() -> None:
    old = from_hf({**LLAMA, "rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}})
    older = from_hf({**LLAMA, "rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}})
    new = from_hf({**LLAMA, "rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3}})
    assert old == older == new
    assert new.rope_theta == 5e5
    assert new.rope_scaling == RopeScaling(
        kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=32
    )
    assert from_hf({**LLAMA, "rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}}).rope_theta == 7.0
    assert from_hf(to_hf(new)) == new


def test_defaults_are_those_of_transformers() -> None:
    llama = from_hf(LLAMA)
    assert (llama.num_kv_heads, llama.head_dim, llama.norm_eps, llama.rope_theta) == (4, 8, 1e-6, 10000.0)
    mistral = from_hf({**LLAMA, "model_type": "mistral", "num_attention_heads": 16})
    assert (mistral.num_kv_heads, mistral.sliding_window) == (8, 4096)
    assert from_hf({**LLAMA, "model_type": "mistral", "num_attention_heads": 8, "sliding_window": None}) == (
        dataclasses.replace(from_hf({**LLAMA, "num_attention_heads": 8}), family="mistral")
    )
    assert from_hf({**LLAMA, "model_type": "qwen3"}).head_dim == 128
    gpt2 = from_hf(GPT2)
    assert (gpt2.ffn_size, gpt2.tied, gpt2.dropout, gpt2.activation) == (128, True, 0.1, "gelu_tanh")


def test_defaults_of_families_with_experts_are_those_of_transformers() -> None:
    mixtral = from_hf({**LLAMA, "model_type": "mixtral", "num_attention_heads": 8})
    assert (mixtral.norm_eps, mixtral.rope_theta, mixtral.num_kv_heads, mixtral.sliding_window) == (1e-5, 1e6, 8, None)
    assert mixtral.moe == MoEConfig(num_experts=8, top_k=2, ffn_size=48)
    qwen = from_hf({**LLAMA, "model_type": "qwen3_moe", "mlp_only_layers": [0], "decoder_sparse_step": 2})
    assert (qwen.num_kv_heads, qwen.head_dim, qwen.qk_norm) == (4, 8, True)
    assert qwen.moe == MoEConfig(num_experts=128, top_k=8, ffn_size=768, dense_layers=(0, 2), normalise=False)
    assert from_hf({**LLAMA, "model_type": "qwen3_moe", "num_local_experts": 16}).moe != qwen.moe
    deepseek = from_hf({**DEEPSEEK, "head_dim": 64})
    published = PRESETS["deepseek-v3"]
    assert published.moe is not None
    assert deepseek.mla == published.mla
    assert deepseek.moe == published.moe
    assert deepseek.head_dim == 192


def test_yarn_is_read_and_written() -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 10.0, "original_max_position_embeddings": 16, "beta_fast": 8}
    read = from_hf({**LLAMA, "rope_parameters": {**yarn, "mscale": 0.5, "mscale_all_dim": 2}})
    assert read.rope_scaling == RopeScaling(
        kind="yarn", factor=4.0, original_max_positions=16, beta_fast=8.0, mscale=0.5, mscale_all_dim=2.0
    )
    assert from_hf(to_hf(read)) == read
    given = from_hf({**LLAMA, "rope_scaling": {"type": "yarn", "factor": 2, "attention_factor": 1.25}})
    assert given.rope_scaling == RopeScaling(kind="yarn", factor=2.0, original_max_positions=64, attention_factor=1.25)
    assert from_hf(to_hf(given)) == given


def test_qwen_windows() -> None:
    qwen = {**LLAMA, "model_type": "qwen2", "sliding_window": 7}
    assert from_hf(qwen).sliding_window is None
    used = {**qwen, "use_sliding_window": True}
    assert from_hf({**used, "max_window_layers": 3}).sliding_window is None
    above = from_hf({**used, "max_window_layers": 1})
    assert [above.window_of(layer) for layer in range(3)] == [None, 7, 7]
    types = ["full_attention", "full_attention", "sliding_attention"]
    assert [from_hf({**used, "layer_types": types}).window_of(layer) for layer in range(3)] == [None, None, 7]
    with pytest.raises(ValueError, match="mixes layer_types"):
        from_hf({**used, "layer_types": types[::-1]})


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        (
            {"model_type": "bert"},
            "model_type 'bert' is not supported: llama, mistral, qwen2, qwen3, gpt2, mixtral, "
            "qwen3_moe, deepseek_v3 are",
        ),
        ({}, "model_type None is not supported"),
        ({**LLAMA, "hidden_size": None}, "config.json of a llama model has no 'hidden_size'"),
        ({**LLAMA, "hidden_act": "relu"}, "hidden_act='relu': only 'silu'"),
        ({**LLAMA, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
        ({**LLAMA, "rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "for each layer type"),
        ({**LLAMA, "rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({**DEEPSEEK, "scoring_func": "softmax"}, "scoring_func='softmax': only 'sigmoid'"),
        ({**DEEPSEEK, "attention_bias": True}, "attention_bias=True"),
        (
            {**LLAMA, "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": False}},
            "truncate=False: only True",
        ),
        ({**GPT2, "activation_function": "relu"}, "activation_function='relu'"),
        ({**GPT2, "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(mapping: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_hf(mapping)


@pytest.mark.parametrize(
    ("preset", "change", "message"),
    [
        ("tiny", {"qk_norm": True}, "qk_norm=True"),
        ("tiny", {"sliding_window": 8}, "sliding_window=8"),
        ("tiny", {"qkv_bias": True}, "qkv_bias apart from out_bias"),
        ("tiny", {"dropout": 0.1}, "dropout=0.1"),
        ("qwen2-7b", {"head_dim": 64}, "head_dim=64"),
        ("gpt2", {"num_kv_heads": 4}, "fewer KV heads"),
        ("gpt2", {"activation": "swiglu"}, "activation='swiglu'"),
        ("mistral-7b", {"window_from": 2}, "window_from=2"),
        ("tiny", {"moe": PRESETS["moe-tiny"].moe}, "with moe="),
        ("moe-tiny", {"moe": None}, r"no Hugging Face form without experts \(moe\)"),
        ("moe-tiny", {"ffn_size": 8}, "ffn_size=8 apart from moe.ffn_size=176"),
        ("moe-tiny", {"moe.bias": True}, "moe.bias=True"),
        ("moe-tiny", {"moe.normalise": False}, "moe.normalise=False"),
        ("qwen3-30b-a3b", {"moe.shared_ffn": 768}, "moe.shared_ffn=768"),
        ("deepseek-v3", {"moe.shared_ffn": 0}, "moe.shared_ffn=0"),
        ("deepseek-v3", {"moe.dense_layers": (1,)}, r"moe.dense_layers=\(1,\): first layers alone"),
        ("deepseek-v3", {"moe.score": "softmax"}, "moe.score='softmax'"),
        ("deepseek-v3", {"mla": None}, r"without latent attention \(mla\)"),
    ],
)
def test_what_a_family_cannot_say_is_not_exported(preset: str, change: dict[str, Any], message: str) -> None:
    config = PRESETS[preset]
    for field, value in change.items():
        part, dot, name = field.partition(".")
        if dot:
            value = dataclasses.replace(getattr(config, part), **{name: value})
        config = dataclasses.replace(config, **{part: value})
    with pytest.raises(ValueError, match=message):
        to_hf(config)
