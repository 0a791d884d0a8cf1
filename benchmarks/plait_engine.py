"""plait as an engine of the benchmark: the same weights, batches, clipping and optimizer as its peers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from bench_model import BenchConfig
from engine import BETAS, CLIP, LEARNING_RATE, WEIGHT_DECAY, Engine, unmasked
from plait.comm.world import World
from plait.core.plan import Plan
from plait.core.shard import Box
from plait.models.batch import Batch
from plait.models.config import PRESETS
from plait.models.decoder import Decoder
from plait.parallel.apply import parallelize


class Given:
    """A weight source over whole tensors."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.weights = weights

    def read(self, name: str, box: Box | None = None) -> Tensor:
        whole = self.weights[name]
        return whole if box is None else whole[tuple(slice(*edge) for edge in box)]


class Plait(Engine):
    """A plan of plait on the world's ranks."""

    def __init__(self, config: BenchConfig, plan: str, world: World, threads: int = 1) -> None:
        super().__init__(config)
        self.plan = Plan.parse(plan).resolve(world.mesh.world_size)
        self.world = world
        self.ranks = world.mesh.world_size
        self.threads = threads
        self.name = f"plait {plan}"
        self.steps = 0

    def setup(self, rank: int, world_size: int, weights: Mapping[str, Tensor]) -> None:
        with torch.device("meta"):
            model = Decoder(PRESETS["bench"])
        self.parallel = parallelize(model, self.plan, self.world, weights=Given(weights))
        decay, rest = self.parallel.zero.optimizer_groups()
        groups = [{"params": decay, "weight_decay": WEIGHT_DECAY}, {"params": rest, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(
            [g for g in groups if g["params"]], lr=LEARNING_RATE, betas=BETAS, fused=True
        )

    def step(self, tokens_BT: Tensor, targets_BT: Tensor) -> float:
        """As `Engine.step`, with this engine's own number of threads."""
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            return self._step(tokens_BT, targets_BT)
        finally:
            torch.set_num_threads(before)

    def _step(self, tokens_BT: Tensor, targets_BT: Tensor) -> float:
        assert self.plan.dp is not None
        share = tokens_BT.shape[0] // self.plan.dp
        begin = self.world.at["dp"] * share
        batches = [
            Batch(
                tokens_BT=tokens_BT[at : at + self.plan.micro],
                targets_BT=targets_BT[at : at + self.plan.micro],
                sample_B=torch.arange(at, at + self.plan.micro),
                step=self.steps,
            )
            for at in range(begin, begin + share, self.plan.micro)
        ]
        self.steps += 1
        zero = self.parallel.zero
        loss = self.parallel.forward_backward(batches, unmasked(targets_BT))
        norm = self.parallel.share_loss(torch.zeros(()), zero.square_norm())[1].sqrt().item()
        self.grad_norm = norm
        if norm > CLIP:
            zero.scale_gradients(CLIP / (norm + 1e-6))
        self.optimizer.step()
        zero.publish()
        return float(loss)


class PlaitAlone(Engine):
    """plait's one process with ``threads`` threads on rank 0, while the other ranks sleep in an all-reduce."""

    ranks = 1

    def __init__(self, config: BenchConfig, plan: str, threads: int) -> None:
        super().__init__(config)
        self.engine = Plait(config, plan, World.alone(), threads)
        self.name = f"{self.engine.name}, 1 process, {threads} threads"

    def setup(self, rank: int, world_size: int, weights: Mapping[str, Tensor]) -> None:
        self.rank = rank
        if rank == 0:
            self.engine.setup(0, 1, weights)

    def step(self, tokens_BT: Tensor, targets_BT: Tensor) -> float:
        loss = self.engine.step(tokens_BT, targets_BT) if self.rank == 0 else 0.0
        total = torch.tensor(loss, dtype=torch.float64)
        dist.all_reduce(total)
        return total.item()
