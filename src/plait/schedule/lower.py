"""Lowering: a compute-only schedule gets its communication."""

from __future__ import annotations

from plait.core.errors import ScheduleError
from plait.schedule.check import check
from plait.schedule.ir import Action, Kind, Schedule
from plait.schedule.order import messages, partner, run


def lower(schedule: Schedule) -> Schedule:
    """Insert sends, receives and gradient reductions into compute-only lists.

    Stages that are neighbours on one rank hand over without communication. A send follows its compute at once. A
    receive stands where the receiver is when the sender computes, in an execution with one unit of time an action:
    then all lists follow one common order of time, in which every receive comes after its send, so neither blocking
    receives nor the order of messages between two ranks can deadlock. The REDUCE of a stage follows its last B or W
    (of a forward-only schedule: none). Raises `ScheduleError` where ``schedule`` is lowered already or not right.
    """
    if schedule.lowered:
        raise ScheduleError(f"schedule {schedule.name} is lowered already: it holds communication")
    check(schedule, forward_only=schedule.forward_only)
    sends = {
        Action(Kind.F if send.kind is Kind.SEND_F else Kind.B, send.stage, send.microbatch): send
        for send in messages(schedule)
    }
    progress = run(schedule, duration=lambda action: 1)

    # Phase 1: the time and place at which each message arrives. A rank sends at most one message a unit of time.
    arrivals: list[list[tuple[float, int, Action]]] = [[] for _ in schedule.ranks]
    for sender, spans in enumerate(progress.spans):
        for span in spans:
            if span.action in sends:
                receive = partner(sends[span.action])
                arrivals[schedule.homes[receive.stage]].append((span.end, sender, receive))

    # Phase 2: each list again, with what arrived before each compute starts in front of it.
    rows = []
    for spans, inbox in zip(progress.spans, arrivals, strict=True):
        pending = sorted(inbox, key=lambda arrival: arrival[:2], reverse=True)
        finals = {span.action.stage: span.action for span in spans if span.action.kind is not Kind.F}
        row: list[Action] = []
        for span in spans:
            while pending and pending[-1][0] <= span.start:
                row.append(pending.pop()[2])
            row.append(span.action)
            if span.action in sends:
                row.append(sends[span.action])
            if finals.get(span.action.stage) == span.action:
                row.append(Action(Kind.REDUCE, span.action.stage))
        rows.append(tuple(row))
    return Schedule(name=schedule.name, stages=schedule.stages, microbatches=schedule.microbatches, ranks=tuple(rows))
