"""Lower bounds on the peak memory of many pipelines at once: telling moments of telling ranks, as matrices.

A row is a moment of one rank (see `plait.planner.live`): how many layers of each kind its live microbatches keep, and
what the action that begins works with. Which moments there are depends on the number of microbatches alone, so that
cells share the rows; with a cell's bytes one product gives every row's peak, none above the memory model's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from plait.core.plan import Plan
from plait.models.config import ModelConfig
from plait.parallel.layout import stage_bounds, stage_layers
from plait.planner.activations import embedding_steps, head_steps, layer_steps
from plait.planner.job import Practice
from plait.planner.live import Live, Moment, filled, live_of
from plait.planner.parameters import Part
from plait.planner.pipes import Floats, Pipe
from plait.planner.saved import Local
from plait.planner.space import SCHEDULES
from plait.planner.stage_memory import Run, keeps_output, run_of
from plait.schedule.placement import placement_of

Ints = NDArray[np.int64]

_IDLE, _FORWARD = 0, 1
"""Columns of what an action works with: a weight gradient, a forward; then backwards by the stage's last layer."""
NO_PART: Final = 5
"""Beside the parts embed, dense, moe, tail, tied."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Moments of the telling ranks of all pipelines."""

    pipe: Ints
    rank: Ints
    """Of all ranks of all pipelines, one after the other."""
    starts: Ints
    """The first row of each pipeline that has some."""
    held: Floats
    """Of the rank: layers of each kind, embedding, tail, tied embedding [rows, kinds + 3]."""
    kept: Floats
    """By live microbatches: layers of each kind, embeddings, heads, outputs of stages [rows, kinds + 3]."""
    waiting: Floats
    """By microbatches whose weight gradient waits: the same without outputs, which have none [rows, kinds + 3]."""
    most: Floats
    """Live microbatches of the stage that has most: what recomputing one layer saves at most."""
    work: Ints
    """Column of what the action works with."""
    units: Ints
    """Parts whose weights are whole at ZeRO 3, at least [rows, 2]."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Bytes of a cell under one mode of recomputation."""

    keeps: Floats
    """[kinds + 3], as ``kept`` counts them."""
    waits: Floats
    work: Floats


@lru_cache(maxsize=1 << 14)
def sizes_of(
    model: ModelConfig, plan: Plan, practice: Practice, at: Local, firsts: tuple[int, ...], mode: str
) -> Sizes:
    """Of layers ``firsts``, one of each kind, and of both ends."""
    runs = [run_of(layer_steps(model, plan, practice, at, layer, mode), 1, at) for layer in firsts]
    last = head_steps(model, plan, practice, at)
    if model.tied:  # where both ends are on one rank nothing of the head waits
        last = tuple(replace(step, waits=0.0) for step in last)
    head = run_of(last, 1, at)
    embed = run_of(embedding_steps(model, plan, practice, at), 1, at)
    output = at.stream if keeps_output(practice) else 0.0
    # Layers that predict further tokens lie between the others and the head.
    apart = practice.mtp_layers > 0
    inner, split = (_works(runs, head, at, split=split, apart=apart) for split in (False, True))
    return Sizes(
        keeps=np.array([*(run.keeps for run in runs), embed.keeps, head.keeps, output]),
        waits=np.array([*(run.waits for run in runs), embed.waits, head.waits, 0.0]),
        # A forward that ends has its result twice: with what it keeps, and on its way.
        work=np.maximum(np.array([0.0, 2 * at.stream - output, *inner, *split]), 0.0),
    )


def _works(runs: Sequence[Run], head: Run, at: Local, *, split: bool, apart: bool) -> list[float]:
    """In a backward, over what is kept: of a stage whose last layer is of each kind or none; then of the last stage."""
    layers = [(run.split if split else run.inner) + at.stream for run in runs]
    first, after = (head.split, head.waits - head.keeps) if split else (head.inner, -head.keeps)
    return [*layers, 0.0, *(first if apart else max(first, after + layer) for layer in layers), first]


