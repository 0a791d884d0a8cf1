"""When the gradients of a step are summed over data ranks: at its end, or after every action (ZeRO 2 and 3).

`AtEnd` adds up all microbatches in whole buckets and reduces each once, as soon as its last gradient is there.
`PerAction` has a whole bucket only while an action fills it: what is kept is the sum in this rank's shard.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor

from plait.comm.group import Pending
from plait.parallel.flat import Bucket, attach
from plait.parallel.grads import Slot
from plait.parallel.grouping import first_use
from plait.schedule.ir import Kind


class Reduction(ABC):
    """Owner of the slots that gradients come into. The executor says where it is; all data ranks are told the same."""

    @abstractmethod
    def start(self) -> None:
        """A new step: gradients are empty."""

    @abstractmethod
    def begin(self, stage: int, kind: Kind, *, last: bool, split: bool) -> None:
        """An F, B or W of ``stage`` begins; ``last``: no other B or W of the stage comes in this step."""

    @abstractmethod
    def end(self, stage: int, kind: Kind) -> None:
        """The F, B or W has ended."""

    @abstractmethod
    def reduce(self, stage: int | None) -> None:
        """All gradients of ``stage`` are there."""

    @abstractmethod
    def finish(self) -> None:
        """Wait until each shard's gradients are summed over the ranks that share state."""


