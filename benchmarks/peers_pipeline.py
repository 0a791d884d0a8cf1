"""torch.distributed.pipelining on the benchmark model: 1F1B, interleaved, zero-bubble and DualPipe-V.

``python benchmarks/peers_pipeline.py --check`` runs all of them beside one process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B, ScheduleZBVZeroBubble
from torch.distributed.pipelining.schedules import ScheduleDualPipeV
from torch.distributed.tensor.parallel import loss_parallel

from bench_model import BenchConfig, BenchModel, token_loss
from engine import Engine, Update, local_of, unmasked
from engine_check import main
from peers_torch import Linear, replicas, tensor_parallel


@dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """A schedule of torch.distributed.pipelining: how many stages a rank holds and on which rank each stage lies."""

    build: Callable[..., Any]
    stages_per_rank: int
    rank_of: Callable[[int, int], int]


def _along_v(stage: int, size: int) -> int:
    """Down the ranks and back up: the first and the last stage lie on rank 0."""
    return min(stage, 2 * size - 1 - stage)


PIPELINES = {
    "1f1b": PipelinePlan(build=Schedule1F1B, stages_per_rank=1, rank_of=lambda stage, size: stage),
    "interleaved": PipelinePlan(
        build=ScheduleInterleaved1F1B, stages_per_rank=2, rank_of=lambda stage, size: stage % size
    ),
    "zbv": PipelinePlan(build=ScheduleZBVZeroBubble, stages_per_rank=2, rank_of=_along_v),
    "dualpipev": PipelinePlan(build=ScheduleDualPipeV, stages_per_rank=2, rank_of=_along_v),
}


def cut(layers: int, stages: int, tail: float = 1.5) -> list[range]:
    """Contiguous layer ranges with near-equal cost; the head and its loss count as ``tail`` layers of the last stage.

    8 layers on 2 stages: 5 | 3, whose slower rank takes 2.5 CPU seconds a step against 2.7 for 4 | 4.
    """
    bounds = [min(round(i * (layers + tail) / stages), layers - (stages - i)) for i in range(stages)] + [layers]
    return [range(a, b) for a, b in pairwise(bounds)]


class Pipeline(Engine):
    """torch.distributed.pipelining over ``pp`` ranks, optionally times DTensor tensor parallelism of size ``tp``."""

    def __init__(
        self,
        config: BenchConfig,
        schedule: str = "1f1b",
        microbatches: int = 4,
        tp: int = 1,
        stage_layers: tuple[int, ...] | None = None,
        pp: int = 2,
    ) -> None:
        super().__init__(config)
        self.plan, self.microbatches, self.tp, self.pp = PIPELINES[schedule], microbatches, tp, pp
        self.stage_layers = stage_layers
        self.ranks = self.pp * tp
        self.name = f"{'dtensor tp2 x ' if tp > 1 else ''}pipelining {schedule}, {microbatches} microbatches"
        if stage_layers is not None:
            self.name += f", layers {'-'.join(map(str, stage_layers))}"

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
    """Every engine of this file, one process first."""
    return [
        Linear(config, threads=1),
        Pipeline(config, "1f1b", 4),
        Pipeline(config, "1f1b", 8),
        Pipeline(config, "interleaved", 4),
        Pipeline(config, "zbv", 4),
        Pipeline(config, "zbv", 8),
        Pipeline(config, "dualpipev", 4),
        Pipeline(config, "dualpipev", 8),
        Pipeline(config, "1f1b", 4, tp=2),
        Pipeline(config, "1f1b", 8, tp=2),
    ]


if __name__ == "__main__":
    sys.exit(main(engines, __doc__))
