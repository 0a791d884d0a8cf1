from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from plait.models.config import ModelConfig
from plait.parallel.calibrate import Calibration, measure
from plait.parallel.layout import placement
from plait.schedule.lower import lower
from plait.schedule.search import search
from tests.parallel.cuts import Run, build, count, global_batch, microbatches, models
from tests.pool import Connect, Pool

MODEL = dataclasses.replace(models()["llama"], hidden_size=64, ffn_size=512, num_layers=4, head_dim=16)
RUN = Run(seq=64)


def run_measured(connect: Connect, text: str, world_size: int, config: ModelConfig) -> dict[str, Any]:
    """Calibrate, search, run one step of what was found; and the same step of the plan's own schedule."""
    parallel, plan = build(connect, text, world_size, config, RUN)
    batch = global_batch(config, 0, RUN)
    batches = microbatches(batch, plan, parallel.world.at["dp"])
    homes = placement(plan)

    def step() -> tuple[float, list[torch.Tensor]]:
        loss = float(parallel.forward_backward(batches, count(batch)))
        return loss, [part.clone() for _, _, part in parallel.zero.gradients()]

    usual = step()
    weights = [view.clone() for _, view, _ in parallel.zero.parameters()]
    found = measure(parallel.stages, parallel.executor, parallel.zero, parallel.world, homes, batches)
    kept = all(torch.equal(a, b) for a, (_, b, _) in zip(weights, parallel.zero.parameters(), strict=True))
    schedule = search(found.costs, plan.pp, len(batches), homes, 2 * len(homes), transfer=found.transfers)
    lowered = lower(schedule)
    loss = parallel.executor.run(lowered, batches.__getitem__, count=count(batch), sink=parallel.world.book.sink)
    parallel.zero.finish()
    gradients = [part for _, _, part in parallel.zero.gradients()]
    same = [torch.allclose(a, b, rtol=1e-4, atol=1e-7) for a, b in zip(usual[1], gradients, strict=True)]
    total = float(parallel.share_loss(loss)[0]) / count(batch)
    return {"found": found, "kept": kept, "text": schedule.text(), "same": all(same), "losses": (usual[0], total)}


@pytest.mark.parametrize(
    ("text", "world_size"),
    [("pp=2 stages=1,3", 2), ("pp=2 virtual=2 schedule=zb-v stages=1,1,1,1", 2), ("pp=2 dp=2 stages=1,3 zero=1", 4)],
)
def test_every_rank_measures_the_same_and_the_list_that_is_found_runs(pool: Pool, text: str, world_size: int) -> None:
    results = pool.run(world_size, run_measured, f"{text} micro=2", world_size, MODEL)
    found: Calibration = results[0]["found"]
    for result in results:
        assert result["found"] == found
        assert result["text"] == results[0]["text"]
        assert result["kept"] and result["same"]
        assert result["losses"][0] == pytest.approx(result["losses"][1], rel=1e-5)
    assert all(cost.forward > 0 and cost.backward > 0 and cost.weight > 0 for cost in found.costs)
    if "stages=1,3" in text:
        one, three = (cost.forward + cost.backward + cost.weight for cost in found.costs)
        assert three > one  # layers, and a small head against an embedding
        assert found.transfers[0] > 0
    else:
        assert found.transfers[1] == 0
        assert found.transfers[0] == found.transfers[2] > 0
