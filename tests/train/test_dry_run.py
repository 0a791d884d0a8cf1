"""A dry run counts what a real run does: the same ledger, FLOPs and live bytes; and what it shows and refuses."""

from __future__ import annotations

import dataclasses
import gc
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from plait.core.errors import ConfigError, PlanError
from plait.core.plan import Plan
from plait.models.config import PRESETS
from plait.planner.commands import read_plan
from plait.train.dry_run import DryRun, dry_run, run, show
from plait.train.watch import Watch
from tests.parallel.cuts import GLOBAL_BATCH, GPT2, LLAMA, SEQ, Run, adamw, build, count, global_batch, microbatches
from tests.pool import Connect, Pool

MODELS = {
    "llama": dataclasses.replace(LLAMA, num_layers=2),
    "tied": dataclasses.replace(LLAMA, num_layers=2, tied=True),
    "gpt2": dataclasses.replace(GPT2, num_layers=2, tied=False),
}


def real_step(connect: Connect, text: str, world_size: int, name: str) -> dict[str, Any]:
    """The second step of a real run on one rank, watched: what a dry run is to say of it."""
    parallel, plan = build(connect, text, world_size, MODELS[name], Run(transport="gloo"))
    world, zero = parallel.world, parallel.zero
    optimizer = adamw(*zero.optimizer_groups())
    optimizer.step()
    watch = Watch(lambda: world.book.doing or "else")
    batch = global_batch(MODELS[name], 0)
    batches = [parallel.local(one, total=1) for one in microbatches(batch, plan, world.at["dp"])]
    held = [view for _, view, _ in zero.parameters()] + [part for _, _, part in (*zero.gradients(), *zero.masters())]
    held += [bucket.own for bucket in zero.buckets]
    held += [value for state in optimizer.state.values() for value in state.values()]
    held += [x for one in batches for x in vars(one).values() if isinstance(x, torch.Tensor)]
    for tensor in held:
        watch.follow(tensor.untyped_storage())
    world.book.ledger.clear()
    resting = watch.live
    gc.disable()  # cycles would be freed at any time
    with watch:
        loss = parallel.executor.run(
            parallel.schedule(len(batches)), batches.__getitem__, count=count(batch), sink=world.book.sink
        )
        zero.finish()
        parallel.share_loss(loss, zero.square_norm())
        optimizer.step()
        zero.publish()
    gc.enable()
    ledger = world.book.ledger
    return {
        "traffic": {key: (ledger.calls[key], ledger.bytes[key]) for key in ledger.calls},
        "flops": watch.flops,
        "activations": max(held for what, held in watch.peaks.items() if what[:2] in ("F ", "B ")) - resting,
    }


@pytest.mark.parametrize(
    ("name", "text", "ranks", "late"),
    [
        ("llama", "micro=2", 1, 0),
        ("llama", "tp=2 micro=2", 2, 1),
        ("gpt2", "tp=2 micro=4 recompute=full", 2, 1),
        ("llama", "zero=3 micro=2 precision=bf16", 4, 0),
        ("tied", "pp=2 zero=2 micro=2", 4, None),
        ("llama", "cp=2 tp=2 zero=1 micro=2", 4, None),
    ],
)
def test_dry_run_is_the_real_run(pool: Pool, name: str, text: str, ranks: int, late: int | None) -> None:
    """``late``: activations that gloo may still hold, whose threads let go of what they have sent a moment after the
    wait for it; None: it keeps every message to a neighbour to the step's end, and live bytes say nothing."""
    plan = Plan.parse(text)
    real = pool.run(ranks, real_step, text, ranks, name)
    for rank in {0, ranks - 1}:
        dry = dry_run(MODELS[name], plan, world_size=ranks, seq=SEQ, global_batch=GLOBAL_BATCH, rank=rank)
        found = {(row.axis, row.operation, row.phase): (row.calls, row.bytes) for row in dry.traffic}
        assert found == real[rank]["traffic"]
        assert dry.flops == real[rank]["flops"]
        if late is not None:
            activation = plan.micro * SEQ * 32 * 4
            # Tokens do not fall quite evenly on two halves of a vocabulary: a row of 16 bytes more or less.
            uneven = 16 * plan.micro * SEQ if plan.tp > 1 else 0
            # Shards of norms (64 bytes) are let go of late as well.
            shards = 4 * 64 if ranks > 1 else 0
            assert -uneven <= real[rank]["activations"] - dry.activations <= late * activation + uneven + shards


