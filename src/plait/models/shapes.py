"""What a `ModelConfig` amounts to: names and shapes of its parameters, and its arithmetic. Standard library only."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.models.config import ModelConfig


def _linear(shapes: dict[str, tuple[int, ...]], name: str, rows: int, columns: int, bias: bool = False) -> None:
    shapes[f"{name}.weight"] = (rows, columns)
    if bias:
        shapes[f"{name}.bias"] = (rows,)


def _norm(shapes: dict[str, tuple[int, ...]], name: str, config: ModelConfig) -> None:
    shapes[f"{name}.weight"] = (config.hidden_size,)
    if config.norm == "layernorm":
        shapes[f"{name}.bias"] = (config.hidden_size,)


def _attention(shapes: dict[str, tuple[int, ...]], attn: str, config: ModelConfig) -> None:
    hidden, head_dim, heads, kv_heads = config.hidden_size, config.head_dim, config.num_heads, config.num_kv_heads
    mla = config.mla
    if mla is None:
        _linear(shapes, f"{attn}.qkv", (heads + 2 * kv_heads) * head_dim, hidden, config.qkv_bias)
        if config.qk_norm:
            shapes[f"{attn}.q_norm.weight"] = (head_dim,)
            shapes[f"{attn}.k_norm.weight"] = (head_dim,)
        _linear(shapes, f"{attn}.out", hidden, heads * head_dim, config.out_bias)
        return
    if mla.q_rank is None:
        _linear(shapes, f"{attn}.q", heads * mla.qk_dim, hidden)
    else:
        _linear(shapes, f"{attn}.q_a", mla.q_rank, hidden)
        shapes[f"{attn}.q_a_norm.weight"] = (mla.q_rank,)
        _linear(shapes, f"{attn}.q_b", heads * mla.qk_dim, mla.q_rank)
    _linear(shapes, f"{attn}.kv_a", mla.kv_rank + mla.rope_dim, hidden)
    shapes[f"{attn}.kv_a_norm.weight"] = (mla.kv_rank,)
    _linear(shapes, f"{attn}.kv_b", heads * (mla.nope_dim + mla.v_dim), mla.kv_rank)
    _linear(shapes, f"{attn}.out", hidden, heads * mla.v_dim)


def _mlp(shapes: dict[str, tuple[int, ...]], mlp: str, config: ModelConfig, layer: int) -> None:
    hidden, ffn, moe = config.hidden_size, config.ffn_size, config.moe_of(layer)
    if moe is not None:
        _linear(shapes, f"{mlp}.router", moe.num_experts, hidden, moe.bias)
        shapes[f"{mlp}.experts.gate_up"] = (moe.num_experts, 2 * moe.ffn_size, hidden)
        shapes[f"{mlp}.experts.down"] = (moe.num_experts, hidden, moe.ffn_size)
        if moe.shared_ffn:
            _linear(shapes, f"{mlp}.shared.gate_up", 2 * moe.shared_ffn, hidden)
            _linear(shapes, f"{mlp}.shared.down", hidden, moe.shared_ffn)
        return
    if config.gated:
        _linear(shapes, f"{mlp}.gate_up", 2 * ffn, hidden, config.mlp_bias)
    else:
        _linear(shapes, f"{mlp}.up", ffn, hidden, config.mlp_bias)
    _linear(shapes, f"{mlp}.down", hidden, ffn, config.mlp_bias)


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> full shape of every parameter, in forward order. A tied head has no entry."""
    shapes: dict[str, tuple[int, ...]] = {"embed.tokens.weight": (config.vocab_size, config.hidden_size)}
    if config.positions == "learned":
        shapes["embed.positions.weight"] = (config.max_positions, config.hidden_size)
    for index in range(config.num_layers):
        layer = f"layers.{index}"
        _norm(shapes, f"{layer}.norm1", config)
        _attention(shapes, f"{layer}.attn", config)
        _norm(shapes, f"{layer}.norm2", config)
        _mlp(shapes, f"{layer}.mlp", config, index)
    _norm(shapes, "norm", config)
    if not config.tied:
        shapes["head.weight"] = (config.vocab_size, config.hidden_size)
    return shapes


def canonical_name(name: str, config: ModelConfig) -> str:
    """The stored name of a module's parameter: the head of a tied model is the token embedding."""
    return "embed.tokens.weight" if config.tied and name == "head.weight" else name


def parameter_count(config: ModelConfig) -> int:
    """Number of parameters, a tied head counted once."""
    return sum(math.prod(shape) for shape in parameter_shapes(config).values())


def flops_per_token(config: ModelConfig, seq: int) -> float:
    """Floating-point operations of forward and backward for one token of a sample of ``seq`` tokens.

    6 for each parameter of a matrix product (2 forward, 4 backward; the head counts even when tied, the embedding
    lookup does not; of a layer's experts those of one token's choice count, K of E), and for each key that a query sees
    6 for each dim of a head's key and of its value (QK^T and AV, 2 each forward, twice that backward). The causal mask
    halves the latter: a query sees (seq + 1) / 2 keys in the mean, fewer under a sliding window. Recomputation is not
    counted (Chowdhery et al. 2022, arXiv:2204.02311, appendix B, plus the halving).
    """
    products = float(config.vocab_size * config.hidden_size)
    for name, shape in parameter_shapes(config).items():
        if len(shape) == 3 and config.moe is not None:
            products += math.prod(shape) * config.moe.top_k / config.moe.num_experts
        elif len(shape) == 2 and not name.startswith(("embed.", "head.")):
            products += math.prod(shape)
    keys = 0.0
    for layer in range(config.num_layers):
        window = min(config.window_of(layer) or seq, seq)
        keys += window - window * (window - 1) / (2 * seq)
    dims = 2 * config.head_dim if config.mla is None else config.mla.qk_dim + config.mla.v_dim
    return 6.0 * products + 6.0 * config.num_heads * dims * keys
