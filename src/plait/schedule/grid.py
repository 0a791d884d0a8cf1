"""A schedule as a picture: one row a rank, one column a slot of time."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from plait.core.errors import ScheduleError
from plait.schedule.ir import COMPUTE_KINDS, Action, Kind, Schedule
from plait.schedule.order import run

WIDTH = 160
"""Columns of text that a picture stays within."""
IDLE = "."
ONGOING = "="


@dataclass(frozen=True, kw_only=True)
class _Cell:
    text: str
    start: int
    slots: int
    marked: bool


def grid(
    schedule: Schedule,
    *,
    mark: Collection[Action] | None = None,
    costs: Mapping[Kind, int] | None = None,
    width: int = WIDTH,
) -> str:
    """Draw ``schedule``, each action as early as its needs allow; also schedules that are broken or get stuck.

    ``costs`` gives the slots of `Kind.F`, `Kind.B` and `Kind.W` (1 each by default). Idle slots are ``.``, the later
    slots of a longer action ``=``. Communication takes no slot. Actions in ``mark`` are drawn ``>>1B3<<`` (those of
    them that the schedule lacks at the end of the row, as ``missing``); where the picture is wider than ``width``
    columns of text, the part around the first mark is shown, and a last line says how much is not.
    """
    marked = frozenset(mark or ())
    slots = {kind: 1 for kind in COMPUTE_KINDS} | dict(costs or {})
    rows = _cells(schedule, marked, slots)
    label = len(f"rank {len(rows) - 1}: ")
    total = max((cell.start + cell.slots for row in rows for cell in row), default=0)
    plain = max((len(cell.text) for row in rows for cell in row if not cell.marked), default=1)
    widths = [plain] * total
    for cell in (cell for row in rows for cell in row if cell.marked):
        widths[cell.start] = max(widths[cell.start], len(cell.text))
    focus = min((cell.start for row in rows for cell in row if cell.marked), default=0)
    first, stop = _window(widths, focus, width - label - 2 * len("... "))
    lines = []
    for rank, row in enumerate(rows):
        texts = [IDLE] * total
        for cell in row:
            texts[cell.start : cell.start + cell.slots] = [cell.text, *[ONGOING] * (cell.slots - 1)]
        shown = [text.ljust(widths[slot]) for slot, text in enumerate(texts)][first:stop]
        line = " ".join([*["..."] * (first > 0), *shown, *["..."] * (stop < total)])
        lines.append(f"{f'rank {rank}: ':>{label}}{line}".rstrip())
    if stop - first < total:
        lines.append(f"... slots {first} to {stop - 1} of {total} shown")
    return "\n".join(lines)


def refusal(schedule: Schedule, reason: str, *mark: Action) -> ScheduleError:
    """The error for ``reason``, with the grid and the offending actions marked in it."""
    return ScheduleError(f"schedule {schedule.name}: {reason}\n{grid(schedule, mark=mark)}")


def _cells(schedule: Schedule, marked: frozenset[Action], slots: Mapping[Kind, int]) -> list[list[_Cell]]:
    def length(action: Action) -> int:
        return slots.get(action.kind, 0) or (1 if action in marked else 0)

    def cell(action: Action, start: int) -> _Cell:
        text = f">>{action}<<" if action in marked else str(action)
        return _Cell(text=text, start=start, slots=length(action), marked=action in marked)

    progress = run(schedule, duration=length)
    present = {action for row in schedule.ranks for action in row}
    rows: list[list[_Cell]] = []
    for rank, spans in enumerate(progress.spans):
        row = [cell(span.action, int(span.start)) for span in spans]
        clock = max((cell.start + cell.slots for cell in row), default=0)
        for action in schedule.ranks[rank][len(spans) :]:  # what a stuck rank never reaches, one after the other
            row.append(cell(action, clock))
            clock += row[-1].slots
        for action in sorted(marked - present, key=str):
            if schedule.homes.get(action.stage) == rank:
                row.append(_Cell(text=f"missing >>{action}<<", start=clock, slots=1, marked=True))
                clock += 1
        rows.append([cell for cell in row if cell.slots])
    return rows


def _window(widths: list[int], focus: int, room: int) -> tuple[int, int]:
    """The slots to show: from 0 on if ``focus`` is among them, else with ``focus`` in the middle."""
    stop, used = 0, -1
    while stop < len(widths) and used + widths[stop] + 1 <= room:
        used += widths[stop] + 1
        stop += 1
    if focus < stop or not widths:
        return 0, stop
    first, stop, used = focus, focus + 1, widths[focus]
    while True:
        grown = used
        if stop < len(widths) and used + widths[stop] + 1 <= room:
            used += widths[stop] + 1
            stop += 1
        if first > 0 and used + widths[first - 1] + 1 <= room:
            used += widths[first - 1] + 1
            first -= 1
        if used == grown:
            return first, stop
