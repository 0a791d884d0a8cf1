"""Peak memory of every pipeline rank of a job, by moment of the step and by kind. No torch.

Units: bytes. A rank's peak is the largest of its moments: the state that stays (weights, gradients, optimizer state),
what its live microbatches keep for their backward, what the current one works with, and what the allocator and the
device hold beside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import final

import numpy as np

from plait.core.plan import Plan
from plait.parallel.layout import placement, stage_bounds, stage_layers
from plait.planner.job import Job
from plait.planner.live import Live, filled, live_of
from plait.planner.parameters import elements, parts_of, stage_parts, state_bytes
from plait.planner.passing import NOTHING, ending, optimizer_work, passing, reserve, sharing_of, standing, sums
from plait.planner.saved import cpu_of, local_of
from plait.planner.stage_memory import StageMemory, same_layers, stage_memory
from plait.planner.whole import Whole


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
    return Ranks(job).report()


def rank_memory(job: Job, pp: int) -> RankMemory:
    """What pipeline rank ``pp`` of ``job`` holds at its fullest."""
    return Ranks(job).of(pp)


@lru_cache(maxsize=4096)
def _alone(plan: Plan) -> Plan:
    """The plan without what decides no bytes of a stage, so that plans share what was computed."""
    return replace(
        plan,
        schedule="1f1b",
        virtual=1,
        stages=None,
        live=None,
        node=None,
        compress="none",
        bucket_mb=25.0,
        zero=0,
        zero_group=None,
        gather="use",
        pp=1,
        dp=None,
    )


@final
class Ranks:
    """The pipeline ranks of one job, which share what they have in common."""

    def __init__(self, job: Job) -> None:
        model, plan = job.model, job.plan
        self._job = job
        self._bounds = stage_bounds(stage_layers(model, plan))
        self._alone = _alone(plan)
        self._at = local_of(model, self._alone, job.seq, cpu_of(job))
        self._parts = parts_of(model, plan)
        # Equal stages are the same in the middle: of their place in the model they know nothing.
        self._alike = same_layers(model) and ":" not in plan.recompute
        self._sharing = sharing_of(job)
        self._homes = placement(plan)
        self._stages: dict[tuple[int, int, int, int], StageMemory] = {}
        self._comings: dict[tuple[StageMemory, bool], _Coming] = {}
        self._states: dict[tuple[tuple[str, int], ...], _State] = {}

    def of(self, pp: int) -> RankMemory:
        """Pipeline rank ``pp`` at its fullest."""
        job = self._job
        limit = job.practice.live_limit
        live = live_of(job.plan, job.microbatches, pp) if limit is None else filled(min(limit, job.microbatches), pp)
        count = len(self._bounds)
        held = [stage_parts(job.model, *self._bounds[index], count, index) for index in live.stages]
        stages = [self._stage(index) for index in live.stages]
        steady = job.microbatches > live.warm
        coming = [self._coming(one, stage, live, steady) for one, stage in zip(held, stages, strict=True)]
        return _fullest(job, pp, live, stages, self._state(held), coming)

    def report(self) -> MemoryReport:
        """Every pipeline rank."""
        return MemoryReport(ranks=tuple(self.of(pp) for pp in range(self._job.plan.pp)))

    def _coming(self, held: Mapping[str, int], stage: StageMemory, live: Live, steady: bool) -> _Coming:
        if (stage, steady) not in self._comings:
            job, ends = self._job, {0, len(self._bounds) - 1}
            both = "" if not job.model.tied or not ends <= set(live.stages) else "stage" if len(ends) == 1 else "rank"
            beside = ending(job, self._sharing, held, stage.units, both=both)
            whole = passing(job, self._sharing, held, stage.units, both=both)
            # How much of a full rank has gone before a stage's second backward; None: there is none.
            # (Of several stages one's follows another's.)
            gone = None if job.microbatches == 1 else 0.0 if steady or len(live.stages) > 1 else stage.keeps
            self._comings[stage, steady] = _Coming(
                work=_work(stage, whole, split=live.split, steady=steady, gone=gone),
                last=0.0 if beside is None else stage.keeps + float((stage.curves.back + beside).max()),
                kept=whole.kept,
            )
        return self._comings[stage, steady]

    def _stage(self, index: int) -> StageMemory:
        count = len(self._bounds)
        first, stop = self._bounds[index]
        if self._alike:
            first, stop = 0, stop - first
            if 0 < index < count - 1:
                index, count = 1, 3
        key = (first, stop, index, count)
        if key not in self._stages:
            job = self._job
            prompt = job.model.tied and self._homes[0] == self._homes[-1] and len(self._bounds) > 1
            self._stages[key] = stage_memory(job.model, self._alone, job.practice, self._at, *key, prompt)
        return self._stages[key]

    def _state(self, held: Sequence[Mapping[str, int]]) -> _State:
        job = self._job
        both: dict[str, int] = {}
        for one in held:
            for part, number in one.items():
                both[part] = both.get(part, 0) + number
        if "embed" in both:
            both.pop("tied", None)  # one rank has both ends: the tensor is there once
        if "tail" in both and job.practice.mtp_layers:
            kind = "dense" if job.model.moe_of(job.model.num_layers - 1) is None else "moe"
            both[kind] = both.get(kind, 0) + job.practice.mtp_layers
        key = tuple(both.items())
        if key not in self._states:
            every = elements(self._parts, both)
            if "tail" in both and job.practice.mtp_layers:
                # Two streams are joined to one by a product of each further layer; the embedding is looked up again.
                more = job.practice.mtp_layers * 2 * job.model.hidden_size**2 // job.plan.tp
                again = 0 if "embed" in both or job.model.tied else self._parts["embed"].dense
                every = replace(every, dense=every.dense + more + again)
            weights, gradients, optimizer = state_bytes(job, every)
            kept, ending = sums(job, every)
            base = weights + gradients + optimizer + kept + standing(job, self._parts, both)
            self._states[key] = _State(
                own=(weights, gradients, optimizer),
                base=base + 16.0 * job.microbatches * self._at.rows,
                summing=base + ending,
                finishing=base + optimizer_work(job, every),
            )
        return self._states[key]


@dataclass(frozen=True, kw_only=True)
class _Coming:
    """What comes and goes in the actions of a stage."""

    work: Mapping[str, float]
    """By kind of action: the most that it holds over what was there before."""
    last: float
    """The most that the last backward has, with what lies beside the gradients."""
    kept: float
    """Whole weights that stay between actions."""


@dataclass(frozen=True, kw_only=True)
class _State:
    """What stays on a rank."""

    own: tuple[float, float, float]
    """Weights, gradients, optimizer state."""
    base: float
    """While microbatches run: with the framework's buffers and the batches."""
    summing: float
    """While the last gradients are summed."""
    finishing: float
    """While the optimizer runs."""


