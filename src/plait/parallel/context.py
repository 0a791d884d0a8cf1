"""Context parallel: the ranks of ``cp`` share every sample. What each holds of it, and how its attention sees the rest.

``ring`` and ``gather`` cut samples in zigzag (see `plait.parallel.zigzag`), so that causal attention costs every rank
the same. ``ulysses`` (Jacobs et al. 2023, arXiv:2309.14509) turns parts of the tokens into parts of the heads before
attention and back after it: every rank then attends over whole samples, whatever the cut, and a plain cut in contiguous
runs hands the tokens over in sample order without a permutation.
"""

from __future__ import annotations

import dataclasses
from typing import final

import torch
from torch import Tensor
from torch.nn import functional as F

from plait.comm.collectives import EXCHANGE, apply
from plait.comm.group import Group
from plait.core.errors import PlanError
from plait.models.attention import Attend
from plait.models.batch import IGNORE, Batch
from plait.parallel.chunks import kv_heads_of, padded, zigzag
from plait.parallel.ring_attention import GatherAttend, RingAttend, Wire

CONTEXTS = ("ring", "ulysses", "gather")
"""Values of ``plan.context``."""
PADDING_DOCUMENT = -1
"""Padding never attends to documents, nor they to it."""


def _columns(seq: int, size: int, index: int, context: str) -> list[tuple[int, int]]:
    """Ranges of a sample's columns that rank ``index`` holds, in its order."""
    if context == "ulysses":
        part = seq // size
        return [(index * part, (index + 1) * part)]
    chunk = seq // (2 * size)
    return [(one * chunk, (one + 1) * chunk) for one in zigzag(size, index)]


def order(seq: int, size: int, context: str) -> Tensor:
    """int64 [seq]: the index in the (padded) sample of each column of the ranks' parts, one rank after the other.

    So ``whole[order] = gathered`` puts gathered parts in sample order, and ``whole[order]`` is its inverse.
    """
    ranges = [one for index in range(size) for one in _columns(seq, size, index, context)]
    return torch.cat([torch.arange(*one) for one in ranges])


def take(batch: Batch, size: int, index: int, context: str, *, multiple: int = 1) -> Batch:
    """The part of a batch of whole samples that rank ``index`` of the ``size`` ranks of ``cp`` holds.

    Samples of any length: they are padded at their end (see `padded`) with tokens that carry no loss and are not
    ``real_BT``. No real token sees them: they come last, and have a document of their own where there are documents.
    Their position is 0, which every model has.
    """
    seq = batch.tokens_BT.shape[1]
    length = padded(seq, size, context, multiple)
    device = batch.tokens_BT.device
    index_T = torch.cat([torch.arange(*one, device=device) for one in _columns(length, size, index, context)])

    def part(columns_BT: Tensor, filler: int) -> Tensor:
        return F.pad(columns_BT, (0, length - seq), value=filler)[:, index_T]

    real, positions, documents = batch.real_BT, batch.positions_BT, batch.documents_BT
    if length > seq:
        real = torch.ones_like(batch.tokens_BT, dtype=torch.bool) if real is None else real
        positions = torch.arange(seq, device=device).expand_as(batch.tokens_BT) if positions is None else positions
    return dataclasses.replace(
        batch,
        tokens_BT=part(batch.tokens_BT, 0),
        targets_BT=part(batch.targets_BT, IGNORE),
        positions_BT=None if positions is None else part(positions, 0),
        documents_BT=None if documents is None else part(documents, PADDING_DOCUMENT),
        real_BT=None if real is None else part(real, False),
        index_T=index_T,
    )


def context_attend(context: str, attend: Attend, group: Group, wire: Wire) -> Attend:
    """What replaces ``attend`` where the ranks of ``group`` share the samples; ``attend`` itself on one rank."""
    if group.size == 1:
        return attend
    if context == "ulysses":
        return UlyssesAttend(attend, group)
    if context == "gather":
        return GatherAttend(attend.window, group)
    return RingAttend(attend.window, group, wire)


@final
class UlyssesAttend(Attend):
    """q [B, H, T, E], k and v [B, K, T, E] of this rank's tokens -> [B, H, T, E], through ``inner`` over whole samples.

    H divides by the number of ranks c. A rank attends with H/c heads and those of the K that they use: fewer than c are
    sent to several ranks.
    """

    def __init__(self, inner: Attend, group: Group) -> None:
        super().__init__(inner.window)
        self.inner = inner
        self.group = group

    def forward(self, q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, batch: Batch) -> Tensor:
        size, heads = self.group.size, q_BHTE.shape[1]
        if heads % size:
            works = [n for n in range(1, heads + 1) if heads % n == 0]
            raise PlanError(
                f"context=ulysses with cp={size}: {heads} attention heads of a rank do not divide by it; "
                f"what works: cp of {works}, or context=ring"
            )
        wanted = torch.tensor(kv_heads_of(heads, k_BKTE.shape[1], size), device=q_BHTE.device)
        k, v = ((x if len(wanted) == x.shape[1] else x.index_select(1, wanted)) for x in (k_BKTE, v_BKTE))
        q, k, v = self._to_heads(q_BHTE, k, v)
        out = self.inner(q, k, v, self._whole(batch))
        return self._to_tokens(out)

    def _whole(self, batch: Batch) -> Batch:
        """What ``inner`` reads of the batch of whole samples."""
        if batch.documents_BT is None:
            return batch
        parts = self.group.all_gather(batch.documents_BT[None].contiguous()).wait()
        return dataclasses.replace(batch, documents_BT=parts.transpose(0, 1).flatten(1))

    def _to_heads(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """[B, cH, T, E] each -> [B, H, cT, E], in one exchange."""
        size = self.group.size
        # A rank's part is [B, T, heads x width]: what comes from several ranks differs in T.
        parts = [torch.unflatten(x, 1, (size, -1)).permute(1, 0, 3, 2, 4).flatten(3) for x in tensors]
        received = apply(torch.cat(parts, 3), self.group, EXCHANGE)
        return tuple(
            torch.unflatten(part, 3, (-1, x.shape[3])).permute(1, 3, 0, 2, 4).flatten(2, 3)
            for part, x in zip(torch.split(received, [part.shape[3] for part in parts], 3), tensors, strict=True)
        )

    def _to_tokens(self, out: Tensor) -> Tensor:
        """[B, H, cT, E] -> [B, cH, T, E]."""
        parts = torch.unflatten(out, 2, (self.group.size, -1)).permute(2, 0, 3, 1, 4).contiguous()
        received = apply(parts, self.group, EXCHANGE)
        return received.permute(1, 0, 3, 2, 4).flatten(1, 2)
