from __future__ import annotations

from plait.core.plan import Plan
from plait.models.config import ModelConfig
from plait.planner.clusters import cluster
from plait.planner.cost import predict
from plait.planner.memory import memory
from plait.planner.space import Request
from plait.planner.stage_cut import recompute_to_fit

MODEL = ModelConfig(
    vocab_size=32000,
    hidden_size=4096,
    num_layers=16,
    num_heads=32,
    num_kv_heads=8,
    ffn_size=14336,
    max_positions=8192,
)
SECONDS = {"selective": 0.1, "full": 1.0}


def request(max_memory: float) -> Request:
    return Request(
        model=MODEL, topology=cluster("a100-40g", 8), world_size=8, seq=4096, global_batch=16, max_memory=max_memory
    )


def test_layers_are_recomputed_no_further_than_memory_asks_for() -> None:
    plan = Plan(tp=2, pp=4, dp=1, zero=0, precision="bf16")
    job = request(1.0).job(plan)
    peak = memory(job).fullest.peak
    share = 0.93 * peak / job.topology.device.memory
    asked = request(share)
    found = recompute_to_fit(asked, plan, SECONDS, hopes=lambda extra: True, worth=lambda plan: True)
    assert found is not None and found.recompute not in ("none", "selective", "full")
    assert memory(asked.job(found)).fullest.peak <= asked.memory < peak
    uniform = predict(asked.job(Plan.parse(f"{plan} recompute=full"))).step_time
    assert predict(job).step_time < predict(asked.job(found)).step_time < uniform
    # The last rank holds one microbatch: it has room, and its layers are left alone.
    assert found.recompute_of(15) == "none"
    assert found.recompute_of(0) != "none"


def test_nothing_is_recomputed_where_it_does_not_help_or_is_not_wanted() -> None:
    plan = Plan(tp=2, pp=4, dp=1, zero=0, precision="bf16")
    assert recompute_to_fit(request(0.01), plan, SECONDS, hopes=lambda e: True, worth=lambda p: True) is None
    peak = memory(request(1.0).job(plan)).fullest.peak
    asked = request(0.93 * peak / request(1.0).topology.device.memory)
    assert recompute_to_fit(asked, plan, SECONDS, hopes=lambda e: False, worth=lambda p: True) is None
    assert recompute_to_fit(asked, plan, SECONDS, hopes=lambda e: True, worth=lambda p: False) is None
