"""`Reducer`: how a bucket of gradients is summed over data ranks. `Exact` and `Hierarchical` sum what the ranks hold.

What rounds or leaves out is in `plait.parallel.compress`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import final

from torch import Tensor

from plait.comm.group import Group, Pending


class Reducer(ABC):
    """Sums of flat gradient buckets over the data ranks. All ranks call the same methods with the same keys in order.

    ``key`` names the bucket: a reducer that carries state from step to step (error feedback) keeps it under the key.
    """

    @abstractmethod
    def all_reduce(self, key: int, flat: Tensor) -> Pending:
        """Sum ``flat`` [n] over the ranks, in place; every rank gets the same bits."""

    @abstractmethod
    def reduce_scatter(self, key: int, flat: Tensor, out: Tensor) -> Pending:
        """Sum ``flat`` [ranks * n]; this rank gets its n elements in ``out``, which may lie inside ``flat``.

        The rest of ``flat`` is scratch afterwards.
        """


@final
class Exact(Reducer):
    """The group's own collectives, in the dtype of the bucket."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def all_reduce(self, key: int, flat: Tensor) -> Pending:
        return self._group.all_reduce(flat)

    def reduce_scatter(self, key: int, flat: Tensor, out: Tensor) -> Pending:
        return self._group.reduce_scatter(flat, out=out)
