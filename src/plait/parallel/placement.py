"""Which rank holds which experts, from how much each is used. Pure arithmetic, no torch.

Two levers even the ranks out: experts are *moved* so that every rank's load is about the same, and the hottest are
*shadowed*: every rank also has a copy and computes its own tokens there, so that their load is spread over all and
their tokens do not travel (FasterMoE, He et al., PPoPP 2022, doi:10.1145/3503221.3508418).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The experts of one layer on ``ranks`` ranks, as many on each."""

    order: tuple[int, ...]
    """Logical expert at each slot; slots of rank r are those from ``r * len(order) / ranks`` on."""
    ranks: int
    shadows: tuple[int, ...] = ()
    """Experts that every rank has a copy of, by owner and then by number."""

    def __post_init__(self) -> None:
        if sorted(self.order) != list(range(len(self.order))) or not self.order:
            raise ValueError(f"order {self.order} is no permutation of the experts")
        if self.ranks < 1 or len(self.order) % self.ranks:
            raise ValueError(f"{len(self.order)} experts do not lie evenly on {self.ranks} ranks")
        if len(set(self.shadows)) < len(self.shadows) or not set(self.shadows) <= set(self.order):
            raise ValueError(f"shadows {self.shadows} are not different experts of {len(self.order)}")
        by_owner = tuple(sorted(self.shadows, key=lambda expert: (self.owner(expert), expert)))
        object.__setattr__(self, "shadows", by_owner)

    @property
    def slots(self) -> int:
        """Experts that each rank owns."""
        return len(self.order) // self.ranks

    def owner(self, expert: int) -> int:
        """The rank that holds ``expert`` and updates it."""
        return self.order.index(expert) // self.slots

    def shadows_of(self, rank: int) -> tuple[int, ...]:
        """The shadowed experts that ``rank`` owns."""
        return tuple(expert for expert in self.shadows if self.owner(expert) == rank)

    def owned(self, rank: int) -> tuple[int, ...]:
        """The experts that ``rank`` holds, in the order of its slots."""
        return self.order[rank * self.slots : (rank + 1) * self.slots]


def identity(experts: int, ranks: int) -> Placement:
    """Experts in their own order, no shadows."""
    return Placement(order=tuple(range(experts)), ranks=ranks)


def loads(placement: Placement, load: Sequence[float]) -> tuple[float, ...]:
    """Expected load of each rank when expert e gets ``load[e]`` from the ranks together, evenly from each."""
    shadowed = set(placement.shadows)
    spread = sum(load[expert] for expert in shadowed) / placement.ranks
    return tuple(
        spread + sum(load[expert] for expert in placement.owned(rank) if expert not in shadowed)
        for rank in range(placement.ranks)
    )


def spread(values: Sequence[float]) -> float:
    """Standard deviation over mean: 0 is even."""
    mean = sum(values) / len(values)
    if mean == 0:
        return 0.0
    return float((sum((value - mean) ** 2 for value in values) / len(values)) ** 0.5 / mean)


def place(load: Sequence[float], ranks: int, shadows: int, *, before: Placement | None = None) -> Placement:
    """A placement whose most loaded rank has little more than the mean.

    The ``shadows`` hottest experts are shadowed. The others go, heaviest first, to the least loaded rank that has a
    slot left (LPT, Graham 1969, doi:10.1137/0117039, with equal counts); pairs are then swapped while that lowers the
    fuller of two ranks. Experts stay where ``before`` has them (None: in their own order) if nothing is gained; else
    ranks are named, and slots filled, so that those that stay on their rank keep their slots.
    """
    experts = len(load)
    if ranks < 1 or experts % ranks:
        raise ValueError(f"{experts} experts do not lie evenly on {ranks} ranks")
    if not 0 <= shadows <= experts:
        raise ValueError(f"{shadows} shadows of {experts} experts")
    before = before or identity(experts, ranks)
    hot = sorted(range(experts), key=lambda expert: (-load[expert], expert))[:shadows]
    weights = [0.0 if expert in hot else load[expert] for expert in range(experts)]
    homes = _packed(weights, before)
    _swap(homes, weights)
    stay = max(_total(set(before.owned(rank)), weights) for rank in range(ranks))
    gained = max(_total(home, weights) for home in homes) < stay
    return Placement(order=_kept_slots(homes, before) if gained else before.order, ranks=ranks, shadows=tuple(hot))


def _packed(weights: Sequence[float], before: Placement) -> list[set[int]]:
    homes: list[set[int]] = [set() for _ in range(before.ranks)]
    for expert in sorted(range(len(weights)), key=lambda expert: (-weights[expert], expert)):
        open_ranks = [rank for rank, home in enumerate(homes) if len(home) < before.slots]
        least = min(open_ranks, key=lambda rank: (_total(homes[rank], weights), rank != before.owner(expert), rank))
        homes[least].add(expert)
    return homes


def _total(home: set[int], weights: Sequence[float]) -> float:
    return sum(weights[expert] for expert in sorted(home))


def _swap(homes: list[set[int]], weights: Sequence[float]) -> None:
    """Exchange two experts of the fullest rank and another as long as both end below what the fullest had."""
    for _ in range(len(weights) ** 2):
        totals = [_total(home, weights) for home in homes]
        full = max(range(len(homes)), key=lambda rank: totals[rank])
        swaps = [
            (max(totals[full] - weights[a] + weights[b], totals[rank] + weights[a] - weights[b]), a, b, rank)
            for rank in range(len(homes))
            if rank != full
            for a in homes[full]
            for b in homes[rank]
            if weights[a] > weights[b]
        ]
        best = min(swaps, default=None)
        if best is None or best[0] >= totals[full] * (1 - 1e-12):
            return
        _, a, b, rank = best
        homes[full] = homes[full] - {a} | {b}
        homes[rank] = homes[rank] - {b} | {a}


def _kept_slots(homes: Sequence[set[int]], before: Placement) -> tuple[int, ...]:
    """An order with these homes: ranks are renamed and slots filled so that experts stay where they are."""
    free, named = set(range(len(homes))), [set[int]()] * len(homes)
    overlaps = [
        (-len(home & set(before.owned(rank))), rank, number)
        for number, home in enumerate(homes)
        for rank in range(len(homes))
    ]
    taken: set[int] = set()
    for _, rank, number in sorted(overlaps):
        if rank in free and number not in taken:
            named[rank] = homes[number]
            free.discard(rank)
            taken.add(number)
    order: list[int] = []
    for rank, home in enumerate(named):
        stay = [expert if expert in home else None for expert in before.owned(rank)]
        come = iter(sorted(home - set(before.owned(rank))))
        order.extend(next(come) if expert is None else expert for expert in stay)
    return tuple(order)
