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

    @property
    def rows(self) -> int:
        """B * T, the number of rows of a hidden activation of the whole microbatch."""
        return self.tokens_BT.numel()

    def positions_N(self) -> torch.Tensor:
        """int64 [B*T]: the position of each row, on the device of the tokens."""
        if self.positions_BT is not None:
            return self.positions_BT.flatten()
        samples, seq = self.tokens_BT.shape
        return torch.arange(seq, device=self.tokens_BT.device).repeat(samples)
