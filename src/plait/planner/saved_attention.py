"""What attention keeps for its backward, plain and latent, in plait's layers and elsewhere. No torch."""

from __future__ import annotations

from typing import Final

from plait.models.config import ModelConfig
from plait.planner.job import Practice
from plait.planner.saved import WIDE, Local, Step, gradient_copies, is_plait, kept_input, product_work

_QK_NORMS: Final = ("attn.k_norm", "attn.q_norm")


def attention(model: ModelConfig, at: Local, practice: Practice, layer: int) -> list[Step]:
    rows, e, plait = at.rows, at.width, is_plait(practice)
    product = rows * (at.query + 2 * at.key) * e
    fp8_qkv, temp_qkv = product_work(at, at.hidden, at.query + 2 * at.key, plain=plait)
    fp8_out, temp_out = product_work(at, at.query, at.hidden, plain=plait)
    gathered = at.wide_stream if at.sp else 0.0
    joined = Step(
        kind="attention",
        keeps=kept_input(at, practice, at.stream),
        waits=at.wide_stream + product,
        forward=fp8_qkv + gathered,
        backward=product + gathered + at.wide_stream + temp_qkv,
        late=temp_qkv,
        modules=("attn.qkv",),
    )
    core = _core(model, at, practice, layer)
    out = Step(
        kind="attention",
        keeps=rows * at.query * e,
        waits=at.wide_stream + rows * at.query * e,
        forward=fp8_out + at.wide_stream,
        backward=rows * at.query * e + gathered + temp_out,
        late=temp_out,
        modules=("attn.out",),
    )
    joined_copies = gradient_copies(at, "attention", at.hidden, at.query + 2 * at.key, plain=plait, coming=gathered)
    return [joined, *joined_copies, *core, out, *gradient_copies(at, "attention", at.query, at.hidden, plain=plait)]


def _core(model: ModelConfig, at: Local, practice: Practice, layer: int) -> list[Step]:
    """Attention itself: what q, k, v and the softmax keep. The output is kept by the projection behind."""
    rows, e = at.rows, at.width
    q, k, v, lse = rows * at.query * e, rows * at.key * e, rows * at.value * e, WIDE * rows * at.heads
    per_head = WIDE * rows * (at.heads + at.key / model.head_dim) if model.qk_norm else 0.0
    keeps = q + k + v
    if is_plait(practice):
        if model.positions == "rope" and at.context != "ulysses":
            # v stays a view of the joined projection, which thereby stays as a whole.
            keeps = (q + k) + (q + k + v)
        if at.context == "ulysses":
            keeps += q  # the output comes back in another layout
        keeps += per_head + _mask(model, at, layer)
        return [
            Step(kind="attention", keeps=keeps, modules=_QK_NORMS),
            _across(at, lse, q, k, v),
        ]
    scores = at.samples * at.heads * at.seq * (at.seq * at.cp)
    if practice.attention == "unfused":
        # Softmax, its dropout's mask and result (Korthikanti et al. 2022, section 4.1: 5 a s^2 b).
        dropped = (1 + e) if model.dropout else 0.0
        core = Step(kind="attention core", keeps=scores * (e + dropped), forward=scores * e, backward=2 * scores * e)
        return [Step(kind="attention", keeps=keeps, modules=_QK_NORMS), core]
    return [
        Step(kind="attention", keeps=keeps + per_head, modules=_QK_NORMS),
        Step(kind="attention core", keeps=lse, backward=2 * q + k + v),
    ]


def _across(at: Local, lse: float, q: float, k: float, v: float) -> Step:
    """plait's attention core. Context parallel: sums in fp32, keys and values of others on their way, and gradients."""
    wide = WIDE / at.width
    forward, backward = 0.0, 2 * q + 2 * (k + v)
    if at.context == "ring":
        passing = 2 * (k + v)
        # Keys and values under way; in backward the gradients of a step, those that go, those that come, in fp32.
        forward, backward = q * wide + passing, q * (2 + wide) + (k + v) * (1 + 3 * wide)
    elif at.context == "gather":
        # As they come, and in the order of the sample; their gradients so, in the order of ranks, joined, and summed.
        every = at.cp * (k + v)
        forward = q * (1 + wide) + k + v + 2 * every
        backward = q * (2 + wide) + 2 * every + (3 * every + 2 * (k + v)) * wide
    elif at.context == "ulysses":
        forward = q + k + v
    return Step(kind="attention core", keeps=lse, forward=forward, backward=backward)


