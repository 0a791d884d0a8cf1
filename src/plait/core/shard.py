"""`ShardSpec`: how one tensor lies on the mesh, and what its gradient still has to be summed over.

One noun for tensor parallelism, ZeRO, stored weights and imports. It can say two things that simpler ones cannot:

* a dim made of *sections* (q|k|v, gate|up): every shard holds its part of each section;
* a section cut into fewer *parts* than the axis has ranks (2 KV heads on tp=4: two parts, each held by two ranks, whose
  gradients are partial between the two).

For every parameter and axis the spec answers the one law of gradient reduction: sharded (nothing to sum), replicated
with the same gradient everywhere (nothing), or partial (sum).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

Box = tuple[tuple[int, int], ...]
"""A block of a tensor: (start, stop) for each dim."""


def split(size: int, parts: int, index: int) -> tuple[int, int]:
    """Range of part ``index`` when ``size`` is cut into ``parts``; the first ``size % parts`` are one longer."""
    if not 0 <= index < parts:
        raise IndexError(f"part {index} of {parts}")
    base, extra = divmod(size, parts)
    start = index * base + min(index, extra)
    return start, start + base + (1 if index < extra else 0)


def full(shape: tuple[int, ...]) -> Box:
    """The box of a whole tensor."""
    return tuple((0, size) for size in shape)


@dataclass(frozen=True, kw_only=True)
class Section:
    """A run of ``size`` indices of a dim, cut into ``parts`` equal-as-can-be slices (None: one a rank)."""

    size: int
    parts: int | None = None


@dataclass(frozen=True, kw_only=True)
class Cut:
    """``dim`` lies on mesh ``axis``, section by section.

    ``order``: the index that stands at each place of the dim when it is cut (None: its own), for experts that were
    moved; the dim is then one section.
    """

    axis: str
    dim: int
    sections: tuple[Section, ...]
    order: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Copies:
    """A block held by ``count`` neighbouring indices of ``axis``, from index ``first`` on.

    ``partial``: each holder has only its own contribution to the gradient, so that they are to be summed.
    """

    axis: str
    first: int
    count: int
    partial: bool


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A block that a rank holds: where it is in the whole tensor, where in the local one, who else holds it."""

    box: Box
    local: Box
    copies: tuple[Copies, ...]

    def owned(self, at: Mapping[str, int]) -> bool:
        """Whether coordinate ``at`` is the first of the block's holders: it counts and stores the block for all."""
        return all(at[copies.axis] == copies.first for copies in self.copies)


