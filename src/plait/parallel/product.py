"""The two matrix products that a linear layer is made of, by the fastest kernel that torch carries.

For fp32 on a CPU that is oneDNN, not the MKL behind ``torch.mm``: 5 to 8% faster forward and for the input gradient,
25% for a vocabulary-wide output (measured on an EPYC with AVX-512; docs/performance.md). The weight gradient, which
adds to what is there, is faster with MKL's ``addmm_`` and stays with it (`plait.parallel.grads`).

``fp8`` computes on e4m3 copies of both factors, each row (of the dim that is not summed) with a scale of its own: the
recipe that torchao calls "rowwise with gw hp", whose weight gradient stays in the higher precision. A token's result
does then not depend on the others of its microbatch, nor on how a cut leaves out outputs, so plans agree as closely as
elsewhere; one scale a tensor would differ with every cut. torchao itself would bring a linear layer of its own, which
writes no gradient slots, splits no backward and knows no cut; its kernel, ``torch._scaled_mm``, is used here directly,
which also runs on a CPU (slowly), where the tests hold it to products of the rounded factors.

N rows, I inputs, O outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

FP8 = torch.float8_e4m3fn


def _by_onednn(x: Tensor) -> bool:
    usable = x.device.type == "cpu" and x.dtype == torch.float32 and x.numel() > 0
    return usable and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def forward(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, *, fp8: bool = False) -> Tensor:
    """x @ W^T + b, [N, O]."""
    if fp8:
        return _scaled(x_NI, weight_OI, bias_O)
    if _by_onednn(x_NI):
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x_NI, weight_OI, bias_O, "none", [], "")
        return out
    return F.linear(x_NI, weight_OI, bias_O)


def input_gradient(grad_NO: Tensor, weight_OI: Tensor, *, fp8: bool = False) -> Tensor:
    """grad @ W, [N, I]."""
    if fp8:
        return _scaled(grad_NO, weight_OI.t(), None)
    if _by_onednn(grad_NO):
        out: Tensor = torch.ops.mkldnn._linear_pointwise(grad_NO, weight_OI.t(), None, "none", [], "")
        return out
    return grad_NO @ weight_OI


def quantised(x_RC: Tensor) -> tuple[Tensor, Tensor]:
    """x rounded to e4m3 [R, C], contiguous, and what each row is to be multiplied with again, fp32 [R, 1].

    Scales are powers of 2 that bring a row's largest magnitude below e4m3's largest: they round nothing themselves, so
    the weight's copies of forward and backward, scaled along different dims, differ in the smallest elements alone.
    A row that is not finite throughout becomes NaN.
    """
    wide = x_RC.float()
    top = wide.abs().amax(1, keepdim=True).clamp_min(torch.finfo(torch.bfloat16).tiny * 2**10)
    _, exponent = torch.frexp(torch.finfo(FP8).max / top)
    # frexp's mantissa lies in [1/2, 1), so 2^(exponent - 1) is the power of 2 at or below the ratio.
    scale = torch.ldexp(torch.ones_like(top), exponent - 1)
    # The cast turns an infinity into e4m3's largest number: an overflow would go on unseen.
    back = torch.where(top.isfinite(), scale.reciprocal(), torch.nan)
    return (wide * scale).to(FP8).contiguous(), back


def _scaled(x_NC: Tensor, y_MC: Tensor, bias_M: Tensor | None) -> Tensor:
    """x @ y^T + b, [N, M], of the copies in e4m3, summed in fp32."""
    if x_NC.shape[0] == 0:
        return x_NC.new_empty(0, y_MC.shape[0])
    (left, left_scale), (right, right_scale) = quantised(x_NC), quantised(y_MC)
    out: Tensor = torch._scaled_mm(left, right.t(), left_scale, right_scale.t(), bias=bias_M, out_dtype=x_NC.dtype)
    return out
