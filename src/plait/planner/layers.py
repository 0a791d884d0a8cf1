"""A layer, the embedding and the head under a plan: their operators and messages of one rank and one microbatch.

Bytes of memory-bound operators are passes over what they read and write; sources are the code of Megatron-LM, PyTorch
and plait. Letters as in :mod:`plait.models.config`.
"""

from __future__ import annotations

from functools import lru_cache

from plait.models.parts import MLAConfig, MoEConfig
from plait.planner.ops import Builder, Message, Op, Slice, Work

EAGER_LOSS = "nanotron"
"""Framework whose cross entropy over a cut vocabulary runs operator by operator (functional.py)."""
CLAMPED = "megatron-clamped"
"""Framework whose gated activation runs operator by operator: Megatron-Bridge with gpt-oss's clamped one."""


@lru_cache(maxsize=1 << 12)
def layer(cut: Slice, experts: bool, window: int | None) -> Work:
    """One decoder layer; ``experts``: its MLP is a mixture; ``window``: keys a query sees, None for all."""
    build = Builder(cut)
    model = cut.model
    hidden, own = model.hidden_size, cut.own
    residual = cut.width * cut.tokens * float(hidden)
    _norm(build)
    build.tensor_parallel(residual)
    if model.mla is None:
        _heads(build)
        dims = (model.head_dim, model.head_dim)
    else:
        _latent(build, model.mla)
        dims = (model.mla.qk_dim, model.mla.v_dim)
    _core(build, window, *dims)
    build.linear(
        "attention",
        cut.tokens,
        hidden,
        model.num_heads * dims[1] / cut.tp,
        bias=model.out_bias,
        low=True,
    )
    _residual(build, own * hidden)
    _norm(build)
    moe = model.moe
    if experts and moe is not None:
        _experts(build, moe)
    else:
        build.tensor_parallel(residual)
        _mlp(build, "mlp", model.ffn_size / cut.tp, cut.tokens, gated=model.gated, bias=model.mlp_bias)
    _residual(build, own * hidden)
    return build.work()


def _norm(build: Builder) -> None:
    model, fused = build.cut.model, build.cut.practice.fused
    plain = model.norm == "layernorm" or fused
    # RMSNorm without a kernel of its own: to fp32, square, mean, scale, back.
    forward, backward, kernels = (2, 3, 1) if plain else (8, 12, 6)
    build.pointwise("norm", build.cut.own * model.hidden_size, forward, backward, kernels)


def _residual(build: Builder, elements: float) -> None:
    """Adding a branch to the residual; in backward its gradient is added to that of the branch's input."""
    dropout = 1 if build.cut.model.dropout > 0 else 0
    build.pointwise("norm", elements, 3 + dropout, 3 + dropout, 1 if build.cut.practice.fused else 1 + dropout)


def _heads(build: Builder) -> None:
    cut, model = build.cut, build.cut.model
    kv_heads = max(model.num_kv_heads / cut.tp, 1.0)
    heads = model.num_heads / cut.tp
    width = (heads + 2 * kv_heads) * model.head_dim
    build.linear("attention", cut.tokens, width, model.hidden_size, bias=model.qkv_bias)
    turned = cut.tokens * (heads + kv_heads) * model.head_dim
    if model.positions == "rope":
        passes = 2 if cut.practice.fused else 5
        build.pointwise("core", turned, passes, passes, 2 if cut.practice.fused else 8)
    else:
        build.pointwise("core", turned, 1, 1, 2)
    if model.qk_norm:
        build.pointwise("core", turned, 2, 3, 2)


def _latent(build: Builder, mla: MLAConfig) -> None:
    cut, model = build.cut, build.cut.model
    heads = model.num_heads / cut.tp
    tokens, hidden = cut.tokens, model.hidden_size
    if mla.q_rank is None:
        build.linear("attention", tokens, heads * mla.qk_dim, hidden)
    else:
        build.linear("attention", cut.own, mla.q_rank, hidden)
        build.pointwise("norm", cut.own * mla.q_rank, 2, 3, 1)
        build.linear("mla_up_proj", tokens, heads * mla.qk_dim, mla.q_rank)
    build.linear("attention", cut.own, mla.kv_rank + mla.rope_dim, hidden)
    build.pointwise("norm", cut.own * mla.kv_rank, 2, 3, 1)
    build.linear("mla_up_proj", tokens, heads * (mla.nope_dim + mla.v_dim), mla.kv_rank)
    # Rotary dims are turned and joined with the others: keys and queries are written again.
    build.pointwise("core", tokens * heads * mla.qk_dim * 2, 2, 2, 4)


def _keys(cut: Slice, window: int | None) -> float:
    """Keys that a query sees in the mean."""
    seq = cut.seq
    if not cut.practice.causal:
        return float(min(window or seq, seq))
    width = min(window or seq, seq)
    return width - width * (width - 1) / (2.0 * seq)


