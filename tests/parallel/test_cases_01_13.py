"""Cases P1 to P13 of ``cases/parallel.md``: failures that users of other systems met, one or more tests each."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from plait.core.errors import PlanError
from plait.core.legal import check
from plait.core.plan import Plan
from plait.models.config import PRESETS, ModelConfig, parameter_shapes
from plait.parallel.layout import model_shape, stage_bounds, stage_layers, stage_parameters
from tests.parallel.cuts import (
    GLOBAL_BATCH,
    SEQ,
    Run,
    build,
    check_equal,
    count,
    cut_run,
    global_batch,
    microbatches,
    models,
    one_process,
)
from tests.pool import Connect, Pool

MODELS = models()


def refused(text: str, config: ModelConfig, world_size: int, *, batch: int = GLOBAL_BATCH, seq: int = SEQ) -> str:
    """The message with which a plan is refused before any process starts."""
    with pytest.raises(PlanError) as caught:
        check(Plan.parse(text), model_shape(config), world_size=world_size, global_batch=batch, seq=seq)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "world_size"),
    [("tp=2 micro=8", 2), ("dp=2 micro=4", 2), ("dp=4", 4), ("micro=2", 1), ("pp=2 micro=2", 2), ("dp=2 pp=2 tp=2", 8)],
)
def test_p01_samples_with_different_numbers_of_targets(pool: Pool, text: str, world_size: int) -> None:
    targets = global_batch(MODELS["llama"], 0).targets_BT
    assert len({int((row >= 0).sum()) for row in targets}) > 3
    check_equal(pool, text, world_size, MODELS["llama"])


@pytest.mark.parametrize("micro", [1, 2, 4])
def test_p02_microbatch_sizes_under_pp(pool: Pool, micro: int) -> None:
    check_equal(pool, f"pp=2 micro={micro}", 2, MODELS["gpt2"])


@pytest.mark.parametrize("text", ["dp=8", "dp=2 cp=4", "dp=2 cp=4 context=gather"])
def test_p03_context_parallel_ranks_are_no_data_ranks(pool: Pool, text: str) -> None:
    check_equal(pool, f"{text} micro=1", 8, MODELS["llama"])


@pytest.mark.parametrize(
    ("pp", "world_size", "zero"),
    [(2, 2, 0), (2, 4, 1), (2, 4, 2), (2, 4, 3), (4, 4, 0), (4, 4, 1), (4, 8, 1), (4, 8, 2), (4, 8, 3)],
)
def test_p04_tied_embedding_under_pp_and_zero(pool: Pool, pp: int, world_size: int, zero: int) -> None:
    """`assemble` asserts that the copies of the embedding are bitwise equal after the 20 steps."""
    check_equal(pool, f"pp={pp} zero={zero} micro=2", world_size, MODELS["llama-tied"], Run(steps=20))


@pytest.mark.parametrize("model", ["llama-tied", "gpt2-tied"])
def test_p05_tied_embedding_under_virtual_stages(pool: Pool, model: str) -> None:
    check_equal(pool, "pp=2 schedule=interleaved virtual=2 micro=2", 2, MODELS[model], Run(steps=3))


def test_p05_tied_embedding_whose_two_ends_share_a_rank(pool: Pool, tmp_path: Any) -> None:
    """Stages 0 and 3 on rank 0, 1 and 2 on rank 1: one tensor with two uses a microbatch, and no copy elsewhere."""
    lines: list[list[str]] = [[], []]
    for microbatch in range(4):
        for stage in range(4):
            lines[stage in (1, 2)].append(f"{stage}F{microbatch}")
        for stage in reversed(range(4)):
            lines[stage in (1, 2)].append(f"{stage}B{microbatch}")
    file = tmp_path / "v.txt"
    file.write_text("\n".join(f"{rank}: {' '.join(line)}" for rank, line in enumerate(lines)))
    check_equal(pool, f"pp=2 virtual=2 schedule={file} micro=2", 2, MODELS["gpt2-tied"], Run(steps=3))
    check_equal(pool, f"pp=2 virtual=2 schedule={file} zero=1", 4, MODELS["llama-tied"], Run(steps=3))


@pytest.mark.parametrize("vocab", [67, 1003])
@pytest.mark.parametrize("tp", [2, 4])
def test_p06_vocabulary_that_does_not_divide(pool: Pool, vocab: int, tp: int) -> None:
    """No id is padded: the ranks' tokens add up to the vocabulary, and the loss is that of tp=1."""
    config = dataclasses.replace(MODELS["gpt2-tied"], vocab_size=vocab)
    results = check_equal(pool, f"tp={tp} micro=4", tp, config)
    held = [
        shape[0] for result in results for name, shape, _, _, _ in result["weights"] if name == "embed.tokens.weight"
    ]
    assert sum(held) == vocab
    assert max(held) - min(held) == 1


