"""`Zero`: the data-parallel side of training state, with a level (Rajbhandari et al. 2020, arXiv:1910.02054).

Parameters of a kind lie in one flat buffer a bucket, cut evenly over the data ranks. Gradients are summed in fp32.

level 0: every data rank reduces whole buckets and updates all of them (all-reduce);
level 1: every data rank gets its shard of the sums, updates that, and gathers the weights (reduce-scatter, all-gather);
level 2: whole gradients live only while an action makes them, what stays is the shard (`plait.parallel.reduction`);
level 3: whole weights live only while a layer computes, what stays is the shard (`plait.parallel.gathered`).

What a gradient is summed over is read from the `ShardSpec`s (see `core/shard.py`): the data axes always; the holders
of a replicated block whose gradient is partial; the stages that hold a copy of a tied weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import final

import torch
from torch import Tensor, nn

from plait.comm.group import Group
from plait.comm.world import World
from plait.core.shard import Piece, ShardSpec
from plait.models.decoder import Decoder
from plait.parallel.buckets import make_bucket
from plait.parallel.flat import Bucket, Held, counted_ranges, square_sum
from plait.parallel.fold import holders, make_folds
from plait.parallel.gathered import Gathered
from plait.parallel.grouping import bucket_groups, decays, is_data
from plait.parallel.reducer import Exact, Reducer
from plait.parallel.reduction import AtEnd, PerAction, Reduction
from plait.schedule.ir import Kind


@final
class Zero:
    """The flat state of one rank's parameters. Build it once, after the modules are cut and before weights are filled;
    it takes ``held`` over. Collective over all ranks.

    ``ties``: the group of ranks that hold copies of a tied weight (this rank among them), or None. ``zero_group``:
    neighbouring data ranks that share state, which is copied across (None: all data ranks share it). ``reducer`` makes
    what sums gradients over a group of data ranks. ``gather``: at level 3, gather weights for each ``use`` or once a
    ``step``. ``versions``: 2 keeps the weights of the step before as well (levels 0 and 1).
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
        zero_group: int | None = None,
        gather: str = "use",
        versions: int = 1,
        reducer: Callable[[Group], Reducer] = Exact,
    ) -> None:
        self.level = level
        self._world = world
        self._ties = ties
        self._folds = make_folds(world, level=level, zero_group=zero_group, reducer=reducer)
        made: list[Bucket] = []
        for trained in (True, False):
            chosen = [one for one in held if one.trained == trained]
            for group in bucket_groups(chosen, bucket_bytes, by_place=level == 3):
                fold = self._folds[group[0].spec.expert]
                made.append(
                    make_bucket(
                        len(made), group, fold, level=level, dtype=dtype, versions=versions, device=world.device
                    )
                )
        self.buckets = [bucket for bucket in made if bucket.held[0].trained]
        """Those that train."""
        self._all = made
        self._flat = [nn.Parameter(bucket.master) for bucket in self.buckets]
        for flat, bucket in zip(self._flat, self.buckets, strict=True):
            flat.grad = bucket.shard_grads
        self._reduction: Reduction = AtEnd(self.buckets) if level <= 1 else PerAction(self.buckets)
        self._gathered = Gathered(made, keep=gather == "step")
        self._version = self._selected = 0
        self._lay_out()

    def _lay_out(self) -> None:
        """What follows from where the tensors lie on the mesh."""
        self._sums = self._partial_sums()
        self._counted = [counted_ranges(bucket, self._world.at) for bucket in self.buckets]

    def _partial_sums(self) -> dict[tuple[str, int, int], list[Tensor]]:
        """(axis, first, count) -> the stretches of this rank's gradient shards to be summed over those ranks."""
        sums: dict[tuple[str, int, int], list[Tensor]] = {}
        for bucket in self.buckets:
            for index, one in enumerate(bucket.held):
                for copied, run in one.runs():
                    stretch = bucket.within(index, run)
                    for copies in copied:
                        if stretch is not None and copies.partial and not is_data(copies.axis):
                            key = (copies.axis, copies.first, copies.count)
                            sums.setdefault(key, []).append(bucket.shard_grads[stretch])
        return sums

    # --- what is held

    def watch(self, stage: int, part: Decoder) -> None:
        """``part``, whose parameters are in their places, is ``stage``: at level 3, gather its weights when it runs."""
        self._gathered.watch(stage, part)

    def parameters(self) -> list[tuple[Held, Tensor, Callable[[Tensor], object]]]:
        """(parameter, its local weights, a function that sets them from an fp32 tensor of the local shape).

        At level 3 the weights can be read inside `whole` alone.
        """
        rows: list[tuple[Held, Tensor, Callable[[Tensor], object]]] = []
        for bucket in self._all:
            for index, one in enumerate(bucket.held):
                rows.append((one, bucket.views[index].detach(), partial(bucket.fill, index)))
        return rows

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Between steps: every parameter can be read meanwhile. Collective over the data ranks."""
        with self._gathered.whole():
            yield

    def masters(self) -> list[tuple[Held, int, Tensor]]:
        """(parameter, flat start, fp32 values) of what this rank's shards hold of each parameter's local tensor."""
        return [row for bucket in self.buckets for row in bucket.stretches(bucket.master)]

    def frozen(self) -> list[tuple[Held, int, Tensor]]:
        """The same of parameters that do not train, in the dtype that they are held in."""
        return [row for bucket in self._all if not bucket.held[0].trained for row in bucket.stretches(bucket.own)]

    def gradients(self) -> list[tuple[Held, int, Tensor]]:
        """(parameter, flat start, fp32 gradient): this rank's share of the whole step's gradients after `finish`."""
        return [row for bucket in self.buckets for row in bucket.stretches(bucket.shard_grads)]

    # --- one step

    def start(self) -> None:
        """A new step: gradients are empty."""
        self._reduction.start()
        self._gathered.start()

    def begin(self, stage: int, kind: Kind, *, last: bool, split: bool) -> None:
        """An F, B or W of ``stage`` begins; ``last``: no other B or W of the stage comes in this step."""
        self._reduction.begin(stage, kind, last=last, split=split)
        self._gathered.begin(last=last)

    def end(self, stage: int, kind: Kind) -> None:
        """The F, B or W has ended."""
        self._reduction.end(stage, kind)
        self._gathered.end(stage)

    def reduce(self, stage: int | None) -> None:
        """All gradients of ``stage`` are there: start what has not started."""
        self._reduction.reduce(stage)

    def finish(self) -> None:
        """Wait until every shard holds the gradient of the whole step, summed over everything the specs name."""
        self._reduction.finish()
        self._gathered.free()
        pending = [
            bucket.fold.across.all_reduce(bucket.key, bucket.shard_grads)
            for bucket in self.buckets
            if bucket.fold.across is not None
        ]
        for reduction in pending:
            reduction.wait()
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
        """fp32 scalar: this rank's share of the squared gradient norm; over all ranks every element counts once.

        Not finite where a gradient is not.
        """
        total = torch.zeros((), dtype=torch.float64, device=self._world.device)
        for bucket, ranges in zip(self.buckets, self._counted, strict=True):
            for stretch in ranges:
                total += square_sum(bucket.shard_grads[stretch])
        return total.float()

    def scale_gradients(self, factor: Tensor | float) -> None:
        """Multiply every gradient shard."""
        for bucket in self.buckets:
            bucket.shard_grads.mul_(factor)

    def optimizer_groups(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Flat fp32 shards as parameters with gradients: (those that decay, those that do not)."""
        decay: list[nn.Parameter] = []
        rest: list[nn.Parameter] = []
        for flat, bucket in zip(self._flat, self.buckets, strict=True):
            (decay if decays(bucket.held[0]) else rest).append(flat)
        return decay, rest

    def publish(self) -> None:
        """After the optimizer: every rank has the new weights (at level 3: what the next gathers read)."""
        gathering = []
        for bucket in self.buckets:
            if bucket.spare is not None:
                bucket.weights, bucket.spare = bucket.spare, bucket.weights
                bucket.own = bucket.weights[bucket.shard]
            if bucket.master is not bucket.own:
                bucket.own.copy_(bucket.master)
            if bucket.fold.shards > 1 and not bucket.gathered:
                gathering.append(bucket.fold.gather.all_gather(bucket.own, out=bucket.weights))
        for pending in gathering:
            pending.wait()
        self._version += 1
        self.select(self._version)

    def select(self, version: int) -> None:
        """Parameters have the weights after ``version`` updates: of the two versions that are kept, where there are two
        (before the first update both are the initial weights). After `publish` they have the newest."""
        if version == self._selected:
            return
        assert version in (self._version, self._version - 1), f"version {version} of the weights is gone"
        self._selected = version
        for bucket in self.buckets:
            if bucket.spare is not None:
                weights = bucket.weights if version == self._version else bucket.spare
                for index, parameter in enumerate(bucket.views):
                    parameter.data = bucket.view(weights, index)

    def state_bytes(self) -> Mapping[str, int]:
        """Bytes of weights, gradients and optimizer state (fp32 masters and two moments) that stay on this rank.

        fp32 weights that are kept once are their own masters. At levels 2 and 3 whole buckets come and go on top.
        """
        weights = sum(bucket.own.nbytes if bucket.gathered else bucket.weights.nbytes for bucket in self._all)
        weights += sum(bucket.spare.nbytes for bucket in self.buckets if bucket.spare is not None)
        apart = sum(bucket.master.nbytes for bucket in self.buckets if bucket.master is not bucket.own)
        return {
            "weights": weights,
            "gradients": sum(bucket.grads.nbytes for bucket in self.buckets),
            "optimizer": apart + 2 * sum(bucket.master.nbytes for bucket in self.buckets),
        }

    # --- state that moves between ranks, and to and from files

    def shards(self) -> list[tuple[Bucket, nn.Parameter | None]]:
        """Every bucket, and the flat fp32 shard of it that the optimizer updates (None: frozen)."""
        flats = dict(zip((bucket.key for bucket in self.buckets), self._flat, strict=True))
        return [(bucket, flats.get(bucket.key)) for bucket in self._all]

    def reducers(self) -> list[Reducer]:
        """What sums gradients over data ranks; some of it carries state from step to step."""
        folds = {id(fold): fold for fold in self._folds.values()}.values()
        return [one for fold in folds for one in (fold.reducer, fold.across) if one is not None]

    def refresh(self, version: int) -> None:
        """Masters, frozen shards and, where there are two versions, the other one's shards were set from outside: whole
        weights follow. ``version``: updates that they have had. Collective over the data ranks."""
        gathering = []
        for bucket in self._all:
            if bucket.master is not bucket.own:
                bucket.own.copy_(bucket.master)
            for whole in (bucket.weights, bucket.spare):
                if whole is not None and bucket.fold.shards > 1 and not bucket.gathered:
                    gathering.append(bucket.fold.gather.all_gather(whole[bucket.shard], out=whole))
        for pending in gathering:
            pending.wait()
        self._version = self._selected = version  # between steps, parameters have the newest

    def flat(self, name: str) -> nn.Parameter:
        """The flat fp32 shard, a parameter of the optimizer, that has part of trained parameter ``name``."""
        return self._flat[self._find(name)[0].key]

    def local(self, name: str, shard: Tensor) -> Tensor:
        """The whole local tensor of ``name`` out of the ranks' ``shard``: of `flat`, or a moment of the optimizer that
        belongs to it. A copy; collective over the data ranks."""
        bucket, index = self._find(name)
        return bucket.view(bucket.fold.gather.all_gather(shard).wait(), index).clone()

    def set_local(self, name: str, shard: Tensor, values: Tensor) -> None:
        """The inverse: put this rank's part of ``values`` [local shape] into ``shard``. Weights follow at `publish`."""
        bucket, index = self._find(name)
        bucket.put(index, shard, values)

    def spec(self, name: str) -> ShardSpec:
        """How trained parameter ``name`` lies on the mesh."""
        bucket, index = self._find(name)
        return bucket.held[index].spec

    def layout(self, key: int) -> list[tuple[int, tuple[int, ...]]]:
        """(offset, shape) of every tensor in the bucket that reducers know as ``key``."""
        bucket = next(bucket for bucket in self._all if bucket.key == key)
        return [(offset, one.shape) for offset, one in zip(bucket.offsets, bucket.held, strict=True)]

    def replace(self, name: str, spec: ShardSpec, pieces: tuple[Piece, ...]) -> None:
        """The local tensor of ``name``, of the same shape, is made of other blocks from now on."""
        bucket, index = self._find(name)
        bucket.held[index].spec, bucket.held[index].pieces = spec, pieces
        self._lay_out()

    def _find(self, name: str) -> tuple[Bucket, int]:
        return next((b, index) for b in self.buckets for index, one in enumerate(b.held) if one.name == name)
