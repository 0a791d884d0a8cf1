"""What follows a step's microbatches on a rank: reduction of gradients, gathers of weights, the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plait.core.plan import Plan
from plait.planner.job import Job
from plait.planner.kernels import Machine
from plait.planner.overlap import Share, under
from plait.planner.pace import Paced
from plait.planner.stages import Stage
from plait.planner.wires import Group, collective


@dataclass(frozen=True, kw_only=True, slots=True)
class Updates:
    """Gradients, weights and the optimizer of one rank: seconds of a step beside the pipeline."""

    grads: Share
    weights: Share
    optimizer: float


def updates(machine: Machine, job: Job, stages: Sequence[Stage], paced: Sequence[Paced]) -> Updates:
    """Reduction of gradients, gathers of weights, and the update of one pipeline rank."""
    plan, practice, table, family = job.plan, job.practice, machine.table, machine.family
    mesh = job.mesh
    width = 4.0 if plan.precision == "fp32" else 2.0
    if plan.zero == 3 and plan.precision == "fp8" and table.of("gather_low", practice.framework):
        width = 1.0
    kept = practice.grad_bytes or 4.0
    state = practice.optimizer_bytes or (8.0 if plan.precision == "fp32" else 12.0)
    dense, experts = sum(stage.dense for stage in stages), sum(stage.experts for stage in stages)
    layers = round(job.model.num_layers * len(stages) / plan.stage_count)
    shared = Group(size=mesh.dp * mesh.cp, stride=mesh.tp)
    copies = Group(size=mesh.expert_sizes["edp"], stride=mesh.ep * mesh.etp)
    forward = sum(stage.forward for stage in paced)
    backward = sum(stage.backward + stage.weight for stage in paced)
    contention, usable = table.of("contention", family), table.of("hidden_share", family)
    zero = plan.zero
    grads = weights = 0.0
    owners = 0
    for count, group in ((dense, shared), (experts, copies)):
        if not count:
            continue
        inner, outer = _nested(plan, group)
        # Under zero=3 every layer's weights and gradients are messages of their own.
        calls = max(1, layers) if zero == 3 else 1
        if zero == 0:
            grads += collective(machine, "all_reduce", kept * count, group)
            continue
        grads += calls * collective(machine, "reduce_scatter", kept * count / calls, inner)
        grads += calls * collective(machine, "all_reduce", kept * count / inner.size / calls, outer)
        weights += calls * collective(machine, "all_gather", width * count / calls, inner)
        owners = max(owners, inner.size)
    m = job.microbatches
    shares = dense / (shared.size if zero else 1) + experts / (copies.size if zero else 1)
    if plan.zero_group and zero:
        shares = dense / min(plan.zero_group, shared.size) + experts / min(plan.zero_group, max(copies.size, 1))
    moved = shares * (2 * state + kept + width) * table.of("optimizer_passes", family)
    update = moved / machine.optimizer_bandwidth
    if zero == 3:
        usable = table.of("prefetch_share", family)
        # Every microbatch gathers the weights twice (forward, backward) and reduces its gradients.
        pull = under(
            2 * weights * m, usable * m * (forward + backward) if practice.overlap_weights else 0.0, contention
        )
        left = usable * m * (forward + backward) - pull.hidden
        push = under(grads * m, max(0.0, left) if practice.overlap_grads else 0.0, contention)
        return Updates(grads=push, weights=pull, optimizer=update)
    push = under(grads, usable * backward if practice.overlap_grads else 0.0, contention)
    pull = under(weights, usable * forward if practice.overlap_weights else 0.0, contention)
    sent = owners * table.of("owner", practice.framework)
    pull = Share(exposed=pull.exposed + sent, hidden=pull.hidden, slowing=pull.slowing)
    return Updates(grads=push, weights=pull, optimizer=update)


def _nested(plan: Plan, group: Group) -> tuple[Group, Group]:
    """The ranks that share state, and those that copy it."""
    inner = min(plan.zero_group or group.size, group.size)
    return Group(size=inner, stride=group.stride), Group(size=group.size // inner, stride=group.stride * inner)
