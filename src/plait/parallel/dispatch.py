"""How rows travel to the ranks that hold their experts, and back. No mathematics of the model, no autograd.

n rows of this rank, K experts a row, A of its assignments (a row for an expert) that are kept, M assignments that this
rank computes, W slots of a rank: those of the experts it owns, then those of its shadows.

Assignments are sorted by (rank, slot), sent along ``ep``, gathered along ``etp`` (whose ranks each hold a part of every
expert), and sorted by slot. Back they go the same way, summed over ``etp``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor

from plait.comm.group import Group, Pending
from plait.parallel.placement import Placement

Table = list[list[list[list[int]]]]
"""Assignments by (index on etp, source on ep, destination on ep, slot)."""


def read_table(told: Tensor, assignments: int) -> Table:
    """The numbers in ``told`` int64 [etp, ep, ep, W]; ``assignments``: what this rank has before any is left out."""
    table: Table = told.tolist()
    return table


def slot_keys(placement: Placement, rank: int) -> list[int]:
    """For each expert where the assignments of ``rank`` go: ``owner * W + slot``, or a slot of its own shadows."""
    width = placement.slots + len(placement.shadows)
    keys = [0] * len(placement.order)
    for place, expert in enumerate(placement.order):
        owner, slot = divmod(place, placement.slots)
        if expert in placement.shadows and owner != rank:
            owner, slot = rank, placement.slots + placement.shadows.index(expert)
        keys[expert] = owner * width + slot
    return keys


@final
class Route:
    """The way of one microbatch's assignments. Made once in forward; backward takes it again.

    Collective over ``ep`` and ``etp``: the ranks tell each other how many assignments they have for every slot, the
    one thing that the host waits for. ``read`` brings the numbers to the host.
    """

    def __init__(
        self,
        keys_nK: Tensor,
        kept_nK: Tensor | None,
        width: int,
        ep: Group,
        etp: Group,
        read: Callable[[Tensor, int], Table] = read_table,
    ) -> None:
        slots = ep.size * width
        if kept_nK is not None:
            keys_nK = keys_nK.masked_fill(~kept_nK, slots)
        flat = keys_nK.flatten()
        counts = torch.zeros(slots + 1, dtype=torch.int64, device=flat.device)
        counts.scatter_add_(0, flat, torch.ones_like(flat))
        telling = ep.all_gather(counts[:slots])
        order = flat.argsort(stable=True)
        told = etp.all_gather(telling.wait()).wait().view(etp.size, ep.size, ep.size, width)
        # The only wait for a device: every later size is known to the host.
        table = read(told, flat.numel())
        self.ep, self.etp = ep, etp
        self._counts = [[sum(to) for to in source] for source in table[etp.index]]
        self._back = [list(column) for column in zip(*self._counts, strict=True)]
        coming = [[source[ep.index] for source in member] for member in table]
        self._etp_counts = [sum(sum(slot) for slot in member) for member in coming]
        self.slot_counts = [sum(source[slot] for member in coming for source in member) for slot in range(width)]
        """M, by slot."""
        assignments = sum(self._counts[ep.index])
        self.order_A = order[:assignments]
        """Which of the n * K assignments each sent row is."""
        self.row_A = self.order_A.div(keys_nK.shape[1], rounding_mode="floor")
        inverse = torch.zeros_like(flat)
        inverse[self.order_A] = torch.arange(assignments, device=flat.device)
        self.inverse_nK = inverse.view_as(keys_nK)
        """Where each assignment is among the sent rows; 0 for those that are not kept."""
        self.kept_nK = kept_nK
        self._sort(told[:, :, ep.index])
        self.arriving: Pending | None = None
        self.returning: Pending | None = None

    def _sort(self, lengths: Tensor) -> None:
        """``lengths`` int64 [etp, ep, W]: the runs in which rows arrive, each of one slot."""
        self._sorted_M: Tensor | None = None
        self._arrived_M: Tensor | None = None
        if self.ep.size * self.etp.size == 1:
            return
        slots = torch.arange(lengths.shape[2], device=lengths.device).expand_as(lengths).flatten()
        total = sum(self.slot_counts)
        slot_M = torch.repeat_interleave(slots, lengths.flatten(), output_size=total)
        self._sorted_M = slot_M.argsort(stable=True)
        self._arrived_M = torch.empty_like(self._sorted_M)
        self._arrived_M[self._sorted_M] = torch.arange(total, device=lengths.device)

    def send(self, rows_A: Tensor) -> Pending:
        """Start to send [A, D] to the ranks of their experts."""
        return self.ep.exchange(rows_A, self._counts)

    def sort(self, sent: Pending) -> Tensor:
        """What `send` brought here, from all of ``etp``, by slot: [M, D]."""
        rows = self.etp.gather_rows(sent.wait(), self._etp_counts).wait()
        return rows if self._sorted_M is None else rows.index_select(0, self._sorted_M)

    def send_back(self, rows_M: Tensor) -> Pending:
        """Start to send [M, D], summands of the ranks of ``etp``, back: the result is [A, D]."""
        if self._arrived_M is not None:
            rows_M = rows_M.index_select(0, self._arrived_M)
        return self.ep.exchange(self.etp.scatter_rows(rows_M, self._etp_counts).wait(), self._back)

    def take(self, rows_A: Tensor, choice: int) -> Tensor:
        """[n, D]: the sent row of each row's assignment number ``choice``; zero where it is not kept."""
        if rows_A.shape[0] == 0:
            return rows_A.new_zeros(self.inverse_nK.shape[0], *rows_A.shape[1:])
        rows = rows_A.index_select(0, self.inverse_nK[:, choice])
        return rows if self.kept_nK is None else rows.masked_fill_(~self.kept_nK[:, choice, None], 0)


def exchange_slots(group: Group, local: Tensor, before: Placement, after: Placement) -> Tensor:
    """Move experts' ``local`` [slots, ...] (weights, moments) from the owners of one placement to those of another."""

    def moving(source: int, to: int) -> list[int]:
        """Experts that go from one rank to another, in the order of the new slots."""
        return [expert for expert in after.owned(to) if before.owner(expert) == source]

    ranks = range(group.size)
    counts = [[len(moving(source, to)) for to in ranks] for source in ranks]
    slots = {expert: slot for slot, expert in enumerate(before.owned(group.index))}
    sent = [slots[expert] for to in ranks for expert in moving(group.index, to)]
    arrived = group.exchange(_rows(local, sent), counts).wait()
    come = [expert for source in ranks for expert in moving(source, group.index)]
    return _rows(arrived, [come.index(expert) for expert in after.owned(group.index)])


def _rows(x: Tensor, index: Sequence[int]) -> Tensor:
    return x.index_select(0, torch.tensor(index, dtype=torch.int64, device=x.device))
