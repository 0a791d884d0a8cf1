"""What decides whether a plan can work: the sizes of a model, and the run that a plan is for."""

from __future__ import annotations

from dataclasses import dataclass

from plait.core.plan import Plan


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a model that decide which plans can cut it. ``max_positions`` 0: sequences of any length."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    ffn_size: int
    hidden_size: int
    max_positions: int
    num_experts: int = 0
    """0: no layer has experts."""
    expert_ffn: int = 0
    shared_ffn: int = 0


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a rule may look at."""

    plan: Plan
    shape: ModelShape
    world_size: int
    global_batch: int
    seq: int

    @property
    def dp(self) -> int:
        """Data-parallel size; 1 while the world size does not fit, which another rule reports."""
        return self.plan.dp or max(1, self.world_size // (self.plan.tp * self.plan.pp * self.plan.cp))
