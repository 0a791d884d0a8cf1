"""What ``plait train --dry`` prints: mesh, what each rank holds, stage cut and schedule. Starts nothing; no torch.

Everything is read from what the run itself builds from: `plait.parallel.rules` for shards, `plait.parallel.layout` for
stages and schedule. Bytes are those of `Zero.state_bytes` without its padding (shards of a bucket begin at multiples of
64 bytes): weights in the plan's precision (a router's in fp32); gradients in fp32; for the optimizer two fp32 moments,
and, where the weights are not fp32 or kept twice (2bw), an fp32 master copy. ZeRO shares the optimizer's (stage 1), the
gradients (2) and the weights (3) evenly over the data ranks, an expert's over those that have copies of it. Frozen
parameters have weights alone.
"""

from __future__ import annotations

import io
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from plait.core.events import Bubble, bubble
from plait.core.mesh import Mesh
from plait.core.plan import Plan
from plait.core.shard import ShardSpec
from plait.models.config import ModelConfig, parameter_count, parameter_shapes
from plait.parallel.layout import build_schedule, placement, stage_bounds, stage_layers, stage_parameters
from plait.parallel.rules import data_axes, sizes_of, specs
from plait.schedule.grid import grid
from plait.schedule.ir import Kind, Schedule
from plait.schedule.simulate import Cost, simulate

if TYPE_CHECKING:
    from plait.train.run import Setup

SINGLE_RANKS = 16
"""Larger worlds are shown by groups of equal ranks."""
_COLUMNS = 8
"""Data-parallel columns of the picture of the mesh."""


@dataclass(frozen=True, kw_only=True)
class StageRow:
    """One virtual stage. ``layers`` is (first, behind the last); ``parameters`` counts whole tensors."""

    stage: int
    pp: int
    layers: tuple[int, int]
    embedding: bool
    head: bool
    parameters: int


@dataclass(frozen=True, kw_only=True)
class Holding:
    """What every rank at (``pp``, ``tp``, ``ep``, ``etp``) holds, whatever its other indices. Bytes are a rank's."""

    pp: int
    tp: int
    ep: int
    etp: int
    stages: tuple[int, ...]
    parameters: int
    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """Bytes of the training state."""
        return self.weights + self.gradients + self.optimizer


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


