"""`Stage`, the slice of a model that a rank holds for one virtual stage, and `Executor`, which runs any schedule.

A single device with gradient accumulation is a schedule of one stage; evaluation is a schedule of forwards. The
executor knows no schedule by name: it is handed a checked, lowered list of actions and does them in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import final

import torch
from torch import Tensor, nn

from plait.comm.group import Pending, SpanSink
from plait.comm.world import World
from plait.core.errors import ScheduleError
from plait.core.events import COMPUTE
from plait.models.batch import Batch
from plait.parallel.grads import Deferred
from plait.parallel.zero import Zero
from plait.schedule.ir import Action, Kind, Schedule

Loader = Callable[[int], Batch]
"""Microbatch index -> its batch. Every rank reads its own: positions, documents and targets never travel."""


@final
@dataclass(kw_only=True)
class Stage:
    """Virtual stage ``index`` of ``count``. ``module`` maps hidden (for the first: tokens) to hidden (for the last:
    logits)."""

    index: int
    count: int
    module: nn.Module
    loss: nn.Module
    """(logits, targets) -> sum of token losses; called on the last stage alone."""
    hidden: Callable[[Batch], tuple[int, int]]
    """Shape of the hidden activations of this rank for a microbatch."""
    dtype: torch.dtype
    deferred: Deferred

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def last(self) -> bool:
        return self.index == self.count - 1


@dataclass(kw_only=True)
class _Flight:
    """What lives between the forward and the backward of one (stage, microbatch)."""

    source: Tensor | None
    output: Tensor


@dataclass(kw_only=True)
class _Step:
    """The state of one run of a schedule."""

    loader: Loader
    scale: Tensor
    train: bool
    flights: dict[tuple[int, int], _Flight] = field(default_factory=dict)
    arriving: dict[tuple[Kind, int, int], Pending] = field(default_factory=dict)
    handed: dict[tuple[Kind, int, int], Tensor] = field(default_factory=dict)
    """Results that wait for their send, or for the neighbouring stage on this rank."""
    weight_work: dict[tuple[int, int], list[Callable[[], None]]] = field(default_factory=dict)
    batches: dict[int, Batch] = field(default_factory=dict)
    left: dict[int, int] = field(default_factory=dict)
    """Backwards that each stage has still to run."""
    losses: list[Tensor] = field(default_factory=list)


@final
class _HostClock:
    """Spans of work that is done when its call returns."""

    def __init__(self, sink: SpanSink) -> None:
        self._sink = sink

    def begin(self, action: Action) -> Callable[[], None]:
        """Start a span; the function returned ends it."""
        start = perf_counter()
        return lambda: self._sink(COMPUTE, action.kind.value, str(action), start, perf_counter())

    def close(self) -> None:
        """Nothing is outstanding."""


@final
class _DeviceClock:
    """Spans of work that a CUDA stream does later: marks on the stream, read when the step is over."""

    def __init__(self, sink: SpanSink) -> None:
        self._sink = sink
        self._spans: list[tuple[Action, torch.cuda.Event, torch.cuda.Event]] = []
        torch.cuda.synchronize()
        self._origin, self._start = _mark(), perf_counter()

    def begin(self, action: Action) -> Callable[[], None]:
        start = _mark()
        return lambda: self._spans.append((action, start, _mark()))

    def close(self) -> None:
        """Wait for the stream and hand the spans on, in seconds of the host's clock."""
        torch.cuda.synchronize()
        for action, start, end in self._spans:
            edges = [self._start + self._origin.elapsed_time(mark) / 1e3 for mark in (start, end)]
            self._sink(COMPUTE, action.kind.value, str(action), edges[0], edges[1])


def _mark() -> torch.cuda.Event:
    mark = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    mark.record()
    return mark


