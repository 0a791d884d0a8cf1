"""Why plans lost: the most promising plan of each other kind, in one line; and what is nearest where nothing fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from plait.core.mesh import Mesh
from plait.core.plan import Plan
from plait.core.topology import Topology
from plait.planner.job import Job
from plait.planner.memory import MemoryReport
from plait.planner.prediction import Prediction
from plait.planner.space import Request

GIB: Final = 2.0**30
_WORDS: Final = {
    "tp": "all-reduce",
    "dp": "gradients and weights of the data axes",
    "cp": "attention across cp",
    "ep": "all-to-all of the experts",
    "pp": "transfers between stages",
}


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A plan with what it promises."""

    plan: Plan
    prediction: Prediction
    memory: MemoryReport

    def fits(self, limit: float) -> bool:
        """Whether every rank stays within ``limit`` bytes."""
        return self.memory.fullest.peak <= limit


@dataclass(frozen=True, kw_only=True)
class Loser:
    """The most promising plan of a kind that the best plan is not of."""

    kind: str
    """Such as ``tp=16`` or ``schedule=gpipe``."""
    candidate: Candidate
    why: str


def reason(request: Request, kind: str, loser: Candidate, best: Candidate | None) -> str:
    """One line: what it lacks in memory, or what takes the time that it is slower by."""
    limit = request.memory
    if not loser.fits(limit):
        return f"{_mesh_words(loser.plan)}: {_too_full(loser, limit)}"
    if best is None:
        return ""
    here, there = parts(loser.prediction), parts(best.prediction)
    worst = max(here, key=lambda part: here[part] - there.get(part, 0.0))
    share = here[worst] / loser.prediction.step_time
    slower = loser.prediction.step_time / best.prediction.step_time - 1.0
    tail = f" ({slower:.1%} slower)"
    if slower < 0.02:
        return f"{kind}: {slower:.1%} slower, most of it {_WORDS.get(worst, worst)}"
    if worst == "bubble":
        count = request.job(loser.plan).microbatches
        return f"{kind}: bubble {share:.0%}: {count} microbatches on pp={loser.plan.pp}" + tail
    if worst in _WORDS:
        what = _crossing(request, loser.plan, worst) + _word(loser.plan, worst)
        return f"{kind}: {what} {share:.0%} of the step" + tail
    if worst == "compute":
        return f"{kind}: {_compute(loser, best)}" + tail
    return f"{kind}: {worst} {share:.0%} of the step" + tail


def parts(prediction: Prediction) -> dict[str, float]:
    """Seconds of a step in a mean rank, by what they go to: compute, bubble, optimizer, other, exposed axes."""
    found: dict[str, float] = {"compute": 0.0, "bubble": 0.0, "optimizer": 0.0, "other": 0.0}
    for rank in prediction.ranks:
        for name in found.keys() & {"compute", "bubble", "optimizer", "other"}:
            found[name] += getattr(rank, name)
        for axis, seconds in rank.exposed.items():
            found[axis] = found.get(axis, 0.0) + seconds
    return {name: seconds / len(prediction.ranks) for name, seconds in found.items()}


def _too_full(candidate: Candidate, limit: float) -> str:
    rank = candidate.memory.fullest
    return f"stage {rank.pp} needs {rank.peak / GIB:.1f} GiB of {limit / GIB:.1f}"


def _mesh_words(plan: Plan) -> str:
    names = ("tp", "pp", "dp", "cp", "ep", "micro", "zero")
    words = [f"{name}={getattr(plan, name)}" for name in names if getattr(plan, name) not in (None, 1, 0)]
    return " ".join(words) or "one rank"


def _word(plan: Plan, axis: str) -> str:
    if axis == "tp" and plan.sp:
        return "all-gather and reduce-scatter"
    return _WORDS[axis]


def _crossing(request: Request, plan: Plan, axis: str) -> str:
    """``tp=16 crosses nvlink domains of 8: `` where the axis leaves the innermost tier."""
    topology = request.topology
    group = _group(request.job(plan).mesh, axis)
    if group is None or topology.tier_index(group) == 0:
        return ""
    inner = topology.tiers[0]
    return f"{axis}={len(group)} crosses the {inner.name} domains of {inner.size}: "


