"""Flat buffers: which parameters share a bucket, where each lies in it, and which stretches of it a rank answers for.

Arithmetic and views only; what is communicated is `plait.parallel.zero`'s business.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from plait.comm.group import Pending
from plait.core.shard import Piece, ShardSpec
from plait.parallel.grads import Deferred, Slot
from plait.parallel.linear import Fused
from plait.parallel.rules import DATA_AXES

ALIGN = 16
"""Shards begin at multiples of this many elements (64 bytes of fp32)."""
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


@dataclass(kw_only=True)
class Bucket:
    """One flat run of parameters that are reduced together, and this rank's shard of it."""

    held: list[Held]
    offsets: list[int]
    weights: Tensor
    grads: Tensor
    shard: slice
    master: Tensor
    """fp32 [shard]: what the optimizer updates; a view of ``weights`` when those are fp32."""
    stage: int | None
    waiting: int = 0
    reduction: Pending | None = None
    slots: list[Slot] = field(default_factory=list)

    @property
    def shard_grads(self) -> Tensor:
        return self.grads[self.shard]

    def weight(self, index: int) -> Tensor:
        """The local weights of parameter ``index`` of the bucket, as a view."""
        shape, offset = self.held[index].shape, self.offsets[index]
        return self.weights[offset : offset + math.prod(shape)].view(shape)

    def stretch(self, index: int, piece: Piece) -> slice | None:
        """What this rank's shard covers of a block of parameter ``index``, which must be contiguous in it."""
        shape, offset = self.held[index].shape, self.offsets[index]
        if len(self.held[index].pieces) == 1:
            return overlap(offset, offset + math.prod(shape), self.shard)
        # Several blocks are sections of dim 0: runs of whole rows.
        row = math.prod(shape[1:])
        return overlap(offset + piece.local[0][0] * row, offset + piece.local[0][1] * row, self.shard)

    def fill(self, index: int, values: Tensor) -> None:
        """Set the weights of parameter ``index``, and what its fp32 master here covers of them, from fp32 values."""
        view, offset = self.weight(index), self.offsets[index]
        view.copy_(values)
        stretch = overlap(offset, offset + view.numel(), self.shard)
        if stretch is not None and self.weights.dtype != torch.float32:
            part = values.reshape(-1)[stretch.start - offset : stretch.stop - offset]
            self.master[stretch.start - self.shard.start : stretch.stop - self.shard.start].copy_(part)


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


def decays(one: Held) -> bool:
    """Decoupled weight decay acts on tensors of two or more dims only: not on norms and biases."""
    return len(one.spec.shape) >= 2


def bucket_groups(held: Sequence[Held], bucket_bytes: int) -> list[list[Held]]:
    """Parameters that may share a bucket, in the order in which backward completes them."""
    kinds: dict[tuple[object, ...], list[Held]] = {}
    for one in reversed(held):
        partial = any(
            copies.partial and copies.axis not in DATA_AXES for piece in one.pieces for copies in piece.copies
        )
        # Partial ones apart: their layout is then the same on all their holders, whatever is cut unevenly elsewhere.
        # A tied weight is the same on both its stages for the same reason.
        kinds.setdefault((one.stage, one.tied, decays(one), partial), []).append(one)
    groups: list[list[Held]] = []
    for members in kinds.values():
        filled = bucket_bytes
        for one in members:
            size = 4 * math.prod(one.shape)
            if filled + size > bucket_bytes:
                groups.append([])
                filled = 0
            groups[-1].append(one)
            filled += size
    return groups


def counted_ranges(bucket: Bucket, at: Mapping[str, int], level: int) -> list[slice]:
    """Stretches of this rank's gradient shard that no other rank counts."""
    if level == 0 and any(at[axis] for axis in DATA_AXES):
        return []
    ranges: list[slice] = []
    for index, one in enumerate(bucket.held):
        for piece in one.pieces if one.counted else ():
            if not all(at[copies.axis] == copies.first for copies in piece.copies if copies.axis not in DATA_AXES):
                continue
            stretch = bucket.stretch(index, piece)
            if stretch is not None and ranges and ranges[-1].stop == stretch.start:
                ranges[-1] = slice(ranges[-1].start, stretch.stop)
            elif stretch is not None:
                ranges.append(stretch)
    return ranges


def attach(one: Held, parameter: nn.Parameter, slot: Slot) -> None:
    """Put the parameter into its modules and route its gradient to the slot."""
    by_autograd = False
    for module, attribute in one.owners:
        setattr(module, attribute, parameter)
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
