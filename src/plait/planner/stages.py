"""Seconds of the stages of a pipeline: layers on the device and the wire, their recomputation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from plait.core.mesh import ORDERS
from plait.core.plan import Plan
from plait.core.topology import Topology
from plait.models.config import ModelConfig
from plait.parallel.layout import stage_layers
from plait.planner import layers
from plait.planner.constants import DEFAULT, Table
from plait.planner.hiding import hidden_by
from plait.planner.job import Job
from plait.planner.kernels import Machine, seconds
from plait.planner.local import meeting
from plait.planner.ops import Phase, Slice, parts_of
from plait.planner.recomputing import modes_of
from plait.planner.weights import weights_of
from plait.planner.wires import Group, collective, exchange, laid

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
def _made(key: _Same) -> Machine:
    return Machine(key.topology, key.table)


def machine_of(topology: Topology, table: Table = DEFAULT) -> Machine:
    """The machine of a topology; one for each topology and table that is held on to."""
    return _made(_Same(topology, table))


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


def groups_of(cut: Slice) -> dict[str, Group]:
    """Axis -> the ranks along it."""
    return {
        "tp": Group(size=cut.tp, stride=1),
        "cp": Group(size=cut.cp, stride=cut.tp),
        "ep": laid(cut.ep, cut.etp, cut.cp * cut.tp, cut.apart),
        "etp": Group(size=cut.etp, stride=1),
    }


def _spent(machine: Machine, cut: Slice, phase: Phase, name: str, parts: frozenset[str] | None = None) -> Spent:
    """A phase (``F``, ``B`` or ``W``) on the device; ``parts``: only these operators, without messages."""
    chosen = phase.ops if parts is None else tuple(parts_of(phase, parts))
    table, practice = machine.table, cut.practice
    uneven = 1.0 if practice.balanced else table.of("imbalance", machine.family)
    device = 0.0
    launches = 0.0
    core = 0.0
    each = table.of("expert_launch", machine.family)
    # Transformer Engine casts all experts' rows at once to the blockwise recipe, expert by expert to the others.
    cast = each if practice.fp8 == "blockwise" else table.of("expert_cast", machine.family)
    for op in chosen:
        spent = seconds(machine, op)
        if op.kind == "grouped":
            spent *= uneven
        if op.part == "core":
            core += spent
        device += spent
        launches += op.kernels * (1 if op.part != "experts" else cast if op.kind == "memory" else each)
    exposed: dict[str, float] = {}
    hidden: dict[str, float] = {}
    if parts is None:
        groups = groups_of(cut)
        apart = device / max(1, len(phase.messages))
        for message in phase.messages:
            size = message.size
            if message.axis == "tp" and message.op == "all_gather" and cut.low:
                # Cast before they are sent.
                size *= 0.5 if table.of("low_messages", practice.framework) else 1.0
            if message.axis == "ep" and cut.model.moe is not None:
                once = table.of("node_once", practice.framework) > 0
                cost = exchange(machine, message.size, groups["ep"], cut.model.moe.top_k, once)
            else:
                cost = collective(machine, message.op, size, groups[message.axis])
            if cost == 0.0:
                continue
            if name != "W":  # which waits for nobody: its gathers run beside it
                cost += meeting(machine.measured, groups[message.axis].size, apart)
            share = hidden_by(machine, cut, message, cost, name, device, core)
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


@lru_cache(maxsize=1 << 14)
def layer_times(
    machine: Machine, cut: Slice, experts: bool, window: int | None, mode: str
) -> tuple[Spent, Spent, Spent]:
    """F, B, W of a layer; what ``mode`` recomputes is in B."""
    work = layers.layer(cut, experts, window)
    if mode != "none":
        forward, backward, weight = layer_times(machine, cut, experts, window, "none")
    else:
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
def end_times(machine: Machine, cut: Slice, last: bool) -> tuple[Spent, Spent, Spent]:
    """F, B, W of the embedding, or of the head and the loss."""
    work = layers.head(cut) if last else layers.embedding(cut)
    return (
        _spent(machine, cut, work.forward, "F"),
        _spent(machine, cut, work.backward, "B"),
        _spent(machine, cut, work.weight, "W"),
    )


@lru_cache(maxsize=1 << 12)
def _cut_of(model: ModelConfig, plan: Plan) -> tuple[int, ...]:
    return stage_layers(model, plan)


def _layer_kinds(model: ModelConfig, plan: Plan, first: int, stop: int) -> dict[tuple[bool, int | None, str], int]:
    """How many layers of each kind (experts, window, recomputation) there are."""
    if model.moe is None and model.sliding_window is None and plan.recompute in ("none", "full", "selective"):
        return {(False, None, plan.recompute): stop - first} if stop > first else {}
    found: dict[tuple[bool, int | None, str], int] = {}
    modes = modes_of(plan.recompute, model.num_layers)
    for layer in range(first, stop):
        key = (model.moe_of(layer) is not None, model.window_of(layer), modes[layer])
        found[key] = found.get(key, 0) + 1
    return found


@lru_cache(maxsize=1 << 13)
def stages_of(machine: Machine, cut: Slice, plan: Plan) -> tuple[Stage, ...]:
    """Every virtual stage; equal ones are the same object."""
    model = cut.model
    counts = _cut_of(model, plan)
    before = weights_of(model)[0]
    known: dict[tuple[object, ...], Stage] = {}
    found: list[Stage] = []
    first = 0
    for index, count in enumerate(counts):
        stop = first + count
        kinds = _layer_kinds(model, plan, first, stop)
        weights = (before[stop][0] - before[first][0], before[stop][1] - before[first][1])
        ends = (index == 0, index == len(counts) - 1)
        key = (tuple(kinds.items()), weights, ends)
        if key not in known:
            known[key] = _stage(machine, cut, plan, kinds, weights, ends)
        found.append(known[key])
        first = stop
    return tuple(found)


def _stage(
    machine: Machine,
    cut: Slice,
    plan: Plan,
    kinds: Mapping[tuple[bool, int | None, str], int],
    weights: tuple[float, float],
    ends: tuple[bool, bool],
) -> Stage:
    """Layers of ``kinds`` with ``weights`` (dense, experts), and at the ``ends`` the embedding and the head."""
    model = cut.model
    before, embed, head = weights_of(model)
    parts: list[tuple[tuple[Spent, Spent, Spent], float]] = [
        (layer_times(machine, cut, *kind), times) for kind, times in kinds.items()
    ]
    dense, experts = weights[0] / cut.tp, weights[1] / (cut.ep * cut.etp)
    if ends[0]:
        parts.append((end_times(machine, cut, False), 1))
        dense += embed / cut.tp
    if ends[1]:
        depth = cut.practice.mtp_layers
        parts.append((end_times(machine, cut, True), 1 + depth))
        if depth:
            kind = (model.moe is not None, None, plan.recompute_of(model.num_layers - 1))
            parts.append((layer_times(machine, cut, *kind), depth))
            last = [one - other for one, other in zip(before[-1], before[-2], strict=True)]
            dense += depth * (last[0] + 2 * model.hidden_size**2) / cut.tp
            experts += depth * last[1] / (cut.ep * cut.etp)
        dense += head / cut.tp
        if model.tied and plan.stage_count > 1:
            dense += embed / cut.tp
    return Stage(
        forward=_added([(part[0], times) for part, times in parts]),
        backward=_added([(part[1], times) for part, times in parts]),
        weight=_added([(part[2], times) for part, times in parts]),
        dense=dense,
        experts=experts,
    )


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
        # Where experts' ranks are neighbours, the order of axes makes no difference to a layer.
        apart=plan.pp if plan.order != ORDERS[0] and plan.ep * plan.etp > plan.cp * plan.tp else 1,
    )
