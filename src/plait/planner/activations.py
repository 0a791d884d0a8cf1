"""What a microbatch keeps for its backward, tensor by tensor, and what forward and backward hold beside it. No torch.

A stage is a list of `Step`s in forward order. A step keeps tensors until its backward, of which a split backward (zero
bubble) keeps some until the weight gradient; and it works with more while it runs. Three practices save differently:

* ``plait``: what `plait.models` and `plait.parallel` save, checked against the dry run (tests/planner/test_memory.py);
* fused frameworks (Megatron, and others with kernels of their own): Korthikanti et al. 2022, arXiv:2205.05198, table 2
  and section 4.1, for gated MLPs and grouped keys as in the closed form of Megatron's theoretical_memory_usage.py;
* eager torch (FSDP), which keeps the result of every pointwise operator that needs it.

Letters: N rows of a microbatch on this rank of cp (n of them outside the tensor-parallel regions), D hidden, q and k
this rank's widths of all query and key heads, H its query heads, F its feed-forward width, V its vocabulary, e bytes of
an activation, A assignments of rows to experts that it sends, M those that it computes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from plait.core.plan import Plan
from plait.models.config import ModelConfig
from plait.models.parts import MoEConfig
from plait.planner.job import Job, Practice

_CHUNK: Final = 1 << 20
"""Logits that plait's loss takes to fp32 at a time (`plait.parallel.vocab`)."""
_WIDE: Final = 4
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


# --- parts of a layer


def _product_work(at: Local, inputs: float, outputs: float, *, plain: bool) -> tuple[float, float]:
    """Bytes of temporaries that a linear layer's forward and weight gradient need: fp8 copies; a half-precision weight
    gradient on its way to the fp32 sum (plait); ``inputs``, ``outputs``: widths here."""
    forward = 0.0
    if at.fp8 and plain:
        # fp32 copy, its scaled product and the e4m3 result of the larger factor, beside the smaller one's copy.
        small, large = sorted((at.rows * inputs, inputs * outputs))
        forward = max(9 * small, 9 * large) if small == at.rows * inputs else 9 * large
        forward = max(9 * at.rows * inputs, at.rows * inputs + 9 * inputs * outputs)
    temporary = inputs * outputs * at.width if at.width < _WIDE and plain else 0.0
    return forward, temporary


def _norm(model: ModelConfig, at: Local, *, saved_input: bool = True) -> Step:
    """The norm before a branch: its input (the residual stream) and the scales; its result is kept by the branch."""
    statistics = _WIDE * at.own if model.norm == "rmsnorm" else 2 * at.width * at.own
    return Step(kind="norm", keeps=(at.stream if saved_input else 0.0) + statistics, backward=2 * at.stream)


def _dropout(model: ModelConfig, at: Local, practice: Practice) -> Step:
    if model.dropout == 0:
        return Step(kind="dropout")
    # plait draws 64-bit words, two features each, and mixes them out of place.
    words = 8.0 * at.own * at.hidden if is_plait(practice) else 0.0
    return Step(kind="dropout", keeps=at.own * at.hidden, forward=words, backward=2 * at.stream)


def _attention(model: ModelConfig, at: Local, practice: Practice, layer: int) -> list[Step]:
    rows, e, plait = at.rows, at.width, is_plait(practice)
    product = rows * (at.query + 2 * at.key) * e
    fp8_qkv, temp_qkv = _product_work(at, at.hidden, at.query + 2 * at.key, plain=plait)
    fp8_out, temp_out = _product_work(at, at.query, at.hidden, plain=plait)
    gathered = at.wide_stream if at.sp else 0.0
    joined = Step(
        kind="attention",
        keeps=at.stream,
        waits=at.wide_stream + product,
        forward=fp8_qkv + gathered,
        backward=product + gathered + at.wide_stream + max(temp_qkv, fp8_qkv),
    )
    core = _core(model, at, practice, layer)
    out = Step(
        kind="attention",
        keeps=rows * at.query * e,
        waits=at.wide_stream + rows * at.query * e,
        forward=fp8_out + at.wide_stream,
        backward=rows * at.query * e + gathered + max(temp_out, fp8_out),
    )
    return [joined, *core, out]


