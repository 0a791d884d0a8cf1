"""What is on a rank beside its state and activations: weights and gradients that come and go, copies, the allocator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from plait.planner.constants_memory import CONTEXT, RESERVED
from plait.planner.habits import habits_of
from plait.planner.job import Job
from plait.planner.parameters import Part, job_widths
from plait.planner.saved import is_plait
from plait.planner.state import state_ranks


@dataclass(frozen=True, kw_only=True)
class Passing:
    """Bytes that come and go in the actions of a stage, ZeRO 2 and 3."""

    weights: float = 0.0
    """Whole weights where backward begins."""
    gradients: float = 0.0
    """Whole gradients there."""
    later: float = 0.0
    """Both, between two layers further on."""


def passing(job: Job, parts: Mapping[str, Part], stage: Mapping[str, int]) -> Passing:
    """What comes and goes in the actions of a stage that holds ``stage`` of ``parts``.

    Of two neighbouring units (embedding, layers, last norm with head) one computes while the other comes or goes.
    Where backward begins its last units are there, with the gradients of what lies behind.
    """
    plan = job.plan
    if plan.zero < 2:
        return Passing()
    shared = _shared(job)
    every = [(parts[part], count) for part, count in stage.items() if part in parts]
    all_weights = sum(_whole(job, part, shared) * count for part, count in every)
    all_grads = sum(_grads(part, shared) * count for part, count in every)
    units = _units(parts, stage)
    weights = sum(_whole(job, unit, shared) for unit in units[-2:])
    gradients = sum(_grads(unit, shared) for unit in units[-2:][_behind(stage) :])
    if plan.zero == 2 and habits_of(job.practice).fsdp:
        # FSDP without resharding: half-precision weights and fp32 gradients of all layers, whole until the step ends.
        return Passing(weights=all_weights, gradients=all_grads)
    if plan.zero == 2:
        return Passing(gradients=max(gradients, min(2 * plan.bucket_mb * 2**20, all_grads)))
    layers = [parts[name] for name in ("dense", "moe") if name in parts and stage.get(name, 0) > 1]
    later = max((2 * _whole(job, unit, shared) + _grads(unit, shared) for unit in layers), default=0.0)
    if plan.gather == "step":
        return Passing(weights=all_weights, gradients=gradients)
    return Passing(weights=weights, gradients=gradients, later=later)


def _units(parts: Mapping[str, Part], stage: Mapping[str, int]) -> list[Part]:
    """A stage's units in forward order; of layers that are alike no more than two."""
    order = ("embed", "dense", "moe", "tail")
    return [parts[name] for name in order if name in parts for _ in range(min(2, stage.get(name, 0)))]


def _behind(stage: Mapping[str, int]) -> int:
    """How many of the last two units have no gradient yet in the backward of a stage's last layer."""
    return 0 if "tail" in stage else -1


def _whole(job: Job, part: Part, shared: tuple[int, int, int]) -> float:
    """Bytes of a unit's weights when they are whole."""
    dense, expert, router = shared
    width = 4.0 if job.plan.precision == "fp32" else 2.0
    return width * (part.dense * dense + part.expert * expert) + 4.0 * part.router * router


def _grads(part: Part, shared: tuple[int, int, int]) -> float:
    """Bytes of a unit's gradients when they are whole."""
    dense, expert, router = shared
    return 4.0 * (part.dense * dense + part.expert * expert + (part.router - part.bias) * router)


def _shared(job: Job) -> tuple[int, int, int]:
    """Whether dense tensors, experts and routers are shared by several ranks: 1 or 0."""
    widths = job_widths(job)
    alone = 4.0 if job.practice.grad_bytes is None else job.practice.grad_bytes
    dense, expert, router = (int(width.gradients < alone) for width in widths)
    return dense, expert, router


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
