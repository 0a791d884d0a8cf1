"""What the planner found, as tables and as JSON: the ranking of a search, and one plan in detail."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from plait.core.plan import Plan
from plait.models.config import parameter_count
from plait.planner.job import Job
from plait.planner.memory import MemoryReport, RankMemory
from plait.planner.prediction import Prediction, RankTime
from plait.planner.ranking import AXES, ranking, seconds, size
from plait.planner.search import Search
from plait.planner.why import GIB, Candidate, parts, placed, placement

RANKS: Final = 16
"""Longer pipelines show their ends, their fullest rank and some between."""


def search_page(search: Search) -> RenderableType:
    """The ranked plans, and a line for each kind that lost; or what is nearest to fitting."""
    request = search.request
    head = Table.grid(padding=(0, 2))
    head.add_column(style="bold")
    head.add_row("model", f"{request.model.family}, {_parameters(parameter_count(request.model))}")
    device = request.topology.device
    head.add_row("cluster", f"{request.world_size:,} x {device.name} ({request.topology.name})")
    head.add_row("step", f"{request.global_batch:,} samples of {request.seq:,} tokens")
    head.add_row("memory", f"up to {request.memory / GIB:.1f} GiB of {device.memory / GIB:.1f} on each device")
    head.add_row("plans", f"{search.considered:,} legal, {search.predicted:,} predicted; bounds exclude the others")
    if not {"schedule", "compress"} <= request.fix.keys():
        head.add_row("", "2bw and compress change the numbers of a run: with --fix alone")
    if search.narrowed:
        head.add_row("", f"left out before: {', '.join(search.narrowed)}; --fix keeps them")
    if not search.ranked:
        return Group(head, Text("\nno plan fits", style="bold"), *(Text(line) for line in search.advice))
    if where := placement(request.job(search.ranked[0].plan)):
        head.add_row("placement", f"best plan: {where}")
    parts_of_page: list[RenderableType] = [head, Text(), ranking(search.ranked)]
    if search.losers:
        table = Table(box=box.SIMPLE, title="why others lost", title_justify="left", title_style="bold", pad_edge=False)
        table.add_column("kind", no_wrap=True)
        table.add_column("best of it found", justify="right", no_wrap=True)
        table.add_column("why", overflow="fold")
        for loser in search.losers:
            fits = loser.candidate.fits(request.memory)
            took = seconds(loser.candidate.prediction.step_time) if fits else "does not fit"
            table.add_row(loser.kind, took, loser.why.removeprefix(f"{loser.kind}: "))
        parts_of_page += [Text(), table]
    return Group(*parts_of_page)


def _parameters(count: int) -> str:
    return f"{count / 1e9:,.2f} B parameters" if count >= 1e8 else f"{count / 1e6:,.2f} M parameters"


def job_page(job: Job, prediction: Prediction, memory: MemoryReport) -> RenderableType:
    """One plan: its step, where each pipeline rank's time goes, and what each holds, by kind and by moment."""
    head = Table.grid(padding=(0, 2))
    head.add_column(style="bold")
    head.add_row("plan", Text(str(job.plan) or "one rank, nothing cut"))
    if where := placement(job):
        head.add_row("placement", where)
    low, high = seconds(prediction.low), seconds(prediction.high)
    head.add_row("step", f"{seconds(prediction.step_time)} (80% within {low} - {high})")
    head.add_row("tokens", f"{prediction.tokens_per_s_per_device:,.0f} a second and device")
    if prediction.mfu is not None:
        head.add_row("MFU", f"{prediction.mfu:.1%} of {job.topology.device.name}'s peak, {_flops(prediction)}")
    shown = chosen([rank.peak for rank in memory.ranks])
    head.add_row("bubble", f"{prediction.bubble_rate:.1%} of the step")
    return Group(
        head,
        Text(),
        _times(prediction, shown),
        _bytes(memory, shown),
        _kinds(memory, shown),
        _moments(memory.fullest),
    )


def _flops(prediction: Prediction) -> str:
    again = prediction.hardware_flops / prediction.model_flops - 1.0
    text = f"{prediction.model_flops:.3g} FLOPs a step"
    return text + (f", {again:.1%} more are run" if again > 0.0005 else "")


