"""Expert parallel: a mixture of experts whose experts lie on the ranks of ``ep``, and each expert on those of ``etp``.

Rows of a mixture are unique for each rank: with sequence parallel they come so, without it each rank of ``tp`` takes
its run of the rows and the outputs are gathered. Shared experts are computed while the rows travel, in forward and in
backward; weight gradients while the rows' gradients travel back. Collectives are those of GShard (arXiv:2006.16668),
without its capacity: every rank sends what it has.

N rows (n of them this rank's), K experts a row, D hidden, E experts, A assignments sent, M assignments computed here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn

from plait.comm.group import Group
from plait.core.shard import split
from plait.models.batch import Batch
from plait.models.moe import MoE
from plait.parallel.dispatch import Route, Table, read_table, slot_keys
from plait.parallel.grouped import Bank, GroupedExperts, add_weight_gradients, backward, forward
from plait.parallel.placement import Placement, identity
from plait.parallel.shadows import Shadows


class _Own(torch.autograd.Function):
    """I -> V: this rank's run of rows that all ranks of a group have."""

    @staticmethod
    def forward(ctx: Any, h_ND: Tensor, group: Group) -> Tensor:
        ctx.group, ctx.counts = group, _runs(h_ND.shape[0], group)
        return h_ND.narrow(0, sum(ctx.counts[: group.index]), ctx.counts[group.index])

    @staticmethod
    def backward(ctx: Any, grad_nD: Tensor) -> tuple[Tensor, None]:
        return ctx.group.gather_rows(grad_nD.contiguous(), ctx.counts).wait(), None


class _Together(torch.autograd.Function):
    """V -> I: the rows of all ranks of a group."""

    @staticmethod
    def forward(ctx: Any, h_nD: Tensor, rows: int, group: Group) -> Tensor:
        ctx.group, ctx.counts = group, _runs(rows, group)
        gathered: Tensor = group.gather_rows(h_nD.contiguous(), ctx.counts).wait()
        return gathered

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None, None]:
        return torch.split(grad_ND, ctx.counts)[ctx.group.index].contiguous(), None, None


class _Dispatch(torch.autograd.Function):
    """Starts to send rows, and in backward ends the way back of their gradients.

    The rows themselves travel in the `Route`: what autograd sees of them is an empty tensor, so that nobody waits for
    them before `_Experts` does.
    """

    @staticmethod
    def forward(ctx: Any, h_nD: Tensor, route: Route) -> Tensor:
        ctx.route = route
        route.arriving = route.send(h_nD.index_select(0, route.row_A))
        return h_nD.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        route: Route = ctx.route
        assert route.returning is not None
        grad_AD = route.returning.wait()
        route.returning = None
        wide = torch.promote_types(grad_AD.dtype, torch.float32)
        grad_nD = route.take(grad_AD, 0).to(wide)
        for choice in range(1, route.inverse_nK.shape[1]):
            grad_nD += route.take(grad_AD, choice)
        return grad_nD.to(grad_AD.dtype), None


