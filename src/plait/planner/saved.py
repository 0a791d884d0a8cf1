"""What the steps of a stage's forward keep for its backward: their types, and the sizes that they depend on. No torch.

Letters: N rows of a microbatch on this rank of cp (n of them outside the tensor-parallel regions), D hidden, q and k
this rank's widths of all query and key heads, H its query heads, F its feed-forward width, V its vocabulary, e bytes of
an activation, A assignments of rows to experts that it sends, M those that it computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from plait.core.plan import Plan
from plait.models.config import ModelConfig
from plait.planner.habits import habits_of
from plait.planner.job import Job, Practice

WIDE: Final = 4
"""Bytes of an fp32 value."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A part of a stage's forward: bytes."""

    kind: str
    keeps: float = 0.0
    """From its forward to its backward."""
    waits: float = 0.0
    """From its B to its W, where the backward is split: operands of the weight gradient."""
    forward: float = 0.0
    """Worked with in forward, on top of what is kept."""
    backward: float = 0.0
    """Worked with in backward, while what it keeps is still there."""
    carried: float = 0.0
    """Left by recomputation: what is kept although the step is computed again."""
    inputs: float = 0.0
    """Kept where this step alone is computed again: inputs that it does not keep otherwise."""
    late: float = 0.0
    """Worked with by the weight gradient; where that is made in backward, ``backward`` has it."""
    modules: tuple[str, ...] = ()
    """Those whose gradients come in its backward, in that order."""


@dataclass(frozen=True, kw_only=True)
class Local:
    """A job's sizes on one rank."""

    rows: int
    """N."""
    own: int
    """n."""
    samples: int
    seq: int
    """Tokens of a sample here."""
    width: float
    """e."""
    hidden: int
    query: int
    key: int
    value: int
    """Width of all value heads here; differs from ``key`` under latent attention."""
    heads: int
    ffn: int
    vocab: int
    tp: int
    cp: int
    sp: bool
    whole_rows: int
    """Rows of the microbatch over all of cp."""
    etp: int
    ep: int
    context: str
    fp8: bool
    cpu: bool

    @property
    def stream(self) -> float:
        """Bytes of the residual stream."""
        return self.own * self.hidden * self.width

    @property
    def wide_stream(self) -> float:
        """Bytes of the residual stream on all rows."""
        return self.rows * self.hidden * self.width


@lru_cache(maxsize=4096)
def local_of(model: ModelConfig, plan: Plan, seq: int, cpu: bool) -> Local:
    """The sizes that a rank of ``plan`` has."""
    tp, cp = plan.tp, plan.cp
    per_sample = -(-seq // cp)
    rows = plan.micro * per_sample
    kv = max(1, model.num_kv_heads // tp) * model.head_dim
    value = kv if model.mla is None else model.num_heads // tp * model.mla.v_dim
    return Local(
        rows=rows,
        own=-(-rows // tp) if plan.sp else rows,
        samples=plan.micro,
        seq=per_sample,
        width=4.0 if plan.precision == "fp32" else 2.0,
        hidden=model.hidden_size,
        query=model.num_heads // tp * model.head_dim,
        key=kv,
        value=value,
        heads=model.num_heads // tp,
        ffn=model.ffn_size // tp,
        vocab=-(-model.vocab_size // tp),
        tp=tp,
        cp=cp,
        sp=plan.sp,
        whole_rows=plan.micro * seq,
        etp=plan.etp,
        ep=plan.ep,
        context=plan.context if cp > 1 else "none",
        fp8=plan.precision == "fp8",
        cpu=cpu,
    )


def is_plait(practice: Practice) -> bool:
    """Whether plait's own layers run."""
    return practice.framework == "plait"


def cpu_of(job: Job) -> bool:
    """Whether the job's devices are CPUs, whose kernels keep other things."""
    return job.topology.device.kind == "cpu"


def product_work(at: Local, inputs: float, outputs: float, *, plain: bool) -> tuple[float, float]:
    """Bytes of temporaries that a linear layer's forward and weight gradient need: fp8 copies; a half-precision weight
    gradient on its way to the fp32 sum (plait); ``inputs``, ``outputs``: widths here."""
    temporary = inputs * outputs * at.width if at.width < WIDE and plain else 0.0
    return _copies(at, inputs, inputs * outputs) if plain else 0.0, temporary


def _copies(at: Local, width: float, weight: float) -> float:
    """plait's fp8: of the rows and then of the weight a copy in fp32, what it comes to when it is scaled, and that in
    e4m3, which stays."""
    rows = at.rows * width
    return max(9 * rows, rows + 9 * weight) if at.fp8 else 0.0


def gradient_copies(
    at: Local, kind: str, inputs: float, outputs: float, *, plain: bool, coming: float = 0.0
) -> list[Step]:
    """plait's fp8: the step in which a linear layer's input gradient is made, before its weight's; ``coming``: inputs
    that are gathered meanwhile."""
    if not (at.fp8 and plain):
        return []
    return [Step(kind=kind, backward=coming + at.rows * outputs * at.width + _copies(at, outputs, inputs * outputs))]


def low_width(at: Local, practice: Practice) -> float:
    """Bytes of an element of a linear layer's input that is kept for its weight gradient."""
    return 1.0 if at.fp8 and habits_of(practice).low_inputs and not is_plait(practice) else at.width


def kept_input(at: Local, practice: Practice, stream: float) -> float:
    """What a layer behind a norm keeps of its input."""
    kept = stream * low_width(at, practice) / at.width
    return kept * at.tp if at.sp and habits_of(practice).gathered_inputs and not is_plait(practice) else kept
