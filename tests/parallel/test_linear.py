"""Column and row parallel layers against ``F.linear`` and autograd on whole tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait.core.mesh import Mesh
from plait.parallel import product
from plait.parallel.grads import Deferred, Slot
from plait.parallel.linear import ColumnLinear, Fused, RowLinear
from tests.pool import Connect, Pool

ROWS, INPUTS, OUTPUTS = 12, 12, 24


def numbers() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = {"x": (ROWS, INPUTS), "weight": (OUTPUTS, INPUTS), "bias": (OUTPUTS,), "grad": (ROWS, OUTPUTS)}
    return {name: torch.randn(size, generator=generator) for name, size in sizes.items()}


def reference(*, bias: bool) -> dict[str, Tensor]:
    """Output and gradients on one device."""
    given = numbers()
    x, weight, b = (given[name].requires_grad_() for name in ("x", "weight", "bias"))
    out = F.linear(x, weight, b if bias else None)
    out.backward(given["grad"])
    found = {"out": out.detach(), "x": x.grad, "weight": weight.grad, "bias": b.grad if bias else torch.zeros(0)}
    return {name: value for name, value in found.items() if value is not None}


def put(layer: Fused, name: str, value: Tensor | None, *, trained: bool) -> None:
    if value is None:
        layer.register_parameter(name, None)
        return
    setattr(layer, name, nn.Parameter(value.clone(), requires_grad=trained))
    if trained:
        layer.slots[name] = Slot(torch.full_like(value, float("nan")), 1, lambda: None, Deferred())


def run_layer(connect: Connect, size: int, column: bool, sequence: bool, bias: bool, trained: bool) -> dict[str, Any]:
    group = connect(Mesh(tp=size)).group("tp")
    given, at = numbers(), group.index
    layer: ColumnLinear | RowLinear
    b = given["bias"]
    if column:
        layer = ColumnLinear(group=group, sequence=sequence, sections=None)
        put(layer, "weight", given["weight"].chunk(size)[at], trained=trained)
        put(layer, "bias", b.chunk(size)[at] if bias else None, trained=trained)
        x = given["x"].chunk(size)[at] if sequence else given["x"]
        grad = given["grad"].chunk(size, 1)[at]
    else:
        layer = RowLinear(group=group, sequence=sequence)
        put(layer, "weight", given["weight"].chunk(size, 1)[at], trained=trained)
        put(layer, "bias", b if bias else None, trained=trained)
        x = given["x"].chunk(size, 1)[at]
        grad = given["grad"].chunk(size)[at] if sequence else given["grad"]
    x = x.clone().requires_grad_()
    out = layer(x)
    assert isinstance(out, Tensor)
    out.backward(grad)
    assert x.grad is not None
    found = {"out": out.detach(), "x": x.grad, **{name: slot.grad for name, slot in layer.slots.items()}}
    return {name: value.numpy().copy() for name, value in found.items()}


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("column", [False, True])
def test_layers_equal_linear_on_one_device(pool: Pool, size: int, sequence: bool, column: bool) -> None:
    sequence = sequence and size > 1
    for bias in (False, True):
        wanted = reference(bias=bias)
        ranks = pool.run(size, run_layer, size, column, sequence, bias, True)
        parts: dict[str, list[Tensor]] = {
            name: [torch.from_numpy(rank[name]) for rank in ranks] for name in ("out", "x", "weight")
        }
        whole = {
            "out": torch.cat(parts["out"], 1 if column else 0) if column or sequence else parts["out"][0],
            "x": torch.cat(parts["x"], 0 if column else 1) if sequence or not column else parts["x"][0],
            "weight": torch.cat(parts["weight"], 0 if column else 1),
        }
        for name, value in whole.items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-5, msg=f"{name}, bias={bias}")
        if bias:
            grads = [torch.from_numpy(rank["bias"]) for rank in ranks]
            if column:
                found = torch.cat(grads)
            else:
                # Cut by rows, the bias's gradient is partial (rules.py says so); otherwise each rank has all of it.
                found = torch.stack(grads).sum(0) if sequence else grads[-1]
            torch.testing.assert_close(found, wanted["bias"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("column", [False, True])
def test_a_frozen_layer_still_passes_the_gradient_on(pool: Pool, column: bool) -> None:
    for sequence in (False, True):
        trained = pool.run(2, run_layer, 2, column, sequence, True, True)
        frozen = pool.run(2, run_layer, 2, column, sequence, True, False)
        for a, b in zip(trained, frozen, strict=True):
            assert set(b) == {"out", "x"}
            assert (a["x"] == b["x"]).all()
            assert (a["out"] == b["out"]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rows", [0, 1, 33])
def test_products_equal_torchs(rows: int, dtype: torch.dtype) -> None:
    x, weight, bias, grad = (torch.randn(size).to(dtype) for size in ((rows, 20), (7, 20), (7,), (rows, 7)))
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(product.forward(x, weight, bias), F.linear(x, weight, bias), **tolerance)
    torch.testing.assert_close(product.forward(x, weight), F.linear(x, weight), **tolerance)
    torch.testing.assert_close(product.input_gradient(grad, weight), grad @ weight, **tolerance)
