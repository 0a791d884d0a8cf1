"""What a microbatch keeps for its backward, tensor by tensor, and what forward and backward hold beside it. No torch.

A stage is a list of `Step`s in forward order. A step keeps tensors until its backward, of which a split backward (zero
bubble) keeps some until the weight gradient; and it works with more while it runs. Three practices save differently:

* ``plait``: what `plait.models` and `plait.parallel` save, checked against the dry run (tests/planner/test_memory.py);
* fused frameworks (Megatron, and others with kernels of their own): Korthikanti et al. 2022, arXiv:2205.05198, table 2
  and section 4.1, for gated MLPs and grouped keys as in the closed form of Megatron's theoretical_memory_usage.py;
* eager torch (FSDP), which keeps the result of every pointwise operator that needs it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from plait.core.plan import Plan
from plait.models.config import ModelConfig
from plait.planner.habits import habits_of
from plait.planner.job import Practice
from plait.planner.saved import WIDE, Local, Step, is_plait, product_work
from plait.planner.saved_attention import attention, latent
from plait.planner.saved_mlp import experts, mlp

_CHUNK: Final = 1 << 20
"""Logits that plait's loss takes to fp32 at a time (`plait.parallel.vocab`)."""


def norm(model: ModelConfig, at: Local, practice: Practice, module: str) -> Step:
    """The norm before a branch: its input (the residual stream) and the scales; its result is kept by the branch."""
    statistics = WIDE * at.own if model.norm == "rmsnorm" else 2 * at.width * at.own
    # plait's backward works in fp32, beside what comes: the normalised rows, their gradient, both multiplied.
    work = (
        3.0 * WIDE * at.own * at.hidden + at.stream if is_plait(practice) and model.norm == "rmsnorm" else 2 * at.stream
    )
    return Step(kind="norm", keeps=at.stream + statistics, backward=work, modules=(module,))


def dropout(model: ModelConfig, at: Local, practice: Practice) -> Step:
    if model.dropout == 0:
        return Step(kind="dropout")
    # plait draws 64-bit words, two features each, and mixes them out of place.
    words = 8.0 * at.own * at.hidden if is_plait(practice) else 0.0
    return Step(kind="dropout", keeps=at.own * at.hidden, forward=words, backward=2 * at.stream)


@lru_cache(maxsize=8192)
def layer_steps(
    model: ModelConfig, plan: Plan, practice: Practice, at: Local, layer: int, mode: str
) -> tuple[Step, ...]:
    """One layer's steps; ``mode``: its recomputation. The last of its steps stands for what recomputation makes."""
    moe = model.moe_of(layer)
    heads = latent(model, at, practice) if model.mla is not None else attention(model, at, practice, layer)
    first, second = (norm(model, at, practice, module) for module in ("norm1", "norm2"))
    steps = [first, *heads, dropout(model, at, practice), second]
    if moe is None:
        steps += mlp(model, at, practice, at.ffn)
    else:
        steps += experts(model, at, practice, moe)
    steps.append(dropout(model, at, practice))
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
    if mode == "selective" and habits_of(practice).saves_matmuls and not is_plait(practice):
        return _every_second(steps, at)
    if mode == "full":
        # The input of the layer is what is kept; all else comes back at once, before the layer's backward.
        return _again(steps, at)
    parts = practice.recompute_parts or ("core_attn",)
    kinds = {kind for part in parts for kind in _ACTIVATIONS.get(part, ())}
    kept = []
    norms = "layernorm" in parts
    for index, step in enumerate(steps):
        away = step.keeps - step.carried if step.kind in kinds else 0.0
        if norms and index and steps[index - 1].kind == "norm":
            away = min(step.keeps, at.stream)
        kept.append(
            dataclasses.replace(
                step,
                keeps=step.keeps - away + (step.inputs if step.kind in kinds else 0.0),
                forward=step.forward + away,
                backward=step.backward + away,
                carried=0.0,
            )
        )
    return tuple(kept)


