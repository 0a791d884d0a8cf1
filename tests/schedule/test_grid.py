from __future__ import annotations

import pytest

from plait.schedule.generate import gpipe, interleaved, one_f_one_b
from plait.schedule.grid import WIDTH, grid
from plait.schedule.ir import Action, Kind, Schedule
from plait.schedule.lower import lower


def test_picture() -> None:
    expected = """\
rank 0: 0F0 0F1 .   .   0B0 0B1
rank 1: .   1F0 1F1 1B0 1B1 ."""
    assert grid(gpipe(2, 2)) == expected
    assert grid(lower(gpipe(2, 2))) == expected


def test_costs_stretch_an_action() -> None:
    assert grid(one_f_one_b(2, 1), costs={Kind.B: 2}).splitlines() == [
        "rank 0: 0F0 .   .   .   0B0 =",
        "rank 1: .   1F0 1B0 =   .   .",
    ]


def test_marks_show_communication_and_what_is_missing() -> None:
    schedule = lower(gpipe(2, 1))
    picture = grid(schedule, mark=[Action(Kind.RECV_F, 1, 0), Action(Kind.B, 1, 7)])
    assert ">>1RECV_F0<<" in picture
    assert picture.splitlines()[1].endswith("missing >>1B7<<")


def test_stuck_ranks_are_drawn_to_their_ends() -> None:
    assert grid(Schedule.parse("0: 0F0 0B0 0F1 0B1\n1: 1F0 1F1 1B0 1B1")).splitlines() == [
        "rank 0: 0F0 0B0 0F1 0B1 .",
        "rank 1: .   1F0 1F1 1B0 1B1",
    ]


@pytest.mark.parametrize("schedule", [one_f_one_b(8, 24), gpipe(12, 60), interleaved(8, 24, 4)])
def test_wide_schedules_are_cut_with_a_note(schedule: Schedule) -> None:
    lines = grid(schedule).splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert lines[-1].startswith("... slots 0 to ")
    assert all(line.endswith("...") for line in lines[:-1])
    for row in schedule.ranks:
        for action in row[:: len(row) // 3]:
            marked = grid(schedule, mark=[action]).splitlines()
            assert max(map(len, marked)) <= WIDTH
            assert sum(f">>{action}<<" in line for line in marked) == 1


def test_narrow_and_empty_pictures() -> None:
    assert max(map(len, grid(one_f_one_b(4, 8), width=40).splitlines())) <= 40
    assert grid(Schedule(name="x", stages=1, microbatches=1, ranks=((),))) == "rank 0:"
