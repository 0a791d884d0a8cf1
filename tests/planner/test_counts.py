"""Closed forms and dry runs of the same rank are the same numbers: FLOPs, calls and bytes of each axis and operation,
parameters, bytes of the state. A dry run is plait's own executor, so these tests keep the formulas from rotting."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from plait.core.errors import PlanError
from plait.core.legal import check
from plait.core.plan import Plan
from plait.core.topology import Device, Tier, Topology
from plait.models.config import PRESETS, ModelConfig, MoEConfig
from plait.parallel.layout import model_shape
from plait.planner import layers
from plait.planner.counts import Counts, counts
from plait.planner.job import Job
from plait.planner.stages import slice_of
from plait.train.dry_run import DryRun, dry_run
from tests.parallel.cuts import GPT2, LATENT, LLAMA
from tests.planner.jobs import job

SEQ = 16
CPU = Topology(
    name="here",
    device=Device(name="core", memory=2**30, peaks={"fp32": 1e11}, bandwidth=1e10, kind="cpu"),
    devices=64,
    tiers=(Tier(name="host", size=64, bandwidth=1e9, latency=1e-5),),
)
MOE = MoEConfig(num_experts=4, top_k=2, ffn_size=24, aux_loss=0.02)


def _models() -> dict[str, ModelConfig]:
    llama = dataclasses.replace(LLAMA, num_layers=2)
    gpt2 = dataclasses.replace(GPT2, num_layers=2)
    experts = dataclasses.replace(llama, moe=MOE)
    dropping = dataclasses.replace(MOE, capacity_factor=1.0, drop="score", aux_loss=0.0)
    shared = dataclasses.replace(
        MOE, shared_ffn=16, dense_layers=(0,), score="sigmoid", groups=2, top_groups=1, bias=True, z_loss=0.01
    )
    latent = dataclasses.replace(llama, mla=LATENT, head_dim=12, num_kv_heads=4)
    return {
        "llama": llama,
        "tied": dataclasses.replace(llama, tied=True),
        "gpt2": dataclasses.replace(gpt2, tied=False),
        "gpt2-tied": gpt2,
        "qwen3": dataclasses.replace(llama, qk_norm=True, num_kv_heads=1, qkv_bias=True),
        "window": dataclasses.replace(llama, sliding_window=9, window_from=1),
        "latent": latent,
        "latent-plain": dataclasses.replace(latent, mla=dataclasses.replace(LATENT, q_rank=None)),
        "experts": experts,
        "dropping": dataclasses.replace(experts, moe=dropping),
        "deepseek": dataclasses.replace(latent, moe=shared),
    }


MODELS = _models()


def pair(model: ModelConfig, plan: Plan, world: int, batch: int, rank: int, seq: int = SEQ) -> tuple[DryRun, Counts]:
    dry = dry_run(model, plan, world_size=world, seq=seq, global_batch=batch, rank=rank)
    return dry, counts(Job(model=model, plan=plan.resolve(world), topology=CPU, seq=seq, global_batch=batch), rank)


def differences(dry: DryRun, closed: Counts) -> list[str]:
    """What of the two is not the same, by name."""
    found = []
    for name in ("flops", "parameters", "weights", "gradients", "optimizer"):
        ran, said = getattr(dry, name), getattr(closed, name)
        if ran != said:
            found.append(f"{name}: dry run {ran}, closed form {said}")
    ran_bytes: dict[tuple[str, str], int] = {}
    ran_calls: dict[tuple[str, str], int] = {}
    for row in dry.traffic:
        key = row.axis, row.operation
        ran_bytes[key] = ran_bytes.get(key, 0) + row.bytes
        ran_calls[key] = ran_calls.get(key, 0) + row.calls
    for key in sorted({*ran_calls, *closed.calls}):
        for what, ran_of, said_of in (("calls", ran_calls, closed.calls), ("bytes", ran_bytes, closed.bytes)):
            if ran_of.get(key, 0) != said_of.get(key, 0):
                axis, operation = key
                numbers = f"dry run {ran_of.get(key, 0)}, closed form {said_of.get(key, 0)}"
                found.append(f"axis {axis}, {operation}, {what}: {numbers}")
    return found


GRID = """
llama          | tp=1                                                       | 1  | 2 | 0
llama          | dp=2                                                       | 2  | 4 | 1
llama          | tp=2                                                       | 2  | 2 | 1
llama          | tp=4 precision=bf16                                        | 4  | 2 | 3
llama          | tp=2 sequence_parallel=false                               | 2  | 2 | 1
llama          | pp=2                                                       | 2  | 3 | 0
tied           | pp=2                                                       | 2  | 2 | 1
tied           | tp=2 sequence_parallel=false precision=bf16                | 2  | 2 | 0
gpt2           | tp=2                                                       | 2  | 2 | 0
gpt2-tied      | tp=2 pp=2 zero=1                                           | 8  | 4 | 5
qwen3          | tp=4 sequence_parallel=false                               | 4  | 2 | 2
qwen3          | tp=2 dp=2 zero=1                                           | 4  | 4 | 3
window         | tp=2                                                       | 2  | 2 | 1
latent         | tp=2                                                       | 2  | 2 | 1
latent         | tp=4 sequence_parallel=false precision=bf16                | 4  | 1 | 3
latent-plain   | tp=2 pp=2                                                  | 4  | 2 | 3
llama          | pp=2 virtual=2 schedule=interleaved stages=0,1,1,0         | 2  | 2 | 1
llama          | pp=2 stages=0,2                                            | 2  | 2 | 0
llama          | pp=2 schedule=gpipe tp=2                                   | 4  | 2 | 2
llama          | pp=2 schedule=zb-h1                                        | 2  | 2 | 0
llama          | pp=2 schedule=zb-h2 zero=2                                 | 4  | 4 | 1
tied           | pp=2 virtual=2 schedule=zb-v stages=0,1,1,0                | 2  | 2 | 0
tied           | pp=2 virtual=2 schedule=zb-v stages=0,1,1,0 zero=2         | 4  | 4 | 3
gpt2-tied      | pp=2 virtual=2 schedule=dualpipe-v stages=0,1,1,0          | 2  | 4 | 1
llama          | pp=2 schedule=2bw zero=1                                   | 4  | 4 | 2
llama          | pp=2 schedule=auto                                         | 2  | 2 | 1
llama          | cp=2                                                       | 2  | 2 | 1
llama          | cp=4 tp=2 precision=bf16                                   | 8  | 1 | 5
window         | cp=4                                                       | 4  | 1 | 2
llama          | cp=2 context=gather                                        | 2  | 2 | 0
window         | cp=2 context=gather tp=2                                   | 4  | 2 | 3
llama          | cp=2 context=ulysses                                       | 2  | 2 | 1
qwen3          | cp=4 context=ulysses precision=bf16                        | 4  | 1 | 1
latent         | cp=2                                                       | 2  | 1 | 1
latent         | cp=2 context=gather tp=2                                   | 4  | 1 | 2
latent         | cp=2 context=ulysses tp=2                                  | 4  | 1 | 3
llama          | zero=1 precision=bf16                                      | 2  | 2 | 1
llama          | zero=2                                                     | 2  | 4 | 0
llama          | zero=3                                                     | 2  | 4 | 1
llama          | zero=3 gather=step precision=bf16                          | 2  | 4 | 1
tied           | zero=3 pp=2                                                | 4  | 4 | 2
tied           | zero=2 pp=2 tp=2 bucket_mb=0.01                            | 8  | 4 | 6
tied           | zero=3 tp=2                                                | 4  | 4 | 3
gpt2           | zero=3 pp=2 schedule=zb-h1                                 | 4  | 4 | 3
llama          | zero=1 zero_group=2 bucket_mb=0.005                        | 4  | 4 | 3
llama          | zero=2 zero_group=1                                        | 2  | 2 | 1
llama          | zero=3 zero_group=2 cp=2                                   | 4  | 2 | 2
llama          | node=2                                                     | 4  | 4 | 3
llama          | node=2 zero=1                                              | 4  | 4 | 2
llama          | node=2 zero=3                                              | 4  | 4 | 1
llama          | compress=half                                              | 2  | 2 | 1
llama          | compress=topk:0.1                                          | 2  | 2 | 0
llama          | compress=powersgd:2 tp=2                                   | 4  | 2 | 3
llama          | recompute=full tp=2                                        | 2  | 2 | 1
llama          | recompute="full:0 selective:1" tp=2 sequence_parallel=false | 2 | 2 | 1
llama          | recompute=selective cp=2                                   | 2  | 2 | 1
llama          | recompute=selective cp=2 context=gather                    | 2  | 2 | 1
llama          | recompute=selective cp=2 context=ulysses                   | 2  | 2 | 0
latent         | recompute=selective tp=2                                   | 2  | 1 | 1
gpt2           | recompute=full zero=3 pp=2                                 | 4  | 4 | 0
llama          | precision=fp16 tp=2 zero=1                                 | 4  | 2 | 3
experts        | ep=2                                                       | 2  | 2 | 1
experts        | tp=2                                                       | 2  | 1 | 0
experts        | tp=2 sequence_parallel=false ep=2 expert_tp=2              | 4  | 2 | 1
experts        | tp=2 sequence_parallel=false recompute=full                | 2  | 1 | 1
experts        | ep=4 zero=1 precision=bf16                                 | 8  | 8 | 6
experts        | ep=2 tp=2 zero=2 recompute=full                            | 4  | 2 | 3
experts        | ep=2 cp=2 zero=3 pp=2 context=gather                       | 8  | 2 | 3
experts        | ep=2 zero=1 zero_group=2                            | 4  | 4 | 3
experts        | pp=2 dp=2 tp=2 ep=4 zero=1 order=dp-pp-cp-tp               | 8  | 8 | 3
tied           | pp=2 dp=2 cp=2 zero=3 order=dp-pp-cp-tp                    | 8  | 8 | 6
dropping       | ep=2 cp=2 tp=2 recompute=full                              | 4  | 1 | 3
deepseek       | tp=2 ep=2                                                  | 2  | 1 | 0
deepseek       | ep=4 zero=2 pp=2 schedule=zb-h1                  | 8  | 4 | 5
deepseek       | tp=2 sequence_parallel=false ep=2 recompute=selective      | 2  | 1 | 1
"""
ROWS = [tuple(word.strip() for word in line.split("|")) for line in GRID.strip().splitlines()]


@pytest.mark.parametrize(("name", "text", "world", "batch", "rank"), ROWS)
def test_closed_form_is_the_dry_run(name: str, text: str, world: str, batch: str, rank: str) -> None:
    found = differences(*pair(MODELS[name], Plan.parse(text), int(world), int(batch), int(rank)))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *itertools.product(["llama3-8b", "mixtral-8x7b"], ["", "tp=8", "tp=4 cp=2 context=gather"]),
        ("qwen3-8b", "tp=2 sequence_parallel=false"),
    ],
)
def test_the_time_model_has_the_same_products_and_messages(name: str, text: str) -> None:
    """Of the operators that `plait.planner.cost` times: all products, and what tp gathers and scatters."""
    model = dataclasses.replace(PRESETS[name], num_layers=3)
    timed = job(text, model=model, devices=8, seq=4096, batch=8)
    timed = dataclasses.replace(timed, global_batch=timed.dp)
    closed, cut = counts(timed, 0), slice_of(timed)
    parts = [layers.layer(cut, model.moe is not None, None) for _ in range(3)]
    parts += [layers.embedding(cut), layers.head(cut)]
    phases = [phase for part in parts for phase in (part.forward, part.backward, part.weight)]
    products = sum(op.flops for phase in phases for op in phase.ops if op.kind in ("product", "grouped"))
    tokens, heads = timed.seq // timed.plan.cp, model.num_heads // timed.plan.tp
    pairs = tokens * tokens * (1 + (timed.plan.cp - 1) / 2)
    attention = 3 * heads * 2 * pairs * 7 * model.head_dim
    assert products == pytest.approx(closed.flops - attention, rel=1e-9)
    if timed.plan.sp:
        for operation in ("all_gather", "reduce_scatter"):
            size = sum(m.size for phase in phases for m in phase.messages if (m.axis, m.op) == ("tp", operation))
            assert size * (timed.plan.tp - 1) / timed.plan.tp == closed.bytes["tp", operation]


AXES = {
    "tp": st.sampled_from([1, 2, 4]),
    "pp": st.sampled_from([1, 2]),
    "cp": st.sampled_from([1, 1, 2]),
    "context": st.sampled_from(["ring", "gather", "ulysses"]),
    "micro": st.sampled_from([1, 2]),
    "zero": st.sampled_from([0, 1, 2, 3]),
    "zero_group": st.sampled_from([None, 2]),
    "node": st.sampled_from([None, None, 2]),
    "gather": st.sampled_from(["use", "step"]),
    "recompute": st.sampled_from(["none", "full", "selective", "full:0 selective:1"]),
    "precision": st.sampled_from(["fp32", "bf16"]),
    "schedule": st.sampled_from(["1f1b", "gpipe", "zb-h1"]),
    "sequence_parallel": st.sampled_from([None, False]),
    "bucket_mb": st.sampled_from([25.0, 0.01, 0.002]),
    "ep": st.sampled_from([1, 2, 4]),
    "expert_tp": st.sampled_from([None, 1, 2]),
}


@settings(max_examples=5, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.filter_too_much])
@given(
    plan=st.builds(Plan, **AXES),
    name=st.sampled_from(sorted(MODELS)),
    dp=st.sampled_from([1, 2, 4]),
    samples=st.sampled_from([1, 2]),
    seq=st.sampled_from([16, 18]),
    draw=st.integers(0, 2**16),
)
def test_random_plans(plan: Plan, name: str, dp: int, samples: int, seq: int, draw: int) -> None:
    model = MODELS[name]
    if model.moe is None:
        plan = dataclasses.replace(plan, ep=1, expert_tp=None)
    if plan.zero == 0:
        plan = dataclasses.replace(plan, zero_group=None)
    if plan.zero < 3:
        plan = dataclasses.replace(plan, gather="use")
    world, batch = plan.tp * plan.pp * plan.cp * dp, dp * plan.micro * samples
    try:
        check(plan, model_shape(model), world_size=world, global_batch=batch, seq=seq)
    except PlanError:
        assume(False)
    found = differences(*pair(model, plan, world, batch, draw % world, seq))
    assert not found, f"{name}, {plan} on {world} ranks:\n" + "\n".join(found)
