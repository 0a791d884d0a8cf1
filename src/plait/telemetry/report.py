"""``plait report RUN``: what a run promised beside what it did, what happened to it, and why it stopped.

Reads the files of a run folder alone: ``metrics.jsonl``, ``prediction.json``, ``events.jsonl``, ``flight/``.
"""

from __future__ import annotations

import io
import json
import math
import shutil
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from plait.comm.flight import diagnose, read_dumps
from plait.core.errors import ConfigError
from plait.telemetry.record import EVAL_KEY, read_metrics

PREDICTION = "prediction.json"
"""What the planner said of a run before its first step: the keys of `Compared`, and ``plan`` and ``cluster``."""
WARM = 2
"""First steps that are left out of medians where enough others are there: they set up kernels and buffers."""
_EVENTS_SHOWN = 20


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One quantity, as promised and as measured; None where it is unknown."""

    what: str
    unit: str
    predicted: float | None
    measured: float | None

    @property
    def error(self) -> float | None:
        """(predicted - measured) / measured."""
        if self.predicted is None or not self.measured:
            return None
        return self.predicted / self.measured - 1.0


@dataclass(frozen=True, kw_only=True)
class Report:
    """All that a run folder tells."""

    folder: str
    plan: str
    cluster: str | None
    source: str | None
    """Where the figures of the cluster come from: measured, or estimated."""
    interval: tuple[float, float] | None
    """Seconds between which the step time was expected."""
    steps: int
    loss: tuple[float, float] | None
    """Of the first and of the last step."""
    eval_loss: float | None
    compared: tuple[Compared, ...]
    compared_from: int | None
    """The first step that was compared, where steps before it ran under another plan."""
    events: tuple[Mapping[str, Any], ...]
    cause: str | None
    """What a hang was due to, where one was recorded."""

    def to_json(self) -> str:
        """One JSON object."""
        rows = [asdict(each) | {"error": each.error} for each in self.compared]
        return json.dumps(asdict(self) | {"compared": rows}, indent=1)


def read(folder: Path) -> Report:
    """The report of a run; ConfigError where ``folder`` holds none."""
    metrics = folder / "metrics.jsonl"
    if not metrics.is_file():
        raise ConfigError(f"{folder} holds no metrics.jsonl: name the folder of a run, such as runs/2026-11-30-120000")
    rows: list[dict[str, Any]] = [dict(row) for row in read_metrics(metrics)]
    promise = _object(folder / PREDICTION)
    losses = [row["loss"] for row in rows if row.get("loss") is not None]
    held_out = [row[EVAL_KEY] for row in rows if row.get(EVAL_KEY) is not None]
    low, high = promise.get("low"), promise.get("high")
    plan = promise.get("plan") or _plan_text(folder)
    events = tuple(_lines(folder / "events.jsonl"))
    under = _under_last_plan(rows, events)
    return Report(
        folder=str(folder),
        plan=str(plan),
        cluster=promise.get("cluster"),
        source=promise.get("source"),
        interval=None if low is None or high is None else (float(low), float(high)),
        steps=len(rows),
        loss=(losses[0], losses[-1]) if losses else None,
        eval_loss=held_out[-1] if held_out else None,
        compared=tuple(compare(promise, under, _object(folder / "device.json").get("process_bytes") or 0)),
        compared_from=int(under[0]["step"]) + 1 if len(under) < len(rows) else None,
        events=events,
        cause=_cause(folder / "flight"),
    )


def _under_last_plan(rows: list[dict[str, Any]], events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The last of ``rows`` that ran under one plan: promises are about no other."""
    start, plan = 0, None
    for event in events:
        kind = event.get("kind")
        if kind in ("resume", "rebalanced"):
            if kind == "rebalanced" or (plan is not None and event.get("plan") != plan):
                start = int(event.get("step", 0))
            plan = event.get("plan")
    # Which plan a run began under is in no event; another number of ranks, or of axes that communicate, is another one.
    same = [row for row in rows if row["step"] >= start]
    for place in range(len(same) - 1, 0, -1):
        if _shape(same[place - 1]) != _shape(same[-1]):
            return same[place:]
    return same or rows


def _shape(row: Mapping[str, Any]) -> tuple[int, tuple[str, ...]]:
    return len(row.get("memory_peak_bytes") or ()), tuple(sorted(row.get("comm_bytes") or ()))


def compare(promise: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], process: int = 0) -> list[Compared]:
    """Promise beside fact, in the order in which they are shown; medians over the steps behind the first `WARM`.

    ``process``: bytes that a rank's process takes without a model, where measured peaks are those of the process.
    """
    steady = rows[WARM:] if len(rows) > 2 * WARM else rows
    found = [
        Compared(what=what, unit=unit, predicted=promise.get(key), measured=_median(steady, key))
        for what, key, unit in (
            ("step time", "step_time_s", "s"),
            ("tokens a second a device", "tokens_per_s_per_device", ""),
            ("bubble", "bubble_rate", "%"),
            ("communication, share of the step", "comm_fraction", "%"),
            ("MFU", "mfu", "%"),
        )
    ]
    told, seen = promise.get("comm_bytes") or {}, (rows[-1].get("comm_bytes") or {}) if rows else {}
    found += [
        Compared(what=f"bytes sent on {axis}", unit="B", predicted=told.get(axis), measured=seen.get(axis))
        for axis in dict.fromkeys([*told, *seen])
        if axis != "world"
    ]
    expected, peaks = promise.get("memory_bytes") or [], (rows[-1].get("memory_peak_bytes") or []) if rows else []
    for rank in range(max(len(expected), len(peaks))):
        found.append(
            Compared(
                what=f"memory of rank {rank}",
                unit="B",
                predicted=expected[rank] + process if rank < len(expected) else None,
                measured=peaks[rank] if rank < len(peaks) else None,
            )
        )
    return [each for each in found if each.predicted is not None or each.measured is not None]


