"""Sequence parallel outside the linear layers: each rank of ``tp`` keeps a contiguous run of the rows between them.

Norms and residual additions work row by row and need no change; what looks at *which* rows it has is here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait.comm.collectives import ENTER, GATHER, apply
from plait.comm.group import Group
from plait.models.batch import Batch
from plait.models.layers import Dropout


def _own(x_N: Tensor, group: Group) -> Tensor:
    return x_N.chunk(group.size)[group.index]


@final
class SequencePositions(nn.Module):
    """Learned positions of this rank's rows: positions int64 [N] of all rows -> [N/tp, D]; weight [P, D]."""

    def __init__(self, *, group: Group) -> None:
        super().__init__()
        self.group = group
        self.weight: nn.Parameter

    def forward(self, positions_N: Tensor) -> Tensor:
        return F.embedding(_own(positions_N, self.group), self.weight)


@final
class SequenceDropout(Dropout):
    """Dropout on this rank's rows, with the masks that one device would draw for them."""

    def __init__(self, whole: Dropout, group: Group) -> None:
        super().__init__(whole.p, whole.seed, whole.layer, whole.site)
        self.group = group

    def rows(self, batch: Batch) -> tuple[Tensor, Tensor]:
        sample_N, index_N = super().rows(batch)
        return _own(sample_N, self.group), _own(index_N, self.group)


@final
class SharedByHeads(nn.Module):
    """x [N, E] (or [N/tp, E] when ``sequence``) -> [N, E] for the heads of every rank, whose gradients are summed.

    What latent attention computes once for all heads: the part of the key with positions.
    """

    def __init__(self, *, group: Group, sequence: bool) -> None:
        super().__init__()
        self.group = group
        self.arrow = GATHER if sequence else ENTER

    def forward(self, x_NE: Tensor) -> Tensor:
        return apply(x_NE, self.group, self.arrow)


@final
class WholeSamples:
    """Brings rows that lie on ``tp`` and ``cp`` together to those of whole samples, and finds this rank's among them.

    Rows of a microbatch of B samples: each rank of ``tp`` holds a run of the [B, T/cp] rows of its rank of ``cp``;
    ``order(T)`` names the columns in the order of ``cp``'s ranks.
    """

    def __init__(self, tp: Group, cp: Group, order: Callable[[int], Tensor]) -> None:
        self.tp = tp
        self.cp = cp
        self._order = order

    def gather(self, rows: Tensor, batch: Batch) -> Tensor:
        """[n, ...] -> [B * T, ...] in sample order."""
        mine = self.tp.all_gather(rows.contiguous()).wait()
        if self.cp.size == 1:
            return mine
        parts = self.cp.all_gather(mine).wait()
        ranked = parts.view(self.cp.size, batch.tokens_BT.shape[0], -1, *rows.shape[1:]).transpose(0, 1).flatten(1, 2)
        whole = torch.empty_like(ranked)
        whole[:, self._order(ranked.shape[1]).to(rows.device)] = ranked
        return whole.flatten(0, 1)

    def mine(self, whole: Tensor, batch: Batch) -> Tensor:
        """[B * T, ...] in sample order -> this rank's [n, ...]."""
        if self.cp.size > 1:
            whole = torch.unflatten(whole, 0, (batch.tokens_BT.shape[0], -1))[:, batch.indices_T()].flatten(0, 1)
        return _own(whole, self.tp)
