"""The tables and pictures of ``plait train --dry``. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from rich import box
from rich.table import Table

from plait.core.compression import Compression
from plait.core.events import COMPUTE, Bubble, Event
from plait.core.mesh import Mesh
from plait.core.plan import Plan
from plait.core.shard import split
from plait.models.config import ModelConfig, parameter_count
from plait.planner.state import Holding, place_of, state_ranks
from plait.schedule.grid import IDLE, ONGOING, grid
from plait.schedule.ir import Kind, Schedule
from plait.schedule.windows import Windows, shifted

if TYPE_CHECKING:
    from plait.train.dry import StageRow
    from plait.train.run import Setup

SINGLE_RANKS: Final = 16
"""Larger worlds are shown by groups of equal ranks."""
_COLUMNS: Final = 8
"""Data-parallel columns of the picture of the mesh."""
_PRECISIONS: Final = {
    "fp32": "fp32",
    "bf16": "bf16 weights and activations; fp32 masters and gradients",
    "fp16": "fp16 weights and activations, loss scaled as overflows allow; fp32 masters and gradients",
    "fp8": "fp8 products in linear layers, bf16 elsewhere; fp32 masters and gradients",
}


def count(number: int, noun: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{number} {noun}" + ("" if number == 1 else "es" if noun.endswith("ch") else "s")


def sizes(axes: Mapping[str, int]) -> str:
    """``pp 2 x dp 1 x cp 1 x tp 2``."""
    return " x ".join(f"{axis} {size}" for axis, size in axes.items())


def facts(setup: Setup, mesh: Mesh) -> Table:
    """What the run is, a line a choice."""
    model, plan, config = setup.model, setup.plan, setup.config
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_row("plan", str(plan))
    layers = count(model.num_layers, "layer")
    table.add_row("model", f"{model.family}, {parameter_count(model):,} parameters, {layers}")
    if model.moe is not None:
        table.add_row("experts", _experts(model, mesh))
    table.add_row(
        "step",
        f"{count(config.train.global_batch, 'sample')} of {config.data.seq} tokens = {mesh.dp} (dp) x "
        f"{count(setup.microbatches, 'microbatch')} x {plan.micro} (micro)",
    )
    if mesh.cp > 1:
        share = f"{'about ' if config.data.seq % mesh.cp else ''}{config.data.seq // mesh.cp}"
        table.add_row("context", f"{plan.context}: {mesh.cp} ranks share each sample, {share} of its tokens each")
    table.add_row("precision", _PRECISIONS[plan.precision])
    if plan.zero:
        table.add_row("zero", _zero(model, plan, mesh))
    if plan.compress != "none":
        table.add_row("compress", _compression(plan.compress))
    if plan.node is not None:
        table.add_row("node", f"gradients are summed among {plan.node} neighbouring data ranks first, then across")
    return table


def _experts(model: ModelConfig, mesh: Mesh) -> str:
    moe = model.moe
    assert moe is not None
    layers = sum(model.moe_of(layer) is not None for layer in range(model.num_layers))
    copies = mesh.expert_sizes["edp"]
    return (
        f"{moe.num_experts} in each of {count(layers, 'layer')}, {moe.top_k} a token"
        + (f", and shared ones {moe.shared_ffn} wide" if moe.shared_ffn else "")
        + f"; a rank has {moe.num_experts // mesh.ep} a layer"
        + (f", 1/{mesh.etp} of each" if mesh.etp > 1 else "")
        + f"; {copies} {'copy' if copies == 1 else 'copies'}"
    )


def _zero(model: ModelConfig, plan: Plan, mesh: Mesh) -> str:
    what = {1: "optimizer state", 2: "gradients and optimizer state", 3: "weights, gradients and optimizer state"}

    def shared(data_ranks: int, expert: bool) -> str:
        ranks = state_ranks(plan, mesh, expert=expert)
        return f"{ranks}" + (f" (copied {data_ranks // ranks} times)" if ranks < data_ranks else "")

    text = f"{what[plan.zero]} shared by data ranks: {shared(mesh.dp * mesh.cp, expert=False)}"
    if model.moe is not None:
        text += f"; experts': {shared(mesh.expert_sizes['edp'], expert=True)}"
    return text + (f"; gathered for each {plan.gather}" if plan.zero == 3 else "")


def _compression(text: str) -> str:
    found = Compression.parse(text)
    return {
        "half": "gradients go over the data axes in half precision",
        "topk": f"the largest {found.share:.4g} of each gradient's elements go over the data axes",
        "powersgd": f"approximations of rank {found.rank} of each gradient go over the data axes",
    }[found.kind] + (
        "; what does not waits for the next step (4 bytes a parameter more on each rank)" if found.feedback else ""
    )


def mesh_table(mesh: Mesh) -> Table:
    """Rows: pp; columns: dp (and cp); in a cell the ranks along tp."""
    lines = [mesh.coordinate(first) for first in mesh.group(0, ("dp", "cp", "tp"))[:: mesh.tp]]
    heads = [f"dp {at['dp']}" + (f" cp {at['cp']}" if mesh.cp > 1 else "") for at in lines]
    return _ranks_table(mesh, "", heads, mesh.tp)


def expert_table(mesh: Mesh, experts: int) -> Table:
    """Rows: pp; columns: edp and ep, with the experts there; in a cell the ranks along etp."""
    heads = []
    for first in mesh.group(0, ("dp", "cp", "tp"))[:: mesh.etp]:
        at = mesh.coordinate(first)
        start, stop = split(experts, mesh.ep, at["ep"])
        heads.append(f"{at['edp']}\n{at['ep']}\n{_span(start, stop)}")
    return _ranks_table(mesh, "edp\nep\nexperts", heads, mesh.etp)


def _ranks_table(mesh: Mesh, corner: str, heads: Sequence[str], inner: int) -> Table:
    """A row a pipeline rank, whose ranks lie in order in the columns ``heads``, ``inner`` in each."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(corner, style="bold")
    shown: list[int | None] = list(range(len(heads)))
    if len(heads) > _COLUMNS:
        shown = [*range(_COLUMNS - 1), None, len(heads) - 1]
    for column in shown:
        table.add_column("..." if column is None else heads[column])
    for pp in range(mesh.pp):
        cells = []
        mine = mesh.group(mesh.rank({"pp": pp}), ("dp", "cp", "tp"))
        for column in shown:
            first = (column or 0) * inner
            ranks = mine[first : first + inner]
            text = " ".join(map(str, ranks)) if inner <= 4 else f"{ranks[0]}-{ranks[-1]}"
            cells.append("..." if column is None else text)
        table.add_row(f"pp {pp}", *cells)
    return table


