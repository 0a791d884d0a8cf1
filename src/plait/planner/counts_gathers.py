"""How often ZeRO 3 gathers each bucket in a step: `plait.parallel.gathered.Gathered` over a rank's list of actions.

A unit is the embedding, a layer, or the last norm with the head. While one computes, the next is on its way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, final

from plait.parallel.grouping import place_of
from plait.schedule.ir import COMPUTE_KINDS, Action, Kind

_EMBEDDING = "embed.tokens.weight"


class Bucket(Protocol):
    """What has a number."""

    @property
    def key(self) -> int: ...


@final
@dataclass(frozen=True, kw_only=True)
class Unit:
    """Keys of the buckets that are gathered together; ``backward``: whether backward reads the weights."""

    buckets: tuple[int, ...]
    backward: bool


def units(names: Sequence[str], of: Mapping[str, Bucket], *, first: bool, head: bool, tied: bool) -> tuple[Unit, ...]:
    """A stage's units in forward order, from the ``names`` of its parameters; ``of``: the bucket of each that is
    gathered."""
    found: dict[int, set[int]] = {}
    tail = max([place_of("head"), *map(place_of, names)])
    for name in names:
        places = [place_of(name)] if name != _EMBEDDING or first else []
        if name == _EMBEDDING and head and tied:
            places.append(tail)
        for place in places:
            buckets = found.setdefault(place, set())
            if name in of:
                buckets.add(of[name].key)
    return tuple(Unit(buckets=tuple(sorted(found[place])), backward=place >= 0) for place in sorted(found))


def gathers(actions: Sequence[Action], stages: Mapping[int, Sequence[Unit]], *, keep: bool) -> Counter[int]:
    """Key of a bucket -> how often the rank gathers it; ``keep``: until the stage's last backward."""
    calls: Counter[int] = Counter()
    there: set[int] = set()
    left = Counter(action.stage for action in actions if action.kind in (Kind.B, Kind.W))

    def need(unit: Unit, ahead: Unit | None, kept: Unit | None = None) -> None:
        if not keep:
            there.intersection_update(key for one in (unit, ahead, kept) if one is not None for key in one.buckets)
        for one in (unit, ahead):
            for key in one.buckets if one is not None else ():
                if key not in there:
                    there.add(key)
                    calls[key] += 1

    for action in actions:
        if action.kind not in COMPUTE_KINDS:
            continue
        here = stages[action.stage]
        if action.kind is Kind.F:
            for at, unit in enumerate(here):
                after = here[at + 1] if at + 1 < len(here) else None
                need(unit, after, here[at - 1] if after is None and at else None)
            continue
        left[action.stage] -= 1
        if action.kind is Kind.B:
            for at in range(len(here) - 1, -1, -1):
                before = here[at - 1] if at and here[at - 1].backward else None
                if here[at].backward:
                    need(here[at], before)
        if keep and left[action.stage] == 0:
            there.difference_update(key for unit in here for key in unit.buckets)
    return calls
