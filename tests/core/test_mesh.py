"""Mesh arithmetic: ranks and coordinates are one-to-one, groups partition the ranks."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core.mesh import AXES, EXPERT_AXES, ORDERS, Mesh

meshes = st.builds(
    Mesh,
    pp=st.integers(1, 4),
    dp=st.integers(1, 4),
    cp=st.integers(1, 3),
    tp=st.integers(1, 4),
    order=st.sampled_from(ORDERS),
)
axis_sets = st.lists(st.sampled_from(AXES), unique=True)


@settings(deadline=None)
@given(meshes)
def test_rank_and_coordinate_are_inverse(mesh: Mesh) -> None:
    assert mesh.world_size == mesh.pp * mesh.dp * mesh.cp * mesh.tp
    seen = [mesh.coordinate(rank) for rank in range(mesh.world_size)]
    assert [mesh.rank(coordinate) for coordinate in seen] == list(range(mesh.world_size))
    axes = mesh.order.split("-")
    every = itertools.product(*(range(mesh.sizes[axis]) for axis in axes))
    assert [tuple(coordinate[axis] for axis in axes) for coordinate in seen] == list(every), "row-major, tp fastest"


@settings(deadline=None)
@given(meshes, axis_sets)
def test_groups_partition_the_ranks(mesh: Mesh, axes: list[str]) -> None:
    groups = mesh.groups(axes)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.world_size))
    fixed = [axis for axis in AXES if axis not in axes]
    for group in groups:
        assert list(group) == sorted(group)
        assert len({tuple(mesh.coordinate(rank)[axis] for axis in fixed) for rank in group}) == 1
        assert all(mesh.group(rank, axes) == group for rank in group)


@pytest.mark.parametrize("ep", [1, 2, 4, 8])
def test_the_order_of_axes_moves_ranks_and_not_what_a_stage_does(ep: int) -> None:
    """Stages of a copy side by side: in each pipeline rank the same coordinates of both folds, in the same order."""
    sizes = {"pp": 2, "dp": 2, "cp": 2, "tp": 2, "ep": ep}
    plain, inside = (Mesh(order=order, **sizes) for order in ORDERS)  # type: ignore[arg-type]
    assert inside.group(0, ["tp"]) == (0, 1)
    assert inside.group(0, ["pp"]) == (0, 4)
    assert plain.group(0, ["pp"]) == (0, 8)
    assert inside.group(0, AXES) == tuple(range(16))
    for pp in range(2):
        mine = [mesh.group(mesh.rank({"pp": pp}), AXES[1:]) for mesh in (plain, inside)]
        for one, other in zip(*mine, strict=True):
            assert plain.coordinate(one) == inside.coordinate(other)
            assert inside.rank({axis: inside.coordinate(other)[axis] for axis in EXPERT_AXES}) == other


def test_neighbouring_ranks_differ_in_tp() -> None:
    mesh = Mesh(pp=2, dp=2, tp=2)
    assert mesh.groups(["tp"]) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert mesh.groups(["dp"]) == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert mesh.groups(["pp"]) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert mesh.group(5, ["tp", "pp"]) == mesh.group(5, ["pp", "tp"]) == (0, 1, 4, 5)
    assert mesh.group(5, []) == (5,)


def test_axes_left_out_of_a_coordinate_are_zero() -> None:
    assert Mesh(pp=2, tp=2).rank({"pp": 1}) == 2


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_is_refused(rank: int) -> None:
    with pytest.raises(IndexError, match=f"rank {rank} is not in a mesh of 4"):
        Mesh(tp=4).coordinate(rank)


def test_an_index_outside_is_refused() -> None:
    with pytest.raises(IndexError, match="tp=4 is not on an axis of 4"):
        Mesh(tp=4).rank({"tp": 4})
