"""Where gradients go: `Slot`, one a parameter, a view of a flat fp32 buffer.

Fused layers write their weight gradient straight into the slot (no temporary, no addition by autograd), and say so, so
that the reduction of a bucket can start with its last contribution. `Deferred` holds weight-gradient work back for
schedules that split the backward (zero bubble, Qi et al. 2023, arXiv:2401.10241).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor


@final
class Deferred:
    """Weight-gradient work of one stage that waits for its W action; ``on`` while a B of a split backward runs."""

    def __init__(self) -> None:
        self.on = False
        self._work: list[Callable[[], None]] = []

    def add(self, work: Callable[[], None]) -> None:
        self._work.append(work)

    def take(self) -> list[Callable[[], None]]:
        """What has been held back since the last call."""
        work, self._work = self._work, []
        return work


@final
class Slot:
    """The gradient of one parameter on this rank, summed over microbatches in fp32.

    ``uses``: contributions a microbatch brings (2 for a tied weight whose both ends are here). ``grad`` is None while
    there is no buffer for it: ``coming``, which is called before each contribution, then gives one with `put`.
    """

    def __init__(
        self,
        grad: Tensor | None,
        uses: int,
        ready: Callable[[], None],
        deferred: Deferred,
        coming: Callable[[], None] | None = None,
    ) -> None:
        self._grad = grad
        self._coming = coming
        self._uses = uses
        self._ready = ready
        self._deferred = deferred
        self._empty = True
        self._armed = False
        self._left = 0

    @property
    def grad(self) -> Tensor:
        """fp32, of the parameter's shape."""
        assert self._grad is not None, "a gradient without a buffer"
        return self._grad

    def put(self, grad: Tensor | None) -> None:
        """Add up in ``grad`` from now on, whose values do not count; None: its buffer is gone."""
        self._grad = grad
        self.restart()

    def restart(self) -> None:
        """A new step: the next contribution overwrites what is there."""
        self._empty = True
        self._armed = False

    def arm(self) -> None:
        """The last microbatch's backward begins: after ``uses`` more contributions the gradient is whole."""
        self._armed = True
        self._left = self._uses

    def add_product(self, outer_NO: Tensor, inner_NI: Tensor) -> None:
        """Add ``outer^T @ inner`` [O, I]: the weight gradient of a linear layer."""
        if self._deferred.on:
            self._deferred.add(lambda: self._add_product(outer_NO, inner_NI))
        else:
            self._add_product(outer_NO, inner_NI)

    def _add_product(self, outer_NO: Tensor, inner_NI: Tensor) -> None:
        self._comes()
        if outer_NO.dtype != self.grad.dtype:
            self._add(outer_NO.t() @ inner_NI)
            return
        if self._empty:
            torch.mm(outer_NO.t(), inner_NI, out=self.grad)
        else:
            self.grad.addmm_(outer_NO.t(), inner_NI)
        self._came()

    def add_slices(self, parts: Sequence[tuple[int, Tensor, Tensor]]) -> None:
        """For each (index, outer [n, O], inner [n, I]) add ``outer^T @ inner`` to slice ``index`` of the gradient
        [E, O, I]: those of experts, of which some may have seen no row. One contribution altogether."""
        if self._deferred.on:
            self._deferred.add(lambda: self._add_slices(parts))
        else:
            self._add_slices(parts)

    def _add_slices(self, parts: Sequence[tuple[int, Tensor, Tensor]]) -> None:
        self._comes()
        fresh = set(range(self.grad.shape[0])) if self._empty else set()
        for index, outer_NO, inner_NI in parts:
            into = self.grad[index]
            if outer_NO.dtype != into.dtype:
                product = outer_NO.t() @ inner_NI
                _ = into.copy_(product) if index in fresh else into.add_(product)
            elif index in fresh:
                torch.mm(outer_NO.t(), inner_NI, out=into)
            else:
                into.addmm_(outer_NO.t(), inner_NI)
            fresh.discard(index)
        for index in fresh:
            self.grad[index].zero_()
        self._came()

    def add(self, grad: Tensor) -> None:
        """Add a gradient of the parameter's shape, of any dtype."""
        self._comes()
        self._add(grad)

    def _add(self, grad: Tensor) -> None:
        if self._empty:
            self.grad.copy_(grad)
        else:
            self.grad.add_(grad)
        self._came()

    def add_rows(self, index_N: Tensor, rows_ND: Tensor) -> None:
        """Add row n to row ``index[n]`` of the gradient: an embedding's."""
        self._comes()
        if self._empty:
            self.grad.zero_()
        self.grad.index_add_(0, index_N, rows_ND.to(self.grad.dtype))
        self._came()

    def close(self) -> None:
        """No contribution will come any more: a parameter that had none has gradient zero."""
        if self._empty:
            self.grad.zero_()
            self._empty = False

    def _comes(self) -> None:
        if self._coming is not None:
            self._coming()

    def _came(self) -> None:
        self._empty = False
        if self._armed:
            self._left -= 1
            if self._left == 0:
                self._ready()
            # More uses than were counted would be lost to a reduction that has begun.
            assert self._left >= 0, "a parameter got more gradient contributions than it has uses"
