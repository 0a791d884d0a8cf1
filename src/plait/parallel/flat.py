"""Flat buffers: which parameters share a bucket, where each lies in it, and which stretches of it a rank answers for.

Arithmetic and views only; what is communicated is `plait.parallel.zero`'s business.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from plait.comm.group import Pending
from plait.core.shard import Copies, Piece, ShardSpec
from plait.parallel.fold import Fold
from plait.parallel.grads import Deferred, Slot
from plait.parallel.grouping import first_use, is_data, runs
from plait.parallel.linear import Fused

_NORM_BLOCK = 4096


@dataclass(kw_only=True)
class Held:
    """A parameter on this rank. ``stage`` is None when several stages share it: its gradient is whole at the end."""

    name: str
    spec: ShardSpec
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    stage: int | None
    tied: bool
    """Whether another rank holds a copy as well, whose gradient is to be added."""
    counted: bool
    """Whether this rank's copy is the one that counts (in norms, in files)."""
    uses: int
    owners: list[tuple[nn.Module, str]]
    """Every (module, attribute) that refers to the parameter."""
    trained: bool
    deferred: Deferred
    dtype: torch.dtype | None = None
    """Of the weights, where it is not the run's."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def runs(self) -> list[tuple[tuple[Copies, ...], slice]]:
        """The flat tensor as stretches of elements with the same holders."""
        return runs(self.pieces, self.shape)


@dataclass(kw_only=True)
class Bucket:
    """One flat run of parameters that are reduced and gathered together, and this rank's shard of it."""

    key: int
    held: list[Held]
    offsets: list[int]
    length: int
    shard: slice
    fold: Fold
    stage: int | None
    """None: several stages of this rank have parts of its gradients."""
    gathered: bool
    """Whether ``weights`` have memory only while they are needed (level 3)."""
    weights: Tensor
    """[length] what the parameters are views of."""
    spare: Tensor | None
    """[length] the other version of the weights, where there are two."""
    own: Tensor
    """[shard] the weights of this rank's shard; a view of ``weights`` unless those are gathered."""
    master: Tensor
    """fp32 [shard]: what the optimizer updates; the same memory as ``own`` when one version of fp32 weights is kept."""
    grads: Tensor
    """fp32: [length] at levels 0 and 1, [shard] at levels 2 and 3, empty where nothing trains."""
    views: list[nn.Parameter] = field(default_factory=list)
    """The parameters, in the order of ``held``."""
    slots: list[Slot] = field(default_factory=list)
    waiting: int = 0
    """Gradients that the reduction still waits for."""
    reduction: Pending | None = None

    @property
    def shard_grads(self) -> Tensor:
        """fp32 [shard], a view of ``grads``."""
        return self.grads if self.grads.numel() < self.length else self.grads[self.shard]

    @property
    def first(self) -> int:
        """The earliest place of the model that the bucket has parameters of: its gradients are whole behind it."""
        return min(first_use(one) for one in self.held)

    def view(self, whole: Tensor, index: int) -> Tensor:
        """Parameter ``index`` in a flat tensor of the whole bucket."""
        one, offset = self.held[index], self.offsets[index]
        return whole[offset : offset + one.numel].view(one.shape)

    def within(self, index: int, run: slice) -> slice | None:
        """Where this rank's shard has elements ``run`` of parameter ``index``, from the shard's start on."""
        offset, begin = self.offsets[index], self.shard.start
        found = overlap(offset + run.start, offset + run.stop, self.shard)
        return None if found is None else slice(found.start - begin, found.stop - begin)

    def stretches(self, shard: Tensor) -> list[tuple[Held, int, Tensor]]:
        """(parameter, flat start in it, values) of all that a flat tensor [shard] holds."""
        rows = []
        for index, one in enumerate(self.held):
            found = self.within(index, slice(0, one.numel))
            if found is not None:
                rows.append((one, self.shard.start + found.start - self.offsets[index], shard[found]))
        return rows

    def put(self, index: int, shard: Tensor, values: Tensor) -> None:
        """Set what a flat tensor [shard] holds of parameter ``index`` from values of the parameter's shape."""
        found = self.within(index, slice(0, self.held[index].numel))
        if found is not None:
            start = self.shard.start + found.start - self.offsets[index]
            shard[found].copy_(values.reshape(-1)[start : start + found.stop - found.start])

    def fill(self, index: int, values: Tensor) -> None:
        """Set the weights of parameter ``index``, and what its shards here cover of them, from fp32 values."""
        for whole in (self.weights, self.spare):
            if whole is not None and not self.gathered:
                self.view(whole, index).copy_(values)
        for shard in (self.own, self.master):
            self.put(index, shard, values)


def square_sum(flat: Tensor) -> Tensor:
    """fp64 scalar. In blocks: one fp32 sum of 3e7 squares is off by 1e-3 on CPU (dot and norm alike), this by 1e-8."""
    whole = flat.numel() // _NORM_BLOCK * _NORM_BLOCK
    rows = torch.linalg.vector_norm(flat[:whole].view(whole // _NORM_BLOCK, _NORM_BLOCK), dim=1)
    rest = torch.linalg.vector_norm(flat[whole:])
    total: Tensor = rows.double().square().sum() + rest.double().square()
    return total


def overlap(start: int, stop: int, window: slice) -> slice | None:
    begin, end = max(start, window.start), min(stop, window.stop)
    return slice(begin, end) if begin < end else None


def counted_ranges(bucket: Bucket, at: Mapping[str, int]) -> list[slice]:
    """Stretches of this rank's shard that no other rank counts."""
    ranges: list[slice] = []
    for index, one in enumerate(bucket.held):
        for copied, run in one.runs() if one.counted else ():
            if not all(at[copies.axis] == copies.first for copies in copied if not is_data(copies.axis)):
                continue
            stretch = bucket.within(index, run)
            if stretch is not None and ranges and ranges[-1].stop == stretch.start:
                ranges[-1] = slice(ranges[-1].start, stretch.stop)
            elif stretch is not None:
                ranges.append(stretch)
    return ranges


def attach(one: Held, parameter: nn.Parameter, slot: Slot) -> None:
    """Route the gradient of the parameter, which its modules hold, to the slot."""
    by_autograd = False
    for module, attribute in one.owners:
        if isinstance(module, Fused):
            module.slots[attribute] = slot
        else:
            by_autograd = True
    if by_autograd:

        def take(leaf: Tensor) -> None:
            if leaf.grad is not None:
                slot.add(leaf.grad)
                leaf.grad = None

        parameter.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]
