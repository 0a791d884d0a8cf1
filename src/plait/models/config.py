"""`ModelConfig`: a decoder as data. Families differ in values here, not in model files. Standard library only.

Letters used for sizes: D hidden, H query heads, K key/value heads, E head_dim, F ffn, V vocabulary, P max positions.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gpt2")
"""Families with a Hugging Face form (its ``model_type``)."""

_CHOICES = {
    "family": FAMILIES,
    "norm": ("rmsnorm", "layernorm"),
    "activation": ("swiglu", "gelu", "gelu_tanh"),
    "positions": ("rope", "learned"),
}
_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "ffn_size",
    "max_positions",
)


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Stretching of rotary frequencies beyond the trained length.

    ``linear`` divides every frequency by ``factor`` (Chen et al. 2023, arXiv:2306.15595); ``llama3`` divides those
    whose wavelength exceeds ``original_max_positions / low_freq_factor``, keeps those below
    ``original_max_positions / high_freq_factor``, and interpolates between (Llama 3.1's published code).
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192

    def __post_init__(self) -> None:
        if self.kind not in ("llama3", "linear"):
            raise ValueError(f"rope scaling {self.kind!r} is not supported: use 'llama3' or 'linear'")
        if not self.factor > 0:
            raise ValueError(f"rope scaling factor={self.factor!r} must be positive")
        if self.kind == "llama3" and not self.high_freq_factor > self.low_freq_factor > 0:
            raise ValueError(
                f"rope scaling needs high_freq_factor > low_freq_factor > 0, "
                f"not {self.high_freq_factor!r} and {self.low_freq_factor!r}"
            )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Everything that decides a decoder's parameters and its mathematics; ``ValueError`` on what cannot work."""

    family: str = "llama"
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int = 0
    """0 stands for ``num_heads``; a config always holds the number itself."""
    head_dim: int = 0
    """0 stands for ``hidden_size / num_heads``; a config always holds the number itself."""
    ffn_size: int
    max_positions: int
    norm: str = "rmsnorm"
    norm_eps: float = 1e-5
    activation: str = "swiglu"
    """``swiglu`` is gated: its MLP has two input projections."""
    positions: str = "rope"
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm over each head's query and key."""
    tied: bool = False
    """The head is the token embedding: one tensor."""
    dropout: float = 0.0
    """Of the embedding and of both residual branches. Attention weights are never dropped."""
    sliding_window: int | None = None
    """Keys a query sees, itself among them; None is all of them."""
    window_from: int = 0
    """First layer that has the sliding window."""
    init_std: float = 0.02

    def __post_init__(self) -> None:
        if self.num_kv_heads == 0:
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        if self.head_dim == 0 and self.num_heads:
            if self.hidden_size % self.num_heads:
                raise ValueError(
                    f"hidden_size={self.hidden_size} is not a multiple of num_heads={self.num_heads}: give head_dim"
                )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_heads)
        for field in _SIZES:
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{field}={value!r} must be a positive integer")
        for field, choices in _CHOICES.items():
            if getattr(self, field) not in choices:
                raise ValueError(f"{field}={getattr(self, field)!r} is not one of {', '.join(choices)}")
        if self.num_heads % self.num_kv_heads:
            works = [n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
            raise ValueError(f"num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}: {works} do")
        if self.positions == "rope" and self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: rotary positions turn pairs")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout!r} must be in [0, 1)")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window={self.sliding_window!r} must be positive, or None for full attention")

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate."""
        return self.activation == "swiglu"

    def window_of(self, layer: int) -> int | None:
        """The sliding window of ``layer``, None for full attention."""
        return self.sliding_window if layer >= self.window_from else None

    def to_mapping(self) -> dict[str, Any]:
        """Plain values (JSON, TOML) that `from_mapping` reads back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> ModelConfig:
        """Inverse of `to_mapping`; ``ValueError`` names unknown and missing fields."""
        fields = {field.name: field for field in dataclasses.fields(cls)}
        if unknown := sorted(set(mapping) - set(fields)):
            raise ValueError(f"unknown model field {', '.join(unknown)}: the fields are {', '.join(fields)}")
        needed = [name for name, field in fields.items() if field.default is dataclasses.MISSING]
        if missing := [name for name in needed if name not in mapping]:
            raise ValueError(f"model field {', '.join(missing)} is missing")
        values = dict(mapping)
        if isinstance(values.get("rope_scaling"), Mapping):
            values["rope_scaling"] = RopeScaling(**values["rope_scaling"])
        return cls(**values)


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> full shape of every parameter, in forward order. A tied head has no entry."""
    hidden, head_dim, ffn = config.hidden_size, config.head_dim, config.ffn_size
    heads, kv_heads = config.num_heads, config.num_kv_heads
    shapes: dict[str, tuple[int, ...]] = {}

    def linear(name: str, rows: int, columns: int, bias: bool) -> None:
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)

    def norm(name: str) -> None:
        shapes[f"{name}.weight"] = (hidden,)
        if config.norm == "layernorm":
            shapes[f"{name}.bias"] = (hidden,)

    shapes["embed.tokens.weight"] = (config.vocab_size, hidden)
    if config.positions == "learned":
        shapes["embed.positions.weight"] = (config.max_positions, hidden)
    for index in range(config.num_layers):
        layer = f"layers.{index}"
        norm(f"{layer}.norm1")
        linear(f"{layer}.attn.qkv", (heads + 2 * kv_heads) * head_dim, hidden, config.qkv_bias)
        if config.qk_norm:
            shapes[f"{layer}.attn.q_norm.weight"] = (head_dim,)
            shapes[f"{layer}.attn.k_norm.weight"] = (head_dim,)
        linear(f"{layer}.attn.out", hidden, heads * head_dim, config.out_bias)
        norm(f"{layer}.norm2")
        if config.gated:
            linear(f"{layer}.mlp.gate_up", 2 * ffn, hidden, config.mlp_bias)
        else:
            linear(f"{layer}.mlp.up", ffn, hidden, config.mlp_bias)
        linear(f"{layer}.mlp.down", hidden, ffn, config.mlp_bias)
    norm("norm")
    if not config.tied:
        shapes["head.weight"] = (config.vocab_size, hidden)
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
    lookup does not), and 12 H E for each key that a query sees (QK^T and AV, 2 H E each forward, twice that
    backward). The causal mask halves the latter: a query sees (seq + 1) / 2 keys in the mean, fewer under a sliding
    window. Recomputation is not counted (Chowdhery et al. 2022, arXiv:2204.02311, appendix B, plus the halving).
    """
    shapes = parameter_shapes(config)
    products = sum(math.prod(s) for n, s in shapes.items() if len(s) == 2 and not n.startswith(("embed.", "head.")))
    products += config.vocab_size * config.hidden_size
    keys = 0.0
    for layer in range(config.num_layers):
        window = min(config.window_of(layer) or seq, seq)
        keys += window - window * (window - 1) / (2 * seq)
    return 6.0 * products + 12.0 * config.num_heads * config.head_dim * keys


