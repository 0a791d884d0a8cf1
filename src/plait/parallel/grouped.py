"""Products of rows with the expert that each belongs to, as one call: rows are sorted, an expert's are a slice.

``F.grouped_mm`` is a loop of products over the slices on a CPU and one kernel on a GPU. On a CPU it was measured
beside oneDNN slice by slice (the same time) and a batched product of padded slices (1.3 to 2 times as long, more on a
skewed load): benchmarks/experts.py has them all. M rows, I inputs, O outputs, E experts, D hidden, F ffn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait.models.moe import Experts
from plait.parallel.grads import Slot
from plait.parallel.linear import Fused

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
    hidden = _product(x_MD, bank.gate_up.transpose(1, 2), counts)
    gate, up = hidden.chunk(2, dim=-1)
    return _product(F.silu(gate).mul_(up), bank.down.transpose(1, 2), counts), hidden


def backward(grad_MD: Tensor, hidden: Tensor, bank: Bank, counts: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient of x [M, D], of hidden [M, 2F], the inner activation [M, F]); see `add_weight_gradients`."""
    gate, up = hidden.chunk(2, dim=-1)
    inner = F.silu(gate)
    grad_inner = _product(grad_MD, bank.down, counts)
    grad_hidden = torch.empty_like(hidden)
    grad_gate, grad_up = grad_hidden.chunk(2, dim=-1)
    torch.mul(inner, grad_inner, out=grad_up)
    grad_gate.copy_(torch.ops.aten.silu_backward(grad_inner.mul_(up), gate))
    return _product(grad_hidden, bank.gate_up, counts), grad_hidden, inner.mul_(up)


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


def _product(x_MI: Tensor, weight_EIO: Tensor, counts: Sequence[int]) -> Tensor:
    """Rows [M, I] in runs of ``counts``, each times its expert's [I, O]."""
    if _one_kernel(x_MI, weight_EIO):
        ends = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return F.grouped_mm(x_MI, weight_EIO, offs=ends.to(x_MI.device))
    out_MO = x_MI.new_empty(x_MI.shape[0], weight_EIO.shape[2])
    parts = zip(torch.split(x_MI, list(counts)), weight_EIO, torch.split(out_MO, list(counts)), strict=True)
    for part, weight_IO, into in parts:
        torch.mm(part, weight_IO, out=into)
    return out_MO


def _one_kernel(x_MI: Tensor, weight_EIO: Tensor) -> bool:
    on_device = x_MI.device.type == "cpu" or x_MI.dtype == torch.bfloat16
    fits = all(size * x_MI.element_size() % _KERNEL_BYTES == 0 for size in weight_EIO.shape[1:])
    return on_device and fits and x_MI.dtype in (torch.float32, torch.bfloat16, torch.float16)
