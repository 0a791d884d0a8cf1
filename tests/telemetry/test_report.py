from __future__ import annotations

import json
from pathlib import Path

import pytest

from plait.comm.flight import Flight, write_dump
from plait.core.errors import ConfigError
from plait.telemetry.record import Metrics
from plait.telemetry.report import PREDICTION, compare, read, render
from tests.telemetry.test_record import row

PROMISE = {
    "plan": "tp=2",
    "cluster": "local",
    "step_time_s": 1.0,
    "low": 0.9,
    "high": 1.2,
    "tokens_per_s_per_device": 100.0,
    "bubble_rate": 0.25,
    "comm_fraction": 0.1,
    "comm_bytes": {"tp": 4, "pp": 7},
    "memory_bytes": [3, 2],
}


def folder(path: Path, steps: int = 6) -> Path:
    with Metrics(path / "metrics.jsonl") as metrics:
        for step in range(steps):
            slow = 9.0 if step < 2 else 2.0
            metrics.write(row(step, step_time_s=slow, loss=5.0 - step, comm_bytes={"tp": 8, "world": 3}))
    return path


def test_medians_leave_out_the_first_steps_of_a_run_that_has_others(tmp_path: Path) -> None:
    (folder(tmp_path) / PREDICTION).write_text(json.dumps(PROMISE))
    report = read(tmp_path)
    by_name = {each.what: each for each in report.compared}
    assert by_name["step time"].measured == 2.0
    assert by_name["step time"].error == pytest.approx(-0.5)
    assert report.loss == (5.0, 0.0)
    assert report.interval == (0.9, 1.2)


def test_bytes_and_memory_stand_side_by_side_and_what_is_unknown_is_none(tmp_path: Path) -> None:
    (folder(tmp_path) / PREDICTION).write_text(json.dumps(PROMISE))
    found = {each.what: (each.predicted, each.measured) for each in read(tmp_path).compared}
    assert found["bytes sent on tp"] == (4, 8)
    assert found["bytes sent on pp"] == (7, None)
    assert "bytes sent on world" not in found
    assert [found[f"memory of rank {rank}"] for rank in range(2)] == [(3, 1), (2, 2)]


def test_a_run_without_a_promise_still_has_a_report(tmp_path: Path) -> None:
    text = render(read(folder(tmp_path, steps=1)), width=100)
    assert "Nothing was predicted" in text
    assert "9 s" in text


def test_events_and_the_cause_of_a_hang_are_shown(tmp_path: Path) -> None:
    folder(tmp_path)
    (tmp_path / "events.jsonl").write_text('{"time": "t0", "kind": "restart", "rank": 2}\n{"torn')
    (tmp_path / "flight").mkdir()
    waits, elsewhere = Flight(0, tmp_path / "0"), Flight(1, tmp_path / "1")
    waits.waiting(waits.begin("all_reduce", waits.group("tp", (0, 1)), (4,)))
    elsewhere.note("B of stage 1, microbatch 3")
    for flight in (waits, elsewhere):
        write_dump(tmp_path / "flight", flight.read())
    text = render(read(tmp_path), width=100)
    assert "t0  restart  rank 2" in text
    assert "rank 1" in text
    assert "all_reduce" in text
    assert "B of stage 1, microbatch 3" in text


def test_many_ranks_are_folded_to_the_emptiest_and_the_fullest(tmp_path: Path) -> None:
    with Metrics(tmp_path / "metrics.jsonl") as metrics:
        metrics.write(row(0, memory_peak_bytes=[int(1e6) * (rank + 1) for rank in range(9)]))
    text = render(read(tmp_path), width=100)
    assert "memory of the emptiest rank" in text
    assert "9.0 MB" in text
    assert "memory of rank 3" not in text


def test_the_json_form_holds_the_errors(tmp_path: Path) -> None:
    (folder(tmp_path) / PREDICTION).write_text(json.dumps(PROMISE))
    found = json.loads(read(tmp_path).to_json())
    assert next(each for each in found["compared"] if each["what"] == "step time")["error"] == pytest.approx(-0.5)


@pytest.mark.parametrize("content", [None, "[]", "{"])
def test_what_is_no_run_or_damaged_is_refused_by_name(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        folder(tmp_path)
        (tmp_path / PREDICTION).write_text(content)
    with pytest.raises(ConfigError, match=r"metrics\.jsonl" if content is None else PREDICTION):
        read(tmp_path)


def test_compare_of_nothing_is_nothing() -> None:
    assert compare({}, []) == []


def test_steps_under_another_plan_are_not_held_against_the_promise(tmp_path: Path) -> None:
    (folder(tmp_path) / PREDICTION).write_text(json.dumps(PROMISE))
    events = [{"time": 0, "kind": "resume", "step": step, "plan": plan} for step, plan in ((2, "dp=2"), (5, "tp=2"))]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    report = read(tmp_path)
    assert report.compared_from == 6
    text = render(report, width=100)
    assert "from step 6 on" in text
    assert "19" in text.partition("what happened")[2].split("-")[0]  # the year, not seconds


def test_a_run_that_went_on_with_other_ranks_is_measured_from_there(tmp_path: Path) -> None:
    with Metrics(folder(tmp_path) / "metrics.jsonl") as metrics:
        metrics.write(row(6, step_time_s=3.0, comm_bytes={"dp": 8, "world": 3}))
    (tmp_path / PREDICTION).write_text(json.dumps(PROMISE))
    measured = {each.what: each.measured for each in read(tmp_path).compared}
    assert measured["step time"] == 3.0
