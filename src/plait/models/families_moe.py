"""Experts and latent attention from and to a Hugging Face ``config.json``. Standard library only.

What is a choice of training alone (capacity, losses, moving the bias) has no Hugging Face form and is not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.models.config import MLAConfig, ModelConfig, MoEConfig
from plait.models.hf_fields import need, only

MOE_FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v3")

_PLAIN = {"score": "softmax", "scale": 1.0, "groups": 1, "bias": False, "shared_ffn": 0}
_FIXED: dict[str, dict[str, object]] = {
    "mixtral": {**_PLAIN, "normalise": True, "dense_layers": ()},
    "qwen3_moe": _PLAIN,
    "deepseek_v3": {"score": "sigmoid", "bias": True},
}
"""What a family's Hugging Face form cannot vary of its experts."""


def experts_from_hf(mapping: Mapping[str, Any]) -> MoEConfig | None:
    """The experts of a config.json; None for a family without."""
    family = mapping["model_type"]
    if family not in MOE_FAMILIES:
        return None
    if family == "mixtral":
        return MoEConfig(
            num_experts=_count(mapping, 8),
            top_k=mapping.get("num_experts_per_tok") or 2,
            ffn_size=need(mapping, "intermediate_size"),
        )
    layers = need(mapping, "num_hidden_layers")
    if family == "qwen3_moe":
        step, plain = mapping.get("decoder_sparse_step", 1), mapping.get("mlp_only_layers") or ()
        return MoEConfig(
            num_experts=_count(mapping, 128),
            top_k=mapping.get("num_experts_per_tok") or 8,
            ffn_size=mapping.get("moe_intermediate_size") or 768,
            dense_layers=tuple(layer for layer in range(layers) if layer in plain or (layer + 1) % step),
            normalise=bool(mapping.get("norm_topk_prob", False)),
        )
    for key, works in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"), ("moe_layer_freq", 1)):
        only(mapping, key, works)
    width = mapping.get("moe_intermediate_size") or 2048
    return MoEConfig(
        num_experts=_count(mapping, 256),
        top_k=mapping.get("num_experts_per_tok") or 8,
        ffn_size=width,
        shared_ffn=width * (mapping.get("n_shared_experts") or 1),
        dense_layers=tuple(range(min(_given(mapping, "first_k_dense_replace", 3), layers))),
        score="sigmoid",
        normalise=bool(_given(mapping, "norm_topk_prob", True)),
        scale=float(_given(mapping, "routed_scaling_factor", 2.5)),
        groups=mapping.get("n_group") or 8,
        top_groups=mapping.get("topk_group") or 4,
        bias=True,
    )


def _given(mapping: Mapping[str, Any], key: str, default: Any) -> Any:
    return default if mapping.get(key) is None else mapping[key]


def _count(mapping: Mapping[str, Any], default: int) -> int:
    """Number of experts, under any of its names."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    return next((int(mapping[name]) for name in names if mapping.get(name) is not None), default)


def latent_from_hf(mapping: Mapping[str, Any]) -> MLAConfig | None:
    """The latent attention of a config.json; None for a family without."""
    if mapping["model_type"] != "deepseek_v3":
        return None
    return MLAConfig(
        q_rank=mapping.get("q_lora_rank", 1536),
        kv_rank=mapping.get("kv_lora_rank") or 512,
        nope_dim=mapping.get("qk_nope_head_dim") or 128,
        rope_dim=mapping.get("qk_rope_head_dim") or 64,
        v_dim=mapping.get("v_head_dim") or 128,
        interleaved=bool(_given(mapping, "rope_interleave", True)),
    )


def check_experts(config: ModelConfig) -> None:
    """``ValueError`` where the family cannot say the experts or the latent attention of ``config``."""
    family, moe = config.family, config.moe
    if moe is None:
        raise ValueError(f"a {family} model has no Hugging Face form without experts (moe)")
    for field, value in _FIXED[family].items():
        if getattr(moe, field) != value:
            raise ValueError(
                f"a {family} model has no Hugging Face form with moe.{field}={getattr(moe, field)!r}: only {value!r}"
            )
    if family == "mixtral" and config.ffn_size != moe.ffn_size:
        raise ValueError(
            f"a mixtral model has no Hugging Face form with ffn_size={config.ffn_size} apart from "
            f"moe.ffn_size={moe.ffn_size}"
        )
    if family != "deepseek_v3":
        return
    if config.mla is None:
        raise ValueError("a deepseek_v3 model has no Hugging Face form without latent attention (mla)")
    if moe.shared_ffn % moe.ffn_size or not moe.shared_ffn:
        raise ValueError(
            f"a deepseek_v3 model has no Hugging Face form with moe.shared_ffn={moe.shared_ffn}: "
            f"multiples of moe.ffn_size={moe.ffn_size} alone"
        )
    if moe.dense_layers != tuple(range(len(moe.dense_layers))):
        raise ValueError(
            f"a deepseek_v3 model has no Hugging Face form with moe.dense_layers={moe.dense_layers}: first layers alone"
        )


def experts_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The keys of the experts and of the latent attention; call `check_experts` before."""
    moe, mla = config.moe, config.mla
    assert moe is not None
    common: dict[str, Any] = {"num_experts_per_tok": moe.top_k, "router_aux_loss_coef": moe.aux_loss}
    if config.family == "mixtral":
        return {**common, "num_local_experts": moe.num_experts}
    common |= {"moe_intermediate_size": moe.ffn_size, "norm_topk_prob": moe.normalise}
    if config.family == "qwen3_moe":
        return {
            **common,
            "num_experts": moe.num_experts,
            "decoder_sparse_step": 1,
            "mlp_only_layers": list(moe.dense_layers),
        }
    assert mla is not None
    return {
        **common,
        "n_routed_experts": moe.num_experts,
        "n_shared_experts": moe.shared_ffn // moe.ffn_size,
        "n_group": moe.groups,
        "topk_group": moe.top_groups,
        "routed_scaling_factor": moe.scale,
        "first_k_dense_replace": len(moe.dense_layers),
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "q_lora_rank": mla.q_rank,
        "kv_lora_rank": mla.kv_rank,
        "qk_nope_head_dim": mla.nope_dim,
        "qk_rope_head_dim": mla.rope_dim,
        "v_head_dim": mla.v_dim,
        "rope_interleave": mla.interleaved,
        "num_nextn_predict_layers": 0,
    }
