"""Parameters of a model by part, as many as the fullest rank of a plan holds; and bytes of the state that they have.

Counts are of `ShardSpec`s, for one layer of each kind: the layers of a kind are alike. `plait.planner.state` has the
same by place on the mesh, to the byte; what is here is for thousands of plans a second.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from plait.core.plan import Plan
from plait.models.config import ModelConfig, parameter_shapes
from plait.parallel.rules import sizes_of, spec_of
from plait.planner.habits import habits_of
from plait.planner.job import Job
from plait.planner.state import state_ranks

TIED = "embed.tokens.weight"


@dataclass(frozen=True, kw_only=True)
class Part:
    """Elements on one rank."""

    dense: int = 0
    expert: int = 0
    router: int = 0
    """Held in fp32, whatever the precision."""
    vectors: int = 0
    """Of ``dense``, those of tensors with one dim."""
    bias: int = 0
    """Of ``router``, what does not train."""

    @property
    def all(self) -> int:
        return self.dense + self.expert + self.router


def parts_of(model: ModelConfig, plan: Plan) -> Mapping[str, Part]:
    """``embed``, ``tail`` (last norm, untied head), ``tied`` (what a last stage holds of a tied embedding), ``dense``
    and ``moe`` (one layer of each kind), for ``plan`` with its dp set."""
    return _parts(model, plan.tp, plan.ep, plan.etp)


@lru_cache(maxsize=1024)
def _parts(model: ModelConfig, tp: int, ep: int, etp: int) -> Mapping[str, Part]:
    """Whatever the other axes: as many data ranks as experts fold out of."""
    plan = Plan(tp=tp, dp=ep * etp // math.gcd(ep * etp, tp), ep=ep, expert_tp=etp)
    mesh = plan.mesh(tp * (plan.dp or 1))
    at = mesh.coordinate(0)
    chosen = {_layer_part(model, layer): layer for layer in reversed(range(model.num_layers))}
    counts: dict[str, dict[str, int]] = {}
    for name, shape in _shapes(model).items():
        head, _, rest = name.partition(".")
        part = "embed" if head == "embed" else "tail"
        if head == "layers":
            layer = int(rest.partition(".")[0])
            part = _layer_part(model, layer)
            if chosen[part] != layer:
                continue
        spec = spec_of(name, shape, model, plan)
        size = spec.local_size(sizes_of(spec, mesh), at)
        kind = "expert" if spec.expert else "router" if ".router." in name else "dense"
        found = counts.setdefault(part, {})
        found[kind] = found.get(kind, 0) + size
        if len(shape) == 1:
            extra = "bias" if name.endswith(".router.bias") else "vectors" if kind == "dense" else kind + "s"
            if extra in ("bias", "vectors"):
                found[extra] = found.get(extra, 0) + size
        if name == TIED and model.tied:
            counts["tied"] = {"dense": size}
    return MappingProxyType({part: Part(**found) for part, found in counts.items()})


@lru_cache(maxsize=64)
def _shapes(model: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    return MappingProxyType(parameter_shapes(model))


def _layer_part(model: ModelConfig, layer: int) -> str:
    return "dense" if model.moe_of(layer) is None else "moe"


def stage_parts(model: ModelConfig, first: int, stop: int, stages: int, index: int) -> dict[str, int]:
    """How many of each part stage ``index`` of ``stages``, with layers ``first..stop``, holds."""
    experts = sum(model.moe_of(layer) is not None for layer in range(first, stop)) if model.moe is not None else 0
    found = {"dense": stop - first - experts, "moe": experts}
    if index == 0:
        found["embed"] = 1
    if index == stages - 1:
        found["tail"] = 1
        if model.tied and stages > 1:
            found["tied"] = 1
    return {part: count for part, count in found.items() if count}


@dataclass(frozen=True, kw_only=True)
class Widths:
    """Bytes a parameter of one kind costs a rank, sharing taken into account."""

    weights: float
    gradients: float
    optimizer: float


@lru_cache(maxsize=4096)
def widths_of(
    plan: Plan, weight: float | None, gradient: float | None, optimizer: float | None, fsdp: bool
) -> tuple[Widths, Widths, Widths]:
    """For dense tensors, experts and routers; the three given are those of a `Practice`, None: as plait holds them.

    ``fsdp``: fp32 weights are shared at level 2 as well (what stays whole is a copy in half precision).
    """
    assert plan.dp is not None
    mesh = plan.mesh(plan.tp * plan.pp * plan.cp * plan.dp)
    dense, expert = (state_ranks(plan, mesh, expert=expert) for expert in (False, True))
    versions = 2 if plan.schedule == "2bw" else 1
    half = 4 if plan.precision == "fp32" else 2
    kinds = ((dense, half), (expert, half), (dense, 4))
    of = (weight, gradient, optimizer)
    first, second, third = (width_of(own, shards, versions, plan.zero, of, fsdp) for shards, own in kinds)
    return first, second, third


def width_of(
    own: int, shards: int, versions: int, zero: int, of: tuple[float | None, float | None, float | None], fsdp: bool
) -> Widths:
    """Of parameters of ``own`` bytes a weight that ``shards`` ranks share; ``of``: what a `Practice` gives."""
    weight, gradient, optimizer = of
    apart = own != 4 or versions > 1
    held = float(own * versions) if weight is None else weight
    state = (12.0 if apart else 8.0) if optimizer is None else optimizer
    return Widths(
        weights=held / (shards if zero == 3 or (fsdp and zero == 2) else 1),
        gradients=(4.0 if gradient is None else gradient) / (shards if zero >= 2 else 1),
        optimizer=state / shards,
    )


def job_widths(job: Job) -> tuple[Widths, Widths, Widths]:
    """`widths_of` a job."""
    practice = job.practice
    fsdp = habits_of(practice).fsdp
    return widths_of(job.plan, practice.weight_bytes, practice.grad_bytes, practice.optimizer_bytes, fsdp)


def elements(parts: Mapping[str, Part], held: Mapping[str, int]) -> Part:
    """All of a stage."""
    rows = [(parts[part], count) for part, count in held.items() if part in parts]
    return Part(
        dense=sum(part.dense * count for part, count in rows),
        expert=sum(part.expert * count for part, count in rows),
        router=sum(part.router * count for part, count in rows),
        vectors=sum(part.vectors * count for part, count in rows),
        bias=sum(part.bias * count for part, count in rows),
    )


def state_bytes(job: Job, held: Part) -> tuple[float, float, float]:
    """Bytes of weights, gradients and optimizer state of a rank's parameters."""
    dense, expert, router = job_widths(job)
    amounts = ((held.dense, dense), (held.expert, expert), (held.router, router))
    frozen = held.bias
    return (
        math.fsum(count * width.weights for count, width in amounts),
        math.fsum(count * width.gradients for count, width in amounts) - frozen * router.gradients,
        math.fsum(count * width.optimizer for count, width in amounts) - frozen * router.optimizer,
    )
