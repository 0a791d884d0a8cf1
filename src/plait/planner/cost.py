"""The time model: seconds of one step of a job, and where each pipeline rank spends them.

Layers are counted (`ops`), timed on the device (`kernels`) and on the wire (`wires`), joined to stages, put through the
pipeline, and followed by gradients, weights and the optimizer (`overlap`). Constants: `constants`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from plait.core.events import Event
from plait.core.plan import Plan
from plait.core.topology import Topology
from plait.models.config import ModelConfig
from plait.models.shapes import flops_per_token, parameter_shapes
from plait.parallel.layout import stage_layers
from plait.planner import ops
from plait.planner.constants import DEFAULT, Table
from plait.planner.job import Job, Practice
from plait.planner.kernels import Machine, seconds
from plait.planner.ops import Message, Phase, Slice
from plait.planner.overlap import Pipeline, Share, makespan, under
from plait.planner.prediction import Prediction, RankTime
from plait.planner.wires import Group, collective, exchange
from plait.schedule.generate import generate
from plait.schedule.simulate import Cost, simulate

PARTS: Mapping[str, tuple[str, ...]] = {
    "core_attn": ("core",),
    "mlp": ("mlp", "act"),
    "moe_act": ("act",),
    "mlp_act": ("act",),
    "layernorm": ("norm",),
    "mla_up_proj": ("mla_up_proj",),
    "moe": ("experts", "router", "permute", "act", "shared"),
}
"""A part that can be recomputed alone -> the operators it is made of."""


class _Same:
    """A topology and a table as one key that is compared by identity; holding them keeps the identity theirs."""

    def __init__(self, topology: Topology, table: Table) -> None:
        self.topology, self.table = topology, table

    def __hash__(self) -> int:
        return hash((id(self.topology), id(self.table)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.topology is other.topology and self.table is other.table


@lru_cache(maxsize=1 << 6)
def _machine(key: _Same) -> Machine:
    return Machine(key.topology, key.table)


@dataclass(frozen=True, kw_only=True, slots=True)
class Spent:
    """One phase of a microbatch: device seconds, launches of the host, communication exposed and hidden by axis."""

    device: float = 0.0
    launches: float = 0.0
    exposed: tuple[tuple[str, float], ...] = ()
    hidden: tuple[tuple[str, float], ...] = ()
    flops: float = 0.0

    @property
    def waits(self) -> float:
        """Seconds of exposed communication."""
        return sum(value for _, value in self.exposed)

    @property
    def total(self) -> float:
        """Device seconds with exposed communication."""
        return self.device + self.waits


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One virtual stage and microbatch: its phases, and parameters of a rank, dense and of experts."""

    forward: Spent
    backward: Spent
    weight: Spent
    dense: float
    experts: float


def _added(parts: Sequence[tuple[Spent, float]]) -> Spent:
    """The sum of phases, each so many times."""
    exposed: dict[str, float] = {}
    hidden: dict[str, float] = {}
    for spent, times in parts:
        for axis, value in spent.exposed:
            exposed[axis] = exposed.get(axis, 0.0) + value * times
        for axis, value in spent.hidden:
            hidden[axis] = hidden.get(axis, 0.0) + value * times
    return Spent(
        device=sum(spent.device * times for spent, times in parts),
        launches=sum(spent.launches * times for spent, times in parts),
        exposed=tuple(exposed.items()),
        hidden=tuple(hidden.items()),
        flops=sum(spent.flops * times for spent, times in parts),
    )


def _groups(cut: Slice) -> dict[str, Group]:
    return {
        "tp": Group(size=cut.tp, stride=1),
        "cp": Group(size=cut.cp, stride=cut.tp),
        "ep": Group(size=cut.ep, stride=cut.etp),
        "etp": Group(size=cut.etp, stride=1),
    }


