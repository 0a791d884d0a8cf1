"""Events: the bubble as a share and relative to the ideal, and Chrome's trace form."""

from __future__ import annotations

import json
from fractions import Fraction

import pytest

from plait.core.events import COMM, COMPUTE, Event, bubble, chrome_trace


def span(rank: int, start: float, end: float, *, stream: str = COMPUTE, kind: str = "F", size: int = 0) -> Event:
    return Event(rank=rank, stream=stream, kind=kind, name=f"{kind}{start:g}", start=start, end=end, bytes=size)


def gpipe(ranks: int, microbatches: int) -> list[Event]:
    """Unit-time forwards, then backwards in the reverse order of stages."""
    back = ranks - 1 + microbatches
    forward = [span(rank, rank + m, rank + m + 1) for rank in range(ranks) for m in range(microbatches)]
    backward = [
        span(rank, back + ranks - 1 - rank + m, back + ranks - rank + m, kind="B")
        for rank in range(ranks)
        for m in range(microbatches)
    ]
    return forward + backward


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (2, 4), (4, 8), (4, 2)])
def test_bubble_equals_the_closed_forms(ranks: int, microbatches: int) -> None:
    found = bubble(gpipe(ranks, microbatches), ranks)
    assert found.compute == 2 * ranks * microbatches
    assert found.makespan == 2 * (ranks + microbatches - 1)
    assert found.rate == pytest.approx(float(Fraction(ranks - 1, microbatches + ranks - 1)), abs=1e-15)
    assert found.overhead == pytest.approx(float(Fraction(ranks - 1, microbatches)), abs=1e-15)


def test_bubble_counts_compute_alone_from_first_start_to_last_end() -> None:
    events = [span(0, 5, 6), span(1, 6, 7), span(0, 0, 20, stream=COMM)]
    found = bubble(events, 2)
    assert (found.compute, found.makespan, found.rate, found.overhead) == (2, 2, 0.5, 1.0)


def test_ranks_without_compute_count_as_idle() -> None:
    assert bubble([span(0, 0, 1)], 4).rate == 0.75


def test_bubble_of_nothing_is_zero() -> None:
    found = bubble([span(0, 0, 1, stream=COMM)], 2)
    assert (found.rate, found.overhead) == (0.0, 0.0)


def test_chrome_trace_has_a_process_a_rank_and_a_thread_a_stream() -> None:
    events = [
        span(0, 10.0, 10.5),
        span(0, 10.5, 11.0, stream=COMM, kind="SEND_F", size=64),
        span(1, 11.0, 12.0),
    ]
    trace = json.loads(json.dumps(chrome_trace(events)))
    rows = trace["traceEvents"]
    names = {(row["pid"], row["args"]["name"]) for row in rows if row["ph"] == "M" and row["name"] == "process_name"}
    threads = {(row["pid"], row["tid"]): row["args"]["name"] for row in rows if row["name"] == "thread_name"}
    assert names == {(0, "rank 0"), (1, "rank 1")}
    assert threads == {(0, 0): COMPUTE, (0, 1): COMM, (1, 0): COMPUTE}
    spans = [row for row in rows if row["ph"] == "X"]
    assert [(row["pid"], row["tid"], row["ts"], row["dur"]) for row in spans] == [
        (0, 0, 0.0, 500000.0),
        (0, 1, 500000.0, 500000.0),
        (1, 0, 1000000.0, 1000000.0),
    ], "microseconds from the first start"
    assert [row["cat"] for row in spans] == ["F", "SEND_F", "F"]
    assert [row["args"] for row in spans] == [{}, {"bytes": 64}, {}]


def test_chrome_trace_of_nothing_is_empty() -> None:
    assert chrome_trace([])["traceEvents"] == []
