"""ModelConfig: derived sizes, refusals, counts against the published ones."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest

from plait.models.config import (
    PRESETS,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    RopeScaling,
    canonical_name,
    flops_per_token,
    parameter_count,
    parameter_shapes,
)

SMALL = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "ffn_size": 48,
    "max_positions": 64,
}


@pytest.mark.parametrize(
    ("preset", "count"),
    [
        ("gpt2", 124_439_808),
        ("llama2-7b", 6_738_415_616),
        ("llama3-8b", 8_030_261_248),
        ("mistral-7b", 7_241_732_096),
        ("qwen2-7b", 7_615_616_512),
        ("qwen3-8b", 8_190_735_360),
        ("mixtral-8x7b", 46_702_792_704),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("deepseek-v3", 671_026_419_200),
    ],
)
def test_presets_have_the_published_number_of_parameters(preset: str, count: int) -> None:
    assert parameter_count(PRESETS[preset]) == count


def test_small_presets() -> None:
    tiny, bench = PRESETS["tiny"], PRESETS["bench"]
    assert (tiny.hidden_size, tiny.num_layers, tiny.num_heads, tiny.num_kv_heads) == (128, 4, 4, 2)
    assert (tiny.ffn_size, tiny.vocab_size, tiny.max_positions) == (352, 256, 2048)
    assert (bench.hidden_size, bench.num_layers, bench.num_heads, bench.num_kv_heads) == (512, 8, 8, 4)
    assert (bench.ffn_size, bench.vocab_size) == (1408, 8192)


def test_zero_sizes_are_derived() -> None:
    config = ModelConfig(**SMALL)
    assert (config.num_kv_heads, config.head_dim) == (4, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_kv_heads": 3}, r"num_kv_heads=3 does not divide num_heads=4: \[1, 2, 4\] do"),
        ({"hidden_size": 30}, "hidden_size=30 is not a multiple of num_heads=4"),
        ({"num_layers": 0}, "num_layers=0 must be a positive integer"),
        ({"ffn_size": 1.5}, r"ffn_size=1.5 must be a positive integer"),
        ({"norm": "batch"}, "norm='batch' is not one of rmsnorm, layernorm"),
        ({"family": "bert"}, "family='bert' is not one of llama, mistral"),
        ({"head_dim": 7}, "head_dim=7 must be even"),
        ({"dropout": 1.0}, r"dropout=1.0 must be in \[0, 1\)"),
        ({"sliding_window": 0}, "sliding_window=0 must be positive"),
    ],
)
def test_what_cannot_work_is_refused_by_name(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig(**{**SMALL, **change})


MOE: dict[str, object] = {"num_experts": 8, "top_k": 2, "ffn_size": 16}
MLA: dict[str, object] = {"q_rank": 8, "kv_rank": 8, "nope_dim": 4, "rope_dim": 4, "v_dim": 6}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": 0}, "moe.num_experts=0 must be a positive integer"),
        ({"top_k": 9}, "moe.top_k=9 is more than the 8 experts to choose from"),
        ({"top_k": 5, "groups": 4, "top_groups": 2}, "moe.top_k=5 is more than the 4 experts"),
        ({"groups": 3}, r"moe.groups=3 does not cut 8 experts into groups of two and more: \[1, 2, 4\] do"),
        ({"groups": 8}, "moe.groups=8 does not cut 8 experts"),
        ({"groups": 2, "top_groups": 3}, "moe.top_groups=3 is more than moe.groups=2"),
        ({"score": "relu"}, "moe.score='relu' is not one of softmax, sigmoid"),
        ({"drop": "late"}, "moe.drop='late' is not one of position, score"),
        ({"aux_loss": -1.0}, "moe.aux_loss=-1.0 must be at least 0"),
        ({"z_loss": math.nan}, "moe.z_loss=nan must be at least 0"),
        ({"capacity_factor": 0.0}, "moe.capacity_factor=0.0 must be positive, or absent"),
        ({"shared_ffn": -1}, "moe.shared_ffn=-1 must be an integer of at least 0"),
        ({"dense_layers": (-1,)}, r"moe.dense_layers=\(-1,\) must be layer numbers"),
        ({"bias_balance": True}, "moe.bias_balance=true moves a bias that the router does not have: set moe.bias"),
    ],
)
def test_experts_that_cannot_work_are_refused_by_name(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MoEConfig(**{**MOE, **change})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_rank": 0}, "mla.kv_rank=0 must be a positive integer"),
        ({"rope_dim": 3}, "mla.rope_dim=3 must be even"),
    ],
)
def test_latent_attention_that_cannot_work_is_refused_by_name(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MLAConfig(**{**MLA, **change})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"moe": MOE, "activation": "gelu"}, "moe does not go with activation='gelu'"),
        ({"moe": MOE, "mlp_bias": True}, "mlp_bias=True"),
        ({"moe": {**MOE, "experts": 3}}, "unknown field moe.experts: the fields are num_experts, top_k"),
        ({"mla": MLA, "head_dim": 6}, r"head_dim=6 is not mla's nope_dim \+ rope_dim = 8"),
        ({"mla": MLA, "num_kv_heads": 2}, "num_kv_heads=2: latent attention has num_heads=4"),
        ({"mla": MLA, "qkv_bias": True}, "qkv_bias=True does not go with mla"),
        ({"mla": MLA, "qk_norm": True}, "qk_norm=True does not go with mla"),
        ({"mla": MLA, "positions": "learned"}, "positions='learned' does not go with mla: only 'rope'"),
    ],
)
def test_parts_that_do_not_go_together_are_refused_by_name(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_mapping({**SMALL, **change})


def test_the_parts_of_a_mapping_are_read_from_json_and_toml() -> None:
    config = ModelConfig.from_mapping({**SMALL, "moe": {**MOE, "dense_layers": [1, 0]}, "mla": MLA})
    assert config.moe is not None
    assert config.moe.dense_layers == (0, 1)
    assert (config.head_dim, config.num_kv_heads) == (8, 4)
    assert ModelConfig.from_mapping(json.loads(json.dumps(config.to_mapping()))) == config
    assert [config.moe_of(layer) for layer in range(3)] == [None, None, config.moe]


def test_flops_count_the_experts_of_one_token_and_the_dims_of_latent_heads() -> None:
    seq, pairs = 10, sum(range(1, 11))
    mixed = ModelConfig.from_mapping({**SMALL, "moe": {**MOE, "shared_ffn": 12, "dense_layers": (0,)}})
    dense = 3 * 32 * 48
    sparse = 8 * 32 + 2 * 3 * 32 * 16 + 3 * 32 * 12
    difference = flops_per_token(mixed, seq) - flops_per_token(ModelConfig(**SMALL), seq)
    assert difference == pytest.approx(6 * (sparse - dense))
    latent = ModelConfig.from_mapping({**SMALL, "mla": MLA})
    products = 50 * 32 + 2 * (3 * 32 * 48 + 8 * 32 + 32 * 8 + 12 * 32 + 4 * 10 * 8 + 32 * 24)
    attention = 3 * 2 * (8 + 6) * 4 * 2 * pairs / seq
    assert flops_per_token(latent, seq) == pytest.approx(6 * products + attention)


def test_a_mixture_of_the_bench_sizes_has_as_many_operations_as_the_dense_model() -> None:
    for sparse, dense in (("moe-tiny", "tiny"), ("bench-moe", "bench")):
        more = flops_per_token(PRESETS[sparse], 256) / flops_per_token(PRESETS[dense], 256)
        assert 1 < more < 1.005  # the router's own


def test_bad_rope_scaling_is_refused() -> None:
    with pytest.raises(ValueError, match="'dynamic' is not supported"):
        RopeScaling(kind="dynamic", factor=2.0)
    with pytest.raises(ValueError, match="beta_fast > beta_slow"):
        RopeScaling(kind="yarn", factor=2.0, beta_fast=1.0)
    with pytest.raises(ValueError, match="high_freq_factor > low_freq_factor"):
        RopeScaling(kind="llama3", factor=2.0, low_freq_factor=4.0, high_freq_factor=4.0)


def test_mapping_round_trip() -> None:
    for config in (*PRESETS.values(), ModelConfig(**SMALL, rope_scaling=RopeScaling(kind="linear", factor=2.0))):
        assert ModelConfig.from_mapping(config.to_mapping()) == config
    with pytest.raises(ValueError, match="unknown model field hiden"):
        ModelConfig.from_mapping({**SMALL, "hiden": 3})
    with pytest.raises(ValueError, match="model field ffn_size is missing"):
        ModelConfig.from_mapping({name: size for name, size in SMALL.items() if name != "ffn_size"})


def test_tied_head_has_no_entry_and_maps_to_the_embedding() -> None:
    untied, tied = ModelConfig(**SMALL), ModelConfig(**SMALL, tied=True)
    assert list(parameter_shapes(untied)) == [*parameter_shapes(tied), "head.weight"]
    assert canonical_name("head.weight", tied) == "embed.tokens.weight"
    assert canonical_name("head.weight", untied) == "head.weight"


def test_flops_are_six_a_weight_and_the_causal_half_of_attention() -> None:
    config, seq = ModelConfig(**SMALL, tied=True), 10
    shapes = parameter_shapes(config)
    products = sum(math.prod(shape) for name, shape in shapes.items() if len(shape) == 2)  # the embedding is the head
    pairs = sum(range(1, seq + 1))
    attention = 3 * 2 * 2 * pairs * config.num_heads * config.head_dim * config.num_layers / seq
    assert flops_per_token(config, seq) == pytest.approx(6 * products + attention)
    untied = ModelConfig(**SMALL)
    assert flops_per_token(untied, seq) == flops_per_token(config, seq)


def test_flops_count_the_window_from_its_first_layer() -> None:
    seq, window = 10, 4
    pairs = sum(min(t, window) for t in range(1, seq + 1)) + sum(range(1, seq + 1))
    full = flops_per_token(ModelConfig(**SMALL), seq) - 12 * 32 * 2 * sum(range(1, seq + 1)) / seq
    windowed = ModelConfig(**SMALL, sliding_window=window, window_from=1)
    assert flops_per_token(windowed, seq) == pytest.approx(full + 12 * 32 * pairs / seq)


def test_configuration_does_not_import_torch() -> None:
    code = "import sys, plait.models.families; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
