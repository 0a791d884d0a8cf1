"""`ModelConfig` from and to a Hugging Face ``config.json``. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.models.config import FAMILIES, ModelConfig, RopeScaling

_GELU = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}
_GATED = {"norm": "rmsnorm", "activation": "swiglu", "positions": "rope", "dropout": 0.0}
_FIXED: dict[str, dict[str, object]] = {
    "llama": {**_GATED, "qk_norm": False, "sliding_window": None},
    "mistral": {**_GATED, "qk_norm": False, "qkv_bias": False, "out_bias": False, "mlp_bias": False, "window_from": 0},
    "qwen2": {**_GATED, "qk_norm": False, "qkv_bias": True, "out_bias": False, "mlp_bias": False},
    "qwen3": {**_GATED, "qk_norm": True, "mlp_bias": False},
    "gpt2": {
        "norm": "layernorm",
        "positions": "learned",
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "qk_norm": False,
        "sliding_window": None,
    },
}
"""What a family's Hugging Face form cannot vary."""


def _need(mapping: Mapping[str, Any], key: str) -> Any:
    if mapping.get(key) is None:
        raise ValueError(f"config.json of a {mapping['model_type']} model has no {key!r}")
    return mapping[key]


def _only(mapping: Mapping[str, Any], key: str, works: object) -> None:
    """Refuses a switch that changes the mathematics in a way this decoder does not have."""
    if mapping.get(key, works) != works:
        raise ValueError(f"config.json has {key}={mapping[key]!r}: only {works!r} is supported")


def _rope(mapping: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and scaling; transformers 5 keeps both in ``rope_parameters``, earlier ones in two keys."""
    given: dict[str, Any] = {**(mapping.get("rope_scaling") or {}), **(mapping.get("rope_parameters") or {})}
    if any(isinstance(value, Mapping) for value in given.values()):
        raise ValueError("config.json has rope_parameters for each layer type: only one set is supported")
    _only(given, "partial_rotary_factor", 1.0)
    theta = given.get("rope_theta") or mapping.get("rope_theta") or 10000.0
    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "default":
        return float(theta), None
    if kind == "linear":
        return float(theta), RopeScaling(kind="linear", factor=float(given["factor"]))
    if kind != "llama3":
        raise ValueError(f"config.json has rope_type={kind!r}: 'default', 'linear' and 'llama3' are supported")
    return float(theta), RopeScaling(
        kind="llama3",
        factor=float(given["factor"]),
        low_freq_factor=float(given["low_freq_factor"]),
        high_freq_factor=float(given["high_freq_factor"]),
        original_max_positions=int(
            given.get("original_max_position_embeddings") or _need(mapping, "max_position_embeddings")
        ),
    )


def _window(mapping: Mapping[str, Any], layers: int) -> tuple[int | None, int]:
    """(sliding window, first layer that has it)."""
    family = mapping["model_type"]
    if family == "mistral":
        return mapping.get("sliding_window", 4096), 0
    if family == "llama" or not mapping.get("use_sliding_window", False):
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
        _only(mapping, key, works)
    activation = mapping.get("activation_function", "gelu_new")
    if activation not in _GELU:
        raise ValueError(f"config.json has activation_function={activation!r}: {', '.join(_GELU)} are supported")
    hidden = _need(mapping, "n_embd")
    return ModelConfig(
        family="gpt2",
        vocab_size=_need(mapping, "vocab_size"),
        hidden_size=hidden,
        num_layers=_need(mapping, "n_layer"),
        num_heads=_need(mapping, "n_head"),
        ffn_size=mapping.get("n_inner") or 4 * hidden,
        max_positions=_need(mapping, "n_positions"),
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
    _only(mapping, "hidden_act", "silu")
    layers, heads = _need(mapping, "num_hidden_layers"), _need(mapping, "num_attention_heads")
    kv_default = 8 if family == "mistral" else heads
    head_dim = mapping.get("head_dim") or (128 if family == "qwen3" else 0)
    bias = bool(mapping.get("attention_bias", False)) and family in ("llama", "qwen3")
    theta, scaling = _rope(mapping)
    window, window_from = _window(mapping, layers)
    return ModelConfig(
        family=family,
        vocab_size=_need(mapping, "vocab_size"),
        hidden_size=_need(mapping, "hidden_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=mapping.get("num_key_value_heads") or kv_default,
        head_dim=head_dim,
        ffn_size=_need(mapping, "intermediate_size"),
        max_positions=_need(mapping, "max_position_embeddings"),
        norm_eps=mapping.get("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        qkv_bias=bias or family == "qwen2",
        out_bias=bias,
        mlp_bias=bool(mapping.get("mlp_bias", False)) and family == "llama",
        qk_norm=family == "qwen3",
        tied=mapping.get("tie_word_embeddings", False),
        sliding_window=window,
        window_from=window_from,
        init_std=mapping.get("initializer_range", 0.02),
    )


def from_hf(mapping: Mapping[str, Any]) -> ModelConfig:
    """The model that a Hugging Face ``config.json`` describes, its defaults being those of transformers.

    ``ValueError`` names what is missing or not supported. Dropout of attention weights is not read: GPT-2's
    ``resid_pdrop`` becomes ``dropout``, which stands for the embedding's too.
    """
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
    if config.family in ("llama", "qwen3") and config.qkv_bias != config.out_bias:
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
        "rope_scaling": _scaling_to_hf(config.rope_scaling),
    }
    if config.family in ("llama", "qwen3"):
        hf["attention_bias"] = config.qkv_bias
    if config.family == "llama":
        hf["mlp_bias"] = config.mlp_bias
    if config.family == "mistral":
        hf["sliding_window"] = config.sliding_window
    if config.family in ("qwen2", "qwen3"):
        hf["use_sliding_window"] = config.sliding_window is not None
        hf["sliding_window"] = config.sliding_window
        hf["max_window_layers"] = config.window_from if config.sliding_window is not None else config.num_layers
    return hf


def _scaling_to_hf(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    if scaling.kind == "linear":
        return {"rope_type": "linear", "factor": scaling.factor}
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_positions,
    }
