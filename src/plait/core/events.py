"""`Event`: one span of time on one stream of one rank. The simulator and real runs emit the same."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

COMPUTE = "compute"
"""Stream of forward, backward and weight-gradient spans."""
COMM = "comm"
"""Stream of waits for other ranks and of transfers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Something that took ``end - start`` seconds of ``stream`` on ``rank``.

    ``kind`` is the class of work (``F``, ``B``, ``W``, ``SEND_F``, ``all_reduce``, ``optimizer`` ...), ``name`` says
    which one (``2F0``), ``bytes`` what crossed the wire (0 for compute). Times are in seconds from any common origin.
    """

    rank: int
    stream: str
    kind: str
    name: str
    start: float
    end: float
    bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Bubble:
    """The idle share of a pipeline, with numerator and denominator (seconds)."""

    compute: float
    """Sum of compute spans over all ranks."""
    ranks: int
    makespan: float

    @property
    def rate(self) -> float:
        """Idle share of the whole step, ``1 - compute / (ranks * makespan)``; for 1F1B it is (p-1)/(m+p-1)."""
        return 1.0 - self.compute / (self.ranks * self.makespan) if self.makespan > 0 else 0.0

    @property
    def overhead(self) -> float:
        """Idle time relative to the ideal time; for 1F1B it is (p-1)/m."""
        return self.ranks * self.makespan / self.compute - 1.0 if self.compute > 0 else 0.0


def bubble(events: Iterable[Event], ranks: int) -> Bubble:
    """Bubble of the compute spans in ``events``; the makespan runs from the first start to the last end."""
    spans = [event for event in events if event.stream == COMPUTE]
    if not spans:
        return Bubble(compute=0.0, ranks=ranks, makespan=0.0)
    makespan = max(span.end for span in spans) - min(span.start for span in spans)
    return Bubble(compute=sum(span.end - span.start for span in spans), ranks=ranks, makespan=makespan)


def chrome_trace(events: Sequence[Event]) -> dict[str, object]:
    """Events in Chrome's trace format (chrome://tracing, ui.perfetto.dev): a process a rank, a thread a stream."""
    origin = min((event.start for event in events), default=0.0)
    threads: dict[tuple[int, str], int] = {}
    rows: list[dict[str, object]] = []
    for event in events:
        key = (event.rank, event.stream)
        if key not in threads:
            threads[key] = sum(1 for rank, _ in threads if rank == event.rank)
            meta = {"ph": "M", "pid": event.rank, "tid": threads[key]}
            if threads[key] == 0:
                rows.append({**meta, "name": "process_name", "args": {"name": f"rank {event.rank}"}})
            rows.append({**meta, "name": "thread_name", "args": {"name": event.stream}})
        rows.append(
            {
                "ph": "X",
                "pid": event.rank,
                "tid": threads[key],
                "cat": event.kind,
                "name": event.name,
                "ts": (event.start - origin) * 1e6,
                "dur": (event.end - event.start) * 1e6,
                "args": {"bytes": event.bytes} if event.bytes else {},
            }
        )
    return {"traceEvents": rows, "displayTimeUnit": "ms"}
