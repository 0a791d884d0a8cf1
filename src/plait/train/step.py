"""One optimizer step of a run, whatever the plan: `Steps.take` is what the trainer and ``plait verify`` call."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any, final

import torch
from torch import Tensor

from plait.core.config import Config
from plait.models.batch import Batch
from plait.parallel.apply import Parallel
from plait.parallel.calibrate import Calibration
from plait.parallel.layout import build_windows
from plait.parallel.precision import LossScale
from plait.schedule.simulate import Cost
from plait.train.data import Samples
from plait.train.optimizer import learning_rate
from plait.train.rebalance import Rebalance
from plait.train.run import Setup, microbatches

CALIBRATION = 4
"""Most microbatches that ``schedule=auto`` measures its costs on, before the first step."""


@dataclass(frozen=True, kw_only=True)
class Taken:
    """What a step came to, the same on every rank."""

    loss: float
    norm: float
    """Of all gradients, before clipping; not finite where fp16 overflowed or training diverged."""
    lr: float
    skipped: bool
    """fp16: gradients overflowed, no weight has changed."""
    loss_scale: float | None
    """What the step was scaled with; None but for fp16."""
    routers: Mapping[int, Tensor]
    """By layer with experts: `Sums` of the global batch."""


@final
class Steps:
    """Takes the ``steps`` steps of a run in order."""

    def __init__(self, setup: Setup, parallel: Parallel, samples: Samples, steps: int) -> None:
        self._setup = setup
        self._parallel = parallel
        self._samples = samples
        self._steps = steps
        self.optimizer = make_optimizer(setup.config, parallel)
        self.scale = LossScale() if setup.plan.precision == "fp16" else None
        self._windows = build_windows(setup.plan, setup.microbatches) if setup.plan.schedule == "2bw" else None
        by_load = setup.config.moe.placement == "load" and setup.plan.ep > 1
        self.rebalance = Rebalance(parallel) if by_load else None
        self.updates = 0
        """Steps that have changed the weights."""
        self.shift = 0
        """By how many steps the data runs ahead of the steps: those that rollbacks have left out."""
        self._loaded: dict[int, list[Batch]] = {}
        if setup.plan.schedule == "auto":
            parallel.calibrate(self._batches(0)[:CALIBRATION])
            self._loaded.clear()

    def take(self, step: int) -> Taken:
        """Forward and backward of all microbatches, clip, update. Steps come in order.

        Weights, moments and routers stay as they are where loss or norm is no finite number, on all ranks alike.
        """
        parallel, zero, sink = self._parallel, self._parallel.zero, self._parallel.world.book.sink
        loss_scale = None if self.scale is None else self.scale.value
        parallel.prepare()
        loss_sum = self._forward_backward(step)
        zero.finish()
        if loss_scale is not None:
            zero.scale_gradients(1 / loss_scale)
        # One collective for both: every rank then knows the same loss and norm.
        total, square = parallel.share_loss(loss_sum, zero.square_norm()).tolist()
        norm = math.sqrt(square) if square >= 0 else math.nan
        begin = perf_counter()
        skipped = self.scale is not None and not self.scale.update(math.isfinite(norm))
        updated = not skipped and math.isfinite(total) and math.isfinite(norm)
        lr = rate_of(self._setup.config, step)
        if updated:
            self._update(norm, lr)
        elif not skipped:
            self._leave_out()
        sink("update", "optimizer", "clip, AdamW, publish", begin, perf_counter())
        routers = parallel.close_routers(moved=updated)
        if self.rebalance is not None and routers:
            self.rebalance.after_step(step, routers, self.optimizer)
        return Taken(
            loss=total / max(self._samples.target_count(step + self.shift), 1),
            norm=norm,
            lr=lr,
            skipped=skipped,
            loss_scale=loss_scale,
            routers=routers,
        )

    def _forward_backward(self, step: int) -> Tensor:
        parallel, samples = self._parallel, self._samples
        executor, sink = parallel.executor, parallel.world.book.sink
        if self._windows is None:
            batches = self._batches(step)
            self._loaded.clear()
            schedule = parallel.schedule(len(batches))
            count = samples.target_count(step + self.shift)
            return executor.run(schedule, batches.__getitem__, count=count, sink=sink)
        for old in [number for number in self._loaded if number < step]:
            del self._loaded[old]
        m = self._windows.microbatches
        return executor.run_window(
            self._windows,
            step,
            self._steps,
            lambda number: self._batches(number // m)[number % m],
            count=lambda number: samples.target_count(number + self.shift),
            sink=sink,
        )

    def _batches(self, step: int) -> list[Batch]:
        """This rank's microbatches of ``step``."""
        if step not in self._loaded:
            setup, world = self._setup, self._parallel.world
            total = setup.config.train.global_batch * setup.config.data.seq
            scale = 1.0 if self.scale is None else self.scale.value
            begin = perf_counter()
            whole = microbatches(setup, self._samples, step + self.shift, world.at["dp"], world.device)
            self._loaded[step] = [self._parallel.local(batch, total=total, scale=scale) for batch in whole]
            world.book.sink("data", "data", "microbatches", begin, perf_counter())
        return self._loaded[step]

    def _update(self, norm: float, lr: float) -> None:
        zero, clip = self._parallel.zero, self._setup.config.optimizer.clip
        if clip and norm > clip:
            zero.scale_gradients(clip / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_ has it
        if self.optimizer is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        zero.publish()
        self.updates += 1

    def _leave_out(self) -> None:
        """The gradients are no numbers, and nothing may remember them."""
        for reducer in self._parallel.zero.reducers():
            reducer.carry({})
        if self._windows is not None:
            self._parallel.zero.publish()  # each window makes a version: this one the same weights again

    def scalars(self) -> dict[str, Any]:
        """What belongs to a checkpoint beside tensors, as plain JSON, the same on every rank. Collective.

        The learning rate is a function of the step, and dropout of seed, step and place: nothing of them is state.
        """
        found = self._parallel.calibration
        return {
            "updates": self.updates,
            "shift": self.shift,
            "loss_scale": None if self.scale is None else asdict(self.scale),
            "experts": None if self.rebalance is None else self.rebalance.state(),
            "calibration": None if found is None else asdict(found),
        }

    def resume(self, scalars: Mapping[str, Any], *, same_plan: bool) -> None:
        """Go on from what `scalars` gave, before tensors are read. A loss scale is kept where the run has one; a
        searched schedule is that of the same plan."""
        self.updates, self.shift = scalars["updates"], scalars["shift"]
        self._loaded.clear()
        if self.scale is not None and scalars["loss_scale"] is not None:
            self.scale.value, self.scale.good = scalars["loss_scale"]["value"], scalars["loss_scale"]["good"]
        if self.rebalance is not None and scalars["experts"] is not None:
            self.rebalance.resume(scalars["experts"])
        found = scalars["calibration"]
        if same_plan and found is not None:
            costs = tuple(Cost(**cost) for cost in found["costs"])
            self._parallel.use(Calibration(costs=costs, transfers=tuple(found["transfers"])))


def make_optimizer(config: Config, parallel: Parallel) -> torch.optim.AdamW | None:
    """AdamW over this rank's flat shards, decay on tensors of two or more dims only. None: nothing trains here."""
    decay, rest = parallel.zero.optimizer_groups()
    kinds = [(decay, config.optimizer.weight_decay), (rest, 0.0)]
    groups = [{"params": parameters, "weight_decay": share} for parameters, share in kinds if parameters]
    if not groups:
        return None
    settings = config.optimizer
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True)


def rate_of(config: Config, step: int) -> float:
    """The learning rate of ``step``."""
    settings = config.optimizer
    return learning_rate(
        step,
        schedule=settings.schedule,
        lr=settings.lr,
        warmup=settings.warmup,
        steps=config.train.steps,
        min_lr_ratio=settings.min_lr_ratio,
        decay=settings.decay,
    )
