"""bf16, fp16 and fp8 with fp32 master weights and fp32 gradient accumulation, against fp32 in one process.

**Tolerance.** bf16 rounds to 8 bits: u = 2^-9 = 2e-3 relative each time. A gradient here passes through about 4
layers of 8 rounded tensors forward and backward; independent roundings add up as sqrt(64) u = 1.6e-2 of the value,
and gradients that are small sums of larger terms lose two or three times that: 6e-2 for a parameter's gradient. The
loss is a mean over many tokens of a logarithm near 4.2, computed in fp32 from logits below 1: 1e-3. The norm is an
average of gradients: 1e-2.

fp16 rounds to 11 bits, u = 2^-12: a quarter of all this is generous for what is rounded. Without a loss scale, as most
of these tests run it, gradients below 6e-8 are lost as well: 9e-3 is seen, 2e-3 with a scale of 2^16.

fp8 (e4m3) rounds the factors of products to 4 bits, u = 2^-4, by 2.6% rms: a product is off by 3.7% of its size,
whatever the number of its terms. A gradient passes 16 of them forward and 16 back: sqrt(32) x 3.7% = 21%; 0.12 is
seen, because the residual stream goes around products. Loss and norm average over all of them, as above.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from plait.parallel import product
from plait.parallel.precision import FIRST_SCALE, GROWTH_STEPS, LossScale, fp8_fits, fp8_reason
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


LIMITS = {
    "bf16": (1e-3, 1e-2, 6e-2, 1e-4),
    "fp16": (2.5e-4, 2.5e-3, 1.5e-2, 1e-4),
    "fp8": (1e-3, 1e-2, 2.5e-1, 3e-2),
}
"""Largest differences of loss, norm and gradients from fp32; and the least of gradients: it was this precision."""


@pytest.mark.parametrize("model", ["llama", "gpt2-tied", "qwen3"])
@pytest.mark.parametrize(
    ("text", "world_size"), [("dp=1", 1), ("tp=2", 2), ("pp=2 dp=2 zero=1", 4), ("tp=2 pp=2 dp=2 zero=1", 8)]
)
@pytest.mark.parametrize("precision", LIMITS)
def test_low_precision_is_near_fp32(pool: Pool, text: str, world_size: int, model: str, precision: str) -> None:
    config, run = MODELS[model], Run()
    results = pool.run(world_size, cut_run, f"{text} precision={precision} micro=2", world_size, config, run)
    errors = differences(config, results, one_process(config, run))
    loss, norm, grad, least = LIMITS[precision]
    assert errors.loss < loss, errors
    assert errors.norm < norm, errors
    assert errors.grad[0] < grad, errors
    assert errors.grad[0] > least, f"this was not {precision}"


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


# --- fp16's loss scale


def test_the_scale_halves_on_overflow_and_doubles_after_good_steps() -> None:
    scale = LossScale()
    assert scale.value == FIRST_SCALE
    assert not scale.update(False)
    assert not scale.update(False)
    assert scale.value == FIRST_SCALE / 4
    assert all(scale.update(True) for _ in range(GROWTH_STEPS - 1))
    assert scale.value == FIRST_SCALE / 4
    assert scale.update(True)
    assert scale.value == FIRST_SCALE / 2
    assert all(scale.update(True) for _ in range(GROWTH_STEPS - 1))
    assert not scale.update(False), "an overflow begins the count anew"
    assert all(scale.update(True) for _ in range(GROWTH_STEPS - 1))
    assert scale.value == FIRST_SCALE / 4


def test_the_scale_goes_on_from_a_checkpoint() -> None:
    scale = LossScale(value=8.0, good=GROWTH_STEPS - 1)
    assert scale.update(True)
    assert scale == LossScale(value=16.0, good=0)


def test_the_scale_stops_at_its_least() -> None:
    scale = LossScale(value=2.0)
    assert not scale.least
    for _ in range(3):
        assert not scale.update(False)
    assert scale.least
    assert scale.value == 1.0


def run_overflow(connect: Connect) -> list[tuple[bool, float, bool]]:
    """Three steps of fp16, (taken, next scale, weights changed) of each; in step 1 rank 1 alone overflows."""
    config, run = MODELS["llama"], Run()
    parallel, plan = build(connect, "dp=2 zero=1 precision=fp16 micro=2", 2, config, run)
    world, zero, scale, found = parallel.world, parallel.zero, LossScale(), []
    optimizer = adamw(*zero.optimizer_groups())
    for step in range(3):
        batch = global_batch(config, step, run)
        factor = 2.0**40 if step == 1 and world.rank == 1 else 1.0
        local = [parallel.local(one, scale=scale.value * factor) for one in microbatches(batch, plan, world.at["dp"])]
        schedule = parallel.schedule(len(local))
        loss = parallel.executor.run(schedule, local.__getitem__, count=count(batch), sink=world.book.sink)
        zero.finish()
        zero.scale_gradients(1 / scale.value)
        square = parallel.share_loss(loss, zero.square_norm())[1]
        if step == 0:
            assert float(square.sqrt()) == pytest.approx(one_process(config, run)["norms"][0], rel=2.5e-3)
        taken = scale.update(bool(square.isfinite()))
        before = [view.clone() for _, view, _ in zero.parameters()]
        if taken:
            optimizer.step()
            zero.publish()
        changed = any(not torch.equal(a, b) for a, (_, b, _) in zip(before, zero.parameters(), strict=True))
        assert all(bool(view.isfinite().all()) for _, view, _ in zero.parameters())
        found.append((taken, scale.value, changed))
    return found


def test_all_ranks_skip_when_one_overflows(pool: Pool) -> None:
    """Case P29."""
    wanted = [(True, FIRST_SCALE, True), (False, FIRST_SCALE / 2, False), (True, FIRST_SCALE / 2, True)]
    assert pool.run(2, run_overflow) == [wanted, wanted]


# --- fp8


def rounded(x: torch.Tensor) -> torch.Tensor:
    copy, scale = product.quantised(x)
    return copy.float() * scale


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(5, 64, 48), (0, 16, 16), (33, 32, 96)])
def test_fp8_products_are_those_of_the_rounded_factors(rows: int, inputs: int, outputs: int) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
    grad = torch.randn(rows, outputs)
    near = {"rtol": 1e-6, "atol": 1e-5}  # orders of sums
    out = product.forward(x, weight, bias, fp8=True)
    torch.testing.assert_close(out, rounded(x) @ rounded(weight).t() + bias, **near)
    back = product.input_gradient(grad, weight, fp8=True)
    torch.testing.assert_close(back, rounded(grad) @ rounded(weight.t().contiguous()).t(), **near)
    assert product.forward(x.bfloat16(), weight.bfloat16(), fp8=True).dtype == torch.bfloat16
    if rows:
        # e4m3 keeps 3 bits of fraction: 2^-4 at most and about half of that on average, twice, independently.
        error = (out - product.forward(x, weight, bias)).norm() / out.norm()
        assert 0.01 < error < 0.05


def test_fp8_rounds_rows_of_any_size_alike() -> None:
    torch.manual_seed(1)
    row = torch.randn(1, 64)
    sizes = torch.tensor([[1.0], [2.0**-60], [2.0**60], [0.0]])
    assert torch.equal(rounded(row * sizes), rounded(row) * sizes)
    for bad in (math.inf, math.nan):
        row[0, 3] = bad
        assert product.forward(row, torch.randn(16, 64), fp8=True).isnan().all(), "an overflow must be seen"


def test_fp8_does_not_depend_on_other_rows_or_cuts() -> None:
    """A token's outputs are the same in every microbatch, and the same columns on every tp rank."""
    torch.manual_seed(2)
    x, weight = torch.randn(8, 64) * torch.logspace(-3, 3, 8)[:, None], torch.randn(64, 64)
    whole = product.forward(x, weight, fp8=True)
    torch.testing.assert_close(product.forward(x[2:4], weight, fp8=True), whole[2:4], rtol=1e-6, atol=0)
    torch.testing.assert_close(product.forward(x, weight[16:32], fp8=True), whole[:, 16:32], rtol=1e-5, atol=1e-6)


def test_fp8_weights_are_the_same_forward_and_backward() -> None:
    """But for numbers that are small in their row or column: those are rounded to what is left of its range."""
    torch.manual_seed(3)
    weight = torch.randn(64, 64)
    weight[weight.abs() < 0.1] = 0.1
    assert torch.equal(rounded(weight), rounded(weight.t().contiguous()).t())


def test_devices_without_fp8_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = fp8_reason(torch.device("cpu"))
    assert reason == ("precision=fp8: a cpu has no fp8 matrix units; what works: precision=bf16, or precision=fp32")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    reason = fp8_reason(torch.device("cuda"))
    assert reason is not None
    assert "NVIDIA A100 has compute capability 8.0, fp8 needs 8.9" in reason
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert fp8_reason(torch.device("cuda")) is None
    assert fp8_fits(4096, 11008)
    assert not fp8_fits(4096, 50257)