def _core(build: Builder, window: int | None, qk: int, v: int) -> None:
    """Scores, softmax and the weighted sum of values."""
    cut, model, practice = build.cut, build.cut.model, build.cut.practice
    heads = model.num_heads / cut.tp
    kv_heads = max(model.num_kv_heads / cut.tp, 1.0)
    if practice.attention == "unfused":
        _unfused(build, heads, qk, v)
    else:
        flops = 2.0 * cut.tokens * heads * _keys(cut, window) * (qk + v)
        moved = cut.width * cut.tokens * (heads + kv_heads) * (qk + v)
        precision = "fp8" if practice.fp8_attention else cut.plain
        # A ring takes its keys in as many blocks as it has ranks.
        block = cut.seq // cut.cp if cut.context == "ring" else cut.seq
        shape = {"m": block, "n": round(heads * cut.micro), "k": qk, "precision": precision}
        shape["framework"] = practice.framework
        build.forward.append(
            Op(kind="attention_f", part="core", flops=flops, bytes=moved, **shape)  # type: ignore[arg-type]
        )
        # Five products instead of two: the scores are made again.
        build.backward.append(
            Op(
                kind="attention_b",
                part="core",
                flops=flops * 5 / 2,
                bytes=3 * moved,
                kernels=3,
                **shape,  # type: ignore[arg-type]
            )
        )
    if cut.cp > 1:
        _context(build, heads, kv_heads, qk, v)


def _unfused(build: Builder, heads: float, qk: int, v: int) -> None:
    cut = build.cut
    batch = max(1, round(heads * cut.micro))
    rows = cut.seq // cut.cp
    scores = float(batch) * rows * cut.seq * cut.width
    # Products over full rows, whatever the mask: [s, E] x [E, s] and [s, s] x [s, E] for each head.
    for n, k, moved in ((cut.seq, qk, scores), (v, cut.seq, scores)):
        flops = 2.0 * batch * rows * n * k
        shape = {"part": "core", "m": rows, "groups": batch, "flops": flops, "bytes": moved, "precision": cut.plain}
        build.forward.append(Op(kind="batched", n=n, k=k, **shape))  # type: ignore[arg-type]
        for _ in range(2):
            build.backward.append(Op(kind="batched", n=n, k=k, **shape))  # type: ignore[arg-type]
    dropout = 1 if cut.model.dropout > 0 else 0
    fused = cut.practice.fused
    # Scale, mask, softmax in one kernel, which reads the lower triangle alone, or in three over everything; dropout
    # reads, writes, and keeps a mask.
    forward, backward = (1.5, 2) if fused else (6, 5)
    build.memory(build.forward, "core", (forward + 2.5 * dropout) * scores, kernels=(1 if fused else 4) + dropout)
    build.memory(build.backward, "core", (backward + 2.5 * dropout) * scores, kernels=(1 if fused else 3) + dropout)


def _context(build: Builder, heads: float, kv_heads: float, qk: int, v: int) -> None:
    """Attention across ``cp``: keys and values go round, or all are gathered, or heads are changed for tokens."""
    cut = build.cut
    keys = cut.width * cut.tokens * kv_heads * (qk + v)
    # Gradients of keys are added up in fp32 by plait, in the activations' type by others.
    grads = 4.0 / cut.width * keys if cut.practice.framework == "plait" else keys
    if cut.context == "ulysses":
        moved = cut.width * cut.tokens * (heads + kv_heads) * (qk + v)
        for side in (build.sent, build.returned):
            side.append(Message(axis="cp", op="all_to_all", size=moved))
        return
    if cut.context == "gather":
        build.sent.append(Message(axis="cp", op="all_gather", size=keys * cut.cp))
        build.returned.append(Message(axis="cp", op="all_gather", size=keys * cut.cp))
        build.returned.append(Message(axis="cp", op="reduce_scatter", size=grads * cut.cp))
        return
    # Each block's result is joined with those before, in fp32.
    joined = 4.0 * cut.tokens * heads * v * (cut.cp - 1)
    build.memory(build.forward, "core", 3 * joined, kernels=2 * (cut.cp - 1))
    build.memory(build.backward, "core", 3 * joined, kernels=2 * (cut.cp - 1))
    build.sent.append(Message(axis="cp", op="ring", size=keys * (cut.cp - 1)))
    build.returned.append(Message(axis="cp", op="ring", size=(keys + grads) * (cut.cp - 1)))


def _mlp(build: Builder, part: str, ffn: float, tokens: float, *, gated: bool, bias: bool) -> None:
    model = build.cut.model
    build.linear(part, tokens, ffn * (2 if gated else 1), model.hidden_size, bias=bias)
    _activation(build, "act" if part == "mlp" else part, tokens * ffn, gated=gated, bias=bias)
    build.linear(part, tokens, model.hidden_size, ffn, bias=bias)


