"""Proof that a schedule is right before anything runs it: complete, in order, free of deadlock, within memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product, zip_longest

from plait.core.errors import ScheduleError
from plait.schedule.grid import refusal
from plait.schedule.ir import COMPUTE_KINDS, Action, Kind, Schedule
from plait.schedule.order import Progress, messages, partner, run

_WORDS = {Kind.F: "forward", Kind.B: "backward", Kind.W: "weight-gradient backward"}


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What `check` found out about a schedule that passed."""

    live: tuple[int, ...]
    """For each rank, the most microbatch-stages whose activations it holds at once; 0 in a forward-only schedule.

    A microbatch is held from its F to the end of its B, or of its W where the stage splits its backward.
    """


def check(schedule: Schedule, *, forward_only: bool = False, live_limit: int | None = None) -> Checked:
    """Prove ``schedule`` right, compute-only or lowered.

    Every stage is on one rank and has, for every microbatch, one F, then (unless ``forward_only``) one B, then, if the
    stage has any W, one W. A lowered schedule has one message for every hand-over between ranks and no other, received
    in the order in which it is sent, and one REDUCE after the last backward of each stage. All lists run to their ends,
    and no rank holds more than ``live_limit`` microbatch-stages. Raises `ScheduleError` with the reason and the grid.
    """
    _check_places(schedule)
    _check_complete(schedule, forward_only)
    _check_order(schedule)
    if schedule.lowered:
        _check_messages(schedule)
        _check_reductions(schedule)
    progress = run(schedule, duration=lambda action: 1)
    if progress.stuck:
        raise _deadlock(schedule, progress)
    return Checked(live=_live(schedule, live_limit))


def _check_places(schedule: Schedule) -> None:
    """Every action is of a stage and microbatch that exist, every stage on one rank, no rank without a stage."""
    for rank, action in _listed(schedule):
        home = schedule.homes[action.stage]
        if not 0 <= action.stage < schedule.stages:
            raise refusal(schedule, f"{action} is of a stage that is not among the {schedule.stages} stages", action)
        if action.kind is not Kind.REDUCE and not 0 <= action.microbatch < schedule.microbatches:
            there = f"the {schedule.microbatches} microbatches"
            raise refusal(schedule, f"{action} is of a microbatch that is not among {there}", action)
        if home != rank:
            reason = f"stage {action.stage} is on rank {home}, but rank {rank} has {action}; a stage lives on one rank"
            raise refusal(schedule, reason, action)
    idle = next((rank for rank, row in enumerate(schedule.ranks) if not row), None)
    if idle is not None:
        raise refusal(schedule, f"rank {idle} has no stage")
    absent = next((stage for stage in range(schedule.stages) if stage not in schedule.homes), None)
    if absent is not None:
        raise refusal(schedule, f"stage {absent} of {schedule.stages} is on no rank")


def _check_complete(schedule: Schedule, forward_only: bool) -> None:
    counts = Counter(action for _, action in _listed(schedule))
    for stage, microbatch in product(range(schedule.stages), range(schedule.microbatches)):
        forward, backward, weight = (Action(kind, stage, microbatch) for kind in COMPUTE_KINDS)
        where = f"stage {stage} microbatch {microbatch} has"
        on = f"on rank {schedule.homes[stage]}"
        for action in (forward, backward, weight):
            if counts[action] > 1:
                raise refusal(schedule, f"{where} {counts[action]} {_WORDS[action.kind]}s {on}, not one", action)
        if forward_only:
            extra = next((action for action in (backward, weight) if counts[action]), None)
            if extra is not None:
                raise refusal(schedule, f"{where} a {_WORDS[extra.kind]} {on}, in a forward-only schedule", extra)
        if not counts[forward]:
            if counts[backward] or counts[weight]:
                left = backward if counts[backward] else weight
                raise refusal(schedule, f"{where} a {_WORDS[left.kind]} {on} but no forward", forward, left)
            raise refusal(schedule, f"{where} no forward {on}", forward)
        if not forward_only and not counts[backward]:
            raise refusal(schedule, f"{where} a forward {on} but no backward", forward, backward)
        if stage in schedule.splits and not counts[weight]:
            reason = f"{where} no weight-gradient backward {on}, though stage {stage} splits its backward"
            raise refusal(schedule, reason, weight)