def _spent(machine: Machine, cut: Slice, phase: Phase, name: str, parts: frozenset[str] | None = None) -> Spent:
    """A phase (``F``, ``B`` or ``W``) on the device; ``parts``: only these operators, without messages."""
    chosen = phase.ops if parts is None else tuple(ops.parts_of(phase, parts))
    table, practice = machine.table, cut.practice
    uneven = 1.0 if practice.balanced else table.of("imbalance", machine.family)
    device = 0.0
    launches = 0.0
    core = 0.0
    for op in chosen:
        spent = seconds(machine, op)
        if op.kind == "grouped":
            spent *= uneven
        if op.part == "core":
            core += spent
        device += spent
        launches += op.kernels
    exposed: dict[str, float] = {}
    hidden: dict[str, float] = {}
    if parts is None:
        groups = _groups(cut)
        for message in phase.messages:
            if message.axis == "ep" and cut.model.moe is not None:
                once = table.of("node_once", practice.framework) > 0
                cost = exchange(machine, message.size, groups["ep"], cut.model.moe.top_k, once)
            else:
                cost = collective(machine, message.op, message.size, groups[message.axis])
            if cost == 0.0:
                continue
            share = _share(machine, cut, message, cost, name, device, core)
            axis = "tp" if message.axis == "etp" else message.axis
            exposed[axis] = exposed.get(axis, 0.0) + share.exposed
            hidden[axis] = hidden.get(axis, 0.0) + share.hidden
            device += share.slowing
            launches += 1
    if name == "B":
        launches *= table.of("backward_launch", machine.family)
    return Spent(
        device=device,
        launches=launches,
        exposed=tuple(exposed.items()),
        hidden=tuple(hidden.items()),
        flops=sum(op.flops for op in chosen),
    )


def _share(machine: Machine, cut: Slice, message: Message, cost: float, name: str, device: float, core: float) -> Share:
    """How much of one message the layer's own compute hides."""
    table, family, practice = machine.table, machine.family, cut.practice
    contention = table.of("contention", family)
    if message.op == "ring":
        return under(cost, core * (cut.cp - 1) / cut.cp, contention)
    if message.axis in ("tp", "etp"):
        if name == "W":
            # The input is gathered again while its gradient is computed.
            return under(cost, cost, contention)
        return under(cost, cost * table.of("split_share", family) if practice.overlap_tp else 0.0, contention)
    if message.axis == "ep" and practice.overlap_ep:
        return under(cost, min(device, cost * table.of("expert_hidden", family)), contention)
    return under(cost, 0.0, contention)


@lru_cache(maxsize=1 << 14)
def _layer(machine: Machine, cut: Slice, experts: bool, window: int | None, mode: str) -> tuple[Spent, Spent, Spent]:
    """F, B, W of a layer; what ``mode`` recomputes is in B."""
    work = ops.layer(cut, experts, window)
    forward = _spent(machine, cut, work.forward, "F")
    backward = _spent(machine, cut, work.backward, "B")
    weight = _spent(machine, cut, work.weight, "W")
    if mode == "full":
        backward = _added([(backward, 1), (forward, 1)])
    elif mode == "selective" and cut.practice.framework == "torchtitan":
        # It keeps every second product's output; everything else runs again.
        backward = _added([(backward, 1), (forward, 1 / 2)])
    elif mode == "selective":
        named = cut.practice.recompute_parts or ("core_attn",)
        parts = frozenset(part for name in named for part in PARTS.get(name, ()))
        backward = _added([(backward, 1), (_spent(machine, cut, work.forward, "F", parts), 1)])
    return forward, backward, weight


@lru_cache(maxsize=1 << 12)
def _ends(machine: Machine, cut: Slice, last: bool) -> tuple[Spent, Spent, Spent]:
    """F, B, W of the embedding, or of the head and the loss."""
    work = ops.head(cut) if last else ops.embedding(cut)
    return (
        _spent(machine, cut, work.forward, "F"),
        _spent(machine, cut, work.backward, "B"),
        _spent(machine, cut, work.weight, "W"),
    )


