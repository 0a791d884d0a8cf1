"""ZeRO levels 0 to 3, with and without blocks (HSDP), beside one process; what stays in memory at each level."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.core.plan import Plan
from plait.models.config import ModelConfig, parameter_shapes
from plait.parallel.apply import Parallel
from plait.parallel.flat import Bucket
from plait.parallel.reduction import PerAction
from tests.parallel.cuts import LLAMA, Run, adamw, build, check_equal, count, global_batch, microbatches, models
from tests.pool import Connect, Pool

MODELS = models()
LEVELS = [0, 1, 2, 3]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("model", ["llama", "gpt2-tied"])
def test_two_ranks_with_two_microbatches(pool: Pool, level: int, model: str) -> None:
    check_equal(pool, f"dp=2 zero={level} micro=2", 2, MODELS[model], Run(steps=3))


@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize("group", [1, 2])
def test_state_shared_within_blocks(pool: Pool, level: int, group: int) -> None:
    check_equal(pool, f"dp=4 zero={level} zero_group={group}", 4, MODELS["llama-tied"], Run(steps=3))


@pytest.mark.parametrize("level", [2, 3])
@pytest.mark.parametrize(
    "plan",
    [
        "pp=2 dp=2",
        "pp=2 dp=2 schedule=zb-h1",
        "pp=2 dp=2 schedule=zb-v virtual=2",
        "pp=2 dp=2 schedule=interleaved virtual=2",
        "dp=2 tp=2",
        "dp=4 node=2",
        "dp=4 recompute=full",
    ],
)
def test_every_kind_of_schedule_and_cut(pool: Pool, level: int, plan: str) -> None:
    model = MODELS["llama-tied" if "zb-v" in plan or "tp" in plan else "gpt2"]
    check_equal(pool, f"{plan} zero={level} micro={1 if 'dp=4' in plan else 2}", 4, model, Run(steps=3))


@pytest.mark.parametrize(
    "plan", ["dp=2", "dp=2 pp=2", "dp=2 pp=2 schedule=interleaved virtual=2", "dp=2 recompute=full"]
)
def test_weights_gathered_once_a_step(pool: Pool, plan: str) -> None:
    check_equal(
        pool, f"{plan} zero=3 gather=step micro=2", 4 if "pp" in plan else 2, MODELS["llama-tied"], Run(steps=3)
    )


@pytest.mark.parametrize("level", LEVELS)
def test_p04_p20_twenty_steps_of_a_tied_model(pool: Pool, level: int) -> None:
    """Losses of every step, and copies of the tied weight bitwise equal at the end (`assemble` holds them to it)."""
    check_equal(pool, f"pp=2 dp=2 zero={level} micro=2", 4, MODELS["gpt2-tied"], Run(steps=20))


@pytest.mark.parametrize("level", [2, 3])
@pytest.mark.parametrize("plan", ["dp=2", "pp=2 dp=2 schedule=zb-h1"])
def test_p13_layers_that_get_no_gradient_and_frozen_ones(pool: Pool, level: int, plan: str) -> None:
    run = Run(steps=3, skip=1, freeze=("layers.2", "embed", "layers.0.norm1"))
    ranks = 4 if "pp" in plan else 2
    check_equal(pool, f"{plan} zero={level} bucket_mb=0.005 micro=2", ranks, MODELS["gpt2"], run)


@pytest.mark.parametrize("level", [2, 3])
def test_over_gloo(pool: Pool, level: int) -> None:
    check_equal(pool, f"dp=2 zero={level}", 2, MODELS["llama"], Run(steps=2, transport="gloo"))


# --- what lives

WIDE = dataclasses.replace(LLAMA, hidden_size=64, ffn_size=160, num_layers=6, vocab_size=331, tied=False)


def floats() -> int:
    """Bytes of all floating-point storages that the process holds, each once."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if isinstance(thing, Tensor) and thing.is_floating_point()]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    return sum(size for pointer, size in storages.items() if pointer)


def train(parallel: Parallel, plan: Plan, optimizer: torch.optim.Optimizer, step: int, config: ModelConfig) -> float:
    batch = global_batch(config, step)
    loss = parallel.forward_backward(microbatches(batch, plan, parallel.world.at["dp"]), count(batch))
    optimizer.step()
    parallel.zero.publish()
    return float(loss)


