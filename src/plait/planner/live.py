"""What a pipeline rank holds while it runs its list: for each kind of action, the fullest moments. No torch.

A moment is a count of live microbatches for each of the rank's stages (between F and B), a count of those whose weight
gradient waits (between B and W, where the backward is split), and the action that then begins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from plait.core.plan import Plan
from plait.parallel.layout import build_schedule
from plait.planner.fast_lists import KINDS, F, Lists, W, lists_of, make_lists

_ROUNDS: Final = 4
"""Microbatches a rank and stage after which a schedule is in its steady state: more change no count but gpipe's."""


@dataclass(frozen=True, kw_only=True)
class Moment:
    """An action that begins, and what is there then."""

    kind: str
    """``F``, ``B`` or ``W``."""
    stage: int
    microbatch: int
    live: tuple[int, ...]
    """Microbatches between F and B, by the rank's stages in their order in the model."""
    waiting: tuple[int, ...]
    """Microbatches between B and W."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Table:
    """Moments of a rank, one a row; one column for each of its stages."""

    live: NDArray[np.float64]
    waiting: NDArray[np.float64]
    place: NDArray[np.int64]
    """Column of the stage of the action that begins."""
    backward: NDArray[np.bool_]
    of: Mapping[str, NDArray[np.int64]]
    """Rows by kind of action."""


@dataclass(frozen=True, kw_only=True)
class Live:
    """The fullest moments of one rank, none of which another of the same kind and stage covers."""

    stages: tuple[int, ...]
    """Of the rank."""
    moments: tuple[Moment, ...]
    split: bool
    """Whether backwards are split."""

    @cached_property
    def warm(self) -> int:
        """Microbatches whose forwards begin before the first gradients of weights are made, at the rank's fullest."""
        waits = max(moment.waiting[0] for moment in self.moments)
        return max(moment.live[0] for moment in self.moments) + max(0, waits - 1)

    @cached_property
    def table(self) -> Table:
        """The moments as arrays."""
        kinds = list(dict.fromkeys(moment.kind for moment in self.moments))
        return Table(
            live=np.array([moment.live for moment in self.moments], dtype=np.float64),
            waiting=np.array([moment.waiting for moment in self.moments], dtype=np.float64),
            place=np.array([self.stages.index(moment.stage) for moment in self.moments]),
            backward=np.array([moment.kind == "B" for moment in self.moments]),
            of={kind: np.array([n for n, one in enumerate(self.moments) if one.kind == kind]) for kind in kinds},
        )


def live_of(plan: Plan, microbatches: int, rank: int) -> Live:
    """The moments of pipeline rank ``rank`` under the plan's schedule."""
    if plan.schedule in ("auto", "2bw") or plan.schedule_file is not None:
        return _walk(_file(plan, microbatches), rank)
    name = "1f1b" if plan.schedule == "interleaved" and plan.virtual == 1 else plan.schedule
    return _named(name, plan.pp, _capped(name, plan, microbatches), plan.virtual, rank)


def _capped(name: str, plan: Plan, microbatches: int) -> int:
    """As few microbatches as have the same moments: counts no longer grow once all stages are full."""
    if name == "gpipe":
        return microbatches
    full = _ROUNDS * plan.pp
    # What is left over from whole rounds makes larger groups (see `schedule.generate.interleaved`).
    return microbatches if microbatches <= full + plan.pp else full + microbatches % plan.pp


@lru_cache(maxsize=1 << 14)
def _named(name: str, ranks: int, microbatches: int, virtual: int, rank: int) -> Live:
    if name == "1f1b":
        return _one_for_one(ranks, microbatches, rank)
    return _walk(_lists(name, ranks, microbatches, virtual), rank)


@lru_cache(maxsize=128)
def _lists(name: str, ranks: int, microbatches: int, virtual: int) -> Lists:
    return make_lists(name, ranks=ranks, microbatches=microbatches, virtual=virtual)


@lru_cache(maxsize=32)
def _file(plan: Plan, microbatches: int) -> Lists:
    """Schedules that are searched or read; for steps that overlap (2bw) the list that flushes: as many are live."""
    return lists_of(build_schedule(plan, microbatches))


def _one_for_one(ranks: int, microbatches: int, rank: int) -> Live:
    """1F1B in closed form: rank i has min(m, p - i) live (Narayanan et al. 2021, arXiv:2104.04473)."""
    live = min(microbatches, ranks - rank)
    moments = (
        Moment(kind="F", stage=rank, microbatch=live - 1, live=(live - 1,), waiting=(0,)),
        Moment(kind="B", stage=rank, microbatch=0, live=(live,), waiting=(0,)),
    )
    return Live(stages=(rank,), moments=moments, split=False)


def filled(live: int, rank: int) -> Live:
    """A schedule of one stage a rank that was searched within a limit, and fills it on every rank (ZB-1p, ZB-2p)."""
    moment = Moment(kind="B", stage=rank, microbatch=0, live=(live,), waiting=(0,))
    return Live(stages=(rank,), moments=(moment,), split=False)


def _walk(lists: Lists, rank: int) -> Live:
    """Count along the rank's list."""
    stages = tuple(np.flatnonzero(lists.homes == rank).tolist())
    present = lists.kinds[rank] >= 0
    kind, stage, micro = (x[rank, present] for x in (lists.kinds, lists.stage, lists.microbatch))
    splits = lists.splits
    columns = []
    for one in stages:
        here = stage == one
        waits = bool(splits[one])
        change = np.where(here, np.where(kind == F, 1, np.where(kind == W, 0, -1)), 0)
        later = np.where(here, np.where(kind == F, 0, np.where(kind == W, -1, 1 if waits else 0)), 0)
        columns.append(np.cumsum(change) - change)
        columns.append(np.cumsum(later) - later)
    table = np.stack(columns, axis=1)
    found: list[Moment] = []
    for number, name in enumerate(KINDS):
        for one in stages:
            chosen = np.flatnonzero((kind == number) & (stage == one))
            found += [
                Moment(
                    kind=name,
                    stage=one,
                    microbatch=int(micro[place]),
                    live=tuple(table[place, 0::2].tolist()),
                    waiting=tuple(table[place, 1::2].tolist()),
                )
                for place in _uncovered(table[chosen], chosen)
            ]
    return Live(stages=stages, moments=tuple(found), split=bool(splits.any()))


def _uncovered(table: np.ndarray, places: np.ndarray) -> list[int]:
    """The first place of each row of counts that no other row is at least as large as in every column."""
    if not len(places):
        return []
    # One number a row: counts are small, and equal numbers mean equal rows as long as none overflows.
    key = np.zeros(len(table))
    for column in table.T:
        key = key * (float(column.max()) + 1) + column
    rows, first = np.unique(table, axis=0, return_index=True) if key.max() >= 2**53 else _distinct(table, key)
    left = np.argsort(-rows.sum(axis=1), kind="stable")
    kept: list[int] = []
    while len(left):
        # The largest sum is covered by no other row; what it covers is gone.
        kept.append(int(left[0]))
        left = left[(rows[left] > rows[left[0]]).any(axis=1)]
    return [int(places[first[index]]) for index in kept]


def _distinct(table: np.ndarray, key: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Distinct rows and where each is first, by a number a row; in the order of ``np.unique`` of rows."""
    _, first = np.unique(key, return_index=True)
    return table[first], first
