"""A step's timeline as a picture: coloured rows for the terminal, and SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Final

from rich.text import Text

from plait.core.events import COMPUTE, Event

ROWS: Final = 32
"""Pipeline ranks that a picture shows; of more, evenly chosen ones with both ends."""
_COLOURS: Final = {"F": "#3b78b8", "B": "#2e9e77", "W": "#d9a441", "optimizer": "#8c6bb1", "all_reduce": "#c45a5a"}
_OTHER: Final = "#9a9a9a"
_NAMES: Final = {
    "F": "forward",
    "B": "backward",
    "W": "weight gradient",
    "optimizer": "optimizer",
    "all_reduce": "gradients",
}
_WIDTH, _ROW, _LABEL, _HEAD, _FOOT = 1200, 22, 64, 34, 26


def shown_ranks(count: int, most: int = ROWS) -> list[int]:
    """All ranks, or ``most`` of them with both ends."""
    if count <= most:
        return list(range(count))
    return sorted({round(index * (count - 1) / (most - 1)) for index in range(most)})


def _spans(events: Sequence[Event]) -> tuple[list[Event], float, float]:
    """What is drawn (compute, the optimizer, gradients), and the span of time."""
    drawn = [event for event in events if event.stream == COMPUTE or event.kind in _COLOURS]
    if not drawn:
        return [], 0.0, 1.0
    start, end = min(event.start for event in drawn), max(event.end for event in drawn)
    return drawn, start, max(end - start, 1e-12)


def terminal(events: Sequence[Event], *, width: int = 120) -> Text:
    """One row a pipeline rank, one cell a slice of time, in the colour of what took most of it; dots are idle."""
    drawn, origin, length = _spans(events)
    ranks = shown_ranks(1 + max((event.rank for event in drawn), default=0))
    label = len(f"rank {ranks[-1]} ")
    cells = max(10, width - label)
    text = Text()
    for rank in ranks:
        text.append(f"rank {rank} ".ljust(label))
        for kind in _cells([event for event in drawn if event.rank == rank], origin, length, cells):
            text.append(*(("·", "dim") if kind is None else (_letter(kind), _COLOURS.get(kind, _OTHER))))
        text.append("\n")
    present = dict.fromkeys(event.kind for event in drawn)
    text.append(" " * label)
    for kind in present:
        text.append(f"{_letter(kind)} {_NAMES.get(kind, kind)}   ", _COLOURS.get(kind, _OTHER))
    text.append(f"· idle   {length:.4g} s")
    return text


def _letter(kind: str) -> str:
    return {"optimizer": "o", "all_reduce": "g"}.get(kind, kind[0])


def _cells(events: Sequence[Event], origin: float, length: float, cells: int) -> list[str | None]:
    """The kind that takes most of each slice; None where more than half of it is idle."""
    share: list[dict[str, float]] = [{} for _ in range(cells)]
    for event in events:
        start, end = ((at - origin) / length * cells for at in (event.start, event.end))
        for cell in range(int(start), min(cells, int(end) + 1)):
            inside = min(end, cell + 1) - max(start, cell)
            if inside > 0:
                share[cell][event.kind] = share[cell].get(event.kind, 0.0) + inside
    return [max(held, key=held.__getitem__) if sum(held.values()) >= 0.5 else None for held in share]


def svg(events: Sequence[Event], *, title: str) -> str:
    """A picture of its own, without scripts or fonts to load: a rectangle an event, with its name where it fits."""
    drawn, origin, length = _spans(events)
    ranks = shown_ranks(1 + max((event.rank for event in drawn), default=0))
    rows: Mapping[int, int] = {rank: place for place, rank in enumerate(ranks)}
    height = _HEAD + _ROW * len(ranks) + _FOOT + 24
    scale = (_WIDTH - _LABEL - 12) / length
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="8" y="20" font-size="13" fill="#222222">{escape(title)}</text>',
    ]
    for rank, place in rows.items():
        y = _HEAD + _ROW * place
        out.append(f'<rect x="{_LABEL}" y="{y}" width="{_WIDTH - _LABEL - 12}" height="{_ROW - 3}" fill="#f0f0f0"/>')
        out.append(f'<text x="8" y="{y + 14}" fill="#222222">rank {rank}</text>')
    for event in drawn:
        if event.rank in rows:
            out += _box(event, _HEAD + _ROW * rows[event.rank], _LABEL + (event.start - origin) * scale, scale)
    out += _axis(length, scale, _HEAD + _ROW * len(ranks))
    x = float(_LABEL)
    for kind in dict.fromkeys(event.kind for event in drawn):
        y = height - 16
        name = _NAMES.get(kind, kind)
        out.append(f'<rect x="{x:.0f}" y="{y}" width="11" height="11" fill="{_COLOURS.get(kind, _OTHER)}"/>')
        out.append(f'<text x="{x + 16:.0f}" y="{y + 10}" fill="#222222">{escape(name)}</text>')
        x += 36 + 7 * len(name)
    return "\n".join([*out, "</svg>"]) + "\n"


def _box(event: Event, y: float, x: float, scale: float) -> list[str]:
    width = (event.end - event.start) * scale
    if width < 0.05:
        return []
    colour = _COLOURS.get(event.kind, _OTHER)
    tip = escape(f"{event.name}: {event.start:.6g} s to {event.end:.6g} s")
    # A thin line between neighbours where there is room for one.
    gap = 0.6 if width > 3 else 0.0
    shape = f'<rect x="{x:.2f}" y="{y}" width="{width - gap:.2f}" height="{_ROW - 3}" fill="{colour}">'
    out = [f"{shape}<title>{tip}</title></rect>"]
    if width > 6.2 * len(event.name) + 4:
        out.append(f'<text x="{x + 3:.2f}" y="{y + 14}" fill="#ffffff" font-size="10">{escape(event.name)}</text>')
    return out


def _axis(length: float, scale: float, y: float) -> list[str]:
    """Five ticks of time."""
    out = []
    for tick in range(6):
        at = length * tick / 5
        x = _LABEL + at * scale
        anchor = "end" if tick == 5 else "start" if tick == 0 else "middle"
        out.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y}" y2="{y + 5}" stroke="#666666"/>')
        out.append(f'<text x="{x:.1f}" y="{y + 17}" text-anchor="{anchor}" fill="#444444">{at:.4g} s</text>')
    return out
