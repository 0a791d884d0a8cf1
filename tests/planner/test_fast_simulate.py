from __future__ import annotations

import random
import time

import pytest

from plait.core.errors import ScheduleError
from plait.core.events import COMPUTE
from plait.planner.fast_lists import lists_of, make_lists
from plait.planner.fast_simulate import makespan, simulate_lists
from plait.schedule.check import check
from plait.schedule.generate import NAMES, generate
from plait.schedule.ir import Schedule
from plait.schedule.simulate import Cost, simulate

VIRTUALS = {"interleaved": (1, 2, 3), "zb-v": (2,), "dualpipe-v": (2,)}
GRID = [
    (name, ranks, microbatches, virtual)
    for name in NAMES
    for ranks in (1, 2, 3, 5)
    for microbatches in (1, 2, 5, 7, 12)
    for virtual in VIRTUALS.get(name, (1,))
]


@pytest.mark.parametrize(("name", "ranks", "microbatches", "virtual"), GRID)
def test_arrays_hold_the_generated_lists_and_take_the_simulated_times(
    name: str, ranks: int, microbatches: int, virtual: int
) -> None:
    lists = make_lists(name, ranks=ranks, microbatches=microbatches, virtual=virtual)
    schedule = generate(name, ranks=ranks, microbatches=microbatches, virtual=virtual)
    assert lists.schedule().ranks == schedule.ranks
    assert tuple(lists.homes) == schedule.placement
    assert tuple(lists.live()) == tuple(check(schedule).live)

    draw = random.Random(f"{name} {ranks} {microbatches} {virtual}")
    costs = [Cost(forward=draw.random(), backward=draw.random(), weight=draw.random()) for _ in range(schedule.stages)]
    across = [draw.random() * 0.3 for _ in range(schedule.stages - 1)]
    wanted = [event for event in simulate(schedule, costs, across) if event.stream == COMPUTE]
    found = simulate_lists(lists, costs, across)
    assert found.events() == wanted
    assert found.makespan == max(event.end for event in wanted)
    for rank, seconds in enumerate(found.busy()):
        assert seconds == pytest.approx(sum(e.end - e.start for e in wanted if e.rank == rank), rel=1e-12)


def test_any_schedule_can_be_turned_into_arrays() -> None:
    schedule = Schedule.parse("0: 0F0 0F1 0B0 0B1\n1: 1F0 1B0 1F1 1B1\n2: 2F0 2B0 2W0 2F1 2B1 2W1\n")
    assert lists_of(schedule).schedule() == schedule


def test_lists_that_get_stuck_are_refused() -> None:
    stuck = Schedule.parse("0: 0F0 0F1 0B1 0B0\n1: 1F0 1B0 1F1 1B1\n")
    simulate_lists(lists_of(stuck), [Cost(forward=1, backward=1)] * 2)
    stuck = Schedule.parse("0: 0F0 0B0 0F1 0B1\n1: 1F0 1F1 1B0 1B1\n")
    with pytest.raises(ScheduleError, match="can never run"):
        simulate_lists(lists_of(stuck), [Cost(forward=1, backward=1)] * 2)


def test_sizes_have_to_fit() -> None:
    lists = make_lists("1f1b", ranks=2, microbatches=2)
    with pytest.raises(ScheduleError, match="2 stages, got 1 costs"):
        simulate_lists(lists, [Cost(forward=1, backward=1)])
    with pytest.raises(ScheduleError, match="1 boundaries, got 3"):
        simulate_lists(lists, [Cost(forward=1, backward=1)] * 2, [1.0, 1.0, 1.0])
    with pytest.raises(ScheduleError, match="unknown"):
        make_lists("2f2b", ranks=2, microbatches=2)
    with pytest.raises(ScheduleError, match="virtual=1 does"):
        make_lists("1f1b", ranks=2, microbatches=2, virtual=2)


def test_half_a_million_actions_take_less_than_a_second() -> None:
    """The issue's size; processor time, so that other work on the machine does not count."""
    before = time.process_time()
    lists = make_lists("interleaved", ranks=64, microbatches=1024, virtual=4)
    timing = simulate_lists(lists, [Cost(forward=1.0, backward=2.0)] * 256)
    took = time.process_time() - before
    assert lists.size == 2 * 256 * 1024
    assert timing.makespan == pytest.approx(3 * (4 * 1024 + 63))
    assert took < 1.0


@pytest.mark.parametrize("name", NAMES)
def test_a_step_is_continued_by_its_period(name: str) -> None:
    draw = random.Random(name)
    for _ in range(24):
        virtual = draw.choice(VIRTUALS.get(name, (1,)))
        ranks, microbatches = draw.choice((1, 2, 3, 4, 6)), draw.choice((1, 4, 12, 24, 48, 61))
        even = draw.random() < 0.4
        one = Cost(forward=draw.random(), backward=draw.random(), weight=draw.random())
        costs = [
            one if even else Cost(forward=draw.random(), backward=draw.random(), weight=draw.random())
            for _ in range(ranks * virtual)
        ]
        across = [0.2 * draw.random() for _ in range(ranks * virtual - 1)]
        lists = make_lists(name, ranks=ranks, microbatches=microbatches, virtual=virtual)
        whole = simulate_lists(lists, costs, across).makespan
        short = makespan(name, costs, ranks=ranks, microbatches=microbatches, virtual=virtual, transfer=across)
        assert short == pytest.approx(whole, rel=1e-9), (ranks, microbatches, virtual, costs, across)


def test_many_microbatches_take_no_longer_than_few() -> None:
    costs = [Cost(forward=1.0, backward=2.0)] * 31 + [Cost(forward=1.2, backward=2.1)]
    before = time.process_time()
    for _ in range(10):
        makespan("interleaved", costs, ranks=8, microbatches=100_000, virtual=4)
    assert time.process_time() - before < 1.0
