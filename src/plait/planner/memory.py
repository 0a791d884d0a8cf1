"""Peak memory of every pipeline rank of a job, by moment of the step and by kind. No torch.

Units: bytes. A rank's peak is the largest of its moments: the state that stays (weights, gradients, optimizer state),
what its live microbatches keep for their backward, what the current one works with, and what the allocator and the
device hold beside.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from plait.core.plan import Plan
from plait.models.config import ModelConfig
from plait.parallel.layout import stage_bounds, stage_layers
from plait.planner.job import Job
from plait.planner.live import Live, Moment, filled, live_of
from plait.planner.parameters import elements, parts_of, stage_parts, state_bytes
from plait.planner.passing import Passing, optimizer_work, passing, reserve, standing
from plait.planner.saved import Local, cpu_of, local_of
from plait.planner.stage_memory import StageMemory, stage_memory


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes on the fullest rank of one pipeline coordinate."""

    pp: int
    weights: float
    gradients: float
    optimizer: float
    activations: float
    """Kept for backward by all live microbatches, at the fullest moment; logits not counted."""
    logits: float
    """Logits, their probabilities and gradient on the last stage."""
    buffers: float
    """Whole weights and gradients that come and go, communication buffers, what one operator works with."""
    reserve: float
    """What the allocator holds beyond what is used, and the device's own (context, libraries)."""
    peak: float
    """The most over the moments of the step, reserve included."""
    moments: tuple[tuple[str, float], ...]
    """Such as ("forward of microbatch 3", bytes) and ("optimizer", bytes)."""
    kinds: Mapping[str, float]
    """The activations of the fullest moment by kind: attention, mlp, norm, residual, logits, experts ..."""


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """One `RankMemory` a pipeline rank."""

    ranks: tuple[RankMemory, ...]

    @property
    def fullest(self) -> RankMemory:
        """The pipeline rank with the highest peak."""
        return max(self.ranks, key=lambda rank: rank.peak)

    @property
    def emptiest(self) -> RankMemory:
        """The pipeline rank with the lowest peak."""
        return min(self.ranks, key=lambda rank: rank.peak)


def memory(job: Job) -> MemoryReport:
    """What every pipeline rank of ``job`` holds at its fullest."""
    return MemoryReport(ranks=tuple(rank_memory(job, pp) for pp in range(job.plan.pp)))


def rank_memory(job: Job, pp: int) -> RankMemory:
    """What pipeline rank ``pp`` of ``job`` holds at its fullest."""
    bounds = stage_bounds(_layers(job.model, job.plan))
    limit = job.practice.live_limit
    live = live_of(job.plan, job.microbatches, pp) if limit is None else filled(min(limit, job.microbatches), pp)
    return _rank(job, pp, live, bounds)


@lru_cache(maxsize=1024)
def _layers(model: ModelConfig, plan: Plan) -> tuple[int, ...]:
    return stage_layers(model, plan)


def _rank(job: Job, pp: int, live: Live, bounds: tuple[tuple[int, int], ...]) -> RankMemory:
    model, plan, count = job.model, job.plan, len(bounds)
    at = local_of(model, plan, job.seq, cpu_of(job))
    mine = live.stages
    bare = _bare(plan)
    stages = {index: _stage(job, bare, at, bounds[index], index, count) for index in mine}
    parts = parts_of(model, bare)
    held = [stage_parts(model, *bounds[index], count, index) for index in mine]
    both: dict[str, int] = {}
    for one in held:
        for part, number in one.items():
            both[part] = both.get(part, 0) + number
    if "embed" in both:
        both.pop("tied", None)  # one rank has both ends: the tensor is there once
    if count - 1 in mine and job.practice.mtp_layers:
        kind = "dense" if model.moe_of(model.num_layers - 1) is None else "moe"
        both[kind] = both.get(kind, 0) + job.practice.mtp_layers
    weights, gradients, optimizer = state_bytes(job, elements(parts, both))
    coming = {index: passing(job, parts, stage) for index, stage in zip(mine, held, strict=True)}
    base = weights + gradients + optimizer + standing(job, parts, both)
    batches = 16.0 * job.microbatches * at.rows
    return _fullest(
        job,
        pp,
        live.moments,
        stages,
        state=(weights, gradients, optimizer),
        base=base + batches,
        coming=coming,
        finishing=base + optimizer_work(job, elements(parts, both)),
        split=live.split,
    )


