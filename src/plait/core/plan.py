"""`Plan`: how a run is cut across devices, with its text forms; and the cut of layers to stages."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import get_type_hints

from plait.core.errors import ConfigError, PlanError
from plait.core.fields import from_text, key, nearest_names, toml_lines, toml_value, typed
from plait.core.mesh import ORDERS, Mesh

SCHEDULE_SUFFIXES = (".txt", ".schedule")
RECOMPUTE = ("none", "full", "selective")
NEAR = 1 << 14
"""How far from a number that does not work others are tried: a sample count may be anything."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Mesh sizes, schedule, stage cut and memory choices of a run. Its text forms read back equal."""

    tp: int = key(1, "Ranks that share each layer (tensor parallel).")
    pp: int = key(1, "Ranks that share the depth of the model (pipeline parallel).")
    dp: int | None = key(None, "Copies of the model, each on its share of the batch; unset: world size / (tp pp cp).")
    cp: int = key(1, "Ranks that share each sequence (context parallel).")
    context: str = key("ring", "How attention crosses cp: ring, ulysses (heads for tokens), or gather (all keys).")
    ep: int = key(1, "Ranks that share the experts (expert parallel), folded out of dp cp tp.")
    expert_tp: int | None = key(None, "Ranks that share each expert; unset: tp while ep is 1, else 1.")
    order: str = key(
        ORDERS[0], "Axes from the outermost in: pp-dp-cp-tp, or dp-pp-cp-tp (the stages of a copy side by side)."
    )
    micro: int = key(1, "Samples in a microbatch.")
    schedule: str = key(
        "1f1b",
        "Pipeline schedule: gpipe, 1f1b, interleaved, zb-h1, zb-h2, zb-v, dualpipe-v, auto (searched for measured "
        "costs), 2bw (no flush, gradients one step late), or a .txt/.schedule file of actions.",
    )
    virtual: int = key(1, "Virtual stages a rank (2 for zb-v and dualpipe-v, 1 or 2 for auto).")
    live: int | None = key(None, "schedule=auto: most microbatch-stages a rank may hold; unset: as many as 1f1b.")
    stages: tuple[int, ...] | None = key(None, "Layers of each virtual stage, in order; unset: cut by cost.")
    zero: int = key(0, "ZeRO stage: what dp and cp ranks share: 1 optimizer state, 2 gradients too, 3 weights too.")
    zero_group: int | None = key(None, "Neighbouring data ranks that share state, copied across; unset: all of them.")
    gather: str = key("use", "zero=3: gather weights for each use, or once a step.")
    compress: str = key("none", "Gradients on the data axes' wire: none, half, topk:SHARE or powersgd:RANK.")
    node: int | None = key(None, "Neighbouring data ranks that reduce among themselves first; unset: all at once.")
    precision: str = key("fp32", "fp32, bf16, fp16 or fp8 (linear layers); master weights and gradients are fp32.")
    recompute: str = key("none", 'none, full, selective (attention core), or by layer: "full:0-3 selective:4-7".')
    sequence_parallel: bool | None = key(None, "Cut activations between tp regions along tokens; unset: when tp > 1.")
    bucket_mb: float = key(25.0, "MB of gradients that are reduced together.")

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, object]) -> Plan:
        """A plan of the keys of a ``[plan]`` table; ConfigError names an unknown key or a wrong type."""
        kinds = get_type_hints(cls)
        for name in mapping:
            if name not in kinds:
                raise ConfigError(f"unknown key {name!r} in a plan; {nearest_names(name, kinds)}")
        values = {name: typed(kinds[name], value, f"plan key {name}") for name, value in mapping.items()}
        return cls(**values)

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Inverse of ``str(plan)``: ``tp=2 pp=2 stages=3,5``; values with spaces are quoted as in a shell."""
        kinds = get_type_hints(cls)
        values: dict[str, object] = {}
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise ConfigError(f"plan {text!r}: {error}") from error
        for word in words:
            name, equals, value = word.partition("=")
            if not equals:
                raise ConfigError(f"plan {text!r}: {word!r} is not of the form key=value")
            if name in values:
                raise ConfigError(f"plan {text!r}: {name} is given twice")
            kind = kinds.get(name)
            values[name] = value if kind in (None, str) else from_text(kind, value)
        return cls.from_mapping(values)

    def __str__(self) -> str:
        words = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                text = ",".join(map(str, value)) if isinstance(value, tuple) else value
                text = text if isinstance(text, str) else toml_value(text)
                words.append(f"{field.name}={shlex.quote(text)}")
        return " ".join(words)

    def to_toml(self) -> str:
        """Every field that is set, as the body of a ``[plan]`` table."""
        return "\n".join(toml_lines(self)) + "\n"

    @property
    def sp(self) -> bool:
        """Whether sequence parallelism is on: there are tensor-parallel ranks, and it was not turned off."""
        return self.tp > 1 and self.sequence_parallel is not False

    @property
    def stage_count(self) -> int:
        """Virtual stages of the whole pipeline."""
        return self.pp * self.virtual

    @property
    def schedule_file(self) -> str | None:
        """Path of the schedule when it is a text file, else None."""
        return self.schedule if self.schedule.endswith(SCHEDULE_SUFFIXES) else None

    def recompute_of(self, layer: int) -> str:
        """One of `RECOMPUTE` for a layer; layers that no range names keep their activations."""
        for mode, first, last in recompute_ranges(self.recompute):
            if first <= layer and (last is None or layer <= last):
                return mode
        return "none"

    @property
    def etp(self) -> int:
        """Ranks that share each expert."""
        if self.expert_tp is not None:
            return self.expert_tp
        return self.tp if self.ep == 1 else 1

    def mesh(self, world_size: int) -> Mesh:
        """The mesh of ``world_size`` ranks, ``dp`` filled in; PlanError names the axis when they do not fit."""
        sizes = ("tp", "pp", "dp", "cp", "ep", "expert_tp")
        reason = sizes_reason(self, sizes) or world_reason(self, world_size) or fold_reason(self, world_size)
        if reason:
            raise PlanError(f"plan {str(self)!r}: {reason}")
        rest = self.tp * self.pp * self.cp
        return Mesh(
            pp=self.pp, dp=world_size // rest, cp=self.cp, tp=self.tp, ep=self.ep, etp=self.etp, order=self.order
        )

    def resolve(self, world_size: int) -> Plan:
        """This plan with ``dp`` filled in for ``world_size`` ranks."""
        return dataclasses.replace(self, dp=self.mesh(world_size).dp)


def recompute_ranges(text: str) -> list[tuple[str, int, int | None]]:
    """``full:0-3 selective:4`` -> ``[("full", 0, 3), ("selective", 4, 4)]``; a bare mode has no last layer (None)."""
    if text in RECOMPUTE:
        return [(text, 0, None)]
    ranges: list[tuple[str, int, int | None]] = []
    for word in text.split() or [text]:
        match = re.fullmatch(r"(\w+):([0-9]+)(?:-([0-9]+))?", word)
        if match is None or match[1] not in RECOMPUTE:
            raise PlanError(
                f"recompute: {word!r} is neither one of {', '.join(RECOMPUTE)} nor a range of layers like full:0-3"
            )
        first = int(match[2])
        ranges.append((match[1], first, first if match[3] is None else int(match[3])))
    return ranges


def nearest(value: int, works: Callable[[int], bool], *, low: int = 1, high: int) -> tuple[int, ...]:
    """The nearest working numbers below and above ``value`` within ``low..high``: none, one or two.

    Numbers further away than `NEAR` are not looked at.
    """
    below = next((n for n in range(min(value - 1, high), max(low, value - NEAR) - 1, -1) if works(n)), None)
    above = next((n for n in range(max(value + 1, low), min(high, value + NEAR) + 1) if works(n)), None)
    return tuple(n for n in (below, above) if n is not None)


def either(name: str, values: Sequence[object]) -> str:
    """The values in words: ``tp=2 or tp=4``."""
    return " or ".join(f"{name}={value}" for value in values)


def working(*choices: str) -> str:
    """Alternatives in words; empty ones drop out."""
    return "what works: " + ", or ".join(choice for choice in choices if choice)


def sizes_reason(plan: Plan, axes: Sequence[str]) -> str | None:
    """Why the first of ``axes`` that is below 1 cannot be."""
    bad = [axis for axis in axes if (value := getattr(plan, axis)) is not None and value < 1]
    return None if not bad else f"{bad[0]}={getattr(plan, bad[0])} is below 1; " + working(f"{bad[0]}=1")


def _fits(plan: Plan, world_size: int) -> bool:
    rest = plan.tp * plan.pp * plan.cp
    return world_size >= 1 and world_size % rest == 0 and plan.dp in (None, world_size // rest)


def world_reason(plan: Plan, world_size: int) -> str | None:
    """Why the mesh cannot have ``world_size`` ranks, with the nearest sizes that fit."""
    if _fits(plan, world_size):
        return None
    rest = plan.tp * plan.pp * plan.cp
    sizes = nearest(world_size, lambda n: _fits(plan, n), high=max(world_size, 0) + rest * (plan.dp or 1))
    works = working(
        either("world size", sizes),
        f"dp={world_size // rest}" if plan.dp is not None and world_size >= rest and world_size % rest == 0 else "",
        *(
            either(axis, nearest(getattr(plan, axis), fits_with, high=max(world_size, 1)))
            for axis in ("tp", "pp")
            for fits_with in [lambda n, axis=axis: _fits(dataclasses.replace(plan, **{axis: n}), world_size)]
        ),
    )
    copy = f"tp={plan.tp} pp={plan.pp} cp={plan.cp} ({rest} ranks a copy of the model)"
    if plan.dp is None:
        return f"world size {world_size} is not a multiple of {copy}, so no dp fits; {works}"
    return f"dp={plan.dp} with {copy} needs {plan.dp * rest} ranks, the world size is {world_size}; {works}"


def fold_reason(plan: Plan, world_size: int) -> str | None:
    """Why ``ep`` and ``expert_tp`` do not fold out of the ranks of a pipeline stage."""
    ranks = world_size // plan.pp
    if ranks % (plan.ep * plan.etp) == 0:
        return None
    eps = nearest(plan.ep, lambda n: ranks % (n * plan.etp) == 0, high=ranks)
    etps = nearest(plan.etp, lambda n: ranks % (n * plan.ep) == 0, high=ranks)
    return (
        f"ep={plan.ep} with expert_tp={plan.etp} needs a multiple of {plan.ep * plan.etp} ranks a pipeline rank, "
        f"dp x cp x tp is {ranks}; " + working(either("ep", eps), either("expert_tp", etps))
    )


def cut_stages(costs: Sequence[float], stages: int, first: float = 0.0, last: float = 0.0) -> tuple[int, ...]:
    """Layers of each stage: a contiguous cut with the least maximal stage cost.

    ``costs`` are one number a layer; ``first`` (embedding) is added to the first stage, ``last`` (head and loss) to the
    last. Every stage gets a layer. Among cuts with the least maximum, the one with the least sum of squares, and then
    fewer layers on early stages, which hold the most live microbatches. Raises PlanError when there are too few layers.
    """
    count = len(costs)
    if not 1 <= stages <= count:
        raise PlanError(f"{count} layers cannot fill {stages} stages; what works: 1 to {count} stages")
    # Whole numbers in the smallest unit of any cost: sums are exact, so equal cuts compare equal.
    ratios = [cost.as_integer_ratio() for cost in (first, last, *costs)]
    unit = max(below for _, below in ratios)
    head, tail, *layers = (above * (unit // below) for above, below in ratios)
    sums = [0, *itertools.accumulate(layers)]

    def cost(stage: int, start: int, stop: int) -> int:
        return sums[stop] - sums[start] + (head if stage == 0 else 0) + (tail if stage == stages - 1 else 0)

    def fits(limit: int) -> bool:
        """Whether stages filled up to ``limit`` from the first one on leave the last one no more than it."""
        start = 0
        for stage in range(stages - 1):
            stop = start
            while stop < count - (stages - 1 - stage) and cost(stage, start, stop + 1) <= limit:
                stop += 1
            if stop == start:
                return False
            start = stop
        return cost(stages - 1, start, count) <= limit

    # Phase 1: the least maximum, by halving.
    low, limit = 0, head + sums[-1] + tail
    while low < limit:
        middle = (low + limit) // 2
        low, limit = (low, middle) if fits(middle) else (middle + 1, limit)

    # Phase 2: within it, the least sum of squares for the layers from every start on, from the last stage backwards.
    rest: list[float] = [cost(stages - 1, start, count) for start in range(count)] + [math.inf]
    rest = [math.inf if here > limit else here * here for here in rest]
    stops: list[dict[int, int]] = []
    for stage in reversed(range(stages - 1)):
        squares: list[float] = [math.inf] * (count + 1)
        found: dict[int, int] = {}
        for start in range(stage, count - (stages - 1 - stage)):
            for stop in range(start + 1, count - (stages - 1 - stage) + 1):
                here = cost(stage, start, stop)
                if here > limit:
                    break
                if here * here + rest[stop] < squares[start]:  # the first of equals: fewer layers
                    squares[start], found[start] = here * here + rest[stop], stop
        rest = squares
        stops.append(found)
    bounds = [0]
    for found in reversed(stops):
        bounds.append(found[bounds[-1]])
    return tuple(stop - start for start, stop in itertools.pairwise([*bounds, count]))
