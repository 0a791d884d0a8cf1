"""Checkpoints between plans, and runs that go on as if they had never stopped."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from plait.checkpoint import disk
from plait.checkpoint.reader import Checkpoint
from plait.comm.world import World
from plait.core.config import dump, load, loads
from plait.core.errors import ConfigError, SaveError, WeightsError
from plait.telemetry.record import EVAL_KEY, read_metrics
from plait.train import rebalance
from plait.train.data import write_tokens
from plait.train.events_log import EVENTS, read
from plait.train.resume import Keeper, config_of
from plait.train.run import build, claim_folder, open_samples, prepare
from plait.train.same import expected
from plait.train.step import Steps, Taken
from plait.train.supervise import StoppedError
from plait.train.trainer import train
from tests.pool import Connect, Pool
from tests.train.test_trainer import config, same_run, tokens

__all__ = ["tokens"]

EXPERTS = (
    "model.moe={num_experts = 8, top_k = 2, ffn_size = 24, shared_ffn = 16, dense_layers = [0]}",
    "moe.aux_loss=0.02",
    "moe.bias_balance=true",
    "model.tied=true",
    "model.vocab_size=259",  # uneven over tp
    "train.global_batch=12",
    "plan.bucket_mb=0.01",
)
PLANS = {
    "one": (1, ("plan.micro=6",)),
    "tp4": (4, ("plan.tp=4", "plan.micro=6")),  # two ranks share each of the 2 KV heads
    "three": (3, ("plan.dp=3", "plan.zero=1", "plan.micro=2")),
    "ep-zero3": (4, ("plan.dp=4", "plan.ep=2", "plan.zero=3", "moe.placement=load", "plan.micro=3")),
    "tp-ep-zero2-bf16": (
        4,
        ("plan.dp=2", "plan.tp=2", "plan.ep=4", "plan.zero=2", "plan.precision=bf16", "plan.micro=3"),
    ),
    "groups-cp": (4, ("plan.dp=2", "plan.cp=2", "plan.zero=1", "plan.zero_group=2", "plan.micro=3")),
    "interleaved": (
        4,
        ("plan.pp=2", "plan.virtual=2", "plan.schedule=interleaved", "plan.dp=2", "plan.zero=2", "plan.micro=2"),
    ),
}


def visit(connect: Connect, text: str, world_size: int, steps: int, sources: list[str], folder: str) -> None:
    """On one rank: take ``steps`` steps and save them; or load what is in each of ``sources``, and save that again."""
    setup = prepare(loads(text), world_size=world_size)
    world = World.alone() if world_size == 1 else connect(setup.plan.mesh(world_size))
    parallel, samples = build(setup, world), open_samples(setup)
    taking = Steps(setup, parallel, samples, setup.config.train.steps)

    def keeper(place: Path, *, resume: bool) -> Keeper:
        run = dataclasses.replace(setup.config.run, resume=resume)
        checkpoint = dataclasses.replace(setup.config.checkpoint, dir=place)
        config = dataclasses.replace(setup.config, run=run, checkpoint=checkpoint)
        return Keeper(dataclasses.replace(setup, config=config), parallel, samples, taking)

    with mock.patch.object(rebalance, "EVERY", 2):  # placed by load, experts move in the second step
        for step in range(steps):
            taking.take(step)
    if steps:
        keeper(Path(folder) / "own", resume=False).finish(steps)
    for source in map(Path, sources):
        done = keeper(source, resume=True).resume()
        again = keeper(Path(folder) / source.parent.name, resume=False)
        again.finish(done)
        assert again.warnings() == []


def whole(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    (path,) = folder.glob("step-*")
    opened = Checkpoint.open(path, verify=True)
    return {name: opened.read(name) for name in opened.names}, dict(opened.scalars)


def test_every_plan_reads_what_every_other_has_written(pool: Pool, tokens: Path, tmp_path: Path) -> None:
    """42 ordered pairs: weights, moments, routers' state bit for bit, whatever they were cut into (F6, F10, F19)."""
    texts = {
        name: (ranks, dump(config(tokens, tmp_path / name, *EXPERTS, *plan))) for name, (ranks, plan) in PLANS.items()
    }
    for name, (ranks, text) in texts.items():
        pool.run(ranks, visit, text, ranks, 2, [], str(tmp_path / name))
    saved = {name: whole(tmp_path / name / "own") for name in PLANS}
    for target, (ranks, text) in texts.items():
        sources = [str(tmp_path / source / "own") for source in PLANS if source != target]
        pool.run(ranks, visit, text, ranks, 0, sources, str(tmp_path / target))
        for source in PLANS:
            if source == target:
                continue
            found, scalars = whole(tmp_path / target / source)
            expected, before = saved[source]
            assert found.keys() == expected.keys()
            for name, values in expected.items():
                assert found[name].dtype == values.dtype == torch.float32
                assert torch.equal(found[name], values), f"{name}, {source} -> {target}"
            assert {key: scalars[key] for key in ("step", "sample", "updates", "run")} == {
                key: before[key] for key in ("step", "sample", "updates", "run")
            }
    moved = saved["ep-zero3"][1]["experts"]["placements"].values()
    assert any(placed["order"] != sorted(placed["order"]) for placed in moved)
    names = set(saved["one"][0])
    assert {
        "weights/layers.1.mlp.router.bias",
        "router/layers.3.share",
        "exp_avg_sq/layers.2.mlp.experts.down",
    } <= names
    assert "router/layers.0.share" not in names