def render(report: Report, *, width: int | None = None) -> str:
    """The report as text for a terminal."""
    page = io.StringIO()
    columns = width or min(max(shutil.get_terminal_size(fallback=(100, 24)).columns, 80), 120)
    console = Console(file=page, width=columns, legacy_windows=False)
    for part in _parts(report):
        console.print(part, highlight=False)
    return "\n".join(line.rstrip() for line in page.getvalue().splitlines())


def table(rows: Sequence[Compared]) -> Table:
    """Promise beside fact; many ranks' memory becomes its least and its most."""
    shown = Table(box=None, pad_edge=False, header_style="dim")
    shown.add_column("")
    for name in ("predicted", "measured", "off by"):
        shown.add_column(name, justify="right")
    for row in _folded(rows):
        error = "–" if row.error is None else f"{row.error:+.1%}"
        shown.add_row(row.what, _value(row.predicted, row.unit), _value(row.measured, row.unit), error)
    return shown


def _parts(report: Report) -> list[RenderableType]:
    loss = "" if report.loss is None else f", loss {report.loss[0]:.3f} → {report.loss[1]:.3f}"
    held_out = "" if report.eval_loss is None else f", held out {report.eval_loss:.3f}"
    parts: list[RenderableType] = [
        Text.assemble(("run ", "dim"), report.folder, ("  plan ", "dim"), (report.plan or "one rank", "bold")),
        Text(f"{report.steps} steps{loss}{held_out}"),
        Rule("promise and fact", align="left"),
        table(report.compared),
    ]
    if report.cluster is None:
        parts.append(Text("Nothing was predicted for this run."))
    elif report.interval is not None:
        low, high = report.interval
        where = "this machine" if report.cluster == "local" else report.cluster
        source = f" ({report.source})" if report.source else ""
        parts.append(Text(f"Predicted for {where}{source}: a step of {low:.3g} s to {high:.3g} s, eight times in ten."))
    if report.compared_from is not None:
        parts.append(Text(f"Measured from step {report.compared_from} on; those before ran under another plan."))
    if report.events:
        parts += [Rule("what happened", align="left"), *_event_lines(report.events)]
    if report.cause is not None:
        parts += [Rule("where its ranks stood at the last failure", align="left"), Text(report.cause)]
    return parts


def _event_lines(events: Sequence[Mapping[str, Any]]) -> list[RenderableType]:
    lines: list[RenderableType] = []
    for event in events[-_EVENTS_SHOWN:]:
        fields = [(name, value) for name, value in event.items() if name not in ("time", "kind")]
        words = "  ".join(f"{name} {value}" for name, value in fields if value not in (None, ""))
        lines.append(Text(f"{_clock(event.get('time'))}  {event.get('kind', '')}  {words}"))
    hidden = len(events) - len(lines)
    return [Text(f"... {hidden} earlier ones in events.jsonl"), *lines] if hidden else lines


def _clock(seconds: object) -> str:
    """Seconds since 1970 as local date and time; anything else as it stands."""
    if not isinstance(seconds, int | float):
        return str(seconds or "")
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, OSError, ValueError):
        return str(seconds)


def _folded(rows: Sequence[Compared]) -> list[Compared]:
    memory = [row for row in rows if row.what.startswith("memory of rank")]
    if len(memory) <= 8:
        return list(rows)
    folded = []
    for name, pick in (("emptiest", min), ("fullest", max)):
        told = [row.predicted for row in memory if row.predicted is not None]
        seen = [row.measured for row in memory if row.measured is not None]
        folded.append(
            Compared(
                what=f"memory of the {name} rank",
                unit="B",
                predicted=pick(told) if told else None,
                measured=pick(seen) if seen else None,
            )
        )
    return [row for row in rows if row not in memory] + folded


def _value(value: float | None, unit: str) -> str:
    if value is None:
        return "–"
    if unit == "%":
        return f"{value:.1%}"
    if unit == "B":
        return f"{value / 1e6:,.1f} MB"
    return f"{value:,.0f} {unit}".rstrip() if value >= 1000 else f"{value:,.4g} {unit}".rstrip()


def _median(rows: Sequence[Mapping[str, Any]], key: str) -> float | None:
    values = [row[key] for row in rows if row.get(key) is not None and math.isfinite(row[key])]
    return statistics.median(values) if values else None


def _object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds no JSON object")
    return found


def _lines(path: Path) -> list[dict[str, Any]]:
    """JSON objects of a file of lines; a last line that was cut off is left out."""
    if not path.is_file():
        return []
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            found.append(row)
    return found


def _plan_text(folder: Path) -> str:
    path = folder / "plan.toml"
    if not path.is_file():
        return ""
    return " ".join(line.replace(" = ", "=") for line in path.read_text(encoding="utf-8").splitlines())


def _cause(dumps: Path) -> str | None:
    """What the last operations of the ranks say of a hang, where they were kept."""
    try:
        return diagnose(read_dumps(dumps)) or None
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{dumps} cannot be read: {error}") from error
