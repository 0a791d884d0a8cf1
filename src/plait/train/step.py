"""One optimizer step of a run, whatever the plan: `Steps.take` is what the trainer and ``plait verify`` call."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import final

import torch
from torch import Tensor

from plait.core.config import Config
from plait.models.batch import Batch
from plait.parallel.apply import Parallel
from plait.parallel.layout import build_windows
from plait.parallel.precision import LossScale
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
        self._loaded: dict[int, list[Batch]] = {}
        if setup.plan.schedule == "auto":
            parallel.calibrate(self._batches(0)[:CALIBRATION])
            self._loaded.clear()

    def take(self, step: int) -> Taken:
        """Forward and backward of all microbatches, clip, update. Steps come in order, from 0."""
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
        lr = rate_of(self._setup.config, step)
        if not skipped:
            self._update(norm, lr)
        sink("update", "optimizer", "clip, AdamW, publish", begin, perf_counter())
        routers = parallel.close_routers(moved=not skipped)
        if self.rebalance is not None and routers:
            self.rebalance.after_step(step, routers, self.optimizer)
        return Taken(
            loss=total / max(self._samples.target_count(step), 1),
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
            return executor.run(schedule, batches.__getitem__, count=samples.target_count(step), sink=sink)
        for old in [number for number in self._loaded if number < step]:
            del self._loaded[old]
        m = self._windows.microbatches
        return executor.run_window(
            self._windows,
            step,
            self._steps,
            lambda number: self._batches(number // m)[number % m],
            count=samples.target_count,
            sink=sink,
        )

    def _batches(self, step: int) -> list[Batch]:
        """This rank's microbatches of ``step``."""
        if step not in self._loaded:
            setup, world = self._setup, self._parallel.world
            total = setup.config.train.global_batch * setup.config.data.seq
            scale = 1.0 if self.scale is None else self.scale.value
            whole = microbatches(setup, self._samples, step, world.at["dp"], world.device)
            self._loaded[step] = [self._parallel.local(batch, total=total, scale=scale) for batch in whole]
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
