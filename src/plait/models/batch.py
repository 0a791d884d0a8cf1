"""`Batch`: what a model reads in one microbatch. Plain torch; B samples of T tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

IGNORE = -100
"""Target of a position that carries no loss (torch's own default for ``ignore_index``)."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One microbatch. Hidden activations are its tokens flattened: row n is sample ``n // T``, index ``n % T``."""

    tokens_BT: torch.Tensor
    """int64 token ids."""
    targets_BT: torch.Tensor
    """int64 ids of the tokens to predict; `IGNORE` where masked."""
    sample_B: torch.Tensor
    """int64 global sample index: the same for every cut of the run, so that dropout can be drawn from it."""
    step: int
    """Optimizer step, counted from 0."""
    positions_BT: torch.Tensor | None = None
    """int64 position of each token inside its document; None is ``arange(T)``."""
    documents_BT: torch.Tensor | None = None
    """int64 document number of each token, which attention does not cross; None is one document a sample."""

    index_T: torch.Tensor | None = None
    """int64 [T] index in its whole sample of each column, where these are a part of it; None is ``arange(T)``."""
    real_BT: torch.Tensor | None = None
    """bool; False for padding, which no router counts and no expert sees; None: all are real."""
    total: int | None = None
    """Real tokens of the step's *global* batch, which losses on routers are means over; None: those of this batch."""
    scale: float = 1.0
    """What the gradients of the step are multiplied with (fp16's loss scale); losses on routers follow it."""

    @property
    def rows(self) -> int:
        """B * T, the number of rows of a hidden activation of the whole microbatch."""
        return self.tokens_BT.numel()

    def indices_T(self) -> torch.Tensor:
        """int64 [T]: the index in its sample of each column."""
        if self.index_T is not None:
            return self.index_T
        return torch.arange(self.tokens_BT.shape[1], device=self.tokens_BT.device)

    def positions_N(self) -> torch.Tensor:
        """int64 [B*T]: the position of each row, on the device of the tokens."""
        if self.positions_BT is not None:
            return self.positions_BT.flatten()
        return self.indices_T().repeat(self.tokens_BT.shape[0])

    def real_N(self) -> torch.Tensor | None:
        """bool [B*T]: which rows are no padding; None: all."""
        return None if self.real_BT is None else self.real_BT.flatten()
