"""A loss or a gradient that is no number: all ranks judge alike, and stop, skip or go back (F14)."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from plait.checkpoint.reader import Checkpoint
from plait.comm.world import World
from plait.core.config import dump, loads
from plait.core.errors import DivergedError
from plait.models.batch import Batch
from plait.parallel.precision import LEAST_SCALE, LossScale
from plait.telemetry.record import read_metrics
from plait.train.data import Samples
from plait.train.events_log import EVENTS, LoggedEvent, read
from plait.train.nan import hopeless
from plait.train.run import prepare
from plait.train.step import Steps, Taken
from plait.train.trainer import train
from tests.pool import Connect, Pool
from tests.train.test_trainer import config, tokens

__all__ = ["tokens"]

RUN = ("train.steps=6", "train.eval_every=0", "optimizer.warmup=2", "checkpoint.every=2")


def train_with_nan(connect: Connect, text: str, world_size: int, bad: list[int]) -> tuple[str | None, list[int]]:
    """Train on this rank. In the global batches ``bad``, counted in the order of the data, the gradients of the last
    rank, and of no other, hold a NaN. Returns what the run failed with, and the global batches that were seen."""
    setup = prepare(loads(text), world_size=world_size)
    world = World.alone() if world_size == 1 else connect(setup.plan.mesh(world_size))
    seen: list[int] = []
    count, batches_of = Samples.target_count, Steps._batches

    def counting(samples: Samples, step: int) -> int:
        if not seen or seen[-1] != step:
            seen.append(step)
        return count(samples, step)

    def spoiled(steps: Steps, step: int) -> list[Batch]:
        batches = batches_of(steps, step)
        if step + steps.shift in bad and world.rank == world_size - 1:
            return [*batches[:-1], dataclasses.replace(batches[-1], scale=math.nan)]  # of the loss's gradient
        return batches

    with mock.patch.object(Samples, "target_count", counting), mock.patch.object(Steps, "_batches", spoiled):
        try:
            train(setup, world, as_json=True)
        except DivergedError as error:
            return str(error), seen
    return None, seen


def spoil(
    pool: Pool, tokens: Path, folder: Path, bad: list[int], *more: str, plan: tuple[str, ...] = ("plan.dp=2",)
) -> tuple[str | None, list[int]]:
    """All ranks of a run see the same."""
    run = config(tokens, folder, *RUN, *plan, *more)
    first, *others = pool.run(2, train_with_nan, dump(run), 2, bad)
    assert all(other == first for other in others)
    return first  # type: ignore[no-any-return]


def losses(folder: Path) -> list[tuple[int, bool]]:
    """(step, whether its norm is a number) of every row."""
    return [(row["step"], row["grad_norm"] is not None) for row in read_metrics(folder / "metrics.jsonl")]  # type: ignore[misc]


def events(folder: Path, kind: str) -> list[LoggedEvent]:
    return [event for event in read(folder / EVENTS) if event.kind == kind]


def weights(path: Path) -> dict[str, Tensor]:
    checkpoint = Checkpoint.open(path)
    return {name: checkpoint.read(name) for name in checkpoint.names}


def test_stop_leaves_the_last_good_state(pool: Pool, tokens: Path, tmp_path: Path) -> None:
    failure, _ = spoil(pool, tokens, tmp_path, [3])
    assert failure is not None
    assert "step 3: the loss is " in failure and "the gradient norm nan: training has diverged" in failure
    assert losses(tmp_path) == [(0, True), (1, True), (2, True), (3, False)]
    names = [path.name for path in (tmp_path / "checkpoints").glob("step-*")]
    assert names == ["step-00000002"]
    assert not (tmp_path / "weights").exists()


@pytest.mark.parametrize(
    "plan",
    [("plan.dp=2", "plan.zero=2"), ("plan.pp=2", "plan.schedule=2bw"), ("plan.dp=2", "plan.compress=topk:0.2")],
    ids=["zero2", "2bw", "topk"],
)
def test_skip_leaves_the_update_out(pool: Pool, tokens: Path, tmp_path: Path, plan: tuple[str, ...]) -> None:
    more = ("run.nan=skip", "checkpoint.every=1", "checkpoint.keep=9")
    failure, _ = spoil(pool, tokens, tmp_path, [2], *more, plan=plan)
    assert failure is None
    assert losses(tmp_path) == [(step, step != 2) for step in range(6)]
    (event,) = events(tmp_path, "skip")
    assert (event.fields["step"], event.fields["grad_norm"], event.fields["in_a_row"]) == (2, "nan", 1)
    before, after, later = (weights(tmp_path / f"checkpoints/step-0000000{step}") for step in (2, 3, 4))
    kept = [name for name in before if name.startswith(("weights/", "exp_avg"))]
    assert all(torch.equal(before[name], after[name]) for name in kept)
    assert not any(torch.equal(after[name], later[name]) for name in kept if name.startswith("exp_avg/"))
    assert all(bool(value.isfinite().all()) for value in later.values())


def test_skips_in_a_row_are_bounded(pool: Pool, tokens: Path, tmp_path: Path) -> None:
    failure, _ = spoil(pool, tokens, tmp_path, [0, 2, 3, 4], "run.nan=skip", "run.max_skips=2")
    assert failure is not None
    assert "step 4: " in failure and "2 steps in a row were skipped before" in failure
    assert [event.fields["in_a_row"] for event in events(tmp_path, "skip")] == [1, 1, 2]


@pytest.mark.parametrize(
    "plan", [("plan.dp=2", "plan.zero=3"), ("plan.pp=2", "plan.schedule=2bw")], ids=["zero3", "2bw"]
)
def test_rollback_leaves_the_data_window_out(pool: Pool, tokens: Path, tmp_path: Path, plan: tuple[str, ...]) -> None:
    """The run that went back is one that never met the global batches 2 and 3: so it sees 0 1, 4 5 6 7."""
    failure, seen = spoil(pool, tokens, tmp_path / "run", [3], "run.nan=rollback", plan=plan)
    assert failure is None
    if "plan.dp=2" in plan:  # each global batch is counted as it comes; a window of 2bw counts the next one as well
        assert seen == [0, 1, 2, 3, 4, 5, 6, 7]
    assert losses(tmp_path / "run") == [(step, True) for step in range(6)]
    (event,) = events(tmp_path / "run", "rollback")
    assert (event.fields["step"], event.fields["to"]) == (3, 2)
    newest = Checkpoint.open(tmp_path / "run/checkpoints/step-00000006")
    assert newest.scalars["sample"] == (6 + 2) * 4
    # And goes on with the batches behind, when it is stopped and resumed.
    again = config(tokens, tmp_path / "run", *RUN, *plan, "run.resume=true", "train.steps=7")
    answers = pool.run(2, train_with_nan, dump(again), 2, [])
    assert [answer[1][-1] for answer in answers] == [8, 8]


def test_rollbacks_are_bounded_and_need_a_checkpoint(pool: Pool, tokens: Path, tmp_path: Path) -> None:
    failure, seen = spoil(pool, tokens, tmp_path / "all", [*range(3, 40)], "run.nan=rollback", "run.max_skips=3")
    assert failure is not None
    assert "after 3 rollbacks" in failure
    assert seen == [0, 1, 2, 3, 4, 5, 6]
    failure, _ = spoil(pool, tokens, tmp_path / "none", [1], "run.nan=rollback")
    assert failure is not None
    assert "no checkpoint to go back to" in failure


def test_what_a_loss_scale_can_be_blamed_for() -> None:
    def taken(loss: float, norm: float, scale: float | None) -> Taken:
        skipped = scale is not None and not math.isfinite(norm)
        return Taken(loss=loss, norm=norm, lr=0.1, skipped=skipped, loss_scale=scale, routers={})

    assert not hopeless(taken(2.0, 1.0, None), None)
    assert hopeless(taken(2.0, math.inf, None), None)
    assert hopeless(taken(math.nan, 1.0, None), None)
    scale = LossScale()
    assert not hopeless(taken(2.0, math.inf, 1024.0), scale)
    assert hopeless(taken(2.0, math.inf, LEAST_SCALE), scale)
    assert hopeless(taken(math.nan, math.nan, 1024.0), scale)
