"""`Zero`: the data-parallel side of training state, with a level (Rajbhandari et al. 2020, arXiv:1910.02054).

Parameters of a kind lie in one flat buffer a bucket, cut evenly over the data axes. Gradients are summed in fp32 over
microbatches in a second flat buffer, whose reduction starts when its last gradient of the step is there and overlaps
with the rest of backward.

level 0: every data rank reduces whole buckets and updates all of them (all-reduce);
level 1: every data rank gets its shard of the sums, updates that, and gathers the weights (reduce-scatter, all-gather).

What a gradient is summed over is read from the `ShardSpec`s (see `core/shard.py`): the data axes always; the holders
of a replicated block whose gradient is partial; the stages that hold a copy of a tied weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import final

import torch
from torch import Tensor, nn

from plait.comm.group import Group
from plait.comm.world import World
from plait.parallel.flat import ALIGN, Bucket, Held, attach, bucket_groups, counted_ranges, decays, overlap, square_sum
from plait.parallel.grads import Slot
from plait.parallel.rules import DATA_AXES
from plait.schedule.ir import Kind


@final
class Zero:
    """The flat state of one rank's parameters. Build it once, after the modules are cut and before weights are filled.

    ``ties``: the group of ranks that hold copies of a tied weight (this rank among them), or None.
    """

    def __init__(
        self,
        held: Sequence[Held],
        *,
        level: int,
        bucket_bytes: int,
        dtype: torch.dtype,
        world: World,
        ties: Group | None,
    ) -> None:
        self.level = level
        self.dtype = dtype
        self._world = world
        self._data = world.group(*DATA_AXES)
        self._ties = ties
        self._shards = self._data.size if level >= 1 else 1
        self.frozen = [one for one in held if not one.trained]
        self._frozen_weights = [self._place_frozen(one) for one in self.frozen]
        trained = [one for one in held if one.trained]
        self.buckets = [self._bucket(group) for group in bucket_groups(trained, bucket_bytes)]
        self._sums = self._partial_sums()
        self._next: dict[int | None, int] = {}
        self._by_stage: dict[int | None, list[Bucket]] = {}
        for bucket in self.buckets:
            self._by_stage.setdefault(bucket.stage, []).append(bucket)
        self._counted = [counted_ranges(bucket, self._world.at, level) for bucket in self.buckets]

    # --- construction

    def _bucket(self, held: list[Held]) -> Bucket:
        sizes = [math.prod(one.shape) for one in held]
        offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        step = ALIGN * self._shards
        length = -(-sum(sizes) // step) * step
        device = self._world.device
        weights = torch.zeros(length, dtype=self.dtype, device=device)
        grads = torch.zeros(length, dtype=torch.float32, device=device)
        index = self._data.index if self.level >= 1 else 0
        shard = slice(index * length // self._shards, (index + 1) * length // self._shards)
        master = weights[shard] if self.dtype == torch.float32 else torch.zeros_like(grads[shard])
        bucket = Bucket(
            held=held, offsets=offsets, weights=weights, grads=grads, shard=shard, master=master, stage=held[0].stage
        )
        for one, offset, size in zip(held, offsets, sizes, strict=True):
            parameter = nn.Parameter(weights[offset : offset + size].view(one.shape))
            slot = Slot(grads[offset : offset + size].view(one.shape), one.uses, self._arrival(bucket), one.deferred)
            bucket.slots.append(slot)
            attach(one, parameter, slot)
        return bucket

    def _place_frozen(self, one: Held) -> Tensor:
        weight = torch.zeros(one.shape, dtype=self.dtype, device=self._world.device)
        parameter = nn.Parameter(weight, requires_grad=False)
        for module, attribute in one.owners:
            setattr(module, attribute, parameter)
        return weight

    def _arrival(self, bucket: Bucket) -> Callable[[], None]:
        def arrived() -> None:
            bucket.waiting -= 1
            if bucket.waiting == 0:
                self._launch(bucket.stage, complete_only=True)

        return arrived

    def _partial_sums(self) -> dict[tuple[str, int, int], list[Tensor]]:
        """(axis, first, count) -> the stretches of this rank's gradient shards to be summed over those ranks."""
        sums: dict[tuple[str, int, int], list[Tensor]] = {}
        for bucket in self.buckets:
            for index, one in enumerate(bucket.held):
                for piece in one.pieces:
                    stretch = bucket.stretch(index, piece)
                    for copies in piece.copies:
                        if stretch is not None and copies.partial and copies.axis not in DATA_AXES:
                            key = (copies.axis, copies.first, copies.count)
                            sums.setdefault(key, []).append(bucket.grads[stretch])
        return sums

    # --- filling

    def parameters(self) -> list[tuple[Held, Tensor, Callable[[Tensor], object]]]:
        """(parameter, its local weights, a function that sets them from an fp32 tensor of the local shape)."""
        rows: list[tuple[Held, Tensor, Callable[[Tensor], object]]] = []
        for one, weight in zip(self.frozen, self._frozen_weights, strict=True):
            rows.append((one, weight, weight.copy_))
        for bucket in self.buckets:
            for index, one in enumerate(bucket.held):
                rows.append((one, bucket.weight(index), partial(bucket.fill, index)))
        return rows

    def masters(self) -> list[tuple[Held, int, Tensor]]:
        """(parameter, flat start, fp32 values) of what this rank's shards hold of each parameter's local tensor."""
        return self._stretches(lambda bucket: bucket.master)

    def gradients(self) -> list[tuple[Held, int, Tensor]]:
        """(parameter, flat start, fp32 gradient): this rank's share of the whole step's gradients after `finish`."""
        return self._stretches(lambda bucket: bucket.shard_grads)

    def _stretches(self, shard_of: Callable[[Bucket], Tensor]) -> list[tuple[Held, int, Tensor]]:
        rows = []
        for bucket in self.buckets:
            shard = shard_of(bucket)
            for one, offset in zip(bucket.held, bucket.offsets, strict=True):
                stretch = overlap(offset, offset + math.prod(one.shape), bucket.shard)
                if stretch is not None:
                    part = shard[stretch.start - bucket.shard.start : stretch.stop - bucket.shard.start]
                    rows.append((one, stretch.start - offset, part))
        return rows

    # --- one step

    def start(self) -> None:
        """A new step: gradients are empty."""
        self._next.clear()
        for bucket in self.buckets:
            bucket.reduction = None
            bucket.waiting = 0
            for slot in bucket.slots:
                slot.restart()

    def begin(self, stage: int, kind: Kind, *, last: bool, split: bool) -> None:
        """An F, B or W of ``stage`` begins; ``last``: no other B or W of the stage comes in this step."""
        # A split backward's weight gradients come in any order after its Bs: those wait for REDUCE.
        if kind is Kind.B and last and not split:
            self._arm(stage)

    def end(self, stage: int, kind: Kind) -> None:
        """The F, B or W has ended."""

    def _arm(self, stage: int) -> None:
        """The last microbatch's backward of ``stage`` begins: buckets are reduced as they become complete."""
        for bucket in self._by_stage.get(stage, ()):
            bucket.waiting = len(bucket.slots)
            for slot in bucket.slots:
                slot.arm()

    def reduce(self, stage: int | None) -> None:
        """All gradients of ``stage`` are there: start what has not started."""
        self._launch(stage, complete_only=False)

    def _launch(self, stage: int | None, *, complete_only: bool) -> None:
        buckets = self._by_stage.get(stage, [])
        # In order, whatever order they became ready in: every data rank must start the same reductions.
        for bucket in buckets[self._next.get(stage, 0) :]:
            if complete_only and bucket.waiting > 0:
                return
            for slot in bucket.slots:
                slot.close()
            if self.level == 0:
                bucket.reduction = self._data.all_reduce(bucket.grads)
            else:
                bucket.reduction = self._data.reduce_scatter(bucket.grads, out=bucket.shard_grads)
            self._next[stage] = self._next.get(stage, 0) + 1

    def finish(self) -> None:
        """Wait until every shard holds the gradient of the whole step, summed over everything the specs name."""
        self.reduce(None)
        for bucket in self.buckets:
            assert bucket.reduction is not None, f"stage {bucket.stage} was never reduced"
            bucket.reduction.wait()
        for (axis, _, count), parts in self._sums.items():
            packed = torch.cat(parts)
            holders(self._world, axis, count).all_reduce(packed).wait()
            for part, summed in zip(parts, torch.split(packed, [part.numel() for part in parts]), strict=True):
                part.copy_(summed)
        if self._ties is not None:
            pending = [self._ties.all_reduce(bucket.shard_grads) for bucket in self.buckets if bucket.held[0].tied]
            for reduction in pending:
                reduction.wait()

    def square_norm(self) -> Tensor:
        """fp32 scalar: this rank's share of the squared gradient norm; over all ranks every element counts once."""
        total = torch.zeros((), dtype=torch.float64, device=self._world.device)
        for bucket, ranges in zip(self.buckets, self._counted, strict=True):
            for stretch in ranges:
                total += square_sum(bucket.grads[stretch])
        return total.float()

    def scale_gradients(self, factor: Tensor | float) -> None:
        """Multiply every gradient shard."""
        for bucket in self.buckets:
            bucket.shard_grads.mul_(factor)

    def optimizer_groups(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Flat fp32 shards as parameters with gradients: (those that decay, those that do not)."""
        decay: list[nn.Parameter] = []
        rest: list[nn.Parameter] = []
        for bucket in self.buckets:
            parameter = nn.Parameter(bucket.master)
            parameter.grad = bucket.shard_grads
            (decay if decays(bucket.held[0]) else rest).append(parameter)
        return decay, rest

    def publish(self) -> None:
        """After the optimizer: every rank has the new weights."""
        gathering = []
        for bucket in self.buckets:
            own = bucket.weights[bucket.shard]
            if self.dtype != torch.float32:
                own.copy_(bucket.master)
            if self._shards > 1:
                gathering.append(self._data.all_gather(own, out=bucket.weights))
        for pending in gathering:
            pending.wait()

    def state_bytes(self) -> Mapping[str, int]:
        """Bytes of weights, gradients and optimizer state (fp32 masters and two moments) on this rank."""
        weights = sum(bucket.weights.nbytes for bucket in self.buckets) + sum(w.nbytes for w in self._frozen_weights)
        masters = 0 if self.dtype == torch.float32 else sum(bucket.master.nbytes for bucket in self.buckets)
        moments = 2 * sum(bucket.master.nbytes for bucket in self.buckets)
        return {
            "weights": weights,
            "gradients": sum(bucket.grads.nbytes for bucket in self.buckets),
            "optimizer": masters + moments,
        }


def holders(world: World, axis: str, count: int) -> Group:
    """Blocks of ``count`` neighbouring ranks along ``axis``, which hold the same part of a tensor; this rank's block.

    The first call for a (axis, count) is collective over all ranks.
    """
    size = world.mesh.sizes[axis]
    if count == size:
        return world.group(axis)
    lines = world.mesh.groups([axis])
    blocks = [line[begin : begin + count] for line in lines for begin in range(0, size, count)]
    return world.shared(f"{axis}/{count}", blocks)
