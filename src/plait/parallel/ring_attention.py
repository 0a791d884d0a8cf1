"""Attention over sequences that the ranks of ``cp`` share: keys and values go round a ring, or are gathered.

Ring attention: Liu et al. 2023, arXiv:2310.01889; gathered keys: Llama 3, arXiv:2407.21783, 3.3.2. Either way a rank
keeps q, k and v of its own tokens, the output and its log-sum-exp: backward moves keys and values once more. They move
while the rank attends to what it has.

B samples, H query heads, K key/value heads, T tokens of this rank, c ranks, E width of queries and keys, V of values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol, final

import torch
from torch import Tensor

from plait.comm.group import Group, Pending
from plait.models.attention import Attend
from plait.models.batch import Batch
from plait.parallel.block_attention import Sum, wide
from plait.parallel.chunks import zigzag
from plait.parallel.zigzag import Flow, Into, View, in_order, out_of_order


class Wire(Protocol):
    """Messages between two ranks: `World.wire`."""

    def send(self, x: Tensor, to: int) -> None: ...

    def recv(self, out: Tensor, source: int) -> Pending: ...


def _pack(k: Tensor, v: Tensor) -> Tensor:
    """Both in one flat message."""
    return torch.cat([k.reshape(-1), v.reshape(-1)])


def _unpack(flat: Tensor, k: Tensor, v: Tensor) -> Into:
    """Views of ``flat``, the message of tensors like ``k`` and ``v``; of several messages: a dim of them in front."""
    first, second = torch.split(flat.view(-1, k.numel() + v.numel()), [k.numel(), v.numel()], dim=1)
    return torch.unflatten(first, 1, k.shape), torch.unflatten(second, 1, v.shape)


class _Across(torch.autograd.Function):
    """Attention across ``cp``. Saves q, k, v of this rank, the output, the LSE, and documents where there are any."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, attend: AcrossAttend) -> Tensor:
        ctx.attend = attend
        total = Sum(q, v.shape[-1])
        attend.collect(total, attend.view(q, documents), q, k, v)
        wide_out, lse = total.total()
        out = wide_out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse, documents)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, lse, documents = ctx.saved_tensors
        flow = Flow(grad=grad, q=q, out=out, lse=lse, grad_q=torch.zeros_like(q, dtype=wide(q.dtype)))
        grad_k, grad_v = ctx.attend.distribute(flow, ctx.attend.view(q, documents), k, v)
        return flow.grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), None, None