# Going on


RUN = ("train.steps=6", "train.eval_every=0", "optimizer.warmup=2", "model.dropout=0.1", "train.global_batch=4")


def train_until(connect: Connect, text: str, world_size: int, stop: int | None) -> str | None:
    """Train on this rank; the last one gets a SIGUSR1 in step ``stop``. Returns what a stopped run says."""
    setup = prepare(loads(text), world_size=world_size)
    world = World.alone() if world_size == 1 else connect(setup.plan.mesh(world_size))
    take = Steps.take

    def taking(steps: Steps, step: int) -> Taken:
        if step == stop and world.rank == world_size - 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        return take(steps, step)

    # Experts move in the second step already: the checkpoint is one of moved experts.
    with mock.patch.object(Steps, "take", taking), mock.patch.object(rebalance, "EVERY", 2):
        try:
            train(setup, world, as_json=True)
        except StoppedError as stopped:
            return str(stopped)
    return None


def stopped_and_resumed(
    pool: Pool, tokens: Path, folder: Path, first: tuple[int, tuple[str, ...]], then: tuple[int, tuple[str, ...]]
) -> None:
    """A run of 6 steps in ``folder`` that a signal stops in step 2 (of 0 .. 5), and that goes on under ``then``."""
    ranks, plan = first
    run = config(tokens, folder, *RUN, *plan)
    answers = pool.run(ranks, train_until, dump(run), ranks, 2)
    assert answers == ["stopped by SIGUSR1 after 3 steps; the state is saved, plait train --resume goes on"] * ranks
    assert [row["step"] for row in read_metrics(folder / "metrics.jsonl")] == [0, 1, 2]
    assert not (folder / "weights").exists()
    with (folder / "metrics.jsonl").open("a") as lines:
        # As of a run that was killed two steps after its last checkpoint.
        for step in (3, 4):
            lines.write(json.dumps({"step": step, "loss": 0.0}) + "\n")
    ranks, plan = then
    again = config(tokens, folder, *RUN, *plan, "run.resume=true")
    assert pool.run(ranks, train_until, dump(again), ranks, None) == [None] * ranks
    assert [row["step"] for row in read_metrics(folder / "metrics.jsonl")] == list(range(6))


MOE_RUN = (*EXPERTS[:-3], "plan.bucket_mb=0.01")
SAME = {
    "one": (1, ("optimizer.clip=0.5",)),
    "zero3": (4, ("plan.dp=2", "plan.tp=2", "plan.zero=3")),
    "2bw": (2, ("plan.pp=2", "plan.schedule=2bw")),
    "fp16": (2, ("plan.dp=2", "plan.precision=fp16", "plan.zero=1")),
    "topk": (2, ("plan.dp=2", "plan.compress=topk:0.2")),
    "powersgd": (2, ("plan.dp=2", "plan.compress=powersgd:2", "plan.zero=1")),
    "auto": (2, ("plan.pp=2", "plan.schedule=auto")),
    "experts": (4, (*MOE_RUN, "plan.dp=2", "plan.cp=2", "plan.ep=4", "plan.zero=2")),
    "moved": (2, (*MOE_RUN, "plan.dp=2", "plan.ep=2", "plan.zero=1", "moe.placement=load")),
}


