"""Whole runs: what they leave, that every cut is the same run, and how they end."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from plait.checkpoint.store import WeightFolder
from plait.comm.world import World
from plait.core.config import Config, dump, load
from plait.core.errors import ConfigError, DivergedError
from plait.models.config import parameter_shapes
from plait.telemetry.record import EVAL_KEY, METRIC_KEYS, read_metrics
from plait.train.data import TokenFile, write_tokens
from plait.train.run import claim_folder, microbatches, open_samples, prepare
from plait.train.trainer import train
from tests.pool import Pool
from tests.train import jobs
from tests.train.test_launch import ROOT, running, wait_for

SETTINGS = (
    "model.hidden_size=32",
    "model.num_layers=4",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.ffn_size=48",
    "data.seq=16",
    "data.held_out=0.1",
    "train.global_batch=4",
    "train.steps=4",
    "train.eval_every=2",
    "train.eval_batches=9",
    "train.trace_step=1",
    "optimizer.lr=0.003",
    "optimizer.eps=1e-4",  # why: tests/parallel/cuts.py
    "optimizer.warmup=2",
    "plan.micro=1",
)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokens") / "text.bin"
    text = (ROOT / "LICENSE").read_bytes()[:2009]  # a file that nobody edits
    write_tokens(path, [list(text)], dtype="uint16", vocab_size=256, tokenizer="bytes")
    return path


def settings(tokens: Path, folder: Path, *more: str) -> list[str]:
    return [*SETTINGS, f"data.tokens={tokens}", f"run.dir={folder}", *more]


def config(tokens: Path, folder: Path, *more: str) -> Config:
    defaults = ("plan.tp=1", "plan.pp=1")
    return claim_folder(load(None, settings(tokens, folder, *defaults, *more)))


@pytest.fixture(scope="module")
def alone(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process, which the others are held against."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    train(prepare(config(tokens, folder)), World.alone(), as_json=True)
    return folder


def plait(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": f"{ROOT}/src", "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, *arguments], env=env, text=True, **pipes, **options)


def same_run(folder: Path, alone: Path, *, loss: float = 1e-5, weights: float = 1e-4) -> None:
    rows, expected = read_metrics(folder / "metrics.jsonl"), read_metrics(alone / "metrics.jsonl")
    for key in ("loss", "grad_norm", "lr", EVAL_KEY):
        found = [row[key] for row in rows if key in row]
        assert found == [pytest.approx(row[key], rel=loss) for row in expected if key in row], key
    ours, theirs = WeightFolder(folder / "weights"), WeightFolder(alone / "weights")
    assert set(ours.names) == set(theirs.names)
    for name in theirs.names:
        a, b = ours.read(name), theirs.read(name)
        assert float((a - b).norm() / b.norm().clamp_min(1e-6)) <= weights, name


def test_the_command_leaves_a_run_folder(tokens: Path, alone: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    arguments = [part for text in settings(tokens, folder, "plan.tp=1") for part in ("--set", text)]
    process = plait("-m", "plait", "train", *arguments, cwd=tmp_path)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert errors == ""
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        [
            "checkpoints",
            "config.toml",
            "plan.toml",
            "device.json",
            "metrics.jsonl",
            "prediction.json",
            "trace.json",
            "weights",
        ]
    )
    assert "step 4/4" in output
    assert "plait verify run/config.toml" in output
    same_run(folder, alone)
    rows = read_metrics(folder / "metrics.jsonl")
    assert [tuple(row) for row in rows] == [METRIC_KEYS, (*METRIC_KEYS, EVAL_KEY)] * 2
    for row in rows:
        check_row(row)
    assert rows[-1]["loss"] < rows[0]["loss"]  # type: ignore[operator]
    assert load(folder / "config.toml").plan.pp == 2
    assert "dp = 1" in (folder / "plan.toml").read_text()
    assert json.loads((folder / "device.json").read_text())["peak_flops"] is None
    check_trace(json.loads((folder / "trace.json").read_text()))


def check_row(row: dict[str, Any]) -> None:
    assert row["tokens"] == 64
    assert row["tokens_per_s"] == pytest.approx(64 / row["step_time_s"])
    assert row["tokens_per_s_per_device"] == pytest.approx(row["tokens_per_s"] / 2)
    assert 0 <= row["bubble_rate"] < 1
    assert 0.1 < row["bubble_rate_predicted"] < 0.6  # of equal stages: 1/5
    assert 0 < row["comm_fraction"] < 1
    # Forward and backward of 4 microbatches of 16 tokens, 32 floats each, over the one boundary.
    assert row["comm_bytes"]["pp"] == 2 * 4 * 16 * 32 * 4
    assert set(row["comm_bytes"]) == {"pp", "world"}
    assert len(row["memory_peak_bytes"]) == 2
    assert all(2**26 < peak < 2**33 for peak in row["memory_peak_bytes"])
    assert row["mfu"] is None


def check_trace(trace: dict[str, Any]) -> None:
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    for rank, stage in ((0, 0), (1, 1)):
        names = {span["name"] for span in spans if span["pid"] == rank}
        assert {f"{stage}{kind}{m}" for kind in "FB" for m in range(4)} <= names
        assert "clip, AdamW, publish" in names
    # One clock: a microbatch is forwarded by the second stage after the first.
    ends = {span["name"]: span["ts"] + span["dur"] for span in spans}
    assert ends["0F0"] < ends["1F0"] < ends["1B0"] < ends["0B0"]


@pytest.mark.parametrize(
    ("plan", "world_size"),
    [
        (("plan.tp=2", "plan.pp=2", "plan.dp=2", "plan.zero=1"), 8),
        (("plan.pp=2", "plan.virtual=2", "plan.schedule=interleaved"), 2),
        (("plan.dp=2", "plan.micro=2", "plan.recompute=full"), 2),
        (("plan.cp=2", "plan.dp=2", "plan.zero=3"), 4),
        (("plan.pp=2", "plan.virtual=2", "plan.schedule=zb-v", "plan.cp=2", "plan.context=ulysses"), 4),
        (("plan.pp=2", "plan.schedule=auto", "plan.dp=2", "plan.zero=2"), 4),
    ],
)
def test_every_cut_is_the_same_run(
    pool: Pool, tokens: Path, alone: Path, tmp_path: Path, plan: tuple[str, ...], world_size: int
) -> None:
    run = config(tokens, tmp_path / "run", *plan)
    pool.run(world_size, jobs.train_in_pool, dump(run), world_size)
    same_run(tmp_path / "run", alone)


def test_the_measured_bubble_is_near_the_predicted_one(pool: Pool, tokens: Path, tmp_path: Path) -> None:
    """The same spans give both; what lies between them is what the prediction leaves out: messages and a busy machine.

    Of two equal stages and four microbatches the bubble is 1/5.
    """
    sizes = ("model.hidden_size=64", "model.ffn_size=128", "data.seq=64", "train.global_batch=8", "plan.micro=2")
    run = config(tokens, tmp_path / "run", *sizes, "plan.pp=2", "train.steps=8", "train.eval_every=0")
    pool.run(2, jobs.train_in_pool, dump(run), 2)
    rows = read_metrics(tmp_path / "run/metrics.jsonl")
    measured = statistics.median([cast(float, row["bubble_rate"]) for row in rows])
    predicted = statistics.median([cast(float, row["bubble_rate_predicted"]) for row in rows])
    assert 0.1 < predicted < 0.5
    assert measured == pytest.approx(predicted, abs=0.25)


def test_bf16_stays_near(pool: Pool, tokens: Path, alone: Path, tmp_path: Path) -> None:
    """bf16 keeps 8 bits (2^-8 = 0.4%) and rounds at every layer; masters stay fp32."""
    run = config(tokens, tmp_path / "run", "plan.tp=2", "plan.precision=bf16", "plan.zero=1")
    pool.run(2, jobs.train_in_pool, dump(run), 2)
    rows, expected = read_metrics(tmp_path / "run/metrics.jsonl"), read_metrics(alone / "metrics.jsonl")
    assert [row["loss"] for row in rows] == [pytest.approx(row["loss"], rel=0.02) for row in expected]
    assert [row["loss"] for row in rows] != [row["loss"] for row in expected]
    assert WeightFolder(tmp_path / "run/weights").read("head.weight").dtype == torch.float32


def test_frozen_parameters_stay(pool: Pool, tokens: Path, tmp_path: Path) -> None:
    run = config(tokens, tmp_path / "run", "plan.tp=2", "plan.pp=2", 'train.freeze=["embed.*", "layers.1.*"]')
    setup = prepare(run, world_size=4)
    pool.run(4, jobs.train_in_pool, dump(run), 4)
    one = config(tokens, tmp_path / "one", 'train.freeze=["embed.*", "layers.1.*"]')
    train(prepare(one), World.alone(), as_json=True)
    same_run(tmp_path / "run", tmp_path / "one")
    from plait.models.init import InitSource

    source, weights = InitSource(setup.model, 0), WeightFolder(tmp_path / "run/weights")
    for name in parameter_shapes(setup.model):
        frozen = name.startswith(("embed.", "layers.1."))
        assert torch.equal(weights.read(name), source.read(name)) == frozen, name


def test_microbatches_are_the_rows_of_a_copy(tokens: Path, tmp_path: Path) -> None:
    run = config(tokens, tmp_path / "run", "plan.dp=2", "plan.micro=1", "data.shuffle=false")
    setup = prepare(run)
    samples = open_samples(setup)
    batches = [batch for dp in range(2) for batch in microbatches(setup, samples, 3, dp, torch.device("cpu"))]
    assert [batch.sample_B.tolist() for batch in batches] == [[12], [13], [14], [15]]
    assert (setup.world_size, setup.dp, setup.microbatches) == (2, 2, 2)


def test_divergence_stops_the_run(tokens: Path, tmp_path: Path) -> None:
    run = config(tokens, tmp_path / "run", "optimizer.lr=1e30", "optimizer.warmup=0", "optimizer.clip=0")
    with pytest.raises(DivergedError, match=r"step 1: the loss is .*, the gradient norm nan.*lower optimizer.lr"):
        train(prepare(run), World.alone(), as_json=True)
    rows = read_metrics(tmp_path / "run/metrics.jsonl")
    assert [row["grad_norm"] is None for row in rows] == [False, True]  # the diverged step's line is there
    assert not (tmp_path / "run/weights").exists()


def test_a_run_folder_is_one_runs_own(
    tokens: Path, alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="already holds a run"):
        config(tokens, alone)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        config(tokens, tmp_path / "file" / "run")
    monkeypatch.chdir(tmp_path)
    first, second = claim_folder(Config()), claim_folder(Config())
    assert first.run.dir is not None and second.run.dir is not None
    assert first.run.dir.parent == tmp_path / "runs"
    assert first.run.dir != second.run.dir  # though neither has written anything
    (tmp_path / "runs").rename(tmp_path / "old")
    (tmp_path / "runs").write_text("")
    with pytest.raises(ConfigError, match=r"runs/.* cannot be written"):
        claim_folder(Config())


def test_runs_that_start_together_share_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other run makes its folder just after this one has looked."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda form: "now")
    monkeypatch.setattr(Path, "exists", lambda path: False)
    folders = [claim_folder(Config()).run.dir for _ in range(3)]
    assert folders == [tmp_path / "runs" / name for name in ("now", "now-2", "now-3")]


def test_data_is_held_to_the_model(tokens: Path, tmp_path: Path) -> None:
    for text, says in (
        ("model.vocab_size=255", "vocabulary of 256, the model one of 255"),
        ("data.separator=256", "separator = 256"),
        ("train.freeze=['head.wieght']", "names no parameter.*head.weight"),
        ('train.freeze=["*"]', "nothing to train"),
        ("model.preset=tinny", "no such preset; nearest: tiny"),
        ("model.num_kv_heads=3", "num_kv_heads=3"),
    ):
        with pytest.raises(ConfigError, match=says):
            prepare(load(None, settings(tokens, tmp_path / "run", text)))


def test_scaled_rotary_positions_from_a_table(tokens: Path, tmp_path: Path) -> None:
    run = load(None, settings(tokens, tmp_path / "run", 'model.rope_scaling={kind = "linear", factor = 2.0}'))
    scaling = prepare(run).model.rope_scaling
    assert scaling is not None
    assert (scaling.kind, scaling.factor) == ("linear", 2.0)


def test_text_becomes_tokens_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = tmp_path / "book.txt"
    text.write_text("To be, or not to be. " * 500)
    setup = prepare(load(None, [f"data.text={text}", "data.seq=16"]))
    assert open_samples(setup).train > 100
    (made,) = (tmp_path / "cache/plait").glob("book-*.bin")
    stamp = made.stat().st_mtime_ns
    open_samples(setup)
    assert made.stat().st_mtime_ns == stamp
    text.write_text("Whether 'tis nobler in the mind. " * 500)
    open_samples(setup)
    assert len(list((tmp_path / "cache/plait").glob("book-*.bin"))) == 2


def test_joining_torchrun(tokens: Path, alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_bytes(bytes(TokenFile.open(tokens).tokens.astype("uint8")))
    data = ("data.tokens=none", f"data.text={tmp_path}/text.txt", "plan.pp=1")
    arguments = [part for text in settings(tokens, tmp_path / "run", *data) for part in ("--set", text)]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    process = plait(*torchrun, "-m", "plait", "train", *arguments, cwd=tmp_path)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert output.count("step 4/4") == 1  # rank 0 alone speaks
    same_run(tmp_path / "run", alone)


def test_interrupting_the_command(tokens: Path, tmp_path: Path) -> None:
    more = ("plan.tp=1", "train.steps=100000", "train.eval_every=0")
    arguments = [part for text in settings(tokens, tmp_path / "run", *more) for part in ("--set", text)]
    process = plait("-m", "plait", "train", *arguments, cwd=tmp_path)
    wait_for(tmp_path / "run/trace.json")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) >= 2
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=10)
    assert time.monotonic() - begin < 5
    assert process.returncode == 130
    on = "plait train --resume run starts it anew, as there is no checkpoint yet"
    assert errors == f"plait: interrupted; all ranks were ended; {on}\n"
    assert not any(running(int(child)) for child in children)


def test_setup_is_a_value(tokens: Path, tmp_path: Path) -> None:
    setup = prepare(load(None, settings(tokens, tmp_path / "run")), world_size=8)
    assert (setup.plan.tp, setup.plan.pp, setup.dp) == (2, 2, 2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setup.world_size = 4  # type: ignore[misc]
