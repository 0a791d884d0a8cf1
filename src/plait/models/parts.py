"""The parts of a `ModelConfig` that some models have: stretched rotary frequencies, experts, latent attention.

Standard library only. Letters: D hidden, E experts, K experts a token, F ffn of one expert, H heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_NOT_NEGATIVE = ("aux_loss", "z_loss", "bias_rate")


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Stretching of rotary frequencies beyond the trained length.

    ``linear`` divides every frequency by ``factor`` (Chen et al. 2023, arXiv:2306.15595); ``llama3`` divides those
    whose wavelength exceeds ``original_max_positions / low_freq_factor``, keeps those below
    ``original_max_positions / high_freq_factor``, and interpolates between (Llama 3.1's published code); ``yarn``
    divides those that turn fewer than ``beta_slow`` times in ``original_max_positions``, keeps those that turn more
    than ``beta_fast`` times, interpolates between by dim, and sharpens attention (Peng et al. 2023, arXiv:2309.00071).
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    """DeepSeek's weights of the sharpening, of the tables and of all dims; 0: the paper's own."""
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    """What yarn multiplies the tables with; None: what follows from ``factor`` and the two weights."""

    def __post_init__(self) -> None:
        if self.kind not in ("llama3", "linear", "yarn"):
            raise ValueError(f"rope scaling {self.kind!r} is not supported: use 'llama3', 'linear' or 'yarn'")
        if not self.factor > 0:
            raise ValueError(f"rope scaling factor={self.factor!r} must be positive")
        if self.kind == "llama3" and not self.high_freq_factor > self.low_freq_factor > 0:
            raise ValueError(
                f"rope scaling needs high_freq_factor > low_freq_factor > 0, "
                f"not {self.high_freq_factor!r} and {self.low_freq_factor!r}"
            )
        if self.kind == "yarn" and not self.beta_fast > self.beta_slow > 0:
            raise ValueError(
                f"rope scaling needs beta_fast > beta_slow > 0, not {self.beta_fast!r} and {self.beta_slow!r}"
            )

    def _sharpening(self, weight: float) -> float:
        return 0.1 * weight * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    @property
    def table_factor(self) -> float:
        """What cos and sin are multiplied with."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._sharpening(self.mscale) / self._sharpening(self.mscale_all_dim)
        return self._sharpening(1.0)

    @property
    def score_factor(self) -> float:
        """What DeepSeek's attention multiplies its scores with, beside 1/sqrt(head dim)."""
        return self._sharpening(self.mscale_all_dim) ** 2 if self.kind == "yarn" and self.mscale_all_dim else 1.0


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """A mixture of experts in place of the MLP (Shazeer et al. 2017, arXiv:1701.06538).

    The first fields are the model's, the last ones (from ``capacity_factor`` on) choices of its training.
    """

    num_experts: int
    top_k: int
    ffn_size: int
    """Of one expert."""
    shared_ffn: int = 0
    """Width of all shared experts together, which every token passes; 0: none."""
    dense_layers: tuple[int, ...] = ()
    """Layers that have a plain MLP, of the model's own ``ffn_size``."""
    score: str = "softmax"
    """``softmax`` over the experts, or ``sigmoid`` of each (DeepSeek-V3)."""
    normalise: bool = True
    """Whether the weights of a token's K experts are divided by their sum."""
    scale: float = 1.0
    """Factor on the weights."""
    groups: int = 1
    """Groups of neighbouring experts; a token chooses among the ``top_groups`` whose two best scores are largest."""
    top_groups: int = 1
    bias: bool = False
    """Whether a bias is added to the scores for the choice alone (arXiv:2408.15664)."""
    capacity_factor: float | None = None
    """An expert takes ``ceil(capacity_factor * K * T / E)`` assignments of a sample of T real tokens; None: all."""
    drop: str = "position"
    """Which assignments stay within the capacity: the first in the sample, or those of the highest ``score``."""
    aux_loss: float = 0.0
    """Weight of the load-balancing loss (Switch, arXiv:2101.03961, eq. 4)."""
    z_loss: float = 0.0
    """Weight of the mean squared log-sum-exp of the logits (ST-MoE, arXiv:2202.08906)."""
    bias_balance: bool = False
    """Whether the bias is moved after each step so that the load evens out."""
    bias_rate: float = 1e-3
    """By how much."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "dense_layers", tuple(sorted(self.dense_layers)))
        for field in ("num_experts", "top_k", "ffn_size", "groups", "top_groups"):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"moe.{field}={value!r} must be a positive integer")
        if not isinstance(self.shared_ffn, int) or self.shared_ffn < 0:
            raise ValueError(f"moe.shared_ffn={self.shared_ffn!r} must be an integer of at least 0")
        if any(not isinstance(layer, int) or layer < 0 for layer in self.dense_layers):
            raise ValueError(f"moe.dense_layers={self.dense_layers!r} must be layer numbers")
        for field, choices in {"score": ("softmax", "sigmoid"), "drop": ("position", "score")}.items():
            if getattr(self, field) not in choices:
                raise ValueError(f"moe.{field}={getattr(self, field)!r} is not one of {', '.join(choices)}")
        for field in _NOT_NEGATIVE:
            if not getattr(self, field) >= 0:
                raise ValueError(f"moe.{field}={getattr(self, field)!r} must be at least 0")
        if self.capacity_factor is not None and not self.capacity_factor > 0:
            raise ValueError(f"moe.capacity_factor={self.capacity_factor!r} must be positive, or absent for dropless")
        if self.bias_balance and not self.bias:
            raise ValueError("moe.bias_balance=true moves a bias that the router does not have: set moe.bias too")
        self._check_choice()

    def _check_choice(self) -> None:
        """Whether there are as many experts to choose from as are chosen."""
        each, rest = divmod(self.num_experts, self.groups)
        if rest or (self.groups > 1 and each < 2):
            works = [n for n in range(1, self.num_experts // 2 + 1) if self.num_experts % n == 0]
            raise ValueError(
                f"moe.groups={self.groups} does not cut {self.num_experts} experts into groups of two and more: "
                f"{works} do"
            )
        if self.top_groups > self.groups:
            raise ValueError(f"moe.top_groups={self.top_groups} is more than moe.groups={self.groups}")
        if self.top_k > each * self.top_groups:
            raise ValueError(f"moe.top_k={self.top_k} is more than the {each * self.top_groups} experts to choose from")


@dataclass(frozen=True, kw_only=True)
class MLAConfig:
    """Multi-head latent attention: keys and values come from one narrow latent a token (DeepSeek-V2, arXiv:2405.04434).

    A head's query and key have ``nope_dim`` dims without position and ``rope_dim`` with; the key's latter are one for
    all heads.
    """

    q_rank: int | None
    """Width of the queries' latent; None: queries come from the hidden state."""
    kv_rank: int
    """Width of the latent of keys and values."""
    nope_dim: int
    rope_dim: int
    v_dim: int
    interleaved: bool = True
    """Rotary pairs are neighbours (as in DeepSeek's checkpoints), not the halves of the rotary dims."""

    def __post_init__(self) -> None:
        for field in ("q_rank", "kv_rank", "nope_dim", "rope_dim", "v_dim"):
            value = getattr(self, field)
            if field == "q_rank" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"mla.{field}={value!r} must be a positive integer")
        if self.rope_dim % 2:
            raise ValueError(f"mla.rope_dim={self.rope_dim} must be even: rotary positions turn pairs")

    @property
    def qk_dim(self) -> int:
        """Width of a head's query and key."""
        return self.nope_dim + self.rope_dim
