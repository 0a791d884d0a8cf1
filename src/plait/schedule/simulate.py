"""What a schedule takes: `Schedule` and costs to the `Event`s that a real run would record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plait.core.errors import ScheduleError
from plait.core.events import COMM, COMPUTE, Event
from plait.schedule.check import check
from plait.schedule.ir import Action, Kind, Schedule
from plait.schedule.order import messages, partner, run


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Seconds of one microbatch in one stage. A backward that is not split costs ``backward + weight``."""

    forward: float
    backward: float
    """The input-gradient half."""
    weight: float = 0
    """The weight-gradient half."""

    def __post_init__(self) -> None:
        for name, value in (("forward", self.forward), ("backward", self.backward), ("weight", self.weight)):
            _require_seconds(f"cost {name}", value)


def simulate(schedule: Schedule, costs: Sequence[Cost], transfer: float | Sequence[float] = 0) -> list[Event]:
    """Run ``schedule`` on paper; events in order of their start.

    ``costs`` is one `Cost` a stage. ``transfer`` is the seconds across the boundary from stage s to s + 1, either way,
    one for all or one each; nothing is charged between stages of one rank. Transfers overlap with compute and with
    each other, and a rank waits for one only where an action needs it: receives are posted early.
    Each transfer is one span on the `COMM` stream of the sender and one of the receiver; REDUCE takes no time. Integer
    and fraction costs stay exact. The schedule may be compute-only or lowered; raises `ScheduleError` where it does
    not pass `check`, or where costs or transfers do not fit its stages.
    """
    check(schedule, forward_only=schedule.forward_only)
    boundaries = schedule.stages - 1
    across = [transfer] * boundaries if not isinstance(transfer, Sequence) else list(transfer)
    if len(costs) != schedule.stages or len(across) != boundaries:
        raise ScheduleError(
            f"schedule {schedule.name} has {schedule.stages} stages and {boundaries} boundaries; "
            f"got {len(costs)} costs and {len(across)} transfer times"
        )
    for boundary, seconds in enumerate(across):
        _require_seconds(f"transfer across boundary {boundary}", seconds)

    def duration(action: Action) -> float:
        cost = costs[action.stage]
        if action.kind is Kind.F:
            return cost.forward
        if action.kind is Kind.W:
            return cost.weight
        return cost.backward if action.stage in schedule.splits else cost.backward + cost.weight

    progress = run(schedule.compute_only(), duration=duration, transfer=across.__getitem__)
    spans = [(rank, span) for rank, row in enumerate(progress.spans) for span in row]
    ends = {span.action: span.end for _, span in spans}
    events = [_event(rank, COMPUTE, span.action, span.start, span.end) for rank, span in spans]
    for send in messages(schedule):
        start = ends[Action(Kind.F if send.kind is Kind.SEND_F else Kind.B, send.stage, send.microbatch)]
        end = start + across[min(send.stage, partner(send).stage)]
        events += [_event(schedule.homes[side.stage], COMM, side, start, end) for side in (send, partner(send))]
    for rank, row in enumerate(schedule.ranks if schedule.lowered else ()):
        for action in row:
            if action.kind is Kind.REDUCE:
                end = max(end for done, end in ends.items() if done.stage == action.stage)
                events.append(_event(rank, COMM, action, end, end))
    return sorted(events, key=lambda event: (event.start, event.end, event.rank))


def _event(rank: int, stream: str, action: Action, start: float, end: float) -> Event:
    return Event(rank=rank, stream=stream, kind=str(action.kind), name=str(action), start=start, end=end)


def _require_seconds(what: str, value: float) -> None:
    if not 0 <= value < float("inf"):
        raise ScheduleError(f"{what} of {value} s is not a finite time of 0 or more")