def _mask(model: ModelConfig, at: Local, layer: int) -> float:
    """A sliding window's additive mask, which plait's attention on one device keeps."""
    window, seq = model.window_of(layer), at.seq * (at.cp if at.context == "ulysses" else 1)
    return seq * seq * at.width if window is not None and window < seq and at.context in ("none", "ulysses") else 0.0


def latent(model: ModelConfig, at: Local, practice: Practice) -> list[Step]:
    """Latent attention (DeepSeek-V2, arXiv:2405.04434): both down projections, their norms, and the heads' q, k, v."""
    mla = model.mla
    assert mla is not None
    rows, own, e, plait = at.rows, at.own, at.width, is_plait(practice)
    down = own * (mla.kv_rank + mla.rope_dim) * e + own * mla.kv_rank * e + WIDE * own
    if mla.q_rank is not None:
        down += 2 * own * mla.q_rank * e + WIDE * own
    q = rows * at.heads * mla.qk_dim * e
    up = rows * at.heads * (mla.nope_dim + mla.v_dim) * e
    value = rows * at.heads * mla.v_dim * e
    ranks = (mla.q_rank or at.hidden) + mla.kv_rank
    temporary = ranks * at.heads * max(mla.qk_dim, mla.nope_dim + mla.v_dim) * e if e < WIDE and plait else 0.0
    waits = at.wide_stream + value + q + up + rows * ranks * e
    parts = [
        Step(
            kind="attention",
            keeps=at.stream,
            backward=at.wide_stream + own * (ranks + mla.rope_dim) * e,
            modules=("attn.q_a", "attn.q", "attn.kv_a"),
        ),
        Step(
            kind="mla up",
            keeps=down,
            waits=waits,
            forward=q + up,
            backward=q + up + temporary,
            late=temporary,
            modules=("attn.q_b", "attn.q_a_norm", "attn.kv_b", "attn.kv_a_norm"),
        ),
    ]
    if not plait:
        kept = 2 * q + value  # q, k and v by themselves
        parts += [Step(kind="mla up", keeps=kept)]
        parts += [Step(kind="attention core", keeps=WIDE * rows * at.heads, backward=2 * q + 2 * value)]
        return [*parts, Step(kind="attention", keeps=value, backward=value, modules=("attn.out",))]
    lse = WIDE * rows * at.heads
    if at.cpu and mla.qk_dim != mla.v_dim and at.context in ("none", "ulysses"):
        # torch's kernels on a CPU want one width: what runs is the plain softmax, in fp32.
        scores = float(WIDE * at.rows * at.heads * at.seq * (at.cp if at.context == "ulysses" else 1))
        wide = rows * at.heads * (2 * mla.qk_dim + mla.v_dim) * WIDE
        # Scores' gradients before and after the softmax, and that of the keys; the values are no longer needed then.
        work = 2 * scores + rows * at.heads * (mla.qk_dim - mla.v_dim) * WIDE
        # In forward the mask as well, and queries and keys before they are scaled.
        fore = scores * (1 + 1 / (at.samples * at.heads)) + (4 * q if e < WIDE else 0.0)
        parts += [Step(kind="attention core", keeps=wide + scores, forward=fore, backward=work, inputs=2 * q + up)]
    else:
        # The whole up projection stays behind v; the output is copied out of the heads' layout.
        parts += [
            Step(kind="attention", keeps=2 * q + up),
            _across(at, lse + value, q, q, value),
        ]
    return [*parts, Step(kind="attention", keeps=value, backward=value + at.wide_stream, modules=("attn.out",))]
