from __future__ import annotations

import json
import statistics
from pathlib import Path
from time import perf_counter
from unittest import mock

import pytest

from plait.core.errors import ConfigError
from plait.core.events import COMM, COMPUTE, Event
from plait.telemetry.record import EVAL_KEY, METRIC_KEYS, Metrics, Recorder, read_metrics, write_trace


def row(step: int, **changes: object) -> dict[str, object]:
    return {
        **dict.fromkeys(METRIC_KEYS, 1.5),
        "step": step,
        "comm_bytes": {"tp": 8},
        "memory_peak_bytes": [1, 2],
        **changes,
    }


def test_metric_keys_are_those_of_the_contract() -> None:
    assert METRIC_KEYS == (
        "step", "loss", "grad_norm", "lr", "tokens", "step_time_s", "tokens_per_s", "tokens_per_s_per_device",
        "bubble_rate", "bubble_rate_predicted", "comm_fraction", "comm_bytes", "memory_peak_bytes", "mfu",
    )  # fmt: skip


def test_lines_are_readable_while_the_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    with Metrics(path) as metrics:
        metrics.write(row(0))
        assert [line["step"] for line in read_metrics(path)] == [0]
        metrics.write({EVAL_KEY: 2.0, **row(1)})
    rows = read_metrics(path)
    assert list(rows[0]) == list(METRIC_KEYS)
    assert rows[1] == row(1, eval_loss=2.0)
    with Metrics(path) as metrics:
        metrics.write(row(2))
    assert [line["step"] for line in read_metrics(path)] == [0, 1, 2]


def test_what_json_has_no_number_for_is_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with Metrics(path) as metrics:
        metrics.write(
            row(0, loss=float("nan"), mfu=None, comm_bytes={"tp": float("inf")}, memory_peak_bytes=(1, float("-inf")))
        )
    assert "NaN" not in path.read_text()
    assert "Infinity" not in path.read_text()
    assert read_metrics(path)[0] == row(0, loss=None, mfu=None, comm_bytes={"tp": None}, memory_peak_bytes=[1, None])


def test_a_line_has_the_keys_and_no_others(tmp_path: Path) -> None:
    with Metrics(tmp_path / "m.jsonl") as metrics:
        with pytest.raises(ValueError, match="gpu_temperature"):
            metrics.write(row(0, gpu_temperature=40))
        with pytest.raises(ValueError, match="mfu"):
            metrics.write({key: 1 for key in METRIC_KEYS if key != "mfu"})
    assert read_metrics(tmp_path / "m.jsonl") == []


def test_without_a_path_the_same_calls_leave_nothing(tmp_path: Path) -> None:
    with Metrics(None) as metrics:
        metrics.write(row(0))
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_no_error_of_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row that could not be written is tried again when the file is closed, and must not hide why the run ended."""
    metrics = Metrics(tmp_path / "metrics.jsonl")
    with open("/dev/full", "a", encoding="utf-8") as full, mock.patch.object(metrics, "_file", full):
        with pytest.raises(OSError, match="No space left"):
            metrics.write(row(0))
        metrics.close()
    metrics.close()
    assert "the last lines of /dev/full are lost: No space left on device" in capsys.readouterr().err


def test_a_torn_last_line_is_left_out_and_the_next_run_starts_a_line(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    with Metrics(path) as metrics:
        metrics.write(row(0))
    with path.open("a") as file:
        file.write('{"step": 1, "lo')
    assert len(read_metrics(path)) == 1
    with Metrics(path) as metrics:
        metrics.write(row(1))
    assert [line["step"] for line in read_metrics(path)] == [0, 1]


@pytest.mark.parametrize("bad", ["not json\n", "[1]\n"])
def test_a_damaged_file_is_named_with_its_line(tmp_path: Path, bad: str) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 0}\n' + bad)
    with pytest.raises(ConfigError, match=r"m\.jsonl, line 2"):
        read_metrics(path)
    with pytest.raises(ConfigError, match=r"none\.jsonl"):
        read_metrics(tmp_path / "none.jsonl")


def test_unwritable_places_are_config_errors(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="metrics"):
        Metrics(tmp_path / "file" / "m.jsonl")
    with pytest.raises(ConfigError, match="trace"):
        write_trace(tmp_path / "file" / "trace.json", [])


def test_spans_become_events_and_totals() -> None:
    recorder = Recorder(3)
    recorder.add(COMPUTE, "F", "0F0", 1.0, 1.5)
    recorder.add(COMM, "SEND_F", "0SEND_F0", 1.5, 1.75, 64)
    recorder.add(COMPUTE, "F", "0F1", 2.0, 3.0)
    assert recorder.events() == [
        Event(rank=3, stream=COMPUTE, kind="F", name="0F0", start=1.0, end=1.5),
        Event(rank=3, stream=COMM, kind="SEND_F", name="0SEND_F0", start=1.5, end=1.75, bytes=64),
        Event(rank=3, stream=COMPUTE, kind="F", name="0F1", start=2.0, end=3.0),
    ]
    assert recorder.totals() == {(COMPUTE, "F"): 1.5, (COMM, "SEND_F"): 0.25}
    assert (recorder.compute_seconds, recorder.comm_seconds) == (1.5, 0.25)
    recorder.clear()
    assert recorder.events() == []
    assert recorder.totals() == {}
    first = recorder.begin()
    assert recorder.begin() >= first


def test_a_span_costs_microseconds() -> None:
    # Median over batches, so that a preempted one does not count; about 0.3 us on a quiet machine.
    costs = []
    for _ in range(50):
        recorder = Recorder(0)
        begin = perf_counter()
        for _ in range(200):
            start = recorder.begin()
            recorder.add(COMPUTE, "F", "0F0", start, recorder.begin())
        costs.append((perf_counter() - begin) / 200)
    assert statistics.median(costs) < 10e-6


def test_trace_is_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "run" / "trace.json"
    events = [
        Event(rank=0, stream=COMPUTE, kind="F", name="0F0", start=5.0, end=5.5),
        Event(rank=1, stream=COMM, kind="RECV_F", name="1RECV_F0", start=5.5, end=5.75, bytes=64),
    ]
    write_trace(path, events)
    spans = [span for span in json.loads(path.read_text())["traceEvents"] if span["ph"] == "X"]
    assert [(span["pid"], span["name"], span["ts"], span["dur"]) for span in spans] == [
        (0, "0F0", 0.0, 500_000.0),
        (1, "1RECV_F0", 500_000.0, 250_000.0),
    ]
    with pytest.raises(ValueError, match="JSON"):
        write_trace(path, [Event(rank=0, stream=COMM, kind="F", name="x", start=0.0, end=float("nan"))])
    assert len(json.loads(path.read_text())["traceEvents"]) > 2  # the old trace, whole
    assert [p.name for p in path.parent.iterdir()] == ["trace.json"]
