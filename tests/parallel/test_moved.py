"""Experts that move between steps, with copies of hot ones, in whole models: equal to one process that knows nothing
of it, whatever level of ZeRO shares their state."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from plait.core.plan import Plan
from plait.models.config import ModelConfig
from plait.models.decoder import Decoder
from plait.models.init import InitSource
from plait.parallel.apply import parallelize
from plait.parallel.placement import Placement
from tests.parallel.cuts import (
    TOLERANCE,
    WEIGHTS_TOLERANCE,
    Run,
    _row,
    adamw,
    count,
    differences,
    expert_models,
    global_batch,
    microbatches,
    one_process,
)
from tests.pool import Connect, Pool

STEPS = 4
MODEL = expert_models()["mixtral"]
ORDERS = ((3, 6, 0, 5, 7, 1, 2, 4), (0, 4, 1, 5, 2, 6, 3, 7))


def run_moving(connect: Connect, text: str, ranks: int, config: ModelConfig) -> dict[str, Any]:
    """As `cuts.cut_run`, with experts placed anew before the first step and after every other."""
    plan = Plan.parse(text).resolve(ranks)
    world = connect(plan.mesh(ranks))
    with torch.device("meta"):
        model = Decoder(config, seed=7)
    parallel = parallelize(model, plan, world, weights=InitSource(config, 3), movable_experts=True)
    optimizer = adamw(*parallel.zero.optimizer_groups())
    losses, norms, grads = [], [], []
    loads: dict[int, list[float]] = {}
    for step in range(STEPS):
        if step != 1:
            for layer in parallel.mixtures:
                order, shadows = ORDERS[(step + layer) % 2], ((), (5,), (2, 0, 7))[(step + layer) % 3]
                wanted = Placement(order=order, ranks=plan.ep, shadows=shadows)
                parallel.place_experts(layer, wanted, optimizer if step else None)
            parallel.zero.publish()
        batch = global_batch(config, step, Run(steps=STEPS))
        losses.append(float(parallel.forward_backward(microbatches(batch, plan, world.at["dp"]), count(batch))))
        norms.append(float(parallel.share_loss(torch.zeros(()), parallel.zero.square_norm())[1].sqrt()))
        if step == 0:
            grads = [_row(one, start, part) for one, start, part in parallel.zero.gradients()]
        parallel.zero.scale_gradients(min(1.0, 1.0 / (norms[-1] + 1e-6)))
        optimizer.step()
        parallel.zero.publish()
        loads = parallel.loads(parallel.close_routers())
    with parallel.zero.whole():
        weights = [_row(one, 0, view.reshape(-1)) for one, view, _ in parallel.zero.parameters()]
    return {"losses": losses, "norms": norms, "grads": grads, "weights": weights, "loads": loads}


CUTS = ("ep=2", "tp=2 ep=2 expert_tp=2", "pp=2 ep=2", "ep=2 recompute=full")


@pytest.mark.parametrize(
    ("cut", "zero"),
    [(cut, zero) for cut in CUTS for zero in range(4)],
)
def test_moved_and_shadowed_experts_train_as_in_one_process(pool: Pool, cut: str, zero: int) -> None:
    text = f"{cut} zero={zero} micro=1"
    run = Run(steps=STEPS)
    results = pool.run(4, run_moving, text, 4, MODEL)
    errors = differences(MODEL, results, one_process(MODEL, run))
    assert max(errors.loss, errors.norm, errors.grad[0]) < TOLERANCE, f"{text}: {errors}"
    assert errors.weight[0] < WEIGHTS_TOLERANCE, f"{text}: {errors}"
