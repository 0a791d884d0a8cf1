"""Cases P17 to P28 of ``cases/parallel.md``: recomputation, dropout, buckets, overlap, schedules, fused weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.core.errors import PlanError, ScheduleError
from plait.core.mesh import Mesh
from plait.core.plan import Plan
from plait.models.batch import Batch
from plait.models.config import parameter_shapes
from plait.models.decoder import Decoder
from plait.models.init import InitSource
from plait.models.layers import Dropout
from plait.parallel.apply import parallelize
from plait.parallel.layout import build_schedule
from plait.parallel.sequence import SequenceDropout
from tests.parallel.cuts import Run, assemble, build, check_equal, count, cut_run, global_batch, microbatches, models
from tests.parallel.test_cases_01_13 import refused
from tests.pool import Connect, Pool

MODELS = models()
RECOMPUTE = ("none", "full", "selective", "full:0-1 selective:2", "selective:3")


def run_recompute(connect: Connect, text: str, world_size: int, model: str) -> dict[str, Any]:
    return cut_run(connect, text, world_size, MODELS[model], Run(steps=2))


@pytest.mark.parametrize("model", ["llama", "gpt2"])
@pytest.mark.parametrize(("text", "world_size"), [("tp=2 micro=4", 2), ("pp=2 dp=2 zero=1 micro=2", 4)])
def test_p17_nothing_is_counted_twice_when_recomputed(pool: Pool, text: str, world_size: int, model: str) -> None:
    """Equal bits, losses included; the ledger books what is really sent again, in the phase that sends it: backward."""
    kept = pool.run(world_size, run_recompute, text, world_size, model)
    for mode in RECOMPUTE[1:]:
        again = pool.run(world_size, run_recompute, f"{text} recompute='{mode}'", world_size, model)
        for a, b in zip(kept, again, strict=True):
            assert a["losses"] == b["losses"]
            assert a["norms"] == b["norms"]
            for x, y in zip(a["grads"], b["grads"], strict=True):
                assert x[0] == y[0]
                assert (x[4] == y[4]).all(), x[0]
            forward = {key: sent for key, sent in a["bytes"].items() if key[2] == "F"}
            assert forward == {key: sent for key, sent in b["bytes"].items() if key[2] == "F"}
            more = sum(b["bytes"].values()) - sum(a["bytes"].values())
            assert more > 0 if "tp=2" in text and "full" in mode else more == 0


@pytest.mark.parametrize("mode", ["full", "selective", "full:1-2"])
@pytest.mark.parametrize("text", ["tp=2", "tp=2 pp=2"])
def test_p18_dropout_with_recomputation_and_sequence_parallel(pool: Pool, text: str, mode: str) -> None:
    assert MODELS["gpt2"].dropout == 0.1
    world_size = 4 if "pp" in text else 2
    check_equal(pool, f"{text} micro=2 recompute={mode}", world_size, MODELS["gpt2"], Run(steps=2))


def run_masks(connect: Connect) -> Any:
    parallel, _ = build(connect, "tp=2", 2, MODELS["gpt2"], Run())
    found = [module for module in parallel.stages[0].module.modules() if isinstance(module, SequenceDropout)]
    batch = global_batch(MODELS["gpt2"], 0)
    return [(one.layer, one.site, one.keep(batch, 32).numpy().copy()) for one in found]


def test_p18_masks_are_those_of_one_device_and_independent(pool: Pool) -> None:
    """The ranks' masks are the rows of one device's mask; those of two tokens, sites, layers or steps have nothing in
    common: they agree at p^2 + (1-p)^2 = 0.82 of places (standard deviation 0.006 over 128 x 32)."""
    config, batch = MODELS["gpt2"], global_batch(MODELS["gpt2"], 0)
    ranks = pool.run(2, run_masks)
    masks = {}
    for (layer, site, top), (_, _, bottom) in zip(*ranks, strict=True):
        whole = Dropout(config.dropout, 7, layer, site).keep(batch, 32)
        assert torch.equal(torch.cat([torch.from_numpy(top), torch.from_numpy(bottom)]), whole)
        masks[layer, site] = whole
    assert len(masks) == 1 + 2 * config.num_layers
    later = dataclasses.replace(batch, step=1)

    def agreement(a: Tensor, b: Tensor) -> float:
        return float((a == b).float().mean())

    first = masks[0, 1]
    others = [
        masks[0, 2],
        masks[1, 1],
        masks[-1, 0],
        Dropout(0.1, 7, 0, 1).keep(later, 32),
        first.roll(1, 0),
        first.roll(1, 1),
    ]
    assert all(abs(agreement(first, other) - 0.82) < 0.03 for other in others)
    assert abs(float(first.float().mean()) - 0.9) < 0.02


@pytest.mark.parametrize("text", ["dp=2", "dp=2 zero=1", "pp=2 dp=2 zero=1"])
def test_p19_bucket_sizes_do_not_matter(pool: Pool, text: str) -> None:
    """Gradients are summed element by element in the order of the ranks: bit for bit equal. The norm adds up in
    another order (1e-7), and clipping spreads that."""
    world_size = 4 if "pp" in text else 2
    runs = [
        check_equal(pool, f"{text} micro=2 bucket_mb={size}", world_size, MODELS["llama-tied"], Run(steps=3))
        for size in (2**-10, 1, 1024)
    ]
    whole = [assemble(MODELS["llama-tied"], [result["grads"] for result in results]) for results in runs]
    for name, grad in whole[0].items():
        assert torch.equal(grad, whole[1][name]), name
        assert torch.equal(grad, whole[2][name]), name
    for results in runs:
        assert results[0]["losses"] == pytest.approx(runs[0][0]["losses"], rel=1e-6)


@pytest.mark.parametrize(
    ("text", "model"),
    [("dp=2 micro=2", "llama-tied"), ("dp=2 micro=4", "gpt2"), ("tp=2 pp=2 dp=2 micro=4", "llama-tied")],
)
def test_p20_zero_levels_agree_at_every_step(pool: Pool, text: str, model: str) -> None:
    world_size = 8 if "tp" in text else 2
    run = Run(steps=20)
    plain, shared = (check_equal(pool, f"{text} zero={level}", world_size, MODELS[model], run) for level in (0, 1))
    assert shared[0]["losses"] == pytest.approx(plain[0]["losses"], rel=1e-6)
    assert shared[0]["norms"] == pytest.approx(plain[0]["norms"], rel=1e-5)
    assert sum(result["state"] for result in shared) < 0.6 * sum(result["state"] for result in plain)


def run_overlap(connect: Connect, text: str, world_size: int) -> list[int]:
    """Of two steps, how many reductions began while a backward was running."""
    config, run = MODELS["llama"], Run()
    parallel, plan = build(connect, text, world_size, config, run)
    spans: list[tuple[str, float, float]] = []
    parallel.world.book.sink = lambda stream, kind, name, start, end, size=0: spans.append((kind, start, end))
    early = []
    for step in range(2):
        spans.clear()
        batch = global_batch(config, step, run)
        parallel.forward_backward(microbatches(batch, plan, parallel.world.at["dp"]), count(batch))
        *_, (_, begin, end) = [span for span in spans if span[0] == "B"]
        early.append(sum(kind == "reduce_scatter" and begin < start < end for kind, start, _ in spans))
    return early


def test_p21_the_first_two_steps_with_overlap(pool: Pool) -> None:
    """Reductions begin during the last backward from the first step on; nothing uses a gradient before they end."""
    for early in pool.run(2, run_overlap, "dp=2 zero=1 bucket_mb=0.01 micro=2", 2):
        assert min(early) >= 3
    check_equal(pool, "dp=2 zero=1 bucket_mb=0.01 micro=2", 2, MODELS["llama"], Run(steps=2))


@pytest.mark.parametrize("model", ["llama", "gpt2"])
@pytest.mark.parametrize(
    ("text", "world_size"),
    [("tp=2", 2), ("pp=2", 2), ("dp=2", 2), ("tp=2 pp=2 dp=2 zero=1", 8), ("tp=2 recompute=selective", 2)],
)
def test_p24_packed_documents(pool: Pool, text: str, world_size: int, model: str) -> None:
    check_equal(pool, f"{text} micro=2", world_size, MODELS[model], Run(documents=True))


def test_p25_a_sequence_that_does_not_divide_is_refused_by_name_and_works_uncut(pool: Pool) -> None:
    told = refused("tp=2", MODELS["llama"], 2, seq=15)
    assert "sequence parallelism cuts the 1 x 15 tokens of a microbatch" in told
    assert "sequence_parallel=false" in told
    assert "micro=2" in told
    check_equal(pool, "tp=2 sequence_parallel=false", 2, MODELS["llama"], Run(seq=15))
    check_equal(pool, "tp=2 micro=2", 2, MODELS["gpt2"], Run(seq=15))


@pytest.mark.parametrize(
    ("text", "world_size"), [("dp=2", 2), ("pp=2", 2), ("tp=2 dp=2 zero=1", 4), ("dp=2 micro=2", 2)]
)
def test_p25_a_smaller_batch_is_filled_with_masked_samples(pool: Pool, text: str, world_size: int) -> None:
    """5 real samples of 8 (some ranks and microbatches have none at all) equal a batch of 5 in one process."""
    check_equal(pool, text, world_size, MODELS["gpt2"], Run(empty=3))
    check_equal(pool, text, world_size, MODELS["llama"], Run(empty=5))


ZERO_BUBBLE = """
schedule zb-h1 stages=2 microbatches=4  # weight gradients fill what 1F1B leaves idle (arXiv:2401.10241)
0: 0F0 0F1 0B0 0F2 0B1 0W0 0F3 0B2 0W1 0B3 0W2 0W3
1: 1F0 1B0 1F1 1B1 1W0 1F2 1B2 1W1 1F3 1B3 1W2 1W3
"""
MISSING = """
0: 0F0 0F1 0B0 0B1
1: 1F0 1B0 1F1
"""
DEADLOCK = """
0: 0F0 0B0 0F1 0B1
1: 1F0 1F1 1B0 1B1
"""


@pytest.mark.parametrize(
    ("text", "marked"), [(MISSING, "1B1"), (DEADLOCK, "deadlock")], ids=["missing backward", "deadlock"]
)
def test_p26_broken_schedules_are_refused_with_the_grid(tmp_path: Path, text: str, marked: str) -> None:
    from plait.core.plan import Plan

    file = tmp_path / "bad.txt"
    file.write_text(text)
    plan = Plan.parse(f"pp=2 schedule={file}").resolve(2)
    with pytest.raises(ScheduleError) as caught:
        build_schedule(plan, 2)
    told = str(caught.value)
    assert marked in told
    assert "0F0" in told
    assert "1F0" in told


def test_p26_a_file_for_other_sizes_is_refused(tmp_path: Path) -> None:
    from plait.core.plan import Plan

    file = tmp_path / "zb.txt"
    file.write_text(ZERO_BUBBLE)
    with pytest.raises(PlanError, match="is for 4 microbatches, the plan needs 8"):
        build_schedule(Plan.parse(f"pp=2 schedule={file}").resolve(2), 8)
    with pytest.raises(PlanError, match="is for 2 ranks, the plan needs 4"):
        build_schedule(Plan.parse(f"pp=4 schedule={file}").resolve(4), 4)


@pytest.mark.parametrize("model", ["llama", "gpt2-tied", "qwen3"])
@pytest.mark.parametrize(
    ("text", "world_size"),
    [("pp=2 micro=2", 2), ("pp=2 tp=2 micro=2", 4), ("pp=2 dp=2 zero=1", 4), ("pp=2 micro=2 recompute=full", 2)],
)
def test_p26_a_zero_bubble_file_equals_one_process(
    pool: Pool, tmp_path: Path, text: str, world_size: int, model: str
) -> None:
    file = tmp_path / "zb.txt"
    file.write_text(ZERO_BUBBLE)
    check_equal(pool, f"{text} schedule={file}", world_size, MODELS[model], Run(steps=2))


@pytest.mark.parametrize("model", list(MODELS))
@pytest.mark.parametrize("tp", [2, 4])
def test_p28_shards_of_fused_weights_give_back_the_whole(pool: Pool, model: str, tp: int) -> None:
    """Every rank holds its part of q, k, v and of gate, up; together they are the original bit for bit."""
    config = MODELS[model]
    results = pool.run(tp, cut_run, f"tp={tp}", tp, config, Run(steps=0))
    whole = assemble(config, [result["weights"] for result in results])
    source = InitSource(config, 3)
    for name in parameter_shapes(config):
        assert torch.equal(whole[name], source.read(name)), name
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for result in results:
        boxes = {name: [box[0] for box, _ in pieces] for name, _, pieces, _, _ in result["weights"]}
        q, k, v = boxes["layers.0.attn.qkv.weight"]
        assert q[1] <= query <= k[0] < k[1] <= query + key <= v[0]
        if config.gated:
            gate, up = boxes["layers.0.mlp.gate_up.weight"]
            assert (up[0] - config.ffn_size, up[1] - config.ffn_size) == gate


def test_batches_are_what_they_say() -> None:
    """The helper's own arithmetic: microbatches of all data ranks are the batch, in order."""
    from plait.core.plan import Plan

    batch = global_batch(MODELS["llama"], 0)
    plan = Plan.parse("dp=2 micro=2").resolve(2)
    parts: list[Batch] = [part for index in (0, 1) for part in microbatches(batch, plan, index)]
    assert torch.equal(torch.cat([part.tokens_BT for part in parts]), batch.tokens_BT)
    assert sum(map(count, parts)) == count(batch)


def test_p25_a_callers_own_batch_that_does_not_fit_is_refused_by_name(pool: Pool) -> None:
    assert all("sequence_parallel=false" in text for text in pool.run(2, run_odd_batch, "rows"))
    assert all("neither one of 67 tokens nor -100" in text for text in pool.run(2, run_odd_batch, "target"))


def run_odd_batch(connect: Connect, what: str) -> str:
    world = connect(Mesh(tp=2))
    config = models()["llama"]
    with torch.device("meta"):
        model = Decoder(config)
    parallel = parallelize(model, Plan.parse("tp=2 micro=1"), world, weights=InitSource(config, 0))
    tokens = torch.zeros(1, 15 if what == "rows" else 16, dtype=torch.int64)
    targets = tokens if what == "rows" else tokens - 1
    batch = Batch(tokens_BT=tokens, targets_BT=targets, sample_B=torch.zeros(1, dtype=torch.int64), step=0)
    with pytest.raises(ValueError) as caught:
        parallel.forward_backward([batch], count=1)
    return str(caught.value)
