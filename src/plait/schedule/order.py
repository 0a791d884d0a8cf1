"""What each action has to wait for, and how far a schedule gets: the one engine behind check, lower, simulate, grid.

Sends are asynchronous, as in the executor: they wait for nobody. Receives are taken as *blocking*, although an executor
may post them early: whatever order gets through with blocking receives also gets through with posted ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

from plait.schedule.ir import Action, Kind, Schedule

_PARTNERS = {Kind.SEND_F: (Kind.RECV_F, 1), Kind.SEND_B: (Kind.RECV_B, -1)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """Something that has to be over first, and the boundary (stage s to s+1) its data crosses between ranks."""

    action: Action
    boundary: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """When an action ran, in the unit of the durations."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far each rank got: what ran, and the unmet need of every rank that is stuck (none where all ended)."""

    spans: tuple[tuple[Span, ...], ...]
    stuck: dict[int, Action]


def needs(schedule: Schedule, action: Action) -> tuple[Need, ...]:
    """What has to be over before ``action`` of ``schedule`` can end, on any rank."""
    kind, stage, microbatch = action.kind, action.stage, action.microbatch
    if kind is Kind.F:
        return () if stage == 0 else (_handover(schedule, action, Kind.F, Kind.RECV_F, stage - 1),)
    if kind is Kind.B:
        own = Need(action=Action(Kind.F, stage, microbatch))
        last = stage == schedule.stages - 1
        return (own,) if last else (own, _handover(schedule, action, Kind.B, Kind.RECV_B, stage + 1))
    if kind is Kind.RECV_F:
        return (Need(action=Action(Kind.SEND_F, stage - 1, microbatch), boundary=stage - 1),)
    if kind is Kind.RECV_B:
        return (Need(action=Action(Kind.SEND_B, stage + 1, microbatch), boundary=stage),)
    if kind is Kind.REDUCE:  # follows the stage's own backwards in its rank's list, which check() holds it to
        return ()
    return (Need(action=Action(Kind.F if kind is Kind.SEND_F else Kind.B, stage, microbatch)),)


def _handover(schedule: Schedule, action: Action, kind: Kind, receive: Kind, neighbour: int) -> Need:
    """The neighbour's result: its compute where both stages share a rank or nothing is lowered, else the receive."""
    source = Action(kind, neighbour, action.microbatch)
    if schedule.homes.get(neighbour) == schedule.homes.get(action.stage):
        return Need(action=source)
    if schedule.lowered:
        return Need(action=Action(receive, action.stage, action.microbatch))
    return Need(action=source, boundary=min(neighbour, action.stage))


def messages(schedule: Schedule) -> Iterator[Action]:
    """Every send that a lowered ``schedule`` needs: the hand-overs between neighbour stages on different ranks."""
    kinds = (Kind.SEND_F,) if schedule.forward_only else (Kind.SEND_F, Kind.SEND_B)
    for stage, microbatch, kind in product(range(schedule.stages - 1), range(schedule.microbatches), kinds):
        if schedule.homes[stage] != schedule.homes[stage + 1]:
            yield Action(kind, stage if kind is Kind.SEND_F else stage + 1, microbatch)


def partner(send: Action) -> Action:
    """The receive that matches ``send``: one stage on for SEND_F, one stage back for SEND_B."""
    kind, step = _PARTNERS[send.kind]
    return Action(kind, send.stage + step, send.microbatch)


def run(
    schedule: Schedule,
    *,
    duration: Callable[[Action], float],
    transfer: Callable[[int], float] = lambda boundary: 0,
) -> Progress:
    """Run every list as early as its needs allow; ends always, in time linear in the number of actions.

    ``duration`` of an action and ``transfer`` across a boundary share one unit; integers and fractions stay exact.
    """
    done: dict[Action, float] = {}
    clocks: list[float] = [0] * len(schedule.ranks)
    spans: list[list[Span]] = [[] for _ in schedule.ranks]
    waiting: dict[Action, list[int]] = {}
    ready = deque(range(len(schedule.ranks)))
    while ready:
        rank = ready.popleft()
        row = schedule.ranks[rank]
        while len(spans[rank]) < len(row):
            action = row[len(spans[rank])]
            wanted = needs(schedule, action)
            unmet = next((need.action for need in wanted if need.action not in done), None)
            if unmet is not None:
                waiting.setdefault(unmet, []).append(rank)
                break
            start = clocks[rank]
            for need in wanted:
                arrival = done[need.action]
                start = max(start, arrival if need.boundary is None else arrival + transfer(need.boundary))
            clocks[rank] = start + duration(action)
            spans[rank].append(Span(action=action, start=start, end=clocks[rank]))
            done.setdefault(action, clocks[rank])
            ready.extend(waiting.pop(action, ()))
    stuck = {rank: unmet for unmet, ranks in waiting.items() for rank in ranks}
    return Progress(spans=tuple(tuple(row) for row in spans), stuck=stuck)
