"""Shadows: copies of hot experts on every rank of ``ep``, fetched once a step (FasterMoE, He et al., PPoPP 2022).

A rank's own tokens meet the copy where they are and do not travel. Gradients of the copies are summed over ``ep`` to
the owner before the owner's gradient is reduced over the data axes. S shadows; what the owner has among them is idle.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor

from plait.comm.group import Group
from plait.parallel.grads import Deferred, Slot
from plait.parallel.grouped import Bank
from plait.parallel.placement import Placement


@final
class Shadows:
    """The copies of one layer on this rank."""

    def __init__(self, placement: Placement, ep: Group) -> None:
        self._ep = ep
        self._counts = [len(placement.shadows_of(rank)) for rank in range(placement.ranks)]
        owned = placement.owned(ep.index)
        self._own = torch.tensor(
            [owned.index(expert) for expert in placement.shadows_of(ep.index)], dtype=torch.int64, device=ep.device
        )
        self._bank: Bank | None = None
        self._slots: dict[str, Slot] = {}

    def restart(self) -> None:
        """New weights, no gradients."""
        self._bank = None
        for slot in self._slots.values():
            slot.restart()

    def bank(self, owners: Bank) -> Bank:
        """The copies; fetched at the first call after `restart`, from the ``owners`` on all ranks."""
        if self._bank is None:
            with torch.no_grad():
                copies = [self._fetch(owners.gate_up), self._fetch(owners.down)]
            if not self._slots:
                for name, weight in zip(("gate_up", "down"), copies, strict=True):
                    if name in owners.slots:
                        self._slots[name] = _slot(weight)
            self._bank = Bank(gate_up=copies[0], down=copies[1], slots=self._slots)
        return self._bank

    def _fetch(self, weight: Tensor) -> Tensor:
        return self._ep.gather_rows(weight.index_select(0, self._own), self._counts).wait()

    def settle(self, slots: Mapping[str, Slot]) -> None:
        """Add the copies' gradients, summed over ``ep``, to those of the experts in ``slots``."""
        for name, slot in slots.items():
            mine = self._slots[name]
            mine.close()
            slot.add_rows(self._own, self._ep.scatter_rows(mine.grad, self._counts).wait())


def _slot(weight: Tensor) -> Slot:
    """A slot that nothing waits for. In a split backward it is filled by the first half already."""
    return Slot(torch.empty_like(weight, dtype=torch.float32), 1, lambda: None, Deferred())