def _core(model: ModelConfig, at: Local, practice: Practice, layer: int) -> list[Step]:
    """Attention itself: what q, k, v and the softmax keep. The output is kept by the projection behind."""
    rows, e = at.rows, at.width
    q, k, v, lse = rows * at.query * e, rows * at.key * e, rows * at.value * e, _WIDE * rows * at.heads
    per_head = _WIDE * rows * (at.heads + at.key / model.head_dim) if model.qk_norm else 0.0
    keeps = q + k + v
    if is_plait(practice):
        if model.positions == "rope" and at.context != "ulysses":
            # v stays a view of the joined projection, which thereby stays as a whole.
            keeps = (q + k) + (q + k + v)
        if at.context == "ulysses":
            keeps += q  # the output comes back in another layout
        keeps += per_head + _mask(model, at, layer)
        return [
            Step(kind="attention", keeps=keeps),
            Step(kind="attention core", keeps=lse, forward=_ring_work(at, q, k, v), backward=2 * q + 2 * (k + v)),
        ]
    scores = at.samples * at.heads * at.seq * (at.seq * at.cp)
    if practice.attention == "unfused":
        # Softmax, its dropout's mask and result (Korthikanti et al. 2022, section 4.1: 5 a s^2 b).
        dropped = (1 + e) if model.dropout else 0.0
        core = Step(kind="attention core", keeps=scores * (e + dropped), forward=scores * e, backward=2 * scores * e)
        return [Step(kind="attention", keeps=keeps), core]
    return [
        Step(kind="attention", keeps=keeps + per_head),
        Step(kind="attention core", keeps=lse, backward=2 * q + k + v),
    ]


def _ring_work(at: Local, q: float, k: float, v: float) -> float:
    """Context parallel: the sum in fp32, and the keys and values of others that are on their way."""
    if at.context in ("ring", "gather"):
        passing = 2 * (k + v) if at.context == "ring" else at.cp * (k + v)
        return q / at.width * _WIDE + passing
    return q + k + v if at.context == "ulysses" else 0.0


def _mask(model: ModelConfig, at: Local, layer: int) -> float:
    """A sliding window's additive mask, which plait's attention on one device keeps."""
    window, seq = model.window_of(layer), at.seq * (at.cp if at.context == "ulysses" else 1)
    return seq * seq * at.width if window is not None and window < seq and at.context in ("none", "ulysses") else 0.0


def _latent(model: ModelConfig, at: Local, practice: Practice) -> list[Step]:
    """Latent attention (DeepSeek-V2, arXiv:2405.04434): both down projections, their norms, and the heads' q, k, v."""
    mla = model.mla
    assert mla is not None
    rows, own, e, plait = at.rows, at.own, at.width, is_plait(practice)
    down = own * (mla.kv_rank + mla.rope_dim) * e + own * mla.kv_rank * e + _WIDE * own
    if mla.q_rank is not None:
        down += 2 * own * mla.q_rank * e + _WIDE * own
    q = rows * at.heads * mla.qk_dim * e
    up = rows * at.heads * (mla.nope_dim + mla.v_dim) * e
    value = rows * at.heads * mla.v_dim * e
    ranks = (mla.q_rank or at.hidden) + mla.kv_rank
    temporary = ranks * at.heads * max(mla.qk_dim, mla.nope_dim + mla.v_dim) * e if e < _WIDE and plait else 0.0
    waits = at.wide_stream + value + q + up + rows * ranks * e
    parts = [
        Step(kind="attention", keeps=at.stream, backward=at.wide_stream + own * (ranks + mla.rope_dim) * e),
        Step(kind="mla up", keeps=down, waits=waits, forward=q + up, backward=q + up + temporary),
    ]
    if not plait:
        kept = 2 * q + value  # q, k and v by themselves
        parts += [Step(kind="mla up", keeps=kept)]
        parts += [Step(kind="attention core", keeps=_WIDE * rows * at.heads, backward=2 * q + 2 * value)]
        return [*parts, Step(kind="attention", keeps=value, backward=value)]
    lse, scores = _WIDE * rows * at.heads, float(at.samples * at.heads * at.seq * at.seq * _WIDE)
    if at.cpu and mla.qk_dim != mla.v_dim and at.context == "none":
        # torch's kernels on a CPU want one width: what runs is the plain softmax, in fp32.
        wide = rows * at.heads * (2 * mla.qk_dim + mla.v_dim) * _WIDE
        parts += [Step(kind="attention core", keeps=wide + scores, forward=scores, backward=2 * scores)]
    else:
        # The whole up projection stays behind v; the output is copied out of the heads' layout.
        parts += [
            Step(kind="attention", keeps=2 * q + up + value),
            Step(kind="attention core", keeps=lse, backward=2 * q + 2 * value),
        ]
    return [*parts, Step(kind="attention", keeps=value, backward=value + at.wide_stream)]


