"""Whole weights and gradients that come and go at ZeRO 2 and 3, step by step of a stage's actions. No torch.

What `plait.parallel.reduction.PerAction` and `plait.parallel.gathered.Gathered` do to a stage's buckets, in bytes. A
gradient's bucket is there from its first contribution on; it is reduced when all of its contributions are there, or
when backward has come to a layer before those of the bucket; the one reduced last goes when the next one is. Weights
are there for the unit that computes and for the one that comes next (in forward, behind the last: the one before).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from plait.models.config import ModelConfig
from plait.parallel.grouping import pack
from plait.planner.tensors import Tensor, tensors_of

Floats = NDArray[np.float64]
Cut = tuple[int, int, int, bool]
"""tp, ep, etp, sp."""
_BACK: Final = 1 << 30
"""Place of the last norm and the head: behind all layers."""
_FEW: Final = 6
"""Layers in a row that are looked at one by one where each has its own buckets: those in the middle are alike."""


@dataclass(frozen=True, kw_only=True)
class Unit:
    """What is gathered at once: the embedding, a layer, or the last norm with the head; ``count`` alike in a row."""

    part: str
    """``embed``, ``dense``, ``moe``, ``tail``, or ``none`` of a stage without layers."""
    steps: tuple[tuple[str, ...], ...]
    """In forward order: the modules whose gradients come in the backward of each step, in that order."""
    count: int


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """How data ranks share the state of one stage."""

    zero: int
    dense: bool
    """Whether several ranks share dense tensors."""
    expert: bool
    bucket: int
    """Bytes of gradients."""
    step: bool
    """Gathered once a step."""
    width: float
    """Bytes of a weight."""
    wire: tuple[float, float]
    """Bytes an element that lie beside a gradient while it is reduced: of dense tensors, of experts."""
    spike: float
    """Bytes an element of a bucket's largest tensor that lie beside it while what is sent is made."""
    light: bool
    """Whether a gradient itself goes as soon as what is sent has been made (the first of a step)."""
    split: bool
    """Whether backwards are split."""
    many: bool
    """Whether there are more than two backwards of a stage in a step."""


@dataclass(frozen=True, kw_only=True)
class Whole:
    """Bytes beside the shards, at each step of an action; backward's steps from the last on."""

    fore: Floats
    back: Floats
    """Of the first backward of a step."""
    again: Floats
    """Of a later one."""
    late: Floats
    """Of W, where the backward is split."""
    rest: float
    """Gradients that stay until the next action reduces some."""
    kept: float
    """Weights that stay between actions (``gather=step``)."""


@final
@dataclass(kw_only=True)
class _Bucket:
    """Gradients that are reduced together."""

    size: float
    wire: float
    """Beside it while it is reduced."""
    spike: float
    """Beside it while that is made."""
    first: int
    contributions: int
    open: bool = False
    """Whether it is reduced at the action's end alone: another stage here has gradients for it as well."""


@dataclass(frozen=True, kw_only=True)
class _Event:
    """A contribution to a gradient."""

    step: int
    place: int
    once: bool
    bucket: int
    late: bool


@lru_cache(maxsize=1 << 12)
def whole(model: ModelConfig, cut: Cut, units: tuple[Unit, ...], sharing: Sharing, both: str, tied: bool) -> Whole:
    """Of a stage of ``units``; ``both``: whether the ``stage``, or else the ``rank``, has both ends of a tied weight;
    ``tied``: the stage's head is one."""
    short, copies = _shortened(units, sharing)
    parts = tensors_of(model, *cut)
    rows = [(place, unit, _of(parts, unit.part, tied=tied)) for place, unit in _places(short)]
    buckets, events, steps = _events(rows, sharing, both=both, tied=model.tied)
    weights = [_weights(tensors, sharing) for _, _, tensors in rows]
    if both and sharing.step and tied:
        weights[-1] -= _weights(parts["tied"], sharing)  # there once
    every = sum(one * n for one, n in zip(weights, copies, strict=True))
    fore, back = _gathered(rows, weights, every if sharing.step else None)
    late = np.zeros(steps)
    if sharing.split:
        early = [one for one in events if not one.late]
        first, rest = _walk(early, buckets, steps, 0.0, armed=False)
        _, rest = _walk([one for one in events if one.late], buckets, steps, rest, armed=False)
        later, rest = _walk(early, buckets, steps, rest, armed=False)
        late, rest = _walk([one for one in events if one.late], buckets, steps, rest, armed=False)
        # Behind a B comes its W, as a rule: the weights that were needed last are still there.
        late += every if sharing.step else weights[min(1, len(weights) - 1) if rows[0][1].part == "embed" else 0]
    else:
        first, rest = _walk(events, buckets, steps, 0.0, armed=True, fresh=sharing.light)
        for _ in range(1 + sharing.many):
            later, rest = _walk(events, buckets, steps, rest, armed=True)
    lengths = [len(unit.steps) for _, unit, _ in rows]
    return Whole(
        fore=_stretched(fore, lengths, copies),
        back=_stretched(back + first, lengths[::-1], copies[::-1]),
        again=_stretched(back + later, lengths[::-1], copies[::-1]),
        late=_stretched(late, lengths[::-1], copies[::-1]),
        rest=rest,
        kept=every if sharing.step else 0.0,
    )