class AcrossAttend(Attend, ABC):
    """Attention of this rank's tokens to those of all ranks of ``group``; parts of samples as `context.take` cuts them.

    q [B, H, T, E], k and v [B, K, T, E] -> [B, H, T, E]. Keys and values may differ in width.
    """

    def __init__(self, window: int | None, group: Group) -> None:
        super().__init__(window)
        self.group = group

    def view(self, q_BHTE: Tensor, documents_BT: Tensor | None) -> View:
        """What this rank's queries see; ``documents``: of the whole samples."""
        tokens, width = q_BHTE.shape[2:]
        return View(group=self.group, tokens=tokens, width=width, window=self.window, documents_BT=documents_BT)

    def forward(self, q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, batch: Batch) -> Tensor:
        documents = batch.documents_BT
        if documents is not None:
            documents = in_order(self.group.all_gather(documents[None].contiguous()).wait(), 2)
        out: Tensor = _Across.apply(q_BHTE, k_BKTE, v_BKTE, documents, self)  # type: ignore[no-untyped-call]
        return out

    @abstractmethod
    def collect(self, total: Sum, view: View, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Add to ``total`` what this rank's queries see of every rank's keys."""

    @abstractmethod
    def distribute(self, flow: Flow, view: View, k: Tensor, v: Tensor) -> Into:
        """Backward of `collect`: the gradients of this rank's keys and values, summed over every rank's queries."""


@final
class RingAttend(AcrossAttend):
    """Each rank passes keys and values on to the next, c-1 times; in backward their gradients follow one step behind.

    ``wire`` joins this rank with its neighbours in the ring.
    """

    def __init__(self, window: int | None, group: Group, wire: Wire) -> None:
        super().__init__(window, group)
        self._wire = wire

    def _shift(self, x: Tensor, what: str) -> Pending:
        """Start to send ``x`` to the next rank and to receive the like from the one before."""
        group, book = self.group, self.group.book
        following, before = (group.ranks[(group.index + way) % group.size] for way in (1, -1))
        book.ledger.add(group.axis, "send", book.phase, group.size, x.nbytes)
        # Neighbours start at opposite ends: NCCL runs the messages of two ranks in order, and ranks that all send
        # first would wait for each other for ever.
        if group.index % 2 == 0:
            self._wire.send(x, following)
        doing, book.doing = book.doing, f"{what} of context rank {(group.index - 1) % group.size} in {book.doing}"
        pending = self._wire.recv(torch.empty_like(x), before)
        book.doing = doing
        if group.index % 2 == 1:
            self._wire.send(x, following)
        return pending

    def collect(self, total: Sum, view: View, q: Tensor, k: Tensor, v: Tensor) -> None:
        size, index = self.group.size, self.group.index
        message = _pack(k, v)
        for step in range(size):
            arriving = self._shift(message, KEYS) if step + 1 < size else None
            # The rank's own come first and show each query itself: no later block meets a query that has seen nothing.
            keys, values = (k, v) if step == 0 else (x[0] for x in _unpack(message, k, v))
            view.add(total, q, keys, values, zigzag(size, (index - step) % size), local=step == 0)
            message = message if arriving is None else arriving.wait()

    def distribute(self, flow: Flow, view: View, k: Tensor, v: Tensor) -> Into:
        size, index = self.group.size, self.group.index
        message = _pack(k, v)
        own = torch.zeros_like(message, dtype=flow.grad_q.dtype)
        returning: Pending | None = None
        for step in range(size):
            arriving = self._shift(message, KEYS) if step + 1 < size else None
            keys, values = (x[0] for x in _unpack(message, k, v))
            grads = own if step == 0 else torch.zeros_like(own)
            into = _unpack(grads, k, v)
            chunks = zigzag(size, (index - step) % size)
            view.add_backward(flow, keys, values, chunks, (into[0][0], into[1][0]), local=step == 0)
            if step > 0:
                # What the ranks before this one have found for the same keys.
                grads = grads if returning is None else grads.add_(returning.wait())
                returning = self._shift(grads, GRADIENTS)
            message = message if arriving is None else arriving.wait()
        if returning is not None:
            own += returning.wait()
        grad_k, grad_v = _unpack(own, k, v)
        return grad_k[0], grad_v[0]


KEYS = "the keys and values"
GRADIENTS = "the gradients of keys and values"


@final
class GatherAttend(AcrossAttend):
    """Every rank gathers all keys and values, while it attends to its own; gradients are reduced and scattered."""

    def collect(self, total: Sum, view: View, q: Tensor, k: Tensor, v: Tensor) -> None:
        gathering = self.group.all_gather(_pack(k, v))
        view.add(total, q, k, v, view.queries, local=True)
        keys, values = (in_order(parts, 3) for parts in _unpack(gathering.wait(), k, v))
        view.add(total, q, keys, values, range(2 * self.group.size), local=False)

    def distribute(self, flow: Flow, view: View, k: Tensor, v: Tensor) -> Into:
        gathering = self.group.all_gather(_pack(k, v))
        dtype = flow.grad_q.dtype
        own = torch.zeros_like(k, dtype=dtype), torch.zeros_like(v, dtype=dtype)
        view.add_backward(flow, k, v, view.queries, own, local=True)
        keys, values = (in_order(parts, 3) for parts in _unpack(gathering.wait(), k, v))
        others = torch.zeros_like(keys, dtype=dtype), torch.zeros_like(values, dtype=dtype)
        view.add_backward(flow, keys, values, range(2 * self.group.size), others, local=False)
        parts = [out_of_order(grad, self.group.size, 2).flatten(1) for grad in others]
        summed = self.group.reduce_scatter(torch.cat(parts, 1).flatten()).wait()
        for grad, more in zip(own, _unpack(summed, k, v), strict=True):
            grad += more[0]
        return own
