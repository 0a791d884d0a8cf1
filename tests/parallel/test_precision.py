"""bf16 with fp32 master weights and fp32 gradient accumulation, against fp32 in one process.

**Tolerance.** bf16 rounds to 8 bits: u = 2^-9 = 2e-3 relative each time. A gradient here passes through about 4
layers of 8 rounded tensors forward and backward; independent roundings add up as sqrt(64) u = 1.6e-2 of the value,
and gradients that are small sums of larger terms lose two or three times that: 6e-2 for a parameter's gradient. The
loss is a mean over many tokens of a logarithm near 4.2, computed in fp32 from logits below 1: 1e-3. The norm is an
average of gradients: 1e-2.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.parallel.cuts import (
    Run,
    adamw,
    build,
    count,
    cut_run,
    differences,
    global_batch,
    microbatches,
    models,
    one_process,
)
from tests.pool import Connect, Pool

MODELS = models()


@pytest.mark.parametrize("model", ["llama", "gpt2-tied", "qwen3"])
@pytest.mark.parametrize(
    ("text", "world_size"), [("dp=1", 1), ("tp=2", 2), ("pp=2 dp=2 zero=1", 4), ("tp=2 pp=2 dp=2 zero=1", 8)]
)
def test_bf16_is_near_fp32(pool: Pool, text: str, world_size: int, model: str) -> None:
    config, run = MODELS[model], Run()
    results = pool.run(world_size, cut_run, f"{text} precision=bf16 micro=2", world_size, config, run)
    errors = differences(config, results, one_process(config, run))
    assert errors.loss < 1e-3, errors
    assert errors.norm < 1e-2, errors
    assert errors.grad[0] < 6e-2, errors
    assert errors.grad[0] > 1e-4, "this was not bf16"


def run_masters(connect: Connect, text: str, world_size: int) -> list[tuple[str, Any, Any, Any]]:
    """After 5 steps of 1e-4: (name, bf16 weights, masters, how far masters moved) of the norms, which begin at 1."""
    config, run = MODELS["llama"], Run()
    parallel, plan = build(connect, text, world_size, config, run)
    optimizer = adamw(*parallel.zero.optimizer_groups())
    for group in optimizer.param_groups:
        group["lr"] = 1e-4
    before = {(one.name, start): part.clone() for one, start, part in parallel.zero.masters()}
    for step in range(5):
        batch = global_batch(config, step, run)
        parallel.forward_backward(microbatches(batch, plan, parallel.world.at["dp"]), count(batch))
        optimizer.step()
        parallel.zero.publish()
    weights = {one.name: view.reshape(-1) for one, view, _ in parallel.zero.parameters()}
    rows = []
    for one, start, part in parallel.zero.masters():
        assert part.dtype == torch.float32
        view = weights[one.name][start : start + part.numel()]
        assert view.dtype == torch.bfloat16
        assert torch.equal(view, part.to(torch.bfloat16)), "weights are the masters, rounded"
        if "norm" in one.name:
            moved = (part - before[one.name, start]).abs().max()
            rows.append((one.name, view.float().numpy().copy(), part.numpy().copy(), float(moved)))
    assert all(bucket.grads.dtype == torch.float32 for bucket in parallel.zero.buckets)
    return rows


@pytest.mark.parametrize(("text", "world_size"), [("dp=1", 1), ("dp=2 zero=1", 2)])
def test_small_updates_live_in_the_masters(pool: Pool, text: str, world_size: int) -> None:
    """A weight of 1 in bf16 moves by 2^-8 at least: five steps of 1e-4 would all be lost without fp32 masters."""
    for rows in pool.run(world_size, run_masters, f"{text} precision=bf16 micro=2", world_size):
        assert rows
        for _, weights, _, moved in rows:
            assert (weights == 1.0).all()
            assert 1e-4 < moved < 2**-9


def run_state(connect: Connect, text: str, world_size: int) -> dict[str, int]:
    parallel, _ = build(connect, text, world_size, MODELS["llama"], Run())
    return dict(parallel.zero.state_bytes())


def test_bytes_of_training_state(pool: Pool) -> None:
    """4 + 4 + 8 bytes a parameter in fp32; 2 + 4 + 12 in bf16; ZeRO 1 halves what the optimizer keeps on dp=2."""
    from plait.models.config import parameter_count

    parameters = parameter_count(MODELS["llama"])

    def bytes_each(text: str, world_size: int) -> dict[str, float]:
        (state, *_) = pool.run(world_size, run_state, text, world_size)
        return {name: size / parameters for name, size in state.items()}

    near = {"rel": 0.02}  # padding of buckets
    assert bytes_each("dp=1", 1) == pytest.approx({"weights": 4, "gradients": 4, "optimizer": 8}, **near)
    assert bytes_each("precision=bf16", 1) == pytest.approx({"weights": 2, "gradients": 4, "optimizer": 12}, **near)
    assert bytes_each("dp=2 zero=1", 2) == pytest.approx({"weights": 4, "gradients": 4, "optimizer": 4}, **near)
    assert math.isclose(bytes_each("precision=bf16 dp=2 zero=1", 2)["optimizer"], 6, rel_tol=0.02)
