"""PyTorch's own parallel parts on the benchmark model, each with the best options that were found for two CPU
cores and gloo.

An ``Engine`` lives in already started ranks (the harness calls ``init_process_group``), uses one thread a rank and
gives one training step: forward, backward, gradient clipping at 1.0, fused AdamW. ``python benchmarks/peers_torch.py
--check`` runs all of them beside one process.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import nullcontext
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
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
    """FSDP2 on dp, one unit a block; the root holds embedding, norm and head.

    Keeping the gathered weights until backward is faster (2.58 against 2.65 CPU seconds a step; one gather a block
    less), resharding needs less memory: both are rows. ``prefetch``: each block asks for the next one's weights (the
    one before it, in backward) before it computes, as torchtitan does; FSDP2's own prefetch asks one block late.
    """

    def __init__(
        self,
        config: BenchConfig,
        reshard_after_forward: bool = False,
        microbatches: int = 1,
        prefetch: bool = False,
        ranks: int = 2,
    ) -> None:
        super().__init__(config)
        self.reshard, self.microbatches, self.prefetch = reshard_after_forward, microbatches, prefetch
        self.ranks = ranks
        name = f"fsdp2{', no reshard' * (not reshard_after_forward)}{', prefetch' * prefetch}"
        self.name = named(name, microbatches)

    def setup(self, rank: int, world_size: int, weights: Mapping[str, Tensor]) -> None:
        self.require(world_size)
        self.rank, self.world_size = rank, world_size
        mesh = init_device_mesh("cpu", (world_size,))
        self.model = BenchModel(self.config)
        self.model.load(weights)
        blocks = [fully_shard(b, mesh=mesh, reshard_after_forward=self.reshard) for b in self.model.layers.values()]
        fully_shard(self.model, mesh=mesh, reshard_after_forward=self.reshard)
        if self.prefetch:
            for block, after in pairwise(blocks):
                block.set_modules_to_forward_prefetch([after])
                after.set_modules_to_backward_prefetch([block])
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


def engines(config: BenchConfig) -> list[Engine]:
    """Every engine of this file, one process first."""
    return [
        Linear(config, threads=1),
        Linear(config, threads=2),
        DataParallel(config),
        FullyShard(config, reshard_after_forward=False),
        FullyShard(config, reshard_after_forward=True),
        FullyShard(config, reshard_after_forward=True, prefetch=True),
        FullyShard(config, reshard_after_forward=True, ranks=4),
        TensorParallel(config, sequence_parallel=False),
        TensorParallel(config, sequence_parallel=True),
        DataParallel(config, microbatches=2),
        FullyShard(config, reshard_after_forward=False, microbatches=2),
        FullyShard(config, reshard_after_forward=True, microbatches=2),
        TensorParallel(config, sequence_parallel=False, microbatches=4),
        TensorParallel(config, sequence_parallel=True, microbatches=4),
    ]


if __name__ == "__main__":
    sys.exit(main(engines, __doc__))
