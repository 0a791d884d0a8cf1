"""`Job`: what is predicted, a model under a plan on a cluster; and `Practice`, how the system that runs it behaves."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

from plait.core.mesh import Mesh
from plait.core.plan import Plan
from plait.core.topology import Topology
from plait.models.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Practice:
    """Facts of the running system that neither plan nor model states. The defaults are those of plait."""

    framework: str = "plait"
    attention: str = "flash"
    """``flash`` (scores never stored) or ``unfused`` (scores stored, softmax a kernel of its own)."""
    causal: bool = True
    """Whether attention is causal; False: every query sees every key."""
    overlap_grads: bool = True
    """Gradient reduction on the data axes runs under backward."""
    overlap_weights: bool = True
    """Weights of ZeRO are gathered under compute."""
    overlap_tp: bool = False
    """Tensor-parallel communication runs in parts under its products."""
    overlap_ep: bool = False
    overlap_pp: bool = True
    """Stage transfers run under compute."""
    weight_bytes: float | None = None
    """Bytes of a stored weight; None: as plait holds them in the plan's precision."""
    grad_bytes: float | None = None
    optimizer_bytes: float | None = None
    """Bytes of optimizer state a parameter, master weights included."""
    fused: bool = False
    """Norms, activations, rotary, loss as fused kernels (compilers, Transformer Engine)."""
    graph: bool = False
    """Launch overhead is gone (CUDA graphs, full compilation)."""
    fp8: str | None = None
    """Recipe of scales: ``delayed``, ``tensorwise``, ``blockwise``, ``mxfp8``, ``nvfp4``; None: as plait does."""
    fp8_attention: bool = False
    mtp_layers: int = 0
    """Extra layers that predict further tokens (DeepSeek-V3), on the last stage, each with a head."""
    balanced: bool = False
    """Routing is forced to be even."""
    synchronous_norm: bool = True
    """The optimizer waits for the gradient norm of all ranks."""
    memory_kind: str = "allocated"
    """What a peak counts: ``allocated``, ``reserved`` or ``device``."""
    recompute_parts: tuple[str, ...] = ()
    """Parts recomputed under ``selective`` in other systems: ``core_attn mlp moe_act layernorm mla_up_proj moe``."""
    offload: bool = False
    """Activations go to host memory."""
    offload_share: float = 1.0
    """Share of the layers whose activations do."""
    live_limit: int | None = None
    """Microbatches that a searched schedule fills every pipeline rank up to; None: as many as the plan's own holds."""


PLAIT = Practice()


@dataclass(frozen=True, kw_only=True)
class Job:
    """One step of ``model`` under ``plan`` (its dp set) on the first ``world_size`` devices of ``topology``."""

    model: ModelConfig
    plan: Plan
    topology: Topology
    seq: int
    """Tokens a sample."""
    global_batch: int
    """Samples a step."""
    practice: Practice = field(default_factory=Practice)

    @property
    def dp(self) -> int:
        assert self.plan.dp is not None, "resolve the plan first"
        return self.plan.dp

    @property
    def world_size(self) -> int:
        return self.plan.tp * self.plan.pp * self.plan.cp * self.dp

    @property
    def microbatches(self) -> int:
        """Microbatches of a step on each copy of the model."""
        return self.global_batch // (self.dp * self.plan.micro)

    @functools.cached_property
    def mesh(self) -> Mesh:
        return self.plan.mesh(self.world_size)