def memory(connect: Connect, text: str, world_size: int) -> dict[str, Any]:
    """On one rank: bytes of its state by its own account and by the interpreter's, most gathered weights in a step."""
    before = floats()
    parallel, plan = build(connect, text, world_size, WIDE, Run())
    zero, peak = parallel.zero, 0
    optimizer = adamw(*zero.optimizer_groups())
    gathered = [bucket for bucket in zero.buckets if bucket.gathered]

    def note(*_: object) -> None:
        nonlocal peak
        peak = max(peak, sum(bucket.weights.untyped_storage().nbytes() for bucket in gathered))

    for stage in parallel.stages:
        for leaf in (module for module in stage.module.modules() if not list(module.children())):
            leaf.register_forward_hook(note)
            leaf.register_full_backward_pre_hook(note)
    for step in range(2):
        train(parallel, plan, optimizer, step, WIDE)
    held = floats() - before
    units = [
        sum(b.weights.nbytes for b in gathered if b.first == place) for place in sorted({b.first for b in gathered})
    ]
    return {"said": dict(zero.state_bytes()), "held": held, "peak": peak, "units": units}


@pytest.mark.parametrize(("level", "precision"), [*((level, "fp32") for level in LEVELS), (3, "bf16")])
def test_what_stays_is_what_the_formula_says(pool: Pool, level: int, precision: str) -> None:
    """Bytes a parameter on n ranks (Rajbhandari et al. 2020, table 1, with fp32 gradients): within 5%."""
    ranks = 4
    parameters = sum(math.prod(shape) for shape in parameter_shapes(WIDE).values())
    weights = (4 if precision == "fp32" else 2) / (ranks if level == 3 else 1)
    gradients = 4 / (ranks if level >= 2 else 1)
    optimizer = (8 if precision == "fp32" else 12) / (ranks if level >= 1 else 1)
    near = {"rel": 0.05}
    for result in pool.run(ranks, memory, f"dp={ranks} zero={level} precision={precision} micro=2", ranks):
        said = result["said"]
        assert said["weights"] == pytest.approx(weights * parameters, **near)
        assert said["gradients"] == pytest.approx(gradients * parameters, **near)
        assert said["optimizer"] == pytest.approx(optimizer * parameters, **near)
        assert result["held"] == pytest.approx(sum(said.values()), **near)
        # A layer and the one that is on its way, or an end of the model and the layer next to it.
        assert result["peak"] == max((a + b for a, b in itertools.pairwise(result["units"])), default=0)


def evaluate_between(connect: Connect, text: str, world_size: int) -> list[float]:
    """Losses of an evaluation before, between and after two steps."""
    config = MODELS["gpt2-tied"]
    parallel, plan = build(connect, text, world_size, config, Run())
    optimizer = adamw(*parallel.zero.optimizer_groups())
    batch = global_batch(config, 7)
    mine = microbatches(batch, plan, parallel.world.at["dp"])
    losses = []
    for step in range(3):
        schedule = parallel.schedule(len(mine), evaluation=True)
        total = parallel.executor.run(schedule, mine.__getitem__, count=1, sink=parallel.world.book.sink)
        losses.append(float(parallel.share_loss(total)[0]) / count(batch))
        assert not any(b.weights.untyped_storage().nbytes() for b in parallel.zero.buckets if b.gathered)
        train(parallel, plan, optimizer, step, config)
    return losses


@pytest.mark.parametrize("plan", ["dp=2 zero=3", "dp=2 zero=3 gather=step", "dp=2 zero=2", "pp=2 dp=2 zero=3"])
def test_evaluation_sees_the_newest_weights(pool: Pool, plan: str) -> None:
    ranks = 4 if "pp" in plan else 2
    wanted = pool.run(1, evaluate_between, "dp=1 micro=2", 1)[0]
    for losses in pool.run(ranks, evaluate_between, f"{plan} micro=2", ranks):
        assert losses == pytest.approx(wanted, rel=1e-5)


def not_finite(connect: Connect, text: str) -> tuple[float, float]:
    parallel, _ = build(connect, text, 2, LLAMA, Run())
    zero = parallel.zero
    found = []
    for value in (math.inf, math.nan):
        for bucket in zero.buckets:
            bucket.shard_grads.fill_(1.0)
        if parallel.world.rank == 1:
            zero.gradients()[-1][2][0] = value
        found.append(float(parallel.share_loss(torch.zeros(()), zero.square_norm())[1]))
    return found[0], found[1]


@pytest.mark.parametrize("level", [1, 2, 3])
def test_one_infinite_element_of_one_rank_is_in_every_norm(pool: Pool, level: int) -> None:
    for infinite, undefined in pool.run(2, not_finite, f"dp=2 zero={level}"):
        assert infinite == math.inf
        assert math.isnan(undefined)


# --- state that moves, and versions


