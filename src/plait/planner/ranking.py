"""The ranking of plans as a table that leaves out columns, not digits, where there is no room; and how amounts are
written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from plait.planner.prediction import Prediction
from plait.planner.why import GIB, Candidate

AXES: Final = ("tp", "cp", "ep", "dp", "pp")


def ranking(candidates: Sequence[Candidate]) -> RenderableType:
    """One row a plan with as many columns as the width has room for; its text in a row below."""
    return _Ranking(candidates)


class _Ranking:
    """Rich asks for it once the width is known: numbers are never cut, columns go instead."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self._candidates = candidates

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        left_out: list[str] = []
        for name in (None, *_DISPENSABLE):
            left_out += [name] if name is not None else []
            table = self._table([column for column in _COLUMNS if column not in left_out])
            if console.measure(table, options=options.update(width=1000)).maximum <= options.max_width:
                break
        yield table
        lines = Table.grid(padding=(0, 2))
        lines.add_column(justify="right")
        lines.add_column(overflow="fold")
        for place, one in enumerate(self._candidates, 1):
            text = Text(str(one.plan) or "one rank, nothing cut")
            if _COMMUNICATION in left_out and (sent := _communication(one.prediction)):
                text.append(f"\nexposed + hidden: {sent}", style="dim")
            lines.add_row(str(place), text)
        yield lines

    def _table(self, columns: Sequence[str]) -> Table:
        table = Table(box=box.SIMPLE, pad_edge=False)
        for name in columns:
            table.add_column(name, justify="left" if name == _COMMUNICATION else "right", no_wrap=True)
        for place, one in enumerate(self._candidates, 1):
            table.add_row(*(_COLUMNS[name](place, one) for name in columns))
        return table


def _communication(time: Prediction) -> str:
    """``tp 12% + 3%, dp 0% + 9%`` of a mean rank's step."""
    words = []
    for axis in AXES:
        shares = []
        for side in ("exposed", "hidden"):
            total = sum(getattr(rank, side).get(axis, 0.0) for rank in time.ranks)
            shares.append(total / len(time.ranks) / time.step_time)
        if max(shares) >= 0.0005:
            words.append(f"{axis} {shares[0]:.1%} + {shares[1]:.1%}")
    return ", ".join(words)


_COMMUNICATION: Final = "communication exposed + hidden"
_COLUMNS: Final[Mapping[str, Callable[[int, Candidate], str]]] = {
    "": lambda place, one: str(place),
    "step": lambda place, one: seconds(one.prediction.step_time),
    "80% within": lambda place, one: f"{seconds(one.prediction.low)} - {seconds(one.prediction.high)}",
    "tokens/s/dev": lambda place, one: f"{one.prediction.tokens_per_s_per_device:,.0f}",
    "MFU": lambda place, one: "" if one.prediction.mfu is None else f"{one.prediction.mfu:.1%}",
    "fullest": lambda place, one: size(one.memory.fullest.peak),
    "emptiest": lambda place, one: size(one.memory.emptiest.peak),
    "bubble": lambda place, one: f"{one.prediction.bubble_rate:.1%}",
    _COMMUNICATION: lambda place, one: _communication(one.prediction),
}
_DISPENSABLE: Final = (_COMMUNICATION, "emptiest", "80% within", "bubble", "fullest", "tokens/s/dev")
"""Columns that go where there is no room, the first one first."""


def seconds(value: float) -> str:
    """``12.3 s``, ``4.56 ms``, ``0``."""
    if value <= 0:
        return "0"
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if value >= scale or unit == "us":
            number = value / scale
            return f"{number:.{2 if number < 10 else 1 if number < 100 else 0}f} {unit}"
    return "0"


def size(value: float) -> str:
    """``61.3 GiB``; ``512 MiB`` below one."""
    return f"{value / GIB:.1f} GiB" if value >= GIB else f"{value / 2**20:.0f} MiB"