def _again(steps: Sequence[Step], at: Local) -> tuple[Step, ...]:
    """The steps of a layer that is computed again as a whole: all that they kept comes back before their backward."""
    left, found, forward, coming = -at.stream, [], _forward_work(steps), 0.0
    for index, step in enumerate(steps):
        left += step.keeps - step.carried
        coming = max(coming, left + step.forward + at.stream)
        found.append(
            Step(
                kind="residual",
                keeps=step.carried + (0.0 if index else at.stream),
                waits=step.waits,
                forward=0.0 if index else forward,
                backward=left + step.backward,
                late=step.late,
                modules=step.modules,
            )
        )
    found.append(Step(kind="residual", backward=coming))
    return tuple(found)


def _every_second(steps: Sequence[Step], at: Local) -> tuple[Step, ...]:
    """torchtitan's policy: of q, k, v, out, w1, w3, w2 every second is kept, attention's output, and the input."""
    e = at.width
    products = at.rows * (at.query + at.value) * e + at.rows * at.ffn * e + at.stream
    kept = at.stream + products + at.rows * at.query * e + WIDE * at.rows * at.heads
    everything = sum(step.keeps for step in steps)
    kept = min(kept, everything)
    worst = max(0.0, _backward_peak(steps) - everything)
    modules = tuple(module for step in reversed(steps) for module in step.modules)
    forward = _forward_work(steps)
    return (Step(kind="residual", keeps=kept, forward=forward, backward=everything - kept + worst, modules=modules),)


def _forward_work(steps: Sequence[Step]) -> float:
    """The most that a layer holds in forward when nothing is kept: a step, what feeds it, and the residual stream."""
    pairs = itertools.pairwise(steps)
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
    work = at.rows * at.hidden * (WIDE + at.width)
    if is_plait(practice):
        # All ranks' rows, of those the ones that are looked up here, and these in fp32.
        looked = at.rows * at.hidden / at.tp
        work = (at.wide_stream if at.sp else 0.0) + looked * ((WIDE if at.width < WIDE else 0) + at.width * (at.tp > 1))
    rows = Step(
        kind="embedding",
        keeps=ids,
        forward=2 * at.stream,
        backward=work,
        modules=("positions", "tokens"),
    )
    return rows, dropout(model, at, practice)


@lru_cache(maxsize=1024)
def head_steps(model: ModelConfig, plan: Plan, practice: Practice, at: Local) -> tuple[Step, ...]:
    """Last norm, head and loss."""
    rows, e = at.rows, at.width
    logits = float(rows * at.vocab)
    gathered = at.wide_stream if at.sp else 0.0
    _, temporary = product_work(at, at.hidden, at.vocab, plain=is_plait(practice))
    if is_plait(practice):
        chunk = min(logits, float(max(1, _CHUNK // at.vocab) * at.vocab))
        loss = Step(
            kind="logits",
            keeps=18.0 * rows,
            # fp32 logits are not copied to fp32: one copy less each way.
            forward=(2 if e < WIDE else 1) * WIDE * chunk + 8.0 * rows,
            backward=(WIDE * chunk if e < WIDE else 0.0) + 16.0 * rows,
        )
        product = logits * e
    else:
        kept, forward, backward = habits_of(practice).logits
        # The loss's share of what is kept is there until the head's own backward is over.
        loss = Step(kind="logits", forward=forward * logits, backward=backward * logits)
        product = kept * logits
        temporary = at.hidden * at.vocab * e if habits_of(practice).dummies else 0.0
    head = Step(
        kind="logits",
        keeps=product,
        waits=at.wide_stream + logits * e,
        forward=gathered,
        backward=gathered + at.wide_stream + temporary,
        late=temporary if is_plait(practice) else 0.0,
        modules=("head",),
    )
    whole = at.sp and habits_of(practice).gathered_inputs and not is_plait(practice)
    into = Step(kind="norm", keeps=at.wide_stream if whole else at.stream)
    return norm(model, at, practice, "norm"), into, head, loss


def total(steps: Sequence[Step]) -> float:
    """Bytes that ``steps`` keep."""
    return math.fsum(step.keeps for step in steps)
