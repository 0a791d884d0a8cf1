"""PyTorch's own parallel parts on the benchmark model, each with the best options that were found for two CPU
cores and gloo.

An ``Engine`` lives in already started ranks (the harness calls ``init_process_group``), uses one thread a rank and
gives one training step: forward, backward, gradient clipping at 1.0, fused AdamW. ``python benchmarks/peers_torch.py
--check`` runs all of them beside one process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B, ScheduleZBVZeroBubble
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from bench_model import BenchConfig, BenchModel, token_loss
from engine import BETAS, CLIP, LEARNING_RATE, WEIGHT_DECAY, Engine, Update, local_of, microbatches, named, unmasked
from engine_check import main

__all__ = ["BETAS", "CLIP", "LEARNING_RATE", "WEIGHT_DECAY", "Engine", "engines"]


class Linear(Engine):
    """One process. In a world of several ranks rank 0 computes with ``threads`` threads while the others sleep in the
    all-reduce.
    """

    ranks = 1

    def __init__(self, config: BenchConfig, threads: int = 1, microbatches: int = 1) -> None:
        super().__init__(config)
        self.threads, self.microbatches = threads, microbatches
        self.name = named(f"linear, {threads} thread{'s' * (threads > 1)}", microbatches)

    def setup(self, rank: int, world_size: int, weights: Mapping[str, Tensor]) -> None:
        self.rank = rank
        self.model = BenchModel(self.config) if rank == 0 else nn.Module()
        if isinstance(self.model, BenchModel):
            self.model.load(weights)
        self.update = Update((p, 1) for p in self.model.parameters()) if rank == 0 else None

    def step(self, tokens_BT: Tensor, targets_BT: Tensor) -> float:
        if self.update is None:
            total = torch.zeros(2, dtype=torch.float64)
            dist.all_reduce(total)
            return total[1].item()
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            value, count = 0.0, unmasked(targets_BT)
            for tokens, targets in microbatches(tokens_BT, targets_BT, self.microbatches):
                loss = token_loss(self.model(tokens), targets) / count
                loss.backward()
                value += loss.item()
            return self.finish(value)
        finally:
            torch.set_num_threads(before)


class DataParallel(Engine):
    """DistributedDataParallel, dp=2. static_graph and bucket sizes of 10, 25 and 50 MB made no difference above the
    noise.
    """

    ranks = 2

    def __init__(self, config: BenchConfig, microbatches: int = 1) -> None:
        super().__init__(config)
        self.name, self.microbatches = named("ddp", microbatches), microbatches

    def setup(self, rank: int, world_size: int, weights: Mapping[str, Tensor]) -> None:
        self.require(world_size)
        self.rank, self.world_size = rank, world_size
        model = BenchModel(self.config)
        model.load(weights)
        self.model = DistributedDataParallel(
            model,
            gradient_as_bucket_view=True,
            forward_sync_buffers=False,
        )
        self.update = Update((p, world_size) for p in model.parameters())

    def step(self, tokens_BT: Tensor, targets_BT: Tensor) -> float:
        count = unmasked(targets_BT)
        tokens, targets = tokens_BT.chunk(self.world_size)[self.rank], targets_BT.chunk(self.world_size)[self.rank]
        value = 0.0
        for i, (micro_tokens, micro_targets) in enumerate(microbatches(tokens, targets, self.microbatches)):
            with nullcontext() if i + 1 == self.microbatches else self.model.no_sync():
                # DDP averages over its ranks: the factor turns the average into the sum of the shares.
                loss = token_loss(self.model(micro_tokens), micro_targets) * (self.world_size / count)
                loss.backward()
            value += loss.item() / self.world_size
        return self.finish(value)


class FullyShard(Engine):
    """FSDP2, dp=2, one unit a block; the root holds embedding, norm and head.

    Keeping the gathered weights until backward is faster (2.58 against 2.65 CPU seconds a step; one gather a block
    less), resharding needs less memory: both are rows.
    """

    ranks = 2

    def __init__(self, config: BenchConfig, reshard_after_forward: bool = False, microbatches: int = 1) -> None:
        super().__init__(config)
        self.reshard, self.microbatches = reshard_after_forward, microbatches
        self.name = named("fsdp2" if reshard_after_forward else "fsdp2, no reshard", microbatches)

    def setup(self, rank: int, world_size: int, weights: Mapping[str, Tensor]) -> None:
        self.require(world_size)
        self.rank, self.world_size = rank, world_size
        mesh = init_device_mesh("cpu", (world_size,))
        self.model = BenchModel(self.config)
        self.model.load(weights)
        for block in self.model.layers.values():
            fully_shard(block, mesh=mesh, reshard_after_forward=self.reshard)
        fully_shard(self.model, mesh=mesh, reshard_after_forward=self.reshard)
        self.update = Update((p, 1) for p in self.model.parameters())

    def step(self, tokens_BT: Tensor, targets_BT: Tensor) -> float:
        count = unmasked(targets_BT)
        tokens, targets = tokens_BT.chunk(self.world_size)[self.rank], targets_BT.chunk(self.world_size)[self.rank]
        value = 0.0
        for i, (micro_tokens, micro_targets) in enumerate(microbatches(tokens, targets, self.microbatches)):
            last = i + 1 == self.microbatches
            self.model.set_requires_gradient_sync(last)
            self.model.set_is_last_backward(last)
            self.model.set_reshard_after_backward(last or self.reshard)
            loss = token_loss(self.model(micro_tokens), micro_targets) * (self.world_size / count)  # it averages too
            loss.backward()
            value += loss.item() / self.world_size
        return self.finish(value)


def tensor_parallel(model: BenchModel, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """Cuts a model or a stage over ``mesh`` with DTensor styles, in place.

    The block halves take their input through PrepareModuleInput, so the input's gradient is reduced once a half (34
    all-reduces a step) and not once a projection (58). Logits stay cut over the vocabulary for loss_parallel. With
    sequence parallelism the residual stream is cut over positions (dim 1) and the norms' weight gradients come out
    ``Partial``.

    The embedding is cut over the hidden dim (all-gather of its output, half the bytes of the vocabulary cut's
    all-reduce, and no whole [V, D] gradient on each rank) but under sequence parallelism over the vocabulary: there the
    other cut needs an all-to-all, which DTensor on CPU replaces by an all-gather (0.93 against 0.95 of the plain tp's
    speed).
    """
    stream = Shard(1) if sequence_parallel else Replicate()
    plan: dict[str, ParallelStyle] = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream)
        if sequence_parallel
        else ColwiseParallel(output_layouts=stream),
        "output": ColwiseParallel(input_layouts=stream, output_layouts=Shard(-1), use_local_output=False),
    }
    block: dict[str, ParallelStyle] = {
        "attention": PrepareModuleInput(input_layouts=(stream, None), desired_input_layouts=(Replicate(), None)),
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=stream),
        "feed_forward": PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(Replicate(),)),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w3": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=stream),
    }
    if sequence_parallel:
        plan["norm"] = SequenceParallel(use_local_output=True)
        block["attention_norm"] = block["ffn_norm"] = SequenceParallel(use_local_output=True)
    held = {name for name, module in model.named_children() if module is not None}
    parallelize_module(model, mesh, {name: style for name, style in plan.items() if name in held})
    for layer in model.layers.values():
        parallelize_module(layer, mesh, block)


def replicas(parameter: nn.Parameter, size: int) -> int:
    """Ranks of a tensor-parallel group of ``size`` that store the same values of ``parameter``."""
    sharded = isinstance(parameter, DTensor) and any(isinstance(p, Shard) for p in parameter.placements)
    return 1 if sharded else size


def sum_partial(model: nn.Module, mesh: DeviceMesh) -> None:
    """Sums the gradients that DTensor left ``Partial`` (norm weights under sequence parallelism) in one all-reduce."""
    partial = [
        p for p in model.parameters() if isinstance(p.grad, DTensor) and isinstance(p.grad.placements[0], Partial)
    ]
    if partial:
        flat = torch.cat([local_of(p.grad).flatten() for p in partial])
        dist.all_reduce(flat, group=mesh.get_group())
        for p, piece in zip(partial, flat.split([p.numel() for p in partial]), strict=True):
            p.grad = DTensor.from_local(piece, mesh, [Replicate()], run_check=False)


class TensorParallel(Engine):
    """DTensor tensor parallelism, tp=2, vocabulary-parallel loss, with or without sequence parallelism."""

    ranks = 2

    def __init__(self, config: BenchConfig, sequence_parallel: bool = False, microbatches: int = 1) -> None:
        super().__init__(config)
        self.sequence_parallel, self.microbatches = sequence_parallel, microbatches
        self.name = named("dtensor tp, sequence parallel" if sequence_parallel else "dtensor tp", microbatches)

    def setup(self, rank: int, world_size: int, weights: Mapping[str, Tensor]) -> None:
        self.require(world_size)
        self.world_size = world_size
        mesh = init_device_mesh("cpu", (world_size,))
        self.mesh = mesh
        self.model = BenchModel(self.config)
        self.model.load(weights)
        tensor_parallel(self.model, mesh, self.sequence_parallel)
        self.update = Update((p, replicas(p, world_size)) for p in self.model.parameters())

    def step(self, tokens_BT: Tensor, targets_BT: Tensor) -> float:
        value, count = 0.0, unmasked(targets_BT)
        with loss_parallel():
            for tokens, targets in microbatches(tokens_BT, targets_BT, self.microbatches):
                loss = token_loss(self.model(tokens), targets) / count
                loss.backward()
                value += local_of(loss.detach()).item()
        if self.sequence_parallel:
            sum_partial(self.model, self.mesh)
        return self.finish(value / self.world_size)


@dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """A schedule of torch.distributed.pipelining: how many stages a rank holds and on which rank each stage lies."""

    build: Callable[..., Any]
    stages_per_rank: int
    rank_of: Callable[[int, int], int]


PIPELINES = {
    "1f1b": PipelinePlan(build=Schedule1F1B, stages_per_rank=1, rank_of=lambda stage, size: stage),
    "interleaved": PipelinePlan(
        build=ScheduleInterleaved1F1B, stages_per_rank=2, rank_of=lambda stage, size: stage % size
    ),
    "zbv": PipelinePlan(
        build=ScheduleZBVZeroBubble, stages_per_rank=2, rank_of=lambda s, size: min(s, 2 * size - 1 - s)
    ),
}


def cut(layers: int, stages: int, tail: float = 1.5) -> list[range]:
    """Contiguous layer ranges with near-equal cost; the head and its loss count as ``tail`` layers of the last stage.

    8 layers on 2 stages: 5 | 3, whose slower rank takes 2.5 CPU seconds a step against 2.7 for 4 | 4.
    """
    bounds = [min(round(i * (layers + tail) / stages), layers - (stages - i)) for i in range(stages)] + [layers]
    return [range(a, b) for a, b in pairwise(bounds)]


class Pipeline(Engine):
    """torch.distributed.pipelining over 2 stages' ranks, optionally times DTensor tensor parallelism of size ``tp``."""

    def __init__(
        self,
        config: BenchConfig,
        schedule: str = "1f1b",
        microbatches: int = 4,
        tp: int = 1,
        stage_layers: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__(config)
        self.plan, self.microbatches, self.tp, self.pp = PIPELINES[schedule], microbatches, tp, 2
        self.stage_layers = stage_layers
        self.ranks = self.pp * tp
        self.name = f"{'dtensor tp2 x ' if tp > 1 else ''}pipelining {schedule}, {microbatches} microbatches"

    def ranges(self) -> list[range]:
        stages = self.pp * self.plan.stages_per_rank
        if self.stage_layers is None:
            return cut(self.config.layers, stages)
        bounds = [sum(self.stage_layers[:i]) for i in range(stages + 1)]
        return [range(a, b) for a, b in pairwise(bounds)]

    def setup(self, rank: int, world_size: int, weights: Mapping[str, Tensor]) -> None:
        self.require(world_size)
        mesh = init_device_mesh("cpu", (self.pp, self.tp), mesh_dim_names=("pp", "tp"))
        place, self.count = rank // self.tp, 1
        ranges = self.ranges()
        held = [s for s in range(len(ranges)) if self.plan.rank_of(s, self.pp) == place]
        self.first, self.last = 0 in held, len(ranges) - 1 in held
        self.models, stages = [], []
        for s in held:
            model = BenchModel(self.config, ranges[s])
            model.load(weights)
            if self.tp > 1:
                tensor_parallel(model, mesh["tp"], sequence_parallel=False)
            self.models.append(model)
            stages.append(PipelineStage(model, s, len(ranges), torch.device("cpu"), group=mesh["pp"].get_group()))
        # scale_grads=False: the loss is already divided by the global token count.
        self.schedule = self.plan.build(
            stages[0] if self.plan.stages_per_rank == 1 else stages,
            self.microbatches,
            loss_fn=self.loss,
            scale_grads=False,
        )
        self.update = Update((p, replicas(p, self.tp)) for model in self.models for p in model.parameters())

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return token_loss(logits, targets) / self.count

    def step(self, tokens_BT: Tensor, targets_BT: Tensor) -> float:
        self.count = unmasked(targets_BT)
        losses: list[Tensor] = []
        with loss_parallel() if self.tp > 1 else nullcontext():
            self.schedule.step(
                *((tokens_BT,) if self.first else ()),
                target=targets_BT if self.last else None,
                losses=losses if self.last else None,
                return_outputs=False,
            )
        return self.finish(sum(local_of(loss.detach()).item() for loss in losses) / self.tp)


def engines(config: BenchConfig) -> list[Engine]:
    """Every engine of the table, one process first."""
    return [
        Linear(config, threads=1),
        Linear(config, threads=2),
        DataParallel(config),
        FullyShard(config, reshard_after_forward=False),
        FullyShard(config, reshard_after_forward=True),
        TensorParallel(config, sequence_parallel=False),
        TensorParallel(config, sequence_parallel=True),
        DataParallel(config, microbatches=2),
        FullyShard(config, reshard_after_forward=False, microbatches=2),
        TensorParallel(config, sequence_parallel=False, microbatches=4),
        TensorParallel(config, sequence_parallel=True, microbatches=4),
        Pipeline(config, "1f1b", 4),
        Pipeline(config, "1f1b", 8),
        Pipeline(config, "interleaved", 4),
        Pipeline(config, "zbv", 4),
        Pipeline(config, "1f1b", 4, tp=2),
        Pipeline(config, "1f1b", 8, tp=2),
    ]


if __name__ == "__main__":
    sys.exit(main(engines, __doc__))