def move_rows(connect: Connect, text: str, world_size: int) -> tuple[bool, bool, bool]:
    """Turn the rows of one weight and of its moments upside down, and back; did all follow, and nothing else move?"""
    parallel, plan = build(connect, text, world_size, LLAMA, Run())
    zero, name = parallel.zero, "layers.1.mlp.down.weight"
    optimizer = adamw(*zero.optimizer_groups())
    train(parallel, plan, optimizer, 0, LLAMA)
    flat = zero.flat(name)
    shards = [flat.detach(), *(value for value in optimizer.state[flat].values() if value.shape == flat.shape)]
    before = [shard.clone() for shard in shards]
    whole = [zero.local(name, shard) for shard in shards]
    for shard, values in zip(shards, whole, strict=True):
        zero.set_local(name, shard, values.flip(0))
    zero.publish()
    with zero.whole():
        seen = next(view.clone() for one, view, _ in zero.parameters() if one.name == name)
    turned = all(torch.equal(zero.local(name, s), v.flip(0)) for s, v in zip(shards, whole, strict=True))
    for shard, values in zip(shards, whole, strict=True):
        zero.set_local(name, shard, values)
    back = all(torch.equal(a, b) for a, b in zip(before, shards, strict=True))
    return turned, torch.equal(seen.float(), whole[0].flip(0).to(seen.dtype).float()), back


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "plan", ["dp=2 zero=0", "dp=2 zero=1", "dp=2 zero=2", "dp=2 zero=3", "dp=4 zero=3 zero_group=2"]
)
def test_a_whole_tensor_comes_out_of_the_shards_and_goes_back(pool: Pool, plan: str, precision: str) -> None:
    ranks = 4 if "dp=4" in plan else 2
    assert pool.run(ranks, move_rows, f"{plan} precision={precision}", ranks) == [(True, True, True)] * ranks


def versions(connect: Connect) -> list[bool]:
    """Two versions: backward under the weights of its forward, though newer ones have been published in between."""
    parallel, _ = build(connect, "dp=2 zero=1 schedule=2bw micro=2", 2, LLAMA, Run())
    zero = parallel.zero
    optimizer = adamw(*zero.optimizer_groups())

    def weights() -> list[Tensor]:
        return [view.clone() for _, view, _ in zero.parameters()]

    found = []
    for step in range(3):
        for bucket in zero.buckets:
            bucket.shard_grads.normal_()
        old = weights()
        optimizer.step()
        zero.publish()
        new = weights()
        zero.select(step)
        found.append(all(torch.equal(a, b) for a, b in zip(weights(), old, strict=True)))
        zero.select(step + 1)
        found.append(all(torch.equal(a, b) for a, b in zip(weights(), new, strict=True)))
        found.append(not any(torch.equal(a, b) for a, b in zip(old, new, strict=True)))
        masters = {(one.name, start): part for one, start, part in zero.masters()}
        views = {one.name: view.reshape(-1) for one, view, _ in zero.parameters()}
        found += [torch.equal(views[n][start : start + len(p)], p) for (n, start), p in masters.items()]
    with pytest.raises(AssertionError, match="version 1 of the weights is gone"):
        zero.select(1)
    return found


def test_two_versions_of_the_weights(pool: Pool) -> None:
    assert all(all(found) for found in pool.run(2, versions))


def whole_gradients(connect: Connect, text: str, world_size: int) -> tuple[int, int]:
    """Most large buckets that had whole gradients at once in a step, and how many there are."""
    parallel, plan = build(connect, text, world_size, WIDE, Run())
    large = {bucket.key for bucket in parallel.zero.buckets if bucket.length > 10_000}
    reduction, most = parallel.zero._reduction, 0
    assert isinstance(reduction, PerAction)
    start = reduction._start_bucket

    def noted(bucket: Bucket) -> None:
        nonlocal most
        start(bucket)
        most = max(most, sum(key in large for key in [*reduction._open, *(b.key for b, _, _ in reduction._under_way)]))

    reduction._start_bucket = noted  # type: ignore[method-assign]
    batch = global_batch(WIDE, 0)
    parallel.forward_backward(microbatches(batch, plan, parallel.world.at["dp"]), count(batch))
    return most, len(large)


@pytest.mark.parametrize("plan", ["", "schedule=zb-h1 pp=2"])
@pytest.mark.parametrize("level", [2, 3])
def test_whole_gradients_come_and_go(pool: Pool, level: int, plan: str) -> None:
    """Never more than the bucket that is filled, the one that is under way and one that may still get a gradient."""
    ranks = 4 if plan else 2
    for most, buckets in pool.run(ranks, whole_gradients, f"dp=2 zero={level} {plan} bucket_mb=0.15 micro=2", ranks):
        assert 1 <= most <= 3
        assert buckets >= (3 if plan else 7)