@lru_cache(maxsize=1 << 8)
def _weights(model: ModelConfig) -> tuple[tuple[float, float], ...]:
    """(dense, expert) parameters of each layer, then of the embedding, then of the head with its norm."""
    layers = [[0.0, 0.0] for _ in range(model.num_layers)]
    embed = head = 0.0
    for name, shape in parameter_shapes(model).items():
        part = name.split(".")
        count = float(math.prod(shape))
        if part[0] == "layers":
            layers[int(part[1])][1 if len(shape) == 3 else 0] += count
        elif part[0] == "embed":
            embed += count
        else:
            head += count
    return (*((dense, experts) for dense, experts in layers), (embed, 0.0), (head, 0.0))


@lru_cache(maxsize=1 << 12)
def _cut_of(model: ModelConfig, plan: Plan) -> tuple[int, ...]:
    return stage_layers(model, plan)


def _layer_kinds(model: ModelConfig, plan: Plan, first: int, stop: int) -> dict[tuple[bool, int | None, str], int]:
    """How many layers of each kind (experts, window, recomputation) there are."""
    if model.moe is None and model.sliding_window is None and plan.recompute in ("none", "full", "selective"):
        return {(False, None, plan.recompute): stop - first} if stop > first else {}
    found: dict[tuple[bool, int | None, str], int] = {}
    for layer in range(first, stop):
        key = (model.moe_of(layer) is not None, model.window_of(layer), plan.recompute_of(layer))
        found[key] = found.get(key, 0) + 1
    return found


@lru_cache(maxsize=1 << 13)
def _stages(machine: Machine, cut: Slice, plan: Plan) -> tuple[Stage, ...]:
    """Every virtual stage; equal ones are the same object."""
    model = cut.model
    counts = _cut_of(model, plan)
    weights = _weights(model)
    found: list[Stage] = []
    first = 0
    for index, count in enumerate(counts):
        parts: list[tuple[tuple[Spent, Spent, Spent], float]] = [
            (_layer(machine, cut, *kind), times)
            for kind, times in _layer_kinds(model, plan, first, first + count).items()
        ]
        dense = sum(weights[layer][0] for layer in range(first, first + count)) / cut.tp
        experts = sum(weights[layer][1] for layer in range(first, first + count)) / (cut.ep * cut.etp)
        if index == 0:
            parts.append((_ends(machine, cut, False), 1))
            dense += weights[-2][0] / cut.tp
        if index == len(counts) - 1:
            depth = cut.practice.mtp_layers
            parts.append((_ends(machine, cut, True), 1 + depth))
            if depth:
                kind = (model.moe is not None, None, plan.recompute_of(model.num_layers - 1))
                parts.append((_layer(machine, cut, *kind), depth))
                dense += depth * (weights[-3][0] + 2 * model.hidden_size**2) / cut.tp
                experts += depth * weights[-3][1] / (cut.ep * cut.etp)
            dense += weights[-1][0] / cut.tp
            if model.tied and len(counts) > 1:
                dense += weights[-2][0] / cut.tp
        found.append(
            Stage(
                forward=_added([(part[0], times) for part, times in parts]),
                backward=_added([(part[1], times) for part, times in parts]),
                weight=_added([(part[2], times) for part, times in parts]),
                dense=dense,
                experts=experts,
            )
        )
        first += count
    return tuple(found)


