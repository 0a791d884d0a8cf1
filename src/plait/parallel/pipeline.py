"""`Stage`, the slice of a model that a rank holds for one virtual stage, and `Executor`, which runs any schedule.

A single device with gradient accumulation is a schedule of one stage; evaluation is a schedule of forwards. The
executor knows no schedule by name: it is handed a checked, lowered list of actions and does them in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor, nn

from plait.comm.group import Pending, SpanSink
from plait.comm.world import World
from plait.core.errors import ScheduleError
from plait.models.batch import Batch
from plait.parallel.clock import clock
from plait.parallel.grads import Deferred
from plait.parallel.zero import Zero
from plait.schedule.ir import COMPUTE_KINDS, Action, Kind, Schedule
from plait.schedule.windows import Windows, shifted, version_of

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
    before_reduce: tuple[Callable[[], None], ...] = ()
    """What adds to the stage's gradients once its last backward of a step is over."""

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
class _Flow:
    """What is in flight: within one run of a schedule that flushes, across the windows of one that does not."""

    loader: Loader
    count: Callable[[int], int]
    """Microbatch -> unmasked targets of its global batch."""
    train: bool
    version: Callable[[int], int] | None = None
    """Microbatch -> updates that the weights have had on which it runs; None: the weights are what they are."""
    flights: dict[tuple[int, int], _Flight] = field(default_factory=dict)
    arriving: dict[tuple[Kind, int, int], Pending] = field(default_factory=dict)
    handed: dict[tuple[Kind, int, int], Tensor] = field(default_factory=dict)
    """Results that wait for their send, or for the neighbouring stage on this rank."""
    weight_work: dict[tuple[int, int], list[Callable[[], None]]] = field(default_factory=dict)
    batches: dict[int, Batch] = field(default_factory=dict)
    left: dict[int, int] = field(default_factory=dict)
    """Backwards that each stage has still to run."""
    losses: dict[int, Tensor] = field(default_factory=dict)

    def batch(self, microbatch: int) -> Batch:
        """The batch of ``microbatch``, loaded once."""
        if microbatch not in self.batches:
            self.batches[microbatch] = self.loader(microbatch)
        return self.batches[microbatch]


