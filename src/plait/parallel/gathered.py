"""Weights that data ranks share (ZeRO 3): gathered for the unit of the model that needs them, freed after it.

A unit is the embedding, a layer, or the last norm with the head. While one computes, the next is on its way, so two
units are whole at most. A parameter stays the same object and a view of the same storage, which only gets and loses
its memory: what autograd has saved of it, views included, is right again once the unit is gathered for its backward.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from plait.comm.group import Pending
from plait.models.decoder import Decoder
from plait.parallel.flat import Bucket


@dataclass(kw_only=True)
class _Unit:
    """Modules that run one after the other, and the buckets of their parameters."""

    modules: tuple[nn.Module, ...]
    buckets: tuple[Bucket, ...]
    backward: bool
    """Whether backward reads the weights: an embedding's does not."""
    before: _Unit | None = None
    after: _Unit | None = None


class _Gate(torch.autograd.Function):
    """Identity behind a unit; backward calls ``need`` before it enters the unit."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, need: Callable[[], None]) -> Tensor:
        ctx.need = need
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.need()
        return grad, None


@final
class Gathered:
    """The gathering side of a rank's buckets. ``keep``: what a step has gathered stays until its stage's last backward.

    All data ranks run the same units in the same order, so their gathers match.
    """

    def __init__(self, buckets: Sequence[Bucket], *, keep: bool) -> None:
        self._buckets = [bucket for bucket in buckets if bucket.gathered]
        self._of = {id(view): bucket for bucket in self._buckets for view in bucket.views}
        self._keep = keep
        self._in_step = False
        self._last = False
        self._stages: dict[int, list[_Unit]] = {}
        self._there: dict[int, tuple[Bucket, Pending]] = {}

    def watch(self, stage: int, part: Decoder) -> None:
        """Gather the weights of ``part``, which is ``stage``, unit by unit from now on."""
        units = [self._unit((part.embed,), backward=False)] if part.embed is not None else []
        units += [self._unit((block,), backward=True) for block in part.layers.values()]
        tail = tuple(module for module in (part.norm, part.head) if module is not None)
        units += [self._unit(tail, backward=True)] if tail else []
        for one, other in itertools.pairwise(units):
            one.after, other.before = other, one
        for unit in units:
            self._hook(unit)
        self._stages[stage] = units

    def _unit(self, modules: tuple[nn.Module, ...], *, backward: bool) -> _Unit:
        found = {}
        for module in modules:
            for parameter in module.parameters():
                if id(parameter) in self._of:
                    bucket = self._of[id(parameter)]
                    found[bucket.key] = bucket
        buckets = tuple(found[key] for key in sorted(found))
        return _Unit(modules=modules, buckets=buckets, backward=backward)

    def _hook(self, unit: _Unit) -> None:
        def before_forward(module: nn.Module, inputs: object) -> None:
            # Behind the last unit its backward comes, perhaps, and then that of the one before.
            self._need(unit, ahead=unit.after, kept=unit.before if unit.after is None else None)

        def before_backward() -> None:
            ahead = unit.before if unit.before is not None and unit.before.backward else None
            self._need(unit, ahead=ahead)

        def behind(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
            if not (unit.backward and output.requires_grad):
                return output
            gated: Tensor = _Gate.apply(output, before_backward)  # type: ignore[no-untyped-call]
            return gated

        unit.modules[0].register_forward_pre_hook(before_forward)
        unit.modules[-1].register_forward_hook(behind)

    def _need(self, unit: _Unit, *, ahead: _Unit | None, kept: _Unit | None = None) -> None:
        """Have ``unit`` whole and ``ahead`` on its way; ``kept`` may stay, all others lose their memory first."""
        wanted = {bucket.key for one in (unit, ahead, kept) if one is not None for bucket in one.buckets}
        if not (self._keep and self._in_step):
            self._free([bucket for bucket, _ in self._there.values() if bucket.key not in wanted])
        for one in (unit, ahead):
            for bucket in one.buckets if one is not None else ():
                self._gather(bucket)
        for bucket in unit.buckets:
            self._there[bucket.key][1].wait()

    def _gather(self, bucket: Bucket) -> None:
        if bucket.key not in self._there:
            bucket.weights.untyped_storage().resize_(bucket.weights.nbytes)
            self._there[bucket.key] = bucket, bucket.fold.gather.all_gather(bucket.own, out=bucket.weights)

    def _free(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            _, pending = self._there.pop(bucket.key)
            pending.wait()  # or its bytes would come into memory that has gone
            bucket.weights.untyped_storage().resize_(0)

    def start(self) -> None:
        """A step of training begins."""
        self._in_step = True

    def begin(self, *, last: bool) -> None:
        """An action begins; ``last``: no B or W of its stage comes behind it in this step."""
        self._last = last

    def end(self, stage: int) -> None:
        """An action of ``stage`` has ended."""
        if not self._in_step:
            self.free()
        elif self._keep and self._last:
            gone = {bucket.key for unit in self._stages[stage] for bucket in unit.buckets}
            self._free([bucket for bucket, _ in list(self._there.values()) if bucket.key in gone])

    def free(self) -> None:
        """A step is over: nothing is whole."""
        self._in_step = False
        self._free([bucket for bucket, _ in list(self._there.values())])

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Every parameter is whole meanwhile; collective over the data ranks."""
        # In buffers of their own, which stay valid: numpy, for one, takes hold of memory for good.
        usual = [(view, view.data) for bucket in self._buckets for view in bucket.views]
        gathering = [(bucket, bucket.fold.gather.all_gather(bucket.own)) for bucket in self._buckets]
        for bucket, pending in gathering:
            for index, view in enumerate(bucket.views):
                view.data = bucket.view(pending.wait(), index)
        try:
            yield
        finally:
            for view, data in usual:
                view.data = data