@final
class Peaks:
    """The rows of ``pipes``; layers are of ``kinds``, numbers below ``count - 2``."""

    def __init__(self, pipes: Sequence[Pipe], model: ModelConfig, kinds: Sequence[int], practice: Practice) -> None:
        self._pipes, self._model, self._kinds, self._practice = pipes, model, kinds, practice
        self._count = max(kinds) + 1
        self._offsets = np.cumsum([0, *(pipe.pp for pipe in pipes)])
        self._known: dict[bytes, Rows] = {}
        self._ones: dict[tuple[int, int], tuple[list[list[float]], list[list[int]]]] = {}

    def rows(self, counts: Floats) -> Rows:
        """With ``counts`` microbatches of each pipeline; infinite: it cannot be."""
        key = counts.tobytes()
        if key not in self._known:
            floats: list[list[float]] = []
            numbers: list[list[int]] = []
            for index, count in enumerate(counts.tolist()):
                if count < math.inf:
                    more, other = self._of(index, int(count))
                    floats += more
                    numbers += other
            self._known[key] = self._join(np.array(floats), np.array(numbers, dtype=np.int64))
        return self._known[key]

    def _join(self, floats: Floats, numbers: Ints) -> Rows:
        n = self._count + 3
        pipe = numbers[:, 0]
        return Rows(
            pipe=pipe,
            rank=numbers[:, 1],
            starts=np.flatnonzero(np.diff(pipe, prepend=-1)),
            held=floats[:, :n],
            kept=floats[:, n : 2 * n],
            waiting=floats[:, 2 * n : 3 * n],
            most=floats[:, 3 * n],
            work=numbers[:, 2],
            units=numbers[:, 3:],
        )

    def _of(self, index: int, microbatches: int) -> tuple[list[list[float]], list[list[int]]]:
        pipe = self._pipes[index]
        # In steady state more microbatches are live under gpipe alone (`plait.planner.live`).
        if pipe.schedule != "gpipe" and microbatches % pipe.pp == 0:
            microbatches = min(microbatches, 4 * pipe.pp)
        key = (index, microbatches)
        if key not in self._ones:
            floats: list[list[float]] = []
            numbers: list[list[int]] = []
            stages = self._stages(pipe)
            along_v = pipe.schedule.endswith("-v")
            homes = placement_of(pipe.schedule if along_v else "1f1b", pipe.pp, pipe.virtual)
            for rank in sorted({0, min(1, pipe.pp - 1), pipe.pp - 1}):
                mine = tuple(stage for stage, home in enumerate(homes) if home == rank)
                live = self._live(pipe, microbatches, rank, mine)
                held = np.sum([stages[stage] for stage in live.stages], axis=0)
                for moment in live.moments:
                    row, units = self._row(stages, live.stages, moment, split=live.split)
                    floats.append([*self._tied(held, len(stages)), *row])
                    numbers.append([index, int(self._offsets[index]) + rank, *units])
            self._ones[key] = floats, numbers
        return self._ones[key]

    def _stages(self, pipe: Pipe) -> list[list[float]]:
        """Of each stage: layers of each kind, embedding, head."""
        cut = stage_layers(self._model, Plan(pp=pipe.pp, virtual=pipe.virtual, stages=pipe.stages))
        found = []
        for stage, (first, stop) in enumerate(stage_bounds(cut)):
            row = [0.0] * self._count
            for layer in range(first, stop):
                row[self._kinds[layer]] += 1
            found.append([*row, float(stage == 0), float(stage == len(cut) - 1)])
        return found

    def _tied(self, held: Floats, stages: int) -> list[float]:
        alone = self._model.tied and stages > 1 and held[-1] and not held[-2]
        return [*held.tolist(), float(alone)]

    def _live(self, pipe: Pipe, microbatches: int, rank: int, mine: tuple[int, ...]) -> Live:
        limit = self._practice.live_limit
        if limit is not None:
            return filled(min(limit, microbatches), rank)
        if pipe.schedule not in SCHEDULES:
            # Searched ones and files are not walked here: what stays is bound enough.
            nothing = (0,) * len(mine)
            moment = Moment(kind="W", stage=mine[-1], microbatch=0, live=nothing, waiting=nothing)
            return Live(stages=mine, moments=(moment,), split=False)
        if pipe.schedule == "interleaved" and pipe.virtual > 1:
            return _looped(pipe, microbatches, rank, mine)
        plan = Plan(pp=pipe.pp, schedule=pipe.schedule, virtual=pipe.virtual)
        return live_of(plan, microbatches, rank)

    def _row(
        self, stages: list[list[float]], mine: Sequence[int], moment: Moment, *, split: bool
    ) -> tuple[list[float], list[int]]:
        """(kept, waiting, most; work, units)."""
        n, last = self._count, len(stages) - 1
        kept, waiting = np.zeros(n + 3), np.zeros(n + 3)
        most = 0.0
        for stage, live, later in zip(mine, moment.live, moment.waiting, strict=True):
            if moment.kind == "F" and stage == moment.stage:
                live += 1  # what it keeps is there when it ends
            if self._practice.offload:
                live = 1 if moment.kind == "B" and stage == moment.stage else 0
            one = np.array([*stages[stage], float(stage != last)])
            kept += live * one
            kept[-1] -= live * (stage - 1 in mine)  # its input is the output of the stage before
            waiting[:-1] += later * one[:-1]
            most = max(most, float(live) if sum(stages[stage][:n]) else 0.0)
        return [*kept.tolist(), *waiting.tolist(), most], [
            self._work(stages, moment, split=split),
            *self._units(stages, moment),
        ]

    def _work(self, stages: list[list[float]], moment: Moment, *, split: bool) -> int:
        if moment.kind == "W":
            return _IDLE
        if moment.kind == "F":
            return _FORWARD if moment.stage < len(stages) - 1 else _IDLE
        n, stage = self._count, moment.stage
        cut = np.cumsum([sum(one[:n]) for one in stages]).astype(int)
        last = self._kinds[int(cut[stage]) - 1] if sum(stages[stage][:n]) else n
        along = (n + 1) * (2 * split + (stage == len(stages) - 1))
        return 2 + along + last

    def _units(self, stages: list[list[float]], moment: Moment) -> list[int]:
        """Two parts whose weights are whole whichever of the moment's steps is the fullest (`plait.planner.whole`)."""
        n, model, stage = self._count, self._model, stages[moment.stage]
        experts = [model.moe_of(self._kinds.index(kind)) is not None for kind in range(n)]
        # Backward does not read the embedding; in both the head's and the last layer's that layer is whole.
        backward = moment.kind == "B"
        parts = [] if backward else [0] * int(stage[n])
        parts += [1] * min(2, int(sum(stage[kind] for kind in range(n) if not experts[kind])))
        parts += [2] * min(2, int(sum(stage[kind] for kind in range(n) if experts[kind])))
        parts += [] if backward else [3] * int(stage[n + 1])
        if moment.kind == "W":
            return [NO_PART, NO_PART]
        return [NO_PART, *parts[-1:]] if backward and stage[n + 1] and parts else [NO_PART, NO_PART, *parts][-2:]


