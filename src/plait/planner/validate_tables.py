"""What ``plait validate`` prints of a `Report`."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from plait.planner.published_rows import GIB
from plait.planner.validate import Choice, Errors, Report, Section

_SHOWN = 10


def render(report: Report, console: Console) -> None:
    """Tables of errors by group, of rankings, of choices, and the worst configurations."""
    console.print(
        f"{report.path}: {report.rows} rows, {report.configurations} configurations"
        + (f", {len(report.refused)} not predicted" if report.refused else ""),
        soft_wrap=True,
    )
    for title, section, unit in (("step time", report.time, "s"), ("peak memory", report.memory, "GiB")):
        if section is not None:
            _section(title, section, unit, console)
    if report.spearman:
        table = _table("ranking within a source", "source", "n", "Spearman, step time", "Spearman, tokens/s/device")
        for source, (count, time, rate) in report.spearman.items():
            table.add_row(source, str(count), f"{time:.3f}", f"{rate:.3f}")
        console.print(table)
    if report.choices:
        _choices(report.choices, console)
    for note, count in sorted(report.approximated.items(), key=lambda pair: -pair[1]):
        console.print(f"{count} rows: {note}", soft_wrap=True)
    for name, reason in report.refused:
        console.print(f"not predicted: {name}: {reason}", soft_wrap=True, markup=False)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    return table


def _row(table: Table, name: str, errors: Errors) -> None:
    numbers = (errors.median, errors.p90, errors.most)
    table.add_row(name, str(errors.n), *(f"{number:.1%}" for number in numbers), f"{errors.bias:+.1%}")


def _section(title: str, section: Section, unit: str, console: Console) -> None:
    table = _table(f"{title}: predicted / measured - 1", "of", "n", "median", "p90", "most", "bias")
    _row(table, "all", section.all)
    for kind, groups in section.by.items():
        table.add_section()
        for name, errors in groups.items():
            _row(table, f"{kind} {name}", errors)
    console.print(table)
    if section.inside is not None:
        shares = ", ".join(f"{name} {share:.0%} of {count}" for name, (count, share) in section.covered.items())
        console.print(
            f"{section.inside:.0%} of the measurements lie in the predicted interval: {shares}", soft_wrap=True
        )
    worst = _table(f"{title}: the worst", "configuration", f"measured {unit}", f"predicted {unit}", "error")
    scale = GIB if unit == "GiB" else 1.0
    for miss in section.worst[:_SHOWN]:
        worst.add_row(miss.id, f"{miss.measured / scale:.4g}", f"{miss.predicted / scale:.4g}", f"{miss.error:+.1%}")
    console.print(worst)


def _choices(choices: Sequence[Choice], console: Console) -> None:
    right = sum(choice.regret <= 0 for choice in choices)
    near = sum(choice.regret <= 0.03 for choice in choices)
    console.print(
        f"{len(choices)} settings were measured under several plans: the predicted best is the best in {right}, "
        f"within 3% of it in {near}",
        soft_wrap=True,
    )
    table = _table("choices that cost most", "source", "model", "plans", "chosen", "best", "slower by")
    for choice in choices[:_SHOWN]:
        if choice.regret > 0:
            table.add_row(
                choice.source, choice.model, str(choice.plans), choice.chosen, choice.best, f"{choice.regret:.1%}"
            )
    if table.row_count:
        console.print(table)
