"""Which device takes which rank: tensor-parallel groups on the fastest links, then the groups of the axes outside it.

A mesh numbers its ranks with tp innermost, then cp, dp and pp or pp and dp, so the cut is read from the inside out:
devices are brought together to groups of tp, these to groups of cp, and so on. Each level is greedy (a group grows by
what lies nearest to all of it), then improved by swaps while any helps. The slowest link of a group is what counts: a
ring runs at its pace.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from plait.core.errors import ConfigError
from plait.core.mesh import Mesh

Matrix = NDArray[np.float64]
KIND = 1.2
"""Links whose speeds are further apart than this factor, with none between, are of different kinds."""
SWEEPS = 8
"""Most passes of swaps over the groups of a level."""


def order(links: Sequence[Sequence[float]], mesh: Mesh) -> tuple[int, ...]:
    """Device of each rank of ``mesh``: rank r of the plan belongs on device ``order[r]``.

    ``links``: device-to-device bytes/s, a row for each, at least as many as the mesh has ranks. Where the links do not
    tell devices apart, the order is the devices' own. ConfigError for a matrix that does not fit.
    """
    speed = _checked(links, mesh.world_size)
    # Blocks of devices that stay together, in the order of their ranks; each level joins neighbours.
    blocks: list[tuple[int, ...]] = [(device,) for device in range(mesh.world_size)]
    for axis in reversed(mesh.order.split("-")):
        count = mesh.sizes[axis]
        if count == 1:
            continue
        between = _between(speed, blocks)
        groups = [list(range(count))] if len(blocks) == count else _improved(between, _grown(between, count))
        paths = sorted(_path(between, group) for group in groups)
        blocks = [sum((blocks[member] for member in path), ()) for path in paths]
    return sum(blocks, ())


def _checked(links: Sequence[Sequence[float]], ranks: int) -> Matrix:
    if len(links) < ranks or any(len(row) != len(links) for row in links):
        raise ConfigError(f"links: {len(links)} rows for {ranks} ranks: expected a square matrix, a row for each rank")
    speed = np.array(links, dtype=np.float64)[:ranks, :ranks]
    return _kinds((speed + speed.T) / 2)


def _kinds(speed: Matrix) -> Matrix:
    """Each link at the speed of its kind: a measured matrix is noisy; a new kind begins where speeds leave a gap."""
    values = np.unique(speed[speed > 0])
    if not len(values):
        return speed
    kind = np.concatenate([[0], np.cumsum(values[1:] > KIND * values[:-1])])
    usual = np.array([np.median(values[kind == number]) for number in range(kind[-1] + 1)])
    found = np.where(speed > 0, usual[kind[np.clip(np.searchsorted(values, speed), 0, len(values) - 1)]], 0.0)
    return np.asarray(found)


def _between(speed: Matrix, blocks: Sequence[tuple[int, ...]]) -> Matrix:
    """Speed between blocks: that of the i-th device of one and the i-th of the other, whose groups these links make."""
    index = np.array(blocks)
    return np.asarray(speed[index[:, None, :], index[None, :, :]].min(axis=-1))


def _grown(speed: Matrix, count: int) -> list[list[int]]:
    """Groups of ``count``: each starts with the first that is left, and takes what slows its slowest link least."""
    free = np.ones(len(speed), dtype=bool)
    groups = []
    while free.any():
        first = int(np.argmax(free))
        free[first] = False
        group, slowest = [first], speed[first].copy()
        while len(group) < count:
            nearest = int(np.argmax(np.where(free, slowest, -1.0)))
            free[nearest] = False
            group.append(nearest)
            slowest = np.minimum(slowest, speed[nearest])
        groups.append(sorted(group))
    return groups


def _cost(speed: Matrix, group: Sequence[int]) -> float:
    """Seconds that a byte takes over the slowest link of a group, and a little for the mean of the others."""
    rows = speed[np.ix_(group, group)]
    apart = rows[~np.eye(len(group), dtype=bool)]
    with np.errstate(divide="ignore"):
        slow = 1.0 / apart
    return float(slow.max() + 1e-3 * min(float(slow.mean()), float(slow.max())))


def _improved(speed: Matrix, groups: list[list[int]]) -> list[list[int]]:
    """Swap members of two groups while that makes the two together faster."""
    costs = [_cost(speed, group) for group in groups]
    for _ in range(SWEEPS):
        better = False
        for a in range(len(groups)):
            for b in range(a + 1, len(groups)):
                better |= _swapped(speed, groups, costs, a, b)
        if not better:
            break
    return sorted(groups)


def _swapped(speed: Matrix, groups: list[list[int]], costs: list[float], a: int, b: int) -> bool:
    """Make the best swap between two groups, if one helps: of who is on the slowest link of the slower group."""
    if costs[a] < costs[b]:
        a, b = b, a
    best, found = costs[a] + costs[b], None
    if costs[a] <= (1 + 1e-3) / speed.max() * (1 + 1e-9):  # on the fastest links there are
        return False
    for one in _ends(speed, groups[a]):
        for other in groups[b]:
            left = [other if member == one else member for member in groups[a]]
            right = [one if member == other else member for member in groups[b]]
            costs_now = _cost(speed, left), _cost(speed, right)
            if sum(costs_now) < best * (1 - 1e-9):
                best, found = sum(costs_now), (left, right, costs_now)
    if found is None:
        return False
    groups[a], groups[b] = sorted(found[0]), sorted(found[1])
    costs[a], costs[b] = found[2]
    return True


def _ends(speed: Matrix, group: Sequence[int]) -> list[int]:
    """Members that have one of the group's slowest links."""
    rows = np.where(np.eye(len(group), dtype=bool), np.inf, speed[np.ix_(group, group)])
    return [member for member, slowest in zip(group, rows.min(axis=1), strict=True) if slowest <= rows.min()]


def _path(speed: Matrix, group: Sequence[int]) -> list[int]:
    """``group`` in an order in which neighbours are near: from its first, always to the nearest that is left."""
    left = sorted(group)
    path = [left.pop(0)]
    while left:
        nearest = max(left, key=lambda member: (speed[path[-1], member], -member))
        left.remove(nearest)
        path.append(nearest)
    return path
