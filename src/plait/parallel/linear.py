"""Column and row parallel linear layers, with or without sequence parallel (Megatron-LM: arXiv:1909.08053, 2205.05198).

Column: W[O_tp, I]. The input is identical on all ranks (or cut by rows, and gathered); the outputs are different
columns. Row: W[O, I_tp]. The inputs are different columns; the products are summands, all-reduced (or
reduce-scattered to rows). One rank is the case of a group of one. N rows, I inputs, O outputs.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn

from plait.comm.collectives import ENTER, GATHER, REDUCE, SCATTER, start
from plait.comm.group import Group
from plait.parallel import product
from plait.parallel.grads import Slot


class Fused(nn.Module):
    """A layer that writes the gradients of its own parameters into slots. Frozen parameters have none."""

    def __init__(self) -> None:
        super().__init__()
        self.slots: dict[str, Slot] = {}


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight: Tensor, bias: Tensor | None, layer: ColumnLinear) -> Tensor:
        ctx.save_for_backward(x_NI, weight)
        ctx.layer = layer
        whole_NI = start(x_NI, layer.group, layer.arrow.forward).wait()
        return product.forward(whole_NI, weight, bias, fp8=layer.fp8)

    @staticmethod
    def backward(ctx: Any, grad_NO: Tensor) -> tuple[Tensor | None, None, None, None]:
        x_NI, weight = ctx.saved_tensors
        layer: ColumnLinear = ctx.layer
        grad_NO = grad_NO.contiguous()
        slot = layer.slots.get("weight")
        # Only this rank's rows were kept; the others' come while the input gradient is computed, and that one's
        # reduction runs under the weight gradient.
        gathering = None if slot is None else start(x_NI, layer.group, layer.arrow.forward)
        reducing = None
        if ctx.needs_input_grad[0]:
            grad_NI = product.input_gradient(grad_NO, weight, fp8=layer.fp8)
            reducing = start(grad_NI, layer.group, layer.arrow.backward)
        if slot is not None and gathering is not None:
            slot.add_product(grad_NO, gathering.wait())
        if "bias" in layer.slots:
            layer.slots["bias"].add(grad_NO.sum(0))
        return None if reducing is None else reducing.wait(), None, None, None


@final
class ColumnLinear(Fused):
    """x [N, I] (or [N/tp, I] when ``sequence``) -> [N, O/tp], or a tuple of its ``sections``."""

    def __init__(self, *, group: Group, sequence: bool, sections: tuple[int, ...] | None, fp8: bool = False) -> None:
        super().__init__()
        self.group = group
        self.fp8 = fp8
        self.arrow = GATHER if sequence else ENTER
        self.sections = sections
        self.weight: nn.Parameter
        self.bias: nn.Parameter | None

    def forward(self, x_NI: Tensor) -> Tensor | tuple[Tensor, ...]:
        out: Tensor = _Column.apply(x_NI, self.weight, self.bias, self)  # type: ignore[no-untyped-call]
        return out if self.sections is None else torch.split(out, list(self.sections), dim=-1)


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight: Tensor, bias: Tensor | None, layer: RowLinear) -> Tensor:
        ctx.save_for_backward(x_NI, weight)
        ctx.layer = layer
        out_NO = product.forward(x_NI, weight, fp8=layer.fp8)
        out_NO = start(out_NO, layer.group, layer.arrow.forward).wait()
        # After the sum: the bias counts once.
        return out_NO if bias is None else out_NO.add_(bias)

    @staticmethod
    def backward(ctx: Any, grad_NO: Tensor) -> tuple[Tensor | None, None, None, None]:
        x_NI, weight = ctx.saved_tensors
        layer: RowLinear = ctx.layer
        grad_NO = grad_NO.contiguous()
        gathering = start(grad_NO, layer.group, layer.arrow.backward)
        if "bias" in layer.slots:
            layer.slots["bias"].add(grad_NO.sum(0))
        whole_NO = gathering.wait()
        grad_NI = product.input_gradient(whole_NO, weight, fp8=layer.fp8) if ctx.needs_input_grad[0] else None
        if "weight" in layer.slots:
            layer.slots["weight"].add_product(whole_NO, x_NI)
        return grad_NI, None, None, None


@final
class RowLinear(Fused):
    """x [N, I/tp] -> [N, O] (or [N/tp, O] when ``sequence``)."""

    def __init__(self, *, group: Group, sequence: bool, fp8: bool = False) -> None:
        super().__init__()
        self.group = group
        self.fp8 = fp8
        self.arrow = SCATTER if sequence else REDUCE
        self.weight: nn.Parameter
        self.bias: nn.Parameter | None

    def forward(self, x_NI: Tensor) -> Tensor:
        out: Tensor = _Row.apply(x_NI, self.weight, self.bias, self)  # type: ignore[no-untyped-call]
        return out