@dataclass(frozen=True, kw_only=True)
class ShardSpec:
    """The layout of a tensor of ``shape``; at most one `Cut` a dim and an axis.

    ``partial``: the axes on which each rank holds only its own contribution to the gradient of the *replicated* parts
    of this tensor, so that the whole gradient is their sum.
    """

    shape: tuple[int, ...]
    cuts: tuple[Cut, ...] = ()
    partial: frozenset[str] = frozenset()
    expert: bool = False
    """Whether it lies on the experts' fold of the ranks (``edp ep etp``) instead of the dense one (``dp cp tp``)."""

    def __post_init__(self) -> None:
        for cut in self.cuts:
            total = sum(section.size for section in cut.sections)
            if total != self.shape[cut.dim]:
                raise ValueError(f"sections of dim {cut.dim} sum to {total}, the dim has {self.shape[cut.dim]}")
        if len({cut.dim for cut in self.cuts}) < len(self.cuts) or len({cut.axis for cut in self.cuts}) < len(
            self.cuts
        ):
            raise ValueError("a dim and an axis may appear in one cut only")
        for cut in self.cuts:
            if cut.order is not None and (
                len(cut.sections) > 1 or sorted(cut.order) != list(range(self.shape[cut.dim]))
            ):
                raise ValueError(f"the order of dim {cut.dim} is no permutation of its {self.shape[cut.dim]} indices")

    def pieces(self, sizes: Mapping[str, int], at: Mapping[str, int]) -> tuple[Piece, ...]:
        """The blocks held at coordinate ``at`` of axes with ``sizes``, in the order of the local tensor."""
        runs: list[list[_Run]] = []
        for dim, size in enumerate(self.shape):
            cut = next((cut for cut in self.cuts if cut.dim == dim), None)
            runs.append([_Run(0, size, 0, None)] if cut is None else _runs(cut, sizes[cut.axis], at[cut.axis]))
        whole = tuple(
            Copies(axis=axis, first=0, count=size, partial=axis in self.partial)
            for axis, size in sizes.items()
            if size > 1 and axis not in self.axes
        )
        return tuple(
            Piece(
                box=tuple((run.start, run.stop) for run in combination),
                local=tuple((run.local, run.local + run.stop - run.start) for run in combination),
                copies=whole + tuple(run.copies for run in combination if run.copies is not None),
            )
            for combination in itertools.product(*runs)
        )

    @property
    def axes(self) -> frozenset[str]:
        """The axes that cut some dim."""
        return frozenset(cut.axis for cut in self.cuts)

    def local_shape(self, sizes: Mapping[str, int], at: Mapping[str, int]) -> tuple[int, ...]:
        """Shape of the tensor held at coordinate ``at``."""
        shape = list(self.shape)
        for cut in self.cuts:
            runs = _runs(cut, sizes[cut.axis], at[cut.axis])
            shape[cut.dim] = sum(run.stop - run.start for run in runs)
        return tuple(shape)

    def local_size(self, sizes: Mapping[str, int], at: Mapping[str, int]) -> int:
        """Number of elements held at coordinate ``at``."""
        return math.prod(self.local_shape(sizes, at))

    def text(self, name: str = "W", dims: tuple[str, ...] | None = None) -> str:
        """The notation of the docs: ``W[F_tp, D]``; a partial gradient shows as ``+tp`` behind it."""
        letters = dims or tuple(str(size) for size in self.shape)
        by_dim = {cut.dim: cut.axis for cut in self.cuts}
        inner = ", ".join(f"{letter}_{by_dim[dim]}" if dim in by_dim else letter for dim, letter in enumerate(letters))
        return f"{name}[{inner}]" + "".join(f" +{axis}" for axis in sorted(self.partial))


@dataclass(frozen=True)
class _Run:
    start: int
    stop: int
    local: int
    copies: Copies | None


def _runs(cut: Cut, ranks: int, index: int) -> list[_Run]:
    """The index ranges of one dim that rank ``index`` of ``ranks`` holds: one a section, empty ones left out."""
    runs: list[_Run] = []
    begin = local = 0
    if cut.order is not None:
        return _ordered_runs(cut.order, split(cut.sections[0].size, ranks, index))
    for section in cut.sections:
        parts = ranks if section.parts is None else section.parts
        if ranks % parts:
            raise ValueError(f"{parts} parts do not lie evenly on {cut.axis}={ranks}")
        copies = ranks // parts
        start, stop = split(section.size, parts, index // copies)
        first = index // copies * copies
        shared = Copies(axis=cut.axis, first=first, count=copies, partial=True) if copies > 1 else None
        # A dim cut into one section keeps its empty range, so that a tensor always has a piece.
        if stop > start or len(cut.sections) == 1:
            runs.append(_Run(begin + start, begin + stop, local, shared))
        local += stop - start
        begin += section.size
    return runs


def _ordered_runs(order: tuple[int, ...], places: tuple[int, int]) -> list[_Run]:
    """The runs of neighbouring indices that stand at ``places`` of ``order``."""
    runs: list[_Run] = []
    for local, index in enumerate(order[slice(*places)]):
        if runs and runs[-1].stop == index:
            runs[-1] = _Run(runs[-1].start, index + 1, runs[-1].local, None)
        else:
            runs.append(_Run(index, index + 1, local, None))
    return runs or [_Run(0, 0, 0, None)]
