from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest

from plait.core.errors import ScheduleError
from plait.core.events import COMPUTE, bubble
from plait.schedule.generate import one_f_one_b
from plait.schedule.ir import Action, Kind, Schedule
from plait.schedule.simulate import Cost, simulate
from plait.schedule.windows import Windows, check_windows, two_bw, version_of

UNIT = Cost(forward=1, backward=2)


def test_windows_of_two_ranks() -> None:
    windows = two_bw(2, 2)
    assert [window.text().splitlines()[1:] for window in (windows.first, windows.steady, windows.last)] == [
        [
            "0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0F2 0SEND_F2 0RECV_B1 0B1 0REDUCE",
            "1: 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1RECV_F2 1B1 1SEND_B1 1REDUCE",
        ],
        [
            "0: 0F1 0SEND_F1 0RECV_B0 0B0 0F2 0SEND_F2 0RECV_B1 0B1 0REDUCE",
            "1: 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1RECV_F2 1B1 1SEND_B1 1REDUCE",
        ],
        [
            "0: 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE",
            "1: 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1REDUCE",
        ],
    ]


@pytest.mark.parametrize("ranks", range(1, 9))
def test_windows_pass_with_the_memory_of_1f1b(ranks: int) -> None:
    for microbatches in range(max(1, ranks - 1), 20):
        windows = two_bw(ranks, microbatches)
        assert check_windows(windows) == tuple(min(ranks - rank, 4 * microbatches) for rank in range(ranks))


def test_a_run_is_1f1b_over_all_its_microbatches() -> None:
    for ranks, microbatches, steps in ((1, 3, 2), (2, 2, 3), (3, 2, 3), (4, 3, 4), (4, 8, 2)):
        run = two_bw(ranks, microbatches).unrolled(steps)
        assert run.compute_only().ranks == one_f_one_b(ranks, microbatches * steps).ranks
        assert two_bw(ranks, microbatches).only.compute_only().ranks == one_f_one_b(ranks, microbatches).ranks


def test_no_bubble_but_the_first_and_the_last() -> None:
    ranks, microbatches, steps = 4, 8, 6
    events = simulate(two_bw(ranks, microbatches).unrolled(steps), [UNIT] * ranks)
    found = bubble(events, ranks)
    assert found.makespan == steps * microbatches * 3 + (ranks - 1) * 3
    flushed = bubble(simulate(one_f_one_b(ranks, microbatches), [UNIT] * ranks), ranks)
    assert found.makespan < steps * flushed.makespan
    last = [event for event in events if event.rank == ranks - 1 and event.stream == COMPUTE]
    assert all(here.end == after.start for here, after in pairwise(last))  # every update included


def test_two_versions_are_enough() -> None:
    """A forward needs weights that an earlier window has made, and none that is two updates old."""
    assert [version_of(group) for group in range(4)] == [0, 0, 1, 2]
    for ranks, microbatches in ((2, 1), (4, 3), (5, 9)):
        windows = two_bw(ranks, microbatches)
        for step in range(5):
            used = {
                version_of(step + action.microbatch // microbatches)
                for row in windows.of(step, 5).ranks
                for action in row
                if action.kind in (Kind.F, Kind.B)
            }
            assert used <= {version_of(step), step}


def test_fewer_microbatches_than_run_ahead_are_refused() -> None:
    assert two_bw(4, 3).microbatches == 3
    with pytest.raises(ScheduleError, match=r"third version .* what works: at least 3 microbatches, or pp=3"):
        two_bw(4, 2)


def broken(windows: Windows, old: str, new: str) -> Windows:
    text = windows.steady.text()
    assert old in text
    changed = Schedule.parse(text.replace(old, new).replace("microbatches=2", "microbatches=9"))
    return dataclasses.replace(windows, steady=dataclasses.replace(changed, microbatches=2))


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (" 1RECV_F2", "", "0SEND_F2 has no partner in its window"),
        ("0B1 0REDUCE", "0REDUCE 0B1", "the REDUCE of a stage does not end"),
        ("0RECV_B1 0B1", "0RECV_B2 0B2", "0B2 is not of its own step"),
        ("0F2 0SEND_F2", "0F4 0SEND_F4", "0F4 is not of its own step or the next"),
        ("1F1 1RECV_F2 1B1", "1RECV_F2 1B1 1F1", "1B3 before 1F3"),
    ],
)
def test_broken_windows_are_refused(old: str, new: str, reason: str) -> None:
    with pytest.raises(ScheduleError, match=reason):
        check_windows(broken(two_bw(2, 2), old, new))


def test_the_order_of_messages_is_checked_across_windows() -> None:
    windows = two_bw(2, 2)
    swapped = windows.steady.text().replace("0F1 0SEND_F1", "0F1").replace("0F2 0SEND_F2", "0F2 0SEND_F2 0SEND_F1")
    rows = Schedule.parse(swapped.replace("microbatches=2", "microbatches=3"))
    steady = dataclasses.replace(rows, microbatches=2)
    assert Action(Kind.SEND_F, 0, 1) in steady.ranks[0]
    with pytest.raises(ScheduleError):
        check_windows(dataclasses.replace(windows, steady=steady))