def slice_of(job: Job) -> Slice:
    """A rank's share of a layer under the job."""
    plan = job.plan
    return Slice(
        model=job.model,
        seq=job.seq,
        micro=plan.micro,
        tp=plan.tp,
        sp=plan.sp,
        cp=plan.cp,
        context=plan.context,
        ep=plan.ep,
        etp=plan.etp,
        precision=plan.precision,
        practice=job.practice,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Paced:
    """A stage's F, B, W in seconds with exposed communication, the host's pace in them."""

    forward: float
    backward: float
    weight: float


def _paced(machine: Machine, stage: Stage, practice: Practice, microbatches: int) -> Paced:
    """No phase ends before the host has launched it; ahead in backward, it makes up in the next forward."""
    f, b, w = stage.forward.total, stage.backward.total, stage.weight.total
    if practice.graph:
        return Paced(forward=f, backward=b, weight=w)
    table, family = machine.table, machine.family
    launch = machine.launch * table.of("pace", practice.framework)
    if practice.fused:
        launch *= table.of("fused_launch", family)
    # Messages wait for other ranks, so that the host does not get ahead under them.
    host_f = stage.forward.launches * launch + stage.forward.waits
    host_b = (stage.backward.launches + stage.weight.launches) * launch + stage.backward.waits + stage.weight.waits
    # Some operators wait for the host and some for the device: a smooth maximum.
    power = table.of("pace_join", family)
    alone = _smooth(f, host_f, power) + _smooth(b + w, host_b, power)
    many = _smooth(f + b + w, host_f + host_b, power)
    mean = (alone + (microbatches - 1) * many) / microbatches
    factor = mean / (f + b + w) if f + b + w else 1.0
    return Paced(forward=f * factor, backward=b * factor, weight=w * factor)


def _smooth(device: float, host: float, power: float) -> float:
    """The longer of two times, and more where they are near."""
    low, high = sorted((device, host))
    return high * (1 + (low / high) ** power) ** (1 / power) if high else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """Gradients, weights and the optimizer of one rank: seconds of a step beside the pipeline."""

    grads: Share
    weights: Share
    optimizer: float


def _data(machine: Machine, job: Job, stages: Sequence[Stage], paced: Sequence[Paced]) -> Data:
    """Reduction of gradients, gathers of weights, and the update of one pipeline rank."""
    plan, practice, table, family = job.plan, job.practice, machine.table, machine.family
    mesh = job.mesh
    width = 4.0 if plan.precision == "fp32" else 2.0
    if plan.zero == 3 and plan.precision == "fp8" and table.of("gather_low", practice.framework):
        width = 1.0
    kept = practice.grad_bytes or 4.0
    state = practice.optimizer_bytes or (8.0 if plan.precision == "fp32" else 12.0)
    dense, experts = sum(stage.dense for stage in stages), sum(stage.experts for stage in stages)
    layers = round(job.model.num_layers * len(stages) / plan.stage_count)
    shared = Group(size=mesh.dp * mesh.cp, stride=mesh.tp)
    copies = Group(size=mesh.expert_sizes["edp"], stride=mesh.ep * mesh.etp)
    forward = sum(stage.forward for stage in paced)
    backward = sum(stage.backward + stage.weight for stage in paced)
    contention, usable = table.of("contention", family), table.of("hidden_share", family)
    zero = plan.zero
    grads = weights = 0.0
    owners = 0
    for count, group in ((dense, shared), (experts, copies)):
        if not count:
            continue
        inner, outer = _nested(plan, group)
        # Under zero=3 every layer's weights and gradients are messages of their own.
        calls = max(1, layers) if zero == 3 else 1
        if zero == 0:
            grads += collective(machine, "all_reduce", kept * count, group)
            continue
        grads += calls * collective(machine, "reduce_scatter", kept * count / calls, inner)
        grads += calls * collective(machine, "all_reduce", kept * count / inner.size / calls, outer)
        weights += calls * collective(machine, "all_gather", width * count / calls, inner)
        owners = max(owners, inner.size)
    m = job.microbatches
    shares = dense / (shared.size if zero else 1) + experts / (copies.size if zero else 1)
    if plan.zero_group and zero:
        shares = dense / min(plan.zero_group, shared.size) + experts / min(plan.zero_group, max(copies.size, 1))
    moved = shares * (2 * state + kept + width) * table.of("optimizer_passes", family)
    update = moved / machine.optimizer_bandwidth
    if zero == 3:
        usable = table.of("prefetch_share", family)
        # Every microbatch gathers the weights twice (forward, backward) and reduces its gradients.
        pull = under(
            2 * weights * m, usable * m * (forward + backward) if practice.overlap_weights else 0.0, contention
        )
        left = usable * m * (forward + backward) - pull.hidden
        push = under(grads * m, max(0.0, left) if practice.overlap_grads else 0.0, contention)
        return Data(grads=push, weights=pull, optimizer=update)
    push = under(grads, usable * backward if practice.overlap_grads else 0.0, contention)
    pull = under(weights, usable * forward if practice.overlap_weights else 0.0, contention)
    sent = owners * table.of("owner", practice.framework)
    pull = Share(exposed=pull.exposed + sent, hidden=pull.hidden, slowing=pull.slowing)
    return Data(grads=push, weights=pull, optimizer=update)


def _nested(plan: Plan, group: Group) -> tuple[Group, Group]:
    """The ranks that share state, and those that copy it."""
    inner = min(plan.zero_group or group.size, group.size)
    return Group(size=inner, stride=group.stride), Group(size=group.size // inner, stride=group.stride * inner)


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
    return collective(machine, "p2p", size, Group(size=plan.pp, stride=mesh.dp * mesh.cp * mesh.tp))


def predict(job: Job, table: Table = DEFAULT) -> Prediction:
    """The step's seconds and where they go. The job's plan has dp set and fits its cluster."""
    machine = _machine(_Same(job.topology, table))
    plan, practice = job.plan, job.practice
    m = max(1, job.microbatches)
    cut = slice_of(job)
    stages = _stages(machine, cut, plan)
    paced = [_paced(machine, stage, practice, m) for stage in stages]
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
    span = makespan(pipe)
    ranks: list[RankTime] = []
    longest = 0.0
    sums = pipe.rank_sums()
    for rank in range(plan.pp):
        held = pipe.stages_of(rank)
        data = _data(machine, job, [stages[s] for s in held], [paced[s] for s in held])
        other = machine.table.of("step_host", machine.family) + host * m
        tail = data.grads.added + data.weights.added + data.optimizer + other
        longest = max(longest, tail)
        ranks.append(_rank(rank, [stages[s] for s in held], sums[rank], m, span, data, hop, other))
    nodes = job.world_size / job.topology.tiers[0].size
    jitter = 1.0 + machine.table.of("straggle", machine.family) * math.log2(max(1.0, nodes))
    step = (span + longest) * jitter
    return _prediction(job, machine, stages, step, ranks)


def _rank(
    rank: int,
    held: Sequence[Stage],
    busy: float,
    m: int,
    span: float,
    data: Data,
    hop: float,
    other: float,
) -> RankTime:
    exposed: dict[str, float] = {}
    hidden: dict[str, float] = {}
    for stage in held:
        for spent in (stage.forward, stage.backward, stage.weight):
            for axis, value in spent.exposed:
                exposed[axis] = exposed.get(axis, 0.0) + m * value
            for axis, value in spent.hidden:
                hidden[axis] = hidden.get(axis, 0.0) + m * value
    compute = m * busy - sum(exposed.values()) + data.grads.slowing + data.weights.slowing
    exposed["dp"] = data.grads.exposed + data.weights.exposed
    hidden["dp"] = data.grads.hidden + data.weights.hidden
    if hop:
        hidden["pp"] = 2 * hop * m * len(held)
    return RankTime(
        pp=rank,
        compute=compute,
        exposed=exposed,
        hidden=hidden,
        bubble=max(0.0, span - m * busy),
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
    table, family = machine.table, machine.family
    spread = table.of("spread", family)
    if world > job.topology.tiers[0].size:
        spread += table.of("spread_nodes", family)
    if job.model.moe is not None:
        spread += table.of("spread_experts", family)
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


@lru_cache(maxsize=1 << 10)
def _model_flops(model: ModelConfig, seq: int) -> float:
    return flops_per_token(model, seq)


def stage_costs(job: Job, table: Table = DEFAULT) -> list[Cost]:
    """Seconds of each virtual stage for one microbatch, exposed communication in them."""
    machine = _machine(_Same(job.topology, table))
    stages = _stages(machine, slice_of(job), job.plan)
    m = max(1, job.microbatches)
    paced = [_paced(machine, stage, job.practice, m) for stage in stages]
    return [Cost(forward=one.forward, backward=one.backward, weight=one.weight) for one in paced]


def timeline(job: Job, table: Table = DEFAULT) -> list[Event]:
    """The predicted events of one step: every action of the pipeline, then gradients and the optimizer, a rank each."""
    machine = _machine(_Same(job.topology, table))
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


def with_plan(job: Job, plan: Plan) -> Job:
    """The same job under another plan."""
    return replace(job, plan=plan)