@pytest.mark.parametrize("name", SAME)
def test_the_same_plan_goes_on_bit_for_bit(pool: Pool, tokens: Path, tmp_path: Path, name: str) -> None:
    """Losses, norms, weights and moments of the run that was stopped are those of one that was not (F8, F9, F10)."""
    ranks, plan = SAME[name]
    stopped_and_resumed(pool, tokens, tmp_path / "run", (ranks, plan), (ranks, plan))
    straight = config(tokens, tmp_path / "straight", *RUN, *plan)
    pool.run(ranks, train_until, dump(straight), ranks, None)
    same_run(tmp_path / "run", tmp_path / "straight", loss=0, weights=0)
    found, scalars = newest(tmp_path / "run")
    expected, wanted = newest(tmp_path / "straight")
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        assert torch.equal(found[key], values), key
    assert scalars["loss_scale"] == wanted["loss_scale"]
    before = Checkpoint.open(tmp_path / "run/checkpoints/step-00000003").scalars
    assert scalars["calibration"] == before["calibration"]  # measured once
    assert scalars["sample"] == 6 * 4
    if name == "moved":
        assert scalars["experts"] == wanted["experts"]
        orders = [placed["order"] for placed in scalars["experts"]["placements"].values()]
        assert any(order != sorted(order) for order in orders)


def newest(run: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    path = run / "checkpoints/step-00000006"
    opened = Checkpoint.open(path, verify=True)
    return {name: opened.read(name) for name in opened.names}, dict(opened.scalars)


@pytest.mark.parametrize(
    ("first", "then", "more"),
    [
        ((4, ("plan.dp=2", "plan.tp=2", "plan.zero=1")), (2, ("plan.pp=2",)), ()),
        ((1, ()), (4, ("plan.pp=2", "plan.cp=2", "plan.zero=3")), ("optimizer.schedule=wsd",)),
        ((4, ("plan.dp=4", "plan.ep=4", "plan.zero=2")), (2, ("plan.tp=2",)), MOE_RUN),
    ],
    ids=["pp2", "zero3", "experts"],
)
def test_another_plan_goes_on_with_the_same_run(
    pool: Pool,
    tokens: Path,
    tmp_path: Path,
    first: tuple[int, tuple[str, ...]],
    then: tuple[int, tuple[str, ...]],
    more: tuple[str, ...],
) -> None:
    """Data order, dropout, learning rate, moments: the run is that of one process that never stopped (F6, F8, P12)."""
    plans = [(ranks, (*more, *plan)) for ranks, plan in (first, then)]
    stopped_and_resumed(pool, tokens, tmp_path / "run", *plans)
    pool.run(1, train_until, dump(config(tokens, tmp_path / "straight", *RUN, *more)), 1, None)
    same_run(tmp_path / "run", tmp_path / "straight")


def seen_losses(connect: Connect, text: str, world_size: int) -> list[tuple[float, float, float]]:
    """(loss, norm, learning rate) of every step, as this rank was told."""
    seen: list[tuple[float, float, float]] = []
    take = Steps.take

    def taking(steps: Steps, step: int) -> Taken:
        taken = take(steps, step)
        seen.append((taken.loss, taken.norm, taken.lr))
        return taken

    with mock.patch.object(Steps, "take", taking):
        train_until(connect, text, world_size, None)
    return seen


def test_every_rank_is_told_the_same_loss(pool: Pool, tokens: Path, tmp_path: Path) -> None:
    """Also those whose stage computes none (P12)."""
    run = config(tokens, tmp_path / "run", *RUN, "plan.pp=2", "plan.tp=2", "train.steps=2")
    first, *others = pool.run(4, seen_losses, dump(run), 4)
    assert all(other == first for other in others)
    rows = read_metrics(tmp_path / "run/metrics.jsonl")
    assert first == [(row["loss"], row["grad_norm"], row["lr"]) for row in rows]


def test_compression_under_another_plan_begins_anew_and_says_so(
    pool: Pool, tokens: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = config(tokens, tmp_path / "run", *RUN, "plan.dp=2", "plan.compress=topk:0.2")
    pool.run(2, train_until, dump(run), 2, 2)
    again = config(tokens, tmp_path / "run", *RUN, "run.resume=true")
    train(prepare(again), World.alone(), as_json=True)
    assert "plan 'dp=2 compress=topk:0.2' on 2 ranks: what its compression had kept back" in capfd.readouterr().err
    rows = read_metrics(tmp_path / "run/metrics.jsonl")
    assert cast(float, rows[-1]["loss"]) < cast(float, rows[0]["loss"])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("train.seed=1", "train.seed was 0, is 1"),
        ("train.global_batch=8", "train.global_batch was 4, is 8"),
        ("data.seq=8", "data.seq was 16, is 8"),
        ("model.ffn_size=64", "model.ffn_size was 48, is 64"),
        ('train.freeze=["embed.*"]', r'train.freeze was \[\], is \["embed.\*"\]'),
        ("data.tokens=OTHER", r"data \(its tokens\) was"),
    ],
)
def test_another_run_is_refused_by_name(short: Path, tokens: Path, tmp_path: Path, change: str, says: str) -> None:
    other = tmp_path / "other.bin"
    write_tokens(other, [list(b"x" * 2009)], dtype="uint16", vocab_size=256, tokenizer="bytes")
    run = config(tokens, short, *RUN, "run.resume=true", change.replace("OTHER", str(other)))
    with pytest.raises(ConfigError, match=f"step-00000002 is of another run: .*{says}.*What may change: "):
        train(prepare(run), World.alone(), as_json=True)


