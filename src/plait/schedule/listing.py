"""List scheduling: a schedule from costs and a `Policy`, in time linear in the number of actions.

Every rank that is free starts, among the actions whose inputs have arrived and whose memory is there, the one that its
policy puts first. Graham 1966, doi:10.1002/j.1538-7305.1966.tb01709.x; as used for pipelines with split backwards by
Qi et al. 2023, arXiv:2401.10241, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import final

from plait.schedule.ir import Action, Kind, Schedule
from plait.schedule.simulate import Cost

ALTERNATE = "alternate"
ORDERS = ("BFW", "FBW", "BWF", ALTERNATE)
"""Which kind goes first; `ALTERNATE` is F after B, B after F, W when neither is there: 1F1B's steady state."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is to be scheduled: costs and rank of each stage, seconds across each boundary, and the memory of a rank."""

    costs: tuple[Cost, ...]
    homes: tuple[int, ...]
    transfers: tuple[float, ...]
    microbatches: int
    live_limit: int
    """Most microbatch-stages between F and W on a rank; at least its number of stages."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How a rank chooses among what it could start."""

    order: str
    deep: bool
    """Among forwards (backwards) of several stages of the rank, the later (earlier) one first."""
    patience: float
    """A W is not started while an input is on its way that arrives within this share of the W's time."""
    ahead: tuple[int, ...]
    """For each rank, the most microbatch-stages between F and B; at least its number of stages."""


def listed(task: Task, policy: Policy) -> tuple[float, Schedule]:
    """(makespan, schedule) of ``task`` under ``policy``. Where a W waited in vain the simulator takes less."""
    return _Scheduling(task, policy).run()


@final
class _Rank:
    """What one rank has started, and what it waits for."""

    def __init__(self, stages: list[int]) -> None:
        self.stages = stages
        self.reserve = {stage: len(stages) - 1 - index for index, stage in enumerate(stages)}
        """Places that later stages of the rank keep free, or the oldest microbatch could not get through them."""
        self.row: list[Action] = []
        self.weights: list[Action] = []
        self.arrivals: list[float] = []
        self.free = 0.0
        self.flying = self.live = 0
        self.turn = Kind.F


@final
class _Scheduling:
    def __init__(self, task: Task, policy: Policy) -> None:
        self._task = task
        self._policy = policy
        stages = range(len(task.homes))
        ranks = range(max(task.homes) + 1)
        self._ranks = [_Rank([stage for stage in stages if task.homes[stage] == rank]) for rank in ranks]
        self._came = {Kind.F: [0] * len(stages), Kind.B: [0] * len(stages)}
        self._begun = {Kind.F: [0] * len(stages), Kind.B: [0] * len(stages)}
        self._came[Kind.F][0] = task.microbatches
        # (time, 0: an input arrives / 1: a rank chooses, rank, kind, stage): inputs of a moment before choices.
        self._events: list[tuple[float, int, int, str, int]] = [(0.0, 1, rank, "", 0) for rank in ranks]

    def run(self) -> tuple[float, Schedule]:
        events, ranks = self._events, self._ranks
        while events:
            now, choice, index, kind, stage = heappop(events)
            rank = ranks[index]
            if not choice:
                self._came[Kind(kind)][stage] += 1
                heappop(rank.arrivals)
                if rank.free <= now:
                    heappush(events, (now, 1, index, "", 0))
            elif rank.free <= now:
                action = self._choose(rank, now, index)
                if action is not None:
                    self._start(rank, index, action, now)
        task = self._task
        rows = tuple(tuple(rank.row) for rank in ranks)
        schedule = Schedule(name="auto", stages=len(task.homes), microbatches=task.microbatches, ranks=rows)
        return max(rank.free for rank in ranks), schedule

    def _choose(self, rank: _Rank, now: float, index: int) -> Action | None:
        order = self._policy.order
        if order == ALTERNATE:
            order = "FBW" if rank.turn is Kind.F else "BFW"
        for letter in order:
            if letter == "W":
                action = self._weight(rank, now)
            elif letter == "F":
                action = self._next(rank, Kind.F, index)
            else:
                action = self._next(rank, Kind.B, index)
            if action is not None:
                return action
        return None

    def _next(self, rank: _Rank, kind: Kind, index: int) -> Action | None:
        came, begun = self._came[kind], self._begun[kind]
        later_first = self._policy.deep == (kind is Kind.F)
        for stage in reversed(rank.stages) if later_first else rank.stages:
            if begun[stage] < came[stage] and (kind is Kind.B or self._room(rank, stage, index)):
                return Action(kind, stage, begun[stage])
        return None

    def _room(self, rank: _Rank, stage: int, index: int) -> bool:
        need = 1 + rank.reserve[stage]
        return rank.live + need <= self._task.live_limit and rank.flying + need <= self._policy.ahead[index]

    def _weight(self, rank: _Rank, now: float) -> Action | None:
        if not rank.weights:
            return None
        action = rank.weights[0]
        wait = self._policy.patience * self._task.costs[action.stage].weight
        return None if rank.arrivals and rank.arrivals[0] - now < wait else action

    def _start(self, rank: _Rank, index: int, action: Action, now: float) -> None:
        cost, kind, stage = self._task.costs[action.stage], action.kind, action.stage
        rank.row.append(action)
        if kind is Kind.W:
            rank.weights.pop(0)
            rank.live -= 1
            rank.free = now + cost.weight
        elif kind is Kind.F:
            rank.live += 1
            rank.flying += 1
            rank.turn = Kind.B
            rank.free = now + cost.forward
            self._begun[kind][stage] += 1
            if stage + 1 < len(self._task.homes):
                self._deliver(Kind.F, stage + 1, rank.free + self._across(stage))
            else:
                self._deliver(Kind.B, stage, rank.free)
        else:
            rank.flying -= 1
            rank.turn = Kind.F
            rank.weights.append(Action(Kind.W, stage, action.microbatch))
            rank.free = now + cost.backward
            self._begun[kind][stage] += 1
            if stage > 0:
                self._deliver(Kind.B, stage - 1, rank.free + self._across(stage - 1))
        heappush(self._events, (rank.free, 1, index, "", 0))

    def _across(self, boundary: int) -> float:
        homes = self._task.homes
        return 0.0 if homes[boundary] == homes[boundary + 1] else self._task.transfers[boundary]

    def _deliver(self, kind: Kind, stage: int, when: float) -> None:
        index = self._task.homes[stage]
        heappush(self._ranks[index].arrivals, when)
        heappush(self._events, (when, 0, index, kind.value, stage))


def peak(schedule: Schedule) -> int:
    """Most microbatch-stages between F and W that any rank of a schedule with split backwards holds."""
    most = 0
    for row in schedule.ranks:
        live = 0
        for action in row:
            live += {Kind.F: 1, Kind.W: -1}.get(action.kind, 0)
            most = max(most, live)
    return most


def ahead_of(ranks: int, virtual: int, limit: int) -> Sequence[tuple[int, ...]]:
    """Starts for `Policy.ahead`: as ZB-H1's and 1F1B's, as ZB-H2's, and no bound but memory."""
    shapes = (
        tuple(virtual * (ranks - rank) for rank in range(ranks)),
        tuple(virtual * (2 * (ranks - 1 - rank) + 1) for rank in range(ranks)),
        (limit,) * ranks,
    )
    return [tuple(max(virtual, min(limit, size)) for size in shape) for shape in shapes]
