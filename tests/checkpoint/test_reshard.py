from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.checkpoint.reshard import cover, flat_to_boxes, intersect, relative, volume
from plait.core.errors import WeightsError
from plait.core.shard import Box, Cut, Section, ShardSpec, full

Cells = list[tuple[int, ...]]
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


def cells(box: Box) -> Cells:
    """Every element of a box, row-major: the slow truth that boxes are held against."""
    return list(itertools.product(*(range(start, stop) for start, stop in box)))


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    ranges = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shape]
    return tuple((start, stop) for start, stop in ranges)


@given(st.data(), shapes)
def test_intersect_volume_relative_against_elements(data: st.DataObject, shape: tuple[int, ...]) -> None:
    a, b = data.draw(boxes(shape)), data.draw(boxes(shape))
    common = set(cells(a)) & set(cells(b))
    found = intersect(a, b)
    assert volume(a) == len(cells(a))
    assert (set() if found is None else set(cells(found))) == common
    assert (found is None) == (not common)
    if found is not None:
        moved = relative(found, a)
        assert [tuple(c + start for c, (start, _) in zip(cell, a, strict=True)) for cell in cells(moved)] == cells(
            found
        )


def test_relative_refuses_what_sticks_out() -> None:
    with pytest.raises(ValueError, match="not inside"):
        relative(((0, 3),), ((1, 4),))
    with pytest.raises(ValueError, match="not inside"):
        relative(((2, 5),), ((1, 4),))


@given(st.data(), shapes)
def test_flat_ranges_become_few_boxes_in_order(data: st.DataObject, shape: tuple[int, ...]) -> None:
    size = math.prod(shape)
    start, stop = sorted((data.draw(st.integers(0, size)), data.draw(st.integers(0, size))))
    found = flat_to_boxes(shape, start, stop)
    # Concatenated in order, they are the range: complete, disjoint, order-preserving.
    assert [cell for box in found for cell in cells(box)] == cells(full(shape))[start:stop]
    assert len(found) <= max(1, 2 * len(shape) - 1)
    assert all(volume(box) for box in found)


def test_flat_ranges_by_hand() -> None:
    assert flat_to_boxes((), 0, 1) == [()]
    assert flat_to_boxes((4, 6), 0, 24) == [((0, 4), (0, 6))]
    assert flat_to_boxes((4, 6), 6, 18) == [((1, 3), (0, 6))]
    assert flat_to_boxes((4, 6), 7, 9) == [((1, 2), (1, 3))]
    assert flat_to_boxes((4, 6), 4, 20) == [((0, 1), (4, 6)), ((1, 3), (0, 6)), ((3, 4), (0, 2))]
    assert flat_to_boxes((0, 6), 0, 0) == []


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (2, 1), (0, 25)])
def test_flat_ranges_outside_are_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="24 elements"):
        flat_to_boxes((4, 6), start, stop)


@given(st.data(), shapes)
def test_cover_against_elements(data: st.DataObject, shape: tuple[int, ...]) -> None:
    """Any pieces, overlapping and with holes: the parts are exactly the wanted elements, or it is refused."""
    wanted = data.draw(boxes(shape))
    pieces = data.draw(st.lists(boxes(shape), max_size=4))
    held = [cell for piece in pieces for cell in cells(piece) if cell in set(cells(wanted))]
    if sorted(held) == cells(wanted):
        parts = cover(wanted, pieces)
        assert sorted(cell for _, part in parts for cell in cells(part)) == cells(wanted)
        assert all(set(cells(part)) <= set(cells(pieces[index])) for index, part in parts)
    else:
        with pytest.raises(WeightsError):
            cover(wanted, pieces)


@given(st.data(), st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple), st.integers(1, 5))
def test_zero_ranges_of_any_cut_cover_any_box(data: st.DataObject, shape: tuple[int, ...], ranks: int) -> None:
    """What ZeRO writes on one number of ranks, another layout reads."""
    size = math.prod(shape)
    bounds = [size * rank // ranks for rank in range(ranks + 1)]
    pieces = [box for a, b in itertools.pairwise(bounds) for box in flat_to_boxes(shape, a, b)]
    wanted = data.draw(boxes(shape))
    assert sorted(cell for _, part in cover(wanted, pieces) for cell in cells(part)) == cells(wanted)


def test_pieces_of_a_fused_projection_cover_it() -> None:
    spec = ShardSpec(
        shape=(12, 3), cuts=(Cut(axis="tp", dim=0, sections=(Section(size=8), Section(size=2), Section(size=2))),)
    )
    pieces = [piece.box for at in range(2) for piece in spec.pieces({"tp": 2}, {"tp": at})]
    assert len(pieces) == 6
    assert {index for index, _ in cover(full(spec.shape), pieces)} == set(range(6))


def test_cover_says_what_is_wrong() -> None:
    with pytest.raises(WeightsError, match="2 of the 6 elements"):
        cover(((0, 3), (0, 2)), [((0, 2), (0, 2))])
    with pytest.raises(WeightsError, match="both hold"):
        cover(((0, 3), (0, 2)), [((0, 2), (0, 2)), ((2, 3), (0, 2)), ((1, 3), (1, 2))])
    with pytest.raises(WeightsError, match="both hold"):
        cover((), [(), ()])
    assert cover((), [()]) == [(0, ())]
    assert cover(((2, 2),), []) == []
