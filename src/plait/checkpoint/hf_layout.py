"""How plait's parameters are stored in Hugging Face folders: the key tables, both ways."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from plait.models.config import ModelConfig, parameter_shapes

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_GATED = {
    "embed.tokens": ("model.embed_tokens",),
    "norm1": ("input_layernorm",),
    "attn.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.q_norm": ("self_attn.q_norm",),
    "attn.k_norm": ("self_attn.k_norm",),
    "attn.out": ("self_attn.o_proj",),
    "norm2": ("post_attention_layernorm",),
    "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": ("mlp.down_proj",),
    "norm": ("model.norm",),
    "head": ("lm_head",),
}
_GPT2 = {
    "embed.tokens": ("transformer.wte",),
    "embed.positions": ("transformer.wpe",),
    "norm1": ("ln_1",),
    "attn.qkv": ("attn.c_attn",),
    "attn.out": ("attn.c_proj",),
    "norm2": ("ln_2",),
    "mlp.up": ("mlp.c_fc",),
    "mlp.down": ("mlp.c_proj",),
    "norm": ("transformer.ln_f",),
    "head": ("lm_head",),
}


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One stored tensor: rows ``start`` to ``start + rows`` of a parameter, its two dims swapped if ``transposed``."""

    key: str
    start: int
    rows: int
    shape: tuple[int, ...]
    """As stored."""
    transposed: bool


def layout(config: ModelConfig) -> dict[str, tuple[Piece, ...]]:
    """Parameter name -> the stored tensors that are concatenated along its rows, in forward order."""
    table, layers = (_GPT2, "transformer.h") if config.family == "gpt2" else (_GATED, "model.layers")
    key = config.num_kv_heads * config.head_dim
    sections = {"attn.qkv": (config.num_heads * config.head_dim, key, key), "mlp.gate_up": (config.ffn_size,) * 2}
    found: dict[str, tuple[Piece, ...]] = {}
    for name, shape in parameter_shapes(config).items():
        module, _, kind = name.rpartition(".")
        prefix = ""
        if module.startswith("layers."):
            _, index, module = module.split(".", 2)
            prefix = f"{layers}.{index}."
        keys = table[module]
        transposed = config.family == "gpt2" and bool(prefix) and len(shape) == 2
        pieces, start = [], 0
        for part, rows in zip(keys, sections[module] if len(keys) > 1 else shape[:1], strict=True):
            stored = (rows, *shape[1:])
            pieces.append(
                Piece(
                    key=f"{prefix}{part}.{kind}",
                    start=start,
                    rows=rows,
                    shape=stored[::-1] if transposed else stored,
                    transposed=transposed,
                )
            )
            start += rows
        found[name] = tuple(pieces)
    return found
