"""A plan that plait makes for the machine it is on."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.core.config import load
from plait.core.errors import ConfigError, PlanError
from plait.train import auto
from plait.train.auto import planned
from plait.train.run import prepare


@pytest.fixture(autouse=True)
def uncalibrated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_given_plan_is_left_alone() -> None:
    config = load(None)
    assert planned(config) is config


def test_the_plan_uses_all_ranks_and_can_work() -> None:
    config = planned(load(None, ["plan=auto", "run.processes=4"]))
    assert config.auto is None
    assert prepare(config).world_size == 4


def test_given_keys_are_kept() -> None:
    config = planned(load(None, ["plan=auto", "plan.pp=2", "plan.micro=2", "run.processes=4"]))
    assert (config.plan.pp, config.plan.micro) == (2, 2)


def test_a_model_that_fits_nowhere_is_refused_with_what_is_nearest() -> None:
    with pytest.raises(PlanError, match=r"no plan for 2 ranks fits.*GiB"):
        planned(load(None, ["plan=auto", "model.preset=deepseek-v3", "run.processes=2"]))


def test_ranks_that_choose_apart_do_not_estimate() -> None:
    with pytest.raises(ConfigError, match="plait calibrate"):
        planned(load(None, ["plan=auto", "run.processes=2", "run.device=cpu"]), alone=False)


def test_a_config_without_its_plan_does_not_run() -> None:
    with pytest.raises(ConfigError, match="not made yet"):
        prepare(load(None, ["plan=auto"]))


def test_without_processes_there_is_a_rank_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "cores", lambda: 2)
    assert prepare(planned(load(None, ["plan=auto", "run.device=cpu"]))).world_size == 2
