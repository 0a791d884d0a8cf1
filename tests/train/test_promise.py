"""What is promised of a run, beside what the run does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plait.core.config import dump
from plait.planner.clusters import cluster
from plait.telemetry.record import read_metrics
from plait.telemetry.report import PREDICTION, compare, read
from plait.train.promise import promise, write_promise
from plait.train.run import prepare
from tests.pool import Pool
from tests.train import jobs
from tests.train.test_trainer import config, tokens  # noqa: F401 - a fixture

PLANS = (
    ("plan.tp=2 plan.pp=2", 4),
    ("plan.pp=2 plan.dp=2 plan.zero=1 plan.order=dp-pp-cp-tp", 4),
    ("plan.pp=2 plan.virtual=2 plan.schedule=interleaved plan.tp=2 plan.recompute=full", 4),
    ("plan.dp=2 plan.tp=2 plan.zero=3 plan.sequence_parallel=false", 4),
    ("plan.cp=2 plan.dp=2 plan.zero=2", 4),
)


@pytest.mark.parametrize(("plan", "ranks"), PLANS, ids=[plan for plan, _ in PLANS])
def test_bytes_on_every_axis_are_those_of_the_run(
    plan: str,
    ranks: int,
    tokens: Path,  # noqa: F811
    tmp_path: Path,
    pool: Pool,
) -> None:
    run = config(tokens, tmp_path / "run", "train.steps=2", "train.eval_every=0", *plan.split())
    setup = prepare(run)
    assert setup.world_size == ranks
    promised = promise(setup, cluster("h100", ranks))
    pool.run(ranks, jobs.train_in_pool, dump(run), ranks)
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    by_name = {each.what: each for each in compare(promised, rows)}
    sent = [each for what, each in by_name.items() if what.startswith("bytes sent")]
    assert sent
    assert [each.what for each in sent if each.error != 0.0] == []
    assert len([what for what in by_name if what.startswith("memory of rank")]) == ranks


def test_a_promise_is_kept_in_the_run_folder(tokens: Path, tmp_path: Path) -> None:  # noqa: F811
    setup = prepare(config(tokens, tmp_path / "run"))
    write_promise(setup)
    found = json.loads((tmp_path / "run" / PREDICTION).read_text())
    assert found["cluster"] == "local"
    assert found["low"] <= found["step_time_s"] <= found["high"]
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    assert {each.what for each in read(tmp_path / "run").compared} >= {"step time", "memory of rank 0"}
