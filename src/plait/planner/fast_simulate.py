"""What a schedule takes, on arrays: the times of `plait.schedule.simulate` for half a million actions in half a second.

Ranks advance together: a round runs the next action of every rank whose needs are over, as one numpy expression. The
additions and maxima are those of the reference, in its order, so that times are equal to the last bit. Arrays are
[ranks, places]: the place is an action's index in its rank's list; shorter lists are padded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from plait.core.errors import ScheduleError
from plait.core.events import COMPUTE, Event
from plait.planner.fast_lists import KINDS, B, F, Lists, Needs, W, make_lists
from plait.schedule.simulate import Cost

Floats = NDArray[np.float64]

_PERIODS = 3
"""Groups of microbatches that have to repeat before a step is continued by its period."""
_EQUAL = 1e-11
"""Share of the makespan up to which two differences of times are one number in different rounding."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Timing:
    """When every action of ``lists`` runs, in seconds. Padded places hold 0."""

    lists: Lists
    starts: Floats
    ends: Floats

    @property
    def makespan(self) -> float:
        """From the start of the step to the last end."""
        return float(self.ends.max())

    def busy(self) -> Floats:
        """Seconds of compute of each rank."""
        return np.asarray((self.ends - self.starts).sum(axis=1))

    def events(self) -> list[Event]:
        """The compute spans, as the reference emits them, in order of their start."""
        found = []
        lists = self.lists
        for rank, length in enumerate(lists.lengths):
            row = slice(0, int(length))
            columns = (lists.kinds, lists.stage, lists.microbatch, self.starts, self.ends)
            for kind, stage, m, start, end in zip(*(column[rank, row].tolist() for column in columns), strict=True):
                name = f"{stage}{KINDS[kind]}{m}"
                found.append(Event(rank=rank, stream=COMPUTE, kind=KINDS[kind], name=name, start=start, end=end))
        return sorted(found, key=lambda event: (event.start, event.end, event.rank))


def simulate_lists(lists: Lists, costs: Sequence[Cost], transfer: float | Sequence[float] = 0.0) -> Timing:
    """`plait.schedule.simulate.simulate` for compute-only ``lists``: equal times of every action.

    ``costs``: one a stage; ``transfer``: seconds across each boundary, or all. Raises `ScheduleError` where they do not
    fit the stages, or where the lists get stuck.
    """
    across = _across(lists, transfer)
    if len(costs) != lists.stages:
        raise ScheduleError(f"schedule {lists.name} has {lists.stages} stages, got {len(costs)} costs")
    table = np.array([[cost.forward, cost.backward, cost.weight] for cost in costs], dtype=np.float64).T
    table[B] += np.where(lists.splits, 0.0, table[W])  # a backward that is not split is one action
    order = lists.needs
    durations = np.where(order.present, table[lists.kinds, lists.stage], 0.0)
    lag = np.append(across, 0.0)[order.boundary]
    ends = _run(order, lag, durations)
    stuck = np.isinf(ends[: lists.size])
    if stuck.any():
        raise ScheduleError(f"schedule {lists.name}: {int(stuck.sum())} of {lists.size} actions can never run")
    shaped = np.where(order.present, ends[order.own], 0.0)
    before = np.concatenate([np.zeros((lists.ranks, 1)), shaped[:, :-1]], axis=1)
    starts = np.maximum(before, np.where(order.present, ends[order.need], 0.0) + lag)
    return Timing(lists=lists, starts=np.where(order.present, starts, 0.0), ends=shaped)


def _across(lists: Lists, transfer: float | Sequence[float]) -> Floats:
    across = np.array(transfer if isinstance(transfer, Sequence) else [transfer] * (lists.stages - 1), dtype=np.float64)
    if len(across) != lists.stages - 1:
        raise ScheduleError(
            f"schedule {lists.name} has {lists.stages - 1} boundaries, got {len(across)} transfer times"
        )
    return across


