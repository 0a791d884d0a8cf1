"""The closed form of peak memory beside dry runs of the same rank, on plans that combine axes, schedules and models.

Compared is what a rank holds beyond its training state: activations, batches and what comes and goes.
"""

from __future__ import annotations

import dataclasses

import pytest

from plait.core.plan import Plan
from plait.models.config import PRESETS, ModelConfig, MoEConfig
from plait.planner.clusters import cluster
from plait.planner.job import Job
from plait.planner.memory import memory
from plait.train.dry_run import dry_run

_LLAMA = ModelConfig(
    vocab_size=4000, hidden_size=512, num_layers=4, num_heads=8, num_kv_heads=4, ffn_size=1536, max_positions=2048
)
_GPT2 = dataclasses.replace(
    PRESETS["gpt2"],
    vocab_size=4000,
    hidden_size=512,
    num_layers=4,
    num_heads=8,
    num_kv_heads=8,
    head_dim=64,
    ffn_size=2048,
    dropout=0.0,
)
MODELS = {
    "llama": _LLAMA,
    "gpt2": _GPT2,
    "experts": dataclasses.replace(_LLAMA, moe=MoEConfig(num_experts=8, top_k=2, ffn_size=768)),
}


@pytest.mark.parametrize(
    ("name", "text", "pp"),
    [
        ("llama", "tp=2 pp=2 recompute=selective", 0),
        ("llama", "pp=2 virtual=2 schedule=zb-v", 1),
        ("llama", "pp=4 recompute=full schedule=gpipe", 1),
        ("gpt2", "pp=2 recompute=full sequence_parallel=false tp=2", 1),
        ("experts", "ep=2 dp=2 pp=2", 0),
        ("experts", "tp=2 ep=2 sequence_parallel=false", 0),
    ],
)
def test_what_a_rank_holds_beyond_its_state(name: str, text: str, pp: int) -> None:
    plan = Plan.parse(text)
    if "precision" not in text:
        plan = dataclasses.replace(plan, precision="bf16")
    world = plan.tp * plan.pp * plan.cp * (plan.dp or 1)
    plan = plan.resolve(world)
    batch = 4 * (plan.dp or 1)
    mesh = plan.mesh(world)
    rank = next(rank for rank in range(world) if mesh.coordinate(rank)["pp"] == pp)
    dry = dry_run(MODELS[name], plan, world_size=world, seq=512, global_batch=batch, rank=rank)
    here = cluster("h100", world)
    here = dataclasses.replace(here, device=dataclasses.replace(here.device, kind="cpu"))
    job = Job(model=MODELS[name], plan=plan, topology=here, seq=512, global_batch=batch)
    found = memory(job).ranks[pp]
    state = found.weights + found.gradients + found.optimizer
    assert state == pytest.approx(dry.weights + dry.gradients + dry.optimizer, rel=1e-3)
    assert found.peak - found.reserve - state == pytest.approx(dry.peak - state, rel=0.02)
