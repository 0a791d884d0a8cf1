"""What each rank of a plan holds: bytes of weights, gradients and optimizer state by place on the mesh. No torch.

Bytes are those of `Zero.state_bytes` without its padding (shards of a bucket begin at multiples of 64 bytes). With w
the bytes of a weight (4 in fp32 and for routers, else 2) and n the data ranks that share state, a trained parameter has

* weights: w; with schedule=2bw twice that; over n at ZeRO 3;
* gradients: 4; over n from ZeRO 2 on;
* optimizer: 8 for two fp32 moments, and 4 for a master copy where weights are not fp32 or are kept twice; over n from
  ZeRO 1 on.

n counts ``dp cp`` ranks for dense tensors and ``edp`` ranks for experts, or those of a ``zero_group``. Frozen
parameters have weights alone, and ZeRO 3 leaves their vectors whole.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Final

from plait.core.mesh import Mesh
from plait.core.plan import Plan
from plait.core.shard import ShardSpec
from plait.models.config import ModelConfig
from plait.parallel.layout import placement, stage_layers, stage_parameters
from plait.parallel.rules import sizes_of, specs

_TIED: Final = "embed.tokens.weight"


@dataclass(frozen=True, kw_only=True)
class Holding:
    """What every rank at (``pp``, ``tp``, ``ep``, ``etp``) holds; the last two are 0 in a model without experts.

    Bytes are a rank's.
    """

    pp: int
    tp: int
    ep: int
    etp: int
    ranks: int
    """How many ranks are there."""
    stages: tuple[int, ...]
    parameters: int
    weights: int
    gradients: int
    optimizer: int
    passing: int
    """On top, about: whole weights and gradients that come and go within a step at ZeRO 2 and 3."""

    @property
    def place(self) -> tuple[int, int, int, int]:
        """What `place_of` gives for its ranks."""
        return self.pp, self.tp, self.ep, self.etp

    @property
    def total(self) -> int:
        """Bytes of the training state, which stays."""
        return self.weights + self.gradients + self.optimizer


@dataclass(frozen=True, kw_only=True)
class _Tensor:
    """A parameter of a stage, with what decides its bytes."""

    unit: int
    """What is gathered with it: -1 the embedding, a layer, or more than any layer: the last norm and the head."""
    kind: int
    """Which of the different layouts it has."""
    width: int
    """Bytes of one weight."""
    shards: int
    """Data ranks that share its state."""
    trained: bool
    gathered: bool
    """Whether its weights are whole only while they are needed."""


def place_of(model: ModelConfig, at: Mapping[str, int]) -> tuple[int, int, int, int]:
    """What of a rank's coordinate decides what it holds."""
    ep, etp = (0, 0) if model.moe is None else (at["ep"], at["etp"])
    return at["pp"], at["tp"], ep, etp


def state_ranks(plan: Plan, mesh: Mesh, *, expert: bool) -> int:
    """Data ranks that share the state of dense tensors, or of experts; 1: each has all of it."""
    ranks = mesh.expert_sizes["edp"] if expert else mesh.dp * mesh.cp
    if plan.zero == 0:
        return 1
    return ranks if plan.zero_group is None else math.gcd(plan.zero_group, ranks)


def holdings(model: ModelConfig, plan: Plan, mesh: Mesh, freeze: Sequence[str] = ()) -> list[Holding]:
    """What the ranks hold, by place in order; ``freeze``: name patterns of parameters that are not trained."""
    names, homes, layout = stage_parameters(model, stage_layers(model, plan)), placement(plan), specs(model, plan)
    kinds = list(dict.fromkeys(layout.values()))
    tensors = _tensors(model, plan, mesh, layout, kinds, freeze)
    ats = [mesh.coordinate(rank) for rank in mesh.group(0, ("dp", "cp", "tp"))]
    counts = Counter(place_of(model, at)[1:] for at in ats)
    distinct = {place_of(model, at)[1:]: at for at in ats}
    local = {
        place: [spec.local_size(sizes_of(spec, mesh), at) for spec in kinds] for place, at in sorted(distinct.items())
    }
    found = []
    for pp in range(mesh.pp):
        here = tuple(stage for stage, home in enumerate(homes) if home == pp)
        # A tied weight whose both ends are on one rank is there once.
        held = [tensors[name] for name in dict.fromkeys(name for stage in here for name in names[stage])]
        tied = model.num_layers if model.tied else None
        by_unit = [
            _units(names[stage], tensors, first=stage == 0, tied=tied if stage == len(names) - 1 else None)
            for stage in here
        ]
        for (tp, ep, etp), sizes in local.items():
            weights, gradients, optimizer = _state(held, sizes, plan)
            found.append(
                Holding(
                    pp=pp,
                    tp=tp,
                    ep=ep,
                    etp=etp,
                    ranks=counts[tp, ep, etp],
                    stages=here,
                    parameters=sum(sizes[one.kind] for one in held),
                    weights=weights,
                    gradients=gradients,
                    optimizer=optimizer,
                    passing=_passing(held, by_unit, sizes, plan),
                )
            )
    return found