def _run(order: Needs, lag: Floats, durations: Floats) -> Floats:
    """The end of every action by its number; infinite for what never runs."""
    ranks, longest = order.need.shape
    size = order.size
    ends = np.full(size + 3, np.inf)
    ends[size] = 0.0
    # One column of padding more: a rank that is through stays there.
    pad = ((0, 0), (0, 1))
    needs = np.pad(order.need, pad, constant_values=size + 1).ravel()
    lags, spans = np.pad(lag, pad).ravel(), np.pad(durations, pad).ravel()
    owns = np.pad(order.own, pad, constant_values=size + 2).ravel()
    places = np.arange(ranks) * (longest + 1)
    clocks = np.zeros(ranks)
    while True:
        ready_at = ends.take(needs.take(places))
        ready_at += lags.take(places)
        np.maximum(ready_at, clocks, out=ready_at)
        ready_at += spans.take(places)
        ready = ready_at < np.inf
        if not ready.any():
            return ends
        np.copyto(clocks, ready_at, where=ready)
        ends[owns.take(places)] = ready_at
        places += ready


def makespan(
    name: str,
    costs: Sequence[Cost],
    *,
    ranks: int,
    microbatches: int,
    virtual: int = 1,
    transfer: float | Sequence[float] = 0.0,
) -> float:
    """Seconds of a step under a named schedule, in a time that does not grow with the microbatches.

    The lists repeat themselves between warm-up and cool-down, and so do the times once the transient is over: times of
    a repeating list are max-plus linear in those before (Baccelli et al. 1992, Synchronization and Linearity, theorem
    3.109). A short step is simulated; where its last groups of microbatches before the cool-down come with one period
    on all ranks, each group more adds a period. Else the step is made longer, in the end as long as asked for. Equal to
    `simulate_lists` but for rounding.
    """
    group = ranks if name == "interleaved" and virtual > 1 else 1
    short = _shortest(name, ranks, microbatches, virtual, group)
    while short < microbatches:
        lists = _kept(name, ranks, short, virtual)
        timing = simulate_lists(lists, costs, transfer)
        period = _period(timing, group)
        if period is not None:
            return timing.makespan + period * ((microbatches - short) // group)
        short += group * math.ceil(short / group)
    return simulate_lists(_kept(name, ranks, microbatches, virtual), costs, transfer).makespan


@lru_cache(maxsize=64)
def _kept(name: str, ranks: int, microbatches: int, virtual: int) -> Lists:
    """The lists of short steps, which a search asks for again and again."""
    return make_lists(name, ranks=ranks, microbatches=microbatches, virtual=virtual)


def _shortest(name: str, ranks: int, microbatches: int, virtual: int, group: int) -> int:
    """Microbatches of the first step to try: beyond every warm-up, and whole groups short of the step asked for."""
    if name == "gpipe" or (group > 1 and microbatches % group):
        return microbatches  # no steady phase; groups of several sizes
    least = {"zb-h2": 4, "zb-v": 3, "dualpipe-v": 3}.get(name, 2) * ranks + (_PERIODS + 2) * group
    return min(microbatches, least + (microbatches - least) % group)


def _period(timing: Timing, group: int) -> float | None:
    """Seconds between equal places of neighbouring groups before the cool-down; None where they are not one number."""
    lists = timing.lists
    places = (3 if lists.splits.any() else 2) * group * (lists.stages // lists.ranks)
    forwards = lists.kinds == F
    last = lists.kinds.shape[1] - 1 - np.argmax(forwards[:, ::-1], axis=1)  # the last forward ends the steady phase
    window = last[:, None] - np.arange(_PERIODS * places)
    if window.min() < places:
        return None
    rows = np.arange(lists.ranks)[:, None]
    now, before = (rows, window), (rows, window - places)
    repeats = (lists.kinds[now] == lists.kinds[before]) & (lists.stage[now] == lists.stage[before])
    if not (repeats & (lists.microbatch[now] == lists.microbatch[before] + group)).all():
        return None
    steps = timing.ends[now] - timing.ends[before]
    return float(steps.max()) if steps.max() - steps.min() <= _EQUAL * timing.makespan else None