def test_what_may_change(short: Path, tokens: Path, tmp_path: Path) -> None:
    """More steps, other optimizer settings, other measuring; another place of the same data; the folder alone names
    the run."""
    folder = tmp_path / "copy"
    shutil.copytree(short, folder)
    data = tmp_path / "moved.bin"
    shutil.copy(tokens, data)
    shutil.copy(tokens.with_suffix(".json"), data.with_suffix(".json"))
    changes = ("train.steps=4", "optimizer.lr=0.001", "train.eval_every=2", f"data.tokens={data}")
    train(prepare(claim_folder(config_of(folder, changes))), World.alone(), as_json=True)
    rows = read_metrics(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert [EVAL_KEY in row for row in rows] == [False, False, False, True]
    (event,) = [event for event in read(folder / EVENTS) if event.kind == "resume"]
    assert (event.fields["step"], event.fields["checkpoint"]) == (2, "step-00000002")


@pytest.fixture(scope="module")
def short(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps."""
    folder = tmp_path_factory.mktemp("short") / "run"
    train(prepare(config(tokens, folder, *RUN, "train.steps=2")), World.alone(), as_json=True)
    return folder


def test_a_finished_run_is_finished_again(short: Path, tokens: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """As after a kill between the last checkpoint and the weights: no step is taken, the weights are written."""
    shutil.rmtree(short / "weights")
    rows = read_metrics(short / "metrics.jsonl")
    train(prepare(config(tokens, short, *RUN, "train.steps=2", "run.resume=true")), World.alone(), as_json=True)
    assert "2 steps were done already, of train.steps=2: no step was taken" in capfd.readouterr().err
    assert read_metrics(short / "metrics.jsonl") == rows
    assert (short / "weights/manifest.json").is_file()
    assert len(list((short / "checkpoints").glob("step-*"))) == 1


def test_checkpoints_come_on_time_and_old_ones_go(tokens: Path, tmp_path: Path) -> None:
    more = ("checkpoint.every=1", "checkpoint.keep=1", "checkpoint.keep_every=2", f"checkpoint.dir={tmp_path}/kept")
    train(prepare(config(tokens, tmp_path / "run", *RUN, *more)), World.alone(), as_json=True)
    names = sorted(path.name for path in (tmp_path / "kept").glob("step-*"))
    assert names == ["step-00000002", "step-00000004", "step-00000006"]
    with pytest.raises(ConfigError, match=r"already holds checkpoints: set run.resume=true"):
        train(prepare(config(tokens, tmp_path / "other", *RUN, *more)), World.alone(), as_json=True)


def test_a_damaged_checkpoint_is_passed_over(tokens: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    train(prepare(config(tokens, folder, *RUN, "checkpoint.every=3")), World.alone(), as_json=True)
    before = read_metrics(folder / "metrics.jsonl")
    for file in (folder / "checkpoints/step-00000006").glob("*.safetensors"):
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    again = config(tokens, folder, *RUN, "run.resume=true", "checkpoint.keep=1")
    train(prepare(again), World.alone(), as_json=True)
    assert "step-00000006" in capfd.readouterr().err
    after = read_metrics(folder / "metrics.jsonl")
    assert [(row["step"], row["loss"]) for row in after] == [(row["step"], row["loss"]) for row in before]
    assert {"damaged", "resume"} <= {event.kind for event in read(folder / EVENTS)}


def test_resume_needs_a_folder_and_takes_an_empty_one(tokens: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run.resume=true needs run.dir"):
        claim_folder(load(None, ["run.resume=true"]))
    folder = tmp_path / "run"
    train(prepare(config(tokens, folder, *RUN, "train.steps=1", "run.resume=true")), World.alone(), as_json=True)
    assert [row["step"] for row in read_metrics(folder / "metrics.jsonl")] == [0]


def test_missing_and_unknown_tensors_are_named(short: Path, tokens: Path) -> None:
    setup = prepare(config(tokens, short, *RUN, "run.resume=true"))
    checkpoint = Checkpoint.open(short / "checkpoints/step-00000002")
    shapes = expected(setup, checkpoint)
    assert set(shapes) == set(checkpoint.names)
    tensors = dict(checkpoint.manifest.tensors)
    gone = tensors.pop("exp_avg/norm.weight")
    lacking = Checkpoint(checkpoint.path, dataclasses.replace(checkpoint.manifest, tensors=tensors))
    with pytest.raises(WeightsError, match=r"step-00000002 holds no exp_avg/norm.weight"):
        expected(setup, lacking)
    tensors |= {"exp_avg/norm.weight": gone, "exp_avg/norm.wieght": gone}
    more = Checkpoint(checkpoint.path, dataclasses.replace(checkpoint.manifest, tensors=tensors))
    with pytest.raises(WeightsError, match=r"holds exp_avg/norm.wieght, which this model does not have"):
        expected(setup, more)


# Saves beside training


def test_a_save_in_the_background_is_of_one_instant(tokens: Path, tmp_path: Path) -> None:
    """However slow the disk: tensors and scalars are those of the step, though training goes on (F3)."""
    write = disk.write

    def slowly(*arguments: Any) -> str:
        time.sleep(0.1)
        return write(*arguments)

    more = (*RUN, "checkpoint.every=1", "checkpoint.keep=9")
    with mock.patch.object(disk, "write", slowly):
        train(prepare(config(tokens, tmp_path / "beside", *more)), World.alone(), as_json=True)
    at_once = config(tokens, tmp_path / "at-once", *more, "checkpoint.asynchronous=false")
    train(prepare(at_once), World.alone(), as_json=True)
    for step in range(1, 7):
        found, expected = (
            Checkpoint.open(tmp_path / run / f"checkpoints/step-0000000{step}") for run in ("beside", "at-once")
        )
        assert all(torch.equal(found.read(name), expected.read(name)) for name in expected.names)
        assert (found.step, found.scalars["sample"]) == (step, step * 4)


def test_a_save_that_fails_does_not_end_the_run(
    tokens: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write, calls = disk.write, itertools.count()

    def full(*arguments: Any) -> str:
        if next(calls) == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*arguments)

    run = config(tokens, tmp_path / "run", *RUN, "checkpoint.every=3")
    with mock.patch.object(disk, "write", full):
        train(prepare(run), World.alone(), as_json=True)
    assert "plait: warning: checkpoint of step 3: " in (said := capfd.readouterr().err)
    assert "No space left on device" in said
    assert [path.name for path in (tmp_path / "run/checkpoints").glob("step-*")] == ["step-00000006"]
    (event,) = [event for event in read(tmp_path / "run" / EVENTS) if event.kind == "checkpoint"]
    assert event.fields["step"] == 3


def test_a_stopped_run_whose_state_cannot_be_saved_says_so(tokens: Path, tmp_path: Path) -> None:
    def full(*_: Any) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    run = config(tokens, tmp_path / "run", *RUN)
    with mock.patch.object(disk, "write", full), pytest.raises(SaveError, match=r"SIG.* could not be saved"):
        train_until(Connect(dist.HashStore(), 0), dump(run), 1, 2)
