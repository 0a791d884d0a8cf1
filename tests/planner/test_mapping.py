"""Axes on devices by the measured matrix: scrambled nodes are found again, whatever the mesh."""

from __future__ import annotations

import random

import pytest

from plait.core.errors import ConfigError
from plait.core.mesh import Mesh
from plait.planner.mapping import order


def _matrix(node_of: list[int], rng: random.Random, noise: float = 0.05) -> list[list[float]]:
    """300 GB/s inside a node, 25 GB/s between nodes, measured with noise."""
    size = len(node_of)
    links = [[0.0] * size for _ in range(size)]
    for a in range(size):
        for b in range(a):
            fast = 300e9 if node_of[a] == node_of[b] else 25e9
            links[a][b] = links[b][a] = fast * rng.uniform(1 - noise, 1 + noise)
    return links


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("mesh", [Mesh(tp=8, dp=2), Mesh(tp=4, pp=4), Mesh(tp=2, cp=2, dp=4), Mesh(tp=2, pp=2, dp=4)])
def test_two_scrambled_nodes_are_found_again(mesh: Mesh, seed: int) -> None:
    rng = random.Random(seed)
    node_of = [0] * 8 + [1] * 8
    rng.shuffle(node_of)
    found = order(_matrix(node_of, rng), mesh)
    assert sorted(found) == list(range(16))
    assert all(len({node_of[device] for device in found[half : half + 8]}) == 1 for half in (0, 8))


def test_stages_of_a_copy_share_a_node_where_the_plan_says_so() -> None:
    rng = random.Random(0)
    node_of = [0] * 8 + [1] * 8
    rng.shuffle(node_of)
    mesh = Mesh(tp=2, dp=2, pp=4, order="dp-pp-cp-tp")
    found = order(_matrix(node_of, rng), mesh)
    for copy in range(2):
        ranks = mesh.group(mesh.rank({"dp": copy}), ("pp", "tp"))
        assert len({node_of[found[rank]] for rank in ranks}) == 1


def test_devices_that_are_in_order_stay_so() -> None:
    links = _matrix([0] * 4 + [1] * 4, random.Random(0))
    assert order(links, Mesh(tp=2, dp=4)) == tuple(range(8))
    assert order([[0.0, 1e9], [1e9, 0.0]], Mesh(dp=2)) == (0, 1)


def test_a_greedy_dead_end_is_left_by_swaps() -> None:
    # 0-1 is the fastest link, but with it 2-3 is left over at a hundredth of the speed.
    links = [
        [0.0, 40e9, 20e9, 20e9],
        [40e9, 0.0, 20e9, 20e9],
        [20e9, 20e9, 0.0, 0.2e9],
        [20e9, 20e9, 0.2e9, 0.0],
    ]
    found = order(links, Mesh(tp=2, dp=2))
    assert {frozenset(found[:2]), frozenset(found[2:])} in (
        {frozenset({0, 2}), frozenset({1, 3})},
        {frozenset({0, 3}), frozenset({1, 2})},
    )


def test_more_devices_than_ranks_and_matrices_that_do_not_fit() -> None:
    links = _matrix([0, 1, 0, 1, 0, 1], random.Random(0))
    assert sorted(order(links, Mesh(tp=2, dp=2))) == [0, 1, 2, 3]
    with pytest.raises(ConfigError, match="2 rows for 4 ranks"):
        order([[0.0, 1.0], [1.0, 0.0]], Mesh(tp=4))
    with pytest.raises(ConfigError, match="square"):
        order([[0.0, 1.0], [1.0]], Mesh(tp=2))


def test_hundreds_of_devices_take_a_moment() -> None:
    rng = random.Random(0)
    node_of = [device // 8 for device in range(512)]
    rng.shuffle(node_of)
    found = order(_matrix(node_of, rng, noise=0.05), Mesh(tp=8, dp=64))
    assert all(len({node_of[d] for d in found[i : i + 8]}) == 1 for i in range(0, 512, 8))
