"""The stage cut of a run whose ranks are of unequal speed changes while it goes on, and the run stays the same."""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from plait.core.config import Config, dump, loads
from plait.core.errors import PlanError
from plait.core.plan import Plan
from plait.core.topology import Topology
from plait.models.decoder import Decoder
from plait.parallel.apply import Parallel
from plait.planner.clusters import cluster
from plait.telemetry.record import read_metrics
from plait.telemetry.report import read as read_report
from plait.telemetry.report import render
from plait.train import recut, trainer
from plait.train.events_log import EVENTS, FAILURE, EventLog, LoggedEvent, read
from plait.train.recut import LEAST_STEPS, REBALANCED, Recut, recalled
from plait.train.restart import _Supervisor
from plait.train.run import prepare
from plait.train.trainer import switch
from tests.pool import Connect, Pool
from tests.train import jobs
from tests.train.test_trainer import config, same_run, tokens

__all__ = ["tokens"]

RUN = (
    "model.num_layers=8",
    "train.eval_every=0",
    "train.global_batch=4",
    "optimizer.schedule=constant",
    "checkpoint.asynchronous=false",
    "run.threads=1",
    "run.device=cpu",
    "plan.pp=2",
    "plan.stages=[4,4]",
)
UNKNOWN = mock.patch.object(recut, "machine", lambda device, ranks: None)
"""A device that the planner does not know: what it says of this machine depends on who else computes here."""


def train_slowly(connect: Connect, text: str, ranks: int, slow: int, factor: float) -> int:
    """A run in which the forwards of pipeline rank ``slow`` take ``factor`` times as long as they would; how many
    models are in memory after it."""
    forward = Decoder.forward

    def slowly(self: Decoder, *arguments: Any) -> Tensor:
        begin = time.perf_counter()
        found: Tensor = forward(self, *arguments)
        time.sleep((factor - 1) * (time.perf_counter() - begin) if connect.rank == slow else 0.0)
        return found

    with mock.patch.object(Decoder, "forward", slowly), UNKNOWN:
        jobs.train_in_pool(connect, text, ranks)
    return sum(isinstance(one, Parallel) for one in gc.get_objects())


SOON = 3


def events(folder: Path, kind: str) -> list[LoggedEvent]:
    return [event for event in read(folder / EVENTS) if event.kind == kind]


def feed(connect: Connect, text: str, ranks: int, blocks: list[tuple[int, list[float]]]) -> list[dict[str, Any] | None]:
    """What `Recut` wants after each block of (steps, what each rank computed in each of them); the steps are taken one
    after the other, and each takes what the slowest rank computed."""
    setup = prepare(loads(text), world_size=ranks)
    with UNKNOWN:
        watch = Recut(setup, connect(setup.plan.mesh(ranks)))
    done, told = 0, []
    for steps, computes in blocks:
        found = []
        for _ in range(steps):
            done += 1
            found.append(watch.observe(done, max(computes), computes))
        told.append(next((one.fields for one in found if one is not None), None))
    return told


def blocks(pool: Pool, run: Config, *given: tuple[int, list[float]], ranks: int = 2) -> list[dict[str, Any] | None]:
    told: list[list[dict[str, Any] | None]] = pool.run(ranks, feed, dump(run), ranks, list(given))
    assert all(one == told[0] for one in told)
    return told[0]


