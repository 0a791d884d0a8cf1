"""Local search on a list: what lies on the critical path changes places with what follows it, while that helps.

The neighbourhood is that of job-shop scheduling: only moves on a critical path can shorten the makespan (van Laarhoven
et al. 1992, doi:10.1287/opre.40.1.113).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

from plait.schedule.ir import Action, Kind, Schedule
from plait.schedule.listing import Task

_REACH = 4
"""Places that an action may move at once: several waits often go together only."""


def improved(task: Task, schedule: Schedule, *, trials: int, gain: float) -> tuple[float, Schedule]:
    """(makespan, schedule): ``schedule`` after the moves that made it faster by the share ``gain`` at least each.

    Keeps within the task's memory and tries ``trials`` lists at most.
    """
    timing = _Timing(task, schedule)
    rows = [list(row) for row in schedule.ranks]
    best = timing.run(rows)
    assert best is not None, "a schedule that passed the checker runs"
    found = True
    while found and trials > 0:
        found = False
        for rank, place, steps in timing.moves(rows):
            row = rows[rank]
            moved = [*row[:place], *row[place + 1 : place + 1 + steps], row[place], *row[place + 1 + steps :]]
            if not _allowed(row, place, steps) or not _fits(task, schedule, moved):
                continue
            trials -= 1
            rows[rank] = moved
            took = timing.run(rows)
            if took is not None and took < best * (1 - gain):
                best, found = took, True
                break
            rows[rank] = row
            if trials <= 0:
                break
    timing.run(rows)
    ranks = tuple(map(tuple, rows))
    return best, Schedule(name=schedule.name, stages=schedule.stages, microbatches=schedule.microbatches, ranks=ranks)


def _allowed(row: list[Action], place: int, steps: int) -> bool:
    """Whether the action at ``place`` may come after the next ``steps``: own needs and the order of microbatches."""
    mover = row[place]
    if place + steps >= len(row):
        return False
    for other in row[place + 1 : place + 1 + steps]:
        if other.stage == mover.stage and (other.kind is mover.kind or other.microbatch == mover.microbatch):
            return False
    return True


def _fits(task: Task, schedule: Schedule, row: list[Action]) -> bool:
    live = 0
    for action in row:
        if action.kind is Kind.F:
            live += 1
            if live > task.live_limit:
                return False
        elif action.kind is (Kind.W if action.stage in schedule.splits else Kind.B):
            live -= 1
    return True


@final
class _Timing:
    """When every action of a list runs; faster than `plait.schedule.order.run`, which knows messages as well."""

    def __init__(self, task: Task, schedule: Schedule) -> None:
        self._task = task
        self._durations: dict[Action, float] = {}
        self._needs: dict[Action, tuple[tuple[Action, float], ...]] = {}
        last = len(task.homes) - 1
        for row in schedule.ranks:
            for action in row:
                cost, stage, m = task.costs[action.stage], action.stage, action.microbatch
                if action.kind is Kind.F:
                    self._durations[action] = cost.forward
                    self._needs[action] = (self._from(Kind.F, stage - 1, stage, m),) if stage else ()
                elif action.kind is Kind.B:
                    split = stage in schedule.splits
                    self._durations[action] = cost.backward + (0 if split else cost.weight)
                    self._needs[action] = (self._from(Kind.B, stage + 1, stage, m),) if stage < last else ()
                else:
                    self._durations[action] = cost.weight
                    self._needs[action] = ()
        self._starts: dict[Action, float] = {}
        self._ends: dict[Action, float] = {}

    def _from(self, kind: Kind, source: int, stage: int, microbatch: int) -> tuple[Action, float]:
        homes = self._task.homes
        lag = 0.0 if homes[source] == homes[stage] else self._task.transfers[min(source, stage)]
        return Action(kind, source, microbatch), lag

    def run(self, rows: list[list[Action]]) -> float | None:
        """The makespan; None where the lists get stuck. Needs within a rank are a matter of place: see `_allowed`."""
        starts: dict[Action, float] = {}
        ends: dict[Action, float] = {}
        at, clocks = [0] * len(rows), [0.0] * len(rows)
        waiting: dict[Action, int] = {}
        ready = list(range(len(rows)))
        while ready:
            rank = ready.pop()
            row, clock, place = rows[rank], clocks[rank], at[rank]
            while place < len(row):
                action = row[place]
                for need, lag in self._needs[action]:
                    if need not in ends:
                        waiting[need] = rank
                        break
                    clock = max(clock, ends[need] + lag)
                else:
                    starts[action] = clock
                    clock += self._durations[action]
                    ends[action] = clock
                    place += 1
                    if action in waiting:
                        ready.append(waiting.pop(action))
                    continue
                break
            at[rank], clocks[rank] = place, clock
        if waiting:
            return None
        self._starts, self._ends = starts, ends
        return max(clocks)

    def moves(self, rows: list[list[Action]]) -> Iterator[tuple[int, int, int]]:
        """(rank, place, steps): what to move behind how many others, from the end of the critical path backwards."""
        places = {action: (rank, place) for rank, row in enumerate(rows) for place, action in enumerate(row)}
        starts, ends = self._starts, self._ends
        current = max(ends, key=lambda action: ends[action])
        found = []
        while True:
            rank, place = places[current]
            before = rows[rank][place - 1] if place else None
            tight = next((need for need, lag in self._needs[current] if ends[need] + lag >= starts[current]), None)
            if tight is None and before is not None:
                # The rank was busy: perhaps what it did before can wait.
                found += [(rank, place - back, back) for back in range(1, _REACH + 1) if place - back >= 0]
            if before is not None and tight is None:
                current = before
            elif tight is not None:
                current = tight
            else:
                return iter(found)
