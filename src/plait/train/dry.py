"""What ``plait train --dry`` prints: mesh, what each rank holds, stage cut and schedule. Starts nothing; no torch.

Everything is read from what the run itself builds from: `plait.parallel.rules` for shards, `plait.parallel.layout` for
stages and schedule. Bytes are `plait.planner.state`'s, tables `plait.train.dry_tables`'.
"""

from __future__ import annotations

import io
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.rule import Rule
from rich.text import Text

from plait.core.compression import Compression
from plait.core.events import Bubble, bubble
from plait.core.mesh import Mesh
from plait.core.plan import Plan
from plait.models.config import ModelConfig, parameter_count, parameter_shapes
from plait.parallel.layout import build_schedule, build_windows, placement, stage_bounds, stage_layers, stage_parameters
from plait.planner.state import Holding, holdings, place_of, state_ranks
from plait.schedule.ir import Schedule
from plait.schedule.simulate import Cost, simulate
from plait.schedule.windows import Windows
from plait.train import dry_tables as tables

if TYPE_CHECKING:
    from plait.train.run import Setup


@dataclass(frozen=True, kw_only=True)
class StageRow:
    """One virtual stage. ``layers`` is (first, behind the last); ``parameters`` counts whole tensors."""

    stage: int
    pp: int
    layers: tuple[int, int]
    embedding: bool
    head: bool
    parameters: int


def stages(model: ModelConfig, plan: Plan) -> list[StageRow]:
    """The virtual stages in forward order."""
    layers = stage_layers(model, plan)
    homes, bounds, names = placement(plan), stage_bounds(layers), stage_parameters(model, layers)
    shapes = parameter_shapes(model)
    last = len(layers) - 1
    return [
        StageRow(
            stage=stage,
            pp=homes[stage],
            layers=bounds[stage],
            embedding=stage == 0,
            head=stage == last,
            parameters=sum(math.prod(shapes[name]) for name in set(names[stage])),
        )
        for stage in range(len(layers))
    ]


def unit_costs(schedule: Schedule) -> list[Cost]:
    """A forward takes 1 in every stage, a whole backward 2, each half of a split one 1."""
    return [Cost(forward=1, backward=1, weight=1)] * schedule.stages


def predicted_bubble(schedule: Schedule) -> Bubble:
    """The simulator's bubble for `unit_costs`, where transfers take nothing."""
    return bubble(simulate(schedule, unit_costs(schedule)), len(schedule.ranks))


def steady_bubble(windows: Windows) -> Bubble:
    """The same of one steady window of a run that does not flush: what one more step adds."""
    longer, shorter = (predicted_bubble(windows.unrolled(steps)) for steps in (4, 3))
    return Bubble(
        compute=longer.compute - shorter.compute, ranks=longer.ranks, makespan=longer.makespan - shorter.makespan
    )


@dataclass(frozen=True, kw_only=True)
class _Dry:
    """All that is shown of a run."""

    setup: Setup
    mesh: Mesh
    rows: Sequence[StageRow]
    held: Sequence[Holding]
    schedule: Schedule
    """Of two weight versions: the steady window."""
    windows: Windows | None
    bubble: Bubble


def render(setup: Setup, *, as_json: bool = False) -> str:
    """The text of ``plait train --dry``, or with ``as_json`` one JSON object. Starts no worker, imports no torch."""
    model, plan = setup.model, setup.plan
    mesh = plan.mesh(setup.world_size)
    windows = build_windows(plan, setup.microbatches) if plan.schedule == "2bw" else None
    schedule = build_schedule(plan, setup.microbatches) if windows is None else windows.steady
    dry = _Dry(
        setup=setup,
        mesh=mesh,
        rows=stages(model, plan),
        held=holdings(model, plan, mesh, setup.config.train.freeze),
        schedule=schedule,
        windows=windows,
        bubble=predicted_bubble(schedule) if windows is None else steady_bubble(windows),
    )
    if as_json:
        return json.dumps(_document(dry), indent=2)
    width = min(max(shutil.get_terminal_size(fallback=(100, 24)).columns, 80), 120)
    page = io.StringIO()
    console = Console(file=page, width=width, legacy_windows=False)
    for part in (*_mesh_parts(dry), *_state_parts(dry, width), *_schedule_parts(dry, width)):
        console.print(part, highlight=False)
    return "\n".join(line.rstrip() for line in page.getvalue().splitlines())