def holdings(model: ModelConfig, plan: Plan, mesh: Mesh, freeze: Sequence[str] = ()) -> list[Holding]:
    """What the ranks hold, in order of their places; ``freeze``: name patterns of parameters that are not trained."""
    names, homes, layout = stage_parameters(model, stage_layers(model, plan)), placement(plan), specs(model, plan)
    places = {(at["tp"], at["ep"], at["etp"]): at for at in map(mesh.coordinate, range(mesh.world_size // mesh.pp))}
    found = []
    for pp in range(mesh.pp):
        here = tuple(stage for stage, home in enumerate(homes) if home == pp)
        # A tied weight whose both ends are on one rank is there once.
        held = {name for stage in here for name in names[stage]}
        for (tp, ep, etp), at in sorted(places.items()):
            parameters = weights = gradients = optimizer = 0
            for name in held:
                spec = layout[name]
                size = spec.local_size(sizes_of(spec, mesh), at)
                trained = not name.endswith(".router.bias") and not any(fnmatchcase(name, one) for one in freeze)
                shards = _shards(spec, plan, mesh)
                kept = _bytes_of(name, plan, trained)
                parameters += size
                # Frozen vectors are not shared.
                whole = plan.zero < 3 or (not trained and len(spec.shape) < 2)
                weights += (size if whole else -(-size // shards)) * kept.weight
                gradients += (size if plan.zero < 2 else -(-size // shards)) * kept.gradient
                optimizer += (size if plan.zero < 1 else -(-size // shards)) * kept.optimizer
            found.append(
                Holding(
                    pp=pp,
                    tp=tp,
                    ep=ep,
                    etp=etp,
                    stages=here,
                    parameters=parameters,
                    weights=weights,
                    gradients=gradients,
                    optimizer=optimizer,
                )
            )
    return found


@dataclass(frozen=True, kw_only=True)
class _Width:
    """Bytes for each element of a parameter, where nothing is shared."""

    weight: int
    gradient: int
    optimizer: int


def _bytes_of(name: str, plan: Plan, trained: bool) -> _Width:
    narrow = plan.precision != "fp32" and ".router." not in name
    versions = 2 if plan.schedule == "2bw" and trained else 1
    weight = (2 if narrow else 4) * versions
    if not trained:
        return _Width(weight=weight, gradient=0, optimizer=0)
    return _Width(weight=weight, gradient=4, optimizer=12 if narrow or versions > 1 else 8)


def _shards(spec: ShardSpec, plan: Plan, mesh: Mesh) -> int:
    """Data ranks that share the state of a tensor."""
    ranks = math.prod(sizes_of(spec, mesh)[axis] for axis in data_axes(spec))
    return ranks if plan.zero_group is None else math.gcd(plan.zero_group, ranks)


def predicted_bubble(schedule: Schedule) -> Bubble:
    """The simulator's bubble where a forward takes 1 in every stage, a whole backward 2, and transfers nothing."""
    return bubble(simulate(schedule, [Cost(forward=1, backward=1, weight=1)] * schedule.stages), len(schedule.ranks))


def render(setup: Setup, *, as_json: bool = False) -> str:
    """The text of ``plait train --dry``, or with ``as_json`` one JSON object. Starts no worker, imports no torch."""
    model, plan = setup.model, setup.plan
    mesh = plan.mesh(setup.world_size)
    batch = setup.config.train.global_batch
    microbatches = batch // (plan.micro * mesh.dp)
    schedule = build_schedule(plan, microbatches)
    rows, held = stages(model, plan), holdings(model, plan, mesh, setup.config.train.freeze)
    if as_json:
        return json.dumps(_document(setup, mesh, schedule, rows, held), indent=2)
    width = min(max(shutil.get_terminal_size(fallback=(100, 24)).columns, 80), 120)
    page = io.StringIO()
    console = Console(file=page, width=width, legacy_windows=False)
    for part in (
        _facts(setup, mesh, microbatches),
        Rule(f"mesh: {_sizes(mesh)} = {_count(mesh.world_size, 'rank')}", align="left"),
        _mesh_table(mesh),
        "Numbers are ranks; those in one cell are neighbours on tp.",
        Rule("stage cut", align="left"),
        _stage_table(rows),
        Rule("what each rank holds", align="left"),
        _holding_table(mesh, rows, held),
        f"Training state in precision {plan.precision} with ZeRO {plan.zero}; activations, passing buckets on top.",
        Rule(
            f"schedule: {schedule.name}, {_count(schedule.stages, 'stage')}, {_count(microbatches, 'microbatch')}",
            align="left",
        ),
        Text(_picture(schedule, width), no_wrap=True, overflow="crop"),
        "Rows: ranks along pp. 1F0: forward of stage 1, microbatch 0; = its later slots; . an idle slot.",
        _bubble_text(predicted_bubble(schedule)),
    ):
        console.print(part, highlight=False)
    return "\n".join(line.rstrip() for line in page.getvalue().splitlines())


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "es" if noun.endswith("ch") else "s")


def _facts(setup: Setup, mesh: Mesh, microbatches: int) -> Table:
    model, plan, config = setup.model, setup.plan, setup.config
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_row("plan", str(plan))
    layers = _count(model.num_layers, "layer")
    table.add_row("model", f"{model.family}, {parameter_count(model):,} parameters, {layers}")
    table.add_row(
        "step",
        f"{_count(config.train.global_batch, 'sample')} of {config.data.seq} tokens = {mesh.dp} (dp) x "
        f"{_count(microbatches, 'microbatch')} x {plan.micro} (micro)",
    )
    return table


def _sizes(mesh: Mesh) -> str:
    dense = " x ".join(f"{axis} {size}" for axis, size in mesh.sizes.items())
    return dense + (
        f" (experts: {' x '.join(f'{a} {n}' for a, n in mesh.expert_sizes.items())})" if mesh.ep > 1 else ""
    )


def _mesh_table(mesh: Mesh) -> Table:
    """Rows: pp; columns: dp (and cp); in a cell the ranks along tp."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", style="bold")
    lines = [line for line in mesh.groups(["tp"]) if mesh.coordinate(line[0])["pp"] == 0]
    shown = list(range(len(lines)))
    if len(lines) > _COLUMNS:
        shown = [*shown[: _COLUMNS - 1], len(lines) - 1]
    for column in shown:
        if column - 1 not in shown and column:
            table.add_column("...")
        at = mesh.coordinate(lines[column][0])
        table.add_column(f"dp {at['dp']}" + (f" cp {at['cp']}" if mesh.cp > 1 else ""))
    for pp in range(mesh.pp):
        cells = []
        for column in shown:
            if column - 1 not in shown and column:
                cells.append("...")
            first = mesh.rank({**mesh.coordinate(lines[column][0]), "pp": pp})
            ranks = mesh.group(first, ["tp"])
            cells.append(" ".join(map(str, ranks)) if len(ranks) <= 4 else f"{ranks[0]}-{ranks[-1]}")
        table.add_row(f"pp {pp}", *cells)
    return table


def _stage_table(rows: Sequence[StageRow]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("virtual stage", "on pp", "layers", "count", "parameters"):
        table.add_column(name, justify="left" if name == "layers" else "right")
    table.add_column("also")
    for row in rows:
        also = [word for word, there in (("embedding", row.embedding), ("norm, head, loss", row.head)) if there]
        table.add_row(
            str(row.stage),
            str(row.pp),
            _layers(row),
            str(row.layers[1] - row.layers[0]),
            f"{row.parameters:,}",
            "; ".join(also),
        )
    return table


def _layers(row: StageRow) -> str:
    first, stop = row.layers
    if first == stop:
        return "none"
    return str(first) if stop == first + 1 else f"{first}-{stop - 1}"


def _holding_table(mesh: Mesh, rows: Sequence[StageRow], held: Sequence[Holding]) -> Table:
    single = mesh.world_size <= SINGLE_RANKS
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("rank" if single else "ranks", justify="right")
    table.add_column("at")
    table.add_column("layers", max_width=24)
    for name in ("parameters", "weights", "gradients", "optimizer", "total"):
        table.add_column(name, justify="right")
    for label, place, one in _by_rank(mesh, held) if single else _by_place(mesh, held):
        layers = ", ".join(_layers(rows[stage]) for stage in one.stages)
        sizes = (one.weights, one.gradients, one.optimizer, one.total)
        table.add_row(label, place, layers, f"{one.parameters:,}", *map(_bytes, sizes))
    return table


def _by_rank(mesh: Mesh, held: Sequence[Holding]) -> list[tuple[str, str, Holding]]:
    """(rank, its coordinate, what it holds) for every rank."""
    by_place = {(one.pp, one.tp, one.ep, one.etp): one for one in held}
    rows = []
    for rank in range(mesh.world_size):
        at = mesh.coordinate(rank)
        place = " ".join(f"{axis} {at[axis]}" for axis, size in _axes(mesh).items() if size > 1)
        rows.append((str(rank), place or "alone", by_place[at["pp"], at["tp"], at["ep"], at["etp"]]))
    return rows


def _axes(mesh: Mesh) -> dict[str, int]:
    """Sizes of the axes that are shown: ``etp`` only beside ``ep``, for without experts it means nothing."""
    return mesh.sizes | ({"ep": mesh.ep, "etp": mesh.etp} if mesh.ep > 1 else {})


def _by_place(mesh: Mesh, held: Sequence[Holding]) -> list[tuple[str, str, Holding]]:
    """(number of ranks, where they are, what each of them holds): neighbours on tp that hold as much are one row."""
    groups: list[list[Holding]] = []
    for one in held:
        if groups and replace(groups[-1][0], tp=one.tp, ep=one.ep, etp=one.etp) == one:
            groups[-1].append(one)
        else:
            groups.append([one])
    rows = []
    for group in groups:
        first, last = group[0], group[-1]
        tp = f" tp {first.tp}" if first.tp == last.tp else f" tp {first.tp}-{last.tp}"
        place = f"pp {first.pp}" + (tp if mesh.tp > 1 else "")
        # Every place of a pipeline rank is that of as many ranks.
        places = sum(one.pp == first.pp for one in held)
        rows.append((f"{len(group) * mesh.world_size // mesh.pp // places} x", place, first))
    return rows


def _bytes(size: int) -> str:
    """``size`` with the unit that leaves at most four digits."""
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1000:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"


def _picture(schedule: Schedule, width: int) -> str:
    """The grid, with the units of time that `predicted_bubble` uses."""
    return grid(schedule, costs={Kind.F: 1, Kind.B: 1 if schedule.splits else 2, Kind.W: 1}, width=width)


def _bubble_text(found: Bubble) -> str:
    total, compute = found.ranks * found.makespan, found.compute
    idle = total - compute
    return (
        f"Bubble: {found.rate:.1%} of the step ({idle:g}/{total:g} slots idle), or {found.overhead:.1%} over the ideal "
        f"time ({idle:g}/{compute:g}).\nSimulated: a forward takes 1 slot, a whole backward 2, a transfer none."
    )


def _document(
    setup: Setup, mesh: Mesh, schedule: Schedule, rows: Sequence[StageRow], held: Sequence[Holding]
) -> Mapping[str, object]:
    found = predicted_bubble(schedule)
    by_place = {(one.pp, one.tp, one.ep, one.etp): asdict(one) | {"total": one.total} for one in held}
    ranks = []
    for rank in range(mesh.world_size):
        at = mesh.coordinate(rank)
        ranks.append({"rank": rank, "at": at} | by_place[at["pp"], at["tp"], at["ep"], at["etp"]])
        for axis in ("pp", "tp", "ep", "etp"):
            del ranks[-1][axis]
    return {
        "plan": str(setup.plan),
        "mesh": mesh.sizes,
        "expert_mesh": mesh.expert_sizes,
        "world_size": mesh.world_size,
        "model": setup.model.to_mapping() | {"parameters": parameter_count(setup.model)},
        "global_batch": setup.config.train.global_batch,
        "seq": setup.config.data.seq,
        "stages": [asdict(row) for row in rows],
        "ranks": ranks,
        "schedule": {"name": schedule.name, "microbatches": schedule.microbatches, "text": schedule.text()},
        "bubble": {
            "idle": found.ranks * found.makespan - found.compute,
            "compute": found.compute,
            "total": found.ranks * found.makespan,
            "rate": found.rate,
            "overhead": found.overhead,
        },
    }
