"""`validate`: statistics, configurations that recur, rankings, and the cost of the plan that would be chosen."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from plait.planner.validate import errors_of, spearman, to_json, validate
from plait.planner.validate_tables import render
from tests.planner.test_published import row, write


def test_errors_of() -> None:
    found = errors_of([0.1, -0.2, 0.3, -0.4, 0.5, 0.6, 0.7, 0.8, 0.9, -1.0])
    assert (found.n, found.p90, found.most) == (10, 0.9, 1.0)
    assert found.median == pytest.approx(0.55) and found.bias == pytest.approx(0.23)


def test_spearman() -> None:
    assert spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    # Ties share their mean rank: 1, 2.5, 2.5, 4 against 1, 2, 3, 4.
    assert spearman([1, 5, 5, 9], [1, 2, 3, 4]) == pytest.approx(4.5 / math.sqrt(4.5 * 5))
    assert math.isnan(spearman([1, 1, 1], [1, 2, 3]))


def test_a_report(tmp_path: Path) -> None:
    lines = [
        row(id="somewhere/a"),
        # The same configuration again: counted once, at the median.
        row(id="somewhere/b", measured={"step_time_s": 2.5}),
        row(id="somewhere/c", layout__tp=4, layout__dp=2, batch__microbatches=16, measured={"step_time_s": 0.01}),
        row(id="somewhere/d", model__layers=16, measured={"step_time_s": 4.0}),
        row(id="somewhere/e", layout__schedule="wave"),
        row(id="elsewhere/f", source="elsewhere", measured={"peak_memory_gib": 10.0}),
    ]
    report = validate(write(tmp_path, *lines))
    assert report.rows == 6 and report.configurations == 4
    assert [name for name, _ in report.refused] == ["somewhere/e"] and "wave" in report.refused[0][1]
    assert report.time is not None and report.memory is not None
    assert report.time.all.n == 3 and report.memory.all.n == 2
    assert report.time.by["source"].keys() == {"somewhere"}
    assert report.time.by["model"]["dense"] == report.time.all
    assert report.time.by["fit"] == {"held out": report.time.all} and "fit" not in report.memory.by
    assert report.time.covered["held out"] == report.time.covered["dense_nodes"] == (3, report.time.inside)
    assert report.memory.covered == {}
    (miss,) = [miss for miss in report.time.worst if miss.id == "somewhere/a"]
    assert miss.measured == 2.0 and miss.error == pytest.approx(miss.predicted / 2.0 - 1)
    assert report.spearman["somewhere"][0] == 3
    # a and c differ in the plan alone: the prediction cannot know that c takes a hundredth of a second.
    (choice,) = report.choices
    assert choice.plans == 2
    assert choice.regret == pytest.approx(0 if choice.chosen == choice.best else 199)


def test_only_some_sources_and_no_memory(tmp_path: Path) -> None:
    file = write(tmp_path, row(), row(id="elsewhere/f", source="elsewhere"))
    report = validate(file, memory=False, sources=["elsewhere"])
    assert report.rows == 1 and report.memory is None and report.time is not None and not report.choices


def test_json_and_tables(tmp_path: Path) -> None:
    report = validate(write(tmp_path, row(), row(id="somewhere/e", layout__schedule="wave")))
    found = json.loads(to_json(report))
    assert found["configurations"] == 1 and found["time"]["all"]["n"] == 1 and found["refused"][0][0] == "somewhere/e"
    out = io.StringIO()
    render(report, Console(file=out, width=120))
    text = out.getvalue()
    assert "2 rows, 1 configurations, 1 not predicted" in text and "step time" in text and "peak memory" in text
    assert "not predicted: somewhere/e" in text


def test_published_memory_holds(shared: Path) -> None:
    """The aim of the memory model, and what it reaches: the numbers of docs/prediction.md, with a margin."""
    path = shared / "published" / "published.jsonl"
    report = validate(path, sources=["simumax_b200", "zero_bubble", "sailor_gh200", "internevo"])
    assert not report.refused and report.memory is not None
    by = report.memory.by["source"]
    assert by["simumax_b200"].most < 0.02
    assert by["zero_bubble"].median < 0.03 and by["zero_bubble"].p90 < 0.08
    assert by["sailor_gh200"].median < 0.04 and by["internevo"].median < 0.07
    assert report.memory.all.median < 0.025
