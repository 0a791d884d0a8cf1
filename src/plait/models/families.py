"""`ModelConfig` from and to a Hugging Face ``config.json``. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.models.config import FAMILIES, ModelConfig
from plait.models.families_moe import MOE_FAMILIES, check_experts, experts_from_hf, experts_to_hf, latent_from_hf
from plait.models.hf_fields import need, only, rope, scaling_to_hf

_GELU = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}
_GATED = {"norm": "rmsnorm", "activation": "swiglu", "positions": "rope", "dropout": 0.0, "mla": None}
_BIASLESS = {"qkv_bias": False, "out_bias": False, "mlp_bias": False}
_FIXED: dict[str, dict[str, object]] = {
    "llama": {**_GATED, "moe": None, "qk_norm": False, "sliding_window": None},
    "mistral": {**_GATED, **_BIASLESS, "moe": None, "qk_norm": False, "window_from": 0},
    "qwen2": {**_GATED, "moe": None, "qk_norm": False, "qkv_bias": True, "out_bias": False, "mlp_bias": False},
    "qwen3": {**_GATED, "moe": None, "qk_norm": True, "mlp_bias": False},
    "mixtral": {**_GATED, **_BIASLESS, "qk_norm": False, "window_from": 0},
    "qwen3_moe": {**_GATED, "qk_norm": True, "window_from": 0},
    "deepseek_v3": {"norm": "rmsnorm", "dropout": 0.0, "sliding_window": None},
    "gpt2": {
        "norm": "layernorm",
        "positions": "learned",
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "qk_norm": False,
        "sliding_window": None,
        "moe": None,
        "mla": None,
    },
}
"""What a family's Hugging Face form cannot vary."""


def _window(mapping: Mapping[str, Any], layers: int) -> tuple[int | None, int]:
    """(sliding window, first layer that has it)."""
    family = mapping["model_type"]
    if family == "mistral":
        return mapping.get("sliding_window", 4096), 0
    if family == "mixtral" or (family == "qwen3_moe" and mapping.get("use_sliding_window", False)):
        return mapping.get("sliding_window", None if family == "mixtral" else 4096), 0
    if family in ("llama", "deepseek_v3") or not mapping.get("use_sliding_window", False):
        return None, 0
    start = mapping.get("max_window_layers", 28)
    types = mapping.get("layer_types")
    if types is not None:
        start = types.index("sliding_attention") if "sliding_attention" in types else layers
        if any(kind != "sliding_attention" for kind in types[start:]):
            raise ValueError("config.json mixes layer_types: only full attention below and sliding above is supported")
    window = mapping.get("sliding_window", 4096)
    return (window, start) if window is not None and start < layers else (None, 0)


def _from_gpt2(mapping: Mapping[str, Any]) -> ModelConfig:
    for key, works in (
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
        ("add_cross_attention", False),
    ):
        only(mapping, key, works)
    activation = mapping.get("activation_function", "gelu_new")
    if activation not in _GELU:
        raise ValueError(f"config.json has activation_function={activation!r}: {', '.join(_GELU)} are supported")
    hidden = need(mapping, "n_embd")
    return ModelConfig(
        family="gpt2",
        vocab_size=need(mapping, "vocab_size"),
        hidden_size=hidden,
        num_layers=need(mapping, "n_layer"),
        num_heads=need(mapping, "n_head"),
        ffn_size=mapping.get("n_inner") or 4 * hidden,
        max_positions=need(mapping, "n_positions"),
        norm="layernorm",
        norm_eps=mapping.get("layer_norm_epsilon", 1e-5),
        activation=_GELU[activation],
        positions="learned",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tied=mapping.get("tie_word_embeddings", True),
        dropout=float(mapping.get("resid_pdrop", 0.1)),
        init_std=mapping.get("initializer_range", 0.02),
    )


