"""What is on a rank beside its state and activations: weights and gradients that come and go, copies, the allocator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from plait.planner.activations import is_plait
from plait.planner.constants_memory import CONTEXT, RESERVED
from plait.planner.job import Job
from plait.planner.parameters import Part, job_widths


def passing(job: Job, parts: Mapping[str, Part], held: Sequence[Mapping[str, int]]) -> tuple[float, float]:
    """Bytes in (F, B) of whole weights and gradients that ranks share, ZeRO 2 and 3; ``held``: parts of each stage.

    Of two neighbouring units (embedding, layers, last norm with head) one computes while the other comes or goes.
    """
    plan = job.plan
    if plan.zero < 2:
        return 0.0, 0.0
    weights = gradients = together = 0.0
    for stage in held:
        units = [
            parts[part]
            for part in ("embed", "dense", "moe", "tail")
            for _ in range(min(2, stage.get(part, 0)))
            if part in parts
        ]
        pairs = list(zip(units, units[1:], strict=False)) or [(unit, Part()) for unit in units]
        weights = max([weights, *(_whole(job, one) + _whole(job, other) for one, other in pairs)])
        gradients = max([gradients, *(_grads(job, one) + _grads(job, other) for one, other in pairs)])
        together = max(together, sum(_grads(job, parts[part]) * n for part, n in stage.items() if part in parts))
    if plan.zero == 2:
        return 0.0, max(gradients, min(2 * plan.bucket_mb * 2**20, together))
    if plan.gather == "step":
        weights = sum(_whole(job, parts[part]) * n for stage in held for part, n in stage.items() if part in parts)
    return weights, weights + gradients


def _whole(job: Job, part: Part) -> float:
    """Bytes of a unit's weights when they are whole."""
    dense, expert, router = _shared(job)
    width = 4.0 if job.plan.precision == "fp32" else 2.0
    return width * (part.dense * dense + part.expert * expert) + 4.0 * part.router * router


def _grads(job: Job, part: Part) -> float:
    """Bytes of a unit's gradients when they are whole."""
    dense, expert, router = _shared(job)
    return 4.0 * (part.dense * dense + part.expert * expert + (part.router - part.bias) * router)


def _shared(job: Job) -> tuple[int, int, int]:
    """Whether dense tensors, experts and routers are shared by several ranks: 1 or 0."""
    widths = job_widths(job)
    alone = 4.0 if job.practice.grad_bytes is None else job.practice.grad_bytes
    dense, expert, router = (int(width.gradients < alone) for width in widths)
    return dense, expert, router


def standing(job: Job, parts: Mapping[str, Part], held: Mapping[str, int]) -> float:
    """Bytes of buffers that a framework keeps throughout a step."""
    if is_plait(job.practice) or job.practice.framework != "megatron" or job.practice.attention != "flash":
        return 0.0
    # Transformer Engine keeps an unused weight gradient of every shape (its gradients are fused into the buffers);
    # experts of a layer have one shape.
    moe = job.model.moe
    total = 0.0
    for name in ("dense", "moe"):
        if held.get(name) and name in parts:
            part = parts[name]
            experts = max(1, moe.num_experts // job.plan.ep) if moe is not None else 1
            total = max(total, 2.0 * (part.dense - part.vectors + part.expert / experts))
    return total


def optimizer_work(job: Job, held: Part) -> float:
    """Bytes that the update works with beside the state."""
    return 0.0


def reserve(job: Job, peak: float, moving: float) -> float:
    """Bytes that the allocator and the device hold when ``peak`` are in use, ``moving`` of them come and go."""
    kind = job.practice.memory_kind
    if kind == "allocated":
        return 0.0
    extra = moving * RESERVED.value
    return extra + (CONTEXT.value if kind == "device" else 0.0)