@lru_cache(maxsize=1 << 12)
def launched(model: ModelConfig, cut: Cut, units: tuple[Unit, ...], sharing: Sharing, both: str, tied: bool) -> Floats:
    """What lies beside gradients that are being summed, at each step of a stage's last backward (ZeRO 0 and 1): a
    bucket's sum starts with its last gradient, in the order of buckets (`plait.parallel.reduction.AtEnd`)."""
    parts = tensors_of(model, *cut)
    rows = [(place, unit, _of(parts, unit.part, tied=tied)) for place, unit in _places(units)]
    buckets, events, steps = _events(rows, sharing, both=both, tied=model.tied)
    found, total, next_ = np.zeros(steps), 0.0, 0
    waiting = [bucket.contributions for bucket in buckets]
    for one in events:
        waiting[one.bucket] -= 1
        while next_ < len(buckets) and waiting[next_] == 0:
            found[one.step] = max(found[one.step], total + buckets[next_].spike)
            total += buckets[next_].wire
            next_ += 1
        if one.place >= 0:  # what the embedding's backward works with is gone by then
            found[one.step] = max(found[one.step], total)
    return found


def _of(parts: Mapping[str, tuple[Tensor, ...]], part: str, *, tied: bool) -> tuple[Tensor, ...]:
    return parts.get(part, ()) + (parts["tied"] if part == "tail" and tied else ())


def _places(units: Sequence[Unit]) -> list[tuple[int, Unit]]:
    """One of each, with its place in the model."""
    found: list[tuple[int, Unit]] = []
    for unit in units:
        for _ in range(unit.count):
            ends = {"embed": -1, "tail": _BACK}
            found.append((ends.get(unit.part, len(found)), unit))
    return found


