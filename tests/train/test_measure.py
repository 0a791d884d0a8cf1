"""What a rank's own time goes to, of which a straggler is told."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from plait.comm.world import World
from plait.core.events import COMM, Event
from plait.train.measure import Meter, _own_seconds
from plait.train.run import prepare
from plait.train.supervise import PARTS, Stragglers
from plait.train.trainer import train
from tests.train.test_trainer import config, tokens

__all__ = ["tokens"]


def span(stream: str, start: float, end: float) -> Event:
    return Event(rank=0, stream=stream, kind=stream, name=stream, start=start, end=end)


def test_waits_are_not_a_ranks_own() -> None:
    """The optimizer's span holds the gathers of what it has updated; waits elsewhere are not taken off it."""
    spans = [span("update", 1, 5), span(COMM, 2, 3), span(COMM, 4, 5), span(COMM, 5, 9), span("data", 0, 0.5)]
    assert _own_seconds(spans, "update") == 2
    assert _own_seconds(spans, "data") == 0.5
    assert _own_seconds([], "update") == 0


def test_every_part_of_a_step_is_measured(tokens: Path, tmp_path: Path) -> None:
    seen: list[list[list[float]]] = []
    computed: list[float] = []
    finish = Meter.finish

    def noted(self: Meter, *arguments: object, **rest: object) -> object:
        row = finish(self, *arguments, **rest)  # type: ignore[arg-type]
        computed.append(self.computes[0])
        return row

    with (
        mock.patch.object(Stragglers, "observe", lambda self, step, parts: seen.append(parts)),
        mock.patch.object(Meter, "finish", noted),
    ):
        train(prepare(config(tokens, tmp_path / "run", "train.steps=2", "train.eval_every=0")), World.alone())
    for (parts,), compute in zip(seen, computed, strict=True):
        assert len(parts) == len(PARTS) == 4
        assert min(parts) > 0
        assert parts[0] + parts[1] == pytest.approx(compute)
