"""The zigzag cut of samples over ``cp``, and what a rank's queries see of keys from anywhere in the sample.

Samples are cut in 2c chunks of n tokens; rank i holds chunks i and 2c-1-i, one after the other, so that the causal mask
hides as much from every rank (ring-flash-attention's zigzag; Llama 3, arXiv:2407.21783, 3.3.2).
B samples, H query heads, K key/value heads, Q queries, S keys, E width of queries and keys, V of values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from plait.comm.group import Group
from plait.parallel.block_attention import Sum, attend, attend_backward
from plait.parallel.chunks import Piece, pieces, zigzag


def _held(size: int) -> list[int]:
    """The chunks of all ranks, one rank after the other."""
    return [chunk for index in range(size) for chunk in zigzag(size, index)]


def in_order(parts: Tensor, dim: int) -> Tensor:
    """The ranks' parts [c, ...], tokens in ``dim`` -> the whole [...] in sample order, tokens in ``dim - 1``."""
    held = _held(parts.shape[0])
    home = sorted(range(len(held)), key=held.__getitem__)
    chunks = torch.unflatten(parts, dim, (2, -1)).movedim(0, dim - 1).flatten(dim - 1, dim)
    index = torch.tensor(home, device=parts.device)
    return chunks.index_select(dim - 1, index).flatten(dim - 1, dim)


def out_of_order(whole: Tensor, size: int, dim: int) -> Tensor:
    """Inverse of `in_order` for ``size`` ranks: tokens in ``dim`` -> [c, ...], tokens in ``dim + 1``."""
    index = torch.tensor(_held(size), device=whole.device)
    chunks = torch.unflatten(torch.unflatten(whole, dim, (2 * size, -1)).index_select(dim, index), dim, (size, 2))
    return chunks.movedim(dim, 0).flatten(dim + 1, dim + 2)


Into = tuple[Tensor, Tensor]
"""Gradients of keys and values that are being summed."""


@dataclass(frozen=True, kw_only=True)
class Flow:
    """What backward knows of this rank's queries, and the gradient it sums for them."""

    grad: Tensor
    q: Tensor
    out: Tensor
    lse: Tensor
    grad_q: Tensor


@final
class View:
    """What this rank's queries see of keys from anywhere in the sample, and the attention over them."""

    def __init__(
        self, *, group: Group, tokens: int, width: int, window: int | None, documents_BT: Tensor | None
    ) -> None:
        size = group.size
        self.queries = zigzag(size, group.index)
        self.chunk = tokens // 2
        self._window = tokens * size if window is None else window
        self._scale = 1 / math.sqrt(width)
        self._documents = None if documents_BT is None else torch.unflatten(documents_BT, 1, (2 * size, self.chunk))

    def _pieces(self, keys: Sequence[int], local: bool) -> list[Piece]:
        packed = self._documents is not None
        return pieces(self.queries, keys, self.chunk, window=self._window, packed=packed, local=local)

    def _seen(self, piece: Piece, keys: Sequence[int], device: torch.device) -> Tensor | None:
        """bool [1 or B, 1, Q, S]: which keys the queries of a piece see."""
        if not piece.masked:
            return None
        within = torch.arange(self.chunk, device=device)
        query, key = (
            torch.cat([chunk * self.chunk + within for chunk in chunks])[part]
            for chunks, part in ((self.queries, piece.rows), (keys, piece.columns))
        )
        behind = query[:, None] - key
        seen = ((behind >= 0) & (behind < self._window))[None, None]
        if self._documents is None:
            return seen
        of_query, of_key = (
            self._documents[:, list(chunks)].flatten(1)[:, part]
            for chunks, part in ((self.queries, piece.rows), (keys, piece.columns))
        )
        return seen & (of_query[:, None, :, None] == of_key[:, None, None, :])

    def add(self, total: Sum, q: Tensor, k: Tensor, v: Tensor, keys: Sequence[int], *, local: bool) -> None:
        """Add to ``total`` what the queries see of the chunks ``keys``, which lie in ``k`` and ``v`` one after the
        other; of the rank's own alone, or without them (see `pieces`)."""
        for piece in self._pieces(keys, local):
            out, lse = attend(
                q[:, :, piece.rows],
                k[:, :, piece.columns],
                v[:, :, piece.columns],
                self._seen(piece, keys, q.device),
                causal=piece.causal,
                scale=self._scale,
            )
            total.add(piece.rows, out, lse)

    def add_backward(self, flow: Flow, k: Tensor, v: Tensor, keys: Sequence[int], into: Into, *, local: bool) -> None:
        """Backward of `add`: adds to ``flow.grad_q`` and to ``into``, the fp32 gradients of ``k`` and ``v``."""
        for piece in self._pieces(keys, local):
            rows, columns = piece.rows, piece.columns
            found = attend_backward(
                flow.grad[:, :, rows],
                flow.q[:, :, rows],
                k[:, :, columns],
                v[:, :, columns],
                flow.out[:, :, rows],
                flow.lse[:, :, rows],
                self._seen(piece, keys, k.device),
                causal=piece.causal,
                scale=self._scale,
            )
            flow.grad_q[:, :, rows].add_(found[0])
            into[0][:, :, columns].add_(found[1])
            into[1][:, :, columns].add_(found[2])
