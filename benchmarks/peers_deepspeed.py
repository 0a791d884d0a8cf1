"""DeepSpeed ZeRO-1, 2 and 3 on the benchmark model, on CPU with gloo, where it is installed.

    pip install deepspeed           # DS_BUILD_OPS=0: nothing of it has to be compiled

``python benchmarks/peers_deepspeed.py --check`` runs it beside one process.

Settings that were tried on the benchmark machine: ``overlap_comm`` (there are no streams on a CPU: no difference),
one and two microbatches, and for ZeRO-3 whether gathered weights are let go after a use (``lean``) or kept for
backward, as DeepSpeed's defaults do for a model of this size (``stage3_max_reuse_distance`` of 1e9 parameters).
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench_model import BenchConfig, BenchModel, token_loss
from engine import BETAS, CLIP, LEARNING_RATE, WEIGHT_DECAY, Engine, microbatches, named, unmasked
from engine_check import main
from peers_torch import Linear


class DeepSpeed(Engine):
    """DeepSpeed ZeRO on dp, with torch's fused AdamW over its flat partitions and its own clipping.

    ``lean``, for ZeRO-3: a block's weights are let go after each use and the next block's prefetched; otherwise they
    are gathered once and stay until their backward.
    """

    def __init__(
        self, config: BenchConfig, stage: int = 1, microbatches: int = 1, lean: bool = False, ranks: int = 2
    ) -> None:
        super().__init__(config)
        self.stage, self.microbatches, self.lean, self.ranks = stage, microbatches, lean, ranks
        self.name = named(f"deepspeed zero-{stage}{' lean' * lean}", microbatches)

    def setup(self, rank: int, world_size: int, weights: Mapping[str, Tensor]) -> None:
        self.require(world_size)
        os.environ["DS_ACCELERATOR"] = "cpu"
        # Read by DeepSpeed's CPU accelerator in place of its launcher; LOCAL_SIZE also by its communication layer.
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), LOCAL_SIZE=str(world_size))
        import deepspeed

        # Only its inference uses the shared-memory all-reduce, which would be compiled here, for minutes, under a lock.
        # (import_module, because the attribute deepspeed.comm.torch is torch itself.)
        importlib.import_module("deepspeed.comm.torch").__dict__["build_shm_op"] = lambda: None
        self.rank, self.world_size = rank, world_size
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
        model = BenchModel(self.config)
        model.load(weights)
        groups = [
            {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ]
        settings = {
            "train_batch_size": self.config.batch,
            "train_micro_batch_size_per_gpu": self.config.batch // world_size // self.microbatches,
            "gradient_accumulation_steps": self.microbatches,
            "gradient_clipping": CLIP,
            "zero_optimization": self.zero_settings(),
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
        }
        optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, fused=True)
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=settings, dist_init_required=False
        )

    def zero_settings(self) -> dict[str, Any]:
        """The run file's ``zero_optimization``."""
        settings: dict[str, Any] = {"stage": self.stage, "overlap_comm": False, "contiguous_gradients": True}
        if self.lean:
            c = self.config
            width = (c.heads + 2 * c.kv_heads) * c.head_dim
            block = c.hidden * (width + c.heads * c.head_dim + 3 * c.ffn)
            settings |= {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": block}
        return settings

    def step(self, tokens_BT: Tensor, targets_BT: Tensor) -> float:
        count, total = unmasked(targets_BT), torch.zeros((), dtype=torch.float64)
        tokens, targets = tokens_BT.chunk(self.world_size)[self.rank], targets_BT.chunk(self.world_size)[self.rank]
        for micro_tokens, micro_targets in microbatches(tokens, targets, self.microbatches):
            # DeepSpeed averages over ranks and microbatches: the factor turns that into the sum of the shares.
            loss = token_loss(self.engine(micro_tokens), micro_targets) / count
            self.engine.backward(loss * (self.world_size * self.microbatches))
            self.engine.step()
            total += loss.detach()
        dist.all_reduce(total)
        self.grad_norm = float(self.engine.get_global_grad_norm())
        return total.item()


def engines(config: BenchConfig) -> list[Engine]:
    """One process, and DeepSpeed where it is installed (a line on standard error where not)."""
    found: list[Engine] = [Linear(config, threads=1)]
    if importlib.util.find_spec("deepspeed") is None:
        print("deepspeed is not installed: its rows are left out (pip install deepspeed)", file=sys.stderr)
        return found
    for stage, lean in ((1, False), (2, False), (3, False), (3, True)):
        found += [DeepSpeed(config, stage, microbatches=count, lean=lean) for count in (1, 2)]
    return found


if __name__ == "__main__":
    sys.exit(main(engines, __doc__))
