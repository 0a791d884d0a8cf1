from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core.errors import ScheduleError
from plait.schedule.check import check
from plait.schedule.lower import lower
from plait.schedule.placement import looped, v_shaped
from plait.schedule.search import makespan, named, search
from plait.schedule.simulate import Cost
from plait.schedule.zero_bubble import zb_h1, zb_v

UNIT = Cost(forward=1, backward=1, weight=1)
SECONDS = st.floats(min_value=0.1, max_value=3)
COST = st.builds(Cost, forward=SECONDS, backward=SECONDS, weight=SECONDS)


def compare(
    costs: list[Cost], ranks: int, microbatches: int, homes: tuple[int, ...], limit: int, transfer: float = 0
) -> tuple[float, dict[str, float]]:
    """(makespan of the searched schedule, those of the named ones that fit), the searched one checked."""
    found = search(costs, ranks=ranks, microbatches=microbatches, placement=homes, live_limit=limit, transfer=transfer)
    assert found.name == "auto"
    assert found.placement == homes
    check(lower(found), live_limit=limit)
    across = (transfer,) * (len(costs) - 1)
    others = {one.name: makespan(one, costs, across) for one in named(ranks, microbatches, homes, limit)}
    return makespan(found, costs, across), others


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_never_slower_than_a_named_schedule_that_fits(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 4))
    along_v = data.draw(st.booleans())
    virtual = 2 if along_v else data.draw(st.integers(1, 3))
    homes = v_shaped(ranks) if along_v else looped(ranks, virtual)
    costs = data.draw(st.lists(COST, min_size=ranks * virtual, max_size=ranks * virtual))
    limit = data.draw(st.integers(virtual, 2 * ranks * virtual + 1))
    took, others = compare(costs, ranks, data.draw(st.integers(1, 7)), homes, limit, data.draw(st.floats(0, 1)))
    assert all(took <= other * (1 + 1e-9) for other in others.values()), others


@pytest.mark.parametrize(
    ("what", "costs", "homes", "limit", "transfer", "gain"),
    [
        ("a slow stage in the middle", [1, 1, 1.5, 1], looped(4), 4, 0.05, 1.01),
        ("slow links, twice 1F1B's memory", [1] * 8, v_shaped(4), 16, 0.8, 1.12),
        ("even costs, twice 1F1B's memory", [1] * 8, v_shaped(4), 16, 0.05, 1.01),
        ("uneven stages", [0.8, 1.3, 0.7, 1.2, 0.9, 1.1, 0.7, 1.4], v_shaped(4), 8, 0.05, 1.04),
    ],
)
def test_beats_every_named_schedule(
    what: str, costs: list[float], homes: tuple[int, ...], limit: int, transfer: float, gain: float
) -> None:
    all_costs = [Cost(forward=size, backward=1.2 * size, weight=0.9 * size) for size in costs]
    took, others = compare(all_costs, 4, 8, homes, limit, transfer)
    assert others
    assert all(other > took * gain for other in others.values()), (what, took, others)


def test_runs_where_no_named_schedule_fits() -> None:
    """One microbatch-stage more than the stages of a rank is little, but enough to go on."""
    for homes, virtual in ((looped(3), 1), (v_shaped(3), 2), (looped(3, 3), 3)):
        costs = [UNIT] * len(homes)
        assert not list(named(3, 6, homes, virtual))
        tight, _ = compare(costs, 3, 6, homes, virtual)
        roomy, _ = compare(costs, 3, 6, homes, 9 * virtual)
        assert tight > roomy


def test_more_memory_is_never_slower_and_the_bubble_goes() -> None:
    costs = [Cost(forward=1, backward=2, weight=0.9)] * 4
    times = [compare(costs, 4, 12, looped(4), limit)[0] for limit in (1, 2, 3, 4, 7, 12)]
    assert times == sorted(times, reverse=True)
    first = 3 * 1.0  # the last rank cannot begin before
    assert times[-1] < 12 * 3.9 + first + 1


def test_every_rank_computes_the_same_in_time() -> None:
    costs = [Cost(forward=1 + 0.01 * stage, backward=1.3, weight=0.8) for stage in range(16)]
    begin = time.process_time()
    found = search(costs, ranks=8, microbatches=32, placement=v_shaped(8), live_limit=16, transfer=0.1)
    assert time.process_time() - begin < 2
    assert found == search(costs, ranks=8, microbatches=32, placement=v_shaped(8), live_limit=16, transfer=0.1)


def test_even_costs_keep_the_list_of_the_paper() -> None:
    assert search([UNIT] * 4, ranks=4, microbatches=8).ranks == zb_h1(4, 8).ranks
    assert search([UNIT] * 8, ranks=4, microbatches=8, placement=v_shaped(4)).ranks == zb_v(4, 8).ranks


def test_refuses() -> None:
    with pytest.raises(ScheduleError, match=r"live=1: a rank holds 2 stages .* live=2 or more"):
        search([UNIT] * 4, ranks=2, microbatches=2, live_limit=1)
    with pytest.raises(ScheduleError, match="3 stages do not lie 1 each on 2 ranks"):
        search([UNIT] * 3, ranks=2, microbatches=2, placement=(0, 1, 1))
