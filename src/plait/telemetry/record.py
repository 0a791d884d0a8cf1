"""What a run records of itself: ``metrics.jsonl``, spans, and the trace in Chrome's form."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from types import TracebackType

from plait.core.errors import ConfigError
from plait.core.events import COMM, COMPUTE, Event, chrome_trace

METRIC_KEYS = (
    "step",
    "loss",
    "grad_norm",
    "lr",
    "tokens",
    "step_time_s",
    "tokens_per_s",
    "tokens_per_s_per_device",
    "bubble_rate",
    "bubble_rate_predicted",
    "comm_fraction",
    "comm_bytes",
    "memory_peak_bytes",
    "mfu",
)
"""What every line of ``metrics.jsonl`` holds; null where a value is unknown or not finite."""
EVAL_KEY = "eval_loss"
"""Stands in the lines of the steps after which the held-out split was evaluated."""
MOE_KEY = "moe"
"""Stands in the lines of models with experts: one object a layer, with the share of the assignments of each expert
(``load``), mean router ``probability`` of each, the share ``dropped``, ``spread`` (std / mean of the load), ``entropy``
and the weighted losses ``aux`` and ``z``."""
SCALE_KEY = "loss_scale"
"""Stands in the lines of fp16 runs: what the step's loss was multiplied with. A step whose ``grad_norm`` is null was
skipped."""
OPTIONAL_KEYS = (EVAL_KEY, MOE_KEY, SCALE_KEY)


class Metrics:
    """Appends one JSON object a line to a file, flushed, so that a crash of this process loses no finished line.

    Without a path the lines go to the null device: ranks that keep no file run the same code.
    """

    def __init__(self, path: Path | None) -> None:
        target = Path(os.devnull) if path is None else path
        try:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                _drop_torn_line(path)
            self._file = target.open("a", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write metrics to {target}: {error}") from error

    def write(self, row: Mapping[str, object]) -> None:
        """Append ``row``: the keys of `METRIC_KEYS`, and those of `OPTIONAL_KEYS` it has; others are a ValueError."""
        wrong = (set(row) - set(OPTIONAL_KEYS)) ^ set(METRIC_KEYS)
        if wrong:
            raise ValueError(f"a metrics line lacks, or should not hold: {', '.join(sorted(wrong))}")
        ordered = {key: row[key] for key in (*METRIC_KEYS, *OPTIONAL_KEYS) if key in row}
        self._file.write(json.dumps(_finite(ordered), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; a second call does nothing. What a full disk has kept back until now is lost, and said."""
        try:
            self._file.close()
        except OSError as error:
            print(f"plait: warning: the last lines of {self._file.name} are lost: {error.strerror}", file=sys.stderr)

    def __enter__(self) -> Metrics:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _finite(value: object) -> object:
    """``value`` with null for what JSON has no number for (NaN, infinities), at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _drop_torn_line(path: Path) -> None:
    """Cut off a last line that a killed run left unfinished, so that the next one starts on its own line."""
    if path.exists():
        content = path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.truncate(path, whole)


def read_metrics(path: Path) -> list[dict[str, object]]:
    """The lines of a ``metrics.jsonl``, a last one that a killed run left unfinished not among them.

    ConfigError naming file and line for anything else that is not a JSON object.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read metrics from {path}: {error}") from error
    rows: list[dict[str, object]] = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{path}, line {number} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise ConfigError(f"{path}, line {number} is not a JSON object")
        rows.append(row)
    return rows


class Recorder:
    """The spans of one rank, at the cost of an append each: `Event`s are made when they are asked for."""

    __slots__ = ("_spans", "rank")

    begin = staticmethod(perf_counter)
    """Now, in seconds; processes of one machine share the origin on Linux."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._spans: list[tuple[str, str, str, float, float, int]] = []

    def add(self, stream: str, kind: str, name: str, start: float, end: float, bytes: int = 0) -> None:
        """Record a span of ``stream`` that began at ``start`` and ended at ``end`` (both from `begin`)."""
        self._spans.append((stream, kind, name, start, end, bytes))

    def events(self) -> list[Event]:
        """The spans since the last `clear`, in the order in which they were recorded."""
        return [
            Event(rank=self.rank, stream=stream, kind=kind, name=name, start=start, end=end, bytes=size)
            for stream, kind, name, start, end, size in self._spans
        ]

    def clear(self) -> None:
        """Forget all spans: called at the start of every step."""
        self._spans.clear()

    def totals(self) -> dict[tuple[str, str], float]:
        """(stream, kind) -> seconds."""
        found: dict[tuple[str, str], float] = {}
        for stream, kind, _, start, end, _ in self._spans:
            found[stream, kind] = found.get((stream, kind), 0.0) + end - start
        return found

    @property
    def compute_seconds(self) -> float:
        """Seconds of all spans on the compute stream."""
        return sum(end - start for stream, _, _, start, end, _ in self._spans if stream == COMPUTE)

    @property
    def comm_seconds(self) -> float:
        """Seconds of all spans on the communication stream."""
        return sum(end - start for stream, _, _, start, end, _ in self._spans if stream == COMM)


def write_trace(path: Path, events: Sequence[Event]) -> None:
    """Write ``events`` for chrome://tracing or ui.perfetto.dev; the file is there whole or not at all."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(chrome_trace(events), allow_nan=False), encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise ConfigError(f"cannot write the trace to {path}: {error}") from error
    finally:
        with suppress(OSError):
            temporary.unlink()