def _mesh_parts(dry: _Dry) -> list[RenderableType]:
    mesh = dry.mesh
    parts: list[RenderableType] = [
        tables.facts(dry.setup, mesh),
        Rule(f"mesh: {tables.sizes(mesh.sizes)} = {tables.count(mesh.world_size, 'rank')}", align="left"),
        tables.mesh_table(mesh),
        "Numbers are ranks; those in one cell are neighbours on tp.",
    ]
    moe = dry.setup.model.moe
    if moe is not None and mesh.ep * mesh.etp > 1:
        parts += [
            Rule(f"experts' fold of the same ranks: {tables.sizes(mesh.expert_sizes)}", align="left"),
            tables.expert_table(mesh, moe.num_experts),
            "Ranks in one cell share each of those experts (etp); columns of the same ep hold copies.",
        ]
    return parts


def _state_parts(dry: _Dry, width: int) -> list[RenderableType]:
    plan = dry.setup.plan
    return [
        Rule("stage cut", align="left"),
        tables.stage_table(dry.rows),
        Rule("what each rank holds", align="left"),
        tables.holding_table(dry.setup.model, dry.mesh, dry.rows, dry.held, narrow=width < 100),
        f"Training state in precision {plan.precision} with ZeRO {plan.zero}; activations and buffers come on top.",
        *([tables.passing_text(plan, dry.held)] if plan.zero >= 2 else []),
    ]


def _schedule_parts(dry: _Dry, width: int) -> list[RenderableType]:
    schedule = dry.schedule
    rows = "Rows: ranks along pp. 1F0: forward of stage 1, microbatch 0; = its later slots; . an idle slot."
    name = f"{schedule.name}, {tables.count(schedule.stages, 'stage')}"
    title = f"schedule: {name}, {tables.count(schedule.microbatches, 'microbatch')}"
    if dry.windows is None:
        picture = tables.picture(schedule, width)
        notes = [rows]
        if dry.setup.plan.schedule == "auto":
            notes.append("Searched for these slots; the run measures what each stage takes, and searches for that.")
    else:
        title += " a step, steady window"
        unrolled = dry.windows.unrolled(3)
        events = simulate(unrolled, unit_costs(unrolled))
        picture = tables.steady_picture(dry.windows, events, int(dry.bubble.makespan), width)
        m, fill = schedule.microbatches, dry.windows.steady.stages - 1
        notes = [
            rows,
            f"Microbatches {m} to {2 * m - 1} are this step's, later ones the next step's. There is no flush between "
            "steps: gradients are one update late, on two versions of the weights. A run fills and drains its pipeline "
            f"once, in {3 * fill} slots.",
        ]
    return [
        Rule(title, align="left"),
        Text(picture, no_wrap=True, overflow="crop"),
        *notes,
        tables.bubble_text(dry.bubble),
    ]


def _document(dry: _Dry) -> Mapping[str, object]:
    setup, mesh, found = dry.setup, dry.mesh, dry.bubble
    model, plan, moe = setup.model, setup.plan, setup.model.moe
    by_place = {one.place: asdict(one) | {"total": one.total} for one in dry.held}
    ranks = []
    for rank in range(mesh.world_size):
        at = mesh.coordinate(rank)
        held = by_place[place_of(model, at)]
        fold = mesh.sizes if moe is None else {**mesh.sizes, **mesh.expert_sizes}
        amounts = {name: value for name, value in held.items() if name not in ("pp", "tp", "ep", "etp", "ranks")}
        ranks.append({"rank": rank, "at": {axis: at[axis] for axis in fold}} | amounts)
    return {
        "plan": str(plan),
        "mesh": mesh.sizes,
        "expert_mesh": None if moe is None else mesh.expert_sizes,
        "world_size": mesh.world_size,
        "model": model.to_mapping() | {"parameters": parameter_count(model)},
        "experts": None if moe is None else {"layer": moe.num_experts, "rank": moe.num_experts // mesh.ep},
        "global_batch": setup.config.train.global_batch,
        "seq": setup.config.data.seq,
        "context": plan.context if mesh.cp > 1 else None,
        "precision": plan.precision,
        "zero": {
            "stage": plan.zero,
            "ranks": state_ranks(plan, mesh, expert=False),
            "expert_ranks": None if moe is None else state_ranks(plan, mesh, expert=True),
            "gather": plan.gather if plan.zero == 3 else None,
        },
        "compress": asdict(Compression.parse(plan.compress)),
        "node": plan.node,
        "stages": [asdict(row) for row in dry.rows],
        "ranks": ranks,
        "schedule": {
            "name": dry.schedule.name,
            "microbatches": dry.schedule.microbatches,
            "flush": dry.windows is None,
            "costs": "units: forward 1, backward 2",
            "text": dry.schedule.text(),
        },
        "bubble": {
            "idle": found.ranks * found.makespan - found.compute,
            "compute": found.compute,
            "total": found.ranks * found.makespan,
            "rate": found.rate,
            "overhead": found.overhead,
        },
    }
