"""Reducers that send less than the gradients: half precision, top-k, and low rank (PowerSGD).

The last two send a part and keep the rest, which they add to the next step's gradient (error feedback; Karimireddy et
al. 2019, arXiv:1901.09847). What is kept is each rank's own: a run that goes on under the same plan has it again
(`Reducer.carried`), under another plan it begins with none.

Whatever a rank chooses to send depends on one tensor at a time, never on its bucket: ranks along other axes that hold
a copy of the same tensor (with the same gradient, in another bucket) choose alike, so the copies stay equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from plait.comm.group import Group, Pending
from plait.core.compression import Compression
from plait.core.errors import PlanError
from plait.parallel.reducer import Exact, Reducer, padded, same_memory

Layout = Callable[[int], Sequence[tuple[int, tuple[int, ...]]]]
"""Key of a bucket -> (offset, shape) of every tensor in it; what no tensor covers is padding, zero on all ranks."""
Factory = Callable[[Group, Layout], Reducer]


def parse(text: str) -> Factory:
    """What makes the reducer of ``plan.compress`` for a group of data ranks; PlanError as `Compression.parse`."""
    asked = Compression.parse(text)

    def make(group: Group, layout: Layout) -> Reducer:
        # A group of one sends nothing: there is nothing to save, and so no reason to lose anything.
        if asked.kind == "none" or group.size == 1:
            return Exact(group)
        if asked.kind == "half":
            return Half(group)
        if asked.kind == "topk":
            return TopK(group, layout, share=asked.share)
        return PowerSGD(group, layout, rank=asked.rank)

    return make


@final
class Half(Reducer):
    """bf16 on the wire, sums in fp32: every summand is rounded once, and of an all-reduce the sum once more.

    bf16 in every precision: its range is fp32's. fp16 would overflow in sums of gradients that a loss scale has brought
    close to its largest number.
    """

    def __init__(self, group: Group) -> None:
        self._group = group

    def _summed(self, flat: Tensor, out: Tensor) -> Callable[[], Tensor]:
        """Start to sum this rank's part of ``flat`` [size * n] into ``out`` fp32 [n]."""
        terms = self._group.all_to_all(flat.to(torch.bfloat16))

        def finish() -> Tensor:
            first, *rest = terms.wait().view(self._group.size, -1)
            out.copy_(first)
            for term in rest:
                out.add_(term)
            return out

        return finish

    def all_reduce(self, key: int, flat: Tensor) -> Pending:
        group, length = self._group, flat.numel()
        whole = padded(flat, group.size)
        finish = self._summed(whole, whole.new_empty(whole.numel() // group.size))
        return Pending(lambda: flat.copy_(group.all_gather(finish().to(torch.bfloat16)).wait()[:length]))

    def reduce_scatter(self, key: int, flat: Tensor, out: Tensor) -> Pending:
        return Pending(self._summed(flat, out))


class _Feedback(Reducer):
    """Every rank sends a part of (gradient + what it has kept), and all ranks get all parts' sum."""

    def __init__(self, group: Group, layout: Layout) -> None:
        self._group = group
        self._layout = layout
        self._kept: dict[int, Tensor] = {}

    def _total(self, key: int, flat: Tensor) -> Tensor:
        """fp32 [n]: what this rank has kept of the bucket, the gradient now added; its new contents are kept."""
        if key not in self._kept:
            self._kept[key] = torch.zeros_like(flat)
        return self._kept[key].add_(flat)

    def carried(self) -> dict[str, Tensor]:
        return {f"kept/{key}": kept for key, kept in self._kept.items()}

    def carry(self, state: Mapping[str, Tensor]) -> None:
        self._kept = {int(key): flat.clone() for key, flat in _under("kept/", state)}

    def reduce_scatter(self, key: int, flat: Tensor, out: Tensor) -> Pending:
        # Each rank gets all of every part that was sent: scattering would send no less.
        whole, begin = self.all_reduce(key, flat), self._group.index * out.numel()

        def finish() -> Tensor:
            mine = whole.wait()[begin : begin + out.numel()]
            return out if same_memory(out, mine) else out.copy_(mine)

        return Pending(finish)


@final
class TopK(_Feedback):
    """The ``share`` of each tensor's elements that are largest in magnitude, as (index, value) pairs (Deep Gradient
    Compression; Lin et al. 2018, arXiv:1712.01887, algorithm 1).

    8 bytes an element sent, over an all-gather. Without the paper's momentum correction, which restates momentum SGD:
    Adam's moments are of the sums, the same on every rank.
    """

    def __init__(self, group: Group, layout: Layout, *, share: float) -> None:
        super().__init__(group, layout)
        self._share = share

    def all_reduce(self, key: int, flat: Tensor) -> Pending:
        if flat.numel() >= 2**31:
            raise PlanError(
                f"compress=topk: an index of 32 bits cannot name each of a bucket's {flat.numel()} gradients; "
                "what works: a larger tp or pp, or compress=half"
            )
        total = self._total(key, flat)
        index_K = torch.cat([self._largest(total, offset, math.prod(shape)) for offset, shape in self._layout(key)])
        pairs_2K = torch.stack([index_K.to(torch.int32), total[index_K].view(torch.int32)])
        total[index_K] = 0
        gathered = self._group.all_gather(pairs_2K)

        def finish() -> Tensor:
            flat.zero_()
            # In rank order, each index once a rank: the sums' bits are the same everywhere.
            for others_2K in gathered.wait().view(self._group.size, 2, -1):
                flat.index_add_(0, others_2K[0], others_2K[1].view(torch.float32))
            return flat

        return Pending(finish)

    def _largest(self, total: Tensor, offset: int, size: int) -> Tensor:
        count = min(size, math.ceil(self._share * size))
        magnitudes = total[offset : offset + size].abs()
        return magnitudes.topk(count, sorted=False).indices + offset


@dataclass(kw_only=True)
class _Matrices:
    """What of one bucket is approximated: matrices, B of one shape each (a tensor of experts holds several)."""

    places: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    """(offset, [B, M, N]) of each."""
    exact: list[slice] = field(default_factory=list)
    """The rest of the bucket: vectors, and matrices whose factors would be no smaller."""
    fresh: list[Tensor] = field(default_factory=list)
    """[B, N, R]: right factors to begin with."""
    right: list[Tensor] = field(default_factory=list)
    """[B, N, R]: those of the last step, from which the power iteration goes on."""


@final
class PowerSGD(_Feedback):
    """Matrices as products of two factors of ``rank`` columns (Vogels et al. 2019, arXiv:1905.13727, algorithms 1, 2).

    R(M + N) numbers are all-reduced for a matrix of M x N. One power iteration a step, warm-started.
    """

    def __init__(self, group: Group, layout: Layout, *, rank: int) -> None:
        super().__init__(group, layout)
        self._rank = rank
        self._matrices: dict[int, _Matrices] = {}

    def all_reduce(self, key: int, flat: Tensor) -> Pending:
        total = self._total(key, flat)
        if key not in self._matrices:
            self._matrices[key] = self._plan(key, flat)
        state = self._matrices[key]
        matrices = _views(total, state.places)
        lefts = [matrix_BMN @ right_BNR for matrix_BMN, right_BNR in zip(matrices, state.right, strict=True)]
        sent = torch.cat([*(left.reshape(-1) for left in lefts), *(total[part] for part in state.exact)])
        for part in state.exact:
            total[part] = 0
        first = self._group.all_reduce(sent)

        def finish() -> Tensor:
            first.wait()
            bases = [_basis(left_BMR) for left_BMR in _cut(sent, lefts)]
            rights = self._project(matrices, bases)
            for view, basis_BMR, right_BNR in zip(_views(flat, state.places), bases, rights, strict=True):
                torch.bmm(basis_BMR, right_BNR.mT, out=view)
            begin = sum(left.numel() for left in lefts)
            for part in state.exact:
                flat[part] = sent[begin : begin + part.stop - part.start]
                begin += part.stop - part.start
            # A column of zeros (of a gradient of zeros) would stay one for ever.
            pairs = zip(rights, state.fresh, strict=True)
            state.right = [torch.where(right.any(1, keepdim=True), right, fresh) for right, fresh in pairs]
            return flat

        return Pending(finish)

    def carried(self) -> dict[str, Tensor]:
        """Also the right factors, from which the power iteration goes on."""
        rights = {
            f"right/{key}/{index}": right
            for key, state in self._matrices.items()
            for index, right in enumerate(state.right)
        }
        return super().carried() | rights

    def carry(self, state: Mapping[str, Tensor]) -> None:
        super().carry(state)
        self._matrices = {key: self._plan(key, kept) for key, kept in self._kept.items()}
        for name, right in _under("right/", state):
            key, _, index = name.partition("/")
            matrices = self._matrices[int(key)]
            matrices.right = [*matrices.right]  # apart from the fresh ones
            matrices.right[int(index)] = right.view_as(matrices.right[int(index)]).clone()

    def _project(self, matrices: list[Tensor], bases: list[Tensor]) -> list[Tensor]:
        """[B, N, R] of each: the sum over ranks of matrix^T basis. What the basis does not span stays in the matrix."""
        rights = [matrix_BMN.mT @ basis_BMR for matrix_BMN, basis_BMR in zip(matrices, bases, strict=True)]
        for matrix_BMN, basis_BMR, right_BNR in zip(matrices, bases, rights, strict=True):
            matrix_BMN.baddbmm_(basis_BMR, right_BNR.mT, alpha=-1)
        if not rights:
            return []
        return _cut(self._group.all_reduce(torch.cat([right.reshape(-1) for right in rights])).wait(), rights)

    def _plan(self, key: int, flat: Tensor) -> _Matrices:
        state, end = _Matrices(), 0
        for offset, shape in sorted(self._layout(key)):
            if len(shape) < 2 or self._rank * (shape[-2] + shape[-1]) >= shape[-2] * shape[-1]:
                continue
            if end < offset:
                state.exact.append(slice(end, offset))
            batch = math.prod(shape[:-2])
            state.places.append((offset, (batch, *shape[-2:])))
            end = offset + math.prod(shape)
            # The same for all matrices of a shape: copies of a tensor lie in buckets of other keys on other ranks.
            start_NR = torch.randn(shape[-1], self._rank, generator=torch.Generator().manual_seed(0))
            state.fresh.append(start_NR.to(flat.device).expand(batch, -1, -1))
        if end < flat.numel():
            state.exact.append(slice(end, flat.numel()))
        state.right = state.fresh
        return state


def _under(prefix: str, state: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    return [(name.removeprefix(prefix), value) for name, value in state.items() if name.startswith(prefix)]


def _cut(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The beginning of ``flat`` as tensors of the shapes of ``like``, one after the other."""
    places, begin = [], 0
    for tensor in like:
        places.append((begin, tuple(tensor.shape)))
        begin += tensor.numel()
    return _views(flat, places)


def _views(flat: Tensor, places: Sequence[tuple[int, tuple[int, ...]]]) -> list[Tensor]:
    return [flat[offset : offset + math.prod(shape)].view(shape) for offset, shape in places]


def _basis(left_BMR: Tensor) -> Tensor:
    """Orthonormal columns that span those of each matrix; of a matrix of zeros, unit vectors."""
    basis: Tensor = torch.linalg.qr(left_BMR).Q
    return basis
