"""The layers of a decoder on one device. Activations are rows: N tokens (flattened, sample-major), D hidden, F ffn.

Weights are created uninitialised: `plait.models.init.initialise` fills them. Nothing here keeps a size that a cut would
change; what a parallel run replaces are whole modules.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait.models.batch import IGNORE, Batch


class Linear(nn.Module):
    """x [..., in] -> [..., out]; weight [out, in]."""

    def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class SectionedLinear(nn.Module):
    """x [..., in] -> one tensor [..., s] for each section s; weight [sum(sections), in] is their concatenation."""

    def __init__(self, inputs: int, sections: tuple[int, ...], bias: bool) -> None:
        super().__init__()
        self.sections = sections
        self.weight = nn.Parameter(torch.empty(sum(sections), inputs))
        self.bias = nn.Parameter(torch.empty(sum(sections))) if bias else None

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return torch.split(F.linear(x, self.weight, self.bias), list(self.sections), dim=-1)


class TokenEmbedding(nn.Module):
    """tokens int64 [N] -> [N, D]; weight [V, D]."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))

    def forward(self, tokens_N: Tensor) -> Tensor:
        return F.embedding(tokens_N, self.weight)


class PositionEmbedding(nn.Module):
    """positions int64 [N] -> [N, D]; weight [P, D] (learned positions)."""

    def __init__(self, max_positions: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(max_positions, hidden_size))

    def forward(self, positions_N: Tensor) -> Tensor:
        return F.embedding(positions_N, self.weight)


class _RMSNorm(torch.autograd.Function):
    """y = x / rms(x) * w over the last dim. Saves x and 1/rms alone, where autograd would save each product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        out: Tensor = (wide * scale).mul_(weight).to(x.dtype)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        normal = x * scale
        grad_weight = (grad * normal).flatten(0, -2).sum(0)
        grad_x = grad * weight.to(scale.dtype)
        shrink = (grad_x * normal).mean(-1, keepdim=True)
        grad_x = grad_x.addcmul_(normal, shrink, value=-1).mul_(scale)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dim (Zhang & Sennrich 2019, arXiv:1910.07467); fp32 inside at least."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor) -> Tensor:
        normal: Tensor = _RMSNorm.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return normal


class LayerNorm(nn.Module):
    """Layer norm over the last dim, with bias."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up, with silu(gate) computed again in backward: one ffn-wide tensor less is kept."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)


def swiglu(gate_NF: Tensor, up_NF: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer 2020, arXiv:2002.05202)."""
    out: Tensor = _SwiGLU.apply(gate_NF, up_NF)  # type: ignore[no-untyped-call]
    return out


class GatedMLP(nn.Module):
    """down(silu(gate(h)) * up(h)), [N, D] -> [N, D]."""

    def __init__(self, hidden_size: int, ffn_size: int, bias: bool) -> None:
        super().__init__()
        self.gate_up = SectionedLinear(hidden_size, (ffn_size, ffn_size), bias)
        self.down = Linear(ffn_size, hidden_size, bias)

    def forward(self, h_ND: Tensor) -> Tensor:
        gate_NF, up_NF = self.gate_up(h_ND)
        out_ND: Tensor = self.down(swiglu(gate_NF, up_NF))
        return out_ND


class CrossEntropy(nn.Module):
    """logits [N, V], targets int64 [N] -> scalar: the *sum* of token losses in fp32, masked targets left out.

    A sum, because only the global count of unmasked targets makes a mean that is the same for every cut.
    """

    def forward(self, logits_NV: Tensor, targets_N: Tensor) -> Tensor:
        return F.cross_entropy(logits_NV.float(), targets_N, ignore_index=IGNORE, reduction="sum")


_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _signed(word: int) -> int:
    """The int64 with the bits of a 64-bit word: torch's integers wrap around, Python's do not."""
    word &= _WORD
    return word - (1 << 64) if word >> 63 else word


def _mix(x: Tensor) -> Tensor:
    """splitmix64's finaliser, in place, on an int64 tensor (Steele et al. 2014, doi:10.1145/2660193.2660195)."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        # int64 shifts are arithmetic: the mask takes off the copies of the sign.
        x ^= (x >> shift).bitwise_and_((1 << (64 - shift)) - 1)
        if factor != 1:
            x *= _signed(factor)
    return x


class Dropout(nn.Module):
    """Dropout whose mask is a function of (seed, step, layer, site, global sample, position, feature) alone.

    So it is the same under every cut and under recomputation, and no generator state exists. Each row is a splitmix64
    stream; each word of it decides two features. Identity when ``p`` is 0 and in eval mode.
    """

    def __init__(self, p: float, seed: int, layer: int, site: int) -> None:
        super().__init__()
        self.p = p
        self.seed = seed
        self.layer = layer
        self.site = site

    def rows(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """int64 [N], [N]: global sample index and index in the sample of each row that `forward` is given.

        The index is not the position inside a document, which repeats in a packed sample. A version that is given
        some of the rows overrides this.
        """
        samples, seq = batch.tokens_BT.shape
        return batch.sample_B.repeat_interleave(seq), batch.indices_T().repeat(samples)

    def keep(self, batch: Batch, features: int) -> Tensor:
        """bool [N, features]: what survives."""
        sample_N, index_N = self.rows(batch)
        key = torch.zeros_like(sample_N)
        for part in (self.seed, batch.step, self.layer, self.site, sample_N, index_N):
            key += part if isinstance(part, Tensor) else _signed(part)
            key = _mix(key.add_(_signed(_GOLDEN)))
        stream = torch.arange(1, (features + 1) // 2 + 1, device=key.device).mul_(_signed(_GOLDEN))
        words = _mix(key[:, None] + stream)
        # Two int32 halves a word, uniform over [-2^31, 2^31).
        threshold = round(self.p * 2**32) - 2**31
        return words.view(torch.int32)[:, :features] >= threshold

    def forward(self, x_ND: Tensor, batch: Batch) -> Tensor:
        if self.p == 0 or not self.training:
            return x_ND
        dropped = self.keep(batch, x_ND.shape[-1]).logical_not_()
        return x_ND.masked_fill(dropped, 0).mul(1 / (1 - self.p))