def _activation(build: Builder, part: str, elements: float, *, gated: bool, bias: bool) -> None:
    fused = build.cut.practice.fused
    if gated and build.cut.practice.framework == CLAMPED:
        # Two clamps, scale, sigmoid, addition: one in, one out. Two products: two in. In backward twice that.
        alone, joined = 5, 2
        forward, kernels = 2 * alone + 3 * joined, alone + joined
        backward = 2 * forward
    elif gated:
        forward, backward, kernels = (3, 5, 1) if fused else (5, 8, 2)
    else:
        forward, backward, kernels = (2, 3, 1)
    build.pointwise(part, elements, forward, backward, kernels)


def _experts(build: Builder, moe: MoEConfig) -> None:
    """Router, dispatch, the rank's own experts, combine, shared experts."""
    cut, model = build.cut, build.cut.model
    hidden = model.hidden_size
    # Without sequence parallelism every tensor rank has all tokens; each routes its share of them.
    own = cut.tokens / cut.tp
    if cut.tp > 1 and not cut.sp:
        whole = cut.width * cut.tokens * float(hidden)
        for side in (build.sent, build.returned):
            side.append(Message(axis="tp", op="all_gather", size=whole))
    build.linear("router", own, moe.num_experts, hidden, low=False)
    # Scores, top-k, counts and the places of the assignments.
    build.memory(build.forward, "router", 16.0 * own * moe.num_experts, kernels=6 if cut.practice.fused else 16)
    build.memory(build.backward, "router", 16.0 * own * moe.num_experts, kernels=3 if cut.practice.fused else 8)
    # Assignments that a rank computes: those of its tokens, in the mean; etp ranks see the same ones.
    rows = cut.tokens * moe.top_k * cut.etp / cut.tp
    local = max(1, moe.num_experts // cut.ep)
    sent = cut.width * cut.tokens * moe.top_k * hidden / cut.tp
    for side in (build.sent, build.returned):
        if cut.ep > 1:
            side.append(Message(axis="ep", op="all_to_all", size=sent))
            side.append(Message(axis="ep", op="all_to_all", size=sent))
        if cut.etp > 1:
            side.append(Message(axis="etp", op="all_gather", size=sent * cut.etp))
            side.append(Message(axis="etp", op="reduce_scatter", size=sent * cut.etp))
    # Rows are sorted by expert on the way in and back into tokens on the way out.
    build.pointwise("permute", rows * hidden, 4, 4, 4)
    build.grouped(local, rows / local, 2 * moe.ffn_size / cut.etp, hidden)
    _activation(build, "act", rows * moe.ffn_size / cut.etp, gated=True, bias=False)
    build.grouped(local, rows / local, hidden, moe.ffn_size / cut.etp)
    if moe.shared_ffn:
        build.tensor_parallel(cut.width * cut.tokens * float(hidden))
        _mlp(build, "shared", moe.shared_ffn / cut.tp, cut.tokens, gated=True, bias=False)


@lru_cache(maxsize=1 << 10)
def embedding(cut: Slice) -> Work:
    """Token (and position) lookup; its gradient is added row by row."""
    build = Builder(cut)
    model = cut.model
    elements = float(cut.tokens * model.hidden_size)
    build.memory(build.forward, "embed", 2 * cut.width * elements, kernels=4)
    build.memory(build.weight, "embed", (cut.width + 2 * 4) * elements, kernels=4)
    if cut.tp > 1:
        size = cut.width * elements
        build.sent.append(Message(axis="tp", op="reduce_scatter" if cut.sp else "all_reduce", size=size))
        if cut.sp:
            build.gathered.append(Message(axis="tp", op="all_gather", size=size))
    return build.work()


@lru_cache(maxsize=1 << 10)
def head(cut: Slice) -> Work:
    """Last norm, the product to logits, and cross entropy over a vocabulary cut by ``tp``."""
    build = Builder(cut)
    model = cut.model
    _norm(build)
    vocabulary = model.vocab_size / cut.tp
    if cut.tp > 1:
        size = cut.width * cut.tokens * float(model.hidden_size)
        if cut.sp:
            build.sent.append(Message(axis="tp", op="all_gather", size=size))
            build.gathered.append(Message(axis="tp", op="all_gather", size=size))
        build.returned.append(Message(axis="tp", op="reduce_scatter" if cut.sp else "all_reduce", size=size))
    build.linear("head", cut.tokens, vocabulary, model.hidden_size, low=False)
    logits = cut.tokens * vocabulary
    # Fused: read twice, gradient written once. Else fp32 copies: cast, max, subtract, exp, sum, divide; and back.
    fused = cut.practice.fused and cut.practice.framework != EAGER_LOSS
    forward, backward = (3.0 * 2, 2.0 * 2) if fused else (16.0, 14.0)
    if cut.practice.framework == EAGER_LOSS:
        # Each of them a kernel of its own over fp32 logits: 6 + 4 + 8 + 8 + 4 + 8 bytes.
        forward = 38.0
    build.memory(build.forward, "head", forward * logits, kernels=2 if fused else 10)
    build.memory(build.backward, "head", backward * logits, kernels=1 if fused else 5)
    return build.work()