@final
class AtEnd(Reduction):
    """Levels 0 and 1."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = buckets
        self._next: dict[int | None, int] = {}
        self._by_stage: dict[int | None, list[Bucket]] = {}
        for bucket in buckets:
            self._by_stage.setdefault(bucket.stage, []).append(bucket)
            for index, one in enumerate(bucket.held):
                slot = Slot(bucket.view(bucket.grads, index), one.uses, self._arrival(bucket), one.deferred)
                bucket.slots.append(slot)
                attach(one, bucket.views[index], slot)

    def _arrival(self, bucket: Bucket) -> Callable[[], None]:
        def arrived() -> None:
            bucket.waiting -= 1
            if bucket.waiting == 0:
                self._launch(bucket.stage, complete_only=True)

        return arrived

    def start(self) -> None:
        self._next.clear()
        for bucket in self._buckets:
            bucket.reduction = None
            bucket.waiting = 0
            for slot in bucket.slots:
                slot.restart()

    def begin(self, stage: int, kind: Kind, *, last: bool, split: bool) -> None:
        # A split backward's weight gradients come in any order after its Bs: those wait for REDUCE.
        if kind is not Kind.B or not last or split:
            return
        for bucket in self._by_stage.get(stage, ()):
            bucket.waiting = len(bucket.slots)
            for slot in bucket.slots:
                slot.arm()

    def end(self, stage: int, kind: Kind) -> None:
        pass

    def reduce(self, stage: int | None) -> None:
        self._launch(stage, complete_only=False)

    def _launch(self, stage: int | None, *, complete_only: bool) -> None:
        buckets = self._by_stage.get(stage, [])
        # In order, whatever order they became ready in: every data rank must start the same reductions.
        for bucket in buckets[self._next.get(stage, 0) :]:
            if complete_only and bucket.waiting > 0:
                return
            for slot in bucket.slots:
                slot.close()
            reducer = bucket.fold.reducer
            if bucket.fold.shards == 1 and bucket.fold.across is None:
                bucket.reduction = reducer.all_reduce(bucket.key, bucket.grads)
            else:
                bucket.reduction = reducer.reduce_scatter(bucket.key, bucket.grads, bucket.shard_grads)
            self._next[stage] = self._next.get(stage, 0) + 1

    def finish(self) -> None:
        self.reduce(None)
        for bucket in self._buckets:
            assert bucket.reduction is not None, f"stage {bucket.stage} was never reduced"
            bucket.reduction.wait()


@final
class PerAction(Reduction):
    """Levels 2 and 3. Whether a stage's split B or a W gives a bucket gradients must not depend on a rank's data."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._whole = [bucket for bucket in buckets if bucket.fold.shards == 1]
        # In the order in which backward completes them, as far as places say: every rank reduces in this order.
        self._shared = sorted((b for b in buckets if b.fold.shards > 1), key=lambda bucket: -bucket.first)
        self._open: dict[int, Tensor] = {}
        self._under_way: deque[tuple[Bucket, Pending, Tensor | None]] = deque()
        self._empty: set[int] = set()
        """Keys of buckets whose shards have no gradient of the step yet."""
        self._left: list[Bucket] = []
        """Buckets that the backward under way has still to reduce, in order."""
        for bucket in buckets:
            for index, one in enumerate(bucket.held):
                whole = bucket.view(bucket.grads, index) if bucket.fold.shards == 1 else None
                coming = None if bucket.fold.shards == 1 else self._coming(bucket, first_use(one), one.uses)
                slot = Slot(whole, one.uses, self._arrival(bucket), one.deferred, coming)
                bucket.slots.append(slot)
                attach(one, bucket.views[index], slot)

    def _coming(self, bucket: Bucket, place: int, uses: int) -> Callable[[], None]:
        def coming() -> None:
            # Backward has come to `place`: no more comes of what lies behind. (A tied weight comes from two places.)
            if uses == 1:
                self._pass(place)
            if bucket.key not in self._open:
                self._start_bucket(bucket)

        return coming

    def _pass(self, place: int) -> None:
        """Reduce what has all its gradients of the action when backward has come to ``place``."""
        # Also what this rank has used nothing of, and always in one order: other ranks may have (case P13).
        while self._left and self._left[0].first > place:
            self._close(self._left.pop(0))
        for bucket in [bucket for bucket in self._shared if bucket.key in self._open and bucket.first > place]:
            self._close(bucket)

    def _start_bucket(self, bucket: Bucket) -> None:
        whole = torch.empty(bucket.length, dtype=torch.float32, device=bucket.grads.device)
        whole[bucket.offsets[-1] + bucket.held[-1].numel :].zero_()  # what no parameter fills is reduced as well
        self._open[bucket.key] = whole
        armed = any(bucket is other for other in self._left)
        for index, slot in enumerate(bucket.slots):
            slot.put(bucket.view(whole, index))
            if armed:
                slot.arm()
        bucket.waiting = len(bucket.slots)

    def _arrival(self, bucket: Bucket) -> Callable[[], None]:
        def arrived() -> None:
            bucket.waiting -= 1
            while self._left and self._left[0].key in self._open and self._left[0].waiting == 0:
                self._close(self._left.pop(0))

        return arrived

    def start(self) -> None:
        self._empty = {bucket.key for bucket in self._shared}
        for bucket in self._whole:
            for slot in bucket.slots:
                slot.restart()

    def begin(self, stage: int, kind: Kind, *, last: bool, split: bool) -> None:
        sweep = kind is Kind.B and not split
        self._left = [bucket for bucket in self._shared if sweep and bucket.stage == stage]

    def end(self, stage: int, kind: Kind) -> None:
        self._pass(-2)

    def _close(self, bucket: Bucket) -> None:
        if bucket.key not in self._open:
            self._start_bucket(bucket)
        whole = self._open.pop(bucket.key)
        for slot in bucket.slots:
            slot.close()
            slot.put(None)
        fresh = bucket.key in self._empty
        out = bucket.grads if fresh else whole[bucket.shard]
        pending = bucket.fold.reducer.reduce_scatter(bucket.key, whole, out)
        self._empty.discard(bucket.key)
        self._under_way.append((bucket, pending, None if fresh else out))
        del whole
        # One is under way while the next is filled: not more, or whole buckets would pile up.
        while len(self._under_way) > 1:
            self._settle()

    def _settle(self) -> None:
        bucket, pending, part = self._under_way.popleft()
        pending.wait()
        if part is not None:
            bucket.grads.add_(part)

    def reduce(self, stage: int | None) -> None:
        # What came after the last backward: the gradients of experts' copies.
        self._pass(-2)

    def finish(self) -> None:
        while self._under_way:
            self._settle()
        for bucket in self._whole:
            for slot in bucket.slots:
                slot.close()
        for bucket in self._shared:
            if bucket.key in self._empty:
                bucket.grads.zero_()
