"""Causal attention with rotary or learned positions and grouped key/value heads.

B samples, T tokens, N = B*T rows, H query heads, K key/value heads, E head_dim. Head counts come from the shapes met at
run time: a cut that keeps some of the heads changes nothing here.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait.models.batch import Batch
from plait.models.config import ModelConfig, RopeScaling
from plait.models.layers import Linear, RMSNorm, SectionedLinear

Rope = tuple[Tensor, Tensor]
"""cos, sin: fp32 [1 or B, 1, T, E/2], broadcast over heads (and over samples when all have the same positions)."""


def _scale_frequencies(frequencies: Tensor, scaling: RopeScaling, theta: float) -> Tensor:
    """Stretched frequencies [E/2] of base ``theta`` (see `RopeScaling`)."""
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "yarn":
        half = frequencies.numel()

        def dim_of(turns: float) -> float:
            """The dim whose frequency makes ``turns`` turns in the trained length."""
            return half * math.log(scaling.original_max_positions / (turns * 2 * math.pi)) / math.log(theta)

        low = max(math.floor(dim_of(scaling.beta_fast)), 0)
        high = min(math.ceil(dim_of(scaling.beta_slow)), 2 * half - 1)
        dims = torch.arange(half, device=frequencies.device, dtype=torch.float32)
        kept = 1 - ((dims - low) / max(high - low, 1e-3)).clamp(0, 1)
    else:
        turns = scaling.original_max_positions * frequencies / (2 * math.pi)
        low_turns, high_turns = scaling.low_freq_factor, scaling.high_freq_factor
        kept = ((turns - low_turns) / (high_turns - low_turns)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def rope_tables(config: ModelConfig, batch: Batch) -> Rope | None:
    """Rotary tables of the batch's positions (Su et al. 2021, arXiv:2104.09864); None for learned positions."""
    if config.positions != "rope":
        return None
    device = batch.tokens_BT.device
    dims = config.head_dim if config.mla is None else config.mla.rope_dim
    exponents = torch.arange(0, dims, 2, device=device, dtype=torch.float32) / dims
    frequencies = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is not None:
        frequencies = _scale_frequencies(frequencies, scaling, config.rope_theta)
    if batch.positions_BT is None:
        positions = batch.indices_T()[None]
    else:
        positions = batch.positions_BT
    angles = (positions[..., None].float() * frequencies)[:, None]
    if scaling is not None and scaling.table_factor != 1:
        return angles.cos() * scaling.table_factor, angles.sin() * scaling.table_factor
    return angles.cos(), angles.sin()


def _turn(x_BHTE: Tensor, rope: Rope, sign: float) -> Tensor:
    cos, sin = (table.to(x_BHTE.dtype) for table in rope)
    first, second = x_BHTE.chunk(2, dim=-1)
    out = torch.empty_like(x_BHTE)
    out_first, out_second = out.chunk(2, dim=-1)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin, value=sign)
    return out


class _Rotate(torch.autograd.Function):
    """Turns the pairs (i, i + E/2) by the position's angles; backward turns back. Keeps the tables alone."""

    @staticmethod
    def forward(ctx: Any, x_BHTE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x_BHTE, (cos, sin), 1.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(grad, (cos, sin), -1.0), None, None


def rotate(x_BHTE: Tensor, rope: Rope) -> Tensor:
    """Rotary positions in the layout of Hugging Face checkpoints (halves of a head, not neighbouring pairs)."""
    out: Tensor = _Rotate.apply(x_BHTE, *rope)  # type: ignore[no-untyped-call]
    return out


class Attend(nn.Module):
    """q [B, H, T, E], k [B, K, T, E], v [B, K, T, Ev] -> [B, H, T, Ev]: softmax(q k^T / sqrt(E)) v over visible keys.

    Causal; inside a document when the batch holds several; the last ``window`` keys when there is a window.
    """

    def __init__(self, window: int | None) -> None:
        super().__init__()
        self.window = window

    def visible(self, batch: Batch, seq: int) -> Tensor | None:
        """bool [1 or B, 1, T, T], True where the query of a row sees the key of a column; None for plain causal."""
        window = self.window if self.window is not None else seq
        if batch.documents_BT is None and window >= seq:
            return None
        index = torch.arange(seq, device=batch.tokens_BT.device)
        behind = index[:, None] - index
        seen = behind >= 0
        if window < seq:
            seen = seen & (behind < window)
        if batch.documents_BT is None:
            return seen[None, None]
        documents = batch.documents_BT
        return (seen & (documents[:, :, None] == documents[:, None, :]))[:, None]

    def forward(self, q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, batch: Batch) -> Tensor:
        seen = self.visible(batch, q_BHTE.shape[2])
        # enable_gqa beats repeated keys and values on CPU, forward and backward (49.9 against 56.1 ms, B=8 T=256).
        return F.scaled_dot_product_attention(
            q_BHTE,
            k_BKTE,
            v_BKTE,
            attn_mask=seen,
            is_causal=seen is None,
            enable_gqa=q_BHTE.shape[1] != k_BKTE.shape[1],
        )


class Attention(nn.Module):
    """h [N, D] -> [N, D]."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        head_dim = config.head_dim
        query, key = config.num_heads * head_dim, config.num_kv_heads * head_dim
        self.head_dim = head_dim
        self.qkv = SectionedLinear(config.hidden_size, (query, key, key), config.qkv_bias)
        self.q_norm = RMSNorm(head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(head_dim, config.norm_eps) if config.qk_norm else None
        self.attend = Attend(config.window_of(layer))
        self.out = Linear(query, config.hidden_size, config.out_bias)

    def forward(self, h_ND: Tensor, rope: Rope | None, batch: Batch) -> Tensor:
        samples, seq = batch.tokens_BT.shape
        q_BTHE, k_BTKE, v_BTKE = (x.view(samples, seq, -1, self.head_dim) for x in self.qkv(h_ND))
        if self.q_norm is not None and self.k_norm is not None:
            q_BTHE, k_BTKE = self.q_norm(q_BTHE), self.k_norm(k_BTKE)
        q_BHTE, k_BKTE, v_BKTE = (x.transpose(1, 2) for x in (q_BTHE, k_BTKE, v_BTKE))
        if rope is not None:
            q_BHTE, k_BKTE = rotate(q_BHTE, rope), rotate(k_BKTE, rope)
        out_BHTE = self.attend(q_BHTE, k_BKTE, v_BKTE, batch)
        out_ND: Tensor = self.out(out_BHTE.transpose(1, 2).reshape(samples * seq, -1))
        return out_ND
