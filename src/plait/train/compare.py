"""A cut run against one process: errors of loss, norm, activations, gradients, updates, and what rounding explains.

Both sides are at the same weights in every step (`plait.train.verify` brings the one process to the plan's). Errors are
relative: ``|a - b| / max(|b|, floor)`` in the Frobenius norm, b being the one process. The analysis of floor and
tolerances, with measurements, is docs/verification.md; in short:

* *Rounding.* Both sides add the same numbers in different orders. A gradient's relative rounding error grows with the
  roundings on its way, that is with the square root of the layers when they are independent, times the unit roundoff of
  what is stored between operations: 2^-24 in fp32, 2^-8 in bf16 (there against a reference in fp32). Loss and norm are
  means over many such errors. An update follows from given gradients in fp32, whatever the precision of the plan.
* *Conditioning.* Some points are worse: where a step blew up, rounding is amplified a hundredfold. This is measured:
  the one process does the step again with every weight off by up to one roundoff. That changes a gradient about as much
  as the roundings of a whole step do (measured: half to three times as much, 16 times at most), so a tolerance is at
  least `ROUNDINGS` times this change. A bug in the cut cannot raise it: the plan has no part in it.
* *Floor.* The gradient of some parameters is zero in exact arithmetic (a key bias under softmax without rotary
  positions), or nearly cancels; what is left is rounding error of the summands. The floor is `FLOOR` of a typical
  parameter's gradient, the global norm over the square root of the number of parameters. An update is floored by the
  rounding of the weights that it is the difference of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

FLOOR = 1e-3
"""Share of a typical parameter's gradient below which errors are no longer relative to the parameter's own."""
ROUNDOFF = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11, "fp8": 2.0**-4}
"""Unit roundoff of the numbers that layers hand on, by precision of the plan."""
MARGIN = {"fp32": 64.0, "bf16": 12.0, "fp16": 12.0, "fp8": 12.0}
"""Tolerance of gradients and activations, in roundoffs times the square root of (layers + 2)."""
SCALAR_MARGIN = {"fp32": 64.0, "bf16": 2.0, "fp16": 2.0, "fp8": 2.0}
"""Tolerance of loss and gradient norm, in roundoffs."""
ROUNDINGS = 16.0
"""Tolerance in units of what one rounding of every weight changes, where that is more."""
WIRE = 2.0**-7
"""Tolerance of gradients that travel in bf16: each term, and their sum, are rounded by up to 2^-9 of themselves; terms
may be larger than their sum."""
UPDATE = 2.0**-16
"""Tolerance of updates: 256 fp32 roundoffs."""
HEAD = "norm, head and loss"
"""Where a forward goes wrong whose last layer's output is still right."""
NORM = "the global gradient norm"


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one side had at one step.

    ``hidden``: activations at the end of the embedding and of each layer, in forward order: sum of squares, then sums
    under fixed random projections. By name, whole and in fp32: ``gradient`` before clipping, ``weight`` before the
    step, ``update`` that the optimizer added to it.
    """

    loss: float
    norm: float
    hidden: Mapping[str, Sequence[float]]
    gradient: Callable[[str], Tensor]
    weight: Callable[[str], Tensor]
    update: Callable[[str], Tensor]
    rounding: Mapping[str, float]
    """Parameter or place -> by how much (Frobenius) one rounding of every weight changes gradient or activations. Of
    the one process alone."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One comparison. A NaN on either side never passes."""

    name: str
    error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance

    @property
    def severity(self) -> float:
        """Error in units of its tolerance; infinite for NaN."""
        return math.inf if math.isnan(self.error) else self.error / self.tolerance


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One step of both sides. ``losses`` and ``norms``: (plan, one process)."""

    step: int
    losses: tuple[float, float]
    norms: tuple[float, float]
    loss: Check
    norm: Check
    hidden: tuple[Check, ...]
    gradients: tuple[Check, ...]
    updates: tuple[Check, ...]

    @property
    def checks(self) -> tuple[Check, ...]:
        return (self.loss, self.norm, *self.hidden, *self.gradients, *self.updates)

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """Where a run first goes wrong: ``way`` is forward, backward or update, ``names`` the parameters off there."""

    step: int
    way: str
    place: str
    names: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Report:
    """All steps; ``shapes`` are those of the compared parameters, in forward order."""

    steps: tuple[StepReport, ...]
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def passed(self) -> bool:
        return all(step.passed for step in self.steps)

    @property
    def worst(self) -> tuple[int, str, Check]:
        """(step, gradient or update, the worst parameter) of the first failing step, or of all steps if none fails."""
        failed = [step for step in self.steps if not step.passed][:1]
        rows = [
            (step.step, what, check)
            for step in failed or self.steps
            for what, checks in (("gradient", step.gradients), ("update", step.updates))
            for check in checks
        ]
        return max(rows, key=lambda row: row[2].severity)

    @property
    def divergence(self) -> Divergence | None:
        """The first place that goes wrong, in the order of computation; None when everything passed."""
        step = next((step for step in self.steps if not step.passed), None)
        if step is None:
            return None
        off = [check.name for check in step.gradients if not check.passed]
        # Forward runs first: activations that are off spoil the loss, and with it every gradient.
        broken = next((check.name for check in step.hidden if not check.passed), None)
        if broken is not None or not step.loss.passed:
            return _at(step.step, "forward", broken or HEAD, off)
        # Then backward, from the loss to the embedding: what is off nearest to the loss came first.
        if off:
            return _at(step.step, "backward", place_of(off[-1]), off)
        if not step.norm.passed:
            return _at(step.step, "backward", NORM, [])
        off = [check.name for check in step.updates if not check.passed]
        return _at(step.step, "update", place_of(off[0]), off)


def _at(step: int, way: str, place: str, off: Sequence[str]) -> Divergence:
    return Divergence(step=step, way=way, place=place, names=tuple(name for name in off if place_of(name) == place))


def place_of(name: str) -> str:
    """Where in the order of computation a parameter stands: ``embed``, ``layers.3``, or `HEAD`."""
    part = name.split(".")
    return ".".join(part[:2]) if part[0] == "layers" else "embed" if part[0] == "embed" else HEAD


def tolerance(precision: str, layers: int) -> float:
    """Largest relative error of gradients and activations that rounding explains."""
    return MARGIN[precision] * ROUNDOFF[precision] * math.sqrt(layers + 2)


def compare(
    reference: Iterable[Step],
    candidate: Iterable[Step],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    precision: str,
    layers: int,
    wire: float = 0.0,
) -> Report:
    """Hold ``candidate`` to ``reference``, step by step; ``shapes``: the parameters to compare, in forward order.

    ``wire``: largest relative error that summing gradients over data ranks makes on purpose.
    """
    limit, scalar = tolerance(precision, layers), SCALAR_MARGIN[precision] * ROUNDOFF[precision]
    steps = []
    for number, (one, cut) in enumerate(zip(reference, candidate, strict=True)):
        floor = FLOOR * one.norm / math.sqrt(len(shapes))
        # The norm changes by no more than the whole gradient does.
        spread = math.sqrt(sum(one.rounding.get(name, 0.0) ** 2 for name in shapes))
        steps.append(
            StepReport(
                step=number,
                losses=(cut.loss, one.loss),
                norms=(cut.norm, one.norm),
                loss=_check("loss", abs(cut.loss - one.loss), abs(one.loss), 0.0, scalar),
                norm=_check("gradient norm", abs(cut.norm - one.norm), one.norm, spread, max(scalar, wire)),
                hidden=tuple(_hidden(name, cut, one, limit) for name in one.hidden),
                gradients=tuple(_gradient(name, cut, one, floor, max(limit, wire)) for name in shapes),
                updates=tuple(_update(name, cut, one) for name in shapes),
            )
        )
    return Report(steps=tuple(steps), shapes=dict(shapes))


def hidden_distance(a: Sequence[float], b: Sequence[float]) -> float:
    """Estimate of the Frobenius distance of two activations, from their sums (see `Step`)."""
    # The projections' squared difference is in the mean that of the activations. A factor on everything shows in the
    # sum of squares, whatever the projections do.
    projected = math.sqrt(sum((x - y) ** 2 for x, y in zip(a[1:], b[1:], strict=True)) / (len(b) - 1))
    return max(projected, abs(math.sqrt(a[0]) - math.sqrt(b[0])) if a[0] >= 0 else math.nan)


def _hidden(name: str, cut: Step, one: Step, limit: float) -> Check:
    distance, size = hidden_distance(cut.hidden[name], one.hidden[name]), math.sqrt(one.hidden[name][0])
    return _check(name, distance, size, one.rounding.get(name, 0.0), limit)


def _gradient(name: str, cut: Step, one: Step, floor: float, limit: float) -> Check:
    whole = one.gradient(name).double()
    size = max(float(whole.norm()), floor)
    return _check(name, float((cut.gradient(name) - whole).norm()), size, one.rounding.get(name, 0.0), limit)


def _update(name: str, cut: Step, one: Step) -> Check:
    # A weight's new value is rounded, on either side: below that, an update has no digits to compare.
    floor = 4 * ROUNDOFF["fp32"] * float(one.weight(name).double().norm()) / UPDATE
    whole = one.update(name).double()
    return _check(name, float((cut.update(name) - whole).norm()), max(float(whole.norm()), floor), 0.0, UPDATE)


def _check(name: str, distance: float, size: float, rounding: float, limit: float) -> Check:
    """``distance`` relative to ``size``; the tolerance is ``limit``, or what the measured ``rounding`` explains."""
    explained = ROUNDINGS * _relative(rounding, size)
    tolerance = max(limit, explained) if math.isfinite(explained) else limit
    return Check(name=name, error=_relative(distance, size), tolerance=tolerance)


def _relative(difference: float, size: float) -> float:
    return 0.0 if difference == 0 else difference / size if size > 0 else math.inf
