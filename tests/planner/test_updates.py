"""What follows the microbatches: calls of gradients and weights, and what frameworks do beside them."""

from __future__ import annotations

import dataclasses
import math

import pytest

from plait.models.shapes import parameter_count
from plait.planner.clusters import cluster
from plait.planner.cost import predict
from plait.planner.job import PLAIT, Practice
from plait.planner.kernels import Machine
from plait.planner.wires import Group, collective
from tests.planner.jobs import LLAMA, MIXTRAL, job

PLAIN = dataclasses.replace(PLAIT, overlap_grads=False, overlap_weights=False)


def exposed(plan: str, framework: str, devices: int = 64, **practice: object) -> float:
    given = dataclasses.replace(PLAIN, framework=framework, **practice)  # type: ignore[arg-type]
    return predict(job(plan, devices=devices, batch=512, practice=given)).ranks[0].exposed["dp"]


def test_shards_that_are_lists_cost_a_copy_a_tensor_and_rank() -> None:
    """nanotron's ZeRO 1: twice a step, 6 tensors a layer on every rank that shares them."""
    more = exposed("zero=1", "nanotron") - exposed("zero=1", "plait")
    half = exposed("zero=1", "nanotron", devices=32) - exposed("zero=1", "plait", devices=32)
    launch = 26e-6
    assert more == pytest.approx(2 * LLAMA.num_layers * 6 * 64 * launch)
    assert half == pytest.approx(more / 2)
    assert exposed("zero=1 zero_group=8", "nanotron") - exposed("zero=1 zero_group=8", "plait") == pytest.approx(
        more / 8
    )


def test_gradients_in_buckets_pay_for_each_call() -> None:
    one, many = exposed("", "plait"), exposed("", "nanotron")
    calls = math.ceil(4 * parameter_count(LLAMA) / 50e6)
    latency = collective(Machine(cluster("h100", 64)), "all_reduce", 1.0, Group(size=64, stride=1))
    assert many - one == pytest.approx((calls - 1) * latency, rel=0.01)


def test_deepspeed_gathers_every_matrix_by_itself() -> None:
    layers, matrices = exposed("zero=3", "plait", devices=512), exposed("zero=3", "deepspeed-2021", devices=512)
    # Rings of 512 ranks: four calls a layer instead of one, and copies of every rank's shard.
    assert 2 * layers < matrices


def test_nothing_is_copied_without_shards() -> None:
    given = Practice(framework="deepspeed-2021", overlap_grads=False)
    plain = Practice(overlap_grads=False)
    alone, beside = (predict(job("", practice=one)).ranks[0].exposed["dp"] for one in (given, plain))
    assert alone == beside


def test_blocks_that_do_not_divide_the_copies_of_experts_share_less() -> None:
    """Experts with three copies in blocks of two: each copy has all of its state, and all three are summed."""
    given = {"model": MIXTRAL, "devices": 24, "batch": 24, "practice": PLAIN}
    found, plain = (
        predict(job(f"ep=8 tp=1 dp=24 {keys}", **given)).ranks[0]  # type: ignore[arg-type]
        for keys in ("zero=1 zero_group=2", "zero=0")
    )
    experts = 3 * MIXTRAL.hidden_size * MIXTRAL.ffn_size * MIXTRAL.num_layers
    summed = collective(Machine(cluster("h100", 24)), "all_reduce", 4.0 * experts, Group(size=3, stride=8))
    assert found.exposed["dp"] > summed
    # All of the experts' optimizer steps are made on every rank, and half of the dense ones.
    dense = parameter_count(MIXTRAL) - 8 * experts
    assert found.optimizer / plain.optimizer == pytest.approx((experts + dense / 2) / (experts + dense))


def data_seconds(plan: str, batch: int) -> float:
    """Exposed seconds of the data axes on 64 devices, of ``batch // 64`` microbatches."""
    return predict(job(plan, devices=64, batch=batch, practice=PLAIN)).ranks[0].exposed["dp"]


def called(op: str, size: float, group: Group, calls: int = 1) -> float:
    machine = Machine(cluster("h100", 64))
    return max(collective(machine, op, size, group), calls * collective(machine, op, size / calls, group))


def test_at_zero_2_every_microbatch_sends_its_gradients() -> None:
    """`plait.parallel.reduction.PerAction`; weights are gathered once a step."""
    scatter = called("reduce_scatter", 4.0 * parameter_count(LLAMA), Group(size=64, stride=1))
    for batch in (64, 512):
        assert data_seconds("zero=2", batch) - data_seconds("zero=1", batch) == pytest.approx(
            (batch // 64 - 1) * scatter
        )


def test_copies_of_shared_state_are_summed_once_a_step() -> None:
    """`plait.parallel.zero.Zero.finish`: not with every microbatch of ZeRO 3, whose messages stay in a node."""
    count = parameter_count(LLAMA)
    inner = Group(size=8, stride=1)
    each = called("reduce_scatter", 4.0 * count, inner, LLAMA.num_layers)
    each += 2 * called("all_gather", 2.0 * count, inner, LLAMA.num_layers)
    across = called("all_reduce", 4.0 * count / 8, Group(size=8, stride=8), LLAMA.num_layers)
    for batch in (64, 512):
        assert data_seconds("zero=3 zero_group=8", batch) == pytest.approx(batch // 64 * each + across)


def test_weights_that_stay_for_a_step_are_gathered_once() -> None:
    count, group = parameter_count(LLAMA), Group(size=64, stride=1)
    scatter = called("reduce_scatter", 4.0 * count, group, LLAMA.num_layers)
    gather = called("all_gather", 2.0 * count, group, LLAMA.num_layers)
    assert data_seconds("zero=3 gather=step", 512) == pytest.approx(8 * scatter + gather)
    assert data_seconds("zero=3", 512) == pytest.approx(8 * (scatter + 2 * gather))


def test_nothing_hides_what_a_step_waits_for() -> None:
    """`Zero.finish` waits for the sum over blocks, `Zero.publish` for new weights; other frameworks may hide both."""
    count = parameter_count(LLAMA)
    inner, outer = Group(size=8, stride=1), Group(size=8, stride=8)
    waits = called("all_reduce", 4.0 * count / 8, outer) + called("all_gather", 2.0 * count, inner)
    plan = "zero=1 zero_group=8 micro=8"
    own, other = (
        predict(job(plan, devices=64, batch=512, practice=dataclasses.replace(PLAIT, framework=framework))).ranks[0]
        for framework in (PLAIT.framework, "megatron")
    )
    assert own.exposed["dp"] == pytest.approx(waits)  # what is reduced under the last backward is hidden
    assert own.hidden["dp"] == pytest.approx(called("reduce_scatter", 4.0 * count, inner))
    assert other.exposed["dp"] < waits / 2
