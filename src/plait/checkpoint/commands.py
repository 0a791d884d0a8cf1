"""``plait checkpoint list|show|verify|prune DIR``: what `catalog` finds, printed; each returns the exit code.

DIR is one checkpoint, a folder of them, or a run folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from plait.checkpoint import catalog
from plait.core.errors import WeightsError


def list_(where: Path, *, as_json: bool = False) -> int:
    """Print every checkpoint in ``where``, from old to new. ConfigError where there is no such folder."""
    rows = catalog.list_(where)
    if as_json:
        print(json.dumps([catalog.as_json(row) for row in rows], indent=1))
        return 0
    if not rows:
        print(f"{where} holds no checkpoint")
        return 0
    head = ("checkpoint", "step", "created", "size", "files", "tensors", "")
    counts = [(str(row.step), row.created, _size(row.bytes), str(row.files), str(row.tensors)) for row in rows]
    _table(head, [(row.name, *count, row.trouble or "") for row, count in zip(rows, counts, strict=True)])
    return 0


def show(where: Path, *, as_json: bool = False, wanted: Mapping[str, tuple[int, ...]] | None = None) -> int:
    """Print the newest checkpoint in ``where`` in full; with ``wanted`` (tensor -> shape), what a run would load of it.

    Returns WeightsError's exit code where it would not load. ConfigError where there is no checkpoint.
    """
    found = catalog.show(where)
    fit = None if wanted is None else catalog.fit(Path(found.path), wanted)
    code = 0 if fit is None or fit.loads else WeightsError.exit_code
    if as_json:
        document = catalog.as_json(found)
        print(json.dumps(document if fit is None else {**document, "fit": catalog.as_json(fit)}, indent=1))
        return code
    print(f"{found.path}: step {found.step}, saved {found.created}, {_size(sum(found.files.values()))}")
    _table(
        ("kind", "tensors", "elements", "size", "dtypes"),
        [
            (row.kind, str(row.tensors), f"{row.elements:,}", _size(row.bytes), ", ".join(row.dtypes))
            for row in found.groups
        ],
    )
    _table(("file", "size"), [(name, _size(size)) for name, size in found.files.items()])
    for name, value in found.scalars.items():
        print(f"{name}: {_short(value)}")
    if fit is not None:
        print(_fit(fit))
    return code


def verify(where: Path, *, as_json: bool = False) -> int:
    """Read every byte of every checkpoint in ``where``; WeightsError's exit code where one is damaged."""
    rows = catalog.verify(where)
    if as_json:
        print(json.dumps([catalog.as_json(row) for row in rows], indent=1))
    else:
        for row in rows:
            print(f"{row.name}: {'; '.join(row.damage) or f'whole, {_size(row.bytes)} read'}")
        if not rows:
            print(f"{where} holds no checkpoint")
    return WeightsError.exit_code if any(row.damage for row in rows) else 0


def prune(where: Path, *, keep: int, keep_every: int = 0, as_json: bool = False) -> int:
    """Take away all but the newest ``keep`` checkpoints in ``where``, and steps that ``keep_every`` divides."""
    gone = catalog.prune(where, keep=keep, keep_every=keep_every)
    if as_json:
        print(json.dumps({"removed": gone}))
    else:
        print(f"removed {', '.join(gone)}" if gone else "nothing to remove")
    return 0


def _fit(fit: catalog.Fit) -> str:
    lines = [f"would load: {len(fit.found)} tensors, {_size(sum(fit.found.values()))}"]
    lines += _first([f"missing: {name}" for name in fit.missing])
    lines += _first(
        [
            f"another shape: {name} is stored as {list(stored)}, wanted as {list(wanted)}"
            for name, (stored, wanted) in fit.other.items()
        ]
    )
    if fit.left:
        lines.append(f"not wanted: {_short(list(fit.left))}")
    return "\n".join(lines)


def _first(lines: list[str], most: int = 10) -> list[str]:
    return lines if len(lines) <= most else [*lines[:most], f"... {len(lines) - most} more; --json has all"]


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    line = " ".join(text.split())
    return line if len(line) <= 100 else line[:97] + "..."


def _size(count: int) -> str:
    for unit, width in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= width:
            return f"{count / width:,.1f} {unit}"
    return f"{count} B"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    for row in (head, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
