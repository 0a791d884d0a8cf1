"""Checkpoints between plans, and runs that go on as if they had never stopped."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from plait.checkpoint.reader import Checkpoint
from plait.comm.world import World
from plait.core.config import dump, loads
from plait.core.errors import ConfigError
from plait.telemetry.record import read_metrics
from plait.train.resume import Keeper
from plait.train.run import build, open_samples, prepare
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
    "one": (1, ()),
    "tp4": (4, ("plan.tp=4",)),  # two ranks share each of the 2 KV heads
    "three": (3, ("plan.dp=3", "plan.zero=1")),
    "ep-zero3": (4, ("plan.dp=4", "plan.ep=2", "plan.zero=3")),
    "tp-ep-zero2-bf16": (4, ("plan.dp=2", "plan.tp=2", "plan.ep=4", "plan.zero=2", "plan.precision=bf16")),
    "groups-cp": (4, ("plan.dp=2", "plan.cp=2", "plan.zero=1", "plan.zero_group=2")),
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

    with mock.patch.object(Steps, "take", taking):
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
    assert answers == ["stopped by SIGUSR1 after 3 steps; the state is saved, run.resume goes on"] * ranks
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
    assert scalars["sample"] == 6 * 4


def newest(run: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    path = run / "checkpoints/step-00000006"
    opened = Checkpoint.open(path, verify=True)
    return {name: opened.read(name) for name in opened.names}, dict(opened.scalars)