def _check_order(schedule: Schedule) -> None:
    """F before B before W on the rank: on one list, the needs of a microbatch are a matter of position."""
    before = {Kind.B: Kind.F, Kind.W: Kind.B}
    seen: set[Action] = set()
    for rank, action in _listed(schedule):
        if action.kind in before:
            first = Action(before[action.kind], action.stage, action.microbatch)
            if first not in seen:
                raise refusal(schedule, f"rank {rank} has {action} before {first}, which it needs", action)
        seen.add(action)


def _check_messages(schedule: Schedule) -> None:
    """One send and one receive for every hand-over between ranks; per ordered pair of ranks in the same order."""
    counts = Counter(action for _, action in _listed(schedule))
    senders = {partner(send): send for send in messages(schedule)}
    for receive, send in senders.items():
        for action in (send, receive):
            if counts[action] != 1:
                times = f"{counts[action]} times" if counts[action] else "nowhere"
                raise refusal(schedule, f"{send} with its {receive} is due once; {action} is {times}", action)
    wanted = set(senders.values())
    for _, action in _listed(schedule):
        known = action.kind in COMPUTE_KINDS or action.kind is Kind.REDUCE or action in wanted or action in senders
        if not known:
            raise refusal(schedule, f"{action} is a message that no stage on another rank waits for", action)
    sent: dict[tuple[int, int], list[Action]] = {}
    received: dict[tuple[int, int], list[Action]] = {}
    for rank, action in _listed(schedule):
        if action in wanted:
            sent.setdefault((rank, schedule.homes[partner(action).stage]), []).append(partner(action))
        elif action in senders:
            received.setdefault((schedule.homes[senders[action].stage], rank), []).append(action)
    for pair, order in sent.items():
        for expected, action in zip_longest(order, received[pair]):
            if expected != action:
                reason = f"rank {pair[1]} receives {action} from rank {pair[0]}, which sends {senders[expected]} first"
                raise refusal(schedule, reason, action)


def _check_reductions(schedule: Schedule) -> None:
    """One REDUCE a stage, after its last backward; none in a forward-only schedule."""
    for stage in range(schedule.stages):
        rank = schedule.homes[stage]
        row = [action for action in schedule.ranks[rank] if action.stage == stage]
        reduce = Action(Kind.REDUCE, stage)
        if schedule.forward_only:
            if reduce in row:
                raise refusal(schedule, f"{reduce} in a forward-only schedule, which has no gradients", reduce)
        elif row.count(reduce) != 1:
            raise refusal(schedule, f"stage {stage} has {row.count(reduce)} REDUCE on rank {rank}, not one", reduce)
        else:
            late = next((a for a in row[row.index(reduce) :] if a.kind in (Kind.B, Kind.W)), None)
            if late is not None:
                raise refusal(schedule, f"rank {rank} has {reduce} before {late}, whose gradient it lacks", reduce)


def _live(schedule: Schedule, limit: int | None) -> tuple[int, ...]:
    peaks = []
    for rank, row in enumerate(schedule.ranks):
        live = peak = 0
        for action in () if schedule.forward_only else row:
            if action.kind is Kind.F:
                live += 1
                peak = max(peak, live)
                if limit is not None and live > limit:
                    reason = f"rank {rank} holds {live} microbatch-stages from {action} on; the limit is {limit}"
                    raise refusal(schedule, reason, action)
            elif action.kind is (Kind.W if action.stage in schedule.splits else Kind.B):
                live -= 1
        peaks.append(peak)
    return tuple(peaks)


def _deadlock(schedule: Schedule, progress: Progress) -> ScheduleError:
    """Follow who waits for whom to the circle, and say it from there."""
    heads = {rank: schedule.ranks[rank][len(progress.spans[rank])] for rank in progress.stuck}
    path: list[int] = []
    rank = min(heads)
    while rank not in path:  # every need exists (the checks above), so its rank is stuck before it
        path.append(rank)
        rank = schedule.homes[progress.stuck[rank].stage]
    circle = path[path.index(rank) :]
    steps = [f"rank {rank} waits for {heads[rank]}"]
    for here in circle:
        need = progress.stuck[here]
        there = schedule.homes[need.stage]
        steps.append(f"which needs {need} on rank {there}")
        if need != heads[there]:
            steps.append(f"which {'itself ' * (there == rank)}waits for {heads[there]}{' first' * (there == rank)}")
    return refusal(schedule, f"deadlock: {', '.join(steps)}", *(heads[rank] for rank in circle))


def _listed(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    for rank, row in enumerate(schedule.ranks):
        for action in row:
            yield rank, action
