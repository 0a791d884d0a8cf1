"""Attention of some queries over some of their keys, and the exact merge of such blocks.

A block's result is its output and the log-sum-exp (LSE) of its scores; two blocks over different keys merge to what one
softmax over all keys gives (Milakov and Gimelshein 2018, arXiv:1805.02867; Dao et al. 2022, arXiv:2205.14135).
B samples, H query heads, K key/value heads, Q queries, S keys, E width of queries and keys, V of values.
"""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor
from torch.nn import functional as F

_ATEN = torch.ops.aten
_ALIGN = 32
"""The rows of the LSE that CUDA's memory-efficient kernel keeps are a multiple of this; those past the end are +inf."""
_BIAS_ALIGN = 16


def wide(dtype: torch.dtype) -> torch.dtype:
    """What sums of a dtype are kept in: fp32 at least."""
    return torch.promote_types(dtype, torch.float32)


def _bias(seen: Tensor, q_BHQE: Tensor) -> Tensor:
    """What is added to the scores: 0 for a key that is seen, -inf for another."""
    return torch.zeros_like(seen, dtype=q_BHQE.dtype).masked_fill_(~seen, -math.inf)


def _aligned_bias(seen: Tensor, q_BHQE: Tensor) -> Tensor:
    """`_bias` for CUDA's memory-efficient kernel: one for each sample and head, rows aligned."""
    queries, keys = seen.shape[-2:]
    padded = F.pad(_bias(seen, q_BHQE), (0, -keys % _BIAS_ALIGN))
    return padded[..., :keys].expand(*q_BHQE.shape[:2], queries, keys)


