"""Peak memory of every pipeline rank of a job, by moment of the step and by kind. No torch.

Units: bytes. A rank's peak is the largest of its moments: the state that stays (weights, gradients, optimizer state),
what its live microbatches keep for their backward, what the current one works with, and what the allocator and the
device hold beside.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes on the fullest rank of one pipeline coordinate."""

    pp: int
    weights: float
    gradients: float
    optimizer: float
    activations: float
    """Kept for backward by all live microbatches, at the fullest moment; logits not counted."""
    logits: float
    """Logits, their probabilities and gradient on the last stage."""
    buffers: float
    """Whole weights and gradients that come and go, communication buffers, what one operator works with."""
    reserve: float
    """What the allocator holds beyond what is used, and the device's own (context, libraries)."""
    peak: float
    """The most over the moments of the step, reserve included."""
    moments: tuple[tuple[str, float], ...]
    """Such as ("forward of microbatch 3", bytes) and ("optimizer", bytes)."""
    kinds: Mapping[str, float]
    """The activations of the fullest moment by kind: attention, mlp, norm, residual, logits, experts ..."""


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """One `RankMemory` a pipeline rank."""

    ranks: tuple[RankMemory, ...]

    @property
    def fullest(self) -> RankMemory:
        """The pipeline rank with the highest peak."""
        return max(self.ranks, key=lambda rank: rank.peak)

    @property
    def emptiest(self) -> RankMemory:
        """The pipeline rank with the lowest peak."""
        return min(self.ranks, key=lambda rank: rank.peak)