def chosen(peaks: Sequence[float]) -> list[int]:
    """The pipeline ranks that are shown: all of up to `RANKS`; else the ends, the extremes, and some between."""
    count = len(peaks)
    if count <= RANKS:
        return list(range(count))
    step = -(-count // (RANKS - 4))
    extremes = {peaks.index(max(peaks)), peaks.index(min(peaks))}
    return sorted({0, count - 1, *extremes, *range(0, count, step)})


def _times(prediction: Prediction, shown: Sequence[int]) -> Table:
    table = _table("time of each pipeline rank")
    rows = [prediction.ranks[rank] for rank in shown]
    axes = [axis for axis in AXES if any(rank.exposed.get(axis, 0) or rank.hidden.get(axis, 0) for rank in rows)]
    exposed = [f"{axis} exposed" for axis in axes]
    for name in ("rank", "compute", *exposed, "bubble", "optimizer", "other", *(f"{axis} hidden" for axis in axes)):
        table.add_column(name, justify="right")
    for rank in rows:
        cells = [rank.compute, *(rank.exposed.get(axis, 0.0) for axis in axes), rank.bubble, rank.optimizer, rank.other]
        cells += [rank.hidden.get(axis, 0.0) for axis in axes]
        table.add_row(str(rank.pp), *map(seconds, cells))
    return table


def _bytes(memory: MemoryReport, shown: Sequence[int]) -> Table:
    table = _table("memory of each pipeline rank, GiB")
    table.padding = (0, 1, 0, 0)  # all of it within 80 columns
    rows = [memory.ranks[index] for index in shown]
    parts = ("weights", "gradients", "optimizer", "activations", "logits", "buffers", "reserve")
    names = [*(name for name in parts if any(getattr(rank, name) for rank in rows)), "peak"]
    for name in ("rank", *names):
        table.add_column(name, justify="right")
    for rank in rows:
        table.add_row(str(rank.pp), *(f"{getattr(rank, name) / GIB:.2f}" for name in names))
    return table


def _kinds(memory: MemoryReport, shown: Sequence[int]) -> Table:
    table = _table("activations at the fullest moment by kind, GiB")
    rows = [memory.ranks[index] for index in shown]
    names = sorted({name for rank in rows for name, held in rank.kinds.items() if held > 0})
    for name in ("rank", *names):
        table.add_column(name, justify="right")
    for rank in rows:
        table.add_row(str(rank.pp), *(f"{rank.kinds.get(name, 0.0) / GIB:.2f}" for name in names))
    return table


def _moments(rank: RankMemory) -> Table:
    table = _table(f"moments of rank {rank.pp} (fullest), GiB")
    table.add_column("moment")
    table.add_column("held", justify="right")
    for name, held in rank.moments:
        table.add_row(name, f"{held / GIB:.2f}")
    return table


def _table(title: str) -> Table:
    return Table(box=box.SIMPLE, title=title, title_justify="left", title_style="bold", pad_edge=False)


def search_json(search: Search) -> dict[str, Any]:
    """What a program needs of a search. Seconds and bytes."""
    request = search.request
    return {
        "world_size": request.world_size,
        "seq": request.seq,
        "global_batch": request.global_batch,
        "memory_limit": request.memory,
        "considered": search.considered,
        "narrowed": list(search.narrowed),
        "predicted": search.predicted,
        "plans": [candidate_json(one) for one in search.ranked],
        "placement": {} if search.best is None else _tiers(request.job(search.best.plan)),
        "lost": [
            {
                "kind": loser.kind,
                "fits": loser.candidate.fits(request.memory),
                "why": loser.why,
                **candidate_json(loser.candidate, ranks=False),
            }
            for loser in search.losers
        ],
        "nearest": None if search.nearest is None else candidate_json(search.nearest),
        "advice": list(search.advice),
    }


def _tiers(job: Job) -> dict[str, str]:
    """The tier that each axis crosses."""
    return {axis: job.topology.tiers[index].name for axis, _, index in placed(job)}


def candidate_json(candidate: Candidate, *, ranks: bool = True) -> dict[str, Any]:
    """A plan with its promise."""
    time, memory = candidate.prediction, candidate.memory
    found: dict[str, Any] = {
        "plan": str(candidate.plan),
        "step_time": time.step_time,
        "low": time.low,
        "high": time.high,
        "tokens_per_s_per_device": time.tokens_per_s_per_device,
        "mfu": time.mfu,
        "model_flops": time.model_flops,
        "hardware_flops": time.hardware_flops,
        "bubble_rate": time.bubble_rate,
        "peak_memory": memory.fullest.peak,
        "least_memory": memory.emptiest.peak,
        "parts": parts(time),
    }
    if ranks:
        found["ranks"] = [
            {"time": _fields(one), "memory": _fields(held)} for one, held in zip(time.ranks, memory.ranks, strict=True)
        ]
    return found


def _fields(value: RankTime | RankMemory) -> dict[str, Any]:
    return {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value


def plan_toml(candidate: Candidate, request_words: Sequence[str]) -> str:
    """A file that `plait train` takes as its ``[plan]`` table, with what was promised as comments."""
    time, memory = candidate.prediction, candidate.memory
    lines = [f"# {line}" for line in request_words]
    lines += [
        f"# predicted: {seconds(time.step_time)} a step (80% within {seconds(time.low)} - {seconds(time.high)}), "
        f"{time.tokens_per_s_per_device:,.0f} tokens/s a device",
        f"# predicted: {size(memory.fullest.peak)} on the fullest rank (pp={memory.fullest.pp}), "
        f"{size(memory.emptiest.peak)} on the emptiest; bubble {time.bubble_rate:.1%}",
    ]
    return "\n".join(lines) + "\n[plan]\n" + _body(candidate.plan)


def _body(plan: Plan) -> str:
    return plan.to_toml()