def _one_width(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors with zeros behind their last dim: the kernels take one width for keys and values."""
    width = max(x.shape[-1] for x in tensors)
    return tuple(x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in tensors)


def _flash(q_BHQE: Tensor, seen: Tensor | None) -> bool:
    """Whether CUDA's flash kernel takes the block: it knows half precision and no mask."""
    return seen is None and q_BHQE.dtype in (torch.float16, torch.bfloat16)


def _repeated(x_BKSE: Tensor, heads: int) -> Tensor:
    return x_BKSE.repeat_interleave(heads // x_BKSE.shape[1], 1)


def _summed(grad_BHSE: Tensor, kv_heads: int) -> Tensor:
    """Sum over the query heads that share a key head."""
    if grad_BHSE.shape[1] == kv_heads:
        return grad_BHSE
    return torch.unflatten(grad_BHSE, 1, (kv_heads, -1)).sum(2)


def attend(
    q_BHQE: Tensor, k_BKSE: Tensor, v_BKSV: Tensor, seen: Tensor | None, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Output [B, H, Q, V] and LSE [B, H, Q] (fp32 at least) of a block.

    ``seen`` bool [1 or B, 1, Q, S], None for all; ``causal``: query i sees keys 0..i, Q = S. A query that sees no key
    gets an output of 0 and an LSE of -inf.
    """
    value_width = v_BKSV.shape[-1]
    q_BHQE, k_BKSE, v = _one_width(q_BHQE, k_BKSE, v_BKSV)
    if q_BHQE.device.type == "cpu":
        bias = None if seen is None else _bias(seen, q_BHQE)
        out, lse = _ATEN._scaled_dot_product_flash_attention_for_cpu(
            q_BHQE, k_BKSE, v, 0.0, causal, attn_mask=bias, scale=scale
        )
    else:
        heads, rows = q_BHQE.shape[1:3]
        k, v = _repeated(k_BKSE, heads), _repeated(v, heads)
        if _flash(q_BHQE, seen):
            out, lse, *_ = _ATEN._scaled_dot_product_flash_attention(q_BHQE, k, v, 0.0, causal, scale=scale)
        else:
            bias = None if seen is None else _aligned_bias(seen, q_BHQE)
            out, lse, *_ = _ATEN._scaled_dot_product_efficient_attention(
                q_BHQE, k, v, bias, True, 0.0, causal, scale=scale
            )
            lse = lse[..., :rows]
    out = out[..., :value_width]
    if seen is None:
        return out, lse
    # The kernels divide 0 by 0 for a query that sees nothing.
    blind = ~seen.any(-1)
    return out.masked_fill(blind[..., None], 0), lse.masked_fill(blind, -math.inf)


def attend_backward(
    grad_BHQV: Tensor,
    q_BHQE: Tensor,
    k_BKSE: Tensor,
    v_BKSV: Tensor,
    out_BHQV: Tensor,
    lse_BHQ: Tensor,
    seen: Tensor | None,
    *,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """What a block adds to the gradients of q, k and v.

    ``out`` and ``lse`` are those of the softmax over *all* keys, so that a block's probabilities come out as its share
    of the whole: a key that is not seen has exp(-inf - lse) = 0, whatever else its query sees.
    """
    width, value_width = q_BHQE.shape[-1], v_BKSV.shape[-1]
    q_BHQE, k_BKSE, v, out, grad = _one_width(q_BHQE, k_BKSE, v_BKSV, out_BHQV, grad_BHQV)
    if q_BHQE.device.type == "cpu":
        bias = None if seen is None else _bias(seen, q_BHQE)
        grads = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q_BHQE, k_BKSE, v, out, lse_BHQ, 0.0, causal, attn_mask=bias, scale=scale
        )
        return grads[0][..., :width], grads[1][..., :width], grads[2][..., :value_width]
    heads, kv_heads, rows, keys = q_BHQE.shape[1], k_BKSE.shape[1], q_BHQE.shape[2], k_BKSE.shape[2]
    k, v = _repeated(k_BKSE, heads), _repeated(v, heads)
    # No dropout, so the state of its generator is never read.
    unused = torch.zeros((), dtype=torch.int64, device=q_BHQE.device)
    if _flash(q_BHQE, seen):
        state = torch.zeros(2, dtype=torch.uint64, device=q_BHQE.device)
        grads = _ATEN._scaled_dot_product_flash_attention_backward(
            grad, q_BHQE, k, v, out, lse_BHQ.contiguous(), None, None, rows, keys, 0.0, causal, state, unused,
            scale=scale,
        )  # fmt: skip
    else:
        bias = None if seen is None else _aligned_bias(seen, q_BHQE)
        lse = F.pad(lse_BHQ, (0, -rows % _ALIGN), value=math.inf)
        grads = _ATEN._scaled_dot_product_efficient_attention_backward(
            grad, q_BHQE, k, v, bias, out, lse, unused, unused, 0.0, [True, True, True, False], causal, scale=scale
        )
    grad_k, grad_v = (_summed(grad, kv_heads) for grad in grads[1:3])
    return grads[0][..., :width], grad_k[..., :width], grad_v[..., :value_width]


def merge(out: Tensor, lse: Tensor, more_out: Tensor, more_lse: Tensor) -> None:
    """Add a block to ``out`` [B, H, Q, V] and ``lse`` [B, H, Q], in place.

    Only differences of LSEs are ever taken to the exponent, so scores of any size are safe; where neither side has
    seen a key both LSEs are -inf, whose difference says nothing: the output stays 0.
    """
    share = torch.sigmoid(more_lse - lse).nan_to_num_(0.0)
    out.lerp_(more_out.to(out.dtype), share[..., None])
    torch.logaddexp(lse, more_lse, out=lse)


@final
class Sum:
    """Blocks of the same queries, added up in fp32: rounding does not grow with their number (case P22)."""

    def __init__(self, q_BHQE: Tensor, value_width: int) -> None:
        self._shape = (*q_BHQE.shape[:3], value_width)
        self._dtype = wide(q_BHQE.dtype)
        self._device = q_BHQE.device
        self._found: tuple[Tensor, Tensor] | None = None

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """A block of the queries ``rows``."""
        if self._found is None:
            if out.shape == self._shape:
                self._found = out.to(self._dtype), lse.to(self._dtype)
                return
            self._found = (
                torch.zeros(self._shape, dtype=self._dtype, device=self._device),
                torch.full(self._shape[:3], -math.inf, dtype=self._dtype, device=self._device),
            )
        merge(self._found[0][:, :, rows], self._found[1][:, :, rows], out, lse)

    def total(self) -> tuple[Tensor, Tensor]:
        """Output and LSE of all that was added."""
        assert self._found is not None
        return self._found
