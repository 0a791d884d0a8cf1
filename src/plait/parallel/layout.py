"""Where a plan puts what: layers and parameters of each virtual stage, its rank, and the schedule. No torch.

`parallelize` builds from these, and ``plait train --dry`` prints them, so that what is announced is what runs.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from pathlib import Path

from plait.core.errors import ConfigError, PlanError
from plait.core.facts import ModelShape
from plait.core.plan import Plan, cut_stages
from plait.models.config import ModelConfig, parameter_shapes
from plait.schedule.check import check as check_schedule
from plait.schedule.generate import forward_only, forward_only_v, generate
from plait.schedule.ir import Action, Kind, Schedule
from plait.schedule.lower import lower
from plait.schedule.placement import placement_of, v_shaped
from plait.schedule.search import search
from plait.schedule.simulate import Cost
from plait.schedule.windows import Windows, check_windows, two_bw


def model_shape(config: ModelConfig) -> ModelShape:
    """The numbers of a model that decide which plans are legal."""
    moe = config.moe
    return ModelShape(
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads if config.mla is None else config.num_heads,
        vocab_size=config.vocab_size,
        ffn_size=config.ffn_size,
        hidden_size=config.hidden_size,
        max_positions=config.max_positions if config.positions == "learned" else 0,
        num_experts=0 if moe is None else moe.num_experts,
        expert_ffn=0 if moe is None else moe.ffn_size,
        shared_ffn=0 if moe is None else moe.shared_ffn,
    )


def stage_layers(config: ModelConfig, plan: Plan) -> tuple[int, ...]:
    """Layers of each virtual stage: the plan's own, or balanced by matrix products (the head is worth its product)."""
    return plan.stages if plan.stages is not None else _balanced(config, plan.stage_count)


@functools.lru_cache(maxsize=1024)  # a search asks for the same cut for thousands of plans
def _balanced(config: ModelConfig, stages: int) -> tuple[int, ...]:
    costs = [0.0] * config.num_layers
    for name, shape in parameter_shapes(config).items():
        part = name.split(".")
        if part[0] == "layers" and len(shape) > 1:
            # Of a layer's experts a token meets some.
            share = config.moe.top_k / config.moe.num_experts if len(shape) == 3 and config.moe is not None else 1.0
            costs[int(part[1])] += math.prod(shape) * share
    return cut_stages(costs, stages, 0.0, float(config.vocab_size * config.hidden_size))


def stage_bounds(layers: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """(first layer, layer behind the last) of each virtual stage."""
    return tuple(itertools.pairwise(itertools.accumulate(layers, initial=0)))


def stage_parameters(config: ModelConfig, layers: Sequence[int]) -> list[list[str]]:
    """Parameter names of each virtual stage, in forward order; a tied embedding is in the first and in the last."""
    held: list[list[str]] = [[] for _ in layers]
    for name in parameter_shapes(config):
        part = name.partition(".")[0]
        if part == "layers":
            layer = int(name.split(".")[1])
            stage = next(at for at, (first, stop) in enumerate(stage_bounds(layers)) if first <= layer < stop)
            held[stage].append(name)
        else:
            held[0 if part == "embed" else -1].append(name)
    if config.tied and len(layers) > 1:
        held[-1].append("embed.tokens.weight")
    return held


def placement(plan: Plan) -> tuple[int, ...]:
    """Pipeline rank of each virtual stage."""
    if plan.schedule_file is None:
        return placement_of(plan.schedule, plan.pp, plan.virtual)
    return _read_schedule(plan.schedule_file).placement


def build_schedule(
    plan: Plan,
    microbatches: int,
    *,
    evaluation: bool = False,
    costs: Sequence[Cost] | None = None,
    transfers: Sequence[float] | None = None,
) -> Schedule:
    """The plan's schedule for ``microbatches``, lowered and checked; of forwards alone for an evaluation.

    ``costs`` of each stage, and seconds of ``transfers`` across each boundary, are what ``schedule=auto`` is searched
    for; None: forward, input and weight gradient cost the same. A schedule of two weight versions (2bw) is no list of
    one step (`build_windows`); here it flushes.
    """
    if evaluation:
        named = _evaluation(plan, microbatches)
    elif plan.schedule_file is not None:
        named = load_schedule(plan, microbatches)
    elif plan.schedule == "auto":
        named = search(
            costs or [Cost(forward=1, backward=1, weight=1)] * plan.stage_count,
            ranks=plan.pp,
            microbatches=microbatches,
            placement=placement(plan),
            live_limit=plan.live,
            transfer=transfers or 0.0,
        )
    else:
        name = {"2bw": "1f1b", "interleaved": "1f1b" if plan.virtual == 1 else "interleaved"}.get(plan.schedule)
        named = generate(name or plan.schedule, ranks=plan.pp, microbatches=microbatches, virtual=plan.virtual)
    lowered = named if named.lowered else lower(named)
    check_schedule(lowered, forward_only=evaluation)
    return lowered


def build_windows(plan: Plan, microbatches: int) -> Windows:
    """The lists of a plan whose steps overlap (2bw), lowered and checked."""
    windows = two_bw(plan.pp, microbatches)
    check_windows(windows)
    return windows


def _evaluation(plan: Plan, microbatches: int) -> Schedule:
    if plan.schedule_file is not None:
        return _forwards(load_schedule(plan, microbatches), microbatches)
    if plan.pp > 1 and placement(plan) == v_shaped(plan.pp):
        return forward_only_v(plan.pp, microbatches)
    return forward_only(plan.pp, microbatches, plan.virtual)


def load_schedule(plan: Plan, microbatches: int) -> Schedule:
    """The plan's schedule file, which must be made for ``microbatches`` and the plan's ranks and stages."""
    assert plan.schedule_file is not None
    schedule = _read_schedule(plan.schedule_file)
    for what, have, want in (
        ("ranks", len(schedule.ranks), plan.pp),
        ("stages", schedule.stages, plan.stage_count),
        ("microbatches", schedule.microbatches, microbatches),
    ):
        if have != want:
            raise PlanError(f"schedule file {plan.schedule_file} is for {have} {what}, the plan needs {want}")
    return schedule


def _read_schedule(file: str) -> Schedule:
    try:
        return Schedule.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"schedule file {file}: {error}") from error


def _forwards(schedule: Schedule, microbatches: int) -> Schedule:
    """The forwards of a schedule from a file, stage by stage for each microbatch, on the same ranks."""
    rows = tuple(
        tuple(
            Action(Kind.F, stage, microbatch)
            for microbatch in range(microbatches)
            for stage, home in enumerate(schedule.placement)
            if home == rank
        )
        for rank in range(len(schedule.ranks))
    )
    return Schedule(name="forward", stages=schedule.stages, microbatches=microbatches, ranks=rows)
