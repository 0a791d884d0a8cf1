"""Cases F13, F15, F16 and F19 of ``cases/faults.md`` where only real ranks show them."""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from plait.checkpoint.manifest import MANIFEST, seal
from plait.checkpoint.reader import Checkpoint
from plait.checkpoint.store import WeightFolder
from plait.comm.world import World
from plait.core.config import dump
from plait.models.batch import Batch
from plait.models.decoder import Decoder
from plait.telemetry.record import read_metrics
from plait.train import convert, trainer
from plait.train.elastic import fit
from plait.train.restart import supervise
from plait.train.run import prepare
from plait.train.supervise import WINDOW_STEPS, Stragglers
from plait.train.trainer import train
from tests.pool import Connect, Pool
from tests.train import jobs
from tests.train.test_faults import events
from tests.train.test_resume import train_until
from tests.train.test_trainer import config, same_run, tokens

__all__ = ["tokens"]

RUN = ("train.eval_every=0", "run.threads=1", "run.device=cpu")


def slow_rank(connect: Connect, text: str, factor: float) -> None:
    """Train on this rank; rank 1 takes ``factor`` times as long for a forward. Short windows, to see it in seconds."""
    forward = Decoder.forward

    def slowly(self: Decoder, *arguments: Any) -> Tensor:
        begin = time.perf_counter()
        found = forward(self, *arguments)
        time.sleep((factor - 1) * (time.perf_counter() - begin) if connect.rank == 1 else 0.0)
        return found

    soon = functools.partial(Stragglers, seconds=0.0)
    with mock.patch.object(Decoder, "forward", slowly), mock.patch.object(trainer, "Stragglers", soon):
        jobs.train_in_pool(connect, text, 2)


def test_f13_a_slow_rank_is_named_with_its_times(pool: Pool, tokens: Path, tmp_path: Path) -> None:
    """A forward is about a third of a step's computing: 13 times slower, it makes the rank 5 times slower."""
    run = config(tokens, tmp_path / "run", *RUN, "plan.dp=2", f"train.steps={2 * WINDOW_STEPS}", "plan.micro=2")
    pool.run(2, slow_rank, dump(run), 13.0)
    (told,) = [event.fields for event in events(tmp_path / "run", "straggler")]
    assert (told["rank"], told["step"]) == (1, 2 * WINDOW_STEPS)
    assert told["seconds"] == told["computes"][1] > 2 * told["computes"][0] > 0
    assert told["ratio"] == pytest.approx(told["computes"][1] / told["computes"][0], rel=1e-3)
    assert told["phase"] == "forward"


def test_f15_a_checkpoint_that_crashes_at_load_is_set_aside(pool: Pool, tokens: Path, tmp_path: Path) -> None:
    """All its bytes hold, so only loading shows it: two attempts of real ranks, then the one before is gone on from."""
    folder = tmp_path / "run"
    plan = (*RUN, "plan.dp=2", "checkpoint.every=2")
    for name in ("run", "undisturbed"):
        more = ("train.steps=4", "optimizer.schedule=constant")
        pool.run(2, jobs.train_in_pool, dump(config(tokens, tmp_path / name, *plan, *more)), 2)
    file = folder / "checkpoints/step-00000004" / MANIFEST
    document = json.loads(file.read_text())
    del document["sha256"], document["tensors"]["exp_avg/norm.weight"]
    file.write_bytes(seal(document))
    Checkpoint.open(file.parent, verify=True)
    again = config(tokens, folder, *plan, "train.steps=4", "optimizer.schedule=constant", "run.resume=true")
    supervise(again, 2, as_json=True)
    failures = [event.fields for event in events(folder, "failure")]
    assert [fields["phase"] for fields in failures] == ["load", "load"]
    assert "holds no exp_avg/norm.weight" in failures[0]["message"]
    assert [event.fields["now"] for event in events(folder, "quarantine")] == ["step-00000004.bad"]
    assert [event.fields["step"] for event in events(folder, "resume")] == [2]
    same_run(folder, tmp_path / "undisturbed", loss=0.0, weights=0.0)


def test_f16_four_ranks_then_three_then_four(pool: Pool, tokens: Path, tmp_path: Path) -> None:
    """The plan for three is the planner's own; the batch stays 12, the data go on, the run is that of one process."""
    sizes = (*RUN, "train.global_batch=12", "train.steps=6")
    whole = config(tokens, tmp_path / "run", *sizes, "plan.dp=2", "plan.tp=2", "plan.zero=1")
    assert pool.run(4, train_until, dump(whole), 4, 1)[0] is not None
    again = dataclasses.replace(whole, run=dataclasses.replace(whole.run, resume=True))
    less, ranks = fit(again, 3)
    assert ranks == 3
    assert pool.run(3, train_until, dump(less), 3, 3)[0] is not None
    assert pool.run(4, train_until, dump(again), 4, None) == [None] * 4
    rows = read_metrics(tmp_path / "run/metrics.jsonl")
    assert [(row["step"], row["tokens"]) for row in rows] == [(step, 12 * 16) for step in range(6)]
    resumed = [event.fields for event in events(tmp_path / "run", "resume")]
    assert [fields["step"] for fields in resumed] == [2, 4]
    assert resumed[0]["plan"] != resumed[1]["plan"]
    train(prepare(config(tokens, tmp_path / "one", *sizes)), World.alone(), as_json=True)
    same_run(tmp_path / "run", tmp_path / "one")


EXPERTS = ("model.family=mixtral", "model.moe={num_experts = 4, top_k = 2, ffn_size = 48}")


@pytest.mark.parametrize(
    ("ranks", "plan", "model"),
    [(4, ("plan.tp=2", "plan.pp=2", "plan.ep=2"), EXPERTS), (4, ("plan.pp=2", "plan.dp=2"), ("model.tied=true",))],
    ids=["experts", "tied"],
)
def test_f19_a_checkpoint_of_many_ranks_is_what_transformers_reads(
    pool: Pool, tokens: Path, tmp_path: Path, ranks: int, plan: tuple[str, ...], model: tuple[str, ...]
) -> None:
    """Held to the logits of one process that has trained the same, not to what the ranks have saved."""
    transformers = pytest.importorskip("transformers")
    sizes = (*RUN, "train.steps=3", *model)
    run = config(tokens, tmp_path / "run", *sizes, *plan)
    pool.run(ranks, jobs.train_in_pool, dump(run), ranks)
    one = prepare(config(tokens, tmp_path / "one", *sizes))
    train(one, World.alone(), as_json=True)
    (saved,) = (tmp_path / "run/checkpoints").glob("step-*")
    convert.run([saved], tmp_path / "hf")
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", attn_implementation="eager").eval()
    wanted, weights = Decoder(one.model).eval(), WeightFolder(tmp_path / "one/weights")
    wanted.load_state_dict({name: weights.read(name) for name in weights.names}, strict=False)
    text = torch.arange(48).view(3, 16) * 5
    batch = Batch(tokens_BT=text, targets_BT=text, sample_B=torch.arange(3), step=0)
    with torch.no_grad():
        # The runs differ by the order of additions: `same_run` allows 1e-4 of each weight, logits are near 1.
        torch.testing.assert_close(read(text).logits, wanted(None, batch).view(3, 16, -1), rtol=1e-4, atol=1e-4)
    assert (tmp_path / "hf/model.safetensors").is_file()
    assert read.config.tie_word_embeddings is one.model.tied
