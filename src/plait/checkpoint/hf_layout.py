"""How plait's parameters are stored in Hugging Face folders: the key tables, both ways."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from plait.models.config import ModelConfig, parameter_shapes
from plait.models.init import Box

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


_EXPERTS = {
    "mlp.router": ("mlp.gate",),
    "mlp.experts.gate_up": ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
    "mlp.experts.down": ("mlp.experts.{}.down_proj",),
    "mlp.shared.gate_up": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    "mlp.shared.down": ("mlp.shared_experts.down_proj",),
}
_LATENT = {
    "attn.q": ("self_attn.q_proj",),
    "attn.q_a": ("self_attn.q_a_proj",),
    "attn.q_a_norm": ("self_attn.q_a_layernorm",),
    "attn.q_b": ("self_attn.q_b_proj",),
    "attn.kv_a": ("self_attn.kv_a_proj_with_mqa",),
    "attn.kv_a_norm": ("self_attn.kv_a_layernorm",),
    "attn.kv_b": ("self_attn.kv_b_proj",),
}
_MIXTRAL = {
    "mlp.router": ("block_sparse_moe.gate",),
    "mlp.experts.gate_up": ("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
    "mlp.experts.down": ("block_sparse_moe.experts.{}.w2",),
}
_TABLES: dict[str, dict[str, tuple[str, ...]]] = {"gpt2": {**_GPT2}, "mixtral": {**_GATED, **_MIXTRAL}}
_LLAMA: dict[str, tuple[str, ...]] = {**_GATED, **_EXPERTS, **_LATENT}
"""Every family that has no table of its own."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One stored tensor: the part ``box`` of a parameter, its two dims swapped if ``transposed``.

    Of a stack of experts it is one expert's matrix, stored without the stack's dim.
    """

    key: str
    box: Box
    transposed: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """As stored."""
        sizes = tuple(stop - start for start, stop in self.box)[self.lead :]
        return sizes[::-1] if self.transposed else sizes

    @property
    def lead(self) -> int:
        """Dims of the parameter that the stored tensor does not have."""
        return max(0, len(self.box) - 2)


def layout(config: ModelConfig) -> dict[str, tuple[Piece, ...]]:
    """Parameter name -> the stored tensors that it is made of, in forward order."""
    layers = "transformer.h" if config.family == "gpt2" else "model.layers"
    table = _TABLES.get(config.family, _LLAMA)
    found: dict[str, tuple[Piece, ...]] = {}
    for name, shape in parameter_shapes(config).items():
        module, _, kind = name.rpartition(".")
        if len(shape) == 3:  # a stack of experts, which is a parameter and no module
            module, kind = name, "weight"
        prefix = ""
        if module.startswith("layers."):
            _, index, module = module.split(".", 2)
            prefix = f"{layers}.{index}."
        if (module, kind) == ("mlp.router", "bias"):
            kind = "e_score_correction_bias"
        transposed = config.family == "gpt2" and bool(prefix) and len(shape) == 2
        keys = [f"{prefix}{part}.{kind}" for part in table[module]]
        found[name] = tuple(_pieces(keys, _sections(config, module, shape, len(keys)), shape, transposed))
    return found


def _sections(config: ModelConfig, module: str, shape: tuple[int, ...], parts: int) -> tuple[int, ...]:
    """Rows of each of the ``parts`` stored tensors that a matrix of ``shape`` (or one of its stack) is made of."""
    rows = shape[1] if len(shape) == 3 else shape[0]
    if parts == 1:
        return (rows,)
    if module == "attn.qkv":
        key = config.num_kv_heads * config.head_dim
        return (config.num_heads * config.head_dim, key, key)
    return (rows // 2, rows // 2)  # gate and up


def _pieces(keys: list[str], sections: tuple[int, ...], shape: tuple[int, ...], transposed: bool) -> Iterator[Piece]:
    stack = [((expert, expert + 1),) for expert in range(shape[0])] if len(shape) == 3 else [()]
    for number, lead in enumerate(stack):
        columns = tuple((0, size) for size in shape[len(lead) + 1 :])
        start = 0
        for key, rows in zip(keys, sections, strict=True):
            yield Piece(key=key.format(number), box=(*lead, (start, start + rows), *columns), transposed=transposed)
            start += rows
