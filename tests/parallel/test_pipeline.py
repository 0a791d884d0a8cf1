"""The executor under every kind of schedule: split backwards, stages along a V, fewer microbatches than stages."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from plait.core.errors import ScheduleError
from plait.models.decoder import Decoder
from plait.models.init import InitSource, initialise
from plait.parallel.linear import Fused
from plait.schedule.ir import Kind
from plait.schedule.windows import check_windows, two_bw
from tests.parallel.cuts import Run, adamw, build, check_equal, count, global_batch, microbatches, models
from tests.pool import Connect, Pool

MODELS = models()


@pytest.mark.parametrize("model", ["llama-tied", "gpt2"])
@pytest.mark.parametrize("text", ["zb-h1", "zb-h2", "zb-v virtual=2", "dualpipe-v virtual=2", "auto", "auto virtual=2"])
def test_split_backwards_equal_one_process(pool: Pool, text: str, model: str) -> None:
    check_equal(pool, f"pp=2 schedule={text} micro=2", 2, MODELS[model], Run(steps=3))


@pytest.mark.parametrize("micro", [1, 4, 8])
@pytest.mark.parametrize("text", ["zb-h1", "zb-h2", "auto"])
def test_more_and_fewer_microbatches_than_stages(pool: Pool, text: str, micro: int) -> None:
    check_equal(pool, f"pp=4 schedule={text} micro={micro}", 4, MODELS["llama"], Run(steps=2))


def run_halves(connect: Connect) -> dict[str, set[str]]:
    """One rank, one step of ZB-V: for each kind of action, the parameters whose gradient it changed."""
    parallel, plan = build(connect, "schedule=zb-v virtual=2 micro=4", 1, MODELS["gpt2"], Run())
    changed: dict[str, set[str]] = {"F": set(), "B": set(), "W": set()}
    slots = {
        f"{name}.{attribute}": slot.grad
        for stage in parallel.stages
        for name, module in stage.module.named_modules()
        if isinstance(module, Fused)
        for attribute, slot in module.slots.items()
    }
    before = {name: grad.clone() for name, grad in slots.items()}

    def end(stage: int, kind: Kind) -> None:
        for name, grad in slots.items():
            if not torch.equal(before[name], grad):
                changed[kind.value].add(name)
                before[name] = grad.clone()

    parallel.zero.end = end  # type: ignore[method-assign]
    batch = global_batch(MODELS["gpt2"], 0)
    parallel.forward_backward(microbatches(batch, plan, 0), count(batch))
    return changed


def test_b_of_a_split_backward_leaves_the_matrices_to_w(pool: Pool) -> None:
    (changed,) = pool.run(1, run_halves)
    matrices = {name for name in changed["B"] | changed["W"] if "attn" in name or "mlp" in name or "head" in name}
    matrices = {name for name in matrices if name.endswith("weight")}
    assert len(matrices) == 4 * 4 + 1
    assert changed["F"] == set()
    assert changed["W"] == matrices
    assert not changed["B"] & matrices


def run_windows(
    connect: Connect, text: str, world_size: int, steps: int, transport: str = "auto"
) -> dict[str, list[float]]:
    """Windows on real ranks, with an evaluation between any two of them."""
    config = MODELS["gpt2"]
    parallel, plan = build(connect, text, world_size, config, Run(transport=transport))
    world = parallel.world
    optimizer = adamw(*parallel.zero.optimizer_groups())
    whole = [global_batch(config, step) for step in range(steps)]
    groups = [microbatches(batch, plan, world.at["dp"]) for batch in whole]
    m = len(groups[0])
    windows = two_bw(plan.pp, m)
    check_windows(windows)
    losses, evaluated = [], []
    for step in range(steps):
        loss = parallel.executor.run_window(
            windows,
            step,
            steps,
            lambda n: groups[n // m][n % m],
            count=lambda t: count(whole[t]),
            sink=world.book.sink,
        )
        parallel.zero.finish()
        losses.append(float(parallel.share_loss(loss)[0]) / count(whole[step]))
        optimizer.step()
        parallel.zero.publish()
        with torch.no_grad():
            schedule = parallel.schedule(m, evaluation=True)
            held = parallel.executor.run(schedule, groups[0].__getitem__, count=1, sink=world.book.sink)
        evaluated.append(float(parallel.share_loss(held)[0]) / count(whole[0]))
    return {"losses": losses, "evaluated": evaluated}


def delayed(steps: int) -> tuple[list[float], list[float]]:
    """The reference: one process, w(t+1) = AdamW(w(t), gradient of batch t at w(max(t-1, 0)))."""
    config = MODELS["gpt2"]
    model = Decoder(config, seed=7)
    initialise(model, InitSource(config, 3))
    named = dict(model.named_parameters())
    masters = {name: torch.nn.Parameter(parameter.detach().clone()) for name, parameter in named.items()}
    old = {name: parameter.detach().clone() for name, parameter in named.items()}
    optimizer = adamw([p for p in masters.values() if p.dim() >= 2], [p for p in masters.values() if p.dim() < 2])
    losses, evaluated = [], []

    def load(weights: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in named.items():
                parameter.copy_(weights[name])

    for step in range(steps):
        batch = global_batch(config, step)
        load(old)
        model.train()
        loss = model.loss(model(None, batch), batch.targets_BT.flatten()) / count(batch)
        model.zero_grad()
        loss.backward()
        losses.append(float(loss.detach()))
        old = {name: master.detach().clone() for name, master in masters.items()}
        for name, master in masters.items():
            master.grad = named[name].grad
        optimizer.step()
        load(masters)
        model.eval()
        first = global_batch(config, 0)
        with torch.no_grad():
            evaluated.append(float(model.loss(model(None, first), first.targets_BT.flatten())) / count(first))
    return losses, evaluated


@pytest.mark.parametrize(
    ("text", "world_size"),
    [
        ("pp=2 schedule=2bw micro=2", 2),
        ("pp=4 schedule=2bw micro=2", 4),
        ("pp=2 schedule=2bw micro=4 recompute=full", 2),
        ("pp=2 dp=2 zero=1 schedule=2bw micro=1", 4),
        ("schedule=2bw micro=4", 1),
    ],
)
def test_two_buffered_weights_equal_one_process_with_delayed_gradients(pool: Pool, text: str, world_size: int) -> None:
    steps = 6
    losses, evaluated = delayed(steps)
    for result in pool.run(world_size, run_windows, text, world_size, steps):
        assert result["losses"] == pytest.approx(losses, rel=1e-5)
        assert result["evaluated"] == pytest.approx(evaluated, rel=1e-5)
    for result in pool.run(world_size, run_windows, text, world_size, 1):
        assert result["losses"] == pytest.approx(losses[:1], rel=1e-5)


def run_wrong_window(connect: Connect) -> str:
    parallel, _ = build(connect, "micro=4", 1, MODELS["gpt2"], Run())
    with pytest.raises(ScheduleError) as caught:
        parallel.executor.run_window(
            two_bw(1, 2), 1, 3, lambda n: None, count=lambda t: 1, sink=parallel.world.book.sink
        )
    return str(caught.value)


def test_a_window_out_of_turn_is_refused(pool: Pool) -> None:
    assert "window 1 does not follow: the next of this run is 0" in pool.run(1, run_wrong_window)[0]


@pytest.mark.parametrize("text", ["zb-v virtual=2", "zb-h2", "dualpipe-v virtual=2"])
def test_over_gloo(pool: Pool, text: str) -> None:
    check_equal(pool, f"pp=2 schedule={text} micro=2", 2, MODELS["llama"], Run(steps=2, transport="gloo"))


def test_windows_over_gloo(pool: Pool) -> None:
    losses, _ = delayed(3)
    for result in pool.run(2, run_windows, "pp=2 schedule=2bw micro=2", 2, 3, "gloo"):
        assert result["losses"] == pytest.approx(losses, rel=1e-5)