def test_layers_move_away_from_a_slow_rank_and_the_run_is_the_same(pool: Pool, tokens: Path, tmp_path: Path) -> None:
    """A forward is about a third of a rank's computing: 13 times slower, it makes the rank 5 times slower. Both models
    are gone when the run has ended: a cut leaves nothing behind."""
    steps = LEAST_STEPS + 2
    sizes = (*RUN, f"train.steps={2 * LEAST_STEPS + 2}")
    run = config(tokens, tmp_path / "run", *sizes, "run.rebalance=4")
    assert pool.run(2, train_slowly, dump(run), 2, 1, 13.0) == [0, 0]
    pool.run(2, jobs.train_in_pool, dump(config(tokens, tmp_path / "calm", *sizes)), 2)
    (event,) = events(tmp_path / "run", REBALANCED)
    told = event.fields
    assert (told["step"], told["old"], sum(told["new"])) == (steps, [4, 4], 8)
    assert told["new"][1] < 4
    assert told["slow"][0] == 1.0 < told["slow"][1]
    assert told["gain"] >= 0.05
    (resumed,) = events(tmp_path / "run", "resume")
    assert (resumed.fields["step"], resumed.fields["plan"]) == (steps, told["plan"])
    assert [row["step"] for row in read_metrics(tmp_path / "run/metrics.jsonl")] == [*range(2 * LEAST_STEPS + 2)]
    assert "rebalanced" in render(read_report(tmp_path / "run"))
    assert read_report(tmp_path / "run").compared_from == steps + 1
    same_run(tmp_path / "run", tmp_path / "calm")


def change(connect: Connect, text: str, ranks: int, cut: list[int]) -> None:
    """A run whose first look, `SOON` steps after the two that are left out, takes ``cut``, whatever was measured."""

    def given(*arguments: object) -> tuple[int, ...]:
        return tuple(cut)

    with mock.patch.multiple(recut, best_cut=given, WORTH=-math.inf, LEAST_STEPS=SOON):
        jobs.train_in_pool(connect, text, ranks)


def test_what_went_wrong_with_the_save_before_a_change_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    keeper = mock.Mock(**{"warnings.return_value": ["checkpoint of step 9: no room"]})
    change = mock.Mock(fields={}, __str__=lambda _: "step 9: another cut")
    assert switch(keeper, change, chief=False) is change.setup
    with mock.patch.object(trainer, "write_promise") as promise:
        assert switch(keeper, change, chief=True) is change.setup
    assert promise.call_count == 1
    said = capsys.readouterr().err.splitlines()
    assert said == ["plait: warning: checkpoint of step 9: no room", "plait: warning: step 9: another cut"]


def test_experts_and_stages_along_a_v_move_too(pool: Pool, tokens: Path, tmp_path: Path) -> None:
    """zb-v, ZeRO, experts that lie by load, saves under way and evaluations: the run is that of the unchanged cut."""
    model = ("model.family=mixtral", "model.moe={num_experts = 4, top_k = 2, ffn_size = 48}", "moe.placement=load")
    plan = ("plan.dp=2", "plan.ep=2", "plan.zero=1", "plan.virtual=2", "plan.schedule=zb-v", "plan.stages=[2,2,2,2]")
    more = ("checkpoint.every=2", "checkpoint.asynchronous=true", "train.eval_every=3", "train.eval_batches=1")
    sizes = (*RUN, *model, *plan, *more, f"train.steps={2 * SOON + 2}")
    pool.run(4, jobs.train_in_pool, dump(config(tokens, tmp_path / "calm", *sizes)), 4)
    run = config(tokens, tmp_path / "run", *sizes, "run.rebalance=1")
    pool.run(4, change, dump(run), 4, [1, 3, 3, 1])
    told = [(event.fields["step"], event.fields["new"]) for event in events(tmp_path / "run", REBALANCED)]
    assert told == [(SOON + 2, [1, 3, 3, 1])]
    same_run(tmp_path / "run", tmp_path / "calm")


def test_the_slowest_of_the_ranks_of_a_stage_counts(pool: Pool, tokens: Path, tmp_path: Path) -> None:
    """pp=2 dp=2: ranks 0 and 1 have the first stage. The fields are what the planner's cut says of the speeds."""
    run = config(tokens, tmp_path / "run", *RUN, "train.global_batch=64", "train.steps=100", "run.rebalance=10")
    even, uneven = [1.0, 1.0, 1.0, 1.0], [1.0, 3.0, 1.0, 1.0]
    assert blocks(pool, run, (12, even), ranks=4) == [None]
    (told,) = blocks(pool, run, (12, uneven), ranks=4)
    assert told is not None
    assert (told["step"], told["old"], told["slow"]) == (12, [4, 4], [pytest.approx(3.0, rel=0.3), 1.0])
    assert told["new"] in ([2, 6], [3, 5])
    assert Plan.parse(told["plan"]).stages == tuple(told["new"])