@final
class Executor:
    """Runs this rank's list of a lowered schedule over its stages."""

    def __init__(self, stages: Sequence[Stage], zero: Zero, world: World) -> None:
        self._stages = {stage.index: stage for stage in stages}
        self._zero = zero
        self._world = world
        self._line = world.mesh.group(world.rank, ["pp"])

    def run(self, schedule: Schedule, loader: Loader, *, count: int, sink: SpanSink) -> Tensor:
        """One step (or, for a forward-only schedule, one evaluation).

        ``count``: unmasked targets in the *global* batch; gradients are those of (sum of token losses) / count,
        whatever the microbatches. Returns the fp32 sum of this rank's token losses: zero where no last stage is.
        """
        device = self._world.device
        actions = schedule.ranks[self._world.at["pp"]]
        step = _Step(
            loader=loader, scale=torch.tensor(1.0 / max(count, 1), device=device), train=not schedule.forward_only
        )
        for stage in self._stages.values():
            stage.module.train(step.train)
            step.left[stage.index] = sum(
                action.stage == stage.index and action.kind in (Kind.B, Kind.W) for action in actions
            )
        if step.train:
            self._zero.start()
        homes = schedule.placement
        book = self._world.book
        clock = (_DeviceClock if device.type == "cuda" else _HostClock)(sink)
        with torch.set_grad_enabled(step.train):
            for action in actions:
                book.doing = f"{action.kind} of stage {action.stage}, microbatch {action.microbatch}"
                if action.kind in (Kind.F, Kind.B, Kind.W):
                    book.phase = action.kind.value
                    self._await_input(action, step)  # before the span begins: standing still is no compute
                    end = clock.begin(action)
                    self._compute(action, step, homes, split=action.stage in schedule.splits)
                    end()
                elif action.kind is Kind.REDUCE:
                    self._zero.reduce(action.stage)
                else:
                    self._communicate(action, step, homes)
        book.doing, book.phase = "", "step"
        self._world.wire.flush()
        clock.close()
        return torch.stack(step.losses).sum() if step.losses else torch.zeros((), device=device)

    def _compute(self, action: Action, step: _Step, homes: tuple[int, ...], *, split: bool) -> None:
        stage = self._stages[action.stage]
        if action.kind is not Kind.F:
            step.left[stage.index] -= 1
        last = action.kind is not Kind.F and step.left[stage.index] == 0
        self._zero.begin(stage.index, action.kind, last=last, split=split)
        self._run(stage, action, step, homes, split=split)
        self._zero.end(stage.index, action.kind)

    def _run(self, stage: Stage, action: Action, step: _Step, homes: tuple[int, ...], *, split: bool) -> None:
        if action.kind is Kind.F:
            self._forward(stage, action.microbatch, step, homes)
        elif action.kind is Kind.B:
            stage.deferred.on = split
            self._backward(stage, action.microbatch, step, homes)
            stage.deferred.on = False
            if split:
                step.weight_work[stage.index, action.microbatch] = stage.deferred.take()
        else:
            # Outside of autograd's own backward, which has gradients off.
            with torch.no_grad():
                for work in step.weight_work.pop((stage.index, action.microbatch)):
                    work()

    def _forward(self, stage: Stage, microbatch: int, step: _Step, homes: tuple[int, ...]) -> None:
        if microbatch not in step.batches:
            step.batches[microbatch] = step.loader(microbatch)
        batch = step.batches[microbatch]
        source = None if stage.first else self._arrived(Kind.RECV_F, stage.index, microbatch, step)
        if source is not None and step.train:
            source.requires_grad_()
        output: Tensor = stage.module(source, batch)
        if stage.last:
            output = stage.loss(output, batch.targets_BT.flatten())
            step.losses.append(output.detach())
        else:
            step.handed[_handover(Kind.SEND_F, stage.index, 1, homes, microbatch)] = output.detach()
        if step.train:
            step.flights[stage.index, microbatch] = _Flight(source=source, output=output)

    def _backward(self, stage: Stage, microbatch: int, step: _Step, homes: tuple[int, ...]) -> None:
        flight = step.flights.pop((stage.index, microbatch))
        grad = step.scale if stage.last else self._arrived(Kind.RECV_B, stage.index, microbatch, step)
        if flight.output.requires_grad:
            torch.autograd.backward(flight.output, grad)
        if stage.first:
            return
        assert flight.source is not None
        # Nothing before this stage trains, perhaps: then the stage before gets a gradient of zero.
        found = flight.source.grad if flight.source.grad is not None else torch.zeros_like(flight.source)
        step.handed[_handover(Kind.SEND_B, stage.index, -1, homes, microbatch)] = found

    def _await_input(self, action: Action, step: _Step) -> None:
        """Wait for what another rank sends to ``action``, if anything."""
        key = (Kind.RECV_F if action.kind is Kind.F else Kind.RECV_B, action.stage, action.microbatch)
        if action.kind is not Kind.W and key in step.arriving:
            step.handed[key] = step.arriving.pop(key).wait()

    def _arrived(self, kind: Kind, stage: int, microbatch: int, step: _Step) -> Tensor:
        key = (kind, stage, microbatch)
        if key not in step.handed:
            raise ScheduleError(
                f"stage {stage} has no input for microbatch {microbatch}: the list has no {kind} for it"
            )
        return step.handed.pop(key)

    def _communicate(self, action: Action, step: _Step, homes: tuple[int, ...]) -> None:
        stage, microbatch, kind = self._stages[action.stage], action.microbatch, action.kind
        other = stage.index + (1 if kind in (Kind.SEND_F, Kind.RECV_B) else -1)
        peer = self._line[homes[other]]
        if kind in (Kind.SEND_F, Kind.SEND_B):
            self._send(step.handed.pop((kind, stage.index, microbatch)), peer)
        else:
            if microbatch not in step.batches:
                step.batches[microbatch] = step.loader(microbatch)
            shape = stage.hidden(step.batches[microbatch])
            buffer = torch.empty(shape, dtype=stage.dtype, device=self._world.device)
            step.arriving[kind, stage.index, microbatch] = self._world.wire.recv(buffer, peer)

    def _send(self, x: Tensor, peer: int) -> None:
        self._world.book.ledger.add("pp", "send", self._world.book.phase, 2, x.nbytes)
        self._world.wire.send(x.contiguous(), peer)


def _handover(send: Kind, stage: int, way: int, homes: tuple[int, ...], microbatch: int) -> tuple[Kind, int, int]:
    """The key under which a result waits: for its SEND, or on the same rank for the neighbour that takes it."""
    if homes[stage + way] != homes[stage]:
        return send, stage, microbatch
    return (Kind.RECV_F if send is Kind.SEND_F else Kind.RECV_B), stage + way, microbatch