def placed(job: Job) -> list[tuple[str, int, int]]:
    """Of each axis with several ranks, from the inside out: its name, its size, the index of the tier it crosses."""
    mesh, found = job.mesh, []
    sizes = {**mesh.sizes, "ep": mesh.ep, "etp": mesh.etp if mesh.ep > 1 else 1}
    for axis in ("tp", "etp", "cp", "ep", *(("pp", "dp") if mesh.apart > 1 else ("dp", "pp"))):
        if sizes[axis] > 1:
            found.append((axis, sizes[axis], job.topology.tier_index(mesh.group(0, (axis,)))))
    return found


def placement(job: Job) -> str:
    """``tp=8 within the nvlink domains of 8; dp=16 pp=4 across network``; empty for one rank."""
    words = []
    for index, tier in enumerate(job.topology.tiers):
        axes = " ".join(f"{axis}={size}" for axis, size, crossed in placed(job) if crossed == index)
        if axes:
            inside = f"within the {tier.name} domains of {tier.size}"
            words.append(f"{axes} {inside if index == 0 else 'across ' + tier.name}")
    return "; ".join(words)


def _group(mesh: Mesh, axis: str) -> tuple[int, ...] | None:
    axes = ("dp", "cp") if axis == "dp" else (axis,)
    return mesh.group(0, axes) if mesh.world_size > 1 else None


def _compute(loser: Candidate, best: Candidate) -> str:
    more = loser.prediction.hardware_flops / best.prediction.hardware_flops - 1.0
    if more > 0.01 and loser.plan.recompute not in ("none", best.plan.recompute):
        return f"{more:.0%} more FLOPs for recompute={loser.plan.recompute}"
    under = {axis: _hidden(loser, axis) - _hidden(best, axis) for axis in _WORDS}
    most = max(under, key=under.__getitem__)
    if under[most] > 0.05 * best.prediction.step_time:
        share = _hidden(loser, most) / loser.prediction.step_time
        return f"{_WORDS[most]}, {share:.0%} of the step, slow what hides them"
    ratio = parts(loser.prediction)["compute"] / parts(best.prediction)["compute"] - 1.0
    return f"compute {ratio:.0%} longer: smaller operators, or a rank with more layers"


def _hidden(candidate: Candidate, axis: str) -> float:
    """Seconds of an axis under compute, in a mean rank."""
    ranks = candidate.prediction.ranks
    return sum(rank.hidden.get(axis, 0.0) for rank in ranks) / len(ranks)


def nearest_words(request: Request, nearest: Candidate, tightest: Callable[[Request], Candidate | None]) -> list[str]:
    """What an infeasible request lacks, and changes under which it fits."""
    need, limit = nearest.memory.fullest.peak, request.memory
    lines = [
        f"nearest to fitting: {str(nearest.plan)!r}, which needs {need / limit - 1.0:.0%} more memory: "
        f"{_too_full(nearest, limit)}"
    ]
    fitting = [text for text, other in _changes(request) if (found := tightest(other)) and found.fits(other.memory)]
    if fitting:
        lines.append("what fits: " + ", or ".join(fitting))
    return lines


def _changes(request: Request) -> Iterator[tuple[str, Request]]:
    """More devices (the first number of each kind that may fit), a shorter sequence, all of the memory."""
    if request.max_memory < 1.0:
        yield "max_memory=1.0", dataclasses.replace(request, max_memory=1.0)
    for factor in (2, 4, 8):
        size = request.world_size * factor
        topology = _larger(request.topology, size)
        if topology is not None:
            yield f"{size} devices", dataclasses.replace(request, world_size=size, topology=topology)
    for factor in (2, 4):
        if request.seq % factor == 0:
            yield f"seq={request.seq // factor}", dataclasses.replace(request, seq=request.seq // factor)


def _larger(topology: Topology, size: int) -> Topology | None:
    """The cluster with ``size`` devices, if it has them or can be imagined with more."""
    if size <= topology.devices:
        return topology
    return None if topology.measured.links else topology.with_devices(size)