class _Experts(torch.autograd.Function):
    """The experts' outputs [A, D] for the rows that `_Dispatch` has sent, back where those came from."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, gate_up: Tensor, down: Tensor, route: Route, banks: tuple[Bank, ...]) -> Tensor:
        assert route.arriving is not None
        x_MD = route.sort(route.arriving)
        route.arriving = None
        counts = _by_bank(route, banks)
        done = [forward(x, bank, n) for x, bank, n in zip(_parts(x_MD, counts), banks, counts, strict=True)]
        weights = [weight for bank in banks for weight in (bank.gate_up, bank.down)]
        ctx.save_for_backward(x_MD, *(hidden for _, hidden in done), *weights)
        ctx.route, ctx.slots = route, [bank.slots for bank in banks]
        return route.send_back(_joined([out for out, _ in done])).wait()

    @staticmethod
    def backward(ctx: Any, grad_AD: Tensor) -> tuple[Tensor, None, None, None, None]:
        route: Route = ctx.route
        sending = route.send(grad_AD.contiguous())
        size = len(ctx.slots)
        x_MD, *saved = ctx.saved_tensors
        hiddens, weights = saved[:size], saved[size:]
        banks = [
            Bank(gate_up=weights[2 * i], down=weights[2 * i + 1], slots=slots) for i, slots in enumerate(ctx.slots)
        ]
        counts = _by_bank(route, banks)
        grads = _parts(route.sort(sending), counts)
        done = [backward(*each) for each in zip(grads, hiddens, banks, counts, strict=True)]
        if ctx.needs_input_grad[0]:
            route.returning = route.send_back(_joined([grad for grad, _, _ in done]))
        # While the rows' gradients travel.
        for bank, n, grad, x, (_, grad_hidden, inner) in zip(
            banks, counts, grads, _parts(x_MD, counts), done, strict=True
        ):
            add_weight_gradients(bank, n, grad, inner, grad_hidden, x)
        return grad_AD.new_empty(0), None, None, None, None


class _Weigh(torch.autograd.Function):
    """[n, D]: each row's sum of its experts' outputs times their weights, in fp32 at least."""

    @staticmethod
    def forward(ctx: Any, out_AD: Tensor, weights_nK: Tensor, route: Route) -> Tensor:
        ctx.save_for_backward(out_AD, weights_nK)
        ctx.route = route
        sum_nD = route.take(out_AD, 0).to(weights_nK.dtype).mul_(weights_nK[:, 0, None])
        for choice in range(1, weights_nK.shape[1]):
            sum_nD.addcmul_(route.take(out_AD, choice).to(sum_nD.dtype), weights_nK[:, choice, None])
        return sum_nD.to(out_AD.dtype)

    @staticmethod
    def backward(ctx: Any, grad_nD: Tensor) -> tuple[Tensor, Tensor, None]:
        out_AD, weights_nK = ctx.saved_tensors
        route: Route = ctx.route
        wide_AD = grad_nD.to(weights_nK.dtype).index_select(0, route.row_A)
        grad_weights = torch.zeros_like(weights_nK).flatten()
        grad_weights.index_copy_(0, route.order_A, (wide_AD * out_AD).sum(-1))
        weight_A = weights_nK.flatten().index_select(0, route.order_A)
        return wide_AD.mul_(weight_A[:, None]).to(out_AD.dtype), grad_weights.view_as(weights_nK), None


@final
class ParallelMoE(nn.Module):
    """A `MoE` whose experts lie on ``ep`` and ``etp``. Children keep their names, so parameters do.

    ``sequence``: rows come cut over ``tp`` (sequence parallel). ``moe.shared`` is left to whoever cuts plain layers; it
    is given the rows as they come. The router's seams are the caller's to set.
    """

    def __init__(self, moe: MoE, *, tp: Group, ep: Group, etp: Group, sequence: bool) -> None:
        super().__init__()
        self.config = moe.config
        self.router = moe.router
        self.experts = GroupedExperts(moe.experts)
        self.shared = moe.shared
        self.tp, self.ep, self.etp = tp, ep, etp
        self.sequence = sequence
        self.read: Callable[[Tensor, int], Table] = read_table
        """How the numbers of a `Route` come to the host: of tensors without values they are made up."""
        self.place(identity(moe.config.num_experts, ep.size))

    def forward(self, h_ND: Tensor, batch: Batch) -> Tensor:
        cut = self.tp.size > 1 and not self.sequence
        mine_nD: Tensor = _Own.apply(h_ND, self.tp) if cut else h_ND  # type: ignore[no-untyped-call]
        choice = self.router(mine_nD, batch, self._rows(batch))
        keys_nK = self._keys_E[choice.experts_NK]
        width = self.placement.slots + len(self.placement.shadows)
        route = Route(keys_nK, choice.kept_NK, width, self.ep, self.etp, self.read)
        token = _Dispatch.apply(mine_nD, route)  # type: ignore[no-untyped-call]
        shared_ND = None if self.shared is None else self.shared(h_ND)
        bank = self.experts.bank()
        banks = (bank,) if self.shadows is None else (bank, self.shadows.bank(bank))
        out_AD = _Experts.apply(token, bank.gate_up, bank.down, route, banks)  # type: ignore[no-untyped-call]
        out_ND: Tensor = _Weigh.apply(out_AD, choice.weights_NK, route)  # type: ignore[no-untyped-call]
        if cut:
            out_ND = _Together.apply(out_ND, h_ND.shape[0], self.tp)  # type: ignore[no-untyped-call]
        return out_ND if shared_ND is None else out_ND + shared_ND

    def _rows(self, batch: Batch) -> slice | None:
        """Which of the batch's rows are this rank's."""
        return None if self.tp.size == 1 else slice(*split(batch.rows, self.tp.size, self.tp.index))

    def prepare(self) -> None:
        """A step begins, with new weights: shadows are fetched before their first use."""
        if self.shadows is not None:
            self.shadows.restart()

    def settle(self) -> None:
        """Before the experts' gradients are reduced: what shadows have is added to their owners' gradients.

        Collective over ``ep``; one contribution to every slot of the experts, with shadows and without.
        """
        if self.shadows is not None:
            self.shadows.settle(self.experts.slots)
            return
        bank = self.experts.bank()
        for name, weight in (("gate_up", bank.gate_up), ("down", bank.down)):
            # Of the weight, since a slot may have no buffer before something comes.
            if name in bank.slots:
                nothing = torch.empty(0, dtype=torch.int64, device=weight.device)
                bank.slots[name].add_rows(nothing, weight.new_empty(0, *weight.shape[1:]))

    def place(self, placement: Placement) -> None:
        """From now on experts are where ``placement`` says; `exchange_slots` brings the weights there."""
        self.placement = placement
        self._keys_E = torch.tensor(slot_keys(placement, self.ep.index), device=self.ep.device)
        self.shadows = Shadows(placement, self.ep) if placement.shadows and self.ep.size > 1 else None


def _runs(rows: int, group: Group) -> list[int]:
    """Rows of each rank of a group that shares ``rows``."""
    edges = [split(rows, group.size, index) for index in range(group.size)]
    return [stop - start for start, stop in edges]


def _by_bank(route: Route, banks: tuple[Bank, ...] | list[Bank]) -> list[list[int]]:
    """Rows of each expert of each bank."""
    counts, begin = [], 0
    for bank in banks:
        end = begin + bank.gate_up.shape[0]
        counts.append(route.slot_counts[begin:end])
        begin = end
    return counts


def _parts(x_MD: Tensor, counts: list[list[int]]) -> list[Tensor]:
    """The rows of each bank."""
    return list(torch.split(x_MD, [sum(each) for each in counts]))


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