def _from_gated(mapping: Mapping[str, Any]) -> ModelConfig:
    family = mapping["model_type"]
    only(mapping, "hidden_act", "silu")
    if family == "deepseek_v3":
        only(mapping, "attention_bias", False)
    layers, heads = need(mapping, "num_hidden_layers"), need(mapping, "num_attention_heads")
    kv_default = {"mistral": 8, "mixtral": 8, "qwen3_moe": 4}.get(family, heads)
    mla = latent_from_hf(mapping)
    # DeepSeek's own head_dim is that of the rotary part.
    head_dim = 0 if mla is not None else mapping.get("head_dim") or (128 if family == "qwen3" else 0)
    bias = bool(mapping.get("attention_bias", False)) and family in ("llama", "qwen3", "qwen3_moe")
    theta, scaling = rope(mapping, 1e6 if family == "mixtral" else 10000.0)
    window, window_from = _window(mapping, layers)
    return ModelConfig(
        family=family,
        vocab_size=need(mapping, "vocab_size"),
        hidden_size=need(mapping, "hidden_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads if mla is not None else mapping.get("num_key_value_heads") or kv_default,
        head_dim=head_dim,
        ffn_size=need(mapping, "intermediate_size"),
        max_positions=need(mapping, "max_position_embeddings"),
        norm_eps=mapping.get("rms_norm_eps", 1e-5 if family == "mixtral" else 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        qkv_bias=bias or family == "qwen2",
        out_bias=bias,
        mlp_bias=bool(mapping.get("mlp_bias", False)) and family == "llama",
        qk_norm=family in ("qwen3", "qwen3_moe"),
        tied=mapping.get("tie_word_embeddings", False),
        sliding_window=window,
        window_from=window_from,
        init_std=mapping.get("initializer_range", 0.02),
        moe=experts_from_hf(mapping),
        mla=mla,
    )


def from_hf(mapping: Mapping[str, Any]) -> ModelConfig:
    """The model that a Hugging Face ``config.json`` describes, its defaults being those of transformers.

    ``ValueError`` names what is missing or not supported. Dropout of attention weights is not read: GPT-2's
    ``resid_pdrop`` becomes ``dropout``, which stands for the embedding's too.
    """
    if not isinstance(mapping, Mapping):
        raise ValueError(f"expected a JSON object, found {type(mapping).__name__}")
    family = mapping.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"model_type {family!r} is not supported: {', '.join(FAMILIES)} are")
    return _from_gpt2(mapping) if family == "gpt2" else _from_gated(mapping)


def _check_family(config: ModelConfig) -> None:
    for field, value in _FIXED[config.family].items():
        if getattr(config, field) != value:
            raise ValueError(
                f"a {config.family} model has no Hugging Face form with {field}={getattr(config, field)!r}: "
                f"only {value!r}"
            )
    if config.family in MOE_FAMILIES:
        check_experts(config)
    if config.family in ("llama", "qwen3", "qwen3_moe") and config.qkv_bias != config.out_bias:
        raise ValueError(f"a {config.family} model has no Hugging Face form with qkv_bias apart from out_bias")
    if config.family in ("qwen2", "gpt2") and config.head_dim * config.num_heads != config.hidden_size:
        raise ValueError(f"a {config.family} model has no Hugging Face form with head_dim={config.head_dim}")
    if config.family == "gpt2":
        if config.gated:
            raise ValueError("a gpt2 model has no Hugging Face form with activation='swiglu'")
        if config.num_kv_heads != config.num_heads:
            raise ValueError("a gpt2 model has no Hugging Face form with fewer KV heads than heads")


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """The ``config.json`` that transformers (4 and 5) reads; ``ValueError`` where the family cannot say ``config``."""
    _check_family(config)
    common: dict[str, Any] = {
        "model_type": config.family,
        "architectures": [_ARCHITECTURES[config.family]],
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tied,
        "initializer_range": config.init_std,
        # transformers would otherwise assume its own ids, which need not exist in this vocabulary.
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if config.family == "gpt2":
        return {
            **common,
            "n_embd": config.hidden_size,
            "n_layer": config.num_layers,
            "n_head": config.num_heads,
            "n_inner": config.ffn_size,
            "n_positions": config.max_positions,
            "layer_norm_epsilon": config.norm_eps,
            "activation_function": "gelu_new" if config.activation == "gelu_tanh" else "gelu",
            "resid_pdrop": config.dropout,
            "embd_pdrop": config.dropout,
            "attn_pdrop": 0.0,
        }
    hf: dict[str, Any] = {
        **common,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn_size,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling_to_hf(config.rope_scaling),
    }
    if config.family == "deepseek_v3":
        del hf["head_dim"]
    if config.family in MOE_FAMILIES:
        hf |= experts_to_hf(config)
    if config.family in ("llama", "qwen3", "qwen3_moe"):
        hf["attention_bias"] = config.qkv_bias
    if config.family == "llama":
        hf["mlp_bias"] = config.mlp_bias
    if config.family in ("mistral", "mixtral"):
        hf["sliding_window"] = config.sliding_window
    if config.family in ("qwen2", "qwen3", "qwen3_moe"):
        hf["use_sliding_window"] = config.sliding_window is not None
        hf["sliding_window"] = config.sliding_window
    if config.family in ("qwen2", "qwen3"):
        hf["max_window_layers"] = config.window_from if config.sliding_window is not None else config.num_layers
    return hf
