"""Activation recomputation, layer by layer: none, the attention core alone (selective), or the whole block (full).

Chen et al. 2016, arXiv:1604.06174; selective: Korthikanti et al. 2022, arXiv:2205.05198.
"""

from __future__ import annotations

from typing import final

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from plait.models.attention import Attend, Rope
from plait.models.batch import Batch
from plait.models.decoder import Block


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
        # Nothing random is replayed: dropout is a function of the batch.
        out: Tensor = checkpoint(self._block[0], h_ND, rope, batch, use_reentrant=False, preserve_rng_state=False)
        return out


@final
class RecomputedAttend(Attend):
    """Attention whose core keeps q, k and v alone."""

    def forward(self, q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, batch: Batch) -> Tensor:
        core = super().forward
        out: Tensor = checkpoint(core, q_BHTE, k_BKTE, v_BKTE, batch, use_reentrant=False, preserve_rng_state=False)
        return out