def test_p07_kv_heads_that_do_not_fit_are_refused_with_what_works() -> None:
    config = dataclasses.replace(MODELS["llama"], num_heads=12, num_kv_heads=3, head_dim=4)
    told = refused("tp=4", config, 4)
    assert "3 KV heads neither divide by it nor divide it" in told
    assert "tp=3 or tp=6" in told


@pytest.mark.parametrize(("text", "world_size"), [("tp=4", 4), ("tp=4 dp=2 zero=1", 8), ("tp=4 pp=2", 8)])
def test_p07_fewer_kv_heads_than_ranks(pool: Pool, text: str, world_size: int) -> None:
    """2 KV heads on tp=4: each is held by two ranks, whose gradients are summed."""
    config = dataclasses.replace(MODELS["llama"], qkv_bias=True)
    assert config.num_kv_heads == 2
    check_equal(pool, f"{text} micro=2", world_size, config, Run(steps=3))


@pytest.mark.parametrize(("layers", "pp", "virtual"), [(30, 4, 1), (42, 16, 1), (80, 16, 2)])
def test_p08_no_layer_is_lost(layers: int, pp: int, virtual: int) -> None:
    config = dataclasses.replace(PRESETS["llama2-7b"], num_layers=layers)
    schedule = "interleaved" if virtual > 1 else "1f1b"
    plan = Plan.parse(f"pp={pp} virtual={virtual} schedule={schedule}").resolve(pp)
    check(plan, model_shape(config), world_size=pp, global_batch=16, seq=64)
    cut = stage_layers(config, plan)
    bounds = stage_bounds(cut)
    assert len(bounds) == pp * virtual
    assert [layer for start, stop in bounds for layer in range(start, stop)] == list(range(layers))
    assert min(cut) >= 1
    held = [name for names in stage_parameters(config, cut) for name in names]
    assert sorted(held) == sorted(parameter_shapes(config))


def test_p08_more_stages_than_layers_are_refused_with_what_works() -> None:
    told = refused("pp=8", MODELS["llama"], 8)
    assert "8 virtual stages for 4 layers would leave some empty" in told
    assert "pp=4" in told


@pytest.mark.parametrize(("micro", "schedule"), [(4, "1f1b"), (8, "1f1b"), (4, "gpipe")])
def test_p09_fewer_microbatches_than_stages(pool: Pool, micro: int, schedule: str) -> None:
    check_equal(pool, f"pp=4 micro={micro} schedule={schedule}", 4, MODELS["llama"])


def test_p09_fewer_microbatches_than_virtual_stages(pool: Pool) -> None:
    check_equal(pool, "pp=2 schedule=interleaved virtual=2 micro=8", 2, MODELS["gpt2"])


@pytest.mark.parametrize("stages", ["0,4", "4,0"])
@pytest.mark.parametrize("model", ["llama", "gpt2-tied"])
def test_p10_stage_of_the_embedding_or_the_head_alone(pool: Pool, stages: str, model: str) -> None:
    """With ZeRO 1 and clipping: all ranks make the same number of collectives, whatever they hold."""
    assert one_process(MODELS[model], Run(steps=3))["norms"][0] != 0
    check_equal(pool, f"pp=2 dp=2 zero=1 stages={stages} micro=2", 4, MODELS[model], Run(steps=3))