def _fullest(
    job: Job, pp: int, live: Live, stages: Sequence[StageMemory], state: _State, coming: Sequence[_Coming]
) -> RankMemory:
    """The rank at its fullest moment; ``stages`` and ``coming`` are of ``live.stages``."""
    table = live.table
    keeps, waits = (np.array([getattr(stage, name) for stage in stages]) for name in ("keeps", "waits"))
    if len(stages) > 1:
        # What a stage gives to the next one here is that one's input.
        keeps -= [
            stage.arriving if index - 1 in live.stages else 0.0
            for index, stage in zip(live.stages, stages, strict=True)
        ]
    kept = table.live @ keeps
    if job.practice.offload:
        kept = np.where(table.backward, keeps[table.place], 0.0)  # the host has what the others keep
    whole = sum(one.kept for one in coming)
    work = {kind: np.array([one.work[kind] + whole - one.kept for one in coming]) for kind in table.of}
    if job.plan.schedule == "interleaved" and job.microbatches <= job.plan.pp and "B" in work:
        # One round: the backwards of a later stage are over, and its weights gone, when an earlier one's begin.
        behind = np.cumsum([0.0, *(one.kept for one in coming[:0:-1])])[::-1]
        work["B"] -= behind
    held = kept + table.waiting @ waits
    at: dict[str, tuple[float, int]] = {}
    for kind, places in table.of.items():
        sums = held[places] + work[kind][table.place[places]]
        most = int(sums.argmax())
        at[kind] = float(sums[most]), int(places[most])
    words = {"F": "forward", "B": "backward", "W": "weight gradient"}
    rows = [
        (f"{words[kind]} of microbatch {live.moments[place].microbatch}", state.base + size)
        for kind, (size, place) in at.items()
    ]
    if (summing := max(state.summing, *(state.base + one.last for one in coming))) > state.base:
        rows.append(("gradient sums", summing))
    rows.append(("optimizer", state.finishing))
    fullest = live.moments[max(at.values(), key=lambda row: row[0])[1]]
    kinds: dict[str, float] = {}
    for index, stage, n in zip(live.stages, stages, fullest.live, strict=True):
        # The forward under way is about to keep as much as the others.
        n += 1 if fullest.kind == "F" and index == fullest.stage else 0
        for kind, size in stage.kinds.items():
            kinds[kind] = kinds.get(kind, 0.0) + size * n
    waiting = sum(stage.waits * n for stage, n in zip(stages, fullest.waiting, strict=True))
    if waiting:
        kinds["weight gradients to come"] = waiting
    peak = max(size for _, size in rows)
    extra = reserve(job, max(stage.turns for stage in stages))
    logits = kinds.get("logits", 0.0)
    activations = sum(kinds.values()) - logits
    return RankMemory(
        pp=pp,
        weights=state.own[0],
        gradients=state.own[1],
        optimizer=state.own[2],
        activations=activations,
        logits=logits,
        buffers=max(0.0, peak - sum(state.own) - activations - logits),
        reserve=extra,
        peak=peak + extra,
        moments=tuple((what, size + extra) for what, size in rows),
        kinds=kinds,
    )


def _work(stage: StageMemory, coming: Whole, *, split: bool, steady: bool, gone: float | None) -> Mapping[str, float]:
    """The most that F, B and W hold over what was there before. A split backward's gradients are made in W.

    ``steady``: forwards follow backwards, which leave what they reduced last; ``gone``: see `Ranks`.
    """
    arriving = stage.arriving if steady else 0.0
    if coming is NOTHING:
        back = stage.split if split else stage.backward
        return {"F": stage.forward, "B": back + arriving, "W": stage.late + arriving}
    curves = stage.curves
    curve = curves.split if split else curves.back
    most = float((curve + coming.back).max())
    if gone is not None:
        most = max(most, float((curve + coming.again).max()) - gone)
    return {
        "F": max(float((curves.fore + coming.fore).max()), stage.keeps) + (coming.rest if steady else 0.0),
        "B": max(most, 0.0) + arriving,
        "W": max(float((curves.late + coming.late).max()), 0.0) + arriving,
    }