def test_a_rank_of_a_thousand_of_a_70b() -> None:
    model = dataclasses.replace(
        PRESETS["llama3-8b"],
        num_layers=80,
        hidden_size=8192,
        num_heads=64,
        num_kv_heads=8,
        head_dim=128,
        ffn_size=28672,
    )
    plan = Plan.parse("tp=8 pp=8 precision=bf16 zero=1")
    found = dry_run(model, plan, world_size=1024, seq=4096, global_batch=16, rank=517)
    layer = 2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672
    assert found.parameters == 10 * (layer // 8 + 2 * 8192)
    products = 3 * 2 * 4096 * 10 * layer // 8
    attention = 10 * 8 * 2 * 4096**2 * (2 * 128 + 5 * 128)
    assert found.flops == products + attention
    # Four all-gathers and reduce-scatters a layer each way, and two more for the weight gradients.
    whole = 7 * 4096 * 8192 * 2 // 8
    sent = {(row.operation, row.phase): row.bytes for row in found.traffic if row.axis == "tp"}
    assert sent["all_gather", "F"] == sent["reduce_scatter", "F"] == sent["reduce_scatter", "B"] == 20 * whole
    assert sent["all_gather", "B"] == 40 * whole
    assert found.at == {"pp": 4, "dp": 0, "cp": 0, "tp": 5, "edp": 0, "ep": 0, "etp": 5}


def test_live_activations_of_1f1b_fall_from_stage_to_stage() -> None:
    # Rank i of p holds min(m, p - i) microbatches at most (Narayanan et al. 2021, arXiv:2104.04473, section 2.2).
    model, plan = dataclasses.replace(LLAMA, num_layers=8), Plan.parse("pp=4 stages=2,2,2,2")
    peaks = []
    for rank in range(3):
        dry = dry_run(model, plan, world_size=4, seq=SEQ, global_batch=6, rank=rank)
        peaks.append(max(held for what, held in dry.moments if what.startswith("F ")) - dry.resting - dry.batches)
    # The middle stages are alike, and each holds one microbatch less than the one before it.
    assert peaks[1] - peaks[2] == pytest.approx(peaks[1] / 3, rel=0.1)
    assert peaks[0] - peaks[1] == pytest.approx(peaks[1] / 3, rel=0.1)


def test_state_of_the_levels() -> None:
    # 2 + 4 + 12 bytes a parameter in bf16 with fp32 gradients: weights, gradients, master and moments.
    model = MODELS["llama"]
    found = {
        level: dry_run(model, Plan.parse(f"zero={level} precision=bf16"), world_size=4, seq=SEQ, global_batch=4, rank=1)
        for level in range(4)
    }
    parameters = found[0].parameters
    for level, (weights, gradients, optimizer) in {
        0: (2, 4, 12),
        1: (2, 4, 3),
        2: (2, 1, 3),
        3: (0.5, 1, 3),
    }.items():
        one = found[level]
        for held, each in ((one.weights, weights), (one.gradients, gradients), (one.optimizer, optimizer)):
            assert held == pytest.approx(each * parameters, rel=0.02), level


def test_nothing_is_left_behind() -> None:
    plan = Plan.parse("tp=2")
    with pytest.raises(PlanError, match="rank 2 is none of the world's; what works: 0 to 1"):
        dry_run(LLAMA, plan, world_size=2, seq=SEQ, global_batch=2, rank=2)
    with pytest.raises(PlanError, match="tp=3"):
        dry_run(LLAMA, Plan.parse("tp=3"), world_size=3, seq=SEQ, global_batch=3, rank=0)
    assert not dist.is_initialized()
    dry_run(LLAMA, plan, world_size=2, seq=SEQ, global_batch=1, rank=0)
    assert not dist.is_initialized()


def test_prints_tables_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.toml"
    path.write_text("tp = 2\nzero = 1\n")
    assert run(path, model=LLAMA, seq=SEQ, global_batch=4, rank=1, world_size=4, as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rank"] == 1
    assert found["peak"] >= found["resting"] + found["activations"]
    assert {row["axis"] for row in found["traffic"]} == {"tp", "dp+cp", "pp+dp+cp+tp"}
    assert run(path, model=LLAMA, seq=SEQ, global_batch=2, rank=0, world_size=None, as_json=False) == 0
    text = capsys.readouterr().out
    assert "reduce_scatter" in text
    assert "optimizer" in text


def test_sizes_in_words() -> None:
    dry = DryRun(
        rank=0, at={"tp": 0}, stages=(0,), microbatches=1, parameters=1, flops=10**12, traffic=(), weights=3 * 2**30,
        gradients=0, optimizer=5, batches=0, resting=0, peak=2**21, moments=(("F of stage 0, microbatch 0", 2**21),),
    )  # fmt: skip
    out = io.StringIO()
    show(dry, Console(file=out, width=100))
    assert "1 TFLOP" in out.getvalue()
    assert "3 GiB" in out.getvalue()
    assert "2,097,152" in out.getvalue()


@pytest.mark.parametrize(
    ("text", "says"),
    [("tp =", "plan .*plan.toml: "), ("[plan]\ntpp = 2\n", "unknown key 'tpp'"), ("plan = 3\n", "plan is no table")],
)
def test_refuses_what_is_no_plan(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_plan(path)
    with pytest.raises(ConfigError, match="missing"):
        read_plan(tmp_path / "missing.toml")


def test_reads_a_table_or_its_body(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text("[plan]\ntp = 2\n")
    assert read_plan(path) == Plan(tp=2)
    path.write_text(Plan(tp=2, zero=1).to_toml())
    assert read_plan(path) == Plan(tp=2, zero=1)


def test_watch_counts_what_torch_does_and_what_it_leaves_out() -> None:
    a, b = torch.randn(6, 8, requires_grad=True), torch.randn(8, 4)
    with FlopCounterMode(display=False) as torchs, Watch(lambda: "") as watch:
        (a @ b).sum().backward()
    assert watch.flops == torchs.get_total_flops() == 2 * 6 * 8 * 4 * 2
    with Watch(lambda: "") as watch, torch.no_grad():
        torch.zeros(6, 4).addmm_(a, b)
        q, k = torch.randn(2, 4, 16, 8), torch.randn(2, 2, 16, 8)
        F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)
    assert watch.flops == 2 * 6 * 8 * 4 + 2 * 2 * (2 * 4 * 16 * 16 * 8)


def test_watch_sees_memory_come_and_go() -> None:
    with Watch(lambda: "here") as watch:
        x = torch.zeros(1000)
        kept = x.view(10, 100)
        del x
        assert watch.live == 4000
        watch.follow(kept.untyped_storage())
        kept.untyped_storage().resize_(0)
        y = torch.zeros(1)
        assert watch.live == 4
        kept.untyped_storage().resize_(4000)
        kept.zero_()
        assert watch.live == 4004
        del kept, y
        assert watch.live == 0
    assert watch.peaks == {"here": 4004}
    assert math.isclose(watch.flops, 0)
