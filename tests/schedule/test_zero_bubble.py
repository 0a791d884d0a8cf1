"""ZB-H1, ZB-H2, ZB-V and DualPipe-V against their papers: bubble, live activations, any size."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.core.events import COMPUTE
from plait.schedule.check import check
from plait.schedule.dualpipe import dualpipe_v
from plait.schedule.generate import one_f_one_b
from plait.schedule.ir import Schedule
from plait.schedule.lower import lower
from plait.schedule.placement import v_shaped
from plait.schedule.simulate import Cost, simulate
from plait.schedule.zero_bubble import zb_h1, zb_h2, zb_v

RANKS = range(1, 9)
MICROBATCHES = (1, 2, 3, 4, 7, 9, 15, 16, 17)
COSTS = [(1, 1, 1), (2, 2, 1), (3, 4, 2), (2, 3, 2), (1, 2, 1), (2, 1, 1), (5, 5, 4)]
"""F, B, W with W <= F, as the papers assume."""


def idle(schedule: Schedule, costs: tuple[int, int, int]) -> tuple[float, list[float]]:
    """(makespan minus a rank's work, what each rank idles between its own first and last action); exact integers."""
    forward, backward, weight = costs
    events = simulate(schedule, [Cost(forward=forward, backward=backward, weight=weight)] * schedule.stages)
    own = []
    for rank in range(len(schedule.ranks)):
        spans = [event for event in events if event.rank == rank and event.stream == COMPUTE]
        own.append(spans[-1].end - spans[0].start - sum(span.end - span.start for span in spans))
    work = sum(costs) * schedule.microbatches * schedule.stages // len(schedule.ranks)
    return max(event.end for event in events) - work, own


def live(schedule: Schedule) -> tuple[int, ...]:
    """Peaks, once the schedule and its lowered form have passed the checker."""
    found = check(lower(schedule)).live
    assert check(schedule).live == found
    assert schedule.splits == set(range(schedule.stages))
    return found


@pytest.mark.parametrize("p", RANKS)
def test_zb_h1_equals_the_closed_form(p: int) -> None:
    for m in MICROBATCHES:
        schedule = zb_h1(p, m)
        assert live(schedule) == (min(m, p),) * p
        for costs in COSTS if m >= p else ():
            forward, backward, weight = costs
            assert idle(schedule, costs)[0] == (p - 1) * (forward + backward - weight)


def test_zb_h1_idles_a_third_of_1f1b() -> None:
    for p in RANKS:
        assert idle(one_f_one_b(p, 3 * p), (1, 1, 1))[0] == 3 * idle(zb_h1(p, 3 * p), (1, 1, 1))[0]


def test_zb_h1_is_the_file_in_the_docs() -> None:
    text = (Path(__file__).parents[2] / "docs" / "zero-bubble.schedule").read_text()
    assert zb_h1(2, 4) == Schedule.parse(text)


@pytest.mark.parametrize("p", RANKS)
def test_zb_h2_equals_the_closed_form(p: int) -> None:
    for m in MICROBATCHES:
        schedule = zb_h2(p, m)
        assert live(schedule) == (min(m, 2 * p - 1),) * p
        for costs in COSTS if m >= 2 * p - 1 else ():
            forward, backward, weight = costs
            whole, own = idle(schedule, costs)
            assert max(own) == (p - 1) * (forward + backward - 2 * weight)
            # A step that ends on all ranks at once pays for the late start of the last rank too.
            assert whole >= (p - 1) * forward
        if m >= 2 * p - 1:
            assert idle(schedule, (1, 1, 1)) == (p - 1, [0] * p)


@pytest.mark.parametrize("p", RANKS)
def test_zb_v_never_idles_within_1f1bs_memory(p: int) -> None:
    for m in MICROBATCHES:
        schedule = zb_v(p, m)
        assert schedule.placement == v_shaped(p)
        peaks = live(schedule)
        assert max(peaks) <= min(2 * m, 2 * p)
        if m >= 2 * p - 1:
            assert peaks == (2 * p,) * p
            assert idle(schedule, (1, 1, 1)) == (p - 1, [0] * p)
            for costs in COSTS:  # its stages are half as large as 1F1B's, whose costs are then twice these
                assert idle(schedule, costs)[0] <= idle(one_f_one_b(p, m), costs)[0]


@pytest.mark.parametrize("p", RANKS)
def test_dualpipe_v_keeps_the_published_bubble_and_memory(p: int) -> None:
    for m in MICROBATCHES:
        schedule = dualpipe_v(p, m)
        assert schedule.placement == v_shaped(p)
        assert max(live(schedule)) <= min(2 * m, 2 * p + 1)
        for costs in COSTS if m >= 2 * p else ():
            forward, backward, weight = costs
            whole = backward + weight
            bubble, _ = idle(schedule, costs)
            assert bubble <= (p - 1) * (forward + whole + whole - 3 * weight)  # F&B = F + whole, run one by one
            if weight <= backward <= forward:
                assert bubble == (p - 1) * (forward + backward - weight)


def test_rows() -> None:
    assert zb_h1(3, 4).text().splitlines()[1:] == [
        "0: 0F0 0F1 0F2 0B0 0W0 0F3 0B1 0W1 0B2 0W2 0B3 0W3",
        "1: 1F0 1F1 1B0 1F2 1B1 1W0 1F3 1B2 1W1 1B3 1W2 1W3",
        "2: 2F0 2B0 2F1 2B1 2F2 2B2 2W0 2F3 2B3 2W1 2W2 2W3",
    ]
    assert zb_v(2, 3).text().splitlines()[1:] == [
        "0: 0F0 0F1 0F2 3F0 3B0 3W0 3F1 3B1 3W1 0B0 0W0 3F2 3B2 3W2 0B1 0W1 0B2 0W2",
        "1: 1F0 2F0 1F1 2F1 2B0 2W0 1F2 1B0 1W0 2F2 2B1 2W1 1B1 2B2 1B2 1W1 2W2 1W2",
    ]
