"""``events.jsonl``: what happened to a run beside its steps, one JSON object a line.

Restarts, signals, stragglers, skipped steps, checkpoints set aside. The supervisor and rank 0 both append: a line is
one write to a file opened for appending, so lines of two processes never mix, and it is on the disk before `write`
returns. A line cut short by a crash is left out by `read`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EVENTS = "events.jsonl"
"""The log's name in a run's folder."""
FAILURE = "failure"
"""The event of a rank that failed: ``rank``, ``cause``, ``message``; ``step`` and ``phase`` where it had begun."""


@dataclass(frozen=True, kw_only=True)
class LoggedEvent:
    """One line: ``time`` in seconds since 1970, ``kind`` in a word (restart, straggler, signal ...), its fields."""

    time: float
    kind: str
    fields: Mapping[str, Any]


class EventLog:
    """Appends to the log at ``path``, which the first write makes.

    A full disk ends no run for the sake of its log: what cannot be written is said on standard error instead.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, kind: str, fields: Mapping[str, object]) -> None:
        """Append one event, with the time. ``fields`` are JSON values; neither ``time`` nor ``kind`` is among them."""
        if {"time", "kind"} & set(fields):
            raise ValueError(f"event {kind}: time and kind are the log's own fields")
        text = json.dumps({"time": time.time(), "kind": kind, **fields})
        try:
            self._append(text.encode("utf-8") + b"\n")
        except OSError as error:
            print(f"plait: warning: {self.path} cannot be written: {error.strerror}: {text}", file=sys.stderr)

    def _append(self, line: bytes) -> None:
        file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            size = os.fstat(file).st_size
            if size and os.pread(file, 1, size - 1) != b"\n":
                line = b"\n" + line  # a line that a crash has cut short must not swallow this one
            os.write(file, line)
            os.fsync(file)
        finally:
            os.close(file)


def read(path: Path) -> list[LoggedEvent]:
    """The events in the log at ``path``, oldest first; none where there is no log. Broken lines are left out."""
    if not path.exists():
        return []
    events = []
    for line in path.read_bytes().splitlines():
        try:
            fields = json.loads(line)
            event = LoggedEvent(time=float(fields.pop("time")), kind=str(fields.pop("kind")), fields=fields)
        except (ValueError, KeyError, AttributeError, TypeError):
            continue
        events.append(event)
    return events