def _tensors(
    model: ModelConfig,
    plan: Plan,
    mesh: Mesh,
    layout: Mapping[str, ShardSpec],
    kinds: Sequence[ShardSpec],
    freeze: Sequence[str],
) -> dict[str, _Tensor]:
    numbers = {spec: number for number, spec in enumerate(kinds)}
    shards = {expert: state_ranks(plan, mesh, expert=expert) for expert in (False, True)}
    found = {}
    for name, spec in layout.items():
        # A router's bias is moved by the loads, not by the optimizer.
        trained = not name.endswith(".router.bias") and not any(fnmatchcase(name, pattern) for pattern in freeze)
        part, _, rest = name.partition(".")
        found[name] = _Tensor(
            unit=int(rest.partition(".")[0]) if part == "layers" else -1 if part == "embed" else model.num_layers,
            kind=numbers[spec],
            width=4 if plan.precision == "fp32" or ".router." in name else 2,
            shards=shards[spec.expert],
            trained=trained,
            gathered=plan.zero == 3 and shards[spec.expert] > 1 and (trained or len(spec.shape) > 1),
        )
    return found


def _units(
    names: Sequence[str], tensors: Mapping[str, _Tensor], *, first: bool, tied: int | None
) -> list[list[_Tensor]]:
    """A stage's tensors by what is gathered together, in forward order.

    ``first``: the embedding is here; ``tied``: the unit of a head here that reads the embedding's weight.
    """
    units: dict[int, list[_Tensor]] = {}
    for name in names:
        if name == _TIED and tied is not None:
            units.setdefault(tied, []).append(tensors[name])
        if name != _TIED or first:
            units.setdefault(tensors[name].unit, []).append(tensors[name])
    return [units[unit] for unit in sorted(units)]


def _state(held: Sequence[_Tensor], sizes: Sequence[int], plan: Plan) -> tuple[int, int, int]:
    """Bytes of weights, gradients and optimizer state that stay on a rank."""
    versions = 2 if plan.schedule == "2bw" else 1
    weights: Counter[int] = Counter()
    gradients: Counter[int] = Counter()
    optimizer: Counter[int] = Counter()
    for one in held:
        size = sizes[one.kind]
        weights[one.shards if one.gathered else 1] += size * one.width * (versions if one.trained else 1)
        if one.trained:
            gradients[one.shards if plan.zero >= 2 else 1] += size * 4
            optimizer[one.shards] += size * (8 if one.width == 4 and versions == 1 else 12)
    return _shared(weights), _shared(gradients), _shared(optimizer)


def _shared(amounts: Mapping[int, int]) -> int:
    """A rank's part of ``amounts``: sharing ranks -> bytes."""
    return sum(-(-amount // shards) for shards, amount in amounts.items())


def _passing(
    held: Sequence[_Tensor], stages: Sequence[Sequence[Sequence[_Tensor]]], sizes: Sequence[int], plan: Plan
) -> int:
    """About the most bytes of whole weights and gradients that are there for a while, beside what stays.

    ``stages``: the units of each stage here. Of two neighbouring units one computes while the other comes or goes.
    With gather=step all weights stay until the last backward. At ZeRO 2 a bucket may span units.
    """

    def weights(unit: Sequence[_Tensor]) -> int:
        return sum(sizes[one.kind] * one.width for one in unit if one.gathered)

    def gradients(unit: Sequence[_Tensor]) -> int:
        return sum(sizes[one.kind] * 4 for one in unit if one.trained and one.shards > 1)

    if plan.zero < 2:
        return 0
    pairs = [pair for units in stages for pair in (pairwise(units) if len(units) > 1 else [(units[0], [])])]
    coming = max(gradients(one) + gradients(other) for one, other in pairs)
    if plan.zero == 2:
        buckets = 2 * int(plan.bucket_mb * 2**20)
        return max(coming, *(min(buckets, sum(map(gradients, units))) for units in stages))
    if plan.gather == "step":
        return coming + weights(held)
    return coming + max(weights(one) + weights(other) for one, other in pairs)
