from __future__ import annotations

from itertools import pairwise

import pytest

from plait.core.errors import ScheduleError
from plait.schedule.generate import forward_only, gpipe, interleaved, one_f_one_b
from plait.schedule.ir import COMPUTE_KINDS, Action, Kind, Schedule
from plait.schedule.lower import lower


def test_lists() -> None:
    assert lower(one_f_one_b(2, 2)).text().splitlines()[1:] == [
        "0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE",
        "1: 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1REDUCE",
    ]
    assert lower(forward_only(2, 1)).text().splitlines()[1:] == ["0: 0F0 0SEND_F0", "1: 1RECV_F0 1F0"]


def test_one_rank_has_no_messages() -> None:
    """Gradient accumulation: stages that are neighbours on one rank hand over without communication."""
    row = lower(interleaved(1, 2, 2)).ranks[0]
    assert {action.kind for action in row} == {Kind.F, Kind.B, Kind.REDUCE}
    assert [str(action) for action in row if action.kind is Kind.REDUCE] == ["1REDUCE", "0REDUCE"]


def test_v_shaped_placement_hands_over_on_the_rank() -> None:
    schedule = Schedule.parse("0: 0F0 3F0 3B0 0B0\n1: 1F0 2F0 2B0 1B0")
    rows = lower(schedule).text().splitlines()[1:]
    assert rows == [
        "0: 0F0 0SEND_F0 3RECV_F0 3F0 3B0 3SEND_B0 3REDUCE 0RECV_B0 0B0 0REDUCE",
        "1: 1RECV_F0 1F0 2F0 2SEND_F0 2RECV_B0 2B0 2REDUCE 1B0 1SEND_B0 1REDUCE",
    ]


@pytest.mark.parametrize("schedule", [gpipe(3, 4), one_f_one_b(4, 6), interleaved(3, 7, 3), interleaved(4, 2, 2)])
def test_only_communication_is_added(schedule: Schedule) -> None:
    lowered = lower(schedule)
    assert lowered.compute_only() == schedule
    for row in lowered.ranks:
        for here, after in pairwise(row):
            if after.kind in (Kind.SEND_F, Kind.SEND_B):
                source = Kind.F if after.kind is Kind.SEND_F else Kind.B
                assert here == Action(source, after.stage, after.microbatch)
        for index, action in enumerate(row):
            if action.kind is Kind.REDUCE:
                assert not any(a.stage == action.stage and a.kind in COMPUTE_KINDS for a in row[index:])
    kinds = [action.kind for row in lowered.ranks for action in row]
    assert kinds.count(Kind.REDUCE) == schedule.stages
    hand_overs = (schedule.stages - 1) * schedule.microbatches
    for kind in (Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B):
        assert kinds.count(kind) == hand_overs


def test_refuses_what_is_lowered_or_broken() -> None:
    with pytest.raises(ScheduleError, match="is lowered already"):
        lower(lower(gpipe(2, 2)))
    with pytest.raises(ScheduleError, match="deadlock"):
        lower(Schedule.parse("0: 0F0 0B0 0F1 0B1\n1: 1F0 1F1 1B0 1B1"))
    with pytest.raises(ScheduleError, match="but no backward"):
        lower(Schedule.parse("0: 0F0 0B0\n1: 1F0"))
