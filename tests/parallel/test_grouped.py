"""Products of rows with their experts, against one product a row and autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait.models.moe import Experts
from plait.models.parts import MoEConfig
from plait.parallel import grouped
from plait.parallel.grads import Deferred, Slot
from plait.parallel.grouped import GroupedExperts

COUNTS = ([3, 0, 5, 1], [0, 0, 0, 0], [0, 9, 0, 0])
WIDTHS = ((8, 16), (8, 6), (5, 3))
"""(hidden, ffn): the kernel's, and two that do not fit it."""


def stack(hidden: int, ffn: int, dtype: torch.dtype) -> GroupedExperts:
    experts = Experts(hidden, MoEConfig(num_experts=4, top_k=1, ffn_size=ffn))
    layer = GroupedExperts(experts)
    generator = torch.Generator().manual_seed(0)
    for name in ("gate_up", "down"):
        shape = getattr(experts, name).shape
        setattr(layer, name, nn.Parameter(torch.randn(shape, generator=generator).to(dtype)))
        layer.slots[name] = Slot(torch.full(shape, float("nan")), 1, lambda: None, Deferred())
    return layer


def reference(x: Tensor, layer: GroupedExperts, counts: list[int]) -> Tensor:
    parts = []
    for part, gate_up, down in zip(x.split(counts), layer.gate_up, layer.down, strict=True):
        gate, up = F.linear(part, gate_up).chunk(2, -1)
        parts.append(F.linear(F.silu(gate) * up, down))
    return torch.cat(parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("widths", WIDTHS)
def test_outputs_and_gradients(widths: tuple[int, int], counts: list[int], dtype: torch.dtype) -> None:
    layer = stack(*widths, dtype)
    x, grad = (torch.randn(sum(counts), widths[0]).to(dtype) for _ in range(2))
    # bf16 keeps 8 bits: each of the three products of a row rounds once.
    tolerance = {"rtol": 5e-2, "atol": 5e-1} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
    x.requires_grad_()
    wanted = reference(x, layer, counts)
    wanted.backward(grad)
    with torch.no_grad():
        bank = layer.bank()
        found, hidden = grouped.forward(x, bank, counts)
        grad_x, grad_hidden, inner = grouped.backward(grad, hidden, bank, counts)
        grouped.add_weight_gradients(bank, counts, grad, inner, grad_hidden, x)
    torch.testing.assert_close(found, wanted, **tolerance)
    torch.testing.assert_close(grad_x, x.grad, **tolerance)
    for name, slot in layer.slots.items():
        right = getattr(layer, name).grad
        torch.testing.assert_close(slot.grad, right.float(), **tolerance)
        for expert, count in enumerate(counts):
            assert count or not slot.grad[expert].any()


@pytest.mark.parametrize("counts", COUNTS)
def test_the_kernel_for_gpus_computes_the_same(monkeypatch: pytest.MonkeyPatch, counts: list[int]) -> None:
    """Its CPU form, which stands for the arguments; fp32 sums of up to 32 terms in another order."""
    layer, rows = stack(8, 16, torch.float32), sum(counts)
    x, grad = torch.randn(rows, 8), torch.randn(rows, 8)
    found = []
    for kernel in (False, True):
        monkeypatch.setattr(grouped, "_one_kernel", lambda x, weight, kernel=kernel: kernel)
        with torch.no_grad():
            out, hidden = grouped.forward(x, layer.bank(), counts)
            found.append((out, *grouped.backward(grad, hidden, layer.bank(), counts)))
    for slices, one in zip(*found, strict=True):
        torch.testing.assert_close(slices, one, rtol=1e-5, atol=1e-5)