def _mlp(model: ModelConfig, at: Local, practice: Practice, ffn: int, kind: str = "mlp") -> list[Step]:
    """Both products and the activation between; ``ffn``: width here."""
    rows, e, plait = at.rows, at.width, is_plait(practice)
    inner, up = rows * ffn * e, (2 if model.gated else 1) * rows * ffn * e
    fp8_up, temp_up = _product_work(at, at.hidden, up / (rows * e), plain=plait)
    fp8_down, temp_down = _product_work(at, ffn, at.hidden, plain=plait)
    gathered = at.wide_stream if at.sp else 0.0
    fp8_back = 9 * up / e if at.fp8 and plait else 0.0
    # The shared expert reads what the router reads: kept once.
    first = Step(
        kind=kind,
        keeps=at.stream if kind == "mlp" else 0.0,
        waits=at.wide_stream + up,
        forward=fp8_up + gathered,
        backward=up + gathered + max(at.wide_stream + temp_up, fp8_back),
    )
    eager = not (plait or practice.fused)
    kept = up + (inner if eager and model.gated else 0.0)
    # Gradient of the result, of one factor, and of the other.
    act = Step(kind=f"{kind} act", keeps=kept, forward=0.0, backward=(3 if model.gated else 2) * inner)
    second = Step(
        kind=kind,
        keeps=inner,
        waits=at.wide_stream + inner,
        forward=fp8_down + at.wide_stream,
        backward=inner + gathered + max(temp_down, fp8_down),
    )
    return [first, act, second]