@pytest.mark.parametrize("model", ["qwen3", "llama-tied"])
@pytest.mark.parametrize(
    "text", ["tp=2 pp=2 sequence_parallel=false", "tp=2 pp=2", "tp=2 pp=2 dp=2", "tp=4 pp=2 zero=1"]
)
def test_p11_the_norm_counts_every_element_once(pool: Pool, model: str, text: str) -> None:
    world_size = 8 if "dp=2" in text or "tp=4" in text else 4
    (result, *_) = pool.run(world_size, cut_run, f"{text} micro=2", world_size, MODELS[model], Run())
    grads = one_process(MODELS[model], Run())["grads"]
    wanted = math.sqrt(sum(float(grad.double().square().sum()) for grad in grads.values()))
    assert abs(result["norms"][0] - wanted) < 1e-6 * wanted


def test_p12_every_rank_has_the_same_true_loss(pool: Pool) -> None:
    results = pool.run(8, cut_run, "tp=2 pp=2 dp=2 micro=2", 8, MODELS["gpt2"], Run(steps=2))
    wanted = one_process(MODELS["gpt2"], Run(steps=2))["losses"]
    for result in results:
        assert result["losses"] == results[0]["losses"]
        assert result["losses"] == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize(
    "freeze", [("layers.1.", "norm2"), ("embed.",), ("layers.0.", "layers.1.", "embed."), ("head",)]
)
@pytest.mark.parametrize(("text", "world_size"), [("tp=2 micro=2", 2), ("pp=2 dp=2 zero=1 bucket_mb=0.005", 4)])
def test_p13_frozen_parameters_have_no_state(pool: Pool, text: str, world_size: int, freeze: tuple[str, ...]) -> None:
    config = MODELS["gpt2"]
    results = check_equal(pool, text, world_size, config, Run(steps=3, freeze=freeze))
    shapes = parameter_shapes(config)
    trained = sum(math.prod(shape) for name, shape in shapes.items() if not any(part in name for part in freeze))
    state = sum(result["state"] for result in results)
    # Two moments for each trained element. Buckets are padded; tp=2 holds what is not cut twice.
    assert 2 * trained <= state < 2 * trained * 1.15
    assert not any(part in name for result in results for name, *_ in result["grads"] for part in freeze)


@pytest.mark.parametrize(("text", "world_size"), [("dp=2 zero=1", 2), ("tp=2 dp=2", 4), ("pp=2 dp=2 zero=1", 4)])
def test_p13_parameters_without_a_gradient(pool: Pool, text: str, world_size: int) -> None:
    """A layer is not run in steps 0 and 2, with small buckets whose reductions overlap: its gradients count as zero,
    and those of the step before are forgotten."""
    for skip in (0, 2):
        results = check_equal(
            pool, f"{text} micro=2 bucket_mb=0.005", world_size, MODELS["llama"], Run(steps=3, skip=skip)
        )
        mine = [row for result in results for row in result["grads"] if row[0].startswith(f"layers.{skip}.")]
        assert mine
        assert not any(values.any() for *_, values in mine)


def run_evaluation(connect: Connect, text: str, world_size: int) -> list[float]:
    config, run = MODELS["gpt2"], Run()
    parallel, plan = build(connect, text, world_size, config, run)
    batch = global_batch(config, 0, run)
    mine = microbatches(batch, plan, parallel.world.at["dp"])
    schedule = parallel.schedule(len(mine), evaluation=True)
    before = [bucket.grads.clone() for bucket in parallel.zero.buckets]
    total = parallel.executor.run(schedule, mine.__getitem__, count=1, sink=parallel.world.book.sink)
    assert all(torch.equal(a, bucket.grads) for a, bucket in zip(before, parallel.zero.buckets, strict=True))
    return [float(value) / count(batch) for value in parallel.share_loss(total)]


@pytest.mark.parametrize(
    ("text", "world_size"), [("pp=2", 2), ("pp=2 schedule=interleaved virtual=2 micro=2", 2), ("tp=2 dp=2", 4)]
)
def test_p12_evaluation_is_a_schedule_of_forwards(pool: Pool, text: str, world_size: int) -> None:
    """Dropout is off, no gradient is touched, and every rank has the mean loss."""
    config = dataclasses.replace(MODELS["gpt2"], dropout=0.0)
    wanted = one_process(config, Run())["losses"]
    for losses in pool.run(world_size, run_evaluation, text, world_size):
        assert losses == pytest.approx(wanted, rel=1e-6)
