"""Exact and hierarchical sums of buckets: the same parts in the same places as one process computes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from plait.comm.world import World
from plait.core.mesh import Mesh
from plait.parallel.reducer import Exact, Hierarchical, Reducer, node_groups
from tests.pool import Connect, Pool

AXES = ("dp", "cp")


def addends(size: int, length: int, seed: int = 0) -> list[Tensor]:
    """One bucket a rank; whole numbers, whose sums are exact in every order."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-9, 10, (length,), generator=generator).float() for _ in range(size)]


def make(kind: str, world: World) -> Reducer:
    if kind == "exact":
        return Exact(world.group(*AXES))
    inner, outer = node_groups(world, AXES, int(kind))
    return Hierarchical(inner, Exact(outer))


def run_sums(connect: Connect, mesh: Mesh, kind: str, part: int, extra: int) -> dict[str, int]:
    """Three buckets under way at once, both ways; returns the bytes sent by axis."""
    world = connect(mesh)
    data = world.group(*AXES)
    reducer = make(kind, world)
    size, mine = data.size, slice(data.index * part, (data.index + 1) * part)
    for inside in (True, False):
        rows = [addends(size, size * part, seed) for seed in range(3)]
        flats = [row[data.index].clone() for row in rows]
        outs = [flat[mine] if inside else torch.full((part,), -1.0) for flat in flats]
        pending = [
            reducer.reduce_scatter(key, flat, out) for key, (flat, out) in enumerate(zip(flats, outs, strict=True))
        ]
        for row, out, wait in zip(rows, outs, pending, strict=True):
            wait.wait()
            assert torch.equal(out, torch.stack(row).sum(0)[mine])
    world.book.ledger.clear()
    rows = [addends(size, size * part + extra, seed) for seed in range(3)]
    flats = [row[data.index].clone() for row in rows]
    pending = [reducer.all_reduce(key, flat) for key, flat in enumerate(flats)]
    for row, flat, wait in zip(rows, flats, pending, strict=True):
        assert wait.wait() is flat
        assert torch.equal(flat, torch.stack(row).sum(0))
    return world.book.ledger.by_axis()


@pytest.mark.parametrize("extra", [0, 5])
@pytest.mark.parametrize(
    ("kind", "mesh"),
    [
        ("exact", Mesh(dp=4)),
        ("2", Mesh(dp=4)),
        ("2", Mesh(dp=2, cp=2, tp=2)),
        ("4", Mesh(pp=2, dp=4)),
        ("1", Mesh(dp=2)),
        ("2", Mesh(dp=3, cp=2)),
        ("3", Mesh(dp=6)),
    ],
)
def test_sums_and_places(pool: Pool, kind: str, mesh: Mesh, extra: int) -> None:
    pool.run(mesh.world_size, run_sums, mesh, kind, 16, extra)


def test_what_crosses_nodes(pool: Pool) -> None:
    """2 x 2 ranks: within a node 2 x 1/2 of the bucket is sent, across nodes 2 x 1/2 of half of it."""
    bucket = 4 * 64 * 4
    for sent in pool.run(4, run_sums, Mesh(dp=4), "2", 64, 0):
        assert sent == {"dp+cp within nodes": 3 * bucket, "dp+cp across nodes": 3 * bucket // 2}
    for sent in pool.run(4, run_sums, Mesh(dp=4), "exact", 64, 0):
        assert sent == {"dp+cp": 3 * bucket * 3 // 2}
