"""`ShardSpec`: pieces cover every element as often as stated, one holder owns each, local boxes tile the local one."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core.shard import Box, Cut, Section, ShardSpec, full, split


@dataclass(frozen=True)
class Layout:
    spec: ShardSpec
    sizes: Mapping[str, int]

    def coordinates(self) -> Iterator[dict[str, int]]:
        for index in itertools.product(*(range(size) for size in self.sizes.values())):
            yield dict(zip(self.sizes, index, strict=True))


@st.composite
def cuts(draw: st.DrawFn, axis: str, ranks: int, dim: int) -> tuple[Cut, int]:
    """A cut and the size of its dim."""
    parts = st.none() | st.sampled_from([n for n in range(1, ranks + 1) if ranks % n == 0])
    sections = draw(st.lists(st.builds(Section, size=st.integers(0, 7), parts=parts), min_size=1, max_size=3))
    return Cut(axis=axis, dim=dim, sections=tuple(sections)), sum(section.size for section in sections)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    sizes = {"dp": draw(st.integers(1, 3)), "tp": draw(st.integers(1, 6)), "x": draw(st.integers(1, 2))}
    shape = draw(st.lists(st.integers(0, 5), min_size=1, max_size=3))
    found = []
    for axis in draw(st.lists(st.sampled_from(["tp", "x"]), unique=True, max_size=2)):
        free = [dim for dim in range(len(shape)) if all(cut.dim != dim for cut in found)]
        if free:
            dim = draw(st.sampled_from(free))
            cut, shape[dim] = draw(cuts(axis, sizes[axis], dim))
            found.append(cut)
    partial = frozenset(draw(st.sets(st.sampled_from(["dp", "tp", "x"]))))
    return Layout(ShardSpec(shape=tuple(shape), cuts=tuple(found), partial=partial), sizes)


def elements(box: Box) -> Iterator[tuple[int, ...]]:
    return itertools.product(*(range(start, stop) for start, stop in box))


@given(st.integers(0, 200), st.integers(1, 17))
def test_split_is_balanced_and_complete(size: int, parts: int) -> None:
    ranges = [split(size, parts, index) for index in range(parts)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == size
    assert all(before[1] == after[0] for before, after in itertools.pairwise(ranges))
    lengths = [stop - start for start, stop in ranges]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] <= 1


@pytest.mark.parametrize("index", [-1, 3])
def test_split_refuses_a_part_that_is_not_there(index: int) -> None:
    with pytest.raises(IndexError, match="of 3"):
        split(9, 3, index)


@settings(deadline=None, max_examples=150)
@given(layouts())
def test_pieces_cover_every_element_as_often_as_stated(layout: Layout) -> None:
    held: Counter[tuple[int, ...]] = Counter()
    stated: dict[tuple[int, ...], set[int]] = {}
    owned: Counter[tuple[int, ...]] = Counter()
    for at in layout.coordinates():
        for piece in layout.spec.pieces(layout.sizes, at):
            copies = 1
            for one in piece.copies:
                copies *= one.count
                assert one.first <= at[one.axis] < one.first + one.count
            for element in elements(piece.box):
                held[element] += 1
                stated.setdefault(element, set()).add(copies)
                owned[element] += piece.owned(at)
    assert set(held) == set(elements(full(layout.spec.shape)))
    for element, count in held.items():
        assert stated[element] == {count}
        assert owned[element] == 1


@settings(deadline=None, max_examples=150)
@given(layouts())
def test_local_boxes_tile_the_local_tensor_in_order(layout: Layout) -> None:
    for at in layout.coordinates():
        shape = layout.spec.local_shape(layout.sizes, at)
        pieces = layout.spec.pieces(layout.sizes, at)
        seen: Counter[tuple[int, ...]] = Counter()
        for piece in pieces:
            assert [b - a for a, b in piece.box] == [b - a for a, b in piece.local]
            seen.update(elements(piece.local))
        assert set(seen) == set(elements(full(shape)))
        assert set(seen.values()) <= {1}
        # Along each dim, a later place in the local tensor is a later place in the whole one.
        for dim in range(len(shape)):
            runs = sorted({(piece.local[dim], piece.box[dim]) for piece in pieces})
            assert [box for _, box in runs] == sorted(box for _, box in runs)
        assert layout.spec.local_size(layout.sizes, at) == len(seen)


@settings(deadline=None, max_examples=100)
@given(layouts())
def test_copies_are_partial_where_the_spec_says(layout: Layout) -> None:
    for at in layout.coordinates():
        for piece in layout.spec.pieces(layout.sizes, at):
            for one in piece.copies:
                assert one.count > 1
                expected = True if one.axis in layout.spec.axes else one.axis in layout.spec.partial
                assert one.partial == expected


def test_every_shard_holds_its_part_of_each_section() -> None:
    """Case P28: q|k|v with 4, 2, 2 heads of 3 on tp=2: rows of each, not a run of all."""
    spec = ShardSpec(
        shape=(24, 5), cuts=(Cut(axis="tp", dim=0, sections=(Section(size=12), Section(size=6), Section(size=6))),)
    )
    boxes = [[piece.box[0] for piece in spec.pieces({"tp": 2}, {"tp": rank})] for rank in (0, 1)]
    assert boxes == [[(0, 6), (12, 15), (18, 21)], [(6, 12), (15, 18), (21, 24)]]
    assert [piece.local[0] for piece in spec.pieces({"tp": 2}, {"tp": 1})] == [(0, 6), (6, 9), (9, 12)]


def test_fewer_heads_than_ranks_lie_on_neighbouring_ranks() -> None:
    """Case P7: 2 KV heads of 4 on tp=4: ranks 0, 1 hold the first, whose gradient is partial between the two."""
    key = Section(size=8, parts=2)
    spec = ShardSpec(shape=(32,), cuts=(Cut(axis="tp", dim=0, sections=(Section(size=16), key, key)),))
    for rank in range(4):
        query, k, v = spec.pieces({"tp": 4}, {"tp": rank})
        head = rank // 2
        assert query.box == ((4 * rank, 4 * rank + 4),)
        assert query.copies == ()
        assert k.box == ((16 + 4 * head, 20 + 4 * head),)
        assert v.box == ((24 + 4 * head, 28 + 4 * head),)
        for piece in (k, v):
            (copies,) = piece.copies
            assert (copies.axis, copies.first, copies.count, copies.partial) == ("tp", 2 * head, 2, True)
            assert piece.owned({"tp": rank}) == (rank in (0, 2))


def test_an_uncut_dim_of_one_rank_has_no_copies() -> None:
    (piece,) = ShardSpec(shape=(3, 4)).pieces({"dp": 1, "tp": 1}, {"dp": 0, "tp": 0})
    assert piece.box == piece.local == ((0, 3), (0, 4))
    assert piece.copies == ()


def test_parts_must_lie_evenly_on_the_axis() -> None:
    spec = ShardSpec(shape=(8,), cuts=(Cut(axis="tp", dim=0, sections=(Section(size=8, parts=3),)),))
    with pytest.raises(ValueError, match="3 parts do not lie evenly on tp=4"):
        spec.pieces({"tp": 4}, {"tp": 0})


def test_a_spec_that_does_not_fit_its_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="sections of dim 0 sum to 7, the dim has 8"):
        ShardSpec(shape=(8,), cuts=(Cut(axis="tp", dim=0, sections=(Section(size=7),)),))
    cut = Cut(axis="tp", dim=0, sections=(Section(size=8),))
    with pytest.raises(ValueError, match="one cut only"):
        ShardSpec(shape=(8, 8), cuts=(cut, Cut(axis="tp", dim=1, sections=(Section(size=8),))))
    with pytest.raises(ValueError, match="one cut only"):
        ShardSpec(shape=(8, 8), cuts=(cut, Cut(axis="dp", dim=0, sections=(Section(size=8),))))


def test_text_names_cut_dims_and_partial_axes() -> None:
    cut = Cut(axis="tp", dim=0, sections=(Section(size=8),))
    spec = ShardSpec(shape=(8, 6), cuts=(cut,), partial=frozenset({"dp", "cp"}))
    assert spec.text(dims=("F", "D")) == "W[F_tp, D] +cp +dp"
    assert spec.text("up") == "up[8_tp, 6] +cp +dp"
    assert ShardSpec(shape=(6,)).text() == "W[6]"
