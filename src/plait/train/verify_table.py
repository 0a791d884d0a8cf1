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
"""Columns of a whole bar; narrow terminals get shorter ones, or none: names and numbers come first."""
_SHORTEST = 4


def show(report: Report, console: Console) -> None:
    """Print losses and norms, every parameter's errors beside their tolerances, and what follows from them."""
    console.print(_scalars(report))
    console.print(_parameters(report, console.width))
    step, what, worst = report.worst
    place = f"worst parameter: [bold]{worst.name}[/], its {what} at step {step + 1}: {_text(worst)}"
    if report.passed:
        console.print(f"[green]equal[/] to one process within tolerance; {place}", soft_wrap=True)
        return
    console.print(f"[red]NOT equal[/] to one process; {place}", soft_wrap=True)
    found = report.divergence
    assert found is not None, "what did not pass diverges somewhere"
    console.print(
        f"{found.way} diverges first at [bold]{found.place}[/], in step {found.step + 1}; {_where(found.way)}",
        soft_wrap=True,
    )
    if found.names:
        console.print(f"off there: {', '.join(found.names)}", soft_wrap=True)
    for row in report.steps[found.step].checks:
        if not row.passed and row.name not in report.shapes:
            console.print(f"off as well: {row.name}: {_text(row)}")


def document(report: Report, plan: Plan) -> dict[str, object]:
    """The whole report; numbers that are not finite are None."""
    found = report.divergence
    step, what, worst = report.worst
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
            {
                "name": name,
                "shape": list(shape),
                "gradient": [_plain(row.gradients[index]) for row in report.steps],
                "update": [_plain(row.updates[index]) for row in report.steps],
            }
            for index, (name, shape) in enumerate(report.shapes.items())
        ],
        "worst": {"step": step, "what": what} | _plain(worst),
        "diverges": None
        if found is None
        else {"step": found.step, "way": found.way, "place": found.place, "parameters": list(found.names)},
    }


def _gradients(report: Report) -> list[tuple[Check, ...]]:
    return [row.gradients for row in report.steps]


def _plain(check: Check) -> dict[str, object]:
    error = check.error if math.isfinite(check.error) else None
    return {"name": check.name, "error": error, "tolerance": check.tolerance, "passed": check.passed}


def _pair(values: tuple[float, float], check: Check) -> Mapping[str, object]:
    plan, one = (value if math.isfinite(value) else None for value in values)
    return {"plan": plan, "one_process": one} | _plain(check)


def _scalars(report: Report) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("step", "", "plan", "one process", "error", "tolerance"):
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    for row in report.steps:
        for number, values, check in ((str(row.step + 1), row.losses, row.loss), ("", row.norms, row.norm)):
            numbers = [f"{value:.7g}" for value in values]
            table.add_row(number, check.name, *numbers, _marked(check), Text(f"{check.tolerance:.1e}", style="dim"))
    return table


def _parameters(report: Report, width: int) -> Table:
    """The worst of all steps for every parameter: of its gradient, and of its update for given gradients."""
    columns = [
        (name, [max(found, key=_severity) for found in zip(*checks, strict=True)])
        for name, checks in (("gradient", _gradients(report)), ("update", [row.updates for row in report.steps]))
    ]
    rows = _rows(report)
    bar = min(_BAR, width - max(len(label) for label, _ in rows) - 25 * len(columns) - 5)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(f"worst of {len(report.steps)} steps" if len(report.steps) > 1 else "", no_wrap=True)
    for name, _ in columns:
        table.add_column(name, justify="right", no_wrap=True)
        table.add_column("tolerance", justify="right", no_wrap=True)
    if bar >= _SHORTEST:
        table.add_column("error (log scale)", width=bar + 1, no_wrap=True)
    for label, indices in rows:
        worst = [max((checks[index] for index in indices), key=_severity) for _, checks in columns]
        cells = [cell for check in worst for cell in (_marked(check), Text(f"{check.tolerance:.1e}", style="dim"))]
        table.add_row(label, *cells, *([_bar(max(worst, key=_severity), bar)] if bar >= _SHORTEST else []))
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


def _bar(check: Check, width: int) -> Text:
    """Logarithmic: full at the tolerance, empty at a thousandth of it."""
    if not check.passed:
        return Text("█" * width + "▶", style="red")
    share = 1 + math.log10(check.severity) / 3 if check.severity > 0 else 0.0
    return Text("█" * max(0, round(share * width)), style="green")


def _where(way: str) -> str:
    """What is right although something is wrong."""
    return {
        "forward": "activations before it agree",
        "backward": "activations, and gradients nearer to the loss, agree",
        "update": "activations and gradients agree",
    }[way]
