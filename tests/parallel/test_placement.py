"""Placements of experts: always legal, never less even than before, as even as can be where that is known."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.parallel.placement import Placement, identity, loads, place, spread

NUMBER = st.floats(0, 1e6, allow_nan=False, width=32)


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[float], int, int]:
    """(load of each expert, ranks, shadows)."""
    ranks, each = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    load = draw(st.lists(NUMBER, min_size=ranks * each, max_size=ranks * each))
    return load, ranks, draw(st.integers(0, ranks * each))


def before(experts: int, ranks: int, seed: int) -> Placement:
    order = list(range(experts))
    random.Random(seed).shuffle(order)
    return Placement(order=tuple(order), ranks=ranks)


@given(problems(), st.integers(0, 3))
def test_a_placement_is_legal_and_its_loads_add_up(problem: tuple[list[float], int, int], seed: int) -> None:
    load, ranks, shadows = problem
    found = place(load, ranks, shadows, before=before(len(load), ranks, seed))
    assert sorted(found.order) == list(range(len(load)))
    assert [len(found.owned(rank)) for rank in range(ranks)] == [len(load) // ranks] * ranks
    assert [expert for rank in range(ranks) for expert in found.shadows_of(rank)] == list(found.shadows)
    assert math.isclose(sum(loads(found, load)), sum(load), rel_tol=1e-9, abs_tol=1e-9)
    cold = [share for expert, share in enumerate(load) if expert not in found.shadows]
    assert max(cold, default=0) <= min((load[expert] for expert in found.shadows), default=math.inf)


@given(problems(), st.integers(0, 3))
def test_the_fullest_rank_never_gets_fuller(problem: tuple[list[float], int, int], seed: int) -> None:
    load, ranks, shadows = problem
    old = before(len(load), ranks, seed)
    found = place(load, ranks, shadows, before=old)
    same = Placement(order=old.order, ranks=ranks, shadows=found.shadows)
    assert max(loads(found, load)) <= max(loads(same, load)) * (1 + 1e-9)
    assert place(load, ranks, shadows, before=found).order == found.order, "a second time moves nothing"


@given(problems())
def test_no_swap_of_two_experts_would_help(problem: tuple[list[float], int, int]) -> None:
    load, ranks, shadows = problem
    found = place(load, ranks, shadows)
    most = max(loads(found, load))
    fullest = max(range(ranks), key=lambda rank: loads(found, load)[rank])
    for other in set(range(ranks)) - {fullest}:
        for a, b in itertools.product(found.owned(fullest), found.owned(other)):
            swap = {a: b, b: a}
            swapped = Placement(
                order=tuple(swap.get(expert, expert) for expert in found.order), ranks=ranks, shadows=found.shadows
            )
            pair = loads(swapped, load)
            assert max(pair[fullest], pair[other]) >= most * (1 - 1e-9)


@given(problems())
def test_shadows_travel_less_and_even_out(problem: tuple[list[float], int, int]) -> None:
    load, ranks, _ = problem
    every = place(load, ranks, len(load))
    assert spread(loads(every, load)) < 1e-6


def test_small_cases_are_optimal() -> None:
    """Against every assignment there is: at most 1/3 above the best (LPT's own bound is of that size), mostly equal."""
    best_found = 0
    for seed in range(60):
        draw = random.Random(seed)
        load = [draw.paretovariate(1.0) for _ in range(6)]
        ranks = 2 + seed % 2
        best = min(max(loads(Placement(order=order, ranks=ranks), load)) for order in itertools.permutations(range(6)))
        found = max(loads(place(load, ranks, 0), load))
        assert found <= best * 4 / 3
        best_found += math.isclose(found, best)
    assert best_found > 50


def test_a_skewed_load_becomes_even() -> None:
    """Eight experts of which two take three quarters of the rows, on the same rank."""
    load = [300.0, 300.0, 40, 40, 30, 30, 30, 30]
    static = identity(8, 4)
    assert spread(loads(static, load)) == pytest.approx(math.sqrt(53400) / 200)
    moved, shadowed = place(load, 4, 0), place(load, 4, 2)
    assert sorted(loads(moved, load)) == [70.0, 70.0, 330.0, 330.0]
    assert sorted(loads(shadowed, load)) == [190.0, 190.0, 210.0, 210.0]


def test_experts_that_stay_on_their_rank_keep_their_slots() -> None:
    old = Placement(order=(0, 5, 1, 4, 2, 3), ranks=2)
    new = place([9, 8, 1, 1, 1, 1], 2, 0, before=old)
    assert {frozenset(new.owned(rank)) for rank in range(2)} != {frozenset(old.owned(rank)) for rank in range(2)}
    for rank in range(2):
        for slot, expert in enumerate(old.owned(rank)):
            assert expert not in new.owned(rank) or new.owned(rank)[slot] == expert


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"order": (0, 0), "ranks": 1}, "permutation"),
        ({"order": (), "ranks": 1}, "permutation"),
        ({"order": (0, 1, 2), "ranks": 2}, "3 experts do not lie evenly on 2 ranks"),
        ({"order": (0, 1), "ranks": 2, "shadows": (2,)}, "shadows"),
        ({"order": (0, 1), "ranks": 2, "shadows": (1, 1)}, "shadows"),
    ],
)
def test_what_is_no_placement_is_refused(arguments: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Placement(**arguments)  # type: ignore[arg-type]


def test_planning_refuses_what_cannot_be_placed() -> None:
    with pytest.raises(ValueError, match="3 experts do not lie evenly on 2 ranks"):
        place([1, 1, 1], 2, 0)
    with pytest.raises(ValueError, match="5 shadows of 4 experts"):
        place([1] * 4, 2, 5)
