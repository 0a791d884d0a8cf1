"""The plans a search looks at: which values of which axis, and what is legal, by the rule table of `plait.core.legal`.

A plan is a *cell* (what one layer costs a rank: tp, cp, sequence parallelism, experts, microbatch) and a *form* of it
(pp, dp, schedule, virtual stages, recomputation, ZeRO). Synchronous schedules alone: ``2bw`` trains another algorithm,
and ``auto`` starts from the named ones.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, get_type_hints

from plait.core.errors import ConfigError, PlanError
from plait.core.facts import Facts, ModelShape
from plait.core.fields import nearest_names, typed
from plait.core.legal import RULES, SIZE_RULES, divisors
from plait.core.mesh import ORDERS
from plait.core.plan import Plan, cut_stages
from plait.core.topology import Topology
from plait.models.config import ModelConfig
from plait.parallel.layout import model_shape, stage_layers
from plait.planner.conflict import conflict
from plait.planner.job import PLAIT, Job, Practice
from plait.planner.wires import laid

SCHEDULES: Final = ("1f1b", "interleaved", "gpipe", "zb-h1", "zb-h2", "zb-v", "dualpipe-v")
"""From the plain to the exotic: among equals the first wins."""
MODES: Final = ("none", "selective", "full")
"""Recomputation of all layers alike; where none does not fit, layers are chosen (`plait.planner.stage_cut`)."""
ZEROS: Final = (0, 1, 2, 3)
LARGEST: Final = 1 << 32
LARGEST_BATCH: Final = 1 << 20
"""Devices, tokens a sample, and samples of a request: what is beyond are typing errors, whose steps take hours to go
through."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is planned: a model on the first ``world_size`` devices of a cluster; ``global_batch`` samples of ``seq``
    tokens a step."""

    model: ModelConfig
    topology: Topology
    world_size: int
    seq: int
    global_batch: int
    precision: str = "bf16"
    fix: Mapping[str, object] = field(default_factory=dict)
    """Plan keys that are given."""
    max_memory: float = 0.9
    """Share of a device's memory that a plan may fill."""
    practice: Practice = PLAIT

    def __post_init__(self) -> None:
        kinds = get_type_hints(Plan)
        for name, value in self.fix.items():
            if name not in kinds:
                raise ConfigError(f"unknown key {name!r} in a plan; {nearest_names(name, kinds)}")
            typed(kinds[name], value, f"plan key {name}")
        for what, most in (("world_size", LARGEST), ("seq", LARGEST), ("global_batch", LARGEST_BATCH)):
            if not 1 <= getattr(self, what) <= most:
                raise ConfigError(f"{what}={getattr(self, what)}: at least 1, at most {most:,}")
        if self.world_size > self.topology.devices:
            raise ConfigError(
                f"{self.world_size} ranks on {self.topology.devices} devices of cluster {self.topology.name}; what "
                f"works: up to {self.topology.devices}"
            )
        if not 0 < self.max_memory <= 1:
            raise ConfigError(f"max_memory={self.max_memory}: a share above 0 and up to 1")

    @functools.cached_property
    def shape(self) -> ModelShape:
        return model_shape(self.model)

    @property
    def memory(self) -> float:
        """Bytes that a rank may fill."""
        return self.topology.device.memory * self.max_memory

    def facts(self, plan: Plan) -> Facts:
        return Facts(
            plan=plan, shape=self.shape, world_size=self.world_size, global_batch=self.global_batch, seq=self.seq
        )

    def job(self, plan: Plan) -> Job:
        return Job(
            model=self.model,
            plan=plan,
            topology=self.topology,
            seq=self.seq,
            global_batch=self.global_batch,
            practice=self.practice,
        )

    def base(self) -> dict[str, Any]:
        """Plan keys that all plans share."""
        return {"precision": self.precision, **self.fix}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What decides a layer's cost on a rank."""

    tp: int
    sp: bool
    cp: int
    context: str
    ep: int
    etp: int
    micro: int


@dataclass(frozen=True, kw_only=True)
class Form:
    """What a cell leaves open; its fields are those of a `Plan`."""

    pp: int
    dp: int
    schedule: str
    virtual: int
    stages: tuple[int, ...] | None
    recompute: str
    zero: int


def plan_of(request: Request, cell: Cell, form: Form) -> Plan:
    """The plan; keys that say no more than the default are left at it, so that its text is short."""
    keys: dict[str, Any] = {
        "tp": cell.tp,
        "pp": form.pp,
        "dp": form.dp,
        "cp": cell.cp,
        "micro": cell.micro,
        "schedule": form.schedule,
        "virtual": form.virtual,
        "stages": form.stages,
        "recompute": form.recompute,
        "zero": form.zero,
    }
    if cell.tp > 1 and not cell.sp:
        keys["sequence_parallel"] = False
    if cell.cp > 1:
        keys["context"] = cell.context
    if cell.ep > 1:
        keys["ep"] = cell.ep
    if cell.etp != (cell.tp if cell.ep == 1 else 1):
        keys["expert_tp"] = cell.etp
    return Plan(**{**request.base(), **keys})