def test_what_passes_within_the_steps_looked_at_changes_nothing(pool: Pool, tokens: Path, tmp_path: Path) -> None:
    """The first two steps under a cut are left out; both halves of the others have to say the same."""
    run = config(tokens, tmp_path / "run", *RUN, "train.steps=100", "run.rebalance=10")
    even, slow = (5, [1.0, 1.0]), (5, [1.0, 3.0])
    told = blocks(pool, run, (2, [1.0, 9.0]), even, slow, slow, even, slow, slow)
    assert [one is not None for one in told] == [False, False, False, False, False, False, True]


def test_each_change_doubles_the_steps_until_the_next_and_the_end_has_none(
    pool: Pool, tokens: Path, tmp_path: Path
) -> None:
    run = config(tokens, tmp_path / "run", *RUN, "train.steps=100", "run.rebalance=10")
    log = EventLog(tmp_path / "run" / EVENTS)
    for wait in (10, 20, 40):
        (first, second) = blocks(pool, run, (1 + wait, [1.0, 3.0]), (1, [1.0, 3.0]))
        assert first is None
        assert second is not None
        assert second["step"] == 2 + wait
        log.write(REBALANCED, second)
    # Four changes would be worth 80 steps, of which fewer are left.
    assert blocks(pool, run, (100, [1.0, 3.0])) == [None]


def feed_crowded(connect: Connect, text: str, ranks: int, given: list[tuple[int, list[float]]]) -> list[Any]:
    """`feed` on devices without room for more than what the fullest of them has already."""

    def crowded(name: str, devices: int) -> Topology:
        found = cluster(name, devices)
        return dataclasses.replace(found, device=dataclasses.replace(found.device, memory=1e6))

    with mock.patch.object(recut, "cluster", crowded):
        return feed(connect, text, ranks, given)


def test_no_rank_gets_more_layers_than_it_has_room_for(pool: Pool, tokens: Path, tmp_path: Path) -> None:
    """The first rank has the embedding and more live microbatches: it is the fullest, and stays what it is."""
    model = ("model.hidden_size=64", "model.vocab_size=256", "train.global_batch=16", "train.steps=100")
    run = config(tokens, tmp_path / "run", *RUN, *model, "run.rebalance=10")
    given = [(12, [1.0, 3.0])]
    (free,) = pool.run(2, feed, dump(run), 2, given)[0]
    assert free["new"][0] > 4
    assert pool.run(2, feed_crowded, dump(run), 2, given)[0] == [None]


def feed_apart(connect: Connect, text: str, ranks: int, given: list[tuple[int, list[float]]]) -> list[Any]:
    """`feed` where one rank comes to another cut than the others."""

    def found(*arguments: object) -> tuple[int, ...]:
        return (6, 2) if connect.rank else (5, 3)

    with mock.patch.multiple(recut, best_cut=found, WORTH=-math.inf):
        return feed(connect, text, ranks, given)


def test_one_rank_alone_changes_nothing(pool: Pool, tokens: Path, tmp_path: Path) -> None:
    run = config(tokens, tmp_path / "run", *RUN, "train.steps=100", "run.rebalance=10")
    assert pool.run(2, feed_apart, dump(run), 2, [(12, [1.0, 3.0])]) == [[None], [None]]


