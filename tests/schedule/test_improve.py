from __future__ import annotations

import random

import pytest

from plait.schedule.check import check
from plait.schedule.generate import NAMES, generate
from plait.schedule.improve import improved
from plait.schedule.ir import Kind, Schedule
from plait.schedule.listing import ORDERS, Policy, Task, listed
from plait.schedule.placement import V_SHAPED, looped, v_shaped
from plait.schedule.search import makespan
from plait.schedule.simulate import Cost

RANDOM = random.Random(5)


def task(ranks: int, microbatches: int, homes: tuple[int, ...], limit: int) -> Task:
    def seconds() -> float:
        return RANDOM.uniform(0.5, 1.5)

    costs = tuple(Cost(forward=seconds(), backward=seconds(), weight=seconds()) for _ in homes)
    transfers = tuple(0.2 * seconds() for _ in homes[1:])
    return Task(costs=costs, homes=homes, transfers=transfers, microbatches=microbatches, live_limit=limit)


@pytest.mark.parametrize("name", NAMES)
def test_moves_time_lists_as_the_simulator_does_and_make_none_slower(name: str) -> None:
    virtual = 2 if name in (*V_SHAPED, "interleaved") else 1
    schedule = generate(name, ranks=3, microbatches=5, virtual=virtual)
    limit = max(check(schedule).live)
    for _ in range(4):
        one = task(3, 5, schedule.placement, limit)
        before = makespan(schedule, one.costs, one.transfers)
        for trials in (0, 60):
            took, better = improved(one, schedule, trials=trials, gain=1e-9)
            assert took == pytest.approx(makespan(better, one.costs, one.transfers), rel=1e-12)
            assert took <= before * (1 + 1e-12)
            assert check(better, live_limit=limit)
        assert trials == 0 or sorted(map(str, better.ranks[0])) == sorted(map(str, schedule.ranks[0]))


def test_a_w_that_delays_the_next_rank_is_moved_behind() -> None:
    schedule = Schedule.parse("0: 0F0 0F1 0B0 0W0 0B1 0W1\n1: 1F0 1B0 1W0 1F1 1W1 1B1".replace("1W1 1B1", "1B1 1W1"))
    unit = Cost(forward=1, backward=1, weight=1)
    one = Task(costs=(unit, unit), homes=(0, 1), transfers=(0.0,), microbatches=2, live_limit=2)
    took, better = improved(one, schedule, trials=50, gain=1e-9)
    assert makespan(schedule, one.costs, one.transfers) == 8
    assert took == 7  # rank 1 begins at 1 and has six
    row = [str(action) for action in better.ranks[1]]
    assert row.index("1W0") > row.index("1F1")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("homes", "virtual"), [(looped(3), 1), (v_shaped(3), 2), (looped(2, 3), 3), (v_shaped(1), 2)])
def test_a_listing_takes_what_the_simulator_says_in_any_memory(
    homes: tuple[int, ...], virtual: int, order: str
) -> None:
    ranks = max(homes) + 1
    for limit in (virtual, virtual + 1, 2 * ranks * virtual):
        one = task(ranks, 4, homes, limit)
        for patience in (0.0, 1.0):
            for deep in (True, False):
                policy = Policy(order=order, deep=deep, patience=patience, ahead=(limit,) * ranks)
                took, schedule = listed(one, policy)
                assert check(schedule, live_limit=limit)
                least = makespan(schedule, one.costs, one.transfers)
                # A W that waited in vain could have started at once.
                assert took == pytest.approx(least, rel=1e-12) if patience == 0 else took >= least * (1 - 1e-12)
                assert schedule.splits == set(range(len(homes)))
                assert sum(action.kind is Kind.W for row in schedule.ranks for action in row) == 4 * len(homes)
