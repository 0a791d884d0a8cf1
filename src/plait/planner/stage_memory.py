"""One virtual stage's activations: what a microbatch keeps in it, and the most that its F, B and W hold beside."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Final

import numpy as np

from plait.core.plan import Plan
from plait.models.config import ModelConfig
from plait.planner.activations import embedding_steps, head_steps, layer_steps
from plait.planner.habits import habits_of
from plait.planner.job import Practice
from plait.planner.recomputing import modes_of
from plait.planner.saved import Local, Step, is_plait
from plait.planner.whole import Floats, Unit


@dataclass(frozen=True, kw_only=True, eq=False)
class Curves:
    """Bytes over what was there before, at each step of a stage's actions; backward's steps from the last on."""

    fore: Floats
    back: Floats
    split: Floats
    """Of a B that is split."""
    late: Floats
    """Of W, over what waits."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StageMemory:
    """Bytes of one microbatch in one virtual stage."""

    keeps: float
    """Between its F and its B."""
    waits: float
    """Between its B and its W, where the backward is split."""
    forward: float
    """The most in F, over what was there before it."""
    backward: float
    """The most in B, over what was there before it."""
    split: float
    """The same of a B that is split."""
    kinds: Mapping[str, float]
    """``keeps`` by kind."""
    late: float
    """The most in W, over what waits for it."""
    arriving: float
    """What a forward takes from the stage before: comes meanwhile."""
    turns: float
    """What the steps of its largest layer work with, one after the other: memory that is taken and given back."""
    logits: float
    curves: Curves
    units: tuple[Unit, ...]


@dataclass(frozen=True, kw_only=True)
class Run:
    """Layers in a row that are alike."""

    steps: tuple[Step, ...]
    count: int
    keeps: float
    waits: float
    backs: tuple[float, ...]
    """In the backward of one of them, over what it keeps, step by step."""
    splits: tuple[float, ...]
    """The same of a split backward, in which what waits for the weight gradient stays."""

    @property
    def inner(self) -> float:
        """The most in a backward."""
        return max(self.backs)

    @property
    def split(self) -> float:
        """The most in a split one."""
        return max(self.splits)


_NOTHING: Final = Run(steps=(Step(kind="residual"),), count=1, keeps=0.0, waits=0.0, backs=(0.0,), splits=(0.0,))
"""Of a stage without layers."""


@lru_cache(maxsize=8192)
def stage_memory(
    model: ModelConfig,
    plan: Plan,
    practice: Practice,
    at: Local,
    first: int,
    stop: int,
    index: int,
    count: int,
    prompt: bool,
) -> StageMemory:
    """Of stage ``index`` of ``count``, which has layers ``first..stop``; ``prompt``: the head's weight gradient waits
    for no W (that of a tied weight whose other end is on the same rank)."""
    last, plait = index == count - 1, is_plait(practice)
    alike = _alike(model, plan, first, stop)
    runs = [run_of(layer_steps(model, plan, practice, at, layer, mode), n, at) for layer, mode, n in alike]
    parts = ["dense" if model.moe_of(layer) is None else "moe" for layer, _, _ in alike]
    if last and practice.mtp_layers:
        # Layers that predict further tokens, each with a projection of two streams to one and a head of its own.
        joined = Step(kind="norm", keeps=3 * at.stream)
        further = (joined, *layer_steps(model, plan, practice, at, model.num_layers - 1, "none"))
        runs.append(run_of((*further, *head_steps(model, plan, practice, at)), practice.mtp_layers, at))
        parts.append("dense" if model.moe_of(model.num_layers - 1) is None else "moe")
    if index == 0:
        runs.insert(0, run_of(embedding_steps(model, plan, practice, at), 1, at))
        parts.insert(0, "embed")
    head = _head(model, plan, practice, at, prompt=prompt) if last else None
    extra = _tables(model, at) if plait and stop > first else 0.0
    kinds: dict[str, float] = {}
    for run in [*runs, *([head] if head is not None else [])]:
        for step in run.steps:
            name = _NAMES.get(step.kind, step.kind)
            kinds[name] = kinds.get(name, 0.0) + step.keeps * run.count
    if plait:
        kinds["attention"] = kinds.get("attention", 0.0) + extra
    if not last and keeps_output(practice):
        kinds["residual"] = kinds.get("residual", 0.0) + at.stream
    everything = [*runs, *([head] if head is not None else [])] or [_NOTHING]
    # Operands that wait know whence they come, unless they were computed again: the input, which has its gradient.
    known = plait and index > 0 and any(step.kind != "residual" for run in everything for step in run.steps)
    source = 2 * at.stream if known else 0.0
    parts += ["tail"] * last or ["none"] * (not runs)
    curves = Curves(
        fore=_forward(everything, extra, at, last=last),
        back=_backward(everything, at, last=last, split=False, plait=plait),
        split=_backward(everything, at, last=last, split=True, plait=plait),
        late=_late(everything),
    )
    keeps = sum(kinds.values())
    return StageMemory(
        keeps=keeps,
        waits=sum(run.waits * run.count for run in everything) + source,
        forward=max(float(curves.fore.max()), keeps),
        backward=max(float(curves.back.max()), 0.0),
        split=max(float(curves.split.max()), 0.0),
        late=max(float(curves.late.max()), 0.0),
        arriving=at.stream if plait and index > 0 else 0.0,
        kinds=MappingProxyType(kinds),
        turns=max((sum(map(_turn, run.steps)) for run in runs), default=0.0),
        logits=kinds.get("logits", 0.0),
        curves=curves,
        units=tuple(
            Unit(part=part, steps=tuple(step.modules for step in run.steps), count=run.count)
            for part, run in zip(parts, everything, strict=True)
        ),
    )


