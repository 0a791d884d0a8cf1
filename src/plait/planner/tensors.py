"""The trained parameters of one layer of each kind and of both ends of the model, as a rank holds them. No torch.

What decides their buckets (`plait.parallel.grouping`), and the bytes of these.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType

from plait.core.plan import Plan
from plait.models.config import ModelConfig, parameter_shapes
from plait.parallel.grouping import is_data
from plait.parallel.rules import Form, rule_of, sizes_of, spec_of
from plait.planner.parameters import TIED


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """A parameter of one layer, or of an end of the model, on one rank."""

    name: str
    """Within its part."""
    size: int
    kind: tuple[bool, ...]
    """What tensors of a bucket have in common."""
    expert: bool
    product: bool
    """Whether its gradient is a product that waits for W where the backward is split."""
    width: float | None
    """Bytes of a weight; None: the precision's."""


@lru_cache(maxsize=512)
def tensors_of(model: ModelConfig, tp: int, ep: int, etp: int, sp: bool) -> Mapping[str, tuple[Tensor, ...]]:
    """By part, what trains; the embedding of a tied model is in ``tied`` as well, as the tail's."""
    fold = ep * etp // math.gcd(ep * etp, tp)
    plan = Plan(tp=tp, dp=fold, ep=ep, expert_tp=etp, sequence_parallel=sp)
    mesh = plan.mesh(tp * fold)
    at = mesh.coordinate(0)
    firsts = {("dense" if model.moe_of(layer) is None else "moe"): layer for layer in reversed(range(model.num_layers))}
    found: dict[str, list[Tensor]] = {}
    for name, shape in parameter_shapes(model).items():
        head, _, rest = name.partition(".")
        if head == "layers":
            layer, _, rest = rest.partition(".")
            head = "dense" if model.moe_of(int(layer)) is None else "moe"
            if firsts[head] != int(layer):
                continue
        elif head != "embed":
            head, rest = "tail", name
        if name.endswith(".router.bias"):
            continue
        spec = spec_of(name, shape, model, plan)
        sizes = sizes_of(spec, mesh)
        copies = [copies for piece in spec.pieces(sizes, at) for copies in piece.copies]
        partial = any(one.partial and not is_data(one.axis) for one in copies)
        router = ".router." in name
        form = rule_of(name).form
        one = Tensor(
            name=rest,
            size=spec.local_size(sizes, at),
            kind=(len(shape) > 1, partial, spec.expert, router),
            expert=spec.expert,
            product=form in (Form.COLUMN, Form.ROW, Form.MIXTURE) and not router and not name.endswith("bias"),
            width=4.0 if router else None,
        )
        found.setdefault(head, []).append(one)
        if name == TIED and model.tied:
            found["tied"] = [replace(one, name="head.weight", product=True)]
    return MappingProxyType({part: tuple(rows) for part, rows in found.items()})
