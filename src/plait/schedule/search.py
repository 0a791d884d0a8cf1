"""``schedule=auto``: the fastest list for measured costs under a bound on memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import product

from plait.core.errors import ScheduleError
from plait.core.events import COMPUTE
from plait.schedule.check import check
from plait.schedule.generate import NAMES, generate
from plait.schedule.improve import improved
from plait.schedule.ir import Schedule
from plait.schedule.listing import ORDERS, Policy, Task, ahead_of, listed
from plait.schedule.placement import V_SHAPED, looped, require, v_shaped
from plait.schedule.simulate import Cost, simulate

WORK = 80_000
"""Actions that each half of the search, listing and moving, may time: about half a second of one core. A count, so that
every rank stops alike."""
_STARTS = 3
"""Lists that are improved by moves: a good list is often not the neighbour of the best one."""
_GAIN = 1e-9
"""A list counts as faster from this share on: less is rounding, and then the simpler list stays."""


def search(
    costs: Sequence[Cost],
    ranks: int,
    microbatches: int,
    placement: Sequence[int] | None = None,
    live_limit: int | None = None,
    *,
    transfer: float | Sequence[float] = 0,
) -> Schedule:
    """A schedule, named ``auto``, that takes no longer by `simulate` than any named one that fits.

    ``costs``: one a virtual stage, as measured. ``placement``: rank of each stage, in a loop or along a V; None: in a
    loop. ``live_limit``: most microbatch-stages that a rank may hold; None: as many as 1F1B, the stages of a rank times
    ``ranks``. ``transfer``: seconds across each boundary, or across all. The same arguments give the same schedule on
    every rank. Raises `ScheduleError` where the limit is below the stages of a rank, which one microbatch needs.
    """
    require(ranks=ranks, microbatches=microbatches, stages=len(costs))
    homes = tuple(placement) if placement is not None else looped(ranks, len(costs) // ranks)
    virtual = len(costs) // ranks
    if sorted(homes) != sorted(looped(ranks, virtual)):
        raise ScheduleError(f"{len(costs)} stages do not lie {virtual} each on {ranks} ranks as {homes}")
    limit = ranks * virtual if live_limit is None else live_limit
    if limit < virtual:
        raise ScheduleError(
            f"live={limit}: a rank holds {virtual} stages of a microbatch at once; what works: live={virtual} or more"
        )
    across = tuple(transfer) if isinstance(transfer, Sequence) else (transfer,) * (len(costs) - 1)
    task = Task(
        costs=tuple(costs), homes=homes, transfers=across, microbatches=microbatches, live_limit=min(limit, 10**6)
    )
    return _best(task, ranks, virtual)


def named(ranks: int, microbatches: int, homes: Sequence[int], live_limit: int | None) -> Iterator[Schedule]:
    """The named schedules that lie as ``homes`` say and fit the limit."""
    virtual = len(homes) // ranks
    for name in NAMES:
        fits = (name in V_SHAPED) == (tuple(homes) == v_shaped(ranks) and virtual == 2)
        if name not in V_SHAPED:
            fits = tuple(homes) == looped(ranks, virtual) and (virtual == 1) != (name == "interleaved")
        if fits:
            schedule = generate(name, ranks=ranks, microbatches=microbatches, virtual=virtual)
            if live_limit is None or max(check(schedule).live) <= live_limit:
                yield schedule


def makespan(schedule: Schedule, costs: Sequence[Cost], transfer: Sequence[float]) -> float:
    """Seconds from the first start to the last end on paper."""
    return max(event.end for event in simulate(schedule, costs, transfer) if event.stream == COMPUTE)


def _best(task: Task, ranks: int, virtual: int) -> Schedule:
    size = 3 * len(task.homes) * task.microbatches
    # Phase 1: the named ones that fit. They come first, so that a tie keeps the best known list.
    lists = [
        (makespan(schedule, task.costs, task.transfers), schedule)
        for schedule in named(ranks, task.microbatches, task.homes, task.live_limit)
    ]
    # Phase 2: list schedulings under every policy, as far as the work allows.
    left = max(24, WORK // size)
    listings = []
    for policy in _policies(ranks, virtual, task.live_limit):
        if left > 0:
            left -= 1
            listings.append((*listed(task, policy), policy))
    lists += [(took, schedule) for took, schedule, _ in listings]
    # Phase 3: from the best policy on, ranks run further ahead or less far, one after the other.
    took, _, policy = min(listings, key=lambda listing: listing[0])
    lists += _shifted(task, ranks, virtual, took, policy, left)
    # Phase 4: moves on the critical path, from the best lists on.
    ordered = sorted(lists, key=lambda entry: entry[0])  # stable: named ones first among equals
    starts = list({schedule.ranks: schedule for _, schedule in ordered}.values())[:_STARTS]
    lists += [improved(task, start, trials=max(8, WORK // size // _STARTS), gain=_GAIN) for start in starts]
    best = lists[0]
    for entry in lists[1:]:
        best = entry if entry[0] < best[0] * (1 - _GAIN) else best
    return dataclasses.replace(best[1], name="auto")


def _shifted(
    task: Task, ranks: int, virtual: int, took: float, policy: Policy, left: int
) -> list[tuple[float, Schedule]]:
    """Ever faster lists under ``policy`` with other bounds for each rank, after ``left`` listings at most."""
    found = []
    climbing = True
    while climbing:
        climbing = False
        for rank, change in product(range(ranks), (1, -1, 2, -2)):
            size = policy.ahead[rank] + change
            if not virtual <= size <= task.live_limit or left <= 0:
                continue
            left -= 1
            other = dataclasses.replace(policy, ahead=(*policy.ahead[:rank], size, *policy.ahead[rank + 1 :]))
            again, schedule = listed(task, other)
            if again < took * (1 - _GAIN):
                took, policy, climbing = again, other, True
                found.append((again, schedule))
    return found


def _policies(ranks: int, virtual: int, limit: int) -> Iterator[Policy]:
    deeps = (True, False) if virtual > 1 else (True,)
    shapes = dict.fromkeys(ahead_of(ranks, virtual, limit))
    for order, ahead, patience, deep in product(ORDERS, shapes, (0.0, 1.0, 0.5), deeps):
        yield Policy(order=order, deep=deep, patience=patience, ahead=ahead)