def test_a_run_that_goes_on_has_the_cut_that_it_had(tokens: Path, tmp_path: Path) -> None:
    """Whoever starts its ranks again; under another plan it has that one's cut, and without run.rebalance its own."""
    run = config(tokens, tmp_path / "run", *RUN, "run.rebalance=10", "run.resume=true")
    log = EventLog(tmp_path / "run" / EVENTS)
    for plan in ("pp=2 dp=1 stages=2,6", "pp=2 dp=1 stages=1,7", "pp=2 dp=2 stages=5,3", "pp=2 dp=1 stages=1,8"):
        log.write(REBALANCED, {"plan": plan})

    def cut(one: Config, ranks: int) -> tuple[int, ...] | None:
        setup = recalled(prepare(one, world_size=ranks))
        assert setup.config.plan.stages == setup.plan.stages
        return setup.plan.stages

    assert [cut(run, ranks) for ranks in (2, 4, 8)] == [(1, 7), (5, 3), (4, 4)]
    assert cut(dataclasses.replace(run, run=dataclasses.replace(run.run, rebalance=0)), 2) == (4, 4)
    assert cut(dataclasses.replace(run, run=dataclasses.replace(run.run, resume=False)), 2) == (4, 4)
    assert cut(dataclasses.replace(run, plan=dataclasses.replace(run.plan, stages=None)), 2) == (1, 7)
    assert cut(dataclasses.replace(run, plan=dataclasses.replace(run.plan, micro=2)), 2) == (4, 4)


def test_a_cut_under_which_no_step_could_be_taken_is_given_up(pool: Pool, tokens: Path, tmp_path: Path) -> None:
    """Out of memory where the model saw room, say: the restart has the cut of before, and it is not tried again."""
    run = config(tokens, tmp_path / "run", *RUN, "train.steps=200", "run.rebalance=10")
    resumed = prepare(dataclasses.replace(run, run=dataclasses.replace(run.run, resume=True)), world_size=2)
    (told,) = blocks(pool, run, (12, [1.0, 3.0]))
    assert told is not None
    log = EventLog(tmp_path / "run" / EVENTS)
    log.write(REBALANCED, told)
    new = tuple(told["new"])
    assert recalled(resumed).plan.stages == new
    for step in (told["step"] + 1, told["step"]):  # it had taken steps: what comes after that is not its fault
        log.write(FAILURE, {"rank": 1, "step": step})
        assert recalled(resumed).plan.stages == new
    (tmp_path / "run" / EVENTS).unlink()
    log.write(REBALANCED, told)
    log.write(FAILURE, {"rank": 1, "step": told["step"]})
    assert recalled(resumed).plan.stages == (4, 4)
    tried = dataclasses.replace(resumed, plan=dataclasses.replace(resumed.plan, stages=new))
    assert recalled(tried).plan.stages == (4, 4)  # what the folder's config.toml has
    (other,) = blocks(pool, run, (42, [1.0, 3.0]))
    assert other is None or tuple(other["new"]) != new


def test_ranks_that_fail_are_started_again_under_the_cut_that_they_had(tokens: Path, tmp_path: Path) -> None:
    run = config(tokens, tmp_path / "run", *RUN, "run.rebalance=10")
    supervisor = _Supervisor(run, 2, True, "", None)
    assert supervisor._planned(False)[0].plan.stages == (4, 4)
    EventLog(tmp_path / "run" / EVENTS).write(REBALANCED, {"plan": "pp=2 dp=1 stages=1,7"})
    again, ranks = supervisor._planned(True)
    assert (again.plan.stages, again.run.resume, ranks) == ((1, 7), True, 2)
    assert read_report_plan(tmp_path / "run") == "pp=2 dp=1 stages=1,7"


def read_report_plan(folder: Path) -> str:
    """The plan that ``prediction.json`` is about."""
    return str(json.loads((folder / "prediction.json").read_text())["plan"])


def test_what_does_not_move_with_the_layers_is_refused() -> None:
    text = '[plan]\npp = 2\ncompress = "topk:0.1"\n[run]\nrebalance = 10'
    with pytest.raises(
        PlanError, match=r"rebalance=10 with compress=topk:0\.1: .* works: rebalance=0, or compress=half"
    ):
        prepare(loads(text))
    prepare(loads(text.replace("pp = 2", "pp = 1")))
