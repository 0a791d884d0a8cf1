"""Sequence parallel outside the linear layers: each rank of ``tp`` keeps a contiguous run of the rows between them.

Norms and residual additions work row by row and need no change; what looks at *which* rows it has is here.
"""

from __future__ import annotations

from typing import final

from torch import Tensor, nn
from torch.nn import functional as F

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
