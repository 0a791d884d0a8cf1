"""`Reducer`: how a bucket of gradients is summed over data ranks. `Exact` and `Hierarchical` sum what the ranks hold.

What rounds or leaves out is in `plait.parallel.compress`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from plait.comm.group import Group, Pending
from plait.comm.world import World


class Reducer(ABC):
    """Sums of flat gradient buckets over the data ranks.

    All ranks call the same methods with the same keys in one order, and wait in one order: some reducers go on to
    their next collective when they are waited for. ``key`` names the bucket: a reducer that carries state from step to
    step (error feedback) keeps it under the key.
    """

    @abstractmethod
    def all_reduce(self, key: int, flat: Tensor) -> Pending:
        """Sum ``flat`` [n] over the ranks, in place; every rank gets the same bits."""

    @abstractmethod
    def reduce_scatter(self, key: int, flat: Tensor, out: Tensor) -> Pending:
        """Sum ``flat`` [ranks * n]; this rank gets its n elements in ``out``, which may lie inside ``flat``.

        The rest of ``flat`` is scratch afterwards.
        """

    def carried(self) -> dict[str, Tensor]:
        """What goes on from step to step: this rank's own, of no use to another layout of ranks and buckets."""
        return {}

    def carry(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `carried` gave on the same rank of the same plan; {}: from the beginning."""
        assert not state, f"{type(self).__name__} carries nothing"


@final
class Exact(Reducer):
    """The group's own collectives, in the dtype of the bucket."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def all_reduce(self, key: int, flat: Tensor) -> Pending:
        return self._group.all_reduce(flat)

    def reduce_scatter(self, key: int, flat: Tensor, out: Tensor) -> Pending:
        if self._group.size == 1:
            return Pending(lambda: out if same_memory(out, flat) else out.copy_(flat))
        return self._group.reduce_scatter(flat, out=out)


@final
class Hierarchical(Reducer):
    """First within a node, then across nodes: the slow links carry 1/inner of what they would.

    ``inner``: the data ranks of this node, neighbours: data rank d is at place d % inner of node d // inner.
    ``across``: sums over the ranks that are at this rank's place in their nodes, in the order of nodes.
    """

    def __init__(self, inner: Group, across: Reducer) -> None:
        self._inner = inner
        self._across = across

    def all_reduce(self, key: int, flat: Tensor) -> Pending:
        """Reduce-scatter within, all-reduce of the part across, all-gather within."""
        inner, length = self._inner, flat.numel()
        whole = padded(flat, inner.size)
        part = whole.chunk(inner.size)[inner.index]
        within = inner.reduce_scatter(whole, out=part)

        def finish() -> Tensor:
            within.wait()
            self._across.all_reduce(key, part).wait()
            inner.all_gather(part, out=whole).wait()
            return flat if whole is flat else flat.copy_(whole[:length])

        return Pending(finish)

    def reduce_scatter(self, key: int, flat: Tensor, out: Tensor) -> Pending:
        """Reduce-scatter within, then across."""
        # Ranks' parts lie node by node; those of one place must be neighbours to be summed within the node first.
        by_place = flat.view(-1, self._inner.size, out.numel()).transpose(0, 1).reshape(-1)
        within = self._inner.reduce_scatter(by_place)
        return Pending(lambda: self._across.reduce_scatter(key, within.wait(), out).wait())


def node_groups(world: World, axes: Sequence[str], node: int) -> tuple[Group, Group]:
    """The groups of `Hierarchical` on the ranks along ``axes``: (this rank's node, the same place in every node).

    ``node``: ranks a node, which divide the ranks along ``axes``. Collective over all ranks.
    """
    lines, name = world.mesh.groups(axes), "+".join(axes)
    within = [line[begin : begin + node] for line in lines for begin in range(0, len(line), node)]
    across = [line[place::node] for line in lines for place in range(node)]
    return world.shared(f"{name} within nodes", within), world.shared(f"{name} across nodes", across)


def same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two flat tensors begin at the same place, also where they have no values."""
    same = one.untyped_storage()._cdata == other.untyped_storage()._cdata
    return same and one.storage_offset() == other.storage_offset()


def padded(flat: Tensor, parts: int) -> Tensor:
    """``flat`` with zeros at its end that make it divide by ``parts``; ``flat`` itself where it does."""
    rest = -flat.numel() % parts
    return torch.cat([flat, flat.new_zeros(rest)]) if rest else flat
