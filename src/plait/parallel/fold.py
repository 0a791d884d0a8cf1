"""`Fold`: the data ranks that share the state of dense tensors, or of experts, and how gradients are summed over them.

Dense tensors have their copies along ``dp cp``, experts along ``edp`` (`plait.core.mesh`). With HSDP (Zhao et al. 2023,
arXiv:2304.11277, section 3.2.2) state is shared within blocks of neighbouring data ranks and copied across blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from plait.comm.group import Group
from plait.comm.world import World
from plait.parallel.reducer import Reducer
from plait.parallel.rules import DATA_AXES, EXPERT_DATA_AXES


@dataclass(frozen=True, kw_only=True)
class Fold:
    """The data ranks of one kind of tensors, seen from one of them."""

    shards: int
    """Ranks that share state; 1: each has all of it."""
    index: int
    """Which of the shards is this rank's."""
    first: bool
    """Whether this rank's copy of the state is the one that counts: in norms, in files."""
    replicas: tuple[int, ...]
    """The ranks that have the same shard, this one among them."""
    reducer: Reducer
    """Sums over the ranks that share state; without sharing, over all data ranks."""
    across: Reducer | None
    """Sums over the ranks that have the same shard (HSDP)."""
    gather: Group
    """The ranks that share state."""


def make_fold(
    world: World,
    axes: tuple[str, ...],
    *,
    level: int,
    zero_group: int | None,
    reducer: Callable[[Group], Reducer],
) -> Fold:
    """The fold along ``axes``; collective over all ranks. ``zero_group``: ranks a block (their greatest common divisor
    with the data ranks there are, for experts have fewer)."""
    whole = world.group(*axes)
    size = whole.size if zero_group is None or level == 0 else math.gcd(zero_group, whole.size)
    lines, name = world.mesh.groups(axes), "+".join(axes)
    block, across = whole, None
    blocks = [line[begin : begin + size] for line in lines for begin in range(0, whole.size, size)]
    if size < whole.size:
        block = world.shared(f"{name}/{size}", blocks)
        across = world.shared(f"{name} across {size}", [line[place::size] for line in lines for place in range(size)])
    # Gathers of weights have rings or communicators of their own: in which order they and the reductions come may then
    # differ between ranks.
    gather = world.partition(block.axis, blocks) if level == 3 and size > 1 else block
    shards, index = (1, 0) if level == 0 else (size, block.index)
    return Fold(
        shards=shards,
        index=index,
        first=whole.index // shards == 0,
        replicas=whole.ranks[index::shards],
        reducer=reducer(block),
        across=None if across is None else reducer(across),
        gather=gather,
    )


def make_folds(
    world: World, *, level: int, zero_group: int | None, reducer: Callable[[Group], Reducer]
) -> dict[bool, Fold]:
    """Whether a tensor is an expert's -> its fold; one for both where their data ranks are the same. Collective."""

    def make(axes: tuple[str, ...]) -> Fold:
        return make_fold(world, axes, level=level, zero_group=zero_group, reducer=reducer)

    dense = make(DATA_AXES)
    same = world.mesh.groups(DATA_AXES) == world.mesh.groups(EXPERT_DATA_AXES)
    return {False: dense, True: dense if same else make(EXPERT_DATA_AXES)}


def holders(world: World, axis: str, count: int) -> Group:
    """Blocks of ``count`` neighbouring ranks along ``axis``, which hold the same part of a tensor; this rank's block.

    The first call for a (axis, count) is collective over all ranks.
    """
    size = {**world.mesh.sizes, **world.mesh.expert_sizes}[axis]
    if count == size:
        return world.group(axis)
    lines = world.mesh.groups([axis])
    blocks = [line[begin : begin + count] for line in lines for begin in range(0, size, count)]
    return world.shared(f"{axis}/{count}", blocks)
