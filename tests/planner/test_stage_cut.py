from __future__ import annotations

import dataclasses
import itertools
import random

import numpy as np

from plait.core.plan import Plan
from plait.models.config import ModelConfig
from plait.parallel.layout import stage_bounds, stage_layers
from plait.planner.clusters import cluster
from plait.planner.cost import predict
from plait.planner.memory import memory
from plait.planner.space import Request
from plait.planner.stage_cut import recompute_to_fit
from plait.planner.stage_fit import Costs, cut_by, recut_to_fit

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


def test_cuts_by_time_and_memory_are_those_of_brute_force() -> None:
    draw = random.Random(0)
    possible = 0
    for _ in range(60):
        count, stages = draw.randint(3, 8), draw.randint(1, 3)
        layers = [draw.choice((1.0, 1.0, 2.5)) for _ in range(count)]
        first, last = draw.uniform(0, 2), draw.uniform(0, 3)
        extra = np.array([[draw.choice((0.0, 0.3, 1.0, np.inf)) for _ in range(count + 1)] for _ in range(stages)])
        every = []
        for inner in itertools.combinations(range(1, count), stages - 1):
            bounds = [0, *inner, count]
            took = [
                sum(layers[start:stop])
                + extra[stage, stop - start]
                + (stage == 0) * first
                + (stage == stages - 1) * last
                for stage, (start, stop) in enumerate(itertools.pairwise(bounds))
            ]
            every.append((max(took), sum(took), tuple(np.diff(bounds).tolist())))
        longest = min(one[0] for one in every)
        least = min(one[1] for one in every if one[0] <= longest * (1 + 1e-12))
        found = cut_by(layers, first, last, extra)
        if longest == np.inf:
            assert found is None
            continue
        possible += 1
        assert found in [one[2] for one in every if one[0] <= longest * (1 + 1e-12) and one[1] <= least * (1 + 1e-12)]
    assert possible > 30


def test_layers_move_to_where_memory_is_instead_of_being_recomputed() -> None:
    plan = Plan(tp=2, pp=4, dp=1, zero=0, precision="bf16")
    model = dataclasses.replace(MODEL, num_layers=32)
    deep = dataclasses.replace(request(1.0), model=model, topology=cluster("a100-80g", 8), seq=12288)
    peak = memory(deep.job(plan)).fullest.peak
    asked = dataclasses.replace(deep, max_memory=0.8 * peak / deep.topology.device.memory)
    costs = Costs(layers=[1.0] * 32, first=0.1, last=0.5, spent={"selective": 0.1, "full": 0.35})
    found = recut_to_fit(asked, plan, costs, worth=lambda plan: True)
    assert found is not None
    assert memory(asked.job(found)).fullest.peak <= asked.memory
    fixed = recompute_to_fit(asked, plan, costs.spent, hopes=lambda extra: True, worth=lambda plan: True)
    assert fixed is not None

    def longest(one: Plan) -> float:
        cut = stage_layers(deep.model, one)
        took = [0.1, 0.0, 0.0, 0.5]
        for stage, (start, stop) in enumerate(stage_bounds(cut)):
            took[stage] += sum(
                1.0 + {"none": 0.0, **costs.spent}[one.recompute_of(layer)] for layer in range(start, stop)
            )
        return max(took)

    assert longest(found) < longest(fixed)
    assert recut_to_fit(dataclasses.replace(deep, max_memory=0.01), plan, costs, worth=lambda plan: True) is None
    assert recut_to_fit(asked, plan, costs, worth=lambda plan: False) is None
