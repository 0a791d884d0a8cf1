"""A `Report` of `plait.train.compare` for people (tables) and for programs (plain values for JSON)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from plait.core.plan import Plan
from plait.train.compare import Check, Report, place_of

ROWS = 40
"""Longer lists of parameters are shown layer by layer, each by its worst."""
_BAR = 20


def show(report: Report, console: Console) -> None:
    """Print losses and norms, every parameter's error beside its tolerance, and what follows from them."""
    console.print(_scalars(report))
    console.print(_gradients(report))
    step, worst = report.worst
    place = f"worst parameter: [bold]{worst.name}[/] at step {step + 1}: {_text(worst)}"
    if report.passed:
        console.print(f"[green]equal[/] to one process within tolerance; {place}")
        return
    console.print(f"[red]NOT equal[/] to one process; {place}")
    found = report.divergence
    assert found is not None, "what did not pass diverges somewhere"
    console.print(f"{found.way} diverges first at [bold]{found.place}[/], in step {found.step + 1}; {_where(report)}")
    if found.names:
        console.print(f"its gradients that are off: {', '.join(found.names)}")
    for row in report.steps[found.step].checks:
        if not row.passed and row.name not in report.shapes:
            console.print(f"off as well: {row.name}: {_text(row)}")


def document(report: Report, plan: Plan) -> dict[str, object]:
    """The whole report; numbers that are not finite are None."""
    found = report.divergence
    step, worst = report.worst
    return {
        "passed": report.passed,
        "plan": str(plan),
        "precision": plan.precision,
        "steps": [
            {
                "step": row.step,
                "loss": _pair(row.losses, row.loss),
                "grad_norm": _pair(row.norms, row.norm),
                "hidden": [_plain(check) for check in row.hidden],
            }
            for row in report.steps
        ],
        "parameters": [
            {"name": name, "shape": list(shape), "steps": [_plain(checks[index]) for checks in _by_step(report)]}
            for index, (name, shape) in enumerate(report.shapes.items())
        ],
        "worst": {"step": step} | _plain(worst),
        "diverges": None
        if found is None
        else {"step": found.step, "way": found.way, "place": found.place, "parameters": list(found.names)},
    }


def _by_step(report: Report) -> list[tuple[Check, ...]]:
    return [row.gradients for row in report.steps]


def _plain(check: Check) -> dict[str, object]:
    error = check.error if math.isfinite(check.error) else None
    return {"name": check.name, "error": error, "tolerance": check.tolerance, "passed": check.passed}


def _pair(values: tuple[float, float], check: Check) -> Mapping[str, object]:
    plan, one = (value if math.isfinite(value) else None for value in values)
    return {"plan": plan, "one_process": one} | _plain(check)


def _scalars(report: Report) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("step", "loss: plan", "one process", "error", "norm: plan", "one process", "error", "tolerance"):
        table.add_column(name, justify="right")
    for row in report.steps:
        table.add_row(
            str(row.step + 1),
            f"{row.losses[0]:.6f}",
            f"{row.losses[1]:.6f}",
            _marked(row.loss),
            f"{row.norms[0]:.6f}",
            f"{row.norms[1]:.6f}",
            _marked(row.norm),
            f"{row.loss.tolerance:.1e}",
        )
    return table


def _gradients(report: Report) -> Table:
    """Errors of the first step, at the same weights, beside the largest of the later ones."""
    first, *later = _by_step(report)
    phases = [("step 1", first)]
    if later:
        name = "step 2" if len(later) == 1 else f"steps 2-{len(later) + 1}"
        phases.append((name, tuple(max(found, key=_severity) for found in zip(*later, strict=True))))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("gradient of", no_wrap=True)
    for name, _ in phases:
        table.add_column(name, justify="right", no_wrap=True)
        table.add_column("tolerance", justify="right", no_wrap=True)
    table.add_column("error / tolerance", width=_BAR + 1, no_wrap=True)
    for label, indices in _rows(report):
        worst = [max((checks[index] for index in indices), key=_severity) for _, checks in phases]
        cells = [cell for check in worst for cell in (_marked(check), Text(f"{check.tolerance:.1e}", style="dim"))]
        table.add_row(label, *cells, _bar(max(worst, key=_severity)))
    return table


def _severity(check: Check) -> float:
    return check.severity


def _rows(report: Report) -> list[tuple[str, Sequence[int]]]:
    """(label, indices of the parameters it stands for)."""
    names = list(report.shapes)
    if len(names) <= ROWS:
        return [(name, [index]) for index, name in enumerate(names)]
    groups: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        groups.setdefault(place_of(name), []).append(index)
    return [(f"{place} ({len(found)}, worst)", found) for place, found in groups.items()]


def _marked(check: Check) -> Text:
    return Text(f"{check.error:.1e}" + ("" if check.passed else " !"), style="" if check.passed else "bold red")


def _text(check: Check) -> str:
    return f"error {check.error:.1e}, tolerance {check.tolerance:.1e}"


def _bar(check: Check) -> Text:
    """Logarithmic: full at the tolerance, empty at a thousandth of it."""
    if not check.passed:
        return Text("█" * _BAR + "▶", style="red")
    share = 1 + math.log10(check.severity) / 3 if check.severity > 0 else 0.0
    return Text("█" * max(0, round(share * _BAR)), style="green")


def _where(report: Report) -> str:
    found = report.divergence
    if found is not None and found.way == "forward":
        return "activations before it agree"
    return "activations, and gradients nearer to the loss, agree"
