"""The fit of constants on published rows, on one source of them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from plait.planner.cost import predict
from plait.planner.fit import Rows, descend, loss, main, measured, spreads


@pytest.fixture(scope="module")
def rows(shared: Path) -> Rows:
    return measured(str(shared / "published" / "published.jsonl"), ("simumax_b200",))


def test_rows_of_a_source(rows: Rows) -> None:
    assert list(rows) == ["simumax_b200, one node"]
    (pairs,) = rows.values()
    assert len(pairs) == 23
    assert len({id(job.topology) for job, _ in pairs}) == 1, "jobs of one cluster share it, and what is cached for it"
    assert all(time > 0 for _, time in pairs)


def test_identical_jobs_count_once(shared: Path) -> None:
    found = measured(str(shared / "published" / "published.jsonl"), ("internevo",))
    jobs = [job for pairs in found.values() for job, _ in pairs]
    assert len({repr(job) for job in jobs}) == len(jobs) < 38


def test_descent_goes_down(rows: Rows) -> None:
    start = loss(rows, {"gemm_share.B200": 0.2})
    assert start > loss(rows, {})
    best, values = descend(rows, ["gemm_share.B200", "memory_share"], 1)
    assert best == loss(rows, values) <= loss(rows, {})


def test_intervals_hold_four_fifths_of_a_source_that_is_left_out(rows: Rows) -> None:
    (spread,) = spreads(rows, {}).values()
    assert 0 < spread < 0.3
    ((name, pairs),) = rows.items()
    slow = [(job, 2 * predict(job).step_time) for job, _ in pairs]
    fast = [(job, predict(job).step_time) for job, _ in pairs]
    # Of two sources neither says how wrong the other is: the widest covers it.
    (wide,) = spreads({name: fast, "another, one node": slow}, {}).values()
    assert wide == pytest.approx(math.log(2))
    # Of ten alike and one that is not, nine tenths are covered by what the others say.
    many = {f"source {index}, one node": fast for index in range(10)} | {"another, one node": slow}
    (narrow,) = spreads(many, {}).values()
    assert narrow == pytest.approx(0, abs=1e-9)


def test_command(shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(shared / "published" / "published.jsonl")
    assert main([path, "no_such_constant", "--sources", "simumax_b200"]) == 2
    assert "no_such_constant" in capsys.readouterr().err