def orders(request: Request, plan: Plan) -> list[Plan]:
    """``plan`` with each order of axes that makes a difference: there are stages and copies, in several domains."""
    if plan.pp == 1 or plan.dp == 1 or "order" in request.fix or request.world_size <= request.topology.tiers[0].size:
        return [plan]
    return [dataclasses.replace(plan, order=order) for order in ORDERS]


def laid_out(request: Request, plan: Plan) -> list[Plan]:
    """``plan`` in each of its `orders`, with state shared by all data ranks and by those of each smaller domain."""
    found = []
    for one in orders(request, plan):
        found.append(one)
        if one.zero and not {"zero_group", "node", "compress"} & request.fix.keys():
            mesh = one.mesh(request.world_size)
            data = laid(mesh.dp * mesh.cp, mesh.tp, mesh.cp * mesh.tp, mesh.apart)
            sizes = {data.within(tier.size) for tier in request.topology.tiers[:-1]}
            found += [
                dataclasses.replace(one, zero_group=size)
                for size in sorted(sizes)
                if 1 < size < data.size and data.size % size == 0
            ]
    return found


def meshes(request: Request, tp: int, cp: int) -> list[tuple[int, int]]:
    """(pp, dp) beside ``tp`` and ``cp``: all ranks used, some batch possible, a layer a stage."""
    rest = request.world_size // (tp * cp)
    found = []
    for pp in values(request.fix, "pp", divisors(rest)):
        if rest % pp or pp > request.shape.num_layers:
            continue
        dp = rest // pp
        if request.global_batch % dp == 0 and dp in values(request.fix, "dp", [dp]):
            found.append((pp, dp))
    return found


def pipeline_sizes(request: Request) -> list[int]:
    """Every pp that some tp and cp leave room for."""
    return [pp for pp in values(request.fix, "pp", divisors(request.world_size)) if pp <= request.shape.num_layers]


def stage_cuts(
    request: Request, costs: Sequence[float], first: float, last: float
) -> Callable[[int, bool], list[tuple[int, ...] | None]]:
    """Of a number of stages, and whether several lie on a rank in a loop: the plan's own cut by products (None), and
    one by seconds (``costs`` of layers, ``first`` and ``last`` of the ends) where that differs.

    Several virtual stages a rank in a loop even out by themselves.
    """
    given = request.fix.get("stages")

    @functools.cache
    def timed(stages: int) -> list[tuple[int, ...] | None]:
        cut = cut_stages(costs, stages, first, last)
        return [None] if cut == stage_layers(request.model, Plan(pp=stages)) else [None, cut]

    def cuts(stages: int, looped: bool) -> list[tuple[int, ...] | None]:
        if given is not None:
            cut = typed(tuple[int, ...] | None, given, "plan key stages")
            return [cut] if len(cut) == stages and sum(cut) == request.shape.num_layers else []
        return [None] if stages == 1 or looped else timed(stages)

    return cuts


def zeros(fix: Mapping[str, object], data_ranks: int) -> list[int]:
    """ZeRO levels that make a difference: one data rank has nobody to share with."""
    return values(fix, "zero", list(ZEROS) if data_ranks > 1 else [0])


def pipelines(fix: Mapping[str, object], pp: int, layers: int) -> list[tuple[str, int]]:
    """(schedule, virtual stages a rank) for ``pp`` ranks. Without a pipeline all schedules are the same."""
    named = values(fix, "schedule", list(SCHEDULES) if pp > 1 else ["1f1b"])
    found = []
    for schedule in named:
        if schedule in ("zb-v", "dualpipe-v"):
            virtuals = [2]
        elif schedule == "interleaved":
            virtuals = [
                v for v in range(1 if "virtual" in fix else 2, layers // pp + 1) if v <= 8 or layers % (pp * v) == 0
            ]
        else:
            virtuals = [1] if schedule in SCHEDULES else [1, 2]
        found += [(schedule, v) for v in values(fix, "virtual", virtuals) if v in virtuals and v * pp <= layers]
    return found


def legal(request: Request, plan: Plan) -> bool:
    """Whether a plan passes the whole table."""
    facts = request.facts(plan)
    return not any(rule.test(facts) for rule in SIZE_RULES) and not any(rule.test(facts) for rule in RULES)


def require_some(request: Request, found: bool) -> None:
    """PlanError where no plan at all is legal, before memory is looked at."""
    if not found:
        if reason := conflict(request):
            raise PlanError(reason)
        fixed = " ".join(f"{name}={value}" for name, value in request.fix.items())
        raise PlanError(
            f"no plan cuts this model over {request.world_size} ranks for a global batch of {request.global_batch}"
            + (f" with {fixed} given" if fixed else "")
            + f"; what works: a batch that is a multiple of the copies of the model, ranks that divide {_hint(request)}"
        )


def _hint(request: Request) -> str:
    shape = request.shape
    return f"into tp (of {shape.num_heads} heads) x pp (up to {shape.num_layers} layers) x dp (of the batch)"


def values(fix: Mapping[str, object], name: str, free: list[Any]) -> list[Any]:
    """The given value of a key, or those that it may have."""
    return [fix[name]] if fix.get(name) is not None else free
