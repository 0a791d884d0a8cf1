"""Another plan for the ranks that are there."""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from plait.core.config import Config, dump, loads
from plait.core.errors import PlanError
from plait.core.plan import Plan
from plait.train import elastic
from plait.train.elastic import Slots, fit
from plait.train.events_log import EVENTS, read
from plait.train.run import prepare
from tests.pool import Pool
from tests.train import jobs
from tests.train.test_launch import ENV
from tests.train.test_trainer import config, same_run, settings, tokens

__all__ = ["tokens"]


def wanted(plan: str, *fallbacks: str, batch: int = 12) -> Config:
    lines = "\n".join(plan.split())
    return loads(f"[plan]\n{lines}\n[train]\nglobal_batch = {batch}\n[run]\nfallback_plans = {list(fallbacks)}")


@pytest.fixture
def no_planner(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner knows of no plan."""
    monkeypatch.setattr(elastic, "_best", lambda config, ranks, *, alone: None)


@pytest.mark.parametrize("ranks", [3, 1])
def test_the_planner_makes_the_next_plan_and_keeps_the_precision(ranks: int) -> None:
    found, size = fit(wanted('tp=2 pp=2 precision="bf16" bucket_mb=2.0'), ranks)
    assert size == ranks
    assert (found.plan.precision, found.plan.bucket_mb, found.auto) == ("bf16", 2.0, None)
    assert prepare(found, world_size=size).config.train.global_batch == 12


def test_what_the_planner_says_is_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def says(one: Config, *, ranks: int, alone: bool) -> Config:
        assert (ranks, alone, one.auto) == (3, True, ("bucket_mb", "compress", "precision"))
        return dataclasses.replace(one, plan=Plan(pp=3), auto=None)

    monkeypatch.setattr(elastic, "planned", says)
    assert str(fit(wanted("dp=4"), 3)[0].plan) == "pp=3 dp=1"


@pytest.mark.parametrize(
    ("plan", "ranks", "becomes", "used"),
    [
        ("tp=2 pp=2", 4, "tp=2 pp=2 dp=1", 4),
        ("dp=4", 3, "dp=3", 3),
        ("tp=2", 3, "dp=3", 3),  # 4 heads do not divide by 3, 2 ranks a copy leave one out
        ("tp=2 dp=2", 2, "tp=2 dp=1", 2),
        ("pp=4", 1, "dp=1", 1),
        ('pp=2 dp=2 schedule="dualpipe-v" virtual=2 zero=1 zero_group=2', 3, "dp=3", 3),
    ],
)
def test_the_nearest_plan_that_works_on_what_is_left(
    plan: str, ranks: int, becomes: str, used: int, no_planner: None
) -> None:
    found, size = fit(wanted(plan), ranks)
    assert size == used
    for word in becomes.split():
        assert word in str(found.plan).split()
    setup = prepare(found, world_size=size)  # passes every rule
    assert setup.config.train.global_batch == 12
    assert setup.share * setup.dp == 12


def test_ranks_that_no_plan_can_use_are_left_out(no_planner: None) -> None:
    """5 copies do not divide a batch of 12, nor do 5 ranks any other way of this model."""
    _, size = fit(wanted("tp=2 dp=3"), 5)
    assert size == 4
    with pytest.raises(PlanError, match=r"does not work on 5 ranks, and no plan near it does on so many$"):
        fit(wanted("tp=2 dp=3"), 5, exactly=True)


def test_fallback_plans_are_tried_in_order_and_alone() -> None:
    one = wanted("dp=4", "tp=2 pp=2", "pp=2 tp=1", "dp=1 micro=2")
    assert [(str(fit(one, ranks)[0].plan), fit(one, ranks)[1]) for ranks in (4, 3, 2, 1)] == [
        ("dp=4", 4),
        ("pp=2 dp=1", 2),
        ("pp=2 dp=1", 2),
        ("dp=1 micro=2", 1),
    ]
    with pytest.raises(PlanError, match=r"none of run\.fallback_plans = \['pp=4'\]"):
        fit(wanted("dp=4", "pp=4"), 3)


def test_places_are_what_the_file_says_and_lost_until_it_is_written_anew(tmp_path: Path) -> None:
    assert Slots.of(3, {}).usable() == (0, 1, 2)
    file = tmp_path / "slots"
    slots = Slots.of(3, {"PLAIT_SLOTS": str(file)})
    assert slots.usable() == (0, 1, 2)  # there is no file
    file.write_text("2 0 7\n")
    assert slots.usable() == (0, 2)
    slots.lost.add(2)
    assert slots.usable() == (0,)
    file.write_text("0 x")
    assert slots.usable() == (0, 1)  # half written: all but the lost one
    file.write_text("0 1 2")
    os.utime(file, ns=(1, 1))
    assert slots.usable() == (0, 1, 2)


def test_torchrun_with_fewer_ranks_goes_on_under_another_plan(pool: Pool, tokens: Path, tmp_path: Path) -> None:
    """Two ranks to a checkpoint of step 4 of 8; then one rank, as torchrun's elastic mode starts it again."""
    whole, folder = tmp_path / "whole", tmp_path / "run"
    more = ("train.steps=8", "train.eval_every=0", "optimizer.schedule=constant", "run.device=cpu")
    more += ("plan.tp=1", "plan.pp=1", "plan.dp=2")
    pool.run(2, jobs.train_in_pool, dump(config(tokens, whole, *more)), 2)
    pool.run(2, jobs.train_in_pool, dump(config(tokens, folder, *more, "train.steps=4")), 2)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        env = {**ENV, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    env |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    command = [sys.executable, "-P", "-m", "plait", "train", "--json"]
    for text in settings(tokens, folder, *more):
        command += ["--set", text]
    run = subprocess.run(
        command,
        env={**env, "TORCHELASTIC_RESTART_COUNT": "1"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    same_run(folder, whole)
    resumed = [event.fields for event in read(folder / EVENTS) if event.kind == "resume"]
    assert [(fields["step"], fields["plan"]) for fields in resumed] == [(4, "dp=1")]