def _turn(step: Step) -> float:
    # What a layer that is computed again makes goes where its first computation was.
    return step.forward + (0.0 if step.kind == "residual" else step.backward)


_NAMES = {
    "attention core": "attention",
    "mla up": "attention",
    "mlp act": "mlp",
    "moe act": "experts",
    "shared act": "shared",
    "dispatch": "experts",
}


def keeps_output(practice: Practice) -> bool:
    """Whether a stage keeps what it has sent: Megatron lets its memory go (Korthikanti et al. 2022, appendix B)."""
    return is_plait(practice) or habits_of(practice).keeps_output


def _tables(model: ModelConfig, at: Local) -> float:
    """plait's rotary tables, made anew for every microbatch: cos and sin of half a head, fp32."""
    if model.positions != "rope":
        return 0.0
    dims = model.head_dim if model.mla is None else model.mla.rope_dim
    return 4.0 * at.seq * dims


def _alike(model: ModelConfig, plan: Plan, first: int, stop: int) -> list[tuple[int, str, int]]:
    """Runs of layers that keep the same: (the first layer of the kind in the model, recomputation, how many)."""

    modes = modes_of(plan.recompute, model.num_layers)

    def kind(layer: int) -> tuple[bool, int | None, str]:
        return model.moe_of(layer) is not None, model.window_of(layer), modes[layer]

    if same_layers(model) and ":" not in plan.recompute:
        return [(0, plan.recompute, stop - first)] if stop > first else []
    return [
        (_first_of(model, key[0], key[1]), key[2], len(list(group)))
        for key, group in itertools.groupby(range(first, stop), kind)
    ]


def same_layers(model: ModelConfig) -> bool:
    """Whether all layers of the model are of one kind."""
    return model.window_from == 0 and (model.moe is None or not model.moe.dense_layers)


@lru_cache(maxsize=256)
def _first_of(model: ModelConfig, experts: bool, window: int | None) -> int:
    return next(
        layer
        for layer in range(model.num_layers)
        if (model.moe_of(layer) is not None) == experts and model.window_of(layer) == window
    )


@lru_cache(maxsize=8192)
def run_of(steps: tuple[Step, ...], count: int, at: Local) -> Run:
    keeps = sum(step.keeps for step in steps)
    gone, waiting, backs, splits = 0.0, 0.0, [], []
    for step in reversed(steps):
        backs.append(step.backward - gone)
        splits.append(step.backward - step.late - gone + waiting)
        gone += step.keeps
        waiting += step.waits
    return Run(steps=steps, count=count, keeps=keeps, waits=waiting, backs=tuple(backs), splits=tuple(splits))


def _head(model: ModelConfig, plan: Plan, practice: Practice, at: Local, *, prompt: bool) -> Run:
    steps = head_steps(model, plan, practice, at)
    return run_of(tuple(replace(step, waits=0.0, late=0.0) for step in steps) if prompt else steps, 1, at)


def _forward(runs: list[Run], extra: float, at: Local, *, last: bool) -> Floats:
    """In a forward: what has been kept so far, and what the step under way works with."""
    kept, found = extra, []
    for run in runs:
        own = np.cumsum([step.keeps for step in run.steps])
        work = np.array([step.forward + (0.0 if step.kind == "logits" else at.stream) for step in run.steps])
        found.append((kept + run.keeps * np.arange(run.count)[:, None] + own + work).ravel())
        kept += run.keeps * run.count
    curve = np.concatenate(found)
    # The stage's result, beside what made it.
    curve[-1] = max(curve[-1], kept + (0.0 if last else 2 * at.stream))
    return curve


def _backward(runs: list[Run], at: Local, *, last: bool, split: bool, plait: bool) -> Floats:
    """In a backward, from the last layer on: the gradient of the residual stream, and a step's own work.

    What came from the next stage stays to the end, beside the stream's gradient behind the first branch.
    """
    change, found = 0.0, []
    for place, run in enumerate(reversed(runs)):
        head = last and place == 0
        stream = 0.0 if head else at.stream
        step = (run.waits if split else 0.0) - run.keeps
        inner = np.array(run.splits if split else run.backs) + stream
        found.append((change + step * np.arange(run.count)[:, None] + inner).ravel())
        change += step * run.count
    curve = np.concatenate(found)
    if plait and not last:
        norms = [index for index, step in enumerate(reversed(runs[-1].steps)) if step.modules == ("norm2",)]
        curve[norms[0] + 1 if norms else len(curve) :] += at.stream
    return curve


def _late(runs: list[Run]) -> Floats:
    """In W: each step's operands go when its product is made."""
    gone, found = 0.0, []
    for run in reversed(runs):
        steps = run.steps[::-1]
        own = np.array([step.late for step in steps]) - np.cumsum([0.0, *(step.waits for step in steps[:-1])])
        found.append((own - gone - run.waits * np.arange(run.count)[:, None]).ravel())
        gone += run.waits * run.count
    return np.concatenate(found)
