"""Typed collectives: one table says for each its arrow, its dual in backward, and thereby every gradient.

On each axis a tensor is of one of four types, and its gradient is of the dual type:

====  ==========================================================  =========
type  the ranks hold                                              gradient
====  ==========================================================  =========
R     the same value, used for different work                     P
I     the same value, used for the same work                      I
V     different parts of a whole (sharded along dim 0)            V
P     different summands of a whole                               R
====  ==========================================================  =========

So the backward of ``source -> target`` goes from the dual of ``target`` to the dual of ``source``. Most silent gradient
errors of combined parallelisms are a wrong arrow here (Megatron-LM's f and g are ENTER and REDUCE; arXiv:1909.08053).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Literal

import torch
from torch import Tensor

from plait.comm.group import Group, Pending


class Type(Enum):
    """How a tensor lies on one axis."""

    R = "replicated"
    I = "identical"  # noqa: E741
    V = "varying"
    P = "partial"

    @property
    def dual(self) -> Type:
        """Type of the gradient of a tensor of this type."""
        return {Type.R: Type.P, Type.I: Type.I, Type.V: Type.V, Type.P: Type.R}[self]


Move = Literal["keep", "all_reduce", "all_gather", "reduce_scatter", "slice", "all_to_all"]


@dataclass(frozen=True, kw_only=True)
class Collective:
    """A differentiable collective: what moves in forward and in backward."""

    name: str
    source: Type
    target: Type
    forward: Move
    backward: Move


ENTER: Final = Collective(name="enter", source=Type.I, target=Type.R, forward="keep", backward="all_reduce")
REDUCE: Final = Collective(name="reduce", source=Type.P, target=Type.I, forward="all_reduce", backward="keep")
GATHER: Final = Collective(name="gather", source=Type.V, target=Type.R, forward="all_gather", backward="reduce_scatter")
COLLECT: Final = Collective(name="collect", source=Type.V, target=Type.I, forward="all_gather", backward="slice")
SCATTER: Final = Collective(
    name="scatter", source=Type.P, target=Type.V, forward="reduce_scatter", backward="all_gather"
)
SLICE: Final = Collective(name="slice", source=Type.I, target=Type.V, forward="slice", backward="all_gather")
EXCHANGE: Final = Collective(name="exchange", source=Type.V, target=Type.V, forward="all_to_all", backward="all_to_all")

TABLE: Final = (ENTER, REDUCE, GATHER, COLLECT, SCATTER, SLICE, EXCHANGE)


def start(x: Tensor, group: Group, kind: Move) -> Pending:
    """Start one movement along dim 0 of a contiguous ``x``; an ``all_reduce`` overwrites ``x``.

    Layers that overlap an arrow of the table with their own work read it as ``start(x, group, ARROW.forward)`` and, in
    their backward, ``start(grad, group, ARROW.backward)``.
    """
    if kind == "all_reduce":
        return group.all_reduce(x)
    if kind == "all_gather":
        return group.all_gather(x)
    if kind == "reduce_scatter":
        return group.reduce_scatter(x)
    if kind == "all_to_all":
        return group.all_to_all(x)
    if kind == "slice":
        return Pending(lambda: x.chunk(group.size)[group.index])
    return Pending(lambda: x)


def move(x: Tensor, group: Group, kind: Move) -> Tensor:
    """`start` and wait, leaving ``x`` as it was."""
    mine = x.clone(memory_format=torch.contiguous_format) if kind == "all_reduce" else x
    return start(mine if kind in ("keep", "slice") else mine.contiguous(), group, kind).wait()


class _Typed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, collective: Collective) -> Tensor:
        ctx.group, ctx.collective = group, collective
        moved = move(x, group, collective.forward)
        return moved.view_as(moved) if moved is x else moved

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return move(grad, ctx.group, ctx.collective.backward), None, None


def apply(x: Tensor, group: Group, collective: Collective) -> Tensor:
    """``x`` of type ``collective.source`` on the group's axis, as ``collective.target``; differentiable.

    Movements run along dim 0, which must divide by the group's size where it is cut.
    """
    if group.size == 1:
        return x
    result: Tensor = _Typed.apply(x, group, collective)  # type: ignore[no-untyped-call]
    return result
