"""The time model: seconds of one step of a job, and where each pipeline rank spends them.

Layers are counted (`ops`), timed on the device (`kernels`) and on the wire (`wires`), joined to stages, put through the
pipeline, and followed by gradients, weights and the optimizer (`overlap`). Constants: `constants`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from plait.core.events import Event
from plait.core.plan import Plan
from plait.models.config import ModelConfig
from plait.models.shapes import flops_per_token
from plait.planner.constants import DEFAULT, Table
from plait.planner.job import Job
from plait.planner.kernels import Machine
from plait.planner.local import span_of
from plait.planner.offload import shown
from plait.planner.overlap import Pipeline
from plait.planner.pace import pace_of
from plait.planner.prediction import Prediction, RankTime
from plait.planner.stages import Stage, machine_of, slice_of, stages_of
from plait.planner.updates import Updates, updates
from plait.planner.wires import Group, collective
from plait.schedule.generate import generate
from plait.schedule.simulate import Cost, simulate


def _schedule_name(plan: Plan) -> str:
    """The named schedule whose time is taken: for a searched one zero-bubble on its placement, for a file 1F1B."""
    if plan.schedule == "auto":
        return "zb-h1" if plan.virtual == 1 else "zb-v"
    if plan.schedule_file is not None:
        return "1f1b" if plan.virtual == 1 else "interleaved"
    return plan.schedule


def _transfer(machine: Machine, job: Job) -> float:
    """Seconds of one activation across a stage boundary, the slowest of them."""
    plan, mesh = job.plan, job.mesh
    if plan.pp == 1:
        return 0.0
    cut = slice_of(job)
    size = cut.width * cut.tokens * job.model.hidden_size / plan.tp
    return collective(machine, "p2p", size, Group(size=plan.pp, stride=mesh.rank({"pp": 1})))


def predict(job: Job, table: Table = DEFAULT) -> Prediction:
    """The step's seconds and where they go. The job's plan has dp set and fits its cluster."""
    machine = machine_of(job.topology, table)
    plan, practice = job.plan, job.practice
    m = max(1, job.microbatches)
    cut = slice_of(job)
    stages = stages_of(machine, cut, plan)
    # Equal stages are the same object: each is looked at once.
    different = {id(stage): stage for stage in stages}
    paces = {key: pace_of(machine, stage, practice, m) for key, stage in different.items()}
    paced = [paces[id(stage)] for stage in stages]
    hop = _transfer(machine, job)
    host = machine.table.of("microbatch_host", machine.family)
    pipe = Pipeline(
        name=_schedule_name(plan),
        ranks=plan.pp,
        microbatches=m,
        forward=tuple(one.forward for one in paced),
        backward=tuple(one.backward for one in paced),
        weight=tuple(one.weight for one in paced),
        transfer=hop,
        blocking=not practice.overlap_pp,
    )
    span = span_of(pipe, job)
    found: list[tuple[float, RankTime]] = []
    longest = 0.0
    sums = pipe.rank_sums()
    other = machine.table.of("step_host", machine.family) + host * m
    known: dict[tuple[int, ...], tuple[float, RankTime]] = {}
    for rank in range(plan.pp):
        held = pipe.stages_of(rank)
        key = tuple(id(stages[s]) for s in held)
        if key not in known:
            mine = [stages[s] for s in held]
            data = updates(machine, job, mine, [paced[s] for s in held])
            aside = other
            if practice.offload:
                aside += shown(machine, job, held, [paced[s] for s in held])
            tail = data.grads.added + data.weights.added + data.optimizer + aside
            moved = (2 * hop * m * len(held), pipe.blocking)
            known[key] = tail, _rank(rank, mine, sums[rank], m, span, data, moved, aside)
        longest = max(longest, known[key][0])
        found.append(known[key])
    # Ranks whose gradients and optimizer end before the slowest one's wait for it.
    ranks = [_placed(one, rank, longest - tail) for rank, (tail, one) in enumerate(found)]
    return _prediction(job, machine, stages, span + longest, ranks)


def _placed(one: RankTime, rank: int, waits: float) -> RankTime:
    """``one`` as pipeline rank ``rank``, which is idle for ``waits`` seconds more."""
    return RankTime(
        pp=rank,
        compute=one.compute,
        exposed=one.exposed,
        hidden=one.hidden,
        bubble=one.bubble + waits,
        optimizer=one.optimizer,
        other=one.other,
    )


def _rank(
    rank: int,
    held: Sequence[Stage],
    busy: float,
    m: int,
    span: float,
    data: Updates,
    transfers: tuple[float, bool],
    other: float,
) -> RankTime:
    """Where a rank's step goes: the parts make up ``span`` and the rank's own tail, but for rounding.

    ``transfers``: seconds of them between stages, and whether the rank waits for them.
    """
    exposed: dict[str, float] = {}
    hidden: dict[str, float] = {}
    # Ranks that share cores are busy for less than their sums while others wait (`plait.planner.local`).
    times = m * min(1.0, span / (m * busy)) if busy else float(m)
    for stage in held:
        for spent in (stage.forward, stage.backward, stage.weight):
            for axis, value in spent.exposed:
                exposed[axis] = exposed.get(axis, 0.0) + times * value
            for axis, value in spent.hidden:
                hidden[axis] = hidden.get(axis, 0.0) + times * value
    compute = times * busy - sum(exposed.values()) + data.grads.slowing + data.weights.slowing
    exposed["dp"] = data.grads.exposed + data.weights.exposed
    hidden["dp"] = data.grads.hidden + data.weights.hidden
    moved, blocking = transfers
    idle = max(0.0, span - times * busy)
    waited = min(moved, idle) if blocking else 0.0
    if moved:
        exposed["pp"] = waited
        hidden["pp"] = moved - waited
    return RankTime(
        pp=rank,
        compute=compute,
        exposed=exposed,
        hidden=hidden,
        bubble=idle - waited,
        optimizer=data.optimizer,
        other=other,
    )


def _prediction(
    job: Job, machine: Machine, stages: Sequence[Stage], step: float, ranks: Sequence[RankTime]
) -> Prediction:
    world = job.world_size
    tokens = job.global_batch * job.seq
    model_flops = _model_flops(job.model, job.seq) * tokens
    hardware = sum(s.forward.flops + s.backward.flops + s.weight.flops for s in stages)
    hardware *= job.microbatches * job.dp * job.plan.cp * job.plan.tp
    peak = job.topology.device.peaks.get(slice_of(job).products)
    spread = machine.table.of("spread", kind_of(job))
    bubble = sum(rank.bubble for rank in ranks) / (len(ranks) * step)
    return Prediction(
        step_time=step,
        low=step * math.exp(-spread),
        high=step * math.exp(spread),
        tokens_per_s_per_device=tokens / (step * world),
        model_flops=model_flops,
        hardware_flops=hardware,
        mfu=None if peak is None else model_flops / (step * world * peak),
        bubble_rate=bubble,
        ranks=tuple(ranks),
    )


def kind_of(job: Job) -> str:
    """The kind of job whose residuals are alike: dense or experts, on one node or on several."""
    nodes = "_nodes" if job.world_size > job.topology.tiers[0].size else ""
    return ("dense" if job.model.moe is None else "experts") + nodes


@lru_cache(maxsize=1 << 10)
def _model_flops(model: ModelConfig, seq: int) -> float:
    return flops_per_token(model, seq)


def stage_costs(job: Job, table: Table = DEFAULT) -> list[Cost]:
    """Seconds of each virtual stage for one microbatch, exposed communication in them."""
    machine = machine_of(job.topology, table)
    stages = stages_of(machine, slice_of(job), job.plan)
    m = max(1, job.microbatches)
    paced = [pace_of(machine, stage, job.practice, m) for stage in stages]
    return [Cost(forward=one.forward, backward=one.backward, weight=one.weight) for one in paced]


def timeline(job: Job, table: Table = DEFAULT) -> list[Event]:
    """The predicted events of one step: every action of the pipeline, then gradients and the optimizer, a rank each."""
    machine = machine_of(job.topology, table)
    plan = job.plan
    name = _schedule_name(plan)
    if name == "2bw" or (name == "interleaved" and plan.virtual == 1):
        name = "1f1b"
    m = max(1, job.microbatches)
    schedule = generate(name, ranks=plan.pp, microbatches=m, virtual=plan.virtual)
    events = simulate(schedule, stage_costs(job, table), _transfer(machine, job))
    end = max(event.end for event in events)
    for rank in predict(job, table).ranks:
        at = end
        spans = (
            ("comm", "all_reduce", "gradients", rank.exposed.get("dp", 0.0)),
            ("compute", "optimizer", "update", rank.optimizer),
        )
        for stream, kind, what, length in spans:
            if length:
                events.append(Event(rank=rank.pp, stream=stream, kind=kind, name=what, start=at, end=at + length))
                at += length
    return events
