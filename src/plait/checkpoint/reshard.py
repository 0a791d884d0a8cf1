"""Boxes between layouts: what one stored block gives to another. Pure arithmetic on `Box`, no tensors.

A box is a (start, stop) for each dim, so ``()`` is the box of a scalar and holds one element. The flat ranges that
ZeRO cuts out of a buffer are no boxes; `flat_to_boxes` decomposes them, so that stored weights know boxes alone and any
plan can read what any other has written.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

from plait.core.errors import WeightsError
from plait.core.shard import Box


def volume(box: Box) -> int:
    """Number of elements in ``box``."""
    return math.prod(stop - start for start, stop in box)


def intersect(a: Box, b: Box) -> Box | None:
    """The elements of both boxes, or None where they share none; both are boxes of one tensor."""
    common = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return common if all(start < stop for start, stop in common) else None


def relative(box: Box, inside: Box) -> Box:
    """``box`` in the coordinates of a tensor that holds ``inside``; ValueError where it sticks out."""
    if any(start < low or stop > high for (start, stop), (low, high) in zip(box, inside, strict=True)):
        raise ValueError(f"box {box} is not inside {inside}")
    return tuple((start - low, stop - low) for (start, stop), (low, _) in zip(box, inside, strict=True))


def flat_to_boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Row-major elements ``[start, stop)`` of a tensor of ``shape`` as boxes, in the order of the flat range.

    Each box is a contiguous run of the flat range, so that the boxes, each read row-major, concatenate to it. There
    are at most ``2 * dims - 1``: whole rows, and at either end the same for a part of a row.
    """
    size = math.prod(shape)
    if not 0 <= start <= stop <= size:
        raise ValueError(f"flat range [{start}, {stop}) is not inside the {size} elements of shape {shape}")
    if start == stop:
        return []
    if not shape:
        return [()]
    row = size // shape[0]
    first, last = -(-start // row), stop // row
    if first > last:  # both ends inside one row
        return _row(shape, last, start - last * row, stop - last * row)
    boxes: list[Box] = []
    if start < first * row:
        boxes += _row(shape, first - 1, start - (first - 1) * row, row)
    if first < last:
        boxes.append(((first, last), *((0, dim) for dim in shape[1:])))
    if last * row < stop:
        boxes += _row(shape, last, 0, stop - last * row)
    return boxes


def _row(shape: tuple[int, ...], index: int, start: int, stop: int) -> list[Box]:
    return [((index, index + 1), *box) for box in flat_to_boxes(shape[1:], start, stop)]


def cover(wanted: Box, pieces: Sequence[Box]) -> list[tuple[int, Box]]:
    """Which piece gives which part of ``wanted``: (index into ``pieces``, part in the whole tensor's coordinates).

    The parts are disjoint and together are ``wanted``; WeightsError where an element is in no piece, or in two.
    """
    common = ((index, intersect(wanted, piece)) for index, piece in enumerate(pieces))
    parts = [(index, part) for index, part in common if part is not None]
    twice = _overlap(parts)
    if twice is not None:
        a, b = twice
        raise WeightsError(f"pieces {pieces[a]} and {pieces[b]} both hold elements of box {wanted}")
    found, needed = sum(volume(part) for _, part in parts), volume(wanted)
    if found < needed:
        raise WeightsError(f"{needed - found} of the {needed} elements of box {wanted} are in no piece")
    return parts


def _overlap(parts: Sequence[tuple[int, Box]]) -> tuple[int, int] | None:
    """The indices of two parts that share elements, if any; compares only those that meet in the first dim."""
    if len(parts) < 2:
        return None
    if not parts[0][1]:  # all hold the one element of a scalar
        return parts[0][0], parts[1][0]
    ordered = sorted(parts, key=lambda part: part[1][0])
    starts = [box[0][0] for _, box in ordered]
    for here, (index, box) in enumerate(ordered):
        until = bisect_left(starts, box[0][1], lo=here)
        for other, rival in ordered[here + 1 : until]:
            if intersect(box, rival) is not None:
                return index, other
    return None
