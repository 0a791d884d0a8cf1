"""What follows a step's microbatches on a rank: reduction of gradients, gathers of weights, the optimizer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from plait.core.plan import Plan
from plait.planner.job import Job
from plait.planner.kernels import Machine
from plait.planner.overlap import Share, under
from plait.planner.pace import Paced, launch_of
from plait.planner.saved import is_plait
from plait.planner.stages import Stage
from plait.planner.weights import tensors_of
from plait.planner.wires import Group, collective, laid, nested


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
    width = _width(job, bool(table.of("gather_low", practice.framework)))
    kept = practice.grad_bytes or 4.0
    state = practice.optimizer_bytes or (8.0 if plan.precision == "fp32" else 12.0)
    dense, experts = sum(stage.dense for stage in stages), sum(stage.experts for stage in stages)
    layers = round(job.model.num_layers * len(stages) / plan.stage_count)
    run = mesh.cp * mesh.tp
    shared = laid(mesh.dp * mesh.cp, mesh.tp, run, mesh.apart)
    copies = laid(mesh.expert_sizes["edp"], mesh.ep * mesh.etp, run, mesh.apart)
    forward = sum(stage.forward for stage in paced)
    backward = sum(stage.backward + stage.weight for stage in paced)
    contention, usable = table.of("contention", family), table.of("hidden_share", family)
    zero = plan.zero
    calls, copying = _messages(machine, job, layers)
    bucket = table.of("bucket", practice.framework)
    grads = across = weights = 0.0
    owners = 0
    for count, group in ((dense, shared), (experts, copies)):
        if not count:
            continue
        inner, outer = nested(group, _block(plan, group))
        if zero == 0:
            grads += _in_parts(machine, "all_reduce", kept * count, group, math.ceil(kept * count / bucket))
            continue
        grads += _in_parts(machine, "reduce_scatter", kept * count, inner, calls)
        across += _in_parts(machine, "all_reduce", kept * count / inner.size, outer, calls)
        weights += _in_parts(machine, "all_gather", width * count, inner, calls)
        grads += copying * (inner.size if inner.size > 1 else 0)
        weights += copying * (inner.size if inner.size > 1 else 0)
        owners = max(owners, inner.size)
    m = job.microbatches
    shares = dense / _block(plan, shared) + experts / _block(plan, copies)
    moved = shares * (2 * state + kept + width) * table.of("optimizer_passes", family)
    update = moved / machine.optimizer_bandwidth
    # plait sums over copies of the state once a step, and from ZeRO 2 on reduces each microbatch's gradients. It waits
    # for these sums, and after the optimizer for weights that stay, with nothing to do meanwhile.
    own = is_plait(practice)
    beside = Share(exposed=across, hidden=0.0, slowing=0.0) if own else _NOTHING
    across = 0.0 if own else across
    if zero == 3:
        usable = table.of("prefetch_share", family)
        # Every microbatch gathers the weights twice (forward, backward) and reduces its gradients.
        once = plan.gather == "step"
        window = usable * (forward if once else m * (forward + backward))
        pull = under(weights if once else 2 * weights * m, window if practice.overlap_weights else 0.0, contention)
        left = usable * m * (forward + backward) - pull.hidden
        push = under((grads + across) * m, max(0.0, left) if practice.overlap_grads else 0.0, contention)
        return Updates(grads=_both(push, beside), weights=pull, optimizer=update)
    window = usable * backward if practice.overlap_grads else 0.0
    push = _both(under(grads + across, window, contention), beside)
    if zero == 2 and own:
        push = _both(push, under(grads * (m - 1), window * (m - 1), contention))
    pull = under(weights, usable * forward if practice.overlap_weights and not own else 0.0, contention)
    pull = _both(pull, Share(exposed=owners * table.of("owner", practice.framework), hidden=0.0, slowing=0.0))
    return Updates(grads=push, weights=pull, optimizer=update)


_NOTHING = Share(exposed=0.0, hidden=0.0, slowing=0.0)


def _block(plan: Plan, group: Group) -> int:
    """Ranks of ``group`` that share state (`plait.parallel.fold`)."""
    return 1 if plan.zero == 0 else math.gcd(plan.zero_group or group.size, group.size)


def _width(job: Job, low: bool) -> float:
    """Bytes of a gathered weight; ``low``: those of 8-bit products go in 8 bits."""
    if job.plan.zero == 3 and job.plan.precision == "fp8" and low:
        return 1.0
    return 4.0 if job.plan.precision == "fp32" else 2.0


def _messages(machine: Machine, job: Job, layers: int) -> tuple[int, float]:
    """Messages that a rank's weights go in, and the host's seconds of copying one rank's share of them."""
    table, framework, zero = machine.table, job.practice.framework, job.plan.zero
    # Under zero=3 every layer's weights and gradients are messages of their own.
    calls = max(1, layers) if zero == 3 else 1
    copying = table.of("shard_copies", framework) * launch_of(machine, job.practice) if zero else 0.0
    if copying:
        # Shards that are lists of tensors are copied one by one.
        every, matrices = tensors_of(job.model)
        own = zero == 3 and table.of("own_gathers", framework)
        copying *= layers * (matrices if own else every)
        calls = max(1, round(layers * matrices)) if own else calls
    return calls, copying


def _both(one: Share, other: Share) -> Share:
    return Share(
        exposed=one.exposed + other.exposed, hidden=one.hidden + other.hidden, slowing=one.slowing + other.slowing
    )


def _in_parts(machine: Machine, op: str, size: float, group: Group, calls: int) -> float:
    """Seconds of ``size`` bytes in so many calls: no less than in one."""
    if calls <= 1:
        return collective(machine, op, size, group)
    return max(collective(machine, op, size, group), calls * collective(machine, op, size / calls, group))