def _experts(model: ModelConfig, at: Local, practice: Practice, moe: MoEConfig) -> list[Step]:
    """Router, dispatch, the experts' two products, and the way back. Routing is even."""
    e, plait = at.width, is_plait(practice)
    rows = at.rows / at.tp if plait or at.sp else at.rows
    share = min(1.0, moe.capacity_factor) if moe.capacity_factor is not None else 1.0
    sent = rows * moe.top_k * share
    computed = sent * at.etp
    ffn = moe.ffn_size / at.etp
    sent_bytes, computed_bytes, inner = sent * at.hidden * e, computed * at.hidden * e, computed * ffn * e
    scores = rows * moe.num_experts * (8.0 if plait and moe.score == "sigmoid" else _WIDE)
    choice = rows * moe.top_k * (8 + _WIDE + _WIDE) + _WIDE * rows
    apart = at.ep * at.etp > 1
    routing = 24.0 * sent + (16.0 * computed if apart else 0.0)
    if not plait:
        # Logits and probabilities in fp32, the permutation as int32 maps (Transformer Engine's fused permute).
        scores, choice, routing = 2 * _WIDE * rows * moe.num_experts, _WIDE * rows * moe.top_k, 8.0 * sent
    router = Step(kind="router", keeps=at.stream + scores + choice, backward=rows * at.hidden * (_WIDE + e))
    if moe.aux_loss or moe.z_loss:
        router = Step(kind="router", keeps=router.keeps + _WIDE * rows * moe.num_experts, backward=router.backward)
    wide = rows * at.hidden * _WIDE
    go = Step(kind="dispatch", keeps=routing, carried=routing, forward=sent_bytes, backward=sent_bytes + wide)
    if not plait:
        # The weights go into the activation, so that nothing of the results is kept to weigh them.
        moved = 2 * computed_bytes if apart else computed_bytes
        return [
            router,
            Step(kind="dispatch", keeps=routing, forward=moved, backward=moved),
            Step(kind="experts", keeps=computed_bytes, waits=computed_bytes + 2 * inner, backward=2 * computed_bytes),
            Step(kind="moe act", keeps=2 * inner, backward=3 * inner),
            Step(kind="experts", keeps=inner, waits=computed_bytes + inner, forward=computed_bytes, backward=inner),
            Step(kind="dispatch", forward=moved, backward=moved),
        ]
    slots = max(1, moe.num_experts // at.ep)
    arrived = computed_bytes if apart else 0.0
    product = sent_bytes + arrived + 4 * inner + computed_bytes + 2 * computed_bytes / slots
    back = sent_bytes + arrived + 3 * inner + (2 * computed_bytes + 2 * sent_bytes if apart else computed_bytes)
    work = Step(
        kind="experts",
        keeps=computed_bytes + 2 * inner,
        waits=2 * computed_bytes + 3 * inner,
        forward=2 * computed_bytes + 2 * sent_bytes if apart else computed_bytes,
        backward=max(product, back),
    )
    weighing = Step(
        kind="dispatch",
        keeps=sent_bytes + _WIDE * rows * moe.top_k,
        forward=2 * wide + rows * at.hidden * e,
        backward=wide + 2 * sent * at.hidden * _WIDE,
    )
    return [router, go, work, weighing]


# --- layers and stages


@lru_cache(maxsize=8192)
def layer_steps(
    model: ModelConfig, plan: Plan, practice: Practice, at: Local, layer: int, mode: str
) -> tuple[Step, ...]:
    """One layer's steps; ``mode``: its recomputation. The last of its steps stands for what recomputation makes."""
    moe = model.moe_of(layer)
    attention = _latent(model, at, practice) if model.mla is not None else _attention(model, at, practice, layer)
    steps = [_norm(model, at), *attention, _dropout(model, at, practice), _norm(model, at)]
    if moe is None:
        steps += _mlp(model, at, practice, at.ffn)
    else:
        steps += _experts(model, at, practice, moe)
        if moe.shared_ffn:
            steps += _mlp(model, at, practice, moe.shared_ffn // at.tp, "shared")
    steps.append(_dropout(model, at, practice))
    return recomputed(steps, at, practice, mode)


_ACTIVATIONS: Final = {
    "core_attn": ("attention core",),
    "mlp": ("mlp", "mlp act"),
    "moe_act": ("moe act",),
    "mlp_act": ("mlp act",),
    "layernorm": ("norm result",),
    "mla_up_proj": ("mla up",),
    "moe": ("router", "dispatch", "experts", "moe act", "shared", "shared act"),
    "shared_experts": ("shared", "shared act"),
}
"""Part that is recomputed -> the kinds whose tensors are made again."""


def recomputed(steps: Sequence[Step], at: Local, practice: Practice, mode: str) -> tuple[Step, ...]:
    """The steps when some are computed again in backward: what those kept is there while their backward runs alone."""
    if mode == "none":
        return tuple(steps)
    if mode == "full":
        # The input of the layer is what is kept; all else comes back at once, before the layer's backward.
        again = sum(step.keeps for step in steps) - at.stream
        carried = sum(step.carried for step in steps)
        worst = _backward_peak(steps) - sum(step.keeps for step in steps)
        whole = Step(
            kind="residual",
            keeps=at.stream + carried,
            waits=sum(step.waits for step in steps),
            forward=_forward_work(steps),
            backward=again - carried + max(0.0, worst),
        )
        return (whole,)
    parts = practice.recompute_parts or ("core_attn",)
    kinds = {kind for part in parts for kind in _ACTIVATIONS.get(part, ())}
    kept = []
    norms = "layernorm" in parts
    for index, step in enumerate(steps):
        away = step.keeps - step.carried if step.kind in kinds else 0.0
        if norms and index and steps[index - 1].kind == "norm":
            away = min(step.keeps, at.stream)
        kept.append(
            Step(
                kind=step.kind,
                keeps=step.keeps - away,
                waits=step.waits,
                forward=step.forward + away,
                backward=step.backward + away,
            )
        )
    return tuple(kept)


def _forward_work(steps: Sequence[Step]) -> float:
    """The most that a layer holds in forward when nothing is kept: a step, what feeds it, and the residual stream."""
    pairs = zip(steps, steps[1:], strict=False)
    return max(one.keeps + other.keeps + max(one.forward, other.forward) for one, other in pairs)


def _backward_peak(steps: Sequence[Step]) -> float:
    """The most that is there during the backward of ``steps``, all of which are kept when it begins."""
    left, most = sum(step.keeps for step in steps), 0.0
    for step in reversed(steps):
        most = max(most, left + step.backward)
        left -= step.keeps
    return most


@lru_cache(maxsize=1024)
def embedding_steps(model: ModelConfig, plan: Plan, practice: Practice, at: Local) -> tuple[Step, ...]:
    """Token (and position) embedding and its dropout."""
    ids = 8.0 * at.rows * (1 if at.tp == 1 else 2 / at.tp)
    rows = Step(kind="embedding", keeps=ids, forward=2 * at.stream, backward=at.rows * at.hidden * (_WIDE + at.width))
    return rows, _dropout(model, at, practice)


@lru_cache(maxsize=1024)
def head_steps(model: ModelConfig, plan: Plan, practice: Practice, at: Local) -> tuple[Step, ...]:
    """Last norm, head and loss."""
    rows, e = at.rows, at.width
    logits = float(rows * at.vocab)
    gathered = at.wide_stream if at.sp else 0.0
    _, temporary = _product_work(at, at.hidden, at.vocab, plain=is_plait(practice))
    if is_plait(practice):
        chunk = min(logits, float(max(1, _CHUNK // at.vocab) * at.vocab))
        loss = Step(
            kind="logits",
            keeps=18.0 * rows,
            forward=2 * _WIDE * chunk + 8.0 * rows,
            backward=_WIDE * chunk + 16.0 * rows,
        )
        product = logits * e
    elif practice.framework == "megatron":
        # fp32 logits; the head's weight gradient goes into the fp32 buffer, an unused one of half precision to autograd.
        loss, product, temporary = Step(kind="logits"), _WIDE * logits, at.hidden * at.vocab * e
    else:
        loss, product = _loss(practice, logits, e), 0.0
    head = Step(
        kind="logits",
        keeps=product,
        waits=at.wide_stream + logits * e,
        forward=gathered,
        backward=gathered + at.wide_stream + temporary,
    )
    into = Step(kind="norm", keeps=at.stream)
    return _norm(model, at), into, head, loss


def _loss(practice: Practice, logits: float, e: float) -> Step:
    """Logits and loss elsewhere: fused (half-precision logits that become their gradient, beside fp32 work) or eager."""
    if practice.fused:
        return Step(kind="logits", keeps=_WIDE * logits)
    # Half-precision logits, fp32 copy and log-softmax; backward has its gradient in fp32 and in half precision.
    return Step(kind="logits", keeps=_WIDE * logits + e * logits, forward=_WIDE * logits, backward=2 * _WIDE * logits)


def cpu_of(job: Job) -> bool:
    """Whether the job's devices are CPUs, whose kernels keep other things."""
    return job.topology.device.kind == "cpu"


def total(steps: Sequence[Step]) -> float:
    """Bytes that ``steps`` keep."""
    return math.fsum(step.keeps for step in steps)
