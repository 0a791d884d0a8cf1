"""Schedules as arrays, without an object an action: equal to `plait.schedule.generate`, which is the reference."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from plait.core.errors import ScheduleError
from plait.schedule.generate import NAMES
from plait.schedule.ir import COMPUTE_KINDS, Action, Schedule
from plait.schedule.placement import placement_of, require

KINDS: Final = tuple(str(kind) for kind in COMPUTE_KINDS)
F, B, W = range(3)
"""Numbers of the kinds."""
Ints = NDArray[np.int64]
_Token = tuple[int, int]
"""(kind, 0 for the rank's first stage or 1 for its second): microbatches follow from the order."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Needs:
    """For every place of `Lists`: the action of another stage that it waits for, the boundary between, its own number.

    An action's number is its place in the lists, read rank by rank. Behind the last: ``size`` is the start of the step,
    ``size + 1`` what never ends (padding waits for it), ``size + 2`` where padding writes. What an action needs of its
    own stage comes before it in the list.
    """

    size: int
    present: NDArray[np.bool_]
    need: Ints
    boundary: Ints
    """Stage before the boundary that the data cross between ranks; the last stage: none."""
    own: Ints


@dataclass(frozen=True, kw_only=True, eq=False)
class Lists:
    """A compute-only `Schedule`: [ranks, places] of kind, stage and microbatch; kind -1 pads the shorter lists."""

    name: str
    stages: int
    microbatches: int
    homes: Ints
    """Rank of each stage."""
    kinds: Ints
    stage: Ints
    microbatch: Ints

    @property
    def ranks(self) -> int:
        return len(self.kinds)

    @property
    def lengths(self) -> Ints:
        """Actions of each rank."""
        return np.asarray((self.kinds >= 0).sum(axis=1))

    @property
    def size(self) -> int:
        """Actions of all ranks."""
        return int((self.kinds >= 0).sum())

    @property
    def splits(self) -> NDArray[np.bool_]:
        """Whether the backward of each stage is split."""
        found = np.zeros(self.stages, dtype=np.bool_)
        found[self.stage[self.kinds == W]] = True
        return found

    @cached_property
    def needs(self) -> Needs:
        """What each action waits for."""
        size, stages = self.size, self.stages
        present = self.kinds >= 0
        own = np.where(present, np.cumsum(present.ravel()).reshape(present.shape) - 1, size + 2)
        where = np.full((3, stages, self.microbatches), size + 1)
        where[self.kinds[present], self.stage[present], self.microbatch[present]] = own[present]
        step = np.select([self.kinds == F, self.kinds == B], [-1, 1], 0)
        source = self.stage + step
        needs = present & (step != 0) & (source >= 0) & (source < stages)
        need = np.where(present, size, size + 1)
        need[needs] = where[self.kinds[needs], source[needs], self.microbatch[needs]]
        apart = np.append(self.homes[:-1] != self.homes[1:], False)
        before = np.clip(np.minimum(source, self.stage), 0, stages - 1)
        boundary = np.where(needs & apart[before], before, stages - 1)
        return Needs(size=size, present=present, need=need, boundary=boundary, own=own)

    def live(self) -> Ints:
        """Most microbatch-stages that each rank holds at once: from a forward to the last half of its backward."""
        last = np.where(self.splits[self.stage], W, B)
        change = np.where(self.kinds == F, 1, np.where(self.kinds == last, -1, 0))
        change[self.kinds < 0] = 0
        return np.asarray(np.cumsum(change, axis=1).max(axis=1, initial=0))

    def schedule(self) -> Schedule:
        """The same lists as a `Schedule`."""
        rows = []
        for rank, length in enumerate(self.lengths):
            columns = (column[rank, :length].tolist() for column in (self.kinds, self.stage, self.microbatch))
            rows.append(tuple(Action(COMPUTE_KINDS[k], s, m) for k, s, m in zip(*columns, strict=True)))
        return Schedule(name=self.name, stages=self.stages, microbatches=self.microbatches, ranks=tuple(rows))


def lists_of(schedule: Schedule) -> Lists:
    """The compute of any schedule."""
    numbers = {kind: index for index, kind in enumerate(COMPUTE_KINDS)}
    rows = [[(numbers[a.kind], a.stage, a.microbatch) for a in row if a.kind in numbers] for row in schedule.ranks]
    arrays = [np.array(row, dtype=np.int64).reshape(-1, 3).T for row in rows]
    homes = np.array(schedule.placement, dtype=np.int64)
    return _lists(schedule.name, schedule.stages, schedule.microbatches, homes, arrays)


def make_lists(name: str, *, ranks: int, microbatches: int, virtual: int = 1) -> Lists:
    """`plait.schedule.generate.generate` as arrays. Raises `ScheduleError` where there is no such schedule."""
    require(ranks=ranks, microbatches=microbatches, virtual=virtual)
    if name not in NAMES:
        raise ScheduleError(f"schedule={name!r} is unknown; all are {', '.join(NAMES)}")
    homes = np.array(placement_of(name, ranks, virtual), dtype=np.int64)
    if name == "interleaved":
        rows = _interleaved(ranks, microbatches, virtual)
    elif name in ("zb-v", "dualpipe-v"):
        make = _zb_v if name == "zb-v" else _dualpipe_v
        rows = [_numbered(make(rank, ranks, microbatches), rank, ranks, microbatches) for rank in range(ranks)]
    elif virtual != 1:
        raise ScheduleError(f"schedule={name} has one stage a rank, so virtual={virtual} does not fit; virtual=1 does")
    elif name.startswith("zb"):
        rows = [_zb_h(rank, ranks, microbatches, stretch=1 if name == "zb-h1" else 2) for rank in range(ranks)]
    elif name == "1f1b":
        rows = _interleaved(ranks, microbatches, 1)
    else:
        count = np.arange(microbatches)
        kinds = np.repeat([F, B], microbatches)
        rows = [np.stack([kinds, np.full(2 * microbatches, rank), np.tile(count, 2)]) for rank in range(ranks)]
    return _lists(name, ranks * virtual, microbatches, homes, rows)


def _lists(name: str, stages: int, microbatches: int, homes: Ints, rows: list[Ints]) -> Lists:
    longest = max(row.shape[1] for row in rows)
    table = np.zeros((3, len(rows), longest), dtype=np.int64)
    table[0] = -1
    for rank, row in enumerate(rows):
        table[:, rank, : row.shape[1]] = row
    kinds, stage, microbatch = table
    return Lists(
        name=name,
        stages=stages,
        microbatches=microbatches,
        homes=homes,
        kinds=kinds,
        stage=stage,
        microbatch=microbatch,
    )


def _interleaved(ranks: int, microbatches: int, virtual: int) -> list[Ints]:
    """1F1B over ``virtual`` stages a rank: the order of forwards and of backwards is the same on every rank."""
    groups = max(1, microbatches // ranks)
    bounds = [math.ceil(index * microbatches / groups) for index in range(groups + 1)]
    sizes = np.diff(bounds)
    spans = [np.arange(bounds[index], bounds[index + 1]) for index in range(groups)]
    micro = np.concatenate([np.tile(span, virtual) for span in spans])
    turn = np.concatenate([np.repeat(np.arange(virtual), size) for size in sizes])
    total = len(micro)
    largest = int(sizes.max())
    rows = []
    for rank in range(ranks):
        distance = ranks - 1 - rank
        warmup = distance if virtual == 1 else 2 * distance + (virtual - 1) * largest
        warmup = min(warmup, total)
        order = np.arange(total)
        # Places of forwards and backwards in the list: after the warm-up they take turns.
        forward = np.where(order < warmup, order, 2 * order - warmup)
        backward = np.minimum(2 * order + 1 + warmup, order + total)
        row = np.empty((3, 2 * total), dtype=np.int64)
        row[:, forward] = np.stack([np.full(total, F), rank + ranks * turn, micro])
        row[:, backward] = np.stack([np.full(total, B), rank + ranks * (virtual - 1 - turn), micro])
        rows.append(row)
    return rows


def _zb_h(rank: int, ranks: int, microbatches: int, *, stretch: int) -> Ints:
    """ZB-H1 and ZB-H2: three actions a round; sorted by (round, kind)."""
    warmup, delay = min(stretch * (ranks - 1 - rank), microbatches), stretch * rank
    count = np.arange(microbatches)
    rounds = np.concatenate([count - warmup, count, count + delay])
    kinds = np.repeat([F, B, W], microbatches)
    late = rounds >= microbatches  # W's that are left for the end
    keys = np.where(late, 3 * microbatches + rounds, 3 * np.minimum(rounds, microbatches) + kinds)
    keys = np.where((kinds == F) & (rounds < 0), rounds - microbatches, keys)
    order = np.argsort(keys, kind="stable")
    return np.stack([kinds[order], np.full(3 * microbatches, rank), np.tile(count, 3)[order]])


def _zb_v(rank: int, ranks: int, microbatches: int) -> list[_Token]:
    """The phases of `plait.schedule.zero_bubble.zb_v`."""
    count = max(microbatches, 2 * ranks - 1)
    distance = ranks - 1 - rank
    whole: list[_Token] = [(F, 1), (B, 1), (W, 1)]
    steady = count - rank - (distance + 1)
    both = min(steady, count - (2 * distance + 1) - rank)
    tokens: list[_Token] = [(F, 0)] * (2 * distance + 1) + [(F, 1), (F, 0)] * rank + whole * (distance + 1)
    tokens += [(F, 0), (B, 0), (W, 0), *whole] * both + [(B, 0), (W, 0), *whole] * (steady - both)
    tokens += [(B, 0), (B, 1)] * rank + [(B, 0), (W, 0)] * (distance + 1)
    return tokens + [(W, 1)] * (count - tokens.count((W, 1))) + [(W, 0)] * (count - tokens.count((W, 0)))


def _dualpipe_v(rank: int, ranks: int, microbatches: int) -> list[_Token]:
    """The steps of `plait.schedule.dualpipe.dualpipe_v`."""
    count = max(microbatches, 2 * ranks)
    distance = ranks - 1 - rank
    up: list[_Token] = [(B, 1), (W, 1), (F, 1)]
    down: list[_Token] = [(B, 0), (W, 0)]
    tokens: list[_Token] = [(F, 0)] * (2 * distance) + [(F, 0), (F, 1)] * (rank + 1) + up * distance
    tokens += [(F, 0), *up, *down] * (count - 2 * ranks + rank + 1) + [*up, *down] * distance
    waiting: list[_Token] = []
    for index in range(rank + 1):
        for side, now in ((1, 2 * index <= rank), (0, 2 * index < rank)):
            tokens.append((B, side))
            (tokens if now else waiting).append((W, side))
    for _ in range(distance):
        tokens += [waiting.pop(0), (B, 0)]
        waiting.append((W, 0))
    return tokens + waiting


def _numbered(tokens: list[_Token], rank: int, ranks: int, microbatches: int) -> Ints:
    """Each (kind, side) takes the microbatches in order; those that the step does not have are left out."""
    pairs = np.array(tokens, dtype=np.int64)
    kinds, sides = pairs.T
    micro = np.empty(len(tokens), dtype=np.int64)
    for kind in (F, B, W):
        for side in (0, 1):
            chosen = (kinds == kind) & (sides == side)
            micro[chosen] = np.arange(int(chosen.sum()))
    kept = micro < microbatches
    stages = np.where(sides == 1, 2 * ranks - 1 - rank, rank)
    return np.stack([kinds, stages, micro])[:, kept]
