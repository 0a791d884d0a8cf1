"""Products of rows with the expert that each belongs to, as one call: rows are sorted, an expert's are a slice.

On a CPU a loop over the slices; on a GPU one kernel, ``F.grouped_mm``. Measured on a CPU (benchmarks/experts.py): the
kernel is a loop of MKL products there, which costs some 4% more than oneDNN slice by slice; a batched product of padded
slices costs 20% more with an even load and four times as much with a skewed one.
M rows, I inputs, O outputs, E experts, D hidden, F ffn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait.models.moe import Experts
from plait.parallel import product
from plait.parallel.grads import Slot
from plait.parallel.linear import Fused

_ROUND = 8
"""Rows are multiplied in multiples of this number: oneDNN makes a kernel for each number of rows that it meets, which
takes a tenth of the product, and experts' numbers are new in every step."""
_KERNEL_BYTES = 16
"""What the kernel wants every row to be a multiple of."""


@final
@dataclass(frozen=True, kw_only=True)
class Bank:
    """A stack of experts: gate_up [E, 2F, D] (gate rows, then up), down [E, D, F]; slots of those that train."""

    gate_up: Tensor
    down: Tensor
    slots: Mapping[str, Slot]


@final
class GroupedExperts(Fused):
    """The experts of this rank; `bank` is what the functions of this file take."""

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self.gate_up: nn.Parameter = experts.gate_up
        self.down: nn.Parameter = experts.down

    def bank(self) -> Bank:
        """The weights as they are now."""
        return Bank(gate_up=self.gate_up, down=self.down, slots=self.slots)


def forward(x_MD: Tensor, bank: Bank, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(experts' outputs [M, D], what `backward` needs: gate and up [M, 2F]) of rows in runs of ``counts`` [E]."""
    hidden = _product(x_MD, bank.gate_up, counts)
    gate, up = hidden.chunk(2, dim=-1)
    return _product(F.silu(gate).mul_(up), bank.down, counts), hidden


def backward(grad_MD: Tensor, hidden: Tensor, bank: Bank, counts: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient of x [M, D], of hidden [M, 2F], the inner activation [M, F]); see `add_weight_gradients`."""
    gate, up = hidden.chunk(2, dim=-1)
    inner = F.silu(gate)
    grad_inner = _input_gradient(grad_MD, bank.down, counts)
    grad_hidden = torch.empty_like(hidden)
    grad_gate, grad_up = grad_hidden.chunk(2, dim=-1)
    torch.mul(inner, grad_inner, out=grad_up)
    torch.ops.aten.silu_backward.grad_input(grad_inner.mul_(up), gate, grad_input=grad_gate)
    return _input_gradient(grad_hidden, bank.gate_up, counts), grad_hidden, inner.mul_(up)


def add_weight_gradients(
    bank: Bank, counts: Sequence[int], grad_MD: Tensor, inner: Tensor, grad_hidden: Tensor, x_MD: Tensor
) -> None:
    """One contribution to each slot, whichever experts saw rows."""
    if "down" in bank.slots:
        bank.slots["down"].add_slices(_slices(counts, grad_MD, inner))
    if "gate_up" in bank.slots:
        bank.slots["gate_up"].add_slices(_slices(counts, grad_hidden, x_MD))


def _slices(counts: Sequence[int], outer: Tensor, inner: Tensor) -> list[tuple[int, Tensor, Tensor]]:
    pairs = zip(torch.split(outer, list(counts)), torch.split(inner, list(counts)), strict=True)
    return [(expert, *pair) for expert, (pair, count) in enumerate(zip(pairs, counts, strict=True)) if count]


def _product(x_MI: Tensor, weight_EOI: Tensor, counts: Sequence[int]) -> Tensor:
    """Rows [M, I] in runs of ``counts``, each times its expert's [O, I] transposed: [M, O]."""
    if _one_kernel(x_MI, weight_EOI):
        return F.grouped_mm(x_MI, weight_EOI.transpose(1, 2), offs=_ends(counts, x_MI))
    return _by_slices(product.forward, x_MI, weight_EOI, weight_EOI.shape[1], counts)


def _input_gradient(grad_MO: Tensor, weight_EOI: Tensor, counts: Sequence[int]) -> Tensor:
    """Rows [M, O] in runs of ``counts``, each times its expert's [O, I]: [M, I]."""
    if _one_kernel(grad_MO, weight_EOI):
        return F.grouped_mm(grad_MO, weight_EOI, offs=_ends(counts, grad_MO))
    return _by_slices(product.input_gradient, grad_MO, weight_EOI, weight_EOI.shape[2], counts)


def _one_kernel(x: Tensor, weight: Tensor) -> bool:
    fits = all(size * x.element_size() % _KERNEL_BYTES == 0 for size in weight.shape[1:])
    return x.device.type == "cuda" and x.dtype == torch.bfloat16 and fits


def _ends(counts: Sequence[int], x: Tensor) -> Tensor:
    return torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(x.device, non_blocking=True)


def _by_slices(
    multiply: Callable[[Tensor, Tensor], Tensor], x: Tensor, weights: Tensor, width: int, counts: Sequence[int]
) -> Tensor:
    out = x.new_empty(x.shape[0], width)
    begin = 0
    for count, weight in zip(counts, weights, strict=True):
        if count:
            # Rows of a neighbour, whose products are let go, make the number a round one.
            round_count = min(-(-count // _ROUND) * _ROUND, x.shape[0])
            first = min(begin, x.shape[0] - round_count)
            products = multiply(x[first : first + round_count], weight)
            out[begin : begin + count].copy_(products[begin - first : begin - first + count])
        begin += count
    return out