def _shortened(units: tuple[Unit, ...], sharing: Sharing) -> tuple[tuple[Unit, ...], list[int]]:
    """Fewer layers where those in the middle of a row are alike, and for how many each stands."""
    found, copies = [], []
    for unit in units:
        few = min(unit.count, _FEW) if sharing.zero == 3 else unit.count
        found.append(Unit(part=unit.part, steps=unit.steps, count=few))
        stands = [1] * few
        stands[few // 2] += unit.count - few
        copies += stands
    return tuple(found), copies


def _stretched(values: Floats, lengths: Sequence[int], copies: Sequence[int]) -> Floats:
    """``values`` [steps] of units of ``lengths`` steps, each unit as often as it stands for others."""
    if max(copies) == 1:
        return values
    parts, begin = [], 0
    for length, times in zip(lengths, copies, strict=True):
        parts.append(np.tile(values[begin : begin + length], times))
        begin += length
    return np.concatenate(parts)


def _shares(one: Tensor, sharing: Sharing) -> bool:
    return sharing.zero < 2 or (sharing.expert if one.expert else sharing.dense)


def _weights(tensors: Sequence[Tensor], sharing: Sharing) -> float:
    """Bytes of a unit's weights when they are whole."""
    if sharing.zero < 3:
        return 0.0
    return sum(one.size * (one.width or sharing.width) for one in tensors if _shares(one, sharing))


def _gathered(
    rows: Sequence[tuple[int, Unit, tuple[Tensor, ...]]], weights: Sequence[float], kept: float | None
) -> tuple[Floats, Floats]:
    """Whole weights at the steps of a forward, and of a backward; ``kept``: where all stay, how much they are."""
    lengths = [len(unit.steps) for _, unit, _ in rows]
    if kept is not None:
        total = np.full(sum(lengths), kept)
        return total, total
    fore, back = [], []
    for at, one in enumerate(weights):
        fore.append(one + (weights[at + 1] if at + 1 < len(weights) else weights[at - 1] if at else 0.0))
        if rows[at][1].part == "embed":
            back.append(weights[1] if len(weights) > 1 else one)  # not read: the first layer's are still there
        else:
            back.append(one + (weights[at - 1] if at and rows[at - 1][1].part != "embed" else 0.0))
    return np.repeat(fore, lengths), np.repeat(back[::-1], lengths[::-1])


def _events(
    rows: Sequence[tuple[int, Unit, tuple[Tensor, ...]]], sharing: Sharing, *, both: str, tied: bool
) -> tuple[list[_Bucket], list[_Event], int]:
    """Buckets, what comes into them in the order of backward, and how many steps there are; ``tied``: the model's
    embedding is its head."""
    held = [(place, one) for place, _, tensors in rows for one in tensors if _shares(one, sharing)]
    if both == "stage":
        held = [row for row in held if row[1].name != "head.weight"]
    held.reverse()
    # A tied embedding that is here with one of its ends is apart.
    ends = {"tokens.weight", "head.weight"} if tied and both != "stage" else set()
    kinds = [(*one.kind, one.name in ends, place if sharing.zero == 3 else 0) for place, one in held]
    groups = pack(list(zip(kinds, (4 * one.size for _, one in held), strict=True)), sharing.bucket)
    of = {(held[index][0], held[index][1].name): number for number, group in enumerate(groups) for index in group}
    buckets = []
    for group in groups:
        size = sum(held[index][1].size for index in group)
        wire = sharing.wire[held[group[0]][1].expert] * size
        first = min(held[index][0] for index in group)
        spike = sharing.spike * max(held[index][1].size for index in group)
        buckets.append(_Bucket(size=4.0 * size, wire=wire, spike=spike, first=first, contributions=0))
    events: list[_Event] = []
    step = 0
    for place, unit, tensors in reversed(rows):
        for modules in reversed(unit.steps):
            for one in (one for module in modules for one in tensors if one.name.startswith(module)):
                if not _shares(one, sharing):
                    continue
                end = bool(both) and one.name in ("head.weight", "tokens.weight")
                key = (-1, "tokens.weight") if end and both == "stage" else (place, one.name)
                if end and both == "rank":
                    buckets[of[key]].open, buckets[of[key]].first = True, -1
                # One slot serves both stages, and it waits for the first stage's W alone: that has no product.
                late = one.product and not (end and both == "rank")
                events.append(_Event(step=step, place=place, once=not end, bucket=of[key], late=late))
                buckets[of[key]].contributions += 1
            step += 1
    return buckets, events, step


def _walk(
    events: Sequence[_Event],
    buckets: Sequence[_Bucket],
    steps: int,
    before: float,
    *,
    armed: bool,
    fresh: bool = False,
) -> tuple[Floats, float]:
    """Bytes at each step of an action, and what is left of it; ``before``: what the action before has left; ``armed``:
    every bucket is known to get its gradients; ``fresh``: while they are summed they themselves are gone."""
    found = np.zeros(steps)
    order = sorted(range(len(buckets)), key=lambda number: -buckets[number].first)
    left = deque([number for number in order if armed and not buckets[number].open])
    waiting = [bucket.contributions for bucket in buckets]
    opened: dict[int, float] = {}
    under, held = before, 0.0

    def close(number: int, step: int) -> None:
        nonlocal under, held
        if number not in opened:
            opened[number] = buckets[number].size
            held += buckets[number].size
        found[step] = max(found[step], held + under + max(buckets[number].wire, buckets[number].spike))
        held -= opened.pop(number)
        under = (0.0 if fresh else buckets[number].size) + buckets[number].wire

    done = 0
    for one in events:
        # Between two contributions nothing changes.
        found[done : one.step] = np.maximum(found[done : one.step], held + under)
        done = one.step
        if one.once:
            while left and buckets[left[0]].first > one.place:
                close(left.popleft(), one.step)
            for number in [n for n in order if n in opened and buckets[n].first > one.place and not buckets[n].open]:
                close(number, one.step)
        if one.bucket not in opened:
            opened[one.bucket] = buckets[one.bucket].size
            held += opened[one.bucket]
        waiting[one.bucket] -= 1
        found[one.step] = max(found[one.step], held + under)
        while armed and left and left[0] in opened and waiting[left[0]] == 0:
            close(left.popleft(), one.step)
    found[done:] = np.maximum(found[done:], held + under)
    for number in [*left, *(n for n in order if n in opened and n not in left)]:
        close(number, steps - 1)
    return found, under
