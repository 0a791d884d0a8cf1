"""The typed table, row by row, against autograd in one process that holds every rank's tensor.

One process can say what a type means. The *slots* of n ranks are n tensors on one autograd tape, the *logical* value
behind them is what the rest of the program thinks of:

R, I  every slot is the logical value x: slot_r = x
V     slot_r is the r-th run of x along dim 0
P     x is the sum of the slots

A gradient is of the dual type. So one rank's own contributions to dL/dx are what the slots of an R value get (P), every
rank gets the whole dL/dx for an I value, its run of it for V, and the whole of it for P (R).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from plait.comm.collectives import EXCHANGE, TABLE, Collective, Type, apply
from plait.comm.ledger import WIRE
from plait.core.mesh import Mesh
from tests.pool import Connect, Pool

COLUMNS = 3
ROWS = 2
"""Rows of the smallest part; a whole has size * size of them, so that everything can be cut."""


def slots_of(kind: Type, size: int, generator: torch.Generator) -> list[Tensor]:
    """Random tensors of the ranks that are a legal value of this type. fp64: sums in another order differ by 1e-15."""

    def random(rows: int) -> Tensor:
        return torch.randn(rows, COLUMNS, generator=generator, dtype=torch.float64)

    whole = ROWS * size * size
    if kind in (Type.R, Type.I):
        value = random(whole)
        return [value.clone() for _ in range(size)]
    return [random(whole // size if kind is Type.V else whole) for _ in range(size)]


def logical(kind: Type, slots: list[Tensor]) -> Tensor:
    """The value that the slots stand for."""
    if kind is Type.P:
        return torch.stack(slots).sum(0)
    return torch.cat(slots) if kind is Type.V else slots[0]


def represented(kind: Type, value: Tensor, size: int) -> list[Tensor]:
    """Slots of a value; of P there are many, so it is not among them."""
    assert kind is not Type.P
    return list(value.chunk(size)) if kind is Type.V else [value] * size


def meaning(
    collective: Collective, size: int, seed: int
) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
    """(inputs, outputs, gradients given, gradients wanted) of the ranks, by autograd on one tape."""
    generator = torch.Generator().manual_seed(seed)
    inputs = slots_of(collective.source, size, generator)
    leaves = [x.clone().requires_grad_() for x in inputs]
    if collective is EXCHANGE:
        # V to V: the whole stays, but other runs of it lie on the ranks: part j of rank i becomes part i of rank j.
        outputs = [torch.cat([leaf.chunk(size)[rank] for leaf in leaves]) for rank in range(size)]
    elif collective.source is Type.I:
        # Identical slots are one value: leaf 0 stands for all, and its gradient is everyone's.
        outputs = represented(collective.target, leaves[0], size)
    else:
        outputs = represented(collective.target, logical(collective.source, leaves), size)
    downstream = slots_of(collective.target.dual, size, generator)
    if collective.target is Type.I:
        # The loss sees an identical value once, however many ranks hold it.
        outputs[0].backward(downstream[0])
    else:
        # R's slots get partial gradients (each rank's own work), V's their run: they add up on the tape.
        torch.autograd.backward(outputs, downstream)
    if collective.source is Type.I:
        wanted = [leaves[0].grad] * size
    else:
        wanted = [leaf.grad for leaf in leaves]
    return inputs, [out.detach() for out in outputs], downstream, [grad for grad in wanted if grad is not None]


def run_table(connect: Connect, size: int, transport: str) -> list[dict[str, Any]]:
    world = connect(Mesh(tp=size), transport=transport)
    group, rows = world.group("tp"), []
    for number, collective in enumerate(TABLE):
        inputs, _, downstream, _ = meaning(collective, size, seed=number)
        x = inputs[group.index].clone().requires_grad_()
        kept = x.detach().clone()
        world.book.ledger.clear()
        world.book.phase = "F"
        out = apply(x, group, collective)
        world.book.phase = "B"
        given = downstream[group.index].clone()
        out.backward(given)
        assert x.grad is not None
        assert torch.equal(x.detach(), kept), "the input was changed"
        assert torch.equal(given, downstream[group.index]), "the gradient was changed"
        rows.append(
            {
                "out": out.detach().numpy().copy(),
                "grad": x.grad.numpy().copy(),
                "bytes": dict(world.book.ledger.bytes),
                "whole": max(x.nbytes, out.nbytes),
            }
        )
    return rows


@pytest.mark.parametrize("transport", ["auto", "gloo"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_table_equals_autograd_in_one_process(pool: Pool, size: int, transport: str) -> None:
    results = pool.run(size, run_table, size, transport)
    for number, collective in enumerate(TABLE):
        _, outputs, _, wanted = meaning(collective, size, seed=number)
        for rank, rows in enumerate(results):
            row = rows[number]
            told = f"{collective.name} on rank {rank} of {size}"
            torch.testing.assert_close(torch.from_numpy(row["out"]), outputs[rank], rtol=1e-12, atol=1e-12, msg=told)
            torch.testing.assert_close(torch.from_numpy(row["grad"]), wanted[rank], rtol=1e-12, atol=1e-12, msg=told)
            moved = {("F", collective.forward), ("B", collective.backward)}
            expected = {
                ("tp", move, phase): WIRE[move](size, row["whole"])
                for phase, move in moved
                if move not in ("keep", "slice")
            }
            assert row["bytes"] == expected, told


def run_replaced(connect: Connect, size: int, wrong: Collective, number: int) -> Any:
    group = connect(Mesh(tp=size)).group("tp")
    inputs, _, downstream, _ = meaning(TABLE[number], size, seed=number)
    x = inputs[group.index].clone().requires_grad_()
    apply(x, group, wrong).backward(downstream[group.index].clone())
    assert x.grad is not None
    return x.grad.numpy().copy()


def test_a_wrong_arrow_is_seen(pool: Pool) -> None:
    """The comparison above can fail: the most usual wrong arrows give other gradients."""
    from plait.comm.collectives import COLLECT, ENTER, GATHER

    for right, backward in ((ENTER, "keep"), (GATHER, "slice"), (COLLECT, "reduce_scatter")):
        wrong = Collective(
            name="wrong",
            source=right.source,
            target=right.target,
            forward=right.forward,
            backward=backward,  # type: ignore[arg-type]
        )
        number = TABLE.index(right)
        grads = pool.run(2, run_replaced, 2, wrong, number)
        _, _, _, wanted = meaning(right, 2, seed=number)
        assert not torch.allclose(torch.from_numpy(grads[0]), wanted[0])


def test_dual_is_an_involution() -> None:
    assert {kind.dual.dual for kind in Type} == set(Type)
    assert all(kind.dual.dual is kind for kind in Type)
    assert Type.R.dual is Type.P
    assert Type.V.dual is Type.V
    assert Type.I.dual is Type.I


def test_backward_goes_from_the_dual_of_the_target_to_the_dual_of_the_source() -> None:
    """The move of every direction is the one that its two types need; the same rule serves forward and backward."""
    needs = {
        (Type.I, Type.R): "keep",
        (Type.P, Type.I): "all_reduce",
        (Type.P, Type.R): "all_reduce",
        (Type.V, Type.R): "all_gather",
        (Type.V, Type.I): "all_gather",
        (Type.P, Type.V): "reduce_scatter",
        (Type.I, Type.V): "slice",
        (Type.R, Type.V): "slice",
        (Type.I, Type.I): "keep",
        (Type.V, Type.V): "all_to_all",
    }
    for row in TABLE:
        assert row.forward == needs[row.source, row.target], row.name
        assert row.backward == needs[row.target.dual, row.source.dual], row.name


def run_alone(connect: Connect) -> bool:
    group = connect(Mesh()).group("tp")
    x = torch.randn(4, 3)
    return all(apply(x, group, collective) is x for collective in TABLE)


def test_one_rank_moves_nothing(pool: Pool) -> None:
    assert pool.run(1, run_alone) == [True]
