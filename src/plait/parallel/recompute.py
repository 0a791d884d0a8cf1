"""Activation recomputation, layer by layer: none, the attention core alone (selective), or the whole block (full).

Chen et al. 2016, arXiv:1604.06174; selective: Korthikanti et al. 2022, arXiv:2205.05198.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import final

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from plait.models.attention import Attend, Rope
from plait.models.batch import Batch
from plait.models.decoder import Block
from plait.models.router import unrecorded


@final
class RecomputedBlock(nn.Module):
    """A block that keeps its input alone. It has the block's own children, so parameter names stay as they are."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        for name, child in block.named_children():
            self.add_module(name, child)
        # In a tuple, or it would become a child and its parameters would have two names.
        self._block = (block,)

    def forward(self, h_ND: Tensor, rope: Rope | None, batch: Batch) -> Tensor:
        block = self._block[0]

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            """Around the first computation, and around the second, which counts nothing again (case P17)."""
            return nullcontext(), unrecorded(block)

        # Nothing random is replayed: dropout is a function of the batch.
        out: Tensor = checkpoint(
            block, h_ND, rope, batch, use_reentrant=False, preserve_rng_state=False, context_fn=contexts
        )
        return out


@final
class RecomputedAttend(Attend):
    """Attention that keeps q, k and v alone; ``core``, any way to attend, does it."""

    def __init__(self, window: int | None, core: Attend) -> None:
        super().__init__(window)
        self.core = core

    def forward(self, q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, batch: Batch) -> Tensor:
        out: Tensor = checkpoint(
            self.core, q_BHTE, k_BKTE, v_BKTE, batch, use_reentrant=False, preserve_rng_state=False
        )
        return out
