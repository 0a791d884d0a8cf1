from __future__ import annotations

from fractions import Fraction

import pytest

from plait.core.errors import ScheduleError
from plait.core.events import bubble
from plait.schedule.check import check
from plait.schedule.generate import (
    NAMES,
    forward_only,
    forward_only_v,
    generate,
    gpipe,
    interleaved,
    one_f_one_b,
)
from plait.schedule.ir import Kind, Schedule
from plait.schedule.lower import lower
from plait.schedule.placement import V_SHAPED, looped, placement_of, v_shaped
from plait.schedule.simulate import Cost, simulate

RANKS = range(1, 9)
MICROBATCHES = range(1, 25)


def overhead(schedule: Schedule, forward: int, backward: int) -> Fraction:
    """Bubble relative to the ideal time, exactly: makespan and compute are integers."""
    found = bubble(
        simulate(schedule, [Cost(forward=forward, backward=backward)] * schedule.stages), len(schedule.ranks)
    )
    assert isinstance(found.makespan, int)
    return Fraction(found.ranks * found.makespan, int(found.compute)) - 1


def passes(schedule: Schedule, live: tuple[int, ...]) -> None:
    """The schedule and its lowered form pass the checker with exactly this peak."""
    assert check(schedule, live_limit=max(live)).live == live
    assert check(lower(schedule), live_limit=max(live)).live == live


@pytest.mark.parametrize("p", RANKS)
def test_gpipe_passes_and_equals_the_closed_form(p: int) -> None:
    for m in MICROBATCHES:
        schedule = gpipe(p, m)
        passes(schedule, (m,) * p)
        assert overhead(schedule, 1, 2) == Fraction(p - 1, m)


@pytest.mark.parametrize("p", RANKS)
def test_1f1b_passes_and_equals_the_closed_form(p: int) -> None:
    for m in MICROBATCHES:
        schedule = one_f_one_b(p, m)
        passes(schedule, tuple(min(m, p - stage) for stage in range(p)))
        assert overhead(schedule, 1 + m % 3, 2) == Fraction(p - 1, m)


@pytest.mark.parametrize("v", range(2, 5))
@pytest.mark.parametrize("p", RANKS)
def test_interleaved_passes_and_equals_the_closed_form(p: int, v: int) -> None:
    for m in MICROBATCHES:
        schedule = interleaved(p, m, v)
        assert schedule.placement == tuple(stage % p for stage in range(p * v))
        group = -(-m // max(1, m // p))
        passes(schedule, tuple(min(v * m, 2 * (p - 1 - rank) + (v - 1) * group + 1) for rank in range(p)))
        if m >= p:  # the paper asks for m % p == 0; groups of at least p microbatches do as well
            assert overhead(schedule, 1, 2) == Fraction(p - 1, v * m)


def test_interleaved_of_one_stage_a_rank_is_1f1b() -> None:
    for p in RANKS:
        for m in MICROBATCHES:
            assert interleaved(p, m, 1).ranks == one_f_one_b(p, m).ranks


@pytest.mark.parametrize("p", RANKS)
def test_forward_only_passes(p: int) -> None:
    for v in range(1, 5):
        for m in (1, 2, 3, 5, 8, 13, 24):
            schedule = forward_only(p, m, v)
            assert check(schedule, forward_only=True).live == (0,) * p
            assert check(lower(schedule), forward_only=True).live == (0,) * p
            with pytest.raises(ScheduleError, match="but no backward"):
                check(schedule)


@pytest.mark.parametrize("schedule", [gpipe(3, 5), one_f_one_b(4, 6), interleaved(2, 4, 2)])
def test_live_limit_bites_just_under_the_peak(schedule: Schedule) -> None:
    peak = max(check(schedule).live)
    with pytest.raises(ScheduleError, match=f"rank 0 holds {peak} microbatch-stages from .* the limit is {peak - 1}"):
        check(schedule, live_limit=peak - 1)


def test_rows_are_the_ones_in_the_papers() -> None:
    assert gpipe(2, 2).text() == "schedule gpipe stages=2 microbatches=2\n0: 0F0 0F1 0B0 0B1\n1: 1F0 1F1 1B0 1B1\n"
    assert one_f_one_b(3, 4).text().splitlines()[1:] == [
        "0: 0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1: 1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2: 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]
    # Megatron's figure 4 begins so on its last device: the first group through both of its stages.
    assert interleaved(2, 4, 2).text().splitlines()[2] == (
        "1: 1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3"
    )


def test_first_backward_waits_for_the_whole_pipeline() -> None:
    """Stage 0 runs p-1-0 warm-up forwards and one more before its first backward, however short the backward."""
    kinds = [action.kind for action in one_f_one_b(4, 8).ranks[0]]
    assert kinds[:5] == [Kind.F] * 4 + [Kind.B]


@pytest.mark.parametrize("name", NAMES)
def test_generate_by_name(name: str) -> None:
    virtual = 2 if name in V_SHAPED else 1
    schedule = generate(name, ranks=2, microbatches=3, virtual=virtual)
    assert schedule.name == name
    assert schedule.placement == placement_of(name, 2, virtual) == ((0, 1, 1, 0) if virtual == 2 else (0, 1))


def test_placements() -> None:
    assert looped(3, 2) == (0, 1, 2, 0, 1, 2)
    assert v_shaped(3) == (0, 1, 2, 2, 1, 0)
    assert placement_of("interleaved", 2, 2) == (0, 1, 0, 1)
    assert placement_of("auto", 2, 2) == (0, 1, 1, 0)
    assert placement_of("auto", 2, 1) == placement_of("2bw", 2) == (0, 1)
    for name in V_SHAPED:
        with pytest.raises(ScheduleError, match="virtual=1 does not fit; virtual=2 does"):
            placement_of(name, 4, 1)


@pytest.mark.parametrize("p", RANKS)
def test_forward_only_along_a_v_passes_in_the_least_time(p: int) -> None:
    for m in (1, 2, 3, 5, 8, 13, 24):
        schedule = forward_only_v(p, m)
        assert schedule.placement == v_shaped(p)
        assert check(lower(schedule), forward_only=True).live == (0,) * p
        events = simulate(schedule, [Cost(forward=1, backward=1)] * schedule.stages)
        assert max(event.end for event in events) == 2 * m + 2 * (p - 1)


def test_generate_refuses() -> None:
    with pytest.raises(ScheduleError, match="'1f1' is unknown; the nearest is '1f1b'"):
        generate("1f1", ranks=2, microbatches=2)
    with pytest.raises(ScheduleError, match="the nearest is 'interleaved'"):
        generate("Interleave", ranks=2, microbatches=2)
    for name in ("gpipe", "1f1b", "zb-h1", "zb-h2"):
        with pytest.raises(ScheduleError, match="virtual=2 does not fit"):
            generate(name, ranks=2, microbatches=2, virtual=2)
    for sizes in ({"ranks": 0}, {"microbatches": 0}, {"virtual": 0}):
        with pytest.raises(ScheduleError, match="=0 makes no schedule"):
            generate("interleaved", **{"ranks": 2, "microbatches": 2, **sizes})
