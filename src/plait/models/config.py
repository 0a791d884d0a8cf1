"""`ModelConfig`: a decoder as data. Families differ in values here, not in model files. Standard library only.

Letters used for sizes: D hidden, H query heads, K key/value heads, E head_dim, F ffn, V vocabulary, P max positions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from plait.models.parts import MLAConfig, MoEConfig, RopeScaling
from plait.models.shapes import canonical_name, flops_per_token, parameter_count, parameter_shapes

__all__ = [
    "FAMILIES",
    "PRESETS",
    "MLAConfig",
    "MoEConfig",
    "ModelConfig",
    "RopeScaling",
    "canonical_name",
    "flops_per_token",
    "parameter_count",
    "parameter_shapes",
]

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gpt2", "mixtral", "qwen3_moe", "deepseek_v3")
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
_PARTS = {"rope_scaling": RopeScaling, "moe": MoEConfig, "mla": MLAConfig}
"""Fields that are values of their own: a mapping holds a mapping for them."""


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
    moe: MoEConfig | None = None
    """Experts in place of the MLP; None: every layer has a plain one."""
    mla: MLAConfig | None = None
    """Latent attention; None: each head has its own projections."""

    def __post_init__(self) -> None:
        if self.num_kv_heads == 0:
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        if self.head_dim == 0 and self.mla is not None:
            object.__setattr__(self, "head_dim", self.mla.qk_dim)
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
        self._check_parts()

    def _check_parts(self) -> None:
        """What experts and latent attention cannot be combined with."""
        if self.moe is not None and (not self.gated or self.mlp_bias):
            raise ValueError(
                f"experts are gated and have no bias: moe does not go with activation={self.activation!r}, "
                f"mlp_bias={self.mlp_bias}; activation='swiglu', mlp_bias=False works"
            )
        if self.mla is None:
            return
        if self.head_dim != self.mla.qk_dim:
            raise ValueError(f"head_dim={self.head_dim} is not mla's nope_dim + rope_dim = {self.mla.qk_dim}")
        if self.num_kv_heads != self.num_heads:
            raise ValueError(f"num_kv_heads={self.num_kv_heads}: latent attention has num_heads={self.num_heads}")
        for field, works in (("positions", "rope"), ("qkv_bias", False), ("out_bias", False), ("qk_norm", False)):
            if getattr(self, field) != works:
                raise ValueError(f"{field}={getattr(self, field)!r} does not go with mla: only {works!r} does")

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate."""
        return self.activation == "swiglu"

    def window_of(self, layer: int) -> int | None:
        """The sliding window of ``layer``, None for full attention."""
        return self.sliding_window if layer >= self.window_from else None

    def moe_of(self, layer: int) -> MoEConfig | None:
        """The experts of ``layer``, None for a plain MLP."""
        return None if self.moe is None or layer in self.moe.dense_layers else self.moe

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
        for name, kind in _PARTS.items():
            if isinstance(values.get(name), Mapping):
                known = [field.name for field in dataclasses.fields(kind)]
                if unknown := sorted(set(values[name]) - set(known)):
                    raise ValueError(f"unknown field {name}.{unknown[0]}: the fields are {', '.join(known)}")
                values[name] = kind(**values[name])
        return cls(**values)


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


def _deepseek_v3(sizes: Mapping[str, Any]) -> ModelConfig:
    return ModelConfig(
        family="deepseek_v3",
        **sizes,
        norm_eps=1e-6,
        rope_scaling=RopeScaling(kind="yarn", factor=40.0, original_max_positions=4096, mscale=1.0, mscale_all_dim=1.0),
        mla=MLAConfig(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128),
        moe=MoEConfig(
            num_experts=256,
            top_k=8,
            ffn_size=2048,
            shared_ffn=2048,
            dense_layers=(0, 1, 2),
            score="sigmoid",
            scale=2.5,
            groups=8,
            top_groups=4,
            bias=True,
        ),
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
        # Two of eight experts, each of half the width: as many operations a token as "tiny" and "bench", but for the
        # router's.
        "moe-tiny": ModelConfig(
            family="mixtral",
            **sizes(256, 128, 4, 4, 2, 176, 2048),
            moe=MoEConfig(num_experts=8, top_k=2, ffn_size=176),
        ),
        "bench-moe": ModelConfig(
            family="mixtral",
            **sizes(8192, 512, 8, 8, 4, 704, 2048),
            moe=MoEConfig(num_experts=8, top_k=2, ffn_size=704),
        ),
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
        "mixtral-8x7b": ModelConfig(
            family="mixtral",
            **sizes(32000, 4096, 32, 32, 8, 14336, 32768),
            rope_theta=1e6,
            moe=MoEConfig(num_experts=8, top_k=2, ffn_size=14336),
        ),
        "qwen3-30b-a3b": ModelConfig(
            family="qwen3_moe",
            **sizes(151936, 2048, 48, 32, 4, 6144, 40960),
            head_dim=128,
            norm_eps=1e-6,
            rope_theta=1e6,
            qk_norm=True,
            moe=MoEConfig(num_experts=128, top_k=8, ffn_size=768),
        ),
        "deepseek-v3": _deepseek_v3(sizes(129280, 7168, 61, 128, 128, 18432, 163840)),
    }


PRESETS: Mapping[str, ModelConfig] = MappingProxyType(_presets())
"""Published sizes, and two small ones for CPUs; ``bench`` is the model of ``benchmarks/``."""
