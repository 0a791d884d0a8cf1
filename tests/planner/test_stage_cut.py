from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

import pytest

from plait.core.plan import Plan
from plait.models.config import ModelConfig
from plait.planner.clusters import cluster
from plait.planner.cost import predict
from plait.planner.memory import memory
from plait.planner.space import Request
from plait.planner.stage_cut import cut_within, recompute_to_fit


def cuts(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    for bounds in itertools.combinations(range(1, layers), stages - 1):
        yield tuple(stop - start for start, stop in itertools.pairwise((0, *bounds, layers)))


def costs_of(
    cut: Sequence[int], seconds: Sequence[float], ends: tuple[float, float], live: Sequence[int] | None = None
) -> list[float]:
    found, start = [], 0
    for stage, count in enumerate(cut):
        times = 1 if live is None else live[stage]
        found.append(times * sum(seconds[start : start + count]))
        start += count
    found[0] += ends[0]
    found[-1] += ends[1]
    return found


@pytest.mark.parametrize("seed", range(60))
def test_no_cut_that_fits_has_a_faster_slowest_stage(seed: int) -> None:
    draw = random.Random(seed)
    layers = draw.randint(1, 9)
    stages = draw.randint(1, layers)
    whole = draw.random() < 0.5
    size = (lambda: float(draw.randint(1, 4))) if whole else draw.random
    seconds, state, kept = ([size() for _ in range(layers)] for _ in range(3))
    ends, end_state = (size(), size()), (size(), size())
    live = [stages - stage for stage in range(stages)]
    limit = draw.uniform(1.0, 3.0) * (sum(state) + sum(kept) * stages) / stages
    wanted = None
    for cut in cuts(layers, stages):
        held = [a + b for a, b in zip(costs_of(cut, state, end_state), costs_of(cut, kept, (0, 0), live), strict=True)]
        if max(held) <= limit + 1e-12:
            slowest = max(costs_of(cut, seconds, ends))
            wanted = slowest if wanted is None else min(wanted, slowest)
    found = cut_within(seconds, stages, state=state, kept=kept, live=live, limit=limit, ends=ends, end_state=end_state)
    if wanted is None:
        assert found is None
    else:
        assert found is not None and sum(found) == layers and len(found) == stages
        assert max(costs_of(found, seconds, ends)) == pytest.approx(wanted, rel=1e-12)


def test_stages_that_hold_most_get_fewest_layers() -> None:
    found = cut_within([1.0] * 8, 2, state=[0.0] * 8, kept=[1.0] * 8, live=[2, 1], limit=7.0)
    assert found == (3, 5)
    assert cut_within([1.0] * 8, 2, state=[0.0] * 8, kept=[1.0] * 8, live=[2, 1], limit=4.0) is None
    assert cut_within([1.0] * 2, 3, state=[0.0] * 2, kept=[0.0] * 2, live=[1] * 3, limit=1.0) is None


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
