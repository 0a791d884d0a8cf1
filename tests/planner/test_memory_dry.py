"""The closed form of peak memory beside dry runs of the same rank: plans that combine axes, schedules and models.

Compared is what a rank holds beyond its training state: activations, batches, what comes and goes, and what lies beside
gradients while they are summed. `benchmarks/memory_dry.py` does the same with random plans.
"""

from __future__ import annotations

import dataclasses

import pytest

from plait.core.plan import Plan
from plait.models.config import PRESETS, MLAConfig, ModelConfig, MoEConfig
from plait.planner.clusters import cluster
from plait.planner.job import Job
from plait.planner.memory import memory
from plait.train.dry_run import dry_run

_LLAMA = ModelConfig(
    vocab_size=8000, hidden_size=1024, num_layers=2, num_heads=8, num_kv_heads=4, ffn_size=2816, max_positions=2048
)
_GPT2 = dataclasses.replace(
    PRESETS["gpt2"],
    vocab_size=8000,
    hidden_size=1024,
    num_layers=2,
    num_heads=8,
    num_kv_heads=8,
    head_dim=128,
    ffn_size=4096,
    max_positions=1024,
    dropout=0.1,
)
_LATENT = dataclasses.replace(
    _LLAMA,
    num_kv_heads=8,
    head_dim=96,
    mla=MLAConfig(q_rank=384, kv_rank=128, nope_dim=64, rope_dim=32, v_dim=64),
)
_MOE = MoEConfig(num_experts=8, top_k=2, ffn_size=1024, aux_loss=0.01)
MODELS = {
    "llama": _LLAMA,
    "gpt2": _GPT2,
    "tied": dataclasses.replace(_LLAMA, tied=True, sliding_window=300, window_from=1),
    "latent": _LATENT,
    "experts": dataclasses.replace(_LLAMA, moe=_MOE),
    "deepseek": dataclasses.replace(
        _LATENT, moe=dataclasses.replace(_MOE, shared_ffn=1024, dense_layers=(0,), score="sigmoid", bias=True)
    ),
}
PLANS = """
llama    | tp=2 pp=2 recompute=selective                                  | 0
llama    | pp=2 schedule=zb-h1 precision=fp32                             | 1
llama    | pp=3 recompute=full schedule=gpipe stages=1,1,0                | 1
llama    | dp=2 compress=half bucket_mb=4                                 | 0
llama    | dp=4 zero=1 node=2                                             | 0
llama    | dp=2 cp=2 zero=3 bucket_mb=8                                   | 0
llama    | tp=2 cp=2 context=gather precision=fp8                         | 0
llama    | pp=2 virtual=2 schedule=zb-v stages=0,1,1,0                    | 1
llama    | pp=2 virtual=2 schedule=interleaved stages=0,1,1,0 zero=2 dp=2 | 1
tied     | pp=2 dp=2 zero=2                                               | 1
tied     | pp=2 virtual=2 schedule=zb-v stages=0,1,1,0 zero=2 dp=2        | 0
tied     | dp=2 zero=3 gather=step node=2 recompute=full                  | 0
tied     | pp=2 cp=2 context=ulysses schedule=zb-h2 zero=3                | 0
gpt2     | tp=2 dp=2 zero=2 sequence_parallel=false recompute="full:0 selective:1" | 0
gpt2     | dp=2 compress=topk:0.1 precision=fp32                          | 0
latent   | tp=2 recompute=selective sequence_parallel=false               | 0
latent   | pp=2 cp=2 zero=1                                               | 1
experts  | ep=2 dp=2 pp=2 zero=2                                          | 0
experts  | tp=2 ep=2 sequence_parallel=false recompute=full               | 0
deepseek | dp=2 ep=2 zero=3                                               | 0
"""
ROWS = [tuple(word.strip() for word in line.split("|")) for line in PLANS.strip().splitlines()]


@pytest.mark.parametrize(("name", "text", "pp"), ROWS)
def test_what_a_rank_holds_beyond_its_state(name: str, text: str, pp: str) -> None:
    plan = Plan.parse(text)
    if "precision" not in text:
        plan = dataclasses.replace(plan, precision="bf16")
    world = plan.tp * plan.pp * plan.cp * (plan.dp or 1)
    plan = plan.resolve(world)
    batch, seq = max(2, plan.pp) * (plan.dp or 1), 1024
    mesh = plan.mesh(world)
    rank = next(rank for rank in range(world) if mesh.coordinate(rank)["pp"] == int(pp))
    dry = dry_run(MODELS[name], plan, world_size=world, seq=seq, global_batch=batch, rank=rank)
    here = cluster("h100", world)
    here = dataclasses.replace(here, device=dataclasses.replace(here.device, kind="cpu"))
    found = memory(Job(model=MODELS[name], plan=plan, topology=here, seq=seq, global_batch=batch)).ranks[int(pp)]
    state = found.weights + found.gradients + found.optimizer
    assert state == pytest.approx(dry.weights + dry.gradients + dry.optimizer, rel=1e-3)
    assert found.peak - found.reserve - state == pytest.approx(dry.peak - state, rel=0.02)
