"""ModelConfig: derived sizes, refusals, counts against the published ones."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest

from plait.models.config import (
    PRESETS,
    ModelConfig,
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