@final
class Executor:
    """Runs this rank's list of a lowered schedule over its stages."""

    def __init__(self, stages: Sequence[Stage], zero: Zero, world: World) -> None:
        self._stages = {stage.index: stage for stage in stages}
        self._zero = zero
        self._world = world
        self._line = world.mesh.group(world.rank, ["pp"])
        self._stream: _Flow | None = None
        """In flight between windows."""
        self._windows = self._start = 0
        """The next window, and the first: those before it are not this process's."""

    def run(self, schedule: Schedule, loader: Loader, *, count: int, sink: SpanSink) -> Tensor:
        """One step (or, for a forward-only schedule, one evaluation).

        ``count``: unmasked targets in the *global* batch; gradients are those of (sum of token losses) / count,
        whatever the microbatches, times the batch's ``scale``. Returns the fp32 sum of this rank's token losses: zero
        where no last stage is. An evaluation between windows leaves what is in flight.
        """
        flow = _Flow(loader=loader, count=lambda microbatch: count, train=not schedule.forward_only)
        self._play(schedule, schedule.ranks[self._world.at["pp"]], flow, sink)
        return self._sum(flow.losses)

    def restart(self, step: int) -> None:
        """The next window is that of ``step``, with an empty pipeline: what was in flight is computed again."""
        self._stream = None
        self._windows = self._start = step

    def run_window(
        self,
        windows: Windows,
        step: int,
        steps: int,
        loader: Loader,
        *,
        count: Callable[[int], int],
        sink: SpanSink,
    ) -> Tensor:
        """The window of ``step`` in a run of ``steps`` that does not flush: the gradients of the step's own group.

        Microbatches are numbered through the whole run: ``loader(n)`` is microbatch ``n % m`` of step ``n // m``, which
        is this step or the next, and ``count(t)`` the unmasked targets of step t's global batch. Each group runs on the
        weights of `version_of`; `Zero` keeps two versions, and the caller finishes, updates and publishes after each
        window, so that window t makes version t + 1. Returns the fp32 sum of this rank's token losses of this step's
        group. Raises `ScheduleError` for a step that does not follow the last one.
        """
        if step != self._windows:
            raise ScheduleError(f"window {step} does not follow: the next of this run is {self._windows}")
        m = windows.microbatches
        if self._stream is None:
            self._stream = _Flow(loader=loader, count=count, train=True, version=lambda n: version_of(n // m))
        flow = self._stream
        flow.loader = loader
        flow.count = lambda n: count(n // m)
        schedule = windows.of(step, steps, start=self._start)
        actions = [shifted(action, step * m) for action in schedule.ranks[self._world.at["pp"]]]
        self._play(schedule, actions, flow, sink)
        mine = range(step * m, (step + 1) * m)
        losses = {n: flow.losses.pop(n) for n in mine if n in flow.losses}
        for n in mine:
            flow.batches.pop(n, None)
        self._windows = step + 1
        return self._sum(losses)

    def _sum(self, losses: dict[int, Tensor]) -> Tensor:
        return torch.stack(list(losses.values())).sum() if losses else torch.zeros((), device=self._world.device)

    def _play(self, schedule: Schedule, actions: Sequence[Action], flow: _Flow, sink: SpanSink) -> None:
        """Do ``actions`` in order."""
        for stage in self._stages.values():
            stage.module.train(flow.train)
            flow.left[stage.index] = sum(
                action.stage == stage.index and action.kind in (Kind.B, Kind.W) for action in actions
            )
        if flow.train:
            self._zero.start()
        homes = schedule.placement
        book = self._world.book
        spans = clock(self._world.device, sink)
        with torch.set_grad_enabled(flow.train):
            for action in actions:
                book.doing = f"{action.kind} of stage {action.stage}, microbatch {action.microbatch}"
                if action.kind in COMPUTE_KINDS:
                    book.phase = action.kind.value
                    self._await_input(action, flow)  # before the span begins: standing still is no compute
                    if flow.version is not None:
                        self._zero.select(flow.version(action.microbatch))
                    end = spans.begin(action)
                    self._compute(action, flow, homes, split=action.stage in schedule.splits)
                    end()
                elif action.kind is Kind.REDUCE:
                    for add in self._stages[action.stage].before_reduce:
                        add()
                    self._zero.reduce(action.stage)
                else:
                    self._communicate(action, flow, homes)
        # What the next window computes on comes in now: nobody may wait elsewhere while a sender waits for room.
        for key, pending in flow.arriving.items():
            flow.handed[key] = pending.wait()
        flow.arriving.clear()
        book.doing, book.phase = "", "step"
        self._world.wire.flush()
        spans.close()

    def _compute(self, action: Action, flow: _Flow, homes: tuple[int, ...], *, split: bool) -> None:
        stage = self._stages[action.stage]
        if action.kind is not Kind.F:
            flow.left[stage.index] -= 1
        last = action.kind is not Kind.F and flow.left[stage.index] == 0
        self._zero.begin(stage.index, action.kind, last=last, split=split)
        self._run(stage, action, flow, homes, split=split)
        self._zero.end(stage.index, action.kind)

    def _run(self, stage: Stage, action: Action, flow: _Flow, homes: tuple[int, ...], *, split: bool) -> None:
        if action.kind is Kind.F:
            self._forward(stage, action.microbatch, flow, homes)
        elif action.kind is Kind.B:
            stage.deferred.on = split
            self._backward(stage, action.microbatch, flow, homes)
            stage.deferred.on = False
            if split:
                flow.weight_work[stage.index, action.microbatch] = stage.deferred.take()
        else:
            # Outside of autograd's own backward, which has gradients off.
            work = flow.weight_work.pop((stage.index, action.microbatch))
            with torch.no_grad():
                while work:
                    work.pop(0)()  # what it held is free at once

    def _forward(self, stage: Stage, microbatch: int, flow: _Flow, homes: tuple[int, ...]) -> None:
        batch = flow.batch(microbatch)
        source = None if stage.first else self._arrived(Kind.RECV_F, stage.index, microbatch, flow)
        if source is not None and flow.train:
            source.requires_grad_()
        output: Tensor = stage.module(source, batch)
        if stage.last:
            output = stage.loss(output, batch.targets_BT.flatten())
            flow.losses[microbatch] = output.detach()
        else:
            flow.handed[_handover(Kind.SEND_F, stage.index, 1, homes, microbatch)] = output.detach()
        if flow.train:
            flow.flights[stage.index, microbatch] = _Flight(source=source, output=output)

    def _backward(self, stage: Stage, microbatch: int, flow: _Flow, homes: tuple[int, ...]) -> None:
        flight = flow.flights.pop((stage.index, microbatch))
        grad = (
            self._scale(microbatch, flow) if stage.last else self._arrived(Kind.RECV_B, stage.index, microbatch, flow)
        )
        if flight.output.requires_grad:
            torch.autograd.backward(flight.output, grad)
        if stage.first:
            return
        assert flight.source is not None
        # Nothing before this stage trains, perhaps: then the stage before gets a gradient of zero.
        found = flight.source.grad if flight.source.grad is not None else torch.zeros_like(flight.source)
        flow.handed[_handover(Kind.SEND_B, stage.index, -1, homes, microbatch)] = found

    def _scale(self, microbatch: int, flow: _Flow) -> Tensor:
        """What the gradient of the sum of token losses is multiplied with."""
        value = flow.batch(microbatch).scale / max(flow.count(microbatch), 1)
        return torch.full((), value, device=self._world.device)

    def _await_input(self, action: Action, flow: _Flow) -> None:
        """Wait for what another rank sends to ``action``, if anything."""
        key = (Kind.RECV_F if action.kind is Kind.F else Kind.RECV_B, action.stage, action.microbatch)
        if action.kind is not Kind.W and key in flow.arriving:
            flow.handed[key] = flow.arriving.pop(key).wait()

    def _arrived(self, kind: Kind, stage: int, microbatch: int, flow: _Flow) -> Tensor:
        key = (kind, stage, microbatch)
        if key not in flow.handed:
            raise ScheduleError(
                f"stage {stage} has no input for microbatch {microbatch}: the list has no {kind} for it"
            )
        return flow.handed.pop(key)

    def _communicate(self, action: Action, flow: _Flow, homes: tuple[int, ...]) -> None:
        stage, microbatch, kind = self._stages[action.stage], action.microbatch, action.kind
        other = stage.index + (1 if kind in (Kind.SEND_F, Kind.RECV_B) else -1)
        peer = self._line[homes[other]]
        if kind in (Kind.SEND_F, Kind.SEND_B):
            self._send(flow.handed.pop((kind, stage.index, microbatch)), peer)
        else:
            shape = stage.hidden(flow.batch(microbatch))
            buffer = torch.empty(shape, dtype=stage.dtype, device=self._world.device)
            flow.arriving[kind, stage.index, microbatch] = self._world.wire.recv(buffer, peer)

    def _send(self, x: Tensor, peer: int) -> None:
        self._world.book.ledger.add("pp", "send", self._world.book.phase, 2, x.nbytes)
        self._world.wire.send(x.contiguous(), peer)


def _handover(send: Kind, stage: int, way: int, homes: tuple[int, ...], microbatch: int) -> tuple[Kind, int, int]:
    """The key under which a result waits: for its SEND, or on the same rank for the neighbour that takes it."""
    if homes[stage + way] != homes[stage]:
        return send, stage, microbatch
    return (Kind.RECV_F if send is Kind.SEND_F else Kind.RECV_B), stage + way, microbatch
