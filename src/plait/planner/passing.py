"""What is on a rank beside its state and activations: weights and gradients that come and go, copies, the allocator."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import numpy as np

from plait.core.compression import Compression
from plait.planner.constants_memory import CONTEXT, RESERVED
from plait.planner.habits import habits_of
from plait.planner.job import Job
from plait.planner.parameters import Part, parts_of
from plait.planner.saved import is_plait
from plait.planner.state import state_ranks
from plait.planner.whole import Floats, Sharing, Unit, Whole, launched, whole

_NO: Final = np.zeros(1)
NOTHING: Final = Whole(fore=_NO, back=_NO, again=_NO, late=_NO, rest=0.0, kept=0.0)
"""Below ZeRO 2 nothing comes and goes."""


def passing(job: Job, sharing: Sharing, stage: Mapping[str, int], units: tuple[Unit, ...], *, both: str) -> Whole:
    """What comes and goes in the actions of a stage that holds ``stage`` of the model's parts, in ``units``; ``both``:
    whether it, or its rank, has both ends of a tied embedding."""
    plan, model = job.plan, job.model
    if plan.zero < 2:
        return NOTHING
    if plan.zero == 2 and habits_of(job.practice).fsdp:
        # FSDP without resharding: half-precision weights and fp32 gradients of all layers, whole until the step ends.
        width = 4.0 if plan.precision == "fp32" else 2.0
        rows = [(part, stage.get(name, 0)) for name, part in parts_of(model, plan).items()]
        size = sum(
            count * ((part.dense + part.router) * sharing.dense + part.expert * sharing.expert) for part, count in rows
        )
        weights, every = np.array([width * size]), np.array([(width + 4.0) * size])
        return Whole(fore=weights, back=every, again=every, late=every, rest=0.0, kept=0.0)
    cut = (plan.tp, plan.ep, plan.etp, plan.sp)
    return whole(model, cut, units, sharing, both, model.tied and "tail" in stage)


def ending(
    job: Job, sharing: Sharing, stage: Mapping[str, int], units: tuple[Unit, ...], *, both: str
) -> Floats | None:
    """What lies beside the gradients at each step of a stage's last backward; None: nothing (see `passing`)."""
    plan = job.plan
    if plan.zero >= 2 or sharing.split or not any(sharing.wire):
        return None
    cut = (plan.tp, plan.ep, plan.etp, plan.sp)
    return launched(job.model, cut, units, sharing, both, job.model.tied and "tail" in stage)


def sharing_of(job: Job) -> Sharing:
    """How the data ranks of ``job`` share state."""
    plan = job.plan
    dense, expert = _shared(job)
    kind = Compression.parse(plan.compress)
    return Sharing(
        zero=plan.zero,
        dense=dense,
        expert=expert,
        bucket=int(plan.bucket_mb * 2**20),
        step=plan.gather == "step",
        width=4.0 if plan.precision == "fp32" else 2.0,
        wire=(_beside(job, expert=False), _beside(job, expert=True)),
        # Magnitudes in fp32, and the values and places of the largest.
        spike=4.0 + 12.0 * kind.share if kind.kind == "topk" else 0.0,
        light=plan.compress == "half"
        or (
            plan.node is not None
            and math.gcd(plan.node, _block(job, expert=False)) > 1
            and plan.node < _block(job, expert=False)
        ),
        split=plan.schedule.startswith("zb") or plan.schedule.endswith("-v"),
        many=job.microbatches > 2,
    )


def _block(job: Job, *, expert: bool) -> int:
    """Data ranks over which a bucket's gradients are summed at first."""
    ranks = job.mesh.expert_sizes["edp"] if expert else job.mesh.dp * job.mesh.cp
    return ranks if job.plan.zero == 0 or job.plan.zero_group is None else math.gcd(job.plan.zero_group, ranks)


def _beside(job: Job, *, expert: bool) -> float:
    """Bytes an element of a gradient that lie beside it while it is summed: what goes and what comes
    (`plait.parallel.compress`, `plait.parallel.reducer`)."""
    plan, ranks, scatter = job.plan, _block(job, expert=expert), job.plan.zero > 0
    if ranks == 1:
        return 0.0
    kind = Compression.parse(plan.compress)
    if plan.node is not None and scatter:
        inner = math.gcd(plan.node, ranks)
        return (4.0 if inner < ranks else 0.0) + 4.0 / inner
    if kind.kind == "half":
        return 4.0 + (0.0 if scatter else 4.0 / ranks)
    return 8.0 * kind.share * (1 + ranks) if kind.kind == "topk" else 0.0


def sums(job: Job, held: Part) -> tuple[float, float]:
    """Bytes of a rank's parameters ``held`` that error feedback keeps throughout, and of what lies beside the
    gradients when all of them are being summed at the step's end."""
    kept, ending = 0.0, 0.0
    for expert, size in ((False, held.dense + held.router - held.bias), (True, held.expert)):
        if _block(job, expert=expert) > 1 and Compression.parse(job.plan.compress).kind in ("topk", "powersgd"):
            kept += 4.0 * size
        if job.plan.zero < 2:
            ending += size * _beside(job, expert=expert)
    return kept, ending


def _shared(job: Job) -> tuple[bool, bool]:
    """Whether dense tensors and experts are shared by several ranks."""
    dense, expert = (state_ranks(job.plan, job.mesh, expert=expert) for expert in (False, True))
    return dense > 1, expert > 1


def standing(job: Job, parts: Mapping[str, Part], held: Mapping[str, int]) -> float:
    """Bytes of buffers that a framework keeps throughout a step."""
    practice = job.practice
    if is_plait(practice):
        return 0.0
    habits, total = habits_of(practice), 0.0
    if habits.half_gradients:
        total += habits.half_gradients * sum(parts[part].all * count for part, count in held.items() if part in parts)
    if not habits.dummies or practice.attention != "flash":
        return total
    # Experts of a layer have one shape.
    moe, largest = job.model.moe, 0.0
    for name in ("dense", "moe"):
        if held.get(name) and name in parts:
            part = parts[name]
            experts = max(1, moe.num_experts // job.plan.ep) if moe is not None else 1
            largest = max(largest, 2.0 * (part.dense - part.vectors + part.expert / experts))
    return total + largest


def optimizer_work(job: Job, held: Part) -> float:
    """Bytes that the update works with beside the state."""
    if is_plait(job.practice):
        return 0.0
    update = habits_of(job.practice).update
    mesh = job.mesh
    dense, expert = (state_ranks(job.plan, mesh, expert=expert) for expert in (False, True))
    return update * ((held.dense + held.router) / dense + held.expert / expert)


def reserve(job: Job, turns: float) -> float:
    """Bytes that allocator and device hold beside tensors; ``turns``: what a layer's steps work with, one by one."""
    kind = job.practice.memory_kind
    if kind == "device":
        return CONTEXT.value
    return turns * RESERVED.value if kind == "reserved" else 0.0
