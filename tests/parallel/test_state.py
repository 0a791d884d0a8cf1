"""The state of a rank as stretches of tensors: nothing is missing, nothing there twice, and what is set comes back."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

from plait.checkpoint.layout import share
from plait.models.config import ModelConfig, parameter_shapes
from plait.parallel.state import MOMENTS, begin_moments, own_state, set_own_state, settle, stretches
from plait.train.exchange import counted_elements, pieces_of
from tests.parallel.cuts import Run, adamw, build, count, expert_models, global_batch, microbatches, models
from tests.pool import Connect, Pool

PLANS = [
    ("llama-tied", "tp=4", 4),  # two ranks share each KV head, the vocabulary is uneven
    ("llama-tied", "pp=4 zero=0", 4),  # both ends of the pipeline have the tied weight
    ("gpt2", "dp=2 cp=2 zero=1 zero_group=2", 4),
    ("llama", "dp=3 zero=2", 3),
    ("qwen3", "pp=2 dp=2 zero=3 precision=bf16", 4),
    ("deepseek", "dp=2 tp=2 ep=2 zero=1", 4),
    ("mixtral", "dp=2 tp=2 ep=2 expert_tp=2 zero=3", 4),
    ("llama", "pp=2 schedule=2bw dp=2 zero=1", 4),
]


def configs() -> dict[str, ModelConfig]:
    return {**models(), **expert_models()}


def held(connect: Connect, text: str, ranks: int, config: ModelConfig, run: Run) -> dict[str, Any]:
    """On one rank: what it would write (name, boxes), the elements it answers for, and its own state after a reset."""
    parallel, _ = build(connect, text, ranks, config, run)
    optimizer = adamw(*parallel.zero.optimizer_groups())
    begin_moments(parallel, optimizer, 5)
    rows = stretches(parallel, optimizer)
    pieces = pieces_of(rows, parallel.world.at)
    written = [(pieces[one.piece].name, one.box) for one in share(pieces, parallel.world.rank)]
    # Whatever is set in the stretches is what the next step computes on.
    for row in rows:
        row.values.copy_(torch.arange(row.start, row.start + row.values.numel()).view_as(row.values) / 1024)
    settle(parallel, step=3, previous=True)
    wrong = []
    with parallel.zero.whole():
        for one, view, _ in parallel.zero.parameters():
            expected = (torch.arange(one.numel).to(torch.float32) / 1024).to(view.dtype).view(one.shape)
            if not torch.equal(view, expected):
                wrong.append(one.name)
    steps = {float(state["step"]) for state in optimizer.state.values()}
    return {
        "written": written,
        "counted": counted_elements(rows, parallel.world),
        "wrong": wrong,
        "steps": steps,
    }


@pytest.mark.parametrize(("model", "text", "ranks"), PLANS, ids=[f"{m}-{t}" for m, t, _ in PLANS])
def test_every_element_is_written_once(pool: Pool, model: str, text: str, ranks: int) -> None:
    config = configs()[model]
    found = pool.run(ranks, held, text, ranks, config, Run(freeze=("layers.1.",)))
    shapes = parameter_shapes(config)
    trained = {n: s for n, s in shapes.items() if "layers.1." not in n and not n.endswith("router.bias")}
    wanted = {f"weights/{name}": shape for name, shape in shapes.items()}
    kinds = (*MOMENTS, "previous") if "2bw" in text else MOMENTS
    wanted |= {f"{kind}/{name}": shape for kind in kinds for name, shape in trained.items()}
    if config.moe is not None:
        layers = [layer for layer in range(config.num_layers) if config.moe_of(layer) is not None]
        wanted |= {f"router/layers.{layer}.share": (config.moe.num_experts,) for layer in layers}
    times = {name: np.zeros(shape, np.int64) for name, shape in wanted.items()}
    for name, box in itertools.chain.from_iterable(rank["written"] for rank in found):
        times[name][tuple(slice(*edge) for edge in box)] += 1
    assert [name for name, each in times.items() if not (each == 1).all()] == []
    for name, shape in wanted.items():
        assert sum(rank["counted"].get(name, 0) for rank in found) == math.prod(shape), name
    assert all(rank["wrong"] == [] for rank in found)
    assert all(rank["steps"] <= {5.0} for rank in found)  # a stage may have nothing that trains


def residuals(connect: Connect, text: str, config: ModelConfig) -> list[bool]:
    """Two more steps from what compression has kept, with a detour in between and without: the same gradients."""
    parallel, plan = build(connect, text, 2, config, Run())

    def step(number: int) -> list[torch.Tensor]:
        batch = global_batch(config, number)
        parallel.forward_backward(microbatches(batch, plan, parallel.world.at["dp"]), count(batch))
        return [values.clone() for _, _, values in parallel.zero.gradients()]

    step(0)
    kept = {name: value.clone() for name, value in own_state(parallel).items()}
    straight = step(1)
    set_own_state(parallel, {})
    empty = step(1)
    set_own_state(parallel, kept)
    again = step(1)
    return [
        all(torch.equal(a, b) for a, b in zip(straight, again, strict=True)),
        all(torch.equal(a, b) for a, b in zip(straight, empty, strict=True)),
    ]


@pytest.mark.parametrize("compress", ["topk:0.1", "powersgd:2"])
def test_what_compression_keeps_can_be_given_back(pool: Pool, compress: str) -> None:
    found = pool.run(2, residuals, f"dp=2 zero=1 compress={compress}", models()["llama"])
    assert found == [[True, False]] * 2