def _stage(job: Job, bare: Plan, at: Local, bounds: tuple[int, int], index: int, count: int) -> StageMemory:
    """`stage_memory`, in words that equal stages share: of ZeRO and of the place in the middle it knows nothing."""
    model, (first, stop) = job.model, bounds
    alone = _alone(bare)
    if model.moe is None and model.window_from == 0 and ":" not in alone.recompute:
        first, stop = 0, stop - first
        if 0 < index < count - 1:
            index, count = 1, 3
    return stage_memory(model, alone, job.practice, at, first, stop, index, count)


@lru_cache(maxsize=4096)
def _alone(plan: Plan) -> Plan:
    return replace(plan, zero=0, zero_group=None, gather="use")


@lru_cache(maxsize=4096)
def _bare(plan: Plan) -> Plan:
    """The plan without what decides no bytes of a stage, so that plans share what was computed."""
    return replace(plan, schedule="1f1b", virtual=1, stages=None, live=None, node=None, compress="none", bucket_mb=25.0)


def _fullest(
    job: Job,
    pp: int,
    moments: tuple[Moment, ...],
    stages: Mapping[int, StageMemory],
    *,
    state: tuple[float, float, float],
    base: float,
    coming: Mapping[int, Passing],
    finishing: float,
    split: bool,
) -> RankMemory:
    """The rank at its fullest moment. ``base``: what stays; ``coming``: by stage; ``finishing``: the optimizer."""
    mine = sorted(stages)
    at: dict[str, tuple[float, Moment]] = {}
    for moment in moments:
        stage = stages[moment.stage]
        kept = sum(stages[index].keeps * n for index, n in zip(mine, moment.live, strict=True))
        if job.practice.offload:
            kept = stage.keeps if moment.kind == "B" else 0.0  # the host has what the others keep
        kept += sum(stages[index].waits * n for index, n in zip(mine, moment.waiting, strict=True))
        held = kept + _work(stage, coming[moment.stage], moment.kind, split=split)
        if moment.kind not in at or held > at[moment.kind][0]:
            at[moment.kind] = held, moment
    words = {"F": "forward", "B": "backward", "W": "weight gradient"}
    rows = [(f"{words[kind]} of microbatch {moment.microbatch}", base + held) for kind, (held, moment) in at.items()]
    rows.append(("optimizer", finishing))
    _, fullest = max(at.values(), key=lambda row: row[0])
    kinds: dict[str, float] = {}
    for index, n in zip(mine, fullest.live, strict=True):
        # The forward under way is about to keep as much as the others.
        n += 1 if fullest.kind == "F" and index == fullest.stage else 0
        for kind, size in stages[index].kinds.items():
            kinds[kind] = kinds.get(kind, 0.0) + size * n
    waiting = sum(stages[index].waits * n for index, n in zip(mine, fullest.waiting, strict=True))
    if waiting:
        kinds["weight gradients to come"] = waiting
    peak = max(size for _, size in rows)
    extra = reserve(job, max(stage.turns for stage in stages.values()))
    logits = kinds.get("logits", 0.0)
    activations = sum(kinds.values()) - logits
    return RankMemory(
        pp=pp,
        weights=state[0],
        gradients=state[1],
        optimizer=state[2],
        activations=activations,
        logits=logits,
        buffers=max(0.0, peak - sum(state) - activations - logits),
        reserve=extra,
        peak=peak + extra,
        moments=tuple((what, size + extra) for what, size in rows),
        kinds=kinds,
    )


def _work(stage: StageMemory, coming: Passing, kind: str, *, split: bool) -> float:
    """The most that an action holds over what was there before it. A split backward's gradients are made in W."""
    if kind == "W":
        return coming.gradients
    if kind == "F":
        return stage.forward + coming.weights
    work = stage.split if split else stage.backward
    gradients = 0.0 if split else coming.gradients
    return work + max(coming.weights + gradients, 0.0 if split else coming.later - stage.gone)
