"""When compute began and ended: by the host's clock where a call does the work, by marks on the stream on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import final

import torch

from plait.comm.group import SpanSink
from plait.core.events import COMPUTE
from plait.schedule.ir import Action


@final
class HostClock:
    """Spans of work that is done when its call returns."""

    def __init__(self, sink: SpanSink) -> None:
        self._sink = sink

    def begin(self, action: Action) -> Callable[[], None]:
        """Start a span; the function returned ends it."""
        start = perf_counter()
        return lambda: self._sink(COMPUTE, action.kind.value, str(action), start, perf_counter())

    def close(self) -> None:
        """Nothing is outstanding."""


@final
class DeviceClock:
    """Spans of work that a CUDA stream does later: marks on the stream, read when the step is over."""

    def __init__(self, sink: SpanSink) -> None:
        self._sink = sink
        self._spans: list[tuple[Action, torch.cuda.Event, torch.cuda.Event]] = []
        torch.cuda.synchronize()
        self._origin, self._start = _mark(), perf_counter()

    def begin(self, action: Action) -> Callable[[], None]:
        """Start a span; the function returned ends it."""
        start = _mark()
        return lambda: self._spans.append((action, start, _mark()))

    def close(self) -> None:
        """Wait for the stream and hand the spans on, in seconds of the host's clock."""
        torch.cuda.synchronize()
        for action, start, end in self._spans:
            edges = [self._start + self._origin.elapsed_time(mark) / 1e3 for mark in (start, end)]
            self._sink(COMPUTE, action.kind.value, str(action), edges[0], edges[1])


def clock(device: torch.device, sink: SpanSink) -> HostClock | DeviceClock:
    """The clock of work on ``device``."""
    return DeviceClock(sink) if device.type == "cuda" else HostClock(sink)


def _mark() -> torch.cuda.Event:
    mark = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    mark.record()
    return mark