def _looped(pipe: Pipe, microbatches: int, rank: int, mine: tuple[int, ...]) -> Live:
    """Interleaved 1F1B as its first backward begins (see `plait.schedule.generate.interleaved`)."""
    virtual = pipe.virtual
    groups = max(1, microbatches // pipe.pp)
    bounds = [math.ceil(index * microbatches / groups) for index in range(groups + 1)]
    sizes = np.diff(bounds)
    warmup = 2 * (pipe.pp - 1 - rank) + (virtual - 1) * int(sizes.max())
    turns = np.concatenate([np.repeat(np.arange(virtual), size) for size in sizes.tolist()[:4]])
    live = np.bincount(turns[: warmup + 1], minlength=virtual)
    moment = Moment(kind="B", stage=mine[-1], microbatch=0, live=tuple(live.tolist()), waiting=tuple(0 for _ in mine))
    return Live(stages=mine, moments=(moment,), split=False)


def parts_table(parts: Mapping[str, Part]) -> Floats:
    """Dense, expert, router and untrained elements of embed, dense, moe, tail, tied, and of nothing [6, 4]."""
    some = [parts.get(name, Part()) for name in ("embed", "dense", "moe", "tail", "tied")]
    return np.array([*((one.dense, one.expert, one.router, one.bias) for one in some), (0, 0, 0, 0)], dtype=np.float64)