def stage_table(rows: Sequence[StageRow]) -> Table:
    """The stage cut."""
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
    return _span(*row.layers)


def _span(first: int, stop: int) -> str:
    """``0-3``, ``2``, ``none`` for what lies in first..stop."""
    if first == stop:
        return "none"
    return str(first) if stop == first + 1 else f"{first}-{stop - 1}"


def holding_table(
    model: ModelConfig, mesh: Mesh, rows: Sequence[StageRow], held: Sequence[Holding], *, narrow: bool
) -> Table:
    """Bytes of each rank, or of groups of equal ranks."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0 if narrow else 1, 0, 0))
    if mesh.world_size <= SINGLE_RANKS:
        axes = _axes(model, mesh)
        table.add_column("rank", justify="right")
        table.add_column(" ".join(axes), no_wrap=True)
        lines = _by_rank(model, mesh, held, axes)
    else:
        table.add_column("ranks", justify="right")
        table.add_column("at", no_wrap=True)
        lines = _by_place(mesh, held)
    table.add_column("layers", max_width=24)
    for name in ("parameters", "weights", "gradients", "optimizer", "total"):
        table.add_column(name, justify="right", no_wrap=True)
    for label, place, one in lines:
        layers = ", ".join(_layers(rows[stage]) for stage in one.stages)
        amounts = (one.weights, one.gradients, one.optimizer, one.total)
        table.add_row(label, place, layers, f"{one.parameters:,}", *map(_bytes, amounts))
    return table


def passing_text(plan: Plan, held: Sequence[Holding]) -> str:
    """What comes and goes on top of the state at ZeRO 2 and 3."""
    what = (
        "gradients of two neighbouring layers, or of two buckets,"
        if plan.zero == 2
        else (f"gradients of two neighbouring layers and weights of {'all' if plan.gather == 'step' else 'the two'}")
    )
    low, high = (_bytes(choose(one.passing for one in held)) for choose in (min, max))
    amount = low if low == high else f"{low} to {high}"
    return f"Passing: about {amount} a rank on top, while whole {what} are there."


def _axes(model: ModelConfig, mesh: Mesh) -> list[str]:
    """Axes, of both folds, along which ranks differ."""
    fold = dict(mesh.sizes) if model.moe is None else {**mesh.sizes, "ep": mesh.ep, "etp": mesh.etp}
    return [axis for axis, size in fold.items() if size > 1]


def _by_rank(
    model: ModelConfig, mesh: Mesh, held: Sequence[Holding], axes: Sequence[str]
) -> list[tuple[str, str, Holding]]:
    """(rank, its indices along ``axes`` below their names, what it holds) for every rank."""
    by_place = {one.place: one for one in held}
    rows = []
    for rank in range(mesh.world_size):
        at = mesh.coordinate(rank)
        place = " ".join(f"{at[axis]:>{len(axis)}}" for axis in axes)
        rows.append((str(rank), place, by_place[place_of(model, at)]))
    return rows


def _by_place(mesh: Mesh, held: Sequence[Holding]) -> list[tuple[str, str, Holding]]:
    """(number of ranks, where they are, what each of them holds): those of a pp that hold as much are one row."""
    groups: dict[Holding, list[Holding]] = {}
    for one in held:
        groups.setdefault(replace(one, tp=0, ep=0, etp=0, ranks=0), []).append(one)
    rows = []
    for group in groups.values():
        place = f"pp {group[0].pp}"
        tps = sorted({one.tp for one in group})
        if mesh.tp > 1:
            place += f" tp {tps[0]}" + (f"-{tps[-1]}" if len(tps) > 1 else "")
        rows.append((f"{sum(one.ranks for one in group)} x", place, group[0]))
    return rows


def _bytes(size: int) -> str:
    """``size`` with the unit that leaves at most four digits."""
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1000:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"


def picture(schedule: Schedule, width: int) -> str:
    """The grid, with the units of time that `plait.train.dry.unit_costs` has."""
    return grid(schedule, costs={Kind.F: 1, Kind.B: 1 if schedule.splits else 2, Kind.W: 1}, width=width)


def steady_picture(windows: Windows, events: Sequence[Event], slots: int, width: int) -> str:
    """The grid of ``slots`` from where rank 0 begins its second step, out of the ``events`` of three steps' run."""
    m = windows.microbatches
    first = str(shifted(next(action for action in windows.steady.ranks[0] if action.kind is Kind.F), m))
    begin = next(event.start for event in events if event.stream == COMPUTE and event.name == first)
    rows = [[IDLE] * slots for _ in windows.steady.ranks]
    for event in events:
        for slot in range(int(event.start - begin), int(event.end - begin)) if event.stream == COMPUTE else ():
            if 0 <= slot < slots:
                rows[event.rank][slot] = event.name if slot == event.start - begin else ONGOING
    label = len(f"rank {len(rows) - 1}: ")
    cell = max(len(text) for row in rows for text in row)
    shown = min(slots, max(1, (width - label) // (cell + 1)))
    lines = [
        (f"{f'rank {rank}: ':>{label}}" + " ".join(text.ljust(cell) for text in row[:shown])).rstrip()
        for rank, row in enumerate(rows)
    ]
    return "\n".join([*lines, *[f"... slots 0 to {shown - 1} of {slots} shown"] * (shown < slots)])


def bubble_text(found: Bubble) -> str:
    """The bubble in words, with its numerators and denominators."""
    total, compute = found.ranks * found.makespan, found.compute
    idle = total - compute
    return (
        f"Bubble: {found.rate:.1%} of the step ({idle:g}/{total:g} slots idle), or {found.overhead:.1%} over the ideal "
        f"time ({idle:g}/{compute:g}).\nSimulated: a forward takes 1 slot, a whole backward 2, a transfer none."
    )
