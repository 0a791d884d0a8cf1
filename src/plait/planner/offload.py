"""Activations that go to the host's memory in forward and come back in backward: seconds that compute does not hide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from plait.parallel.layout import stage_bounds, stage_layers
from plait.planner.activations import layer_steps, total
from plait.planner.job import Job
from plait.planner.kernels import Machine
from plait.planner.overlap import under
from plait.planner.pace import Paced
from plait.planner.saved import cpu_of, local_of


def shown(machine: Machine, job: Job, held: Sequence[int], paced: Sequence[Paced]) -> float:
    """Seconds of a step that a rank waits for the copies of its stages ``held``, whose phases take ``paced``.

    A layer's activations leave while the next ones compute and come back likewise; copies are the work of engines of
    their own, which slow nothing.
    """
    plan, practice = job.plan, job.practice
    rate = machine.table.of("host_link", machine.family)
    alone = replace(plan, pp=1, dp=None, virtual=1, stages=None, zero=0, zero_group=None)
    at = local_of(job.model, alone, job.seq, cpu_of(job))
    bounds = stage_bounds(stage_layers(job.model, plan))
    waited = 0.0
    for stage, pace in zip(held, paced, strict=True):
        kept = sum(
            total(layer_steps(job.model, alone, practice, at, layer, plan.recompute_of(layer)))
            for layer in range(*bounds[stage])
        )
        copy = practice.offload_share * kept / rate
        waited += under(copy, pace.forward, 0.0).exposed + under(copy, pace.backward + pace.weight, 0.0).exposed
    return waited * job.microbatches