def _gpt2(**sizes: Any) -> ModelConfig:
    return ModelConfig(
        family="gpt2",
        norm="layernorm",
        activation="gelu_tanh",
        positions="learned",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tied=True,
        **sizes,
    )


def _presets() -> dict[str, ModelConfig]:
    def sizes(vocab: int, hidden: int, layers: int, heads: int, kv: int, ffn: int, positions: int) -> dict[str, Any]:
        return {
            "vocab_size": vocab,
            "hidden_size": hidden,
            "num_layers": layers,
            "num_heads": heads,
            "num_kv_heads": kv,
            "ffn_size": ffn,
            "max_positions": positions,
        }

    return {
        "tiny": ModelConfig(**sizes(256, 128, 4, 4, 2, 352, 2048)),
        "bench": ModelConfig(**sizes(8192, 512, 8, 8, 4, 1408, 2048)),
        "gpt2-tiny": _gpt2(**sizes(256, 128, 4, 4, 4, 512, 1024)),
        "gpt2": _gpt2(**sizes(50257, 768, 12, 12, 12, 3072, 1024), dropout=0.1),
        "llama2-7b": ModelConfig(**sizes(32000, 4096, 32, 32, 32, 11008, 4096)),
        "llama3-8b": ModelConfig(**sizes(128256, 4096, 32, 32, 8, 14336, 8192), rope_theta=500000.0),
        "mistral-7b": ModelConfig(family="mistral", **sizes(32000, 4096, 32, 32, 8, 14336, 32768), sliding_window=4096),
        "qwen2-7b": ModelConfig(
            family="qwen2",
            **sizes(152064, 3584, 28, 28, 4, 18944, 131072),
            norm_eps=1e-6,
            rope_theta=1e6,
            qkv_bias=True,
        ),
        "qwen3-8b": ModelConfig(
            family="qwen3",
            **sizes(151936, 4096, 36, 32, 8, 12288, 40960),
            head_dim=128,
            norm_eps=1e-6,
            rope_theta=1e6,
            qk_norm=True,
        ),
    }


PRESETS: Mapping[str, ModelConfig] = MappingProxyType(_presets())
"""Published sizes, and two small ones for CPUs; ``bench`` is the model of ``benchmarks/``."""
