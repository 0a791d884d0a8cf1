from __future__ import annotations

import subprocess
import sys
from fractions import Fraction

import pytest

from plait.core.errors import ScheduleError
from plait.core.events import COMM, COMPUTE, Event, bubble
from plait.schedule.generate import NAMES, forward_only, generate, gpipe, interleaved, one_f_one_b
from plait.schedule.ir import Schedule
from plait.schedule.lower import lower
from plait.schedule.placement import V_SHAPED
from plait.schedule.simulate import Cost, simulate

UNIT = Cost(forward=1, backward=1, weight=1)


def makespan(events: list[Event]) -> float:
    return max(event.end for event in events) - min(event.start for event in events)


def test_one_microbatch_walks_the_pipeline_and_back() -> None:
    costs = [Cost(forward=3, backward=5, weight=2), Cost(forward=4, backward=6)]
    events = simulate(one_f_one_b(2, 1), costs, transfer=10)
    assert [(e.rank, e.stream, e.kind, e.name, e.start, e.end) for e in events] == [
        (0, COMPUTE, "F", "0F0", 0, 3),
        (0, COMM, "SEND_F", "0SEND_F0", 3, 13),
        (1, COMM, "RECV_F", "1RECV_F0", 3, 13),
        (1, COMPUTE, "F", "1F0", 13, 17),
        (1, COMPUTE, "B", "1B0", 17, 23),
        (0, COMM, "RECV_B", "0RECV_B0", 23, 33),
        (1, COMM, "SEND_B", "1SEND_B0", 23, 33),
        (0, COMPUTE, "B", "0B0", 33, 40),
    ]


def test_transfer_of_each_boundary_counts_both_ways() -> None:
    events = simulate(gpipe(3, 1), [UNIT] * 3, transfer=[7, 100])
    assert makespan(events) == 3 * 3 + 2 * (7 + 100)


def test_transfers_overlap_with_compute() -> None:
    """GPipe's forwards stream: the second microbatch's transfer hides behind its neighbours' compute."""
    events = simulate(forward_only(2, 8), [UNIT] * 2, transfer=1)
    assert makespan(events) == 8 + 1 + 1


def test_stages_on_one_rank_hand_over_for_nothing() -> None:
    events = simulate(interleaved(1, 3, 2), [UNIT] * 2, transfer=50)
    assert makespan(events) == 3 * 2 * 3
    assert {event.stream for event in events} == {COMPUTE}


@pytest.mark.parametrize("name", NAMES)
def test_lowering_changes_no_time(name: str) -> None:
    schedule = generate(name, ranks=4, microbatches=6, virtual=2 if name in ("interleaved", *V_SHAPED) else 1)
    costs = [Cost(forward=2 + stage % 3, backward=3, weight=stage % 2) for stage in range(schedule.stages)]
    events = simulate(lower(schedule), costs, transfer=1)
    reduces = [event for event in events if event.kind == "REDUCE"]
    assert len(reduces) == schedule.stages
    assert all(event.start == event.end for event in reduces)
    assert [event for event in events if event.kind != "REDUCE"] == simulate(schedule, costs, transfer=1)


def test_closed_form_with_fractions() -> None:
    third = Cost(forward=Fraction(1, 3), backward=Fraction(2, 3))  # type: ignore[arg-type]
    found = bubble(simulate(one_f_one_b(5, 7), [third] * 5), 5)
    assert found.overhead == pytest.approx(4 / 7, abs=1e-15)
    assert found.makespan == 7 + 4


def test_slowest_stage_sets_the_pace() -> None:
    costs = [Cost(forward=1, backward=1), Cost(forward=5, backward=5)]
    assert makespan(simulate(gpipe(2, 10), costs)) == 1 + 10 * 5 + 10 * 5 + 1


def test_zero_bubble_fills_the_cool_down() -> None:
    """ZB-H1's bubble with F = B = W is a third of 1F1B's: (p-1)(F + B - W) for (p-1)(F + B + W)."""
    text = """
        schedule zb-h1 stages=3 microbatches=4
        0: 0F0 0F1 0F2 0B0 0W0 0F3 0B1 0W1 0B2 0W2 0B3 0W3
        1: 1F0 1F1 1B0 1F2 1B1 1W0 1F3 1B2 1W1 1B3 1W2 1W3
        2: 2F0 2B0 2F1 2B1 2F2 2B2 2W0 2F3 2B3 2W1 2W2 2W3
    """
    events = simulate(Schedule.parse(text), [UNIT] * 3)
    assert {event.kind for event in events if event.stream == COMPUTE} == {"F", "B", "W"}
    assert makespan(events) == 4 * 3 + 2
    assert makespan(simulate(one_f_one_b(3, 4), [UNIT] * 3)) == 4 * 3 + 2 * 3


def test_refuses() -> None:
    with pytest.raises(ScheduleError, match="got 1 costs and 1 transfer times"):
        simulate(gpipe(2, 1), [UNIT])
    with pytest.raises(ScheduleError, match="got 2 costs and 2 transfer times"):
        simulate(gpipe(2, 1), [UNIT] * 2, transfer=[1, 1])
    for value in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ScheduleError, match="finite time"):
            Cost(forward=value, backward=1)
        with pytest.raises(ScheduleError, match="transfer across boundary 0"):
            simulate(gpipe(2, 1), [UNIT] * 2, transfer=value)
    with pytest.raises(ScheduleError, match="deadlock"):
        simulate(Schedule.parse("0: 0F0 0B0 0F1 0B1\n1: 1F0 1F1 1B0 1B1"), [UNIT] * 2)


def test_schedule_imports_neither_torch_nor_numpy() -> None:
    code = (
        "import sys; import plait.schedule.generate, plait.schedule.simulate, plait.schedule.lower;"
        "print([name for name in ('torch', 'numpy') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.strip() == "[]"
